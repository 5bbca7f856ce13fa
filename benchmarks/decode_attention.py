"""How long does one decode step's attention take over a KIVI cache, against the best float attention over a float cache?

    kivi-ops bench decode_attention [--preset must-show] [--json FILE]

"heads" are KV heads, 8 a batch row; each has "q" query heads. States hold a window of 128 tokens and a length that is a multiple of
nothing, and the new token is attended to as well. The float side is the faster of PyTorch's flash and cuDNN attention, with the query
heads of a KV head folded into query rows so that K and V are read once. Everything a step's attention launches is in one CUDA graph.

"ratio" is float time over KIVI time, both with a dirty L2 (as triton.testing.do_bench measures). "of copy" is the rate at which the bytes
that KIVI must read arrive, with a clean L2, as a share of what a device-to-device copy reaches in the same run; "read" is a plain read of
as many bytes. "portable" is the plain Triton kernel. Each kernel is first checked against float64 on one KV head.

In a ragged row the batch's lengths go evenly from 1 K to the length named; its float side reads every row at full length, as a static cache
does, and it is followed by a batch of as many tokens with equal lengths.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kivi_ops import KiviConfig
from kivi_ops.benchmarks import BENCHMARKS
from kivi_ops.benchmarks.common import Column, Machine, Report, size_of
from kivi_ops.benchmarks.kernels import check, float_microseconds, kivi_kernels
from kivi_ops.benchmarks.states import exact_attention, needed_bytes, random_state

ROW_HEADS = 8  # KV heads of a batch row
EXTRA = 65  # beyond a round length: half a Key window, and a record that is not full
SHORTEST = 1024  # of a ragged batch
K = 1024

COLUMNS = (
    Column("kv_heads", "heads", width=5),
    Column("tokens", "tokens", width=7),
    Column("bits", "bits", width=4),
    Column("repeats", "q", width=3),
    Column("dim", "D", width=3),
    Column("dtype", "dtype", width=8),
    Column("batch_kind", "lengths", width=8),
    Column("float_us", "float", ".1f", " us", width=10),
    Column("kivi_us", "KIVI", ".1f", " us", width=10),
    Column("ratio", "ratio", ".2f", "x", width=6),
    Column("kivi_clean_us", "clean", ".1f", " us", width=10),
    Column("copy_share", "of copy", ".0%", width=7),
    Column("read_us", "read", ".1f", " us", width=9),
    Column("bytes", "MB", ".1f", factor=1e-6, width=7),
    Column("portable_us", "portable", ".1f", " us", width=10),
    Column("portable_ratio", "ratio", ".2f", "x", width=6),
    Column("error", "error", ".0e", width=6),
)


@dataclass(frozen=True)
class Case:
    kv_heads: int
    tokens: int
    bits: int = 2
    repeats: int = 4
    dim: int = 128
    dtype: str = "float16"
    kind: str = "equal"  # or "ragged"

    def lengths(self) -> list[int]:
        """Tokens of each batch row."""
        rows = max(1, self.kv_heads // ROW_HEADS)
        if self.kind == "equal":
            return [(self.tokens + EXTRA) | 1] * rows
        shortest = min(SHORTEST, self.tokens)
        return [(shortest + (self.tokens - shortest) * row // max(1, rows - 1) + EXTRA) | 1 for row in range(rows)]


SIZES = [(64, 128 * K), (64, 32 * K), (256, 8 * K), (8, 128 * K), (8, 32 * K), (64, 8 * K)]
RAGGED = [Case(64, 128 * K, kind="ragged"), Case(256, 128 * K, kind="ragged")]


def _must_show() -> list[Case]:
    cases = []
    for size in SIZES:
        cases += [Case(*size), Case(*size, repeats=8), Case(*size, bits=4), Case(*size, dtype="bfloat16")]
    for tokens in (128 * K, 32 * K):
        cases += [Case(64, tokens, repeats=1), Case(64, tokens, repeats=16), Case(64, tokens, dim=64), Case(64, tokens, dim=64, bits=4)]
    for ragged in RAGGED:
        mean = sum(ragged.lengths()) // len(ragged.lengths())
        cases += [ragged, Case(ragged.kv_heads, mean - EXTRA)]
    return cases


PRESETS = {
    "must-show": _must_show(),
    "quick": [Case(64, 32 * K), Case(64, 32 * K, bits=4), Case(8, 32 * K), Case(64, 32 * K, dim=64), Case(64, 8 * K, dtype="bfloat16")],
    "sweep": [Case(heads, tokens * K, bits) for heads in (8, 64) for tokens in (1, 2, 4, 8, 16, 32, 64, 128) for bits in (2, 4)],
}
TINY = [
    Case(8, 300),
    Case(8, 300, bits=4, repeats=1),
    Case(16, 520, dim=64, dtype="bfloat16"),
    Case(16, 520, repeats=16, kind="ragged"),
]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), default="quick", help="must-show: every size the README reports (default: %(default)s)")
    add("--heads", type=int, nargs="+", metavar="N", help=f"KV heads (multiples of {ROW_HEADS}) instead of a preset's")
    add("--tokens", type=size_of, nargs="+", default=[32 * K], metavar="T", help="with --heads: lengths such as 32K")
    add("--bits", type=int, nargs="+", default=[2], choices=[2, 4, 8], help="with --heads")
    add("--repeats", type=int, nargs="+", default=[4], metavar="N", help="with --heads: query heads of a KV head")
    add("--dim", type=int, nargs="+", default=[128], metavar="D", help="with --heads: head size")
    add("--dtype", nargs="+", default=["float16"], choices=["float16", "bfloat16"], help="with --heads")
    add("--no-portable", action="store_true", help="leave out the plain Triton kernel, which takes longest to compile")
    add("--ragged", action="store_true", help="with --heads: lengths from 1 K to the length given")


def _cases(options: argparse.Namespace, tiny: bool) -> list[Case]:
    if options.heads is None:
        return TINY if tiny else PRESETS[options.preset]
    for heads in options.heads:
        if heads < 1 or heads % ROW_HEADS:
            raise ValueError(f"--heads is {heads}; allowed: multiples of {ROW_HEADS}, the KV heads of a batch row")
    kind = "ragged" if options.ragged else "equal"
    return [
        Case(heads, tokens, bits, repeats, dim, dtype, kind)
        for heads in options.heads
        for tokens in options.tokens
        for dim in options.dim
        for dtype in options.dtype
        for repeats in options.repeats
        for bits in options.bits
    ]


def run(options: argparse.Namespace, machine: Machine) -> Report:
    bandwidth = machine.copy_bandwidth()
    setup = {"copy_bandwidth": bandwidth, "empty_graph_us": machine.empty_graph_microseconds(), "group_size": 32, "residual_length": 128}
    report = Report("decode_attention", BENCHMARKS["decode_attention"], machine, COLUMNS, setup, options.json)

    @cache  # KIVI's bits do not matter to it
    def float_times(rows: int, tokens: int, repeats: int, dim: int, dtype: str) -> dict[str, Any]:
        options = {"dtype": getattr(torch, dtype), "device": machine.device}
        query = torch.randn(rows, ROW_HEADS, repeats, dim, **options)
        key, value = (torch.randn(rows, ROW_HEADS, tokens, dim, **options) for _ in range(2))
        dirty, clean, name = float_microseconds(machine, query, key, value)
        return {"float_us": dirty, "float_clean_us": clean, "float_kernel": name, "float_bytes": key.nbytes + value.nbytes}

    for case in _cases(options, machine.tiny):
        lengths = case.lengths()
        labels = {
            "kv_heads": case.kv_heads,
            "tokens": max(lengths),
            "tokens_in_all": sum(lengths),
            "bits": case.bits,
            "repeats": case.repeats,
            "dim": case.dim,
            "dtype": case.dtype,
            "batch_kind": case.kind,
        }

        def measure(case: Case = case, lengths: list[int] = lengths) -> dict[str, Any]:
            row = float_times(len(lengths), max(lengths) + 1, case.repeats, case.dim, case.dtype)
            return {**row, **_measure(case, lengths, machine, bandwidth, row["float_us"], portable=not options.no_portable)}

        report.attempt(labels, measure)
    _conclude(report)
    return report


def _measure(case: Case, lengths: list[int], machine: Machine, bandwidth: float, float_us: float, portable: bool) -> dict[str, Any]:
    dtype, device, rows = getattr(torch, case.dtype), machine.device, len(lengths)
    config = KiviConfig(case.bits, case.bits)
    state = random_state(config, ROW_HEADS, lengths, case.dim, dtype, device)
    query = torch.randn(rows, ROW_HEADS * case.repeats, 1, case.dim, dtype=dtype, device=device)
    key, value = (torch.randn(rows, ROW_HEADS, 1, case.dim, dtype=dtype, device=device) for _ in range(2))
    position = state.length.clone()
    size = needed_bytes(config, ROW_HEADS, lengths, case.dim, dtype)
    row: dict[str, Any] = {"bytes": size, "read_us": machine.plain_read_microseconds(size), "error": 0.0}
    expected = exact_attention(state, rows - 1, ROW_HEADS - 1, query, key, value, position)
    for name, kernel in kivi_kernels(state, query, key, value, position).items():
        if name == "portable" and not portable:
            continue
        prefix = "kivi" if name == "auto" else name
        output = kernel()[rows - 1, -case.repeats :]
        row["error"] = max(row["error"], check(f"{name} attention", output, expected))
        dirty, clean = machine.dirty_and_clean(kernel)
        row |= {f"{prefix}_us": dirty, f"{prefix}_clean_us": clean}
        row[f"{prefix}_ratio"] = float_us / dirty
        row[f"{prefix}_copy_share"] = size / (clean * 1e-6) / bandwidth
    row["ratio"], row["copy_share"] = row.pop("kivi_ratio"), row.pop("kivi_copy_share")
    return row


def _conclude(report: Report) -> None:
    """What only several rows together can say."""
    done = [row for row in report.rows if "failed" not in row]
    report.note(f"copy bandwidth {report.setup['copy_bandwidth'] / 1e12:.2f} TB/s; empty graph {report.setup['empty_graph_us']:.1f} us")
    if done:
        mean = math.exp(sum(math.log(row["ratio"]) for row in done) / len(done))
        report.note(f"geometric mean of the ratios {mean:.2f}x; the new token's K and V, the query and the output are not in the bytes")
    alike = ("kv_heads", "bits", "repeats", "dim", "dtype")
    for ragged in (row for row in done if row["batch_kind"] == "ragged"):
        for equal in (row for row in done if row["batch_kind"] == "equal"):
            close = abs(equal["tokens_in_all"] - ragged["tokens_in_all"]) <= 0.01 * ragged["tokens_in_all"]
            if close and all(ragged[name] == equal[name] for name in alike):
                share = ragged["kivi_clean_us"] / equal["kivi_clean_us"]
                report.note(f"ragged, {ragged['tokens_in_all']} tokens a head: {share:.2f}x the time of equal lengths (clean)")


if __name__ == "__main__":
    import sys

    from kivi_ops.cli import main

    raise SystemExit(main(["bench", "decode_attention", *sys.argv[1:]]))
