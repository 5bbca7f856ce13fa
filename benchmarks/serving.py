"""When memory is full, how many sequences does KIVI serve at once, and how many tokens a second, against the float cache?

    kivi-ops bench serving [--prompt 161] [--new-tokens 338] [--caches static kivi-2] [--json FILE]

The paper's claim (up to 4x the batch and 2.35x to 3.47x the throughput, on an 80 GB A100): a Llama-2-7B shape (32 layers, 32 KV heads of
128) with random weights, here in bfloat16; every sequence has a prompt of 161 tokens and 338 new ones, R = 128. The batch is raised until
memory is full: what a prompt pass takes is measured at two small batches, the rest is arithmetic, and the batch is then run, smaller by 5 %
each time it does not fit after all.

"tokens/s" counts new tokens over the whole run, prompt pass (eager) included; "decode" is of the decode steps alone (compiled, with CUDA
graphs). Compiling is done before. "cache" is what the cache holds for one sequence: the float windows are R = 128 tokens whatever the
length, which limits the ratio for sequences as short as these.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kivi_ops import KiviConfig
from kivi_ops.benchmarks import BENCHMARKS
from kivi_ops.benchmarks.common import Column, Machine, Report, free_memory, size_of
from kivi_ops.benchmarks.models import (
    LLAMA_2_7B,
    TINY_MHA,
    WARM_UP_STEPS,
    Decoding,
    Shape,
    cache_bytes,
    compiled,
    empty_cache,
    llama,
    weight_bytes,
)

TRIAL_ROWS = (8, 24)
ATTEMPTS, STEP_BACK = 5, 0.95
USABLE = 0.92  # of the memory; the rest is left to fragments, CUDA graphs and compiled code (0.97 ran out of it)

COLUMNS = (
    Column("cache", "cache", width=8),
    Column("batch", "batch", width=6),
    Column("prompt", "prompt", width=6),
    Column("new_tokens", "new", width=5),
    Column("tokens_per_second", "tokens/s", ".0f", width=9),
    Column("decode_tokens_per_second", "decode", ".0f", width=8),
    Column("prompt_s", "prompt pass", ".2f", " s", width=11),
    Column("ms_per_step", "a step", ".2f", " ms", width=11),
    Column("peak_bytes", "peak GiB", ".1f", factor=2**-30, width=8),
    Column("cache_row_bytes", "cache MiB", ".1f", factor=2**-20, width=9),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", type=size_of, default=161, metavar="T", help="prompt tokens of each sequence (default: %(default)s)")
    add("--new-tokens", type=size_of, default=338, metavar="N", help="new tokens of each sequence (default: %(default)s)")
    add("--caches", nargs="+", default=["static", "kivi-2"], choices=("static", "kivi-2", "kivi-4"))
    add("--batch", type=int, metavar="N", help="this batch instead of the largest")
    add("--layers", type=int, metavar="N", help="fewer layers, for a quick look")


def run(options: argparse.Namespace, machine: Machine) -> Report:
    shape, prompt, new = LLAMA_2_7B, options.prompt, options.new_tokens
    if new <= WARM_UP_STEPS:
        raise ValueError(f"--new-tokens is {new}; allowed: more than {WARM_UP_STEPS}")
    if machine.tiny:
        shape, prompt, new = TINY_MHA, 33, WARM_UP_STEPS + 2
    elif options.layers:
        shape = replace(shape, layers=options.layers)
    model = llama(shape, machine, prompt + new)
    setup = {**vars(shape), "dtype": "bfloat16", "weight_bytes": weight_bytes(model), "usable_bytes": machine.usable_bytes()}
    report = Report("serving", BENCHMARKS["serving"], machine, COLUMNS, setup, options.json)
    for kind in options.caches:
        rows = options.batch or (3 if machine.tiny else None)
        labels = {"cache": kind, "prompt": prompt, "new_tokens": new, "cache_row_bytes": cache_bytes(kind, shape, 1, prompt + new)}
        if rows is None:
            rows = _largest(kind, model, shape, prompt, new, machine)
        for _ in range(ATTEMPTS):
            row = report.attempt({**labels, "batch": rows}, partial(serve, kind, model, shape, rows, prompt, new, machine))
            if row.get("failed") != "out of memory":
                break
            rows = max(1, int(rows * STEP_BACK))
    _conclude(report)
    return report


def _largest(kind: str, model: Any, shape: Shape, prompt: int, new: int, machine: Machine) -> int:
    """The batch at which a prompt pass, which takes more than a decode step, would fill the memory: a line through two small ones."""
    peaks = []
    for rows in TRIAL_ROWS:
        free_memory()
        machine.reset_peak()
        cache = empty_cache(kind, model, shape, rows, prompt + new)
        prompt_pass(model, Decoding(model, model.forward, cache, rows), prompt)
        machine.synchronize()
        peaks.append(machine.peak_bytes())
        del cache
    free_memory()
    row = (peaks[1] - peaks[0]) / (TRIAL_ROWS[1] - TRIAL_ROWS[0])
    fixed = peaks[0] - TRIAL_ROWS[0] * row
    return max(1, int((machine.usable_bytes() * USABLE - fixed) / row))


@torch.no_grad()
def prompt_pass(model: Any, decoding: Decoding, tokens: int) -> None:
    """Prompts of random tokens through the model, eagerly; only the last position's logits are computed."""
    rows = decoding.token.shape[0]
    ids = torch.randint(model.config.vocab_size, (rows, tokens), device=decoding.token.device)
    decoding.take(model(input_ids=ids, use_cache=True, logits_to_keep=1, **decoding.cache).logits)


