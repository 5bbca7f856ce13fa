"""``kivi_ops.export.plain``: the operators as tensor expressions give the operators' numbers, bit for bit where the contract says so."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from helpers import ATTENTION_TOLERANCE, assert_close, assert_same_rows, bits_of, poisoned_state, random_tokens, valid_rows

from kivi_ops import KiviConfig, KiviState
from kivi_ops.export import plain


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def plain_append(state: KiviState, key, value, position, count=None) -> None:
    plain.append(key, value, *state.tensors().values(), position, count, **state.config.op_kwargs(state.capacity, state.dtype))


def plain_attention(state: KiviState, query, key, value, position, **other):
    read = list(state.tensors().values())[:-1]
    kwargs = state.config.read_kwargs(state.capacity, state.dtype)
    return plain.attention(query, key, value, *read, position, **other, **kwargs, seal=state.config.seal)


CASES = {
    "2-bit": (KiviConfig(group_size=8, residual_length=16), 32, 32, torch.float32),
    "before-margin": (KiviConfig(4, 2, 8, 16, seal="before_attention", rollback_margin=5), 64, 128, torch.float16),
    "D80-D96": (KiviConfig(8, 4, group_size=32, residual_length=32), 80, 96, torch.bfloat16),
    "float32-metadata": (KiviConfig(2, 8, 4, 8, metadata_dtype=torch.float32), 20, 16, torch.float16),
    "all-in-the-window": (KiviConfig(group_size=32, residual_length=128), 16, 16, torch.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_random_histories_leave_the_same_state_and_give_the_same_outputs(name: str) -> None:
    config, key_dim, value_dim, dtype = CASES[name]
    capacity, rows, padding = 100, 3, [0, 5, 17]
    states = [poisoned_state(config, rows, 2, capacity, key_dim, value_dim, dtype, padding) for _ in range(2)]
    chance, longest = random.Random(name), 0
    for step in range(40):
        new_tokens = chance.choice([1, 1, 1, 2, 7, 33])
        start = longest if chance.random() < 0.8 else chance.randrange(longest + 1)
        if start + new_tokens > capacity + 3:
            start = 0
        longest = start + new_tokens
        position = torch.full((rows, 1), start)
        if chance.random() < 0.2:
            position[1] = max(0, start - chance.randrange(4))
        count = torch.tensor(chance.randrange(new_tokens + 1)) if step == 7 else None
        query = random_tokens(rows, 4, new_tokens, key_dim, dtype, seed=3 * step) - 5
        key, value = (random_tokens(rows, 2, new_tokens, dim, dtype, seed=3 * step + i) for i, dim in ((1, key_dim), (2, value_dim)))
        masks = {
            "none": {},
            "causal": {"is_causal": True},
            "bool": {"attn_mask": torch.rand(rows, 1, new_tokens, capacity, generator=torch.Generator().manual_seed(step)) > 0.2},
            "float": {"attn_mask": torch.randn(1, 4, 1, max(new_tokens, 60), generator=torch.Generator().manual_seed(step))},
            "one": {"attn_mask": torch.ones(rows, 1, 1, 1, dtype=torch.bool)},
            "softcap": {"is_causal": True, "softcap": 5.0, "scale": 0.3},
        }
        masks = {kind: mask for kind, mask in masks.items() if kind == chance.choice(list(masks)) or step % 10 == 0}
        for after in (False, True):
            if after == (config.seal == "before_attention"):
                for kind, mask in masks.items():
                    expected = states[0].attention(query, key, value, position, **mask)
                    actual = plain_attention(states[1], query, key, value, position, **mask)
                    assert_close(f"step {step}, {kind}", actual, expected, 2 * ATTENTION_TOLERANCE[dtype])
            if not after:
                if config.seal == "before_attention":
                    _append_both(states, key, value, position, count)
        if config.seal == "after_attention":
            _append_both(states, key, value, position, count)
        starts = [min(int(p), capacity) for p in position[:, 0]]
        given = new_tokens if count is None else int(count)
        tokens = [max(0, min(start + given, capacity) - pads) for start, pads in zip(starts, padding, strict=True)]
        assert_same_rows(valid_rows(states[1], tokens), valid_rows(states[0], tokens))
        assert states[1].length == states[0].length
    for tensor in states[1].tensors():
        assert torch.equal(bits_of(getattr(states[1], tensor)), bits_of(getattr(states[0], tensor))), f"{tensor}: also what is not valid"


def _append_both(states: list[KiviState], key, value, position, count) -> None:
    states[0].append(key, value, position, count)
    plain_append(states[1], key, value, position, count)


def test_a_row_past_its_capacity_is_nan_and_one_that_sees_nothing_is_zero() -> None:
    state = poisoned_state(KiviConfig(group_size=8, residual_length=8), 2, 1, 16, 8, 8, torch.float32)
    query, key, value = (random_tokens(2, 1, 2, 8, seed=i) for i in range(3))
    position = torch.tensor([[15], [0]])
    output = plain_attention(state, query, key, value, position, attn_mask=torch.zeros(2, 1, 2, 16, dtype=torch.bool))
    assert output[0].isnan().all() and (output[1] == 0).all()


def test_values_that_are_not_finite_are_shown() -> None:
    config = KiviConfig(group_size=8, residual_length=8)
    states = [KiviState.allocate(config, 1, 1, 64, 8, 8, torch.float32) for _ in range(2)]
    key, value = random_tokens(1, 1, 33, 8), random_tokens(1, 1, 33, 8, seed=1)
    key[0, 0, 3, 2], value[0, 0, 5, 4] = float("inf"), float("nan")
    _append_both(states, key, value, torch.tensor(0), None)
    for name in ("key_records", "value_records"):
        assert torch.equal(getattr(states[1], name), getattr(states[0], name))


class Step(torch.nn.Module):
    """Attention and append over a state of its own."""

    def __init__(self, config: KiviConfig) -> None:
        super().__init__()
        self.held = KiviState.allocate(config, 2, 2, 96, 32, 32, torch.float32)
        for name, tensor in self.held.tensors().items():
            self.register_buffer(name, tensor)

    def forward(self, query, key, value, start):
        state = [getattr(self, name) for name in self.held.tensors()]
        config = self.held.config
        output = plain.attention(
            query, key, value, *state[:-1], start, is_causal=True, **config.read_kwargs(96, torch.float32), seal=config.seal
        )
        plain.append(key, value, *state, start, None, **config.op_kwargs(96, torch.float32))
        return output


def test_nothing_asks_how_many_the_new_tokens_are() -> None:
    """A compiler would take the answer for granted, and the package be wrong for other lengths (seen in torch 2.11 and 2.13)."""
    size = torch.export.Dim("tokens", min=1, max=96)
    inputs = [random_tokens(2, heads, 7, 32) for heads in (4, 2, 2)]
    program = torch.export.export(
        Step(KiviConfig(group_size=8, residual_length=16)), (*inputs, torch.tensor(0)), dynamic_shapes=({2: size},) * 3 + (None,)
    )
    assert len(program.range_constraints) == 1
