"""Models with a float cache of their own through ``backend="kivi"``: which spellings are rewritten, and a state that follows the cache."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_same_rows, valid_rows
from pass_models import CAPACITY, WIDTH, Model, Recorder, causal_mask, count_ops, repeat_kv, sdpa_repeat_kv
from torch import Tensor

import kivi_ops
from kivi_ops import KiviConfig, KiviState
from kivi_ops.config import SEAL_ORDERS
from kivi_ops.passes import last_report
from kivi_ops.passes.states import held_states, owned_state

R = 4
OPTIONS: dict[str, Any] = {"key_bits": 8, "value_bits": 8, "group_size": 4, "residual_length": R}
CONFIG = KiviConfig(**OPTIONS)
F = torch.nn.functional

Write = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Buffers(Model):
    """One layer over its own two buffers; ``write(cache, position, new)`` returns what attention reads. Keys and Values have two levels
    each, which 8 bits restore exactly."""

    def __init__(self, write: Write, spell: Any = sdpa_repeat_kv) -> None:
        super().__init__(spell)
        self.write = write
        self.register_buffer("k_cache", torch.zeros(2, 2, CAPACITY, 16))
        self.register_buffer("v_cache", torch.zeros(2, 2, CAPACITY, 16))

    def forward(self, x: Tensor, mask: Tensor, position: Any) -> Tensor:
        query, key, value = self.project(x)
        keys, values = self.write(self.k_cache, position, key.sign()), self.write(self.v_cache, position, value.sign())
        return self.o(self.spell(query, keys, values, mask).transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


def index_copy(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
    cache.index_copy_(2, position, new)
    return cache


def setitem(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
    cache[:, :, position] = new
    return cache


def slice_setitem(cache: Tensor, position: int, new: Tensor) -> Tensor:
    cache[:, :, position : position + new.shape[2]] = new
    return cache


def slice_copy(cache: Tensor, position: int, new: Tensor) -> Tensor:
    cache[:, :, position : position + new.shape[2]].copy_(new)
    return cache


def narrow_copy(cache: Tensor, position: int, new: Tensor) -> Tensor:
    cache.narrow(2, position, new.shape[2]).copy_(new)
    return cache


def eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ repeat_kv(k, 2).transpose(2, 3) * 0.25 + torch.where(mask, 0.0, torch.finfo(q.dtype).min)
    return torch.softmax(scores, dim=-1) @ repeat_kv(v, 2)


WRITES: dict[str, tuple[Write, type]] = {
    "index_copy_": (index_copy, Tensor),
    "index_put_": (setitem, Tensor),
    "slice-setitem": (slice_setitem, int),
    "slice-copy_": (slice_copy, int),
    "narrow-copy_": (narrow_copy, int),
}


def at(kind: type, start: int, new_tokens: int = 1) -> Any:
    return start if kind is int else torch.arange(start, start + new_tokens)


def step_input(start: int, new_tokens: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(start)
    return torch.randn(2, new_tokens, WIDTH, generator=generator), causal_mask(start, new_tokens)


def call(forward: Any, kind: type, start: int, new_tokens: int = 1) -> Tensor:
    with torch.no_grad():
        return forward(*step_input(start, new_tokens), at(kind, start, new_tokens))


def state_of(model: Buffers) -> KiviState:
    return owned_state(model.k_cache, model.v_cache, CONFIG).state


def assert_state_follows(key: Tensor, value: Tensor, tokens: int) -> None:
    """The state equals one that was given the float cache's tokens at once."""
    state = owned_state(key, value, CONFIG).state
    fresh = KiviState.allocate(CONFIG, *key.shape, value.shape[-1], key.dtype)
    fresh.append(key[:, :, :tokens], value[:, :, :tokens], torch.tensor(0))
    rows = [tokens] * key.shape[0]
    assert_same_rows(valid_rows(state, rows), valid_rows(fresh, rows))


# ------------------------------------------------------------------------------------------------------------- spellings


