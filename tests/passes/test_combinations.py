"""One small model of our own per way in which caches, heads, masks and attention are spelled in the wild, through ``backend="kivi"``.

The numbers are those of the list of combinations that occur: 1 and 2 transformers' static cache (compiled, exported), 3 and 4 its growing
cache, 5 softcap and windows, 6 sinks, 7 gpt-fast, 8 llama's reference code, 9 gemma_pytorch, 10 ExecuTorch, 11 litgpt, 12 torchtune,
13 a joined cache, 15 one tensor for all layers, 17 cross-attention, 18 caches that something else reads too.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pass_models import WIDTH, Recorder, count_ops, repeat_kv
from torch import Tensor, nn
from torch.fx import GraphModule

from kivi_ops import KiviConfig
from kivi_ops.passes import last_report, normalise, reports, rewrite, with_states
from kivi_ops.passes.float_caches import match_float_caches
from kivi_ops.passes.match import AttentionSite
from kivi_ops.passes.plan import Plan, plan
from kivi_ops.passes.rewrite import adopt, carry_out, settle_lengths, settle_positions
from kivi_ops.reference import ReferenceCache

F = torch.nn.functional
R = 4
OPTIONS: dict[str, Any] = {"group_size": 4, "residual_length": R}  # at 2 bits
CONFIG = KiviConfig(**OPTIONS)
ROWS, HEADS, KV_HEADS, DIM, CAPACITY = 2, 4, 2, 16, 48
PREFILL_AND_DECODE = [5] + [1] * (2 * R + 3)
IN_CHUNKS = [5, 3, 7, 1, 1]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Combination(nn.Module):
    """One layer, ``forward(x, *where)``; a subclass says how its cache and its attention are spelled, and what they mean.

    ``where(start, tokens)``: what each call is told besides x. ``meaning(start, tokens)``: the same attention as the reference is told it.
    ``writes``: the operator that writes the float cache and how often. ``how``: what the report says of a site.
    """

    kv_heads = KV_HEADS
    layers = 1
    writes = ("", 0)
    how: str | re.Pattern[str] = ""
    config: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * DIM) for heads in (HEADS, self.kv_heads, self.kv_heads))
        self.o = nn.Linear(HEADS * DIM, WIDTH)
        self.eval().requires_grad_(False)

    def cache(self, *shape: int) -> None:
        """Buffers ``k_cache`` and ``v_cache``."""
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(shape))

    def bshd(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, tokens, _ = x.shape
        return tuple(linear(x).view(rows, tokens, -1, DIM) for linear in (self.q, self.k, self.v))  # type: ignore[return-value]

    def bhsd(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(part.transpose(1, 2) for part in self.bshd(x))  # type: ignore[return-value]

    def out(self, attended: Tensor) -> Tensor:
        """Of [B, H, S, D]."""
        return self.o(attended.transpose(1, 2).reshape(attended.shape[0], attended.shape[2], -1))

    def where(self, start: int, tokens: int) -> tuple[Any, ...]:
        return (torch.arange(start, start + tokens),)

    def meaning(self, start: int, tokens: int) -> dict[str, Any]:
        return {"is_causal": True}

    def reference(self) -> Callable[[Tensor, int], Tensor]:
        """The same layer over a :class:`ReferenceCache`, ``forward(x, start)``."""
        held = [ReferenceCache(CONFIG, ROWS, self.kv_heads, CAPACITY, DIM, DIM) for _ in range(self.layers)]

        def forward(x: Tensor, start: int) -> Tensor:
            for cache in held:
                query, key, value = self.bhsd(x)
                attended = cache.attend(query, key, value, start, **self.meaning(start, x.shape[1]))
                x = x + self.out(attended.float())
            return x

        return forward


def causal(start: int, tokens: int, window: int = CAPACITY) -> Tensor:
    """[S, C]: True where visible."""
    at, columns = start + torch.arange(tokens)[:, None], torch.arange(CAPACITY)
    return (columns <= at) & (columns > at - window)


def as_bias(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)


# -------------------------------------------------------------------------------------------------- combinations that match


class TransformersStatic(Combination):
    """1: index_copy_ into a cache that is read again, heads by expand and reshape, SDPA under a bool mask."""

    writes = ("aten.index_copy_", 2)
    how = "sdpa, heads x2, bool mask, float cache by aten.index_copy_, columns checked at run time"

    def __init__(self) -> None:
        super().__init__()
        self.cache(ROWS, KV_HEADS, CAPACITY, DIM)

    def where(self, start: int, tokens: int) -> tuple[Any, ...]:
        return causal(start, tokens).expand(ROWS, 1, tokens, CAPACITY), torch.arange(start, start + tokens)

    def forward(self, x: Tensor, mask: Tensor, position: Tensor) -> Tensor:
        query, key, value = self.bhsd(x)
        self.k_cache.index_copy_(2, position, key)
        self.v_cache.index_copy_(2, position, value)
        keys, values = repeat_kv(self.k_cache, 2), repeat_kv(self.v_cache, 2)
        return x + self.out(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=DIM**-0.5))


class TransformersResult(TransformersStatic):
    """2: what a cache's update returns is read; the position is a count of tokens on the device."""

    how = "sdpa, heads x2, bool mask, float cache by aten.index_copy_"

    def where(self, start: int, tokens: int) -> tuple[Any, ...]:
        return causal(start, tokens).expand(ROWS, 1, tokens, CAPACITY), torch.tensor(start)

    def forward(self, x: Tensor, mask: Tensor, start: Tensor) -> Tensor:
        query, key, value = self.bhsd(x)
        position = torch.arange(x.shape[1]) + start
        keys, values = self.k_cache.index_copy_(2, position, key), self.v_cache.index_copy_(2, position, value)
        keys, values = repeat_kv(keys, 2), repeat_kv(values, 2)
        return x + self.out(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask))


