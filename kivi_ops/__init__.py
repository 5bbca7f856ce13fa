"""KIVI: a KV cache in 2, 4 or 8 bits as PyTorch operators, a transformers cache, and a ``torch.compile`` backend."""

from typing import Any

import kivi_ops.ops as ops  # registers torch.ops.kivi
from kivi_ops.config import KiviConfig
from kivi_ops.state import KiviState

__version__ = "0.1.0"
__all__ = ["KiviCache", "KiviConfig", "KiviState", "explain", "ops"]


def __getattr__(name: str) -> Any:
    if name == "KiviCache":  # needs transformers, an optional extra
        from kivi_ops.cache import KiviCache

        return KiviCache
    if name == "explain":  # needs the compiler's modules, which take a while to import
        from kivi_ops.passes.backend import explain

        return explain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
