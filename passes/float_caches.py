"""Finds attention over a model's own float cache: an input that the graph writes its new tokens into and then reads. Edits nothing.

A cache is an input of the graph (transformers' StaticCache, a model's buffer) or a part of one, with its rows, heads, columns and channels
in any order, and with one write of the new tokens, at columns given by a tensor or from an integer on:

    index_copy_, c[:, :, position] = k, scatter_ with an index that is the position expanded,
    c[:, :, a:b] = k, c[:, :, a:b].copy_(k), c.narrow(2, a, n).copy_(k), c[:, :, a] = k, c.copy_(cat([c[:, :, :a], k, c[:, :, b:]], 2))

Its one attention reads all columns, or the first ones, after that; in any way that :mod:`kivi_ops.passes.views` follows. How attention is
spelled is known to :mod:`kivi_ops.passes.match`. Must not know where the state lives.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import guard_or_false

from kivi_ops.config import CACHE_DTYPES
from kivi_ops.passes.match import (
    Attention,
    AttentionSite,
    CacheWrite,
    Refusal,
    Unmatched,
    attended_values,
    cache_writes,
    check_mask,
    check_reads,
    is_update_result,
    read_attention,
    unread_attention,
)
from kivi_ops.passes.nodes import arguments, described, is_op, known, name, number, same_sizes, storages, value, written
from kivi_ops.passes.regions import InputSize, Region, in_order
from kivi_ops.passes.views import View, is_view, unwrapped, view_of

aten = torch.ops.aten


@dataclass(frozen=True)
class FloatWrite:
    """One write of new tokens into the graph's input ``cache``, from column ``position`` on (an int tensor [S], [1] or [], or an integer,
    known or not). ``new``: the tokens, with their rows, heads, columns and channels at the places ``order`` of its dimensions (None: not
    there, and one). ``node`` writes them; ``reads``: what else of the cache it reads, to write it back."""

    node: Node
    cache: Node
    new: Node
    order: tuple[int | None, ...]
    position: Node | int
    reads: frozenset[Node] = frozenset()

    @property
    def tokens(self) -> Tensor:
        """Fake [B, H, S, D]."""
        new: Any = value(self.new)
        with new.fake_mode:
            return in_order(new, self.order)


@dataclass(frozen=True)
class FloatCache(CacheWrite):
    """A Key and a Value write that one attention reads. ``node`` is the first of the two; ``arguments`` lack the state, which is not in
    the graph yet, and hold Keys and Values as the model has them.

    ``regions``: of the two caches. ``consecutive``: whether the graph shows that the new tokens' columns follow one another; if not, that
    is to be checked when it runs.
    """

    key_write: FloatWrite
    value_write: FloatWrite
    regions: tuple[Region, Region]
    consecutive: bool

    @property
    def state(self) -> list[Node]:
        return []

    @property
    def new_key(self) -> Tensor:
        return self.key_write.tokens

    @property
    def new_value(self) -> Tensor:
        return self.value_write.tokens

    @property
    def start(self) -> Any:
        start = number(self.key_write.position)
        return None if isinstance(start, Tensor) else start

    @property
    def spelling(self) -> str:
        checked = "" if self.consecutive else ", columns checked at run time"
        return f"float cache by {name(self.node)}{checked}"


class _NoCache(Unmatched):
    """An attention over what the graph has just computed."""


class _Uses:
    """Who touches which memory: nodes by the storages of their inputs, and of the inputs they change; and the order in which they run."""

    def __init__(self, graph: Graph) -> None:
        self.place = {node: place for place, node in enumerate(graph.nodes)}
        self.inputs = graph.find_nodes(op="placeholder")
        self.readers: dict[int, list[Node]] = defaultdict(list)
        self.writers: dict[int, list[Node]] = defaultdict(list)
        self._views: dict[Node, View] = {}
        for node in graph.nodes:
            for found, nodes in ((self.readers, node.all_input_nodes), (self.writers, written(node))):
                for storage in {storage for source in nodes for storage in storages(source)}:
                    found[storage].append(node)

    def view(self, node: Node) -> View:
        if node not in self._views:
            self._views[node] = view_of(node)
        return self._views[node]


def match_float_caches(graph: Graph) -> list[AttentionSite | Refusal]:
    """Every attention of ``graph`` that is not over ``kivi::update``, in the order in which they run, or why it is left float."""
    attentions = [node for node in graph.nodes if (values := attended_values(node)) is not None and not is_update_result(values)]
    unread = [(node, reason) for node in graph.nodes if (reason := unread_attention(node)) is not None]
    if not attentions and not unread:
        return []
    uses = _Uses(graph)
    updates = bool(cache_writes(graph))
    found: list[AttentionSite | Refusal] = [] if updates else [Refusal(node, reason) for node, reason in unread]
    for node in attentions:
        try:
            found.append(_match(node, uses))
        except _NoCache as unmatched:
            if not updates:  # else it may well read an update in some way that is refused there
                found.append(Refusal(node, str(unmatched)))
        except Unmatched as unmatched:
            found.append(Refusal(node, str(unmatched)))
    return sorted(found, key=lambda site: uses.place[site.node])


def _match(node: Node, uses: _Uses) -> AttentionSite:
    attention = read_attention(node)
    key_view, key = _find_write(attention.key, "Keys", uses)
    value_view, value_ = _find_write(attention.value, "Values", uses)
    attention = replace(attention, key=key_view, value=value_view)
    if key.cache is value_.cache and not _disjoint(key_view, value_view):
        raise Unmatched("Keys and Values are one tensor")
    key_consecutive, value_consecutive = _check_position(key, uses), _check_position(value_, uses)
    if not _same(key.position, value_.position):
        raise Unmatched(f"Keys and Values are written at positions of their own, by {described(key.node)} and {described(value_.node)}")
    cache = FloatCache(
        node=min(key.node, value_.node, key=uses.place.__getitem__),
        arguments={"key": key.new, "value": value_.new, "position": key.position, "capacity": _capacity(key_view)},
        key=key_view.source,
        value=value_view.source,
        key_write=key,
        value_write=value_,
        regions=(_region(key_view, uses), _region(value_view, uses)),
        consecutive=key_consecutive and value_consecutive,
    )
    check_reads(cache, attention)
    check_mask(cache, attention)
    return AttentionSite(cache, attention, _owned(attention, {"Keys": key, "Values": value_}, uses))


def _capacity(view: View) -> int:
    axis = view.dims[2].axis
    assert axis is not None
    return value(view.source).shape[axis]


def _region(view: View, uses: _Uses) -> Region:
    """The region of a view that has passed :func:`_check_cache`."""
    rows = view.dims[0]
    fixed = tuple((axis, index) for axis, index in view.fixed if isinstance(index, int))
    if rows.axis is None or (rows.start == 0 and known(rows.size == value(view.source).shape[rows.axis])):
        return Region(fixed, view.axes)
    assert isinstance(rows.start, int)
    return Region(fixed, view.axes, (rows.start, rows.size if isinstance(rows.size, int) else _input_size(rows.size, uses)))


def _input_size(size: torch.SymInt, uses: _Uses) -> InputSize:
    """Where among the graph's inputs a number is found."""
    for place, node in enumerate(uses.inputs):
        held = node.meta["val"]
        if isinstance(held, torch.SymInt) and known(held == size):
            return InputSize(place, None)
        for dim, other in enumerate(held.shape if isinstance(held, Tensor) else ()):
            if isinstance(other, torch.SymInt) and known(other == size):
                return InputSize(place, dim)
    raise Unmatched(f"the cache is used for {size} rows, which no input of the graph has")


