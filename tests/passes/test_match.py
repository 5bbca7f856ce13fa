"""Which spellings of attention are rewritten, that they still mean the same, and why the others are left alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_models import (
    CAPACITY,
    PREFILL_AND_DECODE,
    Model,
    Recorder,
    Spelling,
    assert_same_state,
    no_mask,
    repeat_kv,
    run_steps,
    sdpa_repeat_kv,
)
from torch import Tensor

from kivi_ops import KiviState
from kivi_ops.config import SEAL_ORDERS
from kivi_ops.passes import last_report, reports

F = torch.nn.functional


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------------------------- spellings


def sdpa_equal_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask)


def sdpa_enable_gqa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)


def sdpa_repeat_interleave(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=-3), attn_mask=mask, scale=1.0)


def sdpa_expand_flatten(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (x.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def sdpa_copies(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = k.to(q.dtype).contiguous(), v.clone()[:, :, :CAPACITY]
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2).contiguous(), repeat_kv(v, 2), attn_mask=mask[:, :, :, : k.shape[-2]])


def sdpa_one_mask_for_all_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=mask[:1])


def sdpa_mask_per_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(4, 1, 1)
    bias = -slopes * torch.arange(CAPACITY).flip(0)  # relative to no token, so the same for all queries
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=mask + bias)


def _eager(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scores: Callable[[Tensor], Tensor], repeat: Callable[[Tensor, int], Tensor] = repeat_kv
) -> Tensor:
    weights = scores(torch.matmul(q, repeat(k, 2).transpose(2, 3))) + mask[:, :, :, : k.shape[-2]]
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.1, training=False)
    return torch.matmul(weights, repeat(v, 2))


def eager_scaled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return _eager(q, k, v, mask, lambda s: s * 0.25)


def eager_divided(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return _eager(q, k, v, mask, lambda s: s / math.sqrt(16) * 0.5)


def eager_query_scaled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return _eager(q * 0.25, k, v, mask, lambda s: s)


def eager_softcap(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return _eager(q, k, v, mask, lambda s: torch.tanh(s * 2.0 / 1.5) * 1.5)


def eager_in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = torch.matmul(q, repeat_kv(k, 2).mT)
    weights *= 0.25
    weights += mask
    return torch.matmul(weights.softmax(-1), repeat_kv(v, 2))


def eager_mask_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    keys = repeat_kv(k, 2).permute(0, 1, 3, 2)
    return torch.matmul(torch.softmax(mask + 0.25 * (q @ keys), dim=3).to(v.dtype), repeat_kv(v, 2))


def eager_one_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return _eager(q, k, v, mask, lambda s: s * 0.25, repeat=lambda x, _: x)


def top_left_causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), is_causal=True)


def mask_of_three_dimensions(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=mask[0])


def prefix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = k[:, :, :32], v[:, :, :32]
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=mask[..., :32])


def masked_fill(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ repeat_kv(k, 2).transpose(2, 3)).masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1) @ repeat_kv(v, 2)


def two_additive_masks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    bias = torch.linspace(-1.0, 1.0, CAPACITY)
    scores = (q @ repeat_kv(k, 2).transpose(2, 3)) + bias + mask
    return torch.softmax(scores, dim=-1) @ repeat_kv(v, 2)


def where_seen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ repeat_kv(k, 2).transpose(2, 3) * 0.25
    scores = torch.where(mask, scores, torch.full((), torch.finfo(torch.float32).min))
    return torch.softmax(scores, dim=-1) @ repeat_kv(v, 2)


def where_hidden_and_added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ repeat_kv(k, 2).transpose(2, 3) * 0.25 + torch.linspace(-1.0, 1.0, CAPACITY)
    scores = torch.where(~mask, -torch.inf, scores)
    return torch.softmax(scores.float(), dim=-1).to(q.dtype) @ repeat_kv(v, 2)


def keys_scaled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    root = 16**-0.25
    return F.scaled_dot_product_attention(q * root, repeat_kv(k * root, 2), repeat_kv(v, 2), attn_mask=mask, scale=1.0)


FLOAT, BOOL = torch.float32, torch.bool
MATCHED: dict[str, tuple[Spelling, torch.dtype, dict[str, int], str]] = {
    "sdpa-repeat_kv": (sdpa_repeat_kv, BOOL, {}, "sdpa, heads x2, bool mask"),
    "sdpa-repeat_kv-float-mask": (sdpa_repeat_kv, FLOAT, {}, "sdpa, heads x2, float mask"),
    "sdpa-equal-heads": (sdpa_equal_heads, BOOL, {"kv_heads": 4}, "sdpa, bool mask"),
    "sdpa-one-kv-head": (sdpa_equal_heads, BOOL, {"kv_heads": 1}, "sdpa, bool mask"),
    "sdpa-enable_gqa-scale": (sdpa_enable_gqa, BOOL, {}, "sdpa, enable_gqa, bool mask"),
    "sdpa-repeat_interleave-scale-1": (sdpa_repeat_interleave, BOOL, {}, "sdpa, heads x2, bool mask"),
    "sdpa-expand-flatten": (sdpa_expand_flatten, BOOL, {}, "sdpa, heads x2, bool mask"),
    "sdpa-copies-and-whole-slices": (sdpa_copies, BOOL, {}, "sdpa, heads x2, bool mask"),
    "sdpa-Dv24": (sdpa_repeat_kv, BOOL, {"value_dim": 24}, "sdpa, heads x2, bool mask"),
    "sdpa-one-mask-for-all-rows": (sdpa_one_mask_for_all_rows, BOOL, {}, "sdpa, heads x2, bool mask"),
    "sdpa-mask-per-head": (sdpa_mask_per_head, FLOAT, {}, "sdpa, heads x2, float mask"),
    "eager-scaled": (eager_scaled, FLOAT, {}, "eager, heads x2, float mask"),
    "eager-divided": (eager_divided, FLOAT, {}, "eager, heads x2, float mask"),
    "eager-query-scaled": (eager_query_scaled, FLOAT, {}, "eager, heads x2, float mask"),
    "eager-softcap": (eager_softcap, FLOAT, {}, "eager, heads x2, float mask, softcap"),
    "eager-in-place": (eager_in_place, FLOAT, {}, "eager, heads x2, float mask"),
    "eager-mask-first": (eager_mask_first, FLOAT, {}, "eager, heads x2, float mask"),
    "eager-one-kv-head": (eager_one_head, FLOAT, {"kv_heads": 1}, "eager, float mask"),
    "sdpa-is_causal-over-all-columns": (top_left_causal, BOOL, {}, "sdpa, heads x2, is_causal"),
    "sdpa-mask-of-3-dimensions": (mask_of_three_dimensions, BOOL, {}, "sdpa, heads x2, bool mask"),
    "sdpa-first-columns": (prefix, BOOL, {}, "sdpa, heads x2, bool mask"),
    "sdpa-keys-scaled": (keys_scaled, BOOL, {}, "sdpa, heads x2, bool mask"),
    "eager-masked_fill": (masked_fill, BOOL, {}, "eager, heads x2, bool mask"),
    "eager-where": (where_seen, BOOL, {}, "eager, heads x2, bool mask"),
    "eager-where-hidden-and-bias": (where_hidden_and_added, BOOL, {}, "eager, heads x2, bool mask, float mask"),
    "eager-two-additive-masks": (two_additive_masks, FLOAT, {}, "eager, heads x2, float mask"),
}
BOTH_ORDERS = ("sdpa-repeat_kv", "eager-softcap")
CASES = [(case, seal) for case in MATCHED for seal in (SEAL_ORDERS if case in BOTH_ORDERS else SEAL_ORDERS[:1])]


@pytest.mark.parametrize(("case", "seal"), CASES, ids=[f"{case}-{seal}" for case, seal in CASES])
def test_a_spelling_is_rewritten_and_means_the_same(case: str, seal: str) -> None:
    spell, dtype, sizes, spelling = MATCHED[case]
    model, recorder = Model(spell, **sizes), Recorder()
    expected_state, state = model.state(seal), model.state(seal)
    expected = run_steps(model, expected_state, dtype, PREFILL_AND_DECODE)
    actual = run_steps(torch.compile(model, backend=recorder, fullgraph=True), state, dtype, PREFILL_AND_DECODE)
    for step, (left, right) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5, msg=lambda text, step=step: f"step {step}: {text}")
    assert_same_state(state, expected_state)

    assert len(recorder.before) == 2  # the prefill and the decode step
    attention = "aten.scaled_dot_product_attention" if spelling.startswith("sdpa") else "aten.softmax"
    for before, after in zip(recorder.before, recorder.after, strict=True):
        assert (before["kivi.update"], before[attention]) == (1, 1)
        assert (after["kivi.update"], after[attention]) == (0, 0)
        assert (after["kivi.attention"], after["kivi.append"]) == (1, 1)
        assert after["aten.linear"] == before["aten.linear"] == 4
    report = last_report()
    assert report is not None and [site.how for site in report.rewritten] == [spelling]
    assert re.fullmatch(r"(test_match|pass_models)\.py:\d+ in \w+", report.rewritten[0].source)


def test_what_the_attention_node_says_is_carried_over() -> None:
    for spell, scale, softcap in ((sdpa_repeat_kv, None, None), (sdpa_enable_gqa, 0.3, None), (sdpa_repeat_interleave, 1.0, None)):
        assert _attention_arguments(spell, torch.bool) == (False, scale, softcap)
    assert _attention_arguments(eager_query_scaled, torch.float32) == (False, 1.0, None)
    assert _attention_arguments(eager_divided, torch.float32) == (False, 0.125, None)
    assert _attention_arguments(eager_softcap, torch.float32) == (False, 2.0, 1.5)


def _attention_arguments(spell: Spelling, dtype: torch.dtype) -> tuple[Any, ...]:
    model, recorder = Model(spell), Recorder()
    torch._dynamo.reset()
    run_steps(torch.compile(model, backend=recorder), model.state(), dtype, [1])
    (node,) = recorder.modules[0].graph.find_nodes(op="call_function", target=torch.ops.kivi.attention.default)
    return node.args[11:]


# ------------------------------------------------------------------------------------------------------ counter-examples


def tiled_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), attn_mask=mask)


def heads_in_the_other_order(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (x[:, None].expand(-1, 2, -1, -1, -1).reshape(q.shape[0], 4, -1, 16) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def later_columns(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = k[:, :, 8:], v[:, :, 8:]
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=mask[..., 8:])


def fill_that_hides_nothing(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ repeat_kv(k, 2).transpose(2, 3)).masked_fill(~mask, -1.0)
    return torch.softmax(scores, dim=-1) @ repeat_kv(v, 2)


def values_scaled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v * 2.0, 2), attn_mask=mask)


def sdpa_dropout(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=mask, dropout_p=0.5)


def eager_dropout(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = F.dropout(torch.softmax(q @ repeat_kv(k, 2).transpose(2, 3), dim=-1), 0.5, training=True)
    return weights @ repeat_kv(v, 2)


def mask_of_one_column(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=mask[..., :1])


def bool_mask_added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ repeat_kv(k, 2).transpose(2, 3) + mask, dim=-1) @ repeat_kv(v, 2)


def softmax_over_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ repeat_kv(k, 2).transpose(2, 3) + mask.float(), dim=-2) @ repeat_kv(v, 2)


def tanh_of_another_kind(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return _eager(q, k, v, mask.float(), lambda s: torch.tanh(s / 2.0) * 3.0)


def sink(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ repeat_kv(k, 2).transpose(2, 3) + mask.float()
    scores = torch.cat([scores, torch.zeros_like(scores[..., :1])], dim=-1)
    return torch.softmax(scores, dim=-1)[..., :-1] @ repeat_kv(v, 2)


def weights_read_again(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = torch.softmax(q @ repeat_kv(k, 2).transpose(2, 3) + mask.float(), dim=-1)
    return weights @ repeat_kv(v, 2) + weights.sum()


def keys_read_again(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa_repeat_kv(q, k, v, mask) + k.sum()


def two_attentions(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa_repeat_kv(q, k, v, mask) + sdpa_repeat_kv(q * 2, k, v, mask)


def attends_with_other_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, torch.ones_like(repeat_kv(v, 2)), repeat_kv(v, 2), attn_mask=mask) + k.mean()


def swapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(v, 2), repeat_kv(k, 2), attn_mask=mask)


def last_query_only(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    attended = F.scaled_dot_product_attention(q[:, :, -1:], repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=mask[:, :, -1:])
    return attended.expand(q.shape[0], 4, q.shape[2], 16)


def in_another_dtype(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.to(torch.float64) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=mask).float()


def einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bhsd,bhcd->bhsc", q, repeat_kv(k, 2)) + mask.float()
    return torch.einsum("bhsc,bhcd->bhsd", torch.softmax(scores, dim=-1), repeat_kv(v, 2))


def not_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return q + k.sum() + v.sum()


REFUSED: dict[str, tuple[Spelling, str]] = {
    "heads-tiled": (tiled_heads, "heads are tiled by aten.repeat (..., which orders them otherwise than grouped attention does"),
    "heads-expanded-in-the-other-order": (heads_in_the_other_order, "the cache is read by aten.reshape (...), which is no attention"),
    "no-mask": (no_mask, "attention over all 48 columns has no mask, so it sees unwritten ones"),
    "later-columns": (later_columns, "attention reads the Keys from column 8 on, by aten."),
    "fill-that-hides-nothing": (fill_that_hides_nothing, "sets scores to -1.0; allowed: -10000 or less, which hides"),
    "values-scaled": (values_scaled, "the Values are multiplied by 2.0 before attention"),
    "sdpa-dropout": (sdpa_dropout, "attention drops out weights (dropout_p=0.5)"),
    "eager-dropout": (eager_dropout, "attention drops out weights (p=0.5)"),
    "mask-1-wide": (mask_of_one_column, "the mask is 1 columns wide, which hides no unwritten column; allowed: 48"),
    "bool-mask-added": (bool_mask_added, "a mask of torch.bool is added to the scores; allowed: a float one"),
    "softmax-over-queries": (softmax_over_queries, "softmax runs over dimension -2, not over the columns"),
    "tanh-without-softcap": (tanh_of_another_kind, "which is no softcap tanh(x / c) * c"),
    "sink": (sink, "attention weights go through aten.slice ("),
    "weights-read-again": (weights_read_again, "the attention weights have another reader, aten.sum ("),
    "keys-read-again": (keys_read_again, "the Keys have another reader, aten.sum ("),
    "two-attentions": (two_attentions, "2 attentions read one update"),
    "other-keys": (attends_with_other_keys, "reads the Values of this update but Keys of aten.ones_like ("),
    "keys-as-values": (swapped, "the cache is read by aten.scaled_dot_product_attention ("),
    "last-query-only": (last_query_only, "the query has shape [2, 4, 1, 16]; allowed: [2, heads, 5, D]"),
    "another-dtype": (in_another_dtype, "the cache is read by aten.to ("),
    "einsum": (einsum, "the cache is read by aten.einsum ("),
    "no-attention": (not_attention, "the cache is read by aten.sum ("),
}


def _pattern(reason: str) -> str:
    """``(...`` in a reason stands for a source line."""
    return ".*".join(re.escape(part) for part in reason.split("..."))


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_left_as_it_is_with_the_reason(case: str) -> None:
    spell, reason = REFUSED[case]
    model, recorder = Model(spell), Recorder()
    expected_state, state = model.state(), model.state()
    torch.manual_seed(2)
    expected = run_steps(model, expected_state, torch.bool, [5])
    torch.manual_seed(2)
    actual = run_steps(torch.compile(model, backend=recorder, fullgraph=True), state, torch.bool, [5])
    torch.testing.assert_close(actual, expected)
    assert_same_state(state, expected_state)
    assert recorder.after[0]["kivi.update"] == 1 and recorder.after[0]["kivi.attention"] == 0
    report = last_report()
    assert report is not None and len(report.refused) == 1 and not report.rewritten
    assert re.search(_pattern(reason), report.refused[0].how), report.refused[0].how
    assert report.refused[0].source


# ---------------------------------------------------------------------------------- what stands between update and attention


class Between(Model):
    """Something happens between the update and the attention."""

    def __init__(self, meanwhile: Callable[..., Tensor | None]) -> None:
        super().__init__(sdpa_repeat_kv)
        self.meanwhile = meanwhile

    def forward(self, x: Tensor, mask: Tensor, state: KiviState) -> Tensor:
        query, key, value = self.project(x)
        key, query = key.contiguous(), query.contiguous()
        position = state.length.reshape(1).repeat(1)
        keys, values = state.update(key, value, position)
        seen = self.meanwhile(query, key, position, state)
        attended = self.spell(query, keys, values, mask)
        return self.o(attended.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)) + (0 if seen is None else seen)


def reads_length(query: Tensor, key: Tensor, position: Tensor, state: KiviState) -> Tensor:
    return state.length * 1.0


def reads_view_of_sealed(query: Tensor, key: Tensor, position: Tensor, state: KiviState) -> Tensor:
    return state.sealed[0].sum() * 1.0


def changes_new_key(query: Tensor, key: Tensor, position: Tensor, state: KiviState) -> None:
    key.transpose(1, 2).mul_(2)


def moves_position(query: Tensor, key: Tensor, position: Tensor, state: KiviState) -> None:
    position.add_(1)


def changes_query(query: Tensor, key: Tensor, position: Tensor, state: KiviState) -> None:
    query.mul_(2)


@pytest.mark.parametrize(
    ("meanwhile", "reason"),
    [
        (reads_length, "the state has a reader between its update and its attention, aten.mul ("),
        (reads_view_of_sealed, "the state has a reader between its update and its attention, aten.select ("),
        (changes_new_key, "an input of the attention is changed in place before its end, by aten.mul_ ("),
        (moves_position, "an input of the attention is changed in place before its end, by aten.add_ ("),
        (changes_query, None),
    ],
    ids=["reads-length", "reads-a-view-of-sealed", "changes-the-new-key", "moves-the-position", "changes-the-query-in-time"],
)
@pytest.mark.parametrize("seal", SEAL_ORDERS)
def test_a_site_with_something_in_between_is_right(meanwhile: Callable[..., Tensor | None], reason: str | None, seal: str) -> None:
    model, recorder = Between(meanwhile), Recorder()
    expected_state, state = model.state(seal), model.state(seal)
    expected = run_steps(model, expected_state, torch.bool, [5, 1, 1])
    actual = run_steps(torch.compile(model, backend=recorder, fullgraph=True), state, torch.bool, [5, 1, 1])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert_same_state(state, expected_state)
    report = last_report()
    assert report is not None
    if reason is None:
        assert report.rewritten
    else:
        assert reason in report.refused[0].how


def test_two_layers_over_one_state_are_two_sites() -> None:
    """The second update finds what the first left, whichever of them is rewritten."""

    class Twice(Model):
        def forward(self, x: Tensor, mask: Tensor, state: KiviState) -> Tensor:
            first = super().forward(x, mask, state)
            query, key, value = self.project(x * 2)
            position = state.length - x.shape[1]  # the same columns again: a rollback
            keys, values = state.update(key, value, position)
            return first + no_mask(query, keys, values, mask).sum()

    model, recorder = Twice(sdpa_repeat_kv), Recorder()
    expected_state, state = model.state(), model.state()
    expected = run_steps(model, expected_state, torch.bool, [5, 1])
    actual = run_steps(torch.compile(model, backend=recorder, fullgraph=True), state, torch.bool, [5, 1])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert_same_state(state, expected_state)
    assert [(after["kivi.update"], after["kivi.append"]) for after in recorder.after] == [(1, 1), (1, 1)]


def test_a_graph_break_between_update_and_attention_is_named() -> None:
    def breaks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return sdpa_repeat_kv(q, k, v, mask)

    model, recorder = Model(breaks), Recorder()
    run_steps(torch.compile(model, backend=recorder), model.state(), torch.bool, [1])
    with_update, with_attention = [report for report in reports()[-len(recorder.after) :] if report.sites]
    assert "leave the graph (is there a graph break before the attention?)" in with_update.refused[0].how
    assert "come from an input that this graph does not write" in with_attention.refused[0].how
