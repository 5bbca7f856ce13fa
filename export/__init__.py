"""``torch.export``: programs that carry the quantised cache, in a file and in compiled packages."""

from typing import Any

from kivi_ops.export.files import load_programs, save_programs
from kivi_ops.export.models import export_model
from kivi_ops.export.program import ExportedModel
from kivi_ops.export.rewrite import rewrite

__all__ = ["CompiledModel", "ExportedModel", "compile_package", "export_model", "load_programs", "rewrite", "save_programs"]


def __getattr__(name: str) -> Any:
    if name in ("CompiledModel", "compile_package"):  # need Inductor, which takes a while to import
        from kivi_ops.export import package

        return getattr(package, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
