"""What all benchmarks share: the machine, how time is measured, the table that is printed and the JSON that is kept.

Time on a GPU is the median of CUDA events around one replay of a captured graph. Before each replay the L2 cache is flushed outside of
the events: *dirty*, by writing 256 MB as ``triton.testing.do_bench`` does, so that the timed work also pays for writing those lines back;
or *clean*, by reading 256 MB. Must not know what is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

import kivi_ops
from kivi_ops.environment import package_version

DIRTY, CLEAN = "dirty", "clean"
FLUSH_BYTES = 256 * 2**20
COPY_BYTES = 2 * 2**30
TIMED_SECONDS = 0.06  # wanted of timed work for one figure


def free_memory() -> None:
    """Give back what earlier rows left: a benchmark fills the memory on purpose."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def out_of_memory(error: BaseException) -> bool:
    """Whether memory was short: PyTorch's own error, the driver's (while a graph is recorded, say), or cuBLAS's."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "STATUS_ALLOC_FAILED" in text


@dataclass
class Machine:
    """Where a benchmark runs. ``tiny``: sizes are reduced and times say nothing."""

    device: torch.device
    tiny: bool
    _flush: dict[str, Callable[[], Any]] = field(default_factory=dict, repr=False)

    @classmethod
    def find(cls, tiny: bool = False, cpu: bool = False) -> Machine:
        """The GPU; with ``tiny`` or ``cpu`` the CPU where there is none.

        Raises:
            ValueError: no GPU, and neither ``tiny`` nor ``cpu``.
        """
        if not torch.cuda.is_available() and not tiny and not cpu:
            raise ValueError("benchmarks need a CUDA device and this torch finds none; --tiny runs the code on the CPU, with a few tokens")
        return cls(torch.device("cuda" if torch.cuda.is_available() else "cpu"), tiny)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def describe(self) -> dict[str, str]:
        """What a figure depends on."""
        device = f"CPU, {os.cpu_count()} cores"
        driver = "none"
        if self.is_gpu:
            found = torch.cuda.get_device_properties(self.device)
            device, driver = f"{found.name}, {found.multi_processor_count} SMs", f"CUDA {torch.version.cuda}"
        return {
            "device": device,
            "runtime": driver,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": package_version("triton"),
            "transformers": package_version("transformers"),
            "kivi_ops": kivi_ops.__version__,
            "date": date.today().isoformat(),
        }

    # ---------------------------------------------------------------------------------------------------------- time

    def microseconds(
        self, function: Callable[[], Any], flush: str = DIRTY, prepare: Callable[[], Any] | None = None, graph: bool = True
    ) -> float:
        """Median time of ``function``.

        Args:
            flush: ``DIRTY`` or ``CLEAN``. prepare: called before the flush of each timed run.
            graph: replay ``function`` from a CUDA graph; without, the host's launches are timed with it.
        """
        if not self.is_gpu:
            return self._cpu_microseconds(function, prepare)
        run = self.captured(function, prepare) if graph else function
        before = self._flusher(flush)

        def times(count: int) -> list[float]:
            events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
            for begin, end in events:
                if prepare is not None:
                    prepare()
                before()  # long enough for the host to launch what follows, so that no launch is timed
                begin.record()
                run()
                end.record()
            torch.cuda.synchronize()
            return sorted(begin.elapsed_time(end) * 1e3 for begin, end in events)

        estimate = times(5)[2]
        measured = times(int(min(200, max(10, TIMED_SECONDS * 1e6 / estimate))))
        return measured[len(measured) // 2]

    def dirty_and_clean(self, function: Callable[[], Any], prepare: Callable[[], Any] | None = None) -> tuple[float, float]:
        """:meth:`microseconds` with either flush, of one captured graph."""
        run = self.captured(function, prepare) if self.is_gpu else function
        return self.microseconds(run, DIRTY, prepare, graph=False), self.microseconds(run, CLEAN, prepare, graph=False)

    def _cpu_microseconds(self, function: Callable[[], Any], prepare: Callable[[], Any] | None) -> float:
        measured = []
        for _ in range(3):
            if prepare is not None:
                prepare()
            begin = time.perf_counter()
            function()
            measured.append((time.perf_counter() - begin) * 1e6)
        return sorted(measured)[1]

    def captured(self, function: Callable[[], Any], prepare: Callable[[], Any] | None = None) -> Callable[[], Any]:
        """``function`` as a CUDA graph's replay, after two runs that compile what there is to compile."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                if prepare is not None:
                    prepare()
                function()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        return graph.replay

    def _flusher(self, kind: str) -> Callable[[], Any]:
        if kind not in self._flush:
            memory = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)
            if kind == DIRTY:
                self._flush[kind] = memory.zero_
            else:
                from kivi_ops.benchmarks.read_kernel import PROGRAM_BYTES, read

                sums = torch.zeros(FLUSH_BYTES // PROGRAM_BYTES, dtype=torch.int32, device=self.device)
                self._flush[kind] = lambda: read(memory, sums)
        return self._flush[kind]

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    # ------------------------------------------------------------------------------------------------------- bandwidth

    def copy_bandwidth(self) -> float:
        """Bytes read and written a second by a device-to-device copy of 2 GiB."""
        source = torch.zeros(COPY_BYTES if self.is_gpu else 2**20, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        seconds = self.microseconds(lambda: target.copy_(source), CLEAN, graph=False) * 1e-6
        return 2 * source.nbytes / seconds

    def plain_read_microseconds(self, size: float) -> float:
        """Time to read ``size`` bytes and do nothing with them, from a clean L2."""
        if not self.is_gpu:
            data = torch.zeros(max(1, int(size) // 4), dtype=torch.int32)
            return self.microseconds(data.sum)
        from kivi_ops.benchmarks.read_kernel import PROGRAM_BYTES, read

        programs = max(1, round(size / PROGRAM_BYTES))
        data = torch.zeros(programs * PROGRAM_BYTES // 4, dtype=torch.int32, device=self.device)
        sums = torch.zeros(programs, dtype=torch.int32, device=self.device)
        return self.microseconds(lambda: read(data, sums), CLEAN)

    def empty_graph_microseconds(self) -> float:
        """What a graph of one kernel that does nothing measures: no figure can be below it."""
        nothing = torch.zeros(1, device=self.device)
        return self.microseconds(lambda: nothing.add_(1), CLEAN)

    # ---------------------------------------------------------------------------------------------------------- memory

    def reset_peak(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Largest number of bytes allocated since :meth:`reset_peak`; 0 on a CPU."""
        return torch.cuda.max_memory_allocated() if self.is_gpu else 0

    def usable_bytes(self) -> int:
        """Bytes that tensors may take in all: what is free, and what they hold already; 3 MiB with ``tiny``."""
        if self.tiny:
            return 3 * 2**20
        free_memory()
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_allocated()


# ----------------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class Column:
    """One column of the table: the row's ``key`` times ``factor``, formatted by ``form``, then ``unit``."""

    key: str
    title: str
    form: str = ""
    unit: str = ""
    factor: float = 1.0
    width: int = 8

    def cell(self, row: dict[str, Any]) -> str:
        value = row.get(self.key)
        if value is None:
            return "-".rjust(self.width)
        text = format(value * self.factor, self.form) + self.unit if self.form else str(value) + self.unit
        if len(text) > self.width and self.form:  # far beyond what was expected: the table keeps its columns
            text = format(value * self.factor, ".1e") + self.unit
        return text.rjust(self.width)

    def heading(self) -> str:
        return self.title.rjust(self.width)


@dataclass
class Report:
    """Rows of one benchmark, printed as they are measured, and kept in the file ``path`` in case the run is cut short.

    A row is a flat dictionary of numbers and strings; one that could not be measured has ``"failed"`` with the reason.
    """

    name: str
    question: str
    machine: Machine
    columns: Sequence[Column]
    setup: dict[str, Any]
    path: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    exit_code: int = 0
    _began: bool = False

    def attempt(self, labels: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Add the row ``labels | measure()``; a failure becomes a row too. Being out of memory is an answer, anything else a fault."""
        row = dict(labels)
        try:
            row.update(measure())
        except Exception as error:
            if out_of_memory(error):
                row["failed"] = "out of memory"
            elif os.environ.get("KIVI_OPS_TRACEBACK"):
                raise
            else:
                text = " ".join(str(error).split())
                row["failed"] = f"{type(error).__name__}: {text[:200]}"
                self.exit_code = 1
        free_memory()  # after the exception, which holds on to the frames' tensors, is gone
        self.add(row)
        return row

    def add(self, row: dict[str, Any]) -> None:
        if not self._began:
            print(" ".join(column.heading() for column in self.columns), flush=True)
            self._began = True
        self.rows.append(row)
        print(self.line(row), flush=True)
        self.save()

    def save(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def line(self, row: dict[str, Any]) -> str:
        if "failed" not in row:
            return " ".join(column.cell(row) for column in self.columns)
        cells = [column.cell(row) for column in self.columns]
        known = max((i + 1 for i, column in enumerate(self.columns) if row.get(column.key) is not None), default=0)
        return " ".join(cells[:known]) + f"  {row['failed']}"

    def note(self, text: str) -> None:
        self.notes.append(text)

    def closing(self) -> list[str]:
        """What is printed under the table."""
        machine = self.machine.describe()
        where = f"{machine['device']}, torch {machine['torch']}, Triton {machine['triton']}, {machine['date']}"
        warning = ["reduced sizes (--tiny): these figures say nothing about speed"] if self.machine.tiny else []
        return [*self.notes, *warning, where]

    def as_dict(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "question": self.question,
            "machine": self.machine.describe(),
            "tiny": self.machine.tiny,
            "setup": self.setup,
            "rows": self.rows,
            "notes": self.notes,
        }


def size_of(text: str) -> int:
    """``"32K"`` -> 32768, ``"500"`` -> 500; for argparse."""
    number = text.upper().removesuffix("K")
    if not number.isdigit() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 500 or 32K")
    return int(number) * (1024 if number != text.upper() else 1)
