"""What does a decode step cost in a package of AOTInductor, against the model compiled in the process?

    kivi-ops bench aoti [--points 1x8K 16x8K] [--layers 4] [--bits 2] [--json FILE]

A Llama of Llama-3.1-8B's layers (fewer of them, and 32,000 words) in bfloat16 with random weights; caches hold random tokens. A package
holds the portable Triton kernel, since Inductor writes it out again; backend="kivi" takes the fastest one there is. So the rows are:

    package              the decode program of a package, called from Python; in a CUDA graph that the caller records, too
    compiled, portable   torch.compile(backend="kivi") with the same kernel; with CUDA graphs (mode="reduce-overhead"), too
    compiled             torch.compile(backend="kivi") as it is, likewise

"to portable" compares tokens/s with the compiled model on the same kernel, with or without a graph as the row itself. On a CPU (--tiny)
the program runs uncompiled instead of as a package.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kivi_ops import KiviConfig, KiviState
from kivi_ops.benchmarks import BENCHMARKS
from kivi_ops.benchmarks.common import Column, Machine, Report, free_memory
from kivi_ops.benchmarks.decode_step import point
from kivi_ops.benchmarks.models import LLAMA_3_8B, TINY_GQA, WARM_UP_STEPS, Decoding, Shape, filled_cache, llama
from kivi_ops.benchmarks.states import fill

ROOM = 256  # tokens beyond those held at first

COLUMNS = (
    Column("way", "way", width=20),
    Column("graph", "CUDA graph", width=10),
    Column("batch", "batch", width=5),
    Column("tokens", "tokens", width=7),
    Column("tokens_per_second", "tokens/s", ".1f", width=9),
    Column("ms_per_step", "a step", ".3f", " ms", width=11),
    Column("to_portable", "to portable", ".2f", "x", width=11),
    Column("compile_s", "compiled in", ".0f", " s", width=11),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--points", type=point, nargs="+", default=[point("1x8K"), point("16x8K")], metavar="BxT")
    add("--layers", type=int, default=4, metavar="N", help="of the model (default: %(default)s)")
    add("--bits", type=int, default=2, choices=(2, 4), help="of Keys and Values (default: %(default)s)")
    add("--steps", type=int, default=64, metavar="N", help="timed decode steps (default: %(default)s)")


def run(options: argparse.Namespace, machine: Machine) -> Report:
    shape, points, steps = replace(LLAMA_3_8B, layers=options.layers, vocabulary=32000), options.points, options.steps
    if not 1 <= steps <= ROOM - 2 * WARM_UP_STEPS:
        raise ValueError(f"--steps is {steps}; allowed: 1 to {ROOM - 2 * WARM_UP_STEPS}")
    if machine.tiny:
        shape, points, steps = TINY_GQA, [(2, 200)], 2
    model = llama(shape, machine, max(tokens for _, tokens in points) + ROOM)
    report = Report("aoti", BENCHMARKS["aoti"], machine, COLUMNS, {**vars(shape), "steps": steps, "dtype": "bfloat16"}, options.json)
    for rows, tokens in points:
        speeds: dict[bool, float] = {}  # of the compiled model on the portable kernel, with and without a graph
        for way in ("compiled, portable", "package", "compiled"):
            for graph in (False, True) if machine.is_gpu else (False,):
                labels = {"way": way, "graph": "yes" if graph else "no", "batch": rows, "tokens": tokens}
                measure = _package if way == "package" else _compiled
                arguments = (model, shape, rows, tokens, steps, options.bits, graph, machine, way)

                row = report.attempt(labels, partial(_timed, measure, arguments, speeds.get(graph)))
                if way == "compiled, portable" and "failed" not in row:
                    speeds[graph] = row["tokens_per_second"]
    for row in report.rows:
        if row["way"] != "compiled, portable" and "to_portable" in row:
            text = f"{row['to_portable']:.2f}x the compiled model on the portable kernel"
            report.note(f"{row['way']} at {row['batch']} x {row['tokens']} tokens, CUDA graph {row['graph']}: {text}")
    return report


def _timed(measure: Callable[..., dict[str, Any]], arguments: tuple[Any, ...], portable: float | None) -> dict[str, Any]:
    row = measure(*arguments)
    return row if portable is None else {**row, "to_portable": row["tokens_per_second"] / portable}


def _row(rows: int, steps: int, seconds: float, compile_s: float) -> dict[str, Any]:
    return {"tokens_per_second": rows * steps / seconds, "ms_per_step": seconds / steps * 1e3, "compile_s": compile_s}


def _compiled(
    model: Any, shape: Shape, rows: int, tokens: int, steps: int, bits: int, graph: bool, machine: Machine, way: str
) -> dict[str, Any]:
    """The model over a KiviCache through ``backend="kivi"``."""
    free_memory()
    cache = filled_cache(f"kivi-{bits}", model, shape, rows, tokens, ROOM)
    how: dict[str, Any] = {"mode": "reduce-overhead"} if graph else {} if machine.is_gpu else {"compiler": "eager"}
    torch._dynamo.reset()
    try:
        with _portable_kernel() if way == "compiled, portable" else contextlib.nullcontext():
            forward = torch.compile(model.forward, fullgraph=True, backend="kivi", options={"strict": True, **how})
            decoding = Decoding(model, forward, cache, rows)
            first = decoding.seconds(1, machine)
            decoding.steps(WARM_UP_STEPS - 1)
            return _row(rows, steps, decoding.seconds(steps, machine), first)
    finally:
        torch._dynamo.reset()  # graphs hold memory


@contextlib.contextmanager
def _portable_kernel() -> Iterator[None]:
    """Attention takes the plain Triton kernel where it would take Gluon's."""
    try:
        from kivi_ops.kernels import launch
    except ImportError:  # no Triton: the CPU's implementation
        yield
        return
    held = launch._gluon
    launch._gluon = lambda device: None  # type: ignore[assignment]
    try:
        yield
    finally:
        launch._gluon = held


