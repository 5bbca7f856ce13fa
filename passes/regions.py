"""Which part of a tensor is a cache [B, H, C, D], as plain data. Must not know of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class InputSize:
    """A number that each call brings along: input ``place`` itself, or its size in dimension ``dim``."""

    place: int
    dim: int | None

    def of(self, args: Sequence[Any]) -> int:
        given = args[self.place]
        return int(given if self.dim is None else given.shape[self.dim])


@dataclass(frozen=True)
class Region:
    """Which part of a tensor attention sees as [B, H, C, D].

    ``fixed``: dimensions held at one index, and which. ``order``: the places of the four among all dimensions, None for one of size 1 that
    the tensor lacks. ``rows``: the first row and how many there are, None: all.
    """

    fixed: tuple[tuple[int, int], ...] = ()
    order: tuple[int | None, ...] = (0, 1, 2, 3)
    rows: tuple[int, int | InputSize] | None = None

    def told(self, args: Sequence[Any]) -> Region:
        """The same with the number of rows that a call with ``args`` has."""
        if self.rows is None or isinstance(self.rows[1], int):
            return self
        return replace(self, rows=(self.rows[0], self.rows[1].of(args)))

    def of(self, tensor: Tensor) -> Tensor:
        """That part of ``tensor``, a view [B, H, C, D]."""
        if self.rows is not None:
            assert self.order[0] is not None and isinstance(self.rows[1], int)
            tensor = tensor.narrow(self.order[0], self.rows[0], self.rows[1])
        for axis, index in sorted(self.fixed, reverse=True):
            tensor = tensor.select(axis, index)
        held = [axis for axis, _ in self.fixed]
        return in_order(tensor, [None if axis is None else axis - sum(other < axis for other in held) for axis in self.order])


def in_order(tensor: Tensor, order: Sequence[int | None]) -> Tensor:
    """``tensor`` with its dimensions ``order``, in this order; None: a new one of size 1."""
    tensor = tensor.permute([dim for dim in order if dim is not None])
    for place, dim in enumerate(order):
        tensor = tensor if dim is not None else tensor.unsqueeze(place)
    return tensor
