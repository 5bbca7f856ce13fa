"""The graph pass and the ``torch.compile`` backend: update + attention becomes attention + append. Must not know of kernels.

Normalise -> match -> plan -> rewrite -> report, a module each; :mod:`kivi_ops.passes.pipeline` strings them together and
:mod:`kivi_ops.passes.backend` is what ``torch.compile`` calls.
"""

from kivi_ops.passes.inductor_pass import InductorPass, inductor_options
from kivi_ops.passes.normalise import normalise
from kivi_ops.passes.pipeline import inputs_of, rewrite
from kivi_ops.passes.report import RewriteReport, SiteReport, last_report, reports
from kivi_ops.passes.states import with_states

__all__ = [
    "InductorPass",
    "RewriteReport",
    "SiteReport",
    "inductor_options",
    "inputs_of",
    "last_report",
    "normalise",
    "reports",
    "rewrite",
    "with_states",
]