class SoftcapAndWindow(TransformersStatic):
    """5: eager attention with a softcap, a scale of its own and a window of 7 tokens in a float mask; softmax in float32."""

    how = "eager, heads x2, float mask, softcap, float cache by aten.index_copy_, columns checked at run time"

    def where(self, start: int, tokens: int) -> tuple[Any, ...]:
        return as_bias(causal(start, tokens, window=7)).expand(ROWS, 1, tokens, CAPACITY), torch.arange(start, start + tokens)

    def meaning(self, start: int, tokens: int) -> dict[str, Any]:
        return {"attn_mask": causal(start, tokens, window=7), "scale": 0.5, "softcap": 2.0}

    def forward(self, x: Tensor, mask: Tensor, position: Tensor) -> Tensor:
        query, key, value = self.bhsd(x)
        self.k_cache.index_copy_(2, position, key)
        self.v_cache.index_copy_(2, position, value)
        scores = torch.matmul(query, repeat_kv(self.k_cache, 2).transpose(2, 3)) * 0.5
        scores = torch.tanh(scores / 2.0) * 2.0 + mask[:, :, :, :CAPACITY]
        weights = F.dropout(F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype), p=0.0, training=False)
        return x + self.out(torch.matmul(weights, repeat_kv(self.v_cache, 2)).contiguous())


class GptFast(Combination):
    """7: assignment at ``input_pos``, a causal buffer indexed by it, heads by repeat_interleave; several tokens in a prefill."""

    writes = ("aten.index_put_", 2)
    how = "sdpa, heads x2, bool mask, float cache by aten.index_put_, columns checked at run time"

    def __init__(self) -> None:
        super().__init__()
        self.cache(ROWS, KV_HEADS, CAPACITY, DIM)
        self.register_buffer("causal_mask", torch.tril(torch.ones(CAPACITY, CAPACITY, dtype=torch.bool)))

    def forward(self, x: Tensor, input_pos: Tensor) -> Tensor:
        query, key, value = self.bhsd(x)
        self.k_cache[:, :, input_pos] = key
        self.v_cache[:, :, input_pos] = value
        keys, values = (cache.repeat_interleave(2, dim=1) for cache in (self.k_cache, self.v_cache))
        mask = self.causal_mask[None, None, input_pos]
        return x + self.out(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, dropout_p=0.0))


class GptFastGrouped(GptFast):
    """7, newer: ``enable_gqa``."""

    how = "sdpa, enable_gqa, bool mask, float cache by aten.index_put_, columns checked at run time"

    def forward(self, x: Tensor, input_pos: Tensor) -> Tensor:
        query, key, value = self.bhsd(x)
        keys, values = self.k_cache, self.v_cache
        keys[:, :, input_pos] = key
        values[:, :, input_pos] = value
        mask = self.causal_mask[None, None, input_pos]
        return x + self.out(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True))


