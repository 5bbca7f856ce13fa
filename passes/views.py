"""What a node shows of an earlier one: through slices, selections, transpositions, reshapes, copies and repeated heads. Edits nothing.

A spelling of "the cache as attention wants it" is a chain of such nodes, and there are too many to list them whole. So each node of the
chain is read by itself, and what comes out is compared by the dimensions of the tensor that it starts from. Must not know of attention.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from kivi_ops.passes.nodes import arguments, constant, is_op, known, number, same_sizes, storages, value, written

aten = torch.ops.aten

COPIES = (
    *(aten.alias, aten.detach, aten.contiguous, aten.clone, aten.to, aten._to_copy, aten.lift_fresh_copy, aten.slice, aten.expand),
    *(aten.view, aten.reshape, aten._unsafe_view),
)
_RESHAPES = (aten.view, aten.reshape, aten._unsafe_view, aten.flatten, aten.unflatten, aten.view_as, aten.reshape_as)
_WRITES = (aten.index_copy_, aten.index_put_, aten.copy_, aten.scatter_)


@dataclass(frozen=True)
class Dim:
    """One dimension of a view: ``size`` indices from ``start`` on of the source's dimension ``axis``, each ``repeats`` times in a row.

    ``axis``: None for a dimension that the source lacks. ``start``: a number, or the node of one.
    """

    axis: int | None
    start: Node | int
    size: Any
    repeats: Any = 1

    @property
    def total(self) -> Any:
        return self.size * self.repeats


@dataclass(frozen=True)
class View:
    """``source`` as a node shows it: its dimensions in the node's order, times ``factor``.

    ``fixed``: dimensions of the source of which one index is shown, and which. ``passed``: the nodes on the way, last one first, without
    writes in place, whose result is what they wrote into.
    """

    source: Node
    dims: tuple[Dim, ...]
    fixed: tuple[tuple[int, Node | int], ...] = ()
    passed: tuple[Node, ...] = ()
    factor: float = 1.0

    @property
    def axes(self) -> tuple[int | None, ...]:
        return tuple(dim.axis for dim in self.dims)


def handed_on(node: Node) -> Node | None:
    """The node whose elements ``node`` returns unchanged, each at its place: a copy, or a view that turns out to be of the whole."""
    if not is_op(node, *COPIES):
        return None
    source = node.args[0]
    return source if isinstance(source, Node) and _is_copy(source, node) else None


def _is_copy(source: Node, node: Node) -> bool:
    before, after = value(source), value(node)
    return same_sizes(before.shape, after.shape) and before.dtype == after.dtype and before.device == after.device


def unwrapped(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """The first node upwards that is no copy, and the copies passed."""
    passed = []
    while (source := handed_on(node)) is not None:
        passed.append(node)
        node = source
    return node, tuple(passed)


def view_of(node: Node) -> View:
    """What ``node`` shows of the earliest node from which only views, copies, repeated elements and constant factors lead to it."""
    source = node.args[0] if is_op(node, *_STEPS) or (node.target is operator.getitem and is_op(node.args[0], aten.unbind)) else None
    if isinstance(source, Node):
        above = view_of(source)
        below = _below(node, above)
        if below is not None:
            own = () if is_op(node, *_WRITES) else (node,)
            return replace(below, passed=(*own, *above.passed))
    tensor = node.meta.get("val")
    shape = tensor.shape if isinstance(tensor, torch.Tensor) else ()
    return View(node, tuple(Dim(axis, 0, size) for axis, size in enumerate(shape)))


def _below(node: Node, above: View) -> View | None:
    """The view that ``node`` makes of ``above``, which its first argument is; None if it is no view."""
    source = node.args[0]
    assert isinstance(source, Node)
    if is_op(node, *_WRITES):  # of a copy it would be a new value
        return above if storages(node) & storages(above.source) else None
    if node.target is operator.getitem:
        return _unbound(node, above)
    if handed_on(node) is not None:
        return above
    if is_op(node, aten.mul, aten.div):
        factor = constant_factor(node)
        return None if factor is None or not _is_copy(source, node) else replace(above, factor=above.factor * factor)
    for packets, read in _READERS:
        if is_op(node, *packets):
            return read(node, above, arguments(node))
    return None


def _unbound(node: Node, above: View) -> View | None:
    """``unbind(x)[i]``; the list itself is what ``above`` shows."""
    unbind, index = node.args
    assert isinstance(unbind, Node)
    return _selected(above, arguments(unbind)["dim"], index)


def _list_of_views(node: Node, above: View, given: dict[str, Any]) -> View:
    return above


def _selected(above: View, dim: int, index: Any) -> View | None:
    dim %= len(above.dims)
    chosen = above.dims[dim]
    if not known(number(chosen.repeats) == 1):
        return None
    fixed = above.fixed
    if chosen.axis is not None:
        if isinstance(index, int) and index < 0:
            if not isinstance(chosen.size, int):
                return None
            index += chosen.size
        start = _sum(chosen.start, index)
        if start is None:
            return None
        fixed = (*fixed, (chosen.axis, start))
    return replace(above, dims=(*above.dims[:dim], *above.dims[dim + 1 :]), fixed=fixed)


def _select(node: Node, above: View, given: dict[str, Any]) -> View | None:
    return _selected(above, given["dim"], given["index"])


def _slice(node: Node, above: View, given: dict[str, Any]) -> View | None:
    """``slice`` and ``narrow``. The sizes that tracing found say where it ends."""
    dim = given["dim"] % len(above.dims)
    old, start = above.dims[dim], given["start"] or 0
    if given.get("step", 1) != 1 or not known(old.repeats == 1) or not isinstance(number(start), (int, torch.SymInt)):
        return None
    if isinstance(start, int) and start < 0:
        if not isinstance(old.size, int):
            return None
        start = max(0, start + old.size)
    first = _sum(old.start, start)
    if first is None:
        return None
    return _with_dim(above, dim, replace(old, start=first, size=value(node).shape[dim]))


def _sum(left: Node | int, right: Node | int) -> Node | int | None:
    """The sum of two starts where no node is needed for it."""
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    if left == 0 or right == 0:
        return right if left == 0 else left
    return None


def _with_dim(above: View, dim: int, new: Dim) -> View:
    return replace(above, dims=(*above.dims[:dim], new, *above.dims[dim + 1 :]))


def _permuted(above: View, order: Sequence[int]) -> View:
    return replace(above, dims=tuple(above.dims[dim] for dim in order))


def _transpose(node: Node, above: View, given: dict[str, Any]) -> View:
    order = list(range(len(above.dims)))
    first, second = (given[name] % len(order) for name in (("dim0", "dim1") if "dim0" in given else ("axis0", "axis1")))
    order[first], order[second] = order[second], order[first]
    return _permuted(above, order)


def _permute(node: Node, above: View, given: dict[str, Any]) -> View:
    return _permuted(above, [dim % len(above.dims) for dim in given["dims"]])


def _matrix_transpose(node: Node, above: View, given: dict[str, Any]) -> View:
    *lead, rows, columns = range(len(above.dims))
    return _permuted(above, [*lead, columns, rows])


def _movedim(node: Node, above: View, given: dict[str, Any]) -> View | None:
    source, destination = given["source"], given["destination"]
    if not (isinstance(source, int) and isinstance(destination, int)):
        return None
    order = list(range(len(above.dims)))
    order.insert(destination % len(order), order.pop(source % len(order)))
    return _permuted(above, order)


def _unsqueeze(node: Node, above: View, given: dict[str, Any]) -> View:
    dim = given["dim"] % (len(above.dims) + 1)
    return replace(above, dims=(*above.dims[:dim], Dim(None, 0, 1), *above.dims[dim:]))


def _expand(node: Node, above: View, given: dict[str, Any]) -> View | None:
    """A dimension of size 1 is repeated; further ones come before the first."""
    shape = value(node).shape
    added = len(shape) - len(above.dims)
    dims = [Dim(None, 0, size) for size in shape[:added]]
    for old, size in zip(above.dims, shape[added:], strict=True):
        if known(old.total == size):
            dims.append(old)
        elif not known(old.total == 1):
            return None
        else:
            dims.append(replace(old, size=size) if old.axis is None else replace(old, repeats=size))
    return replace(above, dims=tuple(dims))


def _reshape(node: Node, above: View, given: dict[str, Any]) -> View | None:
    """Dimensions of size 1 come and go, and one repeated just behind another is merged with it: each of its elements n times in a row."""
    left, dims, fixed = list(above.dims), [], list(above.fixed)

    def drop() -> bool:
        if not left or not known(left[0].total == 1):
            return False
        dropped = left.pop(0)
        if dropped.axis is not None:
            fixed.append((dropped.axis, dropped.start))
        return True

    for size in value(node).shape:
        while True:
            if left and known(left[0].total == size):
                dims.append(left.pop(0))
            elif known(size == 1):
                dims.append(Dim(None, 0, 1))
            elif len(left) > 1 and left[1].axis is None and known(left[0].total * left[1].total == size):
                one, repeated = left.pop(0), left.pop(0)
                dims.append(replace(one, repeats=one.repeats * repeated.total))
            elif drop():
                continue
            else:
                return None
            break
    while left:
        if not drop():
            return None
    return replace(above, dims=tuple(dims), fixed=tuple(fixed))


def _repeat_interleave(node: Node, above: View, given: dict[str, Any]) -> View | None:
    repeats, dim = given.get("repeats"), given.get("dim")
    if not isinstance(repeats, int) or dim is None:
        return None
    dim %= len(above.dims)
    return _with_dim(above, dim, replace(above.dims[dim], repeats=above.dims[dim].repeats * repeats))


_READERS: tuple[tuple[tuple[Any, ...], Any], ...] = (
    ((aten.unbind,), _list_of_views),
    ((aten.select,), _select),
    ((aten.slice, aten.narrow), _slice),
    ((aten.transpose, aten.swapaxes, aten.swapdims), _transpose),
    ((aten.permute,), _permute),
    ((aten.mT,), _matrix_transpose),
    ((aten.movedim,), _movedim),
    ((aten.unsqueeze,), _unsqueeze),
    ((aten.squeeze, *_RESHAPES), _reshape),
    ((aten.expand, aten.expand_as, aten.broadcast_to), _expand),
    ((aten.repeat_interleave,), _repeat_interleave),
)
_STEPS = (*_WRITES, *COPIES, aten.mul, aten.div, *(packet for packets, _ in _READERS for packet in packets))


def constant_factor(node: Node) -> float | None:
    """c of ``x * c`` or ``x / (1 / c)`` with a constant c, where that is all that ``node`` does."""
    if not is_op(node, aten.mul, aten.mul_, aten.div, aten.div_):
        return None
    factor = constant(node.args[1])
    if factor is None or arguments(node).get("rounding_mode") is not None:
        return None
    if is_op(node, aten.mul, aten.mul_):
        return factor
    return 1.0 / factor if factor else None


def is_view(node: Node) -> bool:
    """Whether ``node`` only shows its input's memory in another way: it neither reads nor writes there."""
    sources = {storage for source in node.all_input_nodes for storage in storages(source)}
    return bool(sources & storages(node)) and not written(node)
