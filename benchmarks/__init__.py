"""Benchmarks: ``kivi-ops bench NAME``. One module a question, and this registry.

Each module of :data:`BENCHMARKS` has ``QUESTION``, ``add_options(parser)`` and ``run(options, machine) -> Report``. Nothing of torch is
imported before a benchmark runs. Must not be imported by the package itself.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from pathlib import Path

BENCHMARKS = {
    "decode_attention": "one decode step's attention over a KIVI cache against the best float attention",
    "append": "writing a decode step's tokens, sealing what is due, and quantising a prompt",
    "prefill": "attention of a prompt, and of a chunk over a long history, against float attention",
    "decode_step": "a whole model's decode step: tokens/s, peak memory, the largest batch that fits",
    "aoti": "a decode step in a package of AOTInductor against the compiled model",
    "serving": "the paper's claim: batch and tokens/s when memory is full",
    "compile_time": "the pass' share of the time that compiling a 32-layer model takes",
}
WITHOUT_A_GPU = ("compile_time",)  # what these measure is the host's work


def listing() -> str:
    """One line a benchmark."""
    plot = "a results file's time and bytes against context length, as PNG: kivi-ops bench plot RESULTS.json OUT.png"
    return "\n".join(f"  {name:<17} {text}" for name, text in {**BENCHMARKS, "plot": plot}.items())


def main(arguments: Sequence[str]) -> int:
    """``[NAME, option, ...]`` as on the command line; returns the exit code: 1 if a row failed other than for want of memory.

    Raises:
        ValueError: no such benchmark, or this machine cannot run it.
    """
    if not arguments or arguments[0] not in (*BENCHMARKS, "plot"):
        given = arguments[0] if arguments else "nothing"
        raise ValueError(f"the benchmark is {given!r}; allowed: {', '.join((*BENCHMARKS, 'plot'))}")
    name, rest = arguments[0], arguments[1:]
    if name == "plot":
        from kivi_ops.benchmarks import plot

        return plot.main(rest)
    module = importlib.import_module(f"kivi_ops.benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"kivi-ops bench {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows, machine, versions and date here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time and bytes against context length (PNG; needs matplotlib)")
    parser.add_argument("--tiny", action="store_true", help="a few tokens, on the CPU if there is no GPU: shows that it runs, not how fast")
    options = parser.parse_args(rest)
    for path in (options.json, options.plot):
        if path is not None and not path.parent.is_dir():  # known before minutes are spent
            raise ValueError(f"{path} cannot be written: there is no folder {path.parent}")

    from kivi_ops.benchmarks.common import Machine, free_memory

    machine = Machine.find(tiny=options.tiny, cpu=name in WITHOUT_A_GPU)
    report = module.run(options, machine)
    free_memory()
    print("\n".join(report.closing()), flush=True)
    if options.json:
        report.save()
        print(f"written to {os.fspath(options.json)}")
    if options.plot:
        from kivi_ops.benchmarks import plot

        plot.draw(report.as_dict(), options.plot)
        print(f"drawn to {os.fspath(options.plot)}")
    return report.exit_code