class LlamaReference(Combination):
    """8: [B, S, H, D] buffers for more rows than there are, slices from an integer on, only what is written is read, eager attention."""

    writes = ("aten.copy_", 2)
    how = re.compile(r"eager, heads x2(, float mask)?, float cache by aten.copy_")

    def __init__(self) -> None:
        super().__init__()
        self.cache(ROWS + 1, CAPACITY, KV_HEADS, DIM)

    def where(self, start: int, tokens: int) -> tuple[Any, ...]:
        mask = None
        if tokens > 1:
            mask = torch.full((tokens, tokens), float("-inf")).triu(1)
            mask = torch.hstack([torch.zeros(tokens, start), mask])
        return start, mask

    def forward(self, x: Tensor, start_pos: int, mask: Tensor | None) -> Tensor:
        rows, tokens, _ = x.shape
        query, key, value = self.bshd(x)
        self.k_cache[:rows, start_pos : start_pos + tokens] = key
        self.v_cache[:rows, start_pos : start_pos + tokens] = value
        keys, values = (self._repeat(cache[:rows, : start_pos + tokens]) for cache in (self.k_cache, self.v_cache))
        query, keys, values = (part.transpose(1, 2) for part in (query, keys, values))
        scores = torch.matmul(query, keys.transpose(2, 3)) / math.sqrt(DIM)
        if mask is not None:
            scores = scores + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(query)
        return x + self.out(torch.matmul(scores, values))

    def _repeat(self, x: Tensor) -> Tensor:
        rows, tokens, heads, dim = x.shape
        return x[:, :, :, None, :].expand(rows, tokens, heads, 2, dim).reshape(rows, tokens, heads * 2, dim)


class GemmaPytorch(Combination):
    """9: [B, S, H, D], index_copy_ along dimension 1, heads by repeat_interleave, the query scaled in place, a mask picked by the index."""

    writes = ("aten.index_copy_", 2)
    how = "eager, heads x2, float mask, float cache by aten.index_copy_, columns checked at run time"

    def __init__(self) -> None:
        super().__init__()
        self.cache(ROWS, CAPACITY, KV_HEADS, DIM)
        self.register_buffer("mask", as_bias(causal(0, CAPACITY))[None, None])

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        query, key, value = self.bshd(x)
        self.k_cache.index_copy_(1, index, key)
        self.v_cache.index_copy_(1, index, value)
        keys, values = (torch.repeat_interleave(cache, 2, dim=2) for cache in (self.k_cache, self.v_cache))
        query, keys, values = (part.transpose(1, 2) for part in (query, keys, values))
        query.mul_(DIM**-0.5)
        scores = torch.matmul(query, keys.transpose(2, 3)) + self.mask.index_select(2, index)
        return x + self.out(torch.matmul(F.softmax(scores.float(), dim=-1).type_as(query), values))


class Executorch(Combination):
    """10: a start that ``item()`` takes from a tensor, narrow and copy_, a mask narrowed likewise."""

    writes = ("aten.copy_", 2)
    how = "sdpa, heads x2, bool mask, float cache by aten.copy_"
    config = {"capture_scalar_outputs": True}

    def __init__(self) -> None:
        super().__init__()
        self.cache(ROWS, KV_HEADS, CAPACITY, DIM)
        self.register_buffer("mask", causal(0, CAPACITY))

    def forward(self, x: Tensor, input_pos: Tensor) -> Tensor:
        query, key, value = self.bhsd(x)
        start, tokens = input_pos[0].item(), x.shape[1]
        torch._check(start >= 0)
        torch._check(start + tokens <= CAPACITY)
        self.k_cache.narrow(2, start, tokens).copy_(key)
        self.v_cache.narrow(2, start, tokens).copy_(value)
        keys, values = (cache.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2) for cache in (self.k_cache, self.v_cache))
        mask = self.mask.narrow(0, start, tokens)
        return x + self.out(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask))


class ExecutorchPerHead(Executorch):
    """10, its other cache: ``index_put_`` with the position as an index of dimension 2."""

    writes = ("aten.index_put_", 2)
    how = "sdpa, heads x2, bool mask, float cache by aten.index_put_, columns checked at run time"

    def forward(self, x: Tensor, input_pos: Tensor) -> Tensor:
        query, key, value = self.bhsd(x)
        torch.ops.aten.index_put_(self.k_cache, [None, None, input_pos], key)
        torch.ops.aten.index_put_(self.v_cache, [None, None, input_pos], value)
        keys, values = (repeat_kv(cache, 2) for cache in (self.k_cache, self.v_cache))
        return x + self.out(F.scaled_dot_product_attention(query, keys, values, attn_mask=self.mask[input_pos]))


class Litgpt(Combination):
    """11: scatter_ with the position expanded, the first 40 columns read, one head of Keys for all queries."""

    kv_heads = 1
    writes = ("aten.scatter_", 2)
    how = "sdpa, heads x4, bool mask, float cache by aten.scatter_, columns checked at run time"

    def __init__(self) -> None:
        super().__init__()
        self.cache(ROWS, 1, CAPACITY, DIM)
        self.register_buffer("mask", causal(0, CAPACITY)[None, None])

    def forward(self, x: Tensor, input_pos: Tensor) -> Tensor:
        query, key, value = self.bhsd(x)
        index = input_pos.view(1, 1, -1, 1).expand_as(key)
        keys, values = self.k_cache.scatter_(2, index, key)[:, :, :40], self.v_cache.scatter_(2, index, value)[:, :, :40]
        keys, values = (part.expand(ROWS, HEADS, -1, -1) for part in (keys, values))
        mask = self.mask.index_select(2, input_pos)[..., :40]
        return x + self.out(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask))


