"""Draws time and bytes against context length from a results file: ``kivi-ops bench plot RESULTS.json OUT.png``. Needs matplotlib."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# series -> colour, marker; the float cache in grey, so that it is the background to compare with
STYLES = {
    "float": ("#6b6b6b", "s"),
    "KIVI 8 bits": ("#7b3fa0", "v"),
    "KIVI 4 bits": ("#d1731f", "^"),
    "KIVI 2 bits": ("#1b6fb5", "o"),
}
Points = dict[str, dict[int, float]]  # series -> tokens -> value


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="kivi-ops bench plot", description=__doc__)
    parser.add_argument("results", type=Path, help="what --json of a benchmark wrote")
    parser.add_argument("out", type=Path, help="the PNG to write")
    options = parser.parse_args(arguments)
    draw(json.loads(options.results.read_text()), options.out)
    return 0


def panels(results: dict[str, Any]) -> dict[str, tuple[Points, Points]]:
    """By title, a row of two panels: microseconds or milliseconds a step, and bytes, for each series at each context length.

    Rows that failed, and settings measured at one length only, are left out.

    Raises:
        ValueError: nothing is left.
    """
    readers = {"decode_attention": _attention_points, "decode_step": _model_points}
    name = results.get("benchmark")
    if name not in readers:
        raise ValueError(f"the results are of {name!r}; only those of {', '.join(readers)} have a context length to plot against")
    found: dict[str, tuple[Points, Points]] = {}
    for row in results["rows"]:
        if "failed" not in row:
            readers[name](row, found)
    kept = {title: pair for title, pair in found.items() if len({tokens for points in pair[0].values() for tokens in points}) > 1}
    if not kept:
        raise ValueError("there is nothing to plot: no setting was measured at more than one context length (try --preset sweep)")
    return kept


def _attention_points(row: dict[str, Any], found: dict[str, tuple[Points, Points]]) -> None:
    if row["batch_kind"] != "equal":
        return
    title = f"{row['kv_heads']} KV heads of {row['dim']}, {row['repeats']} query heads each, {row['dtype']}"
    times, sizes = found.setdefault(title, ({}, {}))
    for series, time, size in (("float", "float_us", "float_bytes"), (f"KIVI {row['bits']} bits", "kivi_us", "bytes")):
        times.setdefault(series, {})[row["tokens"]] = row[time] * 1e-6
        sizes.setdefault(series, {})[row["tokens"]] = row[size]


def _model_points(row: dict[str, Any], found: dict[str, tuple[Points, Points]]) -> None:
    if row["case"] != "speed" or row["cache"].startswith("quantized"):
        return
    kind = row["cache"].rpartition("-")[2]
    series = "float" if kind == "static" else f"KIVI {kind} bits"
    times, sizes = found.setdefault(f"decode step, batch {row['batch']}", ({}, {}))
    times.setdefault(series, {})[row["tokens"]] = row["ms_per_step"] * 1e-3
    sizes.setdefault(series, {})[row["tokens"]] = row["cache_bytes"]


def _tokens(count: float) -> str:
    return f"{count / 1024:.0f} K" if count >= 1024 else f"{count:.0f}"


def _scaled(points: Points, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest unit in which the largest value is at least 1."""
    largest = max(value for series in points.values() for value in series.values())
    return next((unit for unit in units if largest >= unit[0]), units[-1])


def draw(results: dict[str, Any], out: Path) -> None:
    """Write the picture: a row a setting, time left and bytes right, both axes logarithmic.

    Raises:
        ValueError: nothing to plot. RuntimeError: matplotlib is not installed.
    """
    rows = panels(results)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter
    except ImportError as error:
        raise RuntimeError('plots need matplotlib: pip install "kivi-ops[bench]"') from error
    figure = Figure(figsize=(10, 0.9 + 3.4 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rows), 2, squeeze=False)
    for axes, (title, (times, sizes)) in zip(grid, rows.items(), strict=True):
        seconds = _scaled(times, [(1e-3, "ms"), (1e-6, "us")])
        size = _scaled(sizes, [(1e9, "GB"), (1e6, "MB")])
        for panel, points, (unit, name), what in ((axes[0], times, seconds, "time of a step"), (axes[1], sizes, size, "bytes read")):
            if results["benchmark"] == "decode_step" and panel is axes[1]:
                what = "cache held"
            lengths = sorted({tokens for series in points.values() for tokens in series})
            for series in sorted(points, key=list(STYLES).index):
                colour, marker = STYLES[series]
                tokens = sorted(points[series])
                values = [points[series][n] / unit for n in tokens]
                panel.plot(tokens, values, color=colour, marker=marker, markersize=5, linewidth=1.8, label=series)
            panel.set(xscale="log", yscale="log", xlabel="context length, tokens", ylabel=f"{what}, {name}")
            panel.set_xticks(lengths, [_tokens(n) for n in lengths])
            panel.xaxis.set_minor_formatter(NullFormatter())
            panel.set_xticks([], minor=True)
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            panel.yaxis.set_minor_formatter(NullFormatter())
            panel.grid(alpha=0.25)
            panel.set_title(title, fontsize=10)
            panel.legend(frameon=False)
    machine = results["machine"]
    where = f"{machine['device']}, torch {machine['torch']}, Triton {machine['triton']}, {machine['date']}"
    figure.suptitle(where, fontsize=9, color="#555555")
    figure.savefig(out, dpi=130)
