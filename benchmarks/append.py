"""How long does a decode step take to write its tokens and seal what is due, and a prompt to be quantised?

    kivi-ops bench append [--bits 2 4] [--json FILE]

A decode step at batch 8 x 8 KV heads, G = 32, R = 128, for three lengths: the window is still filling, so nothing is sealed; one Value
leaves the window, as on most steps; and a Key block of 128 tokens is full as well. The boundaries are set back before each timed run, or
the second run would be a rollback. "alone" is one CUDA graph of one step with a clean L2: it includes what an empty graph costs, which is
named below the table. "of 32" is a step's share of a graph of 32 steps in 32 states, as the layers of a model.

"prompt": 32 K tokens x 8 KV heads at once into an empty state. Its bytes are the floats read and the state written; "of copy" is their
rate as a share of what a device-to-device copy, whose bytes are counted in the same way, reaches in the same run.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from kivi_ops import KiviConfig
from kivi_ops.benchmarks import BENCHMARKS
from kivi_ops.benchmarks.common import CLEAN, Column, Machine, Report, size_of
from kivi_ops.benchmarks.states import needed_bytes, random_state
from kivi_ops.reference import next_boundaries

LAYERS = 32
COLUMNS = (
    Column("case", "case", width=16),
    Column("tokens", "tokens", width=7),
    Column("bits", "bits", width=4),
    Column("dim", "D", width=3),
    Column("dtype", "dtype", width=8),
    Column("dirty_us", "dirty", ".1f", " us", width=10),
    Column("clean_us", "alone", ".1f", " us", width=10),
    Column("layer_us", "of 32", ".2f", " us", width=10),
    Column("bytes", "MB", ".1f", factor=1e-6, width=7),
    Column("copy_share", "of copy", ".0%", width=7),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--bits", type=int, nargs="+", default=[2, 4], choices=[2, 4, 8])
    add("--batch", type=int, default=8, metavar="N", help="rows of a decode step, 8 KV heads each (default: %(default)s)")
    add("--prompt", type=size_of, default=size_of("32K"), metavar="T", help="tokens quantised at once (default: 32K)")
    add("--dim", type=int, default=128, metavar="D", help="head size (default: %(default)s)")
    add("--dtype", default="float16", choices=["float16", "bfloat16"])


def run(options: argparse.Namespace, machine: Machine) -> Report:
    setup = {
        "copy_bandwidth": machine.copy_bandwidth(),
        "empty_graph_us": machine.empty_graph_microseconds(),
        "batch": 2 if machine.tiny else options.batch,
        "kv_heads_a_row": 2 if machine.tiny else 8,
        "layers": 2 if machine.tiny else LAYERS,
    }
    report = Report("append", BENCHMARKS["append"], machine, COLUMNS, setup, options.json)
    prompt = 300 if machine.tiny else options.prompt
    for bits in options.bits:
        config = KiviConfig(bits, bits)
        size = config.residual_length
        base = (2 if machine.tiny else 32) * size
        cases = {"nothing sealed": size // 2, "one Value sealed": base + size // 2, "Key block sealed": base + size - 1}
        for case, tokens in cases.items():
            labels = {"case": case, "tokens": tokens, "bits": bits, "dim": options.dim, "dtype": options.dtype}
            report.attempt(labels, partial(_step, config, tokens, options, setup, machine))
        labels = {"case": "prompt", "tokens": prompt, "bits": bits, "dim": options.dim, "dtype": options.dtype}
        report.attempt(labels, partial(_prompt, config, prompt, options, setup, machine))
    report.note(f"copy bandwidth {setup['copy_bandwidth'] / 1e12:.2f} TB/s; an empty graph alone {setup['empty_graph_us']:.1f} us")
    return report


def _step(config: KiviConfig, tokens: int, options: argparse.Namespace, setup: dict[str, Any], machine: Machine) -> dict[str, Any]:
    dtype, device = getattr(torch, options.dtype), machine.device
    rows, heads, dim = setup["batch"], setup["kv_heads_a_row"], options.dim
    states = [random_state(config, heads, [tokens] * rows, dim, dtype, device) for _ in range(setup["layers"])]
    key, value = (torch.randn(rows, heads, 1, dim, dtype=dtype, device=device) for _ in range(2))
    position, before = states[0].length.clone(), states[0].sealed.clone()

    def one() -> None:
        states[0].append(key, value, position)

    def every() -> None:
        for state in states:
            state.append(key, value, position)

    def set_one_back() -> None:
        states[0].sealed.copy_(before)

    def set_every_back() -> None:
        for state in states:
            state.sealed.copy_(before)

    one()
    expected = next_boundaries((0, 0), 0, tokens + 1, config.residual_length, config.rollback_margin)[1]
    if states[0].sealed.tolist() != [list(expected)] * rows:
        raise ArithmeticError(f"append left the boundaries {states[0].sealed.tolist()}, expected {list(expected)} in each row")
    dirty, clean = machine.dirty_and_clean(one, set_one_back)
    return {
        "dirty_us": dirty,
        "clean_us": clean,
        "layer_us": machine.microseconds(every, CLEAN, set_every_back) / len(states),
    }


def _prompt(config: KiviConfig, tokens: int, options: argparse.Namespace, setup: dict[str, Any], machine: Machine) -> dict[str, Any]:
    dtype, device = getattr(torch, options.dtype), machine.device
    heads, dim = setup["kv_heads_a_row"], options.dim
    state = random_state(config, heads, [tokens], dim, dtype, device)
    key, value = (torch.randn(1, heads, tokens, dim, dtype=dtype, device=device) for _ in range(2))
    position = torch.zeros((), dtype=torch.int64, device=device)

    def quantise() -> None:
        state.append(key, value, position)

    size = key.nbytes + value.nbytes + needed_bytes(config, heads, [tokens], dim, dtype)
    dirty, clean = machine.dirty_and_clean(quantise, state.reset)
    return {
        "dirty_us": dirty,
        "clean_us": clean,
        "bytes": size,
        "copy_share": size / (clean * 1e-6) / setup["copy_bandwidth"],
    }


if __name__ == "__main__":
    import sys

    from kivi_ops.cli import main

    raise SystemExit(main(["bench", "append", *sys.argv[1:]]))
