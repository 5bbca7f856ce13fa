"""Models with random weights and caches that hold random tokens: what a decode step costs depends on neither.

Needs transformers, no hub. Must not know what is measured.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kivi_ops import KiviConfig, KiviState
from kivi_ops.benchmarks.common import Machine
from kivi_ops.benchmarks.states import fill
from kivi_ops.demo import cache_argument

WARM_UP_STEPS = 4  # one to compile, one to record the graph, two to be sure


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 128


LLAMA_3_8B = Shape(32, 4096, 14336, 32, 8, 128256)
LLAMA_2_7B = Shape(32, 4096, 11008, 32, 32, 32000)
TINY_GQA = Shape(2, 64, 128, 4, 2, 128, head_dim=32)
TINY_MHA = Shape(2, 64, 128, 2, 2, 128, head_dim=32)
CACHES = ("kivi-2", "kivi-4", "static", "quantized-2", "quantized-4")
QUANTIZED_BACKENDS = {"quanto": "optimum.quanto", "hqq": "hqq"}


def llama(shape: Shape, machine: Machine, positions: int) -> Any:
    """A Llama in bfloat16 with random weights, made where it will run."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=positions,
    )
    with torch.device(machine.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()


def weight_bytes(model: Any) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def kivi_bits(kind: str) -> int | None:
    """``"kivi-2"`` -> 2; None for another kind of cache."""
    return int(kind.removeprefix("kivi-")) if kind.startswith("kivi-") else None


def cache_bytes(kind: str, shape: Shape, rows: int, capacity: int) -> int:
    """Bytes that a KIVI or static cache holds, all layers."""
    bits = kivi_bits(kind)
    if bits is None:
        return 2 * shape.layers * rows * shape.kv_heads * capacity * shape.head_dim * torch.bfloat16.itemsize
    sizes = (rows, shape.kv_heads, capacity, shape.head_dim, shape.head_dim)
    return shape.layers * KiviState.allocate(KiviConfig(bits, bits), *sizes, torch.bfloat16, "meta").held_bytes()


def empty_cache(kind: str, model: Any, shape: Shape, rows: int, capacity: int) -> Any:
    """A KIVI or static cache, allocated and empty."""
    import transformers

    bits = kivi_bits(kind)
    cache: Any
    if bits is None:
        cache = transformers.StaticCache(config=model.config, max_cache_len=capacity)
    else:
        from kivi_ops import KiviCache

        cache = KiviCache(model.config, capacity, KiviConfig(bits, bits), left_padding=[0] * rows)
    cache.early_initialization(rows, shape.kv_heads, shape.head_dim, torch.bfloat16, model.device)
    return cache


def filled_cache(kind: str, model: Any, shape: Shape, rows: int, tokens: int, room: int) -> Any:
    """A cache whose rows hold ``tokens`` random tokens, with ``room`` for more.

    Raises:
        ImportError: transformers' QuantizedCache without a package that it quantises with.
    """
    if kind.startswith("quantized-"):
        return _quantized_cache(int(kind.removeprefix("quantized-")), model, shape, rows, tokens)
    cache = empty_cache(kind, model, shape, rows, tokens + room)
    for layer in cache.layers:
        if kivi_bits(kind) is not None:
            fill(layer.state, tokens)
        else:
            layer.keys[:, :, :tokens].normal_()
            layer.values[:, :, :tokens].normal_()
            layer.cumulative_length.fill_(tokens)
    return cache


def quantized_backend() -> str | None:
    """What transformers' QuantizedCache could quantise with here."""
    for name, module in QUANTIZED_BACKENDS.items():
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(module) is not None:
                return name
    return None


def _quantized_cache(bits: int, model: Any, shape: Shape, rows: int, tokens: int) -> Any:
    import transformers

    backend = quantized_backend()
    if backend is None:
        raise ImportError("transformers' QuantizedCache needs optimum-quanto or hqq, and neither is installed")
    cache = transformers.QuantizedCache(backend, model.config, nbits=bits)
    for index in range(shape.layers):
        size = (rows, shape.kv_heads, tokens, shape.head_dim)
        key, value = (torch.randn(size, dtype=torch.bfloat16, device=model.device) for _ in range(2))
        cache.update(key, value, index)
    return cache


@contextlib.contextmanager
def compiled(kind: str, model: Any, machine: Machine) -> Iterator[Callable[..., Any]]:
    """The model's forward as a decode step runs it: compiled with CUDA graphs, KIVI by its own backend and a static cache by Inductor.

    QuantizedCache cannot be compiled and stays eager. On a CPU the graph runs as it was captured: a C++ compiler takes longer than what
    is tested there.
    """
    torch._dynamo.reset()
    if kind.startswith("quantized-"):
        yield model.forward
        return
    options: dict[str, Any] = {}
    if kivi_bits(kind) is not None:
        how = {"mode": "reduce-overhead"} if machine.is_gpu else {"compiler": "eager"}
        options = {"backend": "kivi", "options": {"strict": True, **how}}
    else:
        options = {"backend": "inductor", "mode": "reduce-overhead"} if machine.is_gpu else {"backend": "eager"}
    try:
        yield torch.compile(model.forward, fullgraph=True, **options)
    finally:
        torch._dynamo.reset()  # graphs hold memory


class Decoding:
    """Greedy decode steps of all rows; the next token is chosen on the device."""

    def __init__(self, model: Any, forward: Callable[..., Any], cache: Any, rows: int) -> None:
        self.forward, self.cache = forward, {cache_argument(model): cache}
        self.token = torch.zeros((rows, 1), dtype=torch.int64, device=model.device)

    def take(self, logits: Tensor) -> None:
        """The next tokens, from logits [B, S, V]."""
        self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))

    @torch.no_grad()
    def steps(self, count: int) -> None:
        for _ in range(count):
            torch.compiler.cudagraph_mark_step_begin()
            self.take(self.forward(input_ids=self.token, use_cache=True, **self.cache).logits)

    def seconds(self, count: int, machine: Machine) -> float:
        """Wall time of ``count`` steps."""
        machine.synchronize()
        begin = time.perf_counter()
        self.steps(count)
        machine.synchronize()
        return time.perf_counter() - begin
