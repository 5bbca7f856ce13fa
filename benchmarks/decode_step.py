"""How fast does a whole model decode over a KIVI cache, what memory does it take, and how many rows fit?

    kivi-ops bench decode_step [--points 1x32K 16x32K 1x128K] [--caches kivi-2 kivi-4 static quantized-2] [--largest 8K 32K] [--json FILE]

A Llama-3.1-8B shape (32 layers, 32 query and 8 KV heads of 128) in bfloat16 with random weights; caches hold random tokens. KIVI runs under
backend="kivi", transformers' StaticCache with SDPA under Inductor, both with mode="reduce-overhead" (CUDA graphs) and fullgraph;
transformers' QuantizedCache runs eagerly, as it must, where optimum-quanto or hqq is installed.

"peak" is the most memory that tensors held from the cache's allocation to the last step, weights included; "cache" is what the cache holds.
"to static" compares tokens/s with the static cache at the same batch and length. A "largest" row is at the greatest batch that fits: from
the bytes of a row and what a smaller run took beyond weights and cache, then run. Compiling takes most of the time; rows past --budget
seconds are not begun, and are named as such: choose --points, --caches, --largest to measure them.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from kivi_ops.benchmarks import BENCHMARKS
from kivi_ops.benchmarks.common import Column, Machine, Report, free_memory, size_of
from kivi_ops.benchmarks.models import (
    CACHES,
    LLAMA_3_8B,
    TINY_GQA,
    WARM_UP_STEPS,
    Decoding,
    Shape,
    cache_bytes,
    compiled,
    filled_cache,
    kivi_bits,
    llama,
    quantized_backend,
    weight_bytes,
)

ROOM = 512  # tokens beyond those held at first
ATTEMPTS, STEP_BACK = 4, 0.95  # a batch that does not fit after all
CALIBRATION_ROWS = 4

COLUMNS = (
    Column("case", "case", width=7),
    Column("cache", "cache", width=11),
    Column("batch", "batch", width=5),
    Column("tokens", "tokens", width=7),
    Column("tokens_per_second", "tokens/s", ".1f", width=9),
    Column("ms_per_step", "a step", ".2f", " ms", width=11),
    Column("to_static", "to static", ".2f", "x", width=9),
    Column("peak_bytes", "peak GiB", ".1f", factor=2**-30, width=8),
    Column("cache_bytes", "cache GiB", ".2f", factor=2**-30, width=9),
    Column("first_step_s", "compiled in", ".0f", " s", width=11),
)


def point(text: str) -> tuple[int, int]:
    """``"16x32K"`` -> (16, 32768): batch and tokens; for argparse."""
    rows, separator, tokens = text.lower().partition("x")
    if not separator or not rows.isdigit() or int(rows) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not batch x tokens such as 16x32K")
    return int(rows), size_of(tokens)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--points", type=point, nargs="*", default=[point("1x32K"), point("16x32K"), point("1x128K")], metavar="BxT")
    caches = ["static", "kivi-2", "kivi-4", "quantized-2"]
    add("--caches", nargs="+", default=caches, choices=CACHES, metavar="CACHE", help=", ".join(CACHES))
    add("--largest", type=size_of, nargs="*", default=[], metavar="T", help="lengths at which the largest batch is sought, such as 8K 32K")
    add("--steps", type=int, default=32, metavar="N", help="timed decode steps (default: %(default)s)")
    add("--layers", type=int, metavar="N", help="fewer layers, for a quick look")
    add("--budget", type=float, default=230, metavar="S", help="seconds after which no further row is begun (default: %(default)s)")


def run(options: argparse.Namespace, machine: Machine) -> Report:
    shape, points, largest, steps = LLAMA_3_8B, options.points, options.largest, options.steps
    if options.steps < 1 or options.steps + WARM_UP_STEPS > ROOM:
        raise ValueError(f"--steps is {options.steps}; allowed: 1 to {ROOM - WARM_UP_STEPS}")
    if machine.tiny:
        shape, points, largest, steps = TINY_GQA, [(2, 200)], [150], 2
    elif options.layers:
        shape = replace(shape, layers=options.layers)
    began = time.monotonic()
    model = llama(shape, machine, max([tokens for _, tokens in points] + largest + [1]) + ROOM)
    memory = {"weight_bytes": weight_bytes(model), "usable_bytes": machine.usable_bytes()}
    setup = {**vars(shape), "steps": steps, "dtype": "bfloat16", **memory}
    report = Report("decode_step", BENCHMARKS["decode_step"], machine, COLUMNS, setup, options.json)
    beyond: dict[str, float] = {}  # bytes beyond weights and cache, by cache, for a row and token held

    def attempt(case: str, kind: str, rows: int, tokens: int, static: float | None = None) -> dict[str, Any]:
        labels = {"case": case, "cache": kind, "batch": rows, "tokens": tokens}
        if time.monotonic() - began > options.budget:
            row = {**labels, "failed": f"not run: --budget of {options.budget:.0f} s is used up"}
            report.add(row)
            return row

        def timed() -> dict[str, Any]:
            row = measure(kind, model, shape, rows, tokens, steps, machine)
            return row if static is None else {**row, "to_static": row["tokens_per_second"] / static}

        row = report.attempt(labels, timed)
        if "failed" not in row:
            other = row["peak_bytes"] - setup["weight_bytes"] - row.get("cache_bytes", 0)
            beyond[kind] = max(beyond.get(kind, 0.0), other / (rows * tokens))
        return row

    for rows, tokens in points:
        static = None
        for kind in sorted(options.caches, key=lambda kind: kind != "static"):
            if kind.startswith("quantized-") and quantized_backend() is None:
                why = "optimum-quanto or hqq is not installed"
                report.add({"case": "speed", "cache": kind, "batch": rows, "tokens": tokens, "failed": f"not run: {why}"})
                continue
            row = attempt("speed", kind, rows, tokens, static)
            static = row.get("tokens_per_second") if kind == "static" else static
    for tokens in largest:
        for kind in (kind for kind in options.caches if not kind.startswith("quantized-")):
            if kind not in beyond:
                attempt("trial", kind, min(CALIBRATION_ROWS, 2) if machine.tiny else CALIBRATION_ROWS, tokens)
            rows = fitting_rows(kind, shape, tokens, beyond.get(kind, 0.0), setup)
            for _ in range(ATTEMPTS):
                row = attempt("largest", kind, rows, tokens)
                if row.get("failed") != "out of memory":
                    break
                rows = max(1, int(rows * STEP_BACK))
    _conclude(report)
    return report


def fitting_rows(kind: str, shape: Shape, tokens: int, beyond: float, setup: dict[str, Any]) -> int:
    """The largest batch that ought to fit, 2 % of the memory left free for fragments."""
    row = cache_bytes(kind, shape, 1, tokens + ROOM) + beyond * tokens
    return max(1, int((setup["usable_bytes"] * 0.98 - setup["weight_bytes"]) / row))


def measure(kind: str, model: Any, shape: Shape, rows: int, tokens: int, steps: int, machine: Machine) -> dict[str, Any]:
    """One row: a cache of ``rows`` x ``tokens``, and decode steps over it."""
    free_memory()
    machine.reset_peak()
    cache = filled_cache(kind, model, shape, rows, tokens, ROOM)
    with compiled(kind, model, machine) as forward:
        decoding = Decoding(model, forward, cache, rows)
        first = decoding.seconds(1, machine)
        decoding.steps(WARM_UP_STEPS - 1)
        seconds = decoding.seconds(steps, machine) / steps
    row: dict[str, Any] = {
        "tokens_per_second": rows / seconds,
        "ms_per_step": seconds * 1e3,
        "first_step_s": first,
        "peak_bytes": machine.peak_bytes(),
    }
    if not kind.startswith("quantized-"):
        row["cache_bytes"] = cache_bytes(kind, shape, rows, tokens + ROOM)
    if kivi_bits(kind) is not None and cache.held_bytes() != row["cache_bytes"]:
        raise ArithmeticError(f"the cache holds {cache.held_bytes()} bytes, expected {row['cache_bytes']}")
    return row


def _conclude(report: Report) -> None:
    done = [row for row in report.rows if "failed" not in row]
    for row in done:
        if "to_static" in row and row["cache"] != "static":
            text = f"{row['to_static']:.2f}x the static cache's tokens/s"
            report.note(f"{row['cache']} at {row['batch']} x {row['tokens']} tokens: {text}")
    for row in (row for row in done if row["case"] == "largest" and row["cache"] != "static"):
        for static in (other for other in done if (other["case"], other["cache"], other["tokens"]) == ("largest", "static", row["tokens"])):
            batch, speed = row["batch"] / static["batch"], row["tokens_per_second"] / static["tokens_per_second"]
            report.note(f"{row['cache']} at {row['tokens']} tokens: {batch:.2f}x the batch, {speed:.2f}x the tokens/s")


if __name__ == "__main__":
    import sys

    from kivi_ops.cli import main

    raise SystemExit(main(["bench", "decode_step", *sys.argv[1:]]))
