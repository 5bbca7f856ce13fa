"""Random lives of a cache: at least 50 operations a run, mirrored on plain float lists and on the reference.

Contents equal the floats where data is lossless; states equal the reference byte for byte whatever the data; a row that moves keeps its
bytes; addresses stay where the contract of :class:`KiviCache` says so; what is refused changes nothing.
"""

from __future__ import annotations

import copy
import io
import os
import random

import pytest
import torch
from helpers import assert_same_rows, bits_of, reference_rows, valid_rows
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor

pytest.importorskip("transformers")

from transformers import LlamaConfig

from kivi_ops import KiviCache, KiviConfig, KiviState
from kivi_ops.reference import ReferenceCache, ReferenceRow

LAYERS, HEADS, KEY_DIM, VALUE_DIM, CAPACITY, ROWS = 2, 2, 8, 6, 72, 6
MODEL = LlamaConfig(num_hidden_layers=LAYERS, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=16)
BITS = st.sampled_from([(2, 2), (4, 2), (8, 8)])


class CacheLife(RuleBasedStateMachine):
    """``mirror[layer][row]``: the row's tokens, (Key [H, D_k], Value [H, D_v]) each. ``reference[layer]``: its rows in the reference."""

    device = "cpu"

    @initialize(
        bits=BITS,
        margin=st.sampled_from([0, 5, 16]),
        seal=st.sampled_from(["after_attention", "before_attention"]),
        dtype=st.sampled_from([torch.float32, torch.float16]),
        lossless=st.booleans(),
        padding=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    )
    def begin(self, bits: tuple[int, int], margin: int, seal: str, dtype: torch.dtype, lossless: bool, padding: list[int]) -> None:
        self.config = KiviConfig(*bits, group_size=4, residual_length=8, rollback_margin=margin, seal=seal)
        self.dtype, self.lossless, self.capacity = dtype, lossless, CAPACITY
        self.cache = KiviCache(MODEL, CAPACITY, self.config, left_padding=padding)
        shape = (len(padding), HEADS, KEY_DIM, dtype, self.device, VALUE_DIM)
        self.cache.early_initialization(*shape)
        self.length, self.longest = 0, 0
        self.forget(padding)

    def forget(self, padding: list[int]) -> None:
        self.padding, self.length = padding, 0
        self.mirror: list[list[list[tuple[Tensor, Tensor]]]] = [[[] for _ in padding] for _ in range(LAYERS)]
        self.reference = [
            ReferenceCache(self.config, len(padding), HEADS, self.capacity, KEY_DIM, VALUE_DIM, self.dtype, padding) for _ in range(LAYERS)
        ]

    # ------------------------------------------------------------------------------------------------------ what is there

    @property
    def states(self) -> list[KiviState]:
        return [layer.state for layer in self.cache.layers]

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for state in self.states for tensor in state.tensors().values()]

    def tokens(self) -> list[int]:
        return [max(0, self.length - padding) for padding in self.padding]

    def stored(self) -> list[list[dict[str, Tensor]]]:
        """Per layer and row, the bytes that are valid, boundaries as the next call finds them."""
        found = []
        for state in self.states:
            rolled_back = copy.copy(state)
            held = torch.tensor(self.tokens(), dtype=torch.int32)[:, None]
            object.__setattr__(rolled_back, "sealed", state.sealed.cpu().minimum(held))
            found.append(valid_rows(rolled_back, self.tokens()))
        return found

    def everything(self) -> list[dict[str, Tensor]]:
        return [{name: bits_of(tensor).clone() for name, tensor in state.tensors().items()} for state in self.states]

    def new_tokens(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Two levels a channel (Keys) or a token (Values) of which any group is restored exactly, or noise around 5."""
        generator = torch.Generator().manual_seed(seed)
        rows = len(self.padding)
        key, value = (torch.randn(rows, HEADS, count, dim, generator=generator) for dim in (KEY_DIM, VALUE_DIM))
        if self.lossless:
            key = torch.arange(KEY_DIM) - 3.0 + (key > 0) * (2**self.config.key_bits - 1)
            base = torch.randint(-8, 8, (rows, HEADS, count, 1), generator=generator)
            value = base + (value > 0) * (2.0**self.config.value_bits - 1)
        else:
            key, value = 5 + key, 5 + value
        return key.to(self.dtype), value.to(self.dtype)

    # ------------------------------------------------------------------------------------------------------------ the life

    @rule(count=st.integers(1, 12), seed=st.integers(0, 2**31))
    def append(self, count: int, seed: int) -> None:
        if self.length + count > self.capacity:
            self.refuse(ValueError, lambda: self.cache.update(*self.on_device(*self.new_tokens(count, seed)), 0))
            return
        held = self.addresses()
        for layer in range(LAYERS):
            key, value = self.new_tokens(count, seed + layer)
            self.cache.update(*self.on_device(key, value), layer)
            self.reference[layer].append(key, value, self.length)
            for row, padding in enumerate(self.padding):
                kept = slice(max(0, padding - self.length), None)
                self.mirror[layer][row] += list(zip(key[row, :, kept].unbind(1), value[row, :, kept].unbind(1), strict=True))
        self.length += count
        assert self.addresses() == held

    def on_device(self, *tensors: Tensor) -> list[Tensor]:
        return [tensor.to(self.device) for tensor in tensors]

    @rule(count=st.integers(1, 12), rejected=st.integers(1, 12), seed=st.integers(0, 2**31))
    def draft(self, count: int, rejected: int, seed: int) -> None:
        self.append(count, seed)
        self.crop(min(rejected, count))

    @rule(steps=st.integers(1, 9), seed=st.integers(0, 2**31))
    def decode(self, steps: int, seed: int) -> None:
        for step in range(steps):
            self.append(1, seed + step)

    @rule(count=st.integers(0, 20))
    def crop(self, count: int) -> None:
        held = self.addresses()
        self.cache.crop(-count)
        self.length = max(0, self.length - count)
        for layer in range(LAYERS):
            for row, tokens in enumerate(self.tokens()):
                del self.mirror[layer][row][tokens:]
        assert self.addresses() == held

    @rule(seed=st.integers(0, 2**31))
    def reorder(self, seed: int) -> None:
        held = self.addresses()
        chosen = random.Random(seed).choices(range(len(self.padding)), k=len(self.padding))
        self.move(chosen, lambda: self.cache.reorder_cache(torch.tensor(chosen, device=self.device)))
        assert self.addresses() == held

    @rule(seed=st.integers(0, 2**31), mask=st.booleans())
    def select(self, seed: int, mask: bool) -> None:
        rows = len(self.padding)
        chosen = random.Random(seed).sample(range(rows), random.Random(seed).randint(1, rows))
        indices = torch.tensor(chosen)
        if mask:
            chosen = sorted(chosen)
            indices = torch.zeros(rows, dtype=torch.bool).scatter(0, indices, True)
        self.move(chosen, lambda: self.cache.batch_select_indices(indices))

    @rule(repeats=st.integers(1, 3))
    def repeat(self, repeats: int) -> None:
        if repeats * len(self.padding) <= ROWS:
            chosen = [row for row in range(len(self.padding)) for _ in range(repeats)]
            self.move(chosen, lambda: self.cache.batch_repeat_interleave(repeats))

    def move(self, chosen: list[int], operation: object) -> None:
        """Rows become other rows: not a byte of what is stored may be made anew."""
        before = self.stored()
        operation()  # type: ignore[operator]
        self.padding = [self.padding[row] for row in chosen]
        for layer in range(LAYERS):
            self.mirror[layer] = [list(self.mirror[layer][row]) for row in chosen]
            reference = self.reference[layer]
            rows: list[ReferenceRow] = [copy.deepcopy(reference.rows[row]) for row in chosen]
            reference.rows, reference.left_padding = rows, list(self.padding)
            assert_same_rows(self.stored()[layer], [before[layer][row] for row in chosen])

    @rule(padding=st.integers(0, 9))
    def reset(self, padding: int) -> None:
        held = self.addresses()
        self.cache.reset()
        self.cache.set_left_padding([padding] * len(self.padding))
        self.forget([padding] * len(self.padding))
        assert self.addresses() == held

    @rule(in_place=st.booleans())
    def save_and_load(self, in_place: bool) -> None:
        file = io.BytesIO()
        torch.save(self.cache.state_dict(), file)
        before, held = self.everything(), self.addresses()
        if in_place:  # over whatever it holds by then
            for state in self.states:
                for tensor in state.tensors().values():
                    tensor.fill_(1)
        else:
            self.cache = KiviCache(MODEL, 8, self.config)
        file.seek(0)
        self.cache.load_state_dict(torch.load(file, weights_only=True))
        assert not in_place or self.addresses() == held
        self.assert_unchanged(before)

    @rule()
    def expect_drafts(self) -> None:
        """As ``generate`` does with an assistant: the margin grows, as far as there is room for it, and nothing else changes."""
        before = self.stored()
        self.cache.activate_past_recording()
        self.config = self.cache.config
        sealed = max(int(row["sealed"][1]) for row in before[0])
        assert self.config.rollback_margin == 32 or self.config.rollback_margin + sealed + 8 >= self.capacity
        for layer, reference in enumerate(self.reference):
            assert_same_rows(self.stored()[layer], before[layer])
            reference.config = self.config
            for row in reference.rows:
                row.config = self.config

    @rule(capacity=st.integers(CAPACITY - 24, CAPACITY + 24))
    def resize(self, capacity: int) -> None:
        before = self.stored()
        least = max([self.length, *self.padding] + [int(row["sealed"][1]) + 8 + self.config.rollback_margin for row in before[0]])
        if capacity < least and (capacity < self.length or any(int(row["sealed"][1]) for row in before[0])):
            self.refuse(ValueError, lambda: self.cache.resize(capacity))
            return
        if capacity < max(self.padding):
            self.refuse(ValueError, lambda: self.cache.resize(capacity))
            return
        self.cache.resize(capacity)
        self.capacity = capacity
        for layer, reference in enumerate(self.reference):
            assert_same_rows(self.stored()[layer], before[layer])
            grown = ReferenceCache(self.config, len(self.padding), HEADS, capacity, KEY_DIM, VALUE_DIM, self.dtype, self.padding)
            for row, old in zip(grown.rows, reference.rows, strict=True):
                for name in ("key", "value", "key_codes", "value_codes", "key_scale", "key_min", "value_scale", "value_min"):
                    new, was = getattr(row, name), getattr(old, name)
                    kept = min(new.shape[1], was.shape[1])
                    new[:, :kept] = was[:, :kept]
                row.sealed, row.tokens = old.sealed, old.tokens
            self.reference[layer] = grown

    # ------------------------------------------------------------------------------------------------------ what is refused

    @rule(case=st.sampled_from(["rows", "dtype", "select", "reorder", "repeat", "version", "layout", "layers", "max_cache_len", "torn"]))
    def refused(self, case: str) -> None:
        rows, cache = len(self.padding), self.cache
        key, value = self.new_tokens(1, 0)
        saved = cache.state_dict()
        if case == "rows":
            self.refuse(ValueError, lambda: cache.update(*self.on_device(key.repeat(2, 1, 1, 1), value.repeat(2, 1, 1, 1)), 0))
        elif case == "dtype":
            self.refuse(TypeError, lambda: cache.update(*self.on_device(key.bfloat16(), value.bfloat16()), 0))
        elif case == "select":
            self.refuse(IndexError, lambda: cache.batch_select_indices([0, rows]))
        elif case == "reorder":
            self.refuse(ValueError, lambda: cache.reorder_cache(torch.tensor([rows] * rows)))
        elif case == "repeat":
            self.refuse(ValueError, lambda: cache.batch_repeat_interleave(0))
        elif case == "torn":
            torn = [saved["layers"][0], {**saved["layers"][1], "sealed": torch.zeros(9, 2, dtype=torch.int32)}]
            self.refuse(ValueError, lambda: cache.load_state_dict(saved | {"layers": torn}))
        else:
            wrong = {"version": 0, "layout": "another", "layers": [], "max_cache_len": 2 * self.capacity}
            self.refuse(ValueError, lambda: cache.load_state_dict(saved | {case: wrong[case]}))

    def refuse(self, error: type[Exception], call: object) -> None:
        before, held = self.everything(), self.addresses()
        with pytest.raises(error):
            call()  # type: ignore[operator]
        self.assert_unchanged(before)
        assert self.addresses() == held

    def assert_unchanged(self, before: list[dict[str, Tensor]]) -> None:
        for layer, (then, now) in enumerate(zip(before, self.everything(), strict=True)):
            for name in then:
                assert torch.equal(then[name], now[name]), f"layer {layer}: {name} changed"

    # ----------------------------------------------------------------------------------------------------- what always holds

    @invariant()
    def states_equal_the_reference(self) -> None:
        assert self.cache.tokens_held() == self.length
        for layer, reference in enumerate(self.reference):
            for row, tokens in zip(reference.rows, self.tokens(), strict=True):
                row.tokens = tokens
                row.sealed = (min(row.sealed[0], tokens), min(row.sealed[1], tokens))
            assert self.states[layer].left_padding.tolist() == self.padding
            assert_same_rows(self.stored()[layer], reference_rows(reference))

    @invariant()
    def contents_equal_the_floats(self) -> None:
        for layer, state in enumerate(self.states):
            host = state.to("cpu")
            nothing = torch.zeros(len(self.padding), HEADS, 0, KEY_DIM, dtype=self.dtype)
            key, value = host.update(nothing, nothing[..., :VALUE_DIM], host.length.clone())
            for row, (padding, tokens) in enumerate(zip(self.padding, self.tokens(), strict=True)):
                assert len(self.mirror[layer][row]) == tokens
                found = key[row, :, padding : padding + tokens], value[row, :, padding : padding + tokens]
                if self.lossless and tokens:
                    for actual, expected in zip(found, zip(*self.mirror[layer][row], strict=True), strict=True):
                        assert torch.equal(actual, torch.stack(expected, 1))


def live(device: str) -> None:
    """As many lives as ``KIVI_EXAMPLES`` says, for a long search."""
    machine = type("CacheLife", (CacheLife,), {"device": device})
    examples = int(os.environ.get("KIVI_EXAMPLES", "8"))
    with torch.no_grad():
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
            ),
        )


def test_a_random_life() -> None:
    live("cpu")


@pytest.mark.gpu
def test_a_random_life_on_a_gpu() -> None:
    live("cuda")
