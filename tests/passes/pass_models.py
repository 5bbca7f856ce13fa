"""Small models of our own, one per spelling of attention over a :class:`KiviState`, and what the tests of the pass do with them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from kivi_ops import KiviConfig, KiviState
from kivi_ops.passes.backend import kivi
from kivi_ops.passes.normalise import normalise

F = torch.nn.functional

CONFIG = KiviConfig(group_size=4, residual_length=4)
CAPACITY = 48
WIDTH = 32

Spelling = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """One attention layer over a state; ``spell(query, keys, values, mask)`` is its attention."""

    def __init__(self, spell: Spelling, heads: int = 4, kv_heads: int = 2, key_dim: int = 16, value_dim: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spell = spell
        self.heads, self.kv_heads, self.key_dim, self.value_dim = heads, kv_heads, key_dim, value_dim
        self.q = nn.Linear(WIDTH, heads * key_dim)
        self.k = nn.Linear(WIDTH, kv_heads * key_dim)
        self.v = nn.Linear(WIDTH, kv_heads * value_dim)
        self.o = nn.Linear(heads * value_dim, WIDTH)
        self.eval()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, tokens, _ = x.shape
        query = self.q(x).view(rows, tokens, self.heads, self.key_dim).transpose(1, 2)
        key = self.k(x).view(rows, tokens, self.kv_heads, self.key_dim).transpose(1, 2)
        value = self.v(x).view(rows, tokens, self.kv_heads, self.value_dim).transpose(1, 2)
        return query, key, value

    def forward(self, x: Tensor, mask: Tensor, state: KiviState) -> Tensor:
        query, key, value = self.project(x)
        keys, values = state.update(key, value, state.length.clone())
        attended = self.spell(query, keys, values, mask)
        return self.o(attended.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))

    def state(self, seal: str = "after_attention", rows: int = 2, **config: Any) -> KiviState:
        chosen = KiviConfig(**{"group_size": CONFIG.group_size, "residual_length": CONFIG.residual_length, "seal": seal, **config})
        state = KiviState.allocate(chosen, rows, self.kv_heads, CAPACITY, self.key_dim, self.value_dim, torch.float32)
        for tensor in state.tensors().values():
            torch._dynamo.mark_static_address(tensor)
        return state


def repeat_kv(x: Tensor, repeats: int) -> Tensor:
    rows, heads, tokens, dim = x.shape
    return x[:, :, None].expand(rows, heads, repeats, tokens, dim).reshape(rows, heads * repeats, tokens, dim)


def sdpa_repeat_kv(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=mask)


def no_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2))


def causal_mask(start: int, new_tokens: int, dtype: torch.dtype = torch.bool, rows: int = 2) -> Tensor:
    """[rows, 1, S, C]: True where visible, or 0 there and the dtype's minimum elsewhere."""
    visible = torch.arange(CAPACITY) <= start + torch.arange(new_tokens)[:, None]
    visible = visible.expand(rows, 1, new_tokens, CAPACITY).contiguous()
    if dtype == torch.bool:
        return visible
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


class Recorder:
    """A Dynamo backend: ours, with the operators of each graph counted before and after, and the rewritten graphs kept."""

    def __init__(self, compiler: Any = None, **options: Any) -> None:
        self.before: list[Counter[str]] = []
        self.after: list[Counter[str]] = []
        self.modules: list[GraphModule] = []
        self.compiler = compiler
        self.options = options

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.before.append(count_ops(normalise(module, example_inputs)))
        return kivi(module, example_inputs, options={"compiler": self._keep, **self.options})

    def _keep(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.after.append(count_ops(module))
        self.modules.append(module)
        return module.forward if self.compiler is None else self.compiler(module, example_inputs)


def count_ops(module: GraphModule) -> Counter[str]:
    return Counter(str(node.target.overloadpacket) for node in module.graph.nodes if hasattr(node.target, "overloadpacket"))


def compiled_body(code: str) -> str:
    """The part of Inductor's generated code that runs each step."""
    return code.split("def call")[-1].split("def get_args")[0]


def buffer_sizes(body: str) -> list[int]:
    """Elements of each buffer that the generated code allocates; an operator's own results are not among them."""
    return [math.prod(map(int, re.findall(r"\d+", shape))) for shape in re.findall(r"empty_strided\w*\(\((.*?)\),", body)]


def run_steps(forward: Callable[..., Tensor], state: KiviState, dtype: torch.dtype, steps: Sequence[int]) -> list[Tensor]:
    """Outputs of ``forward(x, mask, state)`` for calls of ``steps`` tokens each."""
    generator = torch.Generator().manual_seed(1)
    outputs, start, rows = [], 0, state.sealed.shape[0]
    with torch.no_grad():
        for new_tokens in steps:
            x = torch.randn(rows, new_tokens, WIDTH, generator=generator)
            outputs.append(forward(x, causal_mask(start, new_tokens, dtype, rows), state))
            start += new_tokens
    return outputs


PREFILL_AND_DECODE = [5] + [1] * (2 * CONFIG.residual_length + 3)


def assert_same_state(actual: KiviState, expected: KiviState) -> None:
    for name, tensor in expected.tensors().items():
        assert torch.equal(actual.tensors()[name], tensor), name