@pytest.mark.parametrize("spell", [sdpa_repeat_kv, eager_attention], ids=["sdpa", "eager"])
@pytest.mark.parametrize("write", WRITES)
def test_decode_over_a_models_own_buffers_is_rewritten_and_no_float_write_is_lost(write: str, spell: Any) -> None:
    spelled, kind = WRITES[write]
    model, reference = Buffers(spelled, spell), Buffers(spelled, spell)
    recorder = Recorder(strict=True, **OPTIONS)
    decode = torch.compile(model, backend=recorder, fullgraph=True)
    for start, new_tokens in ((0, 5), *((5 + step, 1) for step in range(2 * R + 3))):
        forward = model if new_tokens > 1 else decode
        expected = call(reference, kind, start, new_tokens)
        torch.testing.assert_close(call(forward, kind, start, new_tokens), expected, rtol=1e-4, atol=1e-5, msg=f"token {start}")
        assert torch.equal(model.k_cache, reference.k_cache) and torch.equal(model.v_cache, reference.v_cache)
    assert_state_follows(model.k_cache, model.v_cache, 5 + 2 * R + 3)

    assert len(recorder.modules) == (2 if kind is int else 1)  # an integer start is a constant first, then a symbol
    attention = "aten.scaled_dot_product_attention" if spell is sdpa_repeat_kv else "aten.softmax"
    float_write = {"index_copy_": "aten.index_copy_", "index_put_": "aten.index_put_"}.get(write, "aten.copy_")
    for before, module in zip(recorder.before, recorder.modules, strict=True):
        after = count_ops(module)
        assert (before[float_write], after[float_write]) == (2, 2)
        assert (before[attention], after[attention], after["kivi.attention"], after["kivi.append"]) == (1, 0, 1, 1)
        module.graph.lint()
        assert all("val" in node.meta for node in module.graph.nodes if node.op in ("placeholder", "call_function"))
    report = last_report()
    assert report is not None and report.rewritten[0].how.endswith(f"float cache by {float_write}") and report.rewritten[0].source


@pytest.mark.parametrize("seal", SEAL_ORDERS)
def test_attention_and_append_stand_in_the_order_that_seal_names(seal: str) -> None:
    recorder = Recorder(strict=True, seal=seal)
    call(torch.compile(Buffers(index_copy), backend=recorder), Tensor, 0)
    names = [str(node.target) for node in recorder.modules[0].graph.nodes if str(node.target).startswith("kivi.")]
    expected = ["kivi.attention.default", "kivi.append.default"]
    assert names == (expected if seal == "after_attention" else expected[::-1])


def test_several_tokens_at_arange_plus_start_are_rewritten() -> None:
    def write(cache: Tensor, start: Tensor, new: Tensor) -> Tensor:
        return index_copy(cache, torch.arange(new.shape[2]) + start, new)

    model, reference = Buffers(write), Buffers(write)
    decode = torch.compile(model, backend="kivi", options={"compiler": "aot_eager", "strict": True, **OPTIONS})
    start = 0
    for new_tokens in (6, 3, 1, 7):
        x, mask = step_input(start, new_tokens)
        with torch.no_grad():
            actual, expected = decode(x, mask, torch.tensor([start])), reference(x, mask, torch.tensor([start]))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        start += new_tokens
    assert_state_follows(model.k_cache, model.v_cache, start)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_columns_that_the_graph_does_not_know_are_checked_before_anything_is_written(dynamic: bool | None) -> None:
    """gpt-fast's prefill: several tokens at columns that are an input of the graph."""
    model, reference = Buffers(setitem), Buffers(setitem)
    forward = torch.compile(model, backend="kivi", dynamic=dynamic, options={"compiler": "eager", "strict": True, **OPTIONS})
    start = 0
    for new_tokens in (5, 3, 7):
        expected = call(reference, Tensor, start, new_tokens)
        torch.testing.assert_close(call(forward, Tensor, start, new_tokens), expected, rtol=1e-4, atol=1e-5)
        start += new_tokens
    report = last_report()
    assert report is not None and report.rewritten[0].how.endswith("float cache by aten.index_put_, columns checked at run time")
    with torch.no_grad(), pytest.raises(ValueError, match=re.escape("the new tokens go to the cache's columns [15, 17, 18]; allowed")):
        forward(*step_input(start, 3), torch.tensor([15, 17, 18]))
    assert torch.equal(model.k_cache, reference.k_cache)
    assert_state_follows(model.k_cache, model.v_cache, start)
    torch.testing.assert_close(call(forward, Tensor, start, 3), call(reference, Tensor, start, 3), rtol=1e-4, atol=1e-5)