# ------------------------------------------------------------------------------------------------------------- the write


def _find_write(view: View, role: str, uses: _Uses) -> tuple[View, FloatWrite]:
    """The one write to the input that ``view`` shows, and how it shows that input if it showed what is copied into it."""
    source = view.source
    copied = next((user for user in source.users if is_op(user, aten.copy_) and user.args[1] is source), None)
    if is_op(source, aten.cat) and copied is not None:
        view = _through_cat(view, copied, uses)
    memory = storages(view.source)
    owners = [node for node in uses.inputs if storages(node) & memory]
    if not owners:
        if is_op(source, aten.cat):
            raise _NoCache(
                f"the {role} are joined with the past by {described(source)}: such a cache is a new tensor each step, and its state would "
                "leave the graph"
            )
        if is_op(source, aten.repeat, aten.tile):
            raise _NoCache(f"heads are tiled by {described(source)}, which orders them otherwise than grouped attention does")
        raise _NoCache(f"the {role} are no cache: they come from {described(source)}, in this graph")
    if len(owners) > 1:
        raise Unmatched(f"the {role} share memory with another input of the graph")
    (cache,) = owners
    if view.source is not cache:
        raise Unmatched(f"another view of the {role} cache is read than the pass follows, by {described(view.source)}")
    _check_cache(view, role)
    writers = [node for storage in memory for node in uses.writers.get(storage, []) if not _writes_elsewhere(node, view, uses)]
    if not writers:
        raise Unmatched(f"the {role} come from an input that this graph does not write: cross-attention, or a cache filled elsewhere")
    if len(writers) > 1:
        raise Unmatched(f"the {role} cache is written {len(writers)} times, by {' and '.join(map(described, writers))}")
    write = _read_write(writers[0], view, role, uses)
    new, channels = write.tokens, view.dims[3]
    rows = (view.dims[0].size, view.dims[1].size, channels.size)
    if not same_sizes((new.shape[0], new.shape[1], new.shape[3]), rows) or new.dtype != value(cache).dtype:
        raise Unmatched(
            f"{described(write.node)} writes {new.dtype} {list(new.shape)} into a cache of {value(cache).dtype} "
            f"{[*rows[:2], _capacity(view), rows[2]]}; allowed: all of the rows and heads that are read, in its dtype"
        )
    return view, write