class Torchtune(Combination):
    """12: heads are expanded before the write, and the positions are a buffer that the graph moves on."""

    kv_heads = 2
    writes = ("aten.index_put_", 2)
    how = "sdpa, bool mask, float cache by aten.index_put_, columns checked at run time"

    def __init__(self) -> None:
        super().__init__()
        self.cache(ROWS, HEADS, CAPACITY, DIM)
        self.register_buffer("cache_pos", torch.arange(CAPACITY))

    def where(self, start: int, tokens: int) -> tuple[Any, ...]:
        return (causal(start, tokens).expand(ROWS, tokens, CAPACITY),)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.bhsd(x)
        rows, _, tokens, _ = query.shape
        key, value = (part.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2) for part in (key, value))
        columns = self.cache_pos[:tokens]
        self.k_cache[:, :, columns] = key
        self.v_cache[:, :, columns] = value
        self.cache_pos.add_(tokens)
        return x + self.out(F.scaled_dot_product_attention(query, self.k_cache, self.v_cache, attn_mask=mask[:, None, :, :]))


class Joined(Combination):
    """13: what is before, the new tokens and what is behind are joined, and copied back."""

    writes = ("aten.copy_", 2)
    how = "sdpa, heads x2, bool mask, float cache by aten.copy_"

    def __init__(self) -> None:
        super().__init__()
        self.cache(ROWS, KV_HEADS, CAPACITY, DIM)

    def where(self, start: int, tokens: int) -> tuple[Any, ...]:
        return causal(start, tokens), start

    def forward(self, x: Tensor, mask: Tensor, start: int) -> Tensor:
        query, key, value = self.bhsd(x)
        end = start + x.shape[1]
        for cache, new in ((self.k_cache, key), (self.v_cache, value)):
            cache.copy_(torch.cat([cache[:, :, :start], new, cache[:, :, end:]], dim=2))
        keys, values = repeat_kv(self.k_cache, 2), repeat_kv(self.v_cache, 2)
        return x + self.out(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask))


class OneTensor(Combination):
    """15: one tensor for all layers, Keys and Values; what is written is read, without a mask where one token is."""

    layers = 2
    writes = ("aten.copy_", 4)
    how = re.compile(r"sdpa, enable_gqa(, bool mask|, is_causal)?, float cache by aten.copy_")

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kv", torch.zeros(self.layers, 2, ROWS, KV_HEADS, CAPACITY, DIM))

    def where(self, start: int, tokens: int) -> tuple[Any, ...]:
        return start, None if tokens == 1 or start == 0 else causal(start, tokens)[:, : start + tokens]

    def forward(self, x: Tensor, start: int, mask: Tensor | None) -> Tensor:
        for layer in range(self.layers):
            query, key, value = self.bhsd(x)
            end = start + x.shape[1]
            self.kv[layer, 0, :, :, start:end] = key
            self.kv[layer, 1, :, :, start:end] = value
            keys, values = self.kv[layer, 0, :, :, :end], self.kv[layer, 1, :, :, :end]
            is_causal = x.shape[1] > 1 and mask is None
            attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
            x = x + self.out(attended)
        return x


MATCHED: dict[str, type[Combination]] = {
    "01-transformers-static": TransformersStatic,
    "02-transformers-results-read": TransformersResult,
    "05-softcap-and-window": SoftcapAndWindow,
    "07-gpt-fast": GptFast,
    "07-gpt-fast-enable_gqa": GptFastGrouped,
    "08-llama-reference": LlamaReference,
    "09-gemma_pytorch": GemmaPytorch,
    "10-executorch-narrow": Executorch,
    "10-executorch-index_put_": ExecutorchPerHead,
    "11-litgpt": Litgpt,
    "12-torchtune": Torchtune,
    "13-joined": Joined,
    "15-one-tensor": OneTensor,
}


def float_writes(module: GraphModule) -> Counter[str]:
    """Writes into tensors, by operator; setitem is what Dynamo calls some."""
    return Counter({op: count for op, count in count_ops(module).items() if op.split(".")[-1] in _FLOAT_WRITES})


_FLOAT_WRITES = ("index_copy_", "index_put_", "copy_", "scatter_", "add_")


