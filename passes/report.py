"""What the pass did to a graph, in plain strings: no report that is kept keeps a graph or a tensor alive."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field, replace

from kivi_ops.passes.states import Binding

log = logging.getLogger("kivi_ops.passes")

NO_UPDATE = "no kivi::update in this graph"  # and nothing that looks like attention


@dataclass(frozen=True)
class SiteReport:
    """One attention over a cache. ``how``: its spelling if ``rewritten``, else the reason why not. ``layer``, ``source``: "" if unknown."""

    rewritten: bool
    how: str
    layer: str = ""
    source: str = ""


@dataclass(frozen=True)
class RewriteReport:
    """One graph: its sites in the order in which they run, and a ``note`` where there is something to say of the whole.

    ``bindings``: where the rewritten graph finds the states of float caches, in the order of its further inputs; reports that are kept
    have none.
    """

    sites: tuple[SiteReport, ...] = ()
    note: str = ""
    bindings: tuple[Binding, ...] = field(default=(), compare=False, repr=False)

    @property
    def rewritten(self) -> tuple[SiteReport, ...]:
        return tuple(site for site in self.sites if site.rewritten)

    @property
    def refused(self) -> tuple[SiteReport, ...]:
        return tuple(site for site in self.sites if not site.rewritten)

    @property
    def summary(self) -> str:
        line = f"{len(self.rewritten)} of {len(self.sites)} attention sites rewritten"
        return f"{line} ({self.note})" if self.note else line

    def __str__(self) -> str:
        head = ("layer", "", "spelling or reason", "source")
        rows = [(site.layer or "-", "rewritten" if site.rewritten else "refused", site.how, site.source or "-") for site in self.sites]
        if not rows:
            return self.summary
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        table = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows))
        return "\n".join((self.summary, *table))


_REPORTS: deque[RewriteReport] = deque(maxlen=64)


def tell(report: RewriteReport, strict: bool) -> None:
    """Keep a report and log it: a warning if a site is refused, or none found where attention is.

    Raises:
        RuntimeError: ``strict``, and not every site is rewritten, or there is none.
    """
    _REPORTS.append(replace(report, bindings=()))
    if strict and (report.refused or not report.rewritten):
        raise RuntimeError(f"option 'strict' is True, and this graph is not rewritten whole: {report}")
    if report.refused or (not report.rewritten and report.note != NO_UPDATE):
        log.warning("%s", report)
    else:
        log.info("%s", report.summary)
        log.debug("%s", report)


def reports() -> tuple[RewriteReport, ...]:
    """The reports of the last graphs that ``backend="kivi"`` was given in this process, oldest first, 64 at most."""
    return tuple(_REPORTS)


def last_report() -> RewriteReport | None:
    """The report of the last graph that ``backend="kivi"`` was given, None if there was none yet."""
    return _REPORTS[-1] if _REPORTS else None
