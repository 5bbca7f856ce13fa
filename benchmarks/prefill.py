"""How long does attention of a prompt take, and of a chunk of new tokens over a long KIVI history, against float attention?

    kivi-ops bench prefill [--json FILE]

One batch row, 8 KV heads of 4 query heads. "first": the prompt is all there is, and attention is exact over the floats it was given;
the float side is the faster of PyTorch's flash and cuDNN attention, causal. "chunk": 512 new tokens over a history (a later turn, or one
piece of a long prompt); the float side reads history and chunk without a mask, which is at most 1 % more work than the causal one.
Times with a dirty L2, in a CUDA graph. Both sides multiply as many matrices, so the float side is what tensor cores allow: here KIVI
saves memory, not time.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from kivi_ops import KiviConfig, KiviState
from kivi_ops.benchmarks import BENCHMARKS
from kivi_ops.benchmarks.common import Column, Machine, Report, size_of
from kivi_ops.benchmarks.kernels import check, float_microseconds
from kivi_ops.benchmarks.states import exact_attention, needed_bytes, random_state

HEADS, REPEATS = 8, 4
COLUMNS = (
    Column("case", "case", width=6),
    Column("tokens", "history", width=8),
    Column("new_tokens", "new", width=6),
    Column("bits", "bits", width=4),
    Column("dim", "D", width=3),
    Column("dtype", "dtype", width=8),
    Column("float_us", "float", ".1f", " us", width=12),
    Column("kivi_us", "KIVI", ".1f", " us", width=12),
    Column("ratio", "ratio", ".2f", "x", width=6),
    Column("teraflops", "TFLOP/s", ".0f", width=7),
    Column("float_bytes", "float MB", ".1f", factor=1e-6, width=8),
    Column("bytes", "KIVI MB", ".1f", factor=1e-6, width=8),
    Column("error", "error", ".0e", width=6),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", type=size_of, nargs="+", default=[size_of("8K")], metavar="T", help="first prompts (default: 8K)")
    add("--history", type=size_of, nargs="+", default=[size_of("32K")], metavar="T", help="histories of a chunk (default: 32K)")
    add("--chunk", type=int, default=512, metavar="S", help="new tokens over a history (default: %(default)s)")
    add("--bits", type=int, nargs="+", default=[2, 4], choices=[2, 4, 8])
    add("--dim", type=int, default=128, metavar="D", help="head size (default: %(default)s)")
    add("--dtype", default="float16", choices=["float16", "bfloat16"])


def run(options: argparse.Namespace, machine: Machine) -> Report:
    setup = {"copy_bandwidth": machine.copy_bandwidth(), "kv_heads": HEADS, "repeats": REPEATS}
    report = Report("prefill", BENCHMARKS["prefill"], machine, COLUMNS, setup, options.json)
    points = [("first", 0, tokens) for tokens in options.prompt] + [("chunk", tokens + 65, options.chunk) for tokens in options.history]
    if machine.tiny:
        points = [("first", 0, 70), ("chunk", 300, 33)]
    for case, tokens, new in points:
        for bits in options.bits:
            labels = {"case": case, "tokens": tokens, "new_tokens": new, "bits": bits, "dim": options.dim, "dtype": options.dtype}
            report.attempt(labels, partial(_measure, KiviConfig(bits, bits), tokens, new, options, machine))
    report.note(f"copy bandwidth {setup['copy_bandwidth'] / 1e12:.2f} TB/s; TFLOP/s are KIVI's, of the products a causal mask leaves")
    return report


def _measure(config: KiviConfig, tokens: int, new: int, options: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    dtype, device, dim = getattr(torch, options.dtype), machine.device, options.dim
    query = torch.randn(1, HEADS * REPEATS, new, dim, dtype=dtype, device=device)
    key, value = (torch.randn(1, HEADS, new, dim, dtype=dtype, device=device) for _ in range(2))
    if tokens:
        state = random_state(config, HEADS, [tokens], dim, dtype, device, room=new)
    else:
        state = KiviState.allocate(config, 1, HEADS, new, dim, dim, dtype, device)
    position = state.length.clone()
    expected = exact_attention(state, 0, HEADS - 1, query[:, :, :256], key[:, :, :256], value[:, :, :256], position)
    row: dict[str, Any] = {"bytes": needed_bytes(config, HEADS, [tokens], dim, dtype) if tokens else 0.0}
    row["bytes"] += key.nbytes + value.nbytes

    def attend() -> torch.Tensor:
        return state.attention(query, key, value, position, is_causal=True)

    row["error"] = check("attention", attend()[0, -REPEATS:, :256], expected)  # causal: these do not see what comes after them
    row["kivi_us"] = machine.microseconds(attend)
    # every query head with K and V of its own, since only some versions of the float kernels take fewer KV heads
    keys, values = (torch.randn(1, HEADS * REPEATS, tokens + new, dim, dtype=dtype, device=device) for _ in range(2))
    row["float_us"], _, row["float_kernel"] = float_microseconds(machine, query, keys, values, is_causal=tokens == 0)
    row["float_bytes"] = (keys.nbytes + values.nbytes) / REPEATS
    row["ratio"] = row["float_us"] / row["kivi_us"]
    row["teraflops"] = 4 * HEADS * REPEATS * dim * new * (tokens + (new + 1) / 2) / row["kivi_us"] * 1e-6
    return row


if __name__ == "__main__":
    import sys

    from kivi_ops.cli import main

    raise SystemExit(main(["bench", "prefill", *sys.argv[1:]]))