class Stepwise(Recorder):
    """Checks each graph on its way: no write is lost by any step of the pass, and what is left is whole."""

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = normalise(module, example_inputs)
        writes = float_writes(graph)
        for settle in (settle_positions, settle_lengths):
            settle(graph)
            assert float_writes(graph) == writes
        found = match_float_caches(graph.graph)
        outcomes = [plan(graph.graph, site) for site in found if isinstance(site, AttentionSite)]
        plans, _ = adopt(graph, [outcome for outcome in outcomes if isinstance(outcome, Plan)], CONFIG)
        assert float_writes(graph) == writes
        carry_out(graph, plans)
        assert float_writes(graph) == writes
        return super().__call__(module, example_inputs)

    def _keep(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        super()._keep(module, example_inputs)
        if any(op.startswith("kivi.") for op in self.after[-1]):
            module.graph.lint()
            assert [node for node in module.graph.nodes if node.op != "output" and "val" not in node.meta] == []
            again = copy.deepcopy(module)
            assert not rewrite(again).sites and count_ops(again) == self.after[-1]
            return again.forward
        return module.forward


def run(
    model: Combination, forward: Callable[..., Tensor], steps: Sequence[int], reference: Callable[[Tensor, int], Tensor] | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of ``forward``, and of ``reference`` on the same inputs."""
    generator = torch.Generator().manual_seed(1)
    actual, expected, start = [], [], 0
    with torch.no_grad(), torch._dynamo.config.patch(model.config):
        for tokens in steps:
            x = torch.randn(ROWS, tokens, WIDTH, generator=generator)
            actual.append(forward(x, *model.where(start, tokens)))
            if reference is not None:
                expected.append(reference(x, start))
            start += tokens
    return actual, expected


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", MATCHED)
def test_a_combination_is_rewritten_and_equals_the_reference(case: str, dynamic: bool | None) -> None:
    model, floats, recorder = MATCHED[case](), MATCHED[case](), Stepwise(strict=True, **OPTIONS)
    steps = IN_CHUNKS if dynamic else PREFILL_AND_DECODE
    compiled = torch.compile(model, backend=recorder, fullgraph=True, dynamic=dynamic)
    actual, expected = run(model, compiled, steps, model.reference())
    for step, (left, right) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5, msg=lambda text, step=step: f"step {step}: {text}")
    if model.layers == 1:  # deeper layers write what a quantised attention made of the tokens
        run(floats, floats, steps, None)
        for (name, held), wanted in zip(model.named_buffers(), floats.buffers(), strict=True):
            torch.testing.assert_close(held, wanted, rtol=1e-6, atol=1e-6, msg=name)

    assert 1 <= len(recorder.modules) <= 3
    sites, (op, writes) = model.layers, model.writes
    for before, after in zip(recorder.before, recorder.after, strict=True):
        assert (before[op], after[op]) == (writes, writes)
        attentions = ("aten.scaled_dot_product_attention", "aten.softmax")
        assert (sum(before[name] for name in attentions), sum(after[name] for name in attentions)) == (sites, 0)
        assert (after["kivi.attention"], after["kivi.append"]) == (sites, sites)
        assert before["aten.linear"] == after["aten.linear"] == 4 * sites
    for report in reports()[-len(recorder.modules) :]:
        assert len(report.rewritten) == sites and not report.refused
    _check_how(model.how, reports()[-len(recorder.modules)].rewritten[0].how)


def _check_how(wanted: str | re.Pattern[str], how: str) -> None:
    assert wanted.fullmatch(how) if isinstance(wanted, re.Pattern) else how == wanted, how


class IndexedRows(Combination):
    """7 over 6: [B, S, H, D] buffers, assignment at a position."""

    def __init__(self) -> None:
        super().__init__()
        self.cache(ROWS, CAPACITY, KV_HEADS, DIM)
        self.register_buffer("mask", causal(0, CAPACITY))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        query, key, value = self.bhsd(x)
        self.k_cache[:, position] = key.transpose(1, 2)
        self.v_cache[:, position] = value.transpose(1, 2)
        keys, values = (repeat_kv(cache.transpose(1, 2), 2) for cache in (self.k_cache, self.v_cache))
        return x + self.out(F.scaled_dot_product_attention(query, keys, values, attn_mask=self.mask[position]))


class TransposedKeys(Combination):
    """Keys are kept as the product with the queries wants them, [B, H, D, C]; the scale is split; a float mask is made in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(ROWS, KV_HEADS, DIM, CAPACITY))
        self.register_buffer("v_cache", torch.zeros(ROWS, KV_HEADS, CAPACITY, DIM))
        self.register_buffer("mask", causal(0, CAPACITY))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        query, key, value = self.bhsd(x)
        root = math.sqrt(math.sqrt(DIM))
        self.k_cache.index_copy_(3, position, key.transpose(2, 3))
        self.v_cache.index_copy_(2, position, value)
        scores = (query / root) @ (repeat_kv(self.k_cache, 2) / root)
        weights = torch.softmax(scores + (1.0 - self.mask[position].float()) * -1e9, dim=-1)
        return x + self.out(weights @ repeat_kv(self.v_cache, 2))


class IndexedTensor(Combination):
    """15 with a position on the device: one tensor, unbound; its first layer is not this one's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kv", torch.zeros(3, 2, ROWS, KV_HEADS, CAPACITY, DIM))
        self.register_buffer("mask", causal(0, CAPACITY))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        query, key, value = self.bhsd(x)
        self.kv[1, 0][:, :, position] = key
        self.kv[1, 1, :, :, position] = value
        keys, values = self.kv[1].unbind(0)
        return x + self.out(F.scaled_dot_product_attention(query, repeat_kv(keys, 2), repeat_kv(values, 2), attn_mask=self.mask[position]))


@pytest.mark.parametrize(
    "kind", [IndexedRows, TransposedKeys, IndexedTensor], ids=["indexed-bshd", "transposed-keys", "indexed-one-tensor"]
)
def test_a_mixture_of_spellings_is_rewritten_and_equals_the_reference(kind: type[Combination]) -> None:
    model = kind()
    compiled = torch.compile(model, backend=Stepwise(strict=True, **OPTIONS), fullgraph=True)
    actual, expected = run(model, compiled, [5, *([1] * (R + 2))], model.reference())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


PARTS = ("08-llama-reference", "09-gemma_pytorch", "11-litgpt", "12-torchtune", "15-one-tensor")


@pytest.mark.parametrize("case", PARTS)
def test_a_prompt_that_the_model_itself_wrote_is_taken_over_from_where_it_lies(case: str) -> None:
    """Rows, columns, heads and channels lie in another order, or the cache is a part of a tensor."""
    model, recorder = MATCHED[case](), Recorder(strict=True, **OPTIONS)
    decode = torch.compile(model, backend=recorder, fullgraph=True)
    forwards = iter([model, *([decode] * (R + 3))])
    actual, expected = run(model, lambda *args: next(forwards)(*args), [6, *([1] * (R + 3))], model.reference())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert [site for report in reports()[-len(recorder.modules) :] for site in report.refused] == []


@pytest.mark.parametrize("case", ["07-gpt-fast", "08-llama-reference", "12-torchtune", "15-one-tensor"])
def test_one_row_is_written_without_its_dimension(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``c[:, :, position] = k`` drops leading dimensions of size 1 of ``k``."""
    monkeypatch.setitem(globals(), "ROWS", 1)
    model = MATCHED[case]()
    compiled = torch.compile(model, backend=Stepwise(strict=True, **OPTIONS), fullgraph=True)
    actual, expected = run(model, compiled, [5, *([1] * R)], model.reference())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_an_exported_static_cache_is_rewritten_in_place() -> None:
    """2, exported: the same pass over an exported program's graph, whose caches are inputs and whose sequence length is a symbol."""
    model, reference = TransformersResult(), TransformersResult().reference()
    tokens = torch.export.Dim("tokens", min=2, max=16)
    shapes = {"x": {1: tokens}, "mask": {2: tokens}, "start": None}
    for strict in (True, False):
        with torch.no_grad():
            example = (torch.randn(ROWS, 5, WIDTH), *model.where(0, 5))
            program = torch.export.export(model, example, dynamic_shapes=shapes, strict=strict)
        module = program.graph_module
        before = count_ops(module)
        report = rewrite(module, CONFIG)
        after = count_ops(module)
        assert [site.how for site in report.sites if site.rewritten] == [TransformersResult.how] and not report.refused
        assert (before["aten.index_copy_"], after["aten.index_copy_"]) == (2, 2)
        assert (before["aten.scaled_dot_product_attention"], after["aten.scaled_dot_product_attention"]) == (1, 0)
        assert (after["kivi.attention"], after["kivi.append"]) == (1, 1)

    forward = with_states(module.forward, report.bindings)
    held = {**program.state_dict, **program.constants}
    lifted = [held[str(spec.target)] for spec in program.graph_signature.input_specs if spec.target is not None]
    actual, expected = run(model, lambda *args: forward(*lifted, *args)[0], [5, 3, 7], reference)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ combinations that do not


class Growing(Combination):
    """3: the cache is joined with the new tokens, and returned."""

    def where(self, start: int, tokens: int) -> tuple[Any, ...]:
        return torch.zeros(ROWS, KV_HEADS, 8, DIM), torch.ones(ROWS, KV_HEADS, 8, DIM)

    def forward(self, x: Tensor, past_key: Tensor, past_value: Tensor) -> tuple[Tensor, ...]:
        query, key, value = self.bhsd(x)
        keys, values = self._kept(torch.cat([past_key, key], dim=-2)), self._kept(torch.cat([past_value, value], dim=-2))
        return x + self.out(self._attend(query, repeat_kv(keys, 2), repeat_kv(values, 2))), keys, values

    def _kept(self, joined: Tensor) -> Tensor:
        return joined

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, keys, values)


