"""How long does one decode step's attention take over a KIVI cache, against the best float16 attention over a float16 cache?

    python benchmarks/decode_attention.py [--bits 2 4] [--json benchmarks/results/decode_attention.json]

Llama-3-8B shapes by default: 32 query heads, 8 KV heads, D = 128, one new token. The float side is the fastest of PyTorch's flash and
cuDNN attention, with the query heads of a KV head folded into query rows so that K and V are read once. Both sides are captured in a CUDA
graph and timed by ``triton.testing.do_bench`` (median; L2 flushed by writing). Bytes are those that must be read; bandwidth is theirs over
the time, as a share of what a device-to-device copy reaches on the same machine in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from kivi_ops import KiviConfig, KiviState

DEVICE = "cuda"


def timed(function: Callable[[], object]) -> float:
    """Median milliseconds of ``function`` replayed from a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()  # compile outside of the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return do_bench(graph.replay, warmup=10, rep=60, return_mode="median")


def copy_bandwidth() -> float:
    """Bytes read and written a second by a device-to-device copy of 2 GiB."""
    source = torch.empty(2**30, dtype=torch.float16, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (do_bench(lambda: target.copy_(source), return_mode="median") * 1e-3)


def float_milliseconds(batch: int, heads: int, repeats: int, tokens: int, dim: int, dtype: torch.dtype) -> tuple[float, str]:
    """The fastest float attention and its name."""
    query = torch.randn(batch, heads, repeats, dim, dtype=dtype, device=DEVICE)
    key, value = (torch.randn(batch, heads, tokens, dim, dtype=dtype, device=DEVICE) for _ in range(2))
    times = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            times.append((timed(lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value)), backend.name))
    return min(times)


def filled(config: KiviConfig, batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> KiviState:
    """A state of random tokens, handed over 8192 at a time."""
    state = KiviState.allocate(config, batch, heads, tokens + 256, dim, dim, dtype, DEVICE)
    for start in range(0, tokens, 8192):
        shape = (batch, heads, min(8192, tokens - start), dim)
        key, value = (torch.randn(shape, dtype=dtype, device=DEVICE) for _ in range(2))
        state.append(key, value, torch.tensor(start, device=DEVICE))
    return state


def needed_bytes(state: KiviState, tokens: int) -> float:
    """Bytes of the sealed and float tokens that a step must read."""
    (batch, heads, _, dim), (key_end, value_end) = state.key_window.shape, state.sealed[0].tolist()
    key, value = state.key_layout, state.value_layout
    sealed = key_end * key.words * 2 / key.tokens + value_end * value.words * 2 / value.tokens
    return batch * heads * (sealed + (2 * tokens - key_end - value_end) * dim * state.dtype.itemsize)


def kivi_milliseconds(
    config: KiviConfig, batch: int, heads: int, repeats: int, tokens: int, dim: int, dtype: torch.dtype
) -> tuple[float, float, float]:
    """Bytes that a step must read, and the times of its attention and its append."""
    state = filled(config, batch, heads, tokens, dim, dtype)
    query = torch.randn(batch, heads * repeats, 1, dim, dtype=dtype, device=DEVICE)
    key, value = (torch.randn(batch, heads, 1, dim, dtype=dtype, device=DEVICE) for _ in range(2))
    position = torch.tensor(tokens, device=DEVICE)
    attention = timed(lambda: state.attention(query, key, value, position))
    return needed_bytes(state, tokens), attention, timed(lambda: state.append(key, value, position))


def run(arguments: argparse.Namespace) -> dict:
    dtype = getattr(torch, arguments.dtype)
    heads, dim = arguments.kv_heads, arguments.head_dim
    repeats = arguments.query_heads // heads
    bandwidth = copy_bandwidth()
    rows = []
    for batch in arguments.batch:
        for tokens in arguments.tokens:
            held = tokens + 65  # not a multiple of anything
            float_ms, float_name = float_milliseconds(batch, heads, repeats, held + 1, dim, dtype)
            for bits in arguments.bits:
                size, attention, append = kivi_milliseconds(KiviConfig(bits, bits), batch, heads, repeats, held, dim, dtype)
                rows.append(
                    {
                        "batch": batch,
                        "tokens": held,
                        "bits": bits,
                        "float_us": float_ms * 1e3,
                        "float_kernel": float_name,
                        "kivi_us": attention * 1e3,
                        "append_us": append * 1e3,
                        "ratio": float_ms / attention,
                        "bytes": size,
                        "copy_share": size / (attention * 1e-3) / bandwidth,
                    }
                )
                print(line(rows[-1]), flush=True)
            torch.cuda.empty_cache()
    machine = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": date.today().isoformat(),
    }
    setup = {
        "query_heads": arguments.query_heads,
        "kv_heads": heads,
        "head_dim": dim,
        "dtype": arguments.dtype,
        "copy_bandwidth": bandwidth,
    }
    return {"machine": machine, "setup": setup, "rows": rows}


HEADER = f"{'batch':>5} {'tokens':>7} {'bits':>4} {'float':>10} {'KIVI':>10} {'ratio':>6} {'MB':>7} {'of copy':>7} {'append':>9}"


def line(row: dict) -> str:
    return (
        f"{row['batch']:>5} {row['tokens']:>7} {row['bits']:>4} {row['float_us']:>7.1f} us {row['kivi_us']:>7.1f} us {row['ratio']:>5.2f}x "
        f"{row['bytes'] / 1e6:>7.1f} {row['copy_share']:>6.0%} {row['append_us']:>6.1f} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--query-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    print(HEADER)
    results = run(arguments)
    print(f"copy bandwidth {results['setup']['copy_bandwidth'] / 1e12:.2f} TB/s; geometric mean ratio "
          f"{math.exp(sum(math.log(r['ratio']) for r in results['rows']) / len(results['rows'])):.2f}x")  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