def _package(
    model: Any, shape: Shape, rows: int, tokens: int, steps: int, bits: int, graph: bool, machine: Machine, way: str
) -> dict[str, Any]:
    """The decode program of an exported model."""
    from kivi_ops.export import CompiledModel, ExportedModel, compile_package, export_model

    free_memory()
    config = KiviConfig(bits, bits)
    begin = time.perf_counter()
    exported = export_model(model, config, rows, tokens + ROOM, separate_decode=True)
    session: Any = ExportedModel({"decode": exported.programs["decode"]})
    if machine.is_gpu:
        with tempfile.TemporaryDirectory() as folder:
            compile_package(session, Path(folder) / "model.pt2", weights=False)
            session = CompiledModel.load(Path(folder) / "model.pt2", weights=session.programs["decode"].state_dict)
    compile_s = time.perf_counter() - begin
    padding = torch.zeros(rows, dtype=torch.int32, device=model.device)
    for layer in range(shape.layers):
        prefix = f"kivi_state.{layer}."
        state = {name.removeprefix(prefix): tensor for name, tensor in session._state.items() if name.startswith(prefix)}
        fill(KiviState(config, tokens + ROOM, left_padding=padding, **state), tokens)
    step = session._steps["decode"]
    token = torch.zeros((rows, 1), dtype=torch.int64, device=model.device)
    start = torch.full((), tokens, dtype=torch.int64, device=model.device)

    def once() -> None:
        token.copy_(step(token, start, padding)[:, -1].argmax(-1, keepdim=True))
        start.add_(1)

    with torch.no_grad():
        for _ in range(WARM_UP_STEPS):
            once()
        run = machine.captured(once) if graph else once
        machine.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            run()
        machine.synchronize()
        return _row(rows, steps, time.perf_counter() - begin, compile_s)


if __name__ == "__main__":
    import sys

    from kivi_ops.cli import main

    raise SystemExit(main(["bench", "aoti", *sys.argv[1:]]))