class GrowingEager(Growing):
    """4: the same with eager attention."""

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return torch.softmax(query @ keys.transpose(2, 3) * 0.25, dim=-1) @ values


class GrowingWindow(Growing):
    """3, sliding: joined, and the last window kept."""

    def _kept(self, joined: Tensor) -> Tensor:
        return joined[:, :, -7:]


class Spelled(TransformersStatic):
    """The static cache with one thing spelled otherwise."""

    def forward(self, x: Tensor, mask: Tensor, position: Tensor) -> Tensor:
        query, key, value = self.bhsd(x)
        keys, values = self.write(self.k_cache, position, key), self.write(self.v_cache, position, value)
        return x + self.out(self.attend(query, keys, values, mask))

    def write(self, cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
        return cache.index_copy_(2, position, new)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, repeat_kv(keys, 2), repeat_kv(values, 2), attn_mask=mask)


class Sinks(Spelled):
    """6: a logit more per head takes part in the softmax."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        scores = query @ repeat_kv(keys, 2).transpose(2, 3) * 0.25
        scores = scores.masked_fill(~mask, float("-inf"))
        sinks = torch.linspace(-1, 1, HEADS).reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], -1)
        scores = torch.cat([scores, sinks], dim=-1)
        weights = F.softmax(scores - scores.max(dim=-1, keepdim=True).values, dim=-1, dtype=scores.dtype)[..., :-1]
        return F.dropout(weights, p=0.0, training=False) @ repeat_kv(values, 2)


class JoinedAndReturned(Growing):
    """13 as a function: what is joined leaves the graph, and comes back as an input."""

    def where(self, start: int, tokens: int) -> tuple[Any, ...]:
        return causal(start, tokens), torch.zeros(ROWS, KV_HEADS, CAPACITY, DIM), torch.zeros(ROWS, KV_HEADS, CAPACITY, DIM), start

    def forward(self, x: Tensor, mask: Tensor, past_key: Tensor, past_value: Tensor, start: int) -> tuple[Tensor, ...]:  # type: ignore[override]
        query, key, value = self.bhsd(x)
        end = start + x.shape[1]
        keys, values = (
            torch.cat([past[:, :, :start], new, past[:, :, end:]], dim=2) for past, new in ((past_key, key), (past_value, value))
        )
        attended = F.scaled_dot_product_attention(query, repeat_kv(keys, 2), repeat_kv(values, 2), attn_mask=mask)
        return x + self.out(attended), keys, values


class CrossAttention(Spelled):
    """17: over Keys and Values of an encoder, which no step writes."""

    def write(self, cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
        return cache


class CrossAttentionFirst(Spelled):
    """17, its first call: over Keys and Values of what the encoder returned."""

    def write(self, cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
        return F.pad(new, (0, 0, 0, CAPACITY - new.shape[2]))


class SecondReader(Spelled):
    """18: something else reads the Keys."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return super().attend(query, keys, values, mask) + keys.mean()


