"""``torch.export``: programs that carry the quantised cache, in a file and in compiled packages. Must not know of kernels."""

from kivi_ops.export.files import load_programs, save_programs
from kivi_ops.export.models import export_model
from kivi_ops.export.program import ExportedModel
from kivi_ops.export.rewrite import rewrite

__all__ = ["ExportedModel", "export_model", "load_programs", "rewrite", "save_programs"]