def _check_cache(view: View, role: str) -> None:
    """A cache is read with rows, heads, columns and channels, all heads and channels of it, and its sizes are known."""
    tensor, axes = value(view.source), view.axes
    shown = described(view.passed[0] if view.passed else view.source)
    if len(axes) != 4:
        raise Unmatched(f"attention reads the {role} in {len(axes)} dimensions, by {shown}; allowed: 4, [B, H, C, D]")
    if axes[2] is None or axes[3] is None:
        raise Unmatched(f"attention reads the {role} cache {list(tensor.shape)} without its columns or channels, by {shown}")
    if not all(isinstance(size, int) for axis, size in enumerate(tensor.shape) if axis != axes[0]):
        raise Unmatched(
            f"the {role} cache has shape {list(tensor.shape)}; allowed: known sizes (torch._dynamo.mark_static says so of a tensor)"
        )
    for dim in (view.dims[1], view.dims[3]):
        if dim.axis is not None and not (dim.start == 0 and known(dim.size == tensor.shape[dim.axis])):
            raise Unmatched(f"only some heads or channels of the {role} cache are read, by {shown}")
    rows = view.dims[0]
    if not isinstance(rows.start, int) or not all(isinstance(index, int) for _, index in view.fixed):
        raise Unmatched(f"which part of the {role} cache is read, by {shown}, depends on a number that is not known")
    if tensor.dtype not in CACHE_DTYPES or not 1 <= tensor.shape[axes[3]] <= 256:
        raise Unmatched(
            f"the {role} cache is {tensor.dtype} with heads of {tensor.shape[axes[3]]}; allowed: {', '.join(map(str, CACHE_DTYPES))}, 1 "
            "to 256"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise Unmatched(f"the {role} cache is on {tensor.device}; allowed: cpu, cuda")


def _disjoint(left: View, right: View) -> bool:
    """Whether two views of one tensor are known to share no element: one dimension is held at different indices."""
    held = dict(right.fixed)
    return left.source is right.source and any(
        isinstance(index, int) and isinstance(held.get(axis), int) and held[axis] != index for axis, index in left.fixed
    )


def _writes_elsewhere(node: Node, view: View, uses: _Uses) -> bool:
    memory = storages(view.source)
    return all(_disjoint(uses.view(target), view) for target in written(node) if storages(target) & memory)


def _read_write(node: Node, read: View, role: str, uses: _Uses) -> FloatWrite:
    """What a write says of the part of the cache that ``read`` shows.

    Raises:
        Unmatched: it is none that the pass knows.
    """
    given = arguments(node)
    unknown = Unmatched(f"the {role} cache is written by {described(node)}, in a way that the pass does not know")
    if not is_op(node, aten.index_copy_, aten.index_put_, aten.copy_, aten.scatter_):
        raise unknown
    target, reads = uses.view(given["self"]), frozenset[Node]()
    if target.source is not read.source or target.factor != 1.0 or any(not known(dim.repeats == 1) for dim in target.dims):
        raise unknown
    axes: list[int | None] = list(target.axes)
    columns: Any = read.axes[2]
    position: Any
    if is_op(node, aten.index_copy_):
        dim, position, new = given["dim"], given["index"], given["source"]
    elif is_op(node, aten.index_put_):
        indices = list(given["indices"])
        dims = [dim for dim, index in enumerate(indices) if index is not None]
        if given["accumulate"] or len(dims) != 1:
            raise unknown
        dim, position, new = dims[0], indices[dims[0]], given["values"]
        if value(position).dim() == 0:
            axes.remove(columns)
    elif is_op(node, aten.scatter_):
        dim, position, new = given["dim"], _expanded_position(given["index"], given["dim"]), given.get("src")
        if position is None or not isinstance(new, Node) or not same_sizes(value(new).shape, value(given["index"]).shape):
            raise unknown
    else:
        dim, new = None, given["src"]
        found = _joined_parts(new, target, columns, uses)
        if found is not None:
            position, new, reads = found
        elif columns in axes:
            position = target.dims[axes.index(columns)].start
            if known(target.dims[axes.index(columns)].size == value(read.source).shape[columns]):
                raise Unmatched(f"all columns of the {role} cache are written anew by {described(node)}, as in a window that rolls")
        else:
            position = dict(target.fixed).get(columns)  # type: ignore[arg-type]
    if dim is not None and target.axes[dim % len(target.axes)] != columns:
        raise unknown
    if position is None or not isinstance(new, Node) or storages(new) & storages(read.source):
        raise unknown
    if dim is not None and not (target.dims[dim].start == 0 and known(target.dims[dim].size == value(read.source).shape[columns])):
        raise unknown  # an index into a part of the columns
    _check_same_part(node, target, read, role)
    any_tokens = dim is not None or bool(reads)
    shape = [None if axis == columns and any_tokens else target.dims[target.axes.index(axis)].size for axis in axes]
    given_sizes = value(new).shape
    left_out = len(axes) - len(given_sizes)  # as setitem does with leading dimensions of size 1
    fits = left_out >= 0 and all(known((_tokens(position) if size is None else size) == 1) for size in shape[:left_out])
    axes, shape = axes[max(0, left_out) :], shape[max(0, left_out) :]
    if not fits or not all(size is None or known(size == got) for size, got in zip(shape, given_sizes, strict=True)):
        raise Unmatched(f"{described(node)} writes {list(given_sizes)}, which is broadcast; allowed: as many dimensions as it fills")
    order = tuple(axes.index(axis) if axis is not None and axis in axes else None for axis in read.axes)
    if isinstance(position, int) and position < 0:
        raise Unmatched(f"{described(node)} counts columns from the end ({position})")
    return FloatWrite(node, read.source, new, order, position, reads)


def _tokens(position: Any) -> Any:
    """How many columns a position says, 0 if that is not known."""
    return value(position).numel() if isinstance(position, Node) and isinstance(position.meta["val"], Tensor) else 0


def _check_same_part(node: Node, target: View, read: View, role: str) -> None:
    """Rows, heads, channels and fixed dimensions of the write and of the read are the same."""
    columns = read.axes[2]
    sizes = value(read.source).shape

    def part(view: View) -> dict[int, tuple[Any, Any]]:
        shown = {axis: (index, 1) for axis, index in view.fixed}
        shown.update({dim.axis: (dim.start, dim.size) for dim in view.dims if dim.axis is not None})
        return {axis: first for axis, first in shown.items() if axis != columns}

    ours, theirs = part(target), part(read)
    for axis in range(len(sizes)):
        if axis == columns:
            continue
        (start, size), (wanted, count) = ours[axis], theirs[axis]
        if not (type(start) is type(wanted) and start == wanted and known(size == count)):
            raise Unmatched(
                f"{described(node)} writes another part of the {role} cache than attention reads (dimension {axis}: {size} from {start}, "
                f"not {count} from {wanted})"
            )


def _expanded_position(index: Node, dim: int) -> Node | None:
    """The 1-D tensor that ``index`` repeats along all dimensions but ``dim``, None if it is no such thing."""
    view = view_of(index)
    dims = view.dims[dim % len(view.dims)]
    others = [other for other in view.dims if other is not dims]
    if value(view.source).dim() == 1 and known(value(view.source).numel() == 1) and view.factor == 1.0:
        return view.source
    if value(view.source).dim() != 1 or dims.axis != 0 or dims.start != 0 or view.factor != 1.0:
        return None
    if not known(dims.repeats == 1) or not known(dims.size == value(view.source).shape[0]):
        return None
    return view.source if all(other.axis is None for other in others) else None


def _joined_parts(new: Any, target: View, columns: Any, uses: _Uses) -> tuple[Node | int, Node, frozenset[Node]] | None:
    """Start, new tokens and the nodes that read the cache, of ``cat([c[:, :, :a], k, c[:, :, b:]], 2)`` with b the end of k."""
    if not is_op(new, aten.cat):
        return None
    given = arguments(new)
    parts, dim = given["tensors"], given["dim"]
    if len(parts) != 3 or target.axes[dim % len(target.axes)] != columns:
        return None
    before, middle, after = uses.view(parts[0]), parts[1], uses.view(parts[2])
    if not all(view.source is target.source and view.axes == target.axes for view in (before, after)):
        return None
    dim %= len(target.axes)
    first, last, whole = before.dims[dim], after.dims[dim], target.dims[dim]
    length = value(middle).shape[dim]
    fits = first.start == 0 and known(number(last.start) == first.size + length) and known(last.size == whole.size - number(last.start))
    slices = [node for node in before.passed if is_op(node, aten.slice, aten.narrow) and arguments(node)["dim"] % len(target.axes) == dim]
    if not fits or len(slices) != 1:
        return None
    start = arguments(slices[0])["end" if is_op(slices[0], aten.slice) else "length"]
    return start, middle, frozenset((new,))


def _through_cat(view: View, copied: Node, uses: _Uses) -> View:
    """``view`` of a joined tensor as a view of what that is copied into."""
    target = uses.view(copied.args[0])  # type: ignore[arg-type]
    dims = tuple(dim if dim.axis is None else replace(dim, axis=target.dims[dim.axis].axis) for dim in view.dims)
    held = [(target.dims[axis].axis, index) for axis, index in view.fixed]
    if not all(dim.start == 0 for dim in target.dims):
        return view
    return replace(view, source=target.source, dims=dims, fixed=(*target.fixed, *held))  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- the position

# What a position may be computed by. All else might wrap around or stand still, and then columns behind it hold tokens that are still seen.
_POSITIONS = (
    *(aten.arange, aten.add, aten.add_, aten.sub, aten.to, aten._to_copy, aten.copy_, aten.clone, aten.alias, aten.detach, aten.detach_),
    *(aten.contiguous, aten.slice, aten.narrow, aten.select, aten.index, aten.index_select, aten.view, aten.reshape, aten.flatten),
    *(aten.squeeze, aten.unsqueeze, aten.expand, aten.item, aten._local_scalar_dense, aten.sym_size),
    *(aten.scalar_tensor, aten.full, aten.zeros, aten.lift_fresh_copy),
    *(torch.ops.kivi.read_length,),
)
_NUMBERS = (operator.add, operator.sub, operator.getitem)


def _same(left: Any, right: Any) -> bool:
    """Whether two positions are one value: one node, or the same pure function of the same inputs."""
    if not (isinstance(left, Node) and isinstance(right, Node)):
        return type(left) is type(right) and left == right
    if left is right:
        return True
    if left.op != "call_function" or left.target is not right.target or written(left) or len(left.args) != len(right.args):
        return False
    return left.kwargs == right.kwargs and all(map(_same, left.args, right.args))


def _check_position(write: FloatWrite, uses: _Uses) -> bool:
    """Whether the graph shows that the columns of the new tokens follow one another; an ``Unmatched`` if they are no position at all."""
    position, tokens = write.position, write.tokens.shape[2]
    if not isinstance(position, Node):
        return True
    columns, consecutive = position.meta["val"], True
    if isinstance(columns, torch.Tensor):
        if columns.dtype not in (torch.int32, torch.int64) or columns.dim() > 1 or not guard_or_false(columns.numel() == tokens):
            raise Unmatched(
                f"the position is {columns.dtype} {list(columns.shape)}; allowed: int32 or int64 [{tokens}], a column for each token"
            )
        consecutive = known(tokens == 1) or _is_consecutive(position)
    # The start is computed again, before the graph runs, where what the cache already holds must be taken over.
    cone = start_nodes(position)
    for node in sorted(cone, key=uses.place.__getitem__):
        if node.op == "call_function" and not is_op(node, *_POSITIONS) and node.target not in _NUMBERS:
            raise Unmatched(
                f"the position is computed by {described(node)}; allowed: sums, and reads of tensors and numbers, since a position that "
                "wraps around leaves tokens behind it that are still seen"
            )
    memory = {storage for node in cone for storage in storages(node)}
    for storage in memory:
        for writer in uses.writers.get(storage, []):
            if uses.place[writer] < uses.place[position] or writer in cone:
                raise Unmatched(f"the position is changed in place before it is used, by {described(writer)}")
    return consecutive


def _is_consecutive(position: Node) -> bool:
    """``arange(n)``, or its sum with one number or a tensor of one element."""
    position, _ = unwrapped(position)
    if is_op(position, aten.arange):
        return arguments(position).get("step", 1) == 1
    if not is_op(position, aten.add) or arguments(position)["alpha"] != 1:
        return False
    left, right = position.args
    for columns, start in ((left, right), (right, left)):
        if isinstance(columns, Node) and _is_consecutive(columns):
            held = start.meta["val"] if isinstance(start, Node) else start
            return not isinstance(held, torch.Tensor) or known(held.numel() == 1)
    return False


def start_nodes(position: Node) -> set[Node]:
    """All nodes that ``position`` is computed from, itself included."""
    cone, queue = {position}, [position]
    while queue:
        for source in queue.pop().all_input_nodes:
            if source not in cone:
                cone.add(source)
                queue.append(source)
    return cone


# ------------------------------------------------------------------------------------------------------------ the readers


def _owned(attention: Attention, writes: dict[str, FloatWrite], uses: _Uses) -> frozenset[Node]:
    """The nodes that go with the site; an ``Unmatched`` if anything else reads one, or the cache, or reads it too early."""
    views = {"Keys": attention.key, "Values": attention.value}
    caches = {storage for view in views.values() for storage in storages(view.source)}
    roles = {role: view.passed for role, view in views.items()} | {"attention weights": attention.inner[:-1]}
    owned = {attention.output, *(node for nodes in roles.values() for node in nodes)}
    explained = {node for write in writes.values() for node in (write.node, *write.reads)}
    for role, view in views.items():
        for storage in storages(view.source):
            for reader in uses.readers[storage]:
                if reader in explained or is_op(reader, aten.sym_size) or is_view(reader) or _reads_elsewhere(reader, view, uses):
                    continue
                if reader not in owned:
                    raise Unmatched(f"the {role} cache has another reader, {described(reader)}")
                if uses.place[reader] < uses.place[writes[role].node]:
                    raise Unmatched(f"{described(reader)} reads the {role} cache before {described(writes[role].node)} writes it")
    for role, nodes in roles.items():
        for node in nodes:
            if storages(node) & caches:
                continue  # a view of the cache, and who reads that has been seen
            for user in node.users:
                if user not in owned and user not in explained:
                    raise Unmatched(f"the {role} have another reader, {described(user)}")
    for write in writes.values():
        for node in write.reads:
            for user in node.users:
                if user not in owned and user not in explained:
                    raise Unmatched(f"the joined cache has another reader, {described(user)}")
    # Views that lead elsewhere too stay: to the write itself, or to another layer's part of the same tensor.
    for node in sorted(owned, key=uses.place.__getitem__, reverse=True):
        if node is not attention.output and any(user not in owned for user in node.users):
            owned.remove(node)
    return frozenset(owned)


def _reads_elsewhere(node: Node, view: View, uses: _Uses) -> bool:
    """Whether all that ``node`` reads of the cache's tensor is another part of it."""
    memory = storages(view.source)
    return node.op != "output" and all(_disjoint(uses.view(source), view) for source in node.all_input_nodes if storages(source) & memory)