class SharedLayers(Spelled):
    """18: a later layer attends over this layer's cache."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return super().attend(super().attend(query, keys, values, mask) * 2, keys, values, mask)


class TiledHeads(Spelled):
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, keys.repeat(1, 2, 1, 1), values.repeat(1, 2, 1, 1), attn_mask=mask)


class OneHot(Spelled):
    def write(self, cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
        here = (torch.arange(CAPACITY) == position[-1])[:, None]
        return cache.copy_(torch.where(here, new[:, :, -1:], cache))


class Rolled(Spelled):
    def write(self, cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
        return cache.copy_(torch.cat([cache, new], dim=2)[:, :, new.shape[2] :])


class Ring(Spelled):
    def write(self, cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
        return cache.index_copy_(2, position % 16, new)


class PagedRows(Spelled):
    """Two indices: rows of their own columns each."""

    def write(self, cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
        cache[torch.arange(ROWS)[:, None], :, position] = new.transpose(1, 2)
        return cache


class GroupedQuery(Spelled):
    """The query has the groups, in a dimension of its own."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        scores = query.unflatten(1, (KV_HEADS, 2)) @ keys[:, :, None].transpose(-1, -2) * 0.25
        weights = torch.softmax(scores.masked_fill(~mask[:, :, None], -torch.inf), dim=-1)
        return (weights @ values[:, :, None]).flatten(1, 2)


