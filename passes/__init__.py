"""The graph pass and the ``torch.compile`` backend: update + attention becomes attention + append. Must not know of kernels.

Normalise -> match -> plan -> rewrite -> report, a module each; :mod:`kivi_ops.passes.backend` strings them together.
"""

from kivi_ops.passes.report import RewriteReport, SiteReport, last_report, reports

__all__ = ["RewriteReport", "SiteReport", "last_report", "reports"]