def test_a_float_attribute_under_dynamic_sizes_is_the_number_that_it_has() -> None:
    """Dynamo makes it an input of the graph and a symbol; another number is another graph."""

    class Scaled(Buffers):
        scaling = 0.3

        def __init__(self) -> None:
            super().__init__(index_copy, lambda q, k, v, mask: self.attend(q, k, v, mask))

        def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=mask, scale=self.scaling)

    model, reference = Scaled(), Scaled()
    decode = torch.compile(model, backend="kivi", dynamic=True, options={"compiler": "aot_eager", "strict": True, **OPTIONS})
    for start in range(4):
        model.scaling = reference.scaling = 0.3 if start < 2 else 0.7
        torch.testing.assert_close(call(decode, Tensor, start), call(reference, Tensor, start), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ counter-examples


def reads_again(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
    return index_copy(cache, position, new + cache.mean())


def writes_twice(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
    index_copy(cache, position, new)
    return index_copy(cache, position + 1, new)


def writes_nothing(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
    return cache


def rolls(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
    cache.copy_(torch.cat([cache[:, :, 1:], new], dim=2))
    return cache


def joins(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
    return torch.cat([cache[:, :, 1:], new], dim=2)


def reads_a_prefix(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
    return F.pad(index_copy(cache, position, new)[:, :, :32], (0, 0, 0, CAPACITY - 32))


def moves_back(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
    position.add_(1)
    index_copy(cache, position, new)
    position.sub_(1)
    return cache


def no_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2))


def reads_after(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa_repeat_kv(q, k, v, mask) + k.sum()


def two_attentions(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa_repeat_kv(q, k, v, mask) + sdpa_repeat_kv(q * 2, k, v, mask)


REFUSED: dict[str, tuple[Write, Any, int, str]] = {
    "another-reader-before": (reads_again, sdpa_repeat_kv, 1, "the Keys cache has another reader, aten.mean ("),
    "another-reader-after": (index_copy, reads_after, 1, "the Keys cache has another reader, aten.sum ("),
    "two-attentions": (index_copy, two_attentions, 1, "the Keys cache has another reader, aten.reshape ("),
    "two-writes": (writes_twice, sdpa_repeat_kv, 1, "the Keys cache is written 2 times, by aten.index_copy_ ("),
    "cross-attention": (writes_nothing, sdpa_repeat_kv, 1, "come from an input that this graph does not write: cross-attention"),
    "rolled": (
        rolls,
        sdpa_repeat_kv,
        1,
        "all columns of the Keys cache are written anew by aten.copy_ (...), as in a window that rolls",
    ),
    "joined": (joins, sdpa_repeat_kv, 1, "the Keys are joined with the past by aten.cat ("),
    "padded-prefix": (reads_a_prefix, sdpa_repeat_kv, 1, "the Keys are no cache: they come from aten."),
    "no-mask": (index_copy, no_mask, 1, "attention over all 48 columns has no mask, so it sees unwritten ones"),
    "position-moved": (moves_back, sdpa_repeat_kv, 1, "the position is changed in place before it is used, by aten.add_ ("),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_stays_float_with_the_reason(case: str) -> None:
    write, spell, new_tokens, reason = REFUSED[case]
    model, reference, recorder = Buffers(write, spell), Buffers(write, spell), Recorder()
    decode = torch.compile(model, backend=recorder, fullgraph=True)
    for start in (0, 3):
        torch.testing.assert_close(call(decode, Tensor, start, new_tokens), call(reference, Tensor, start, new_tokens))
    assert torch.equal(model.k_cache, reference.k_cache)
    report = last_report()
    assert report is not None and len(report.refused) >= 1 and not report.rewritten
    pattern = ".*".join(map(re.escape, reason.split("...")))
    assert re.search(pattern, report.refused[0].how), report.refused[0].how
    assert report.refused[0].source
    assert not any(op.startswith("kivi") for after in recorder.after for op in after)


def test_keys_and_values_at_positions_of_their_own_stay_float() -> None:
    class Apart(Buffers):
        def forward(self, x: Tensor, mask: Tensor, position: Tensor) -> Tensor:
            query, key, value = self.project(x)
            keys, values = index_copy(self.k_cache, position, key), index_copy(self.v_cache, position + 1, value)
            return self.spell(query, keys, values, mask)

    call(torch.compile(Apart(index_copy), backend=Recorder()), Tensor, 0)
    report = last_report()
    assert report is not None and "Keys and Values are written at positions of their own, by " in report.refused[0].how


def test_strict_refuses_and_gradients_stay_float() -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="(?s)option 'strict' is True.*0 of 1.*has no mask"):
        call(torch.compile(Buffers(index_copy, no_mask), backend="kivi", options={"strict": True}), Tensor, 0)
    model = torch.compile(Buffers(writes_nothing), backend="kivi", options={"compiler": "eager"})
    model(*step_input(0), torch.tensor([0])).sum().backward()
    report = last_report()
    assert report is not None and report.note == "left float: it needs gradients; run the model under torch.no_grad()"


# ------------------------------------------------------------------------------------------------- whose writes are whose


def decoder(model: Buffers) -> Any:
    return torch.compile(model, backend="kivi", options={"compiler": "eager", "strict": True, **OPTIONS})


def test_a_write_from_outside_is_taken_over_and_none_of_ours_is() -> None:
    model, reference = Buffers(index_copy), Buffers(index_copy)
    decode = decoder(model)
    for start, new_tokens in ((0, 5), (5, 1), (6, 1), (7, 4), (11, 1), (12, 1)):
        forward = model if new_tokens > 1 else decode
        torch.testing.assert_close(
            call(forward, Tensor, start, new_tokens), call(reference, Tensor, start, new_tokens), rtol=1e-4, atol=1e-5
        )
    state = state_of(model)
    state.value_window.fill_(float("nan"))  # no takeover mends it, for the last write was ours
    assert call(decode, Tensor, 13).isnan().all()
    model.k_cache.mul_(1)  # a write from outside
    call(reference, Tensor, 13)
    torch.testing.assert_close(call(decode, Tensor, 14), call(reference, Tensor, 14), rtol=1e-4, atol=1e-5)  # mended
    assert state_of(model) is state


def test_a_smaller_position_goes_back() -> None:
    model, reference = Buffers(index_copy), Buffers(index_copy)
    decode = decoder(model)
    for start in (*range(11), *range(6, 13), *range(9)):  # a rollback, then a reset by position alone
        torch.testing.assert_close(call(decode, Tensor, start), call(reference, Tensor, start), rtol=1e-4, atol=1e-5, msg=f"at {start}")


def test_a_cache_without_a_version_counter_is_taken_over_before_every_step(caplog: pytest.LogCaptureFixture) -> None:
    model, reference = Buffers(index_copy), Buffers(index_copy)
    decode = decoder(model)
    with torch.inference_mode():
        model.k_cache, model.v_cache = torch.zeros_like(model.k_cache), torch.zeros_like(model.v_cache)
        with caplog.at_level(logging.WARNING, logger="kivi_ops.passes"):
            for start in range(7):
                if start == 4:  # what no counter could show
                    model.k_cache[:, :, :4] *= -1
                    reference.k_cache[:, :, :4] *= -1
                actual = decode(*step_input(start), at(Tensor, start))
                torch.testing.assert_close(actual, reference(*step_input(start), at(Tensor, start)), rtol=1e-4, atol=1e-5)
    assert sum("torch.inference_mode()" in record.getMessage() for record in caplog.records) == 1


def test_two_configurations_over_one_cache_have_a_state_each() -> None:
    model, reference = Buffers(index_copy), Buffers(index_copy)
    first = decoder(model)
    second = torch.compile(model, backend="kivi", options={"compiler": "eager", **OPTIONS, "group_size": 2})
    for start in range(10):
        forward = first if start % 3 else second
        torch.testing.assert_close(call(forward, Tensor, start), call(reference, Tensor, start), rtol=1e-4, atol=1e-5)


def test_the_state_goes_when_the_cache_goes() -> None:
    gc.collect()
    before = len(held_states())
    model = Buffers(index_copy)
    decode = decoder(model)
    call(decode, Tensor, 0)
    assert len(held_states()) == before + 1
    model.k_cache, model.v_cache = torch.zeros(2, 2, CAPACITY, 16), torch.zeros(2, 2, CAPACITY, 16)
    gc.collect()
    assert len(held_states()) == before


# ------------------------------------------------------------------------------------------------------ explain, the log


def test_explain_prints_the_sites_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = Buffers(index_copy)
    before = len(held_states())
    report = kivi_ops.explain(model, *step_input(0), torch.tensor([0]))
    assert [site.rewritten for site in report.sites] == [True]
    assert capsys.readouterr().out.rstrip("\n") == str(report)
    assert not model.k_cache.any() and len(held_states()) == before
    refused = kivi_ops.explain(Buffers(index_copy, no_mask), *step_input(0), position=torch.tensor([0]))
    assert not refused.rewritten and "has no mask" in refused.refused[0].how and "pass_models" not in refused.refused[0].source


def test_how_many_were_rewritten_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kivi_ops.passes"):
        call(decoder(Buffers(index_copy)), Tensor, 0)
    assert [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "kivi_ops.passes"] == [
        ("INFO", "1 of 1 attention sites rewritten")
    ]