class Einsum(Spelled):
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        scores = torch.einsum("bhsd,bhcd->bhsc", query, repeat_kv(keys, 2)).masked_fill(~mask, -torch.inf)
        return torch.einsum("bhsc,bhcd->bhsd", torch.softmax(scores, dim=-1), repeat_kv(values, 2))


class Bmm(Spelled):
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        keys, values = (repeat_kv(held, 2).flatten(0, 1) for held in (keys, values))
        bias = as_bias_in_graph(mask).expand(ROWS, HEADS, query.shape[2], CAPACITY).flatten(0, 1)
        scores = torch.baddbmm(bias, query.flatten(0, 1), keys.transpose(1, 2), alpha=0.25)
        return torch.bmm(torch.softmax(scores, dim=-1), values).unflatten(0, (ROWS, HEADS))


def as_bias_in_graph(visible: Tensor) -> Tensor:
    return torch.where(visible, 0.0, torch.finfo(torch.float32).min)


REFUSED: dict[str, tuple[type[Combination], str]] = {
    "03-growing": (Growing, "the Keys are joined with the past by aten.cat (...): such a cache is a new tensor each step, and its state"),
    "03-growing-window": (GrowingWindow, "the Keys are joined with the past by aten.cat (...): such a cache is a new tensor each step"),
    "04-growing-eager": (GrowingEager, "the Keys are joined with the past by aten.cat (...): such a cache is a new tensor each step"),
    "06-sinks": (Sinks, "attention has sinks: aten.slice (...) cuts off weights of more than the columns"),
    "13-joined-and-returned": (JoinedAndReturned, "the Keys are joined with the past by aten.cat (...): such a cache is a new tensor"),
    "17-cross-attention": (
        CrossAttention,
        "the Keys come from an input that this graph does not write: cross-attention, or a cache filled",
    ),
    "17-cross-attention-first": (CrossAttentionFirst, "the Keys are no cache: they come from aten."),
    "18-second-reader": (SecondReader, "the Keys cache has another reader, aten.mean (...)"),
    "18-shared-layers": (SharedLayers, "the Keys cache has another reader, aten.reshape (...)"),
    "heads-tiled": (TiledHeads, "heads are tiled by aten.repeat (...), which orders them otherwise than grouped attention does"),
    "one-hot": (OneHot, "all columns of the Keys cache are written anew by aten.copy_ (...), as in a window that rolls"),
    "rolled": (Rolled, "all columns of the Keys cache are written anew by aten.copy_ (...), as in a window that rolls"),
    "ring": (Ring, "the position is computed by aten.remainder (...); allowed: sums, and reads of tensors and numbers, since a position"),
    "rows-of-their-own": (PagedRows, "the Keys cache is written by aten.index_put_ (...), in a way that the pass does not know"),
    "grouped-query": (GroupedQuery, "attention reads the Keys in 5 dimensions, by aten.transpose (...); allowed: 4, [B, H, C, D]"),
    "einsum": (Einsum, "attention is spelled with aten.einsum (...); allowed: scaled_dot_product_attention, or matmul"),
    "bmm": (Bmm, "attention is spelled with aten.bmm (...); allowed: scaled_dot_product_attention, or matmul"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_combination_that_does_not_fit_stays_float_with_the_reason(case: str) -> None:
    kind, reason = REFUSED[case]
    model, floats, recorder = kind(), kind(), Stepwise(**OPTIONS)
    actual, _ = run(model, torch.compile(model, backend=recorder, fullgraph=True), [5, 1], None)
    expected, _ = run(floats, floats, [5, 1], None)
    torch.testing.assert_close(actual, expected)
    for (name, held), wanted in zip(model.named_buffers(), floats.buffers(), strict=True):
        torch.testing.assert_close(held, wanted, msg=name)
    assert not any(op.startswith("kivi") for after in recorder.after for op in after)
    for report in reports()[-len(recorder.before) :]:
        assert report.refused and not report.rewritten
        pattern = ".*".join(map(re.escape, reason.split("...")))
        assert re.match(pattern, report.refused[0].how), report.refused[0].how
        assert report.refused[0].source


def test_flex_attention_stays_float_with_the_reason() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Flex(Spelled):
        def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
            return flex_attention(query, keys, values, enable_gqa=True)

    model, floats = Flex(), Flex()
    compiled = torch.compile(model, backend="kivi", options={"compiler": "eager"})
    torch.testing.assert_close(run(model, compiled, [5], None)[0], run(floats, floats, [5], None)[0])
    report = last_report()
    assert report is not None and not report.sites
    wanted = r"the graph cannot be normalised: ValueError: .* was traced inside torch.vmap, as flex_attention is, and means nothing outside"
    assert re.match(wanted, report.note), report.note
