"""How long does the pass take to compile a 32-layer model's decode step, against Inductor's own time?

    kivi-ops bench compile_time [--json FILE]

A Llama of small width, whose graph is as long as a large one's. "pass" is everything that backend="kivi" does before it hands the graph on:
tracing it again as ATen operators ("normalise") and matching and editing it ("rewrite"). "Inductor" is its time for the rewritten graph,
"float" its time for the graph as Dynamo captured it, without the pass. Every compile cache is off, and everything is imported and was used
once before. What is timed is the host's work, so this runs without a GPU too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from kivi_ops import KiviConfig
from kivi_ops.benchmarks import BENCHMARKS
from kivi_ops.benchmarks.common import Column, Machine, Report
from kivi_ops.benchmarks.models import Shape, empty_cache, llama
from kivi_ops.demo import cache_argument
from kivi_ops.passes import inputs_of, normalise, rewrite, with_states

SHAPE = Shape(layers=32, hidden=256, intermediate=512, heads=8, kv_heads=2, vocabulary=1024, head_dim=64)
CAPACITY = 1024
CONFIG = KiviConfig()
COLUMNS = (
    Column("cache", "cache", width=7),
    Column("layers", "layers", width=6),
    Column("nodes", "nodes", width=6),
    Column("dynamo_s", "Dynamo", ".2f", " s", width=9),
    Column("normalise_s", "normalise", ".2f", " s", width=9),
    Column("rewrite_s", "rewrite", ".2f", " s", width=9),
    Column("pass_s", "pass", ".2f", " s", width=9),
    Column("inductor_s", "Inductor", ".2f", " s", width=9),
    Column("float_s", "float", ".2f", " s", width=9),
    Column("share", "pass/Inductor", ".1%", width=13),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=SHAPE.layers, help="(default: %(default)s)")
    parser.add_argument("--caches", nargs="+", default=["static", "kivi-2"], choices=["static", "kivi-2"])


def run(options: argparse.Namespace, machine: Machine) -> Report:
    shape = replace(SHAPE, layers=2 if machine.tiny else options.layers)
    report = Report(
        "compile_time", BENCHMARKS["compile_time"], machine, COLUMNS, {"shape": vars(shape), "capacity": CAPACITY}, options.json
    )
    compiler = torch._dynamo.lookup_backend("eager" if machine.tiny else "inductor")  # a C++ compiler takes longer than what is tested
    _compile("static", replace(shape, layers=1), machine, compiler)  # imports, worker processes
    for cache in options.caches:
        report.attempt({"cache": cache, "layers": shape.layers}, partial(_compile, cache, shape, machine, compiler))
    return report


def _compile(kind: str, shape: Shape, machine: Machine, compiler: Callable[..., Any]) -> dict[str, Any]:
    model = llama(shape, machine, CAPACITY)
    row: dict[str, Any] = {}

    def floating(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        begin = time.perf_counter()
        compiled = compiler(module, example_inputs)
        row["float_s"] = time.perf_counter() - begin
        return compiled

    def rewriting(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        times = [time.perf_counter()]
        graph = normalise(module, example_inputs)
        times.append(time.perf_counter())
        report = rewrite(graph, CONFIG)
        inputs = inputs_of(graph, example_inputs, report)
        times.append(time.perf_counter())
        compiled = compiler(graph, inputs)
        times.append(time.perf_counter())
        row["normalise_s"], row["rewrite_s"], row["inductor_s"] = (after - before for before, after in zip(times, times[1:], strict=False))
        if len(report.rewritten) != shape.layers or report.refused:
            raise RuntimeError(f"not every layer is rewritten: {report}")
        row["nodes"] = len(graph.graph.nodes)
        row["dynamo_s"] = times[0] - begin
        return with_states(compiled, report.bindings)

    token = torch.zeros((1, 1), dtype=torch.int64, device=machine.device)
    for backend in (floating, rewriting):
        torch._dynamo.reset()
        cache = {cache_argument(model): empty_cache(kind, model, shape, 1, CAPACITY)}
        with torch.no_grad(), torch._inductor.utils.fresh_cache(), torch._inductor.config.patch(force_disable_caches=True):
            begin = time.perf_counter()
            torch.compile(model.forward, backend=backend, fullgraph=True)(input_ids=token, **cache)
    torch._dynamo.reset()
    row["pass_s"] = row["normalise_s"] + row["rewrite_s"]
    row["share"] = row["pass_s"] / row["inductor_s"]
    return row


if __name__ == "__main__":
    import sys

    from kivi_ops.cli import main

    raise SystemExit(main(["bench", "compile_time", *sys.argv[1:]]))
