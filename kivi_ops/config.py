"""The one place where a user chooses how a cache is quantised. Knows nothing of tensors, devices or models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

SEAL_ORDERS = ("after_attention", "before_attention")
BITS = (2, 4, 8)
METADATA_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CACHE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class KiviConfig:
    """How Keys and Values are quantised (contract sections 1 to 3).

    Args:
        key_bits, value_bits: bits of one code: 2, 4 or 8, chosen separately.
        group_size: G, elements that share one scale and min: G consecutive tokens of a channel for Keys, G consecutive
            channels of a token for Values. A power of two from 2 to 256.
        residual_length: R, tokens kept in float: up to R - 1 for Keys, R for Values. A multiple of ``group_size``.
        seal: ``"after_attention"`` (the authors' code: a step sees its own tokens in float, then seals) or
            ``"before_attention"`` (the paper's Algorithm 1: append, seal, attend).
        rollback_margin: m, further float tokens kept so that rollbacks of up to m tokens never touch a sealed one.
        metadata_dtype: dtype of scale and min; ``None`` means the cache's own dtype.

    Raises:
        ValueError: a choice outside of what is allowed; the message names both.
        TypeError: a choice of the wrong type.
    """

    key_bits: int = 2
    value_bits: int = 2
    group_size: int = 32
    residual_length: int = 128
    seal: str = "after_attention"
    rollback_margin: int = 0
    metadata_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("key_bits", "value_bits", "group_size", "residual_length", "rollback_margin"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"KiviConfig.{name} must be an int, got {value!r} ({type(value).__name__})")
        for name in ("key_bits", "value_bits"):
            bits = getattr(self, name)
            if bits not in BITS:
                raise ValueError(f"KiviConfig.{name} is {bits}; allowed: {', '.join(map(str, BITS))}")
        size = self.group_size
        if not 2 <= size <= 256 or size & (size - 1):
            raise ValueError(f"KiviConfig.group_size is {size}; allowed: a power of two from 2 to 256")
        if self.residual_length < 1 or self.residual_length % size:
            raise ValueError(f"KiviConfig.residual_length is {self.residual_length}; allowed: a positive multiple of group_size ({size})")
        if self.seal not in SEAL_ORDERS:
            raise ValueError(f"KiviConfig.seal is {self.seal!r}; allowed: {', '.join(map(repr, SEAL_ORDERS))}")
        if self.rollback_margin < 0:
            raise ValueError(f"KiviConfig.rollback_margin is {self.rollback_margin}; allowed: 0 or more tokens")
        if self.metadata_dtype is not None and self.metadata_dtype not in METADATA_DTYPES:
            raise ValueError(
                f"KiviConfig.metadata_dtype is {self.metadata_dtype}; allowed: None (the cache's own dtype), "
                f"{', '.join(map(str, METADATA_DTYPES))}"
            )

    def window(self, capacity: int) -> int:
        """W, rows of each float window for a cache of ``capacity`` tokens (contract section 3)."""
        return min(self.residual_length, capacity) + self.rollback_margin

    def op_kwargs(self, capacity: int, dtype: torch.dtype) -> dict[str, Any]:
        """The keyword arguments that ``kivi::append`` and ``kivi::update`` take (``update`` takes ``seal`` too)."""
        return {
            **self.read_kwargs(capacity, dtype),
            "residual_length": self.residual_length,
            "rollback_margin": self.rollback_margin,
        }

    def read_kwargs(self, capacity: int, dtype: torch.dtype) -> dict[str, Any]:
        """The keyword arguments of every operator that reads a state, for a cache of dtype ``dtype``."""
        return {
            "capacity": capacity,
            "key_bits": self.key_bits,
            "value_bits": self.value_bits,
            "group_size": self.group_size,
            "metadata_dtype": self.metadata_dtype or dtype,
        }