def serve(kind: str, model: Any, shape: Shape, rows: int, prompt: int, new: int, machine: Machine) -> dict[str, Any]:
    """One row: the whole of ``rows`` sequences, once to compile and once timed."""
    free_memory()
    machine.reset_peak()
    cache = empty_cache(kind, model, shape, rows, prompt + new)
    with compiled(kind, model, machine) as forward:
        decoding = Decoding(model, forward, cache, rows)
        prompt_pass(model, decoding, prompt)
        free_memory()  # graphs are recorded in a pool of their own
        decoding.steps(WARM_UP_STEPS)
        cache.reset()
        machine.synchronize()
        begin = time.perf_counter()
        prompt_pass(model, decoding, prompt)
        machine.synchronize()
        prompt_seconds = time.perf_counter() - begin
        decode_seconds = decoding.seconds(new - 1, machine)  # the prompt pass gave the first token
    return {
        "tokens_per_second": rows * new / (prompt_seconds + decode_seconds),
        "decode_tokens_per_second": rows * (new - 1) / decode_seconds,
        "prompt_s": prompt_seconds,
        "ms_per_step": decode_seconds / (new - 1) * 1e3,
        "peak_bytes": machine.peak_bytes(),
    }


def _conclude(report: Report) -> None:
    done = {row["cache"]: row for row in report.rows if "failed" not in row}
    static = done.get("static")
    for kind, row in done.items():
        if static is None or kind == "static":
            continue
        batch, speed = row["batch"] / static["batch"], row["tokens_per_second"] / static["tokens_per_second"]
        held = static["cache_row_bytes"] / row["cache_row_bytes"]
        windows = 2 * KiviConfig().window(row["prompt"] + row["new_tokens"]) / (2 * (row["prompt"] + row["new_tokens"]))
        report.note(
            f"{kind}: {batch:.2f}x the batch, {speed:.2f}x the tokens/s; "
            f"a step {row['ms_per_step']:.1f} ms against {static['ms_per_step']:.1f}"
        )
        report.note(f"a sequence's cache is {held:.2f}x smaller: its float windows alone are {windows:.0%} of the float cache")


if __name__ == "__main__":
    import sys

    from kivi_ops.cli import main

    raise SystemExit(main(["bench", "serving", *sys.argv[1:]]))
