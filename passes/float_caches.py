"""Finds attention over a model's own float cache: a buffer that the graph writes its new tokens into and then reads whole. Edits nothing.

A cache is a [B, H, C, D] input of the graph (transformers' StaticCache, a model's buffer) with one write, at columns given by a tensor
(``index_copy_``, ``c[:, :, position] = k``) or by an integer (``c[:, :, a:b] = k``, ``c.narrow(2, a, n).copy_(k)``), and one attention,
which reads all of it after that. How attention is spelled is known to :mod:`kivi_ops.passes.match`. Must not know where the state lives.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

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
    unwrapped,
)
from kivi_ops.passes.nodes import arguments, described, is_op, known, name, same_sizes, storages, value, written

aten = torch.ops.aten


@dataclass(frozen=True)
class FloatWrite:
    """One write of new tokens ``new`` [B, H, S, D] into the graph's input ``cache``, from column ``position`` on (an int tensor [S], or
    an integer, known or not). ``nodes``: the write ``node`` and the views that lead to it."""

    node: Node
    cache: Node
    nodes: tuple[Node, ...]
    new: Node
    position: Node | int


@dataclass(frozen=True)
class FloatCache(CacheWrite):
    """A Key and a Value write that one attention reads. ``node`` is the first of the two; ``arguments`` lack the state, which is not in
    the graph yet."""

    key_cache: Node
    value_cache: Node

    @property
    def state(self) -> list[Node]:
        return []

    @property
    def spelling(self) -> str:
        return f"float cache by {name(self.node)}"


class _NoCache(Unmatched):
    """An attention over what the graph has just computed."""


class _Uses:
    """Who touches which memory: nodes by the storages of their inputs, and of the inputs they change; and the order in which they run."""

    def __init__(self, graph: Graph) -> None:
        self.place = {node: place for place, node in enumerate(graph.nodes)}
        self.inputs = graph.find_nodes(op="placeholder")
        self.readers: dict[int, list[Node]] = defaultdict(list)
        self.writers: dict[int, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            for found, nodes in ((self.readers, node.all_input_nodes), (self.writers, written(node))):
                for storage in {storage for source in nodes for storage in storages(source)}:
                    found[storage].append(node)


def match_float_caches(graph: Graph) -> list[AttentionSite | Refusal]:
    """Every attention of ``graph`` that is not over ``kivi::update``, in the order in which they run, or why it is left float."""
    attentions = [node for node in graph.nodes if (values := attended_values(node)) is not None and not is_update_result(values)]
    if not attentions:
        return []
    uses = _Uses(graph)
    updates = bool(cache_writes(graph))
    found: list[AttentionSite | Refusal] = []
    for node in attentions:
        try:
            found.append(_match(node, uses))
        except _NoCache as unmatched:
            if not updates:  # else it may well read an update in some way that is refused there
                found.append(Refusal(node, str(unmatched)))
        except Unmatched as unmatched:
            found.append(Refusal(node, str(unmatched)))
    return found


def _match(node: Node, uses: _Uses) -> AttentionSite:
    attention = read_attention(node)
    key = _find_write(attention.key.source, "Keys", uses)
    value_ = _find_write(attention.value.source, "Values", uses)
    if key.cache is value_.cache:
        raise Unmatched("Keys and Values are one tensor")
    for write in (key, value_):
        _check_position(write, uses)
    if not _same(key.position, value_.position):
        raise Unmatched(f"Keys and Values are written at positions of their own, by {described(key.node)} and {described(value_.node)}")
    cache = FloatCache(
        node=min(key.node, value_.node, key=uses.place.__getitem__),
        arguments={"key": key.new, "value": value_.new, "position": key.position, "capacity": value(key.cache).shape[2]},
        key=attention.key.source,
        value=attention.value.source,
        key_cache=key.cache,
        value_cache=value_.cache,
    )
    check_reads(cache, attention)
    check_mask(cache, attention)
    return AttentionSite(cache, attention, _owned(attention, {"Keys": key, "Values": value_}, uses))


# ------------------------------------------------------------------------------------------------------------- the write


def _find_write(source: Node, role: str, uses: _Uses) -> FloatWrite:
    """The one write to the input that ``source`` is, or is what that write returned."""
    memory = storages(source)
    owners = [node for node in uses.inputs if storages(node) & memory]
    if not owners:
        if is_op(source, aten.cat):
            raise _NoCache(
                f"the {role} are joined with the past by {described(source)}: such a cache grows, and its state would leave the graph"
            )
        raise _NoCache(f"the {role} are no cache: they come from {described(source)}, in this graph")
    if len(owners) > 1:
        raise Unmatched(f"the {role} share memory with another input of the graph")
    (cache,) = owners
    _check_cache(cache, role)
    whole, seen = value(cache), value(source)
    if not same_sizes(whole.shape, seen.shape) or not same_sizes(whole.stride(), seen.stride()):
        raise Unmatched(f"only a part or another view of the {role} cache is read, by {described(source)}")
    writers = [node for storage in memory for node in uses.writers.get(storage, [])]
    if not writers:
        raise Unmatched(f"the {role} come from an input that this graph does not write: cross-attention, or a cache filled elsewhere")
    if len(writers) > 1:
        raise Unmatched(f"the {role} cache is written {len(writers)} times, by {' and '.join(map(described, writers))}")
    write = _read_write(writers[0], cache, role)
    new, rows = value(write.new), whole.shape
    if (
        new.dim() != 4
        or not same_sizes((new.shape[0], new.shape[1], new.shape[3]), (rows[0], rows[1], rows[3]))
        or new.dtype != whole.dtype
    ):
        raise Unmatched(
            f"{described(write.node)} writes {new.dtype} {list(new.shape)} into a cache of {whole.dtype} {list(rows)}; allowed: all of its "
            "rows and heads, in its dtype"
        )
    return write


def _check_cache(cache: Node, role: str) -> None:
    tensor = value(cache)
    if tensor.dim() != 4 or not all(isinstance(size, int) for size in tensor.shape):
        raise Unmatched(f"the {role} cache has shape {list(tensor.shape)}; allowed: 4 known sizes [B, H, C, D]")
    if tensor.dtype not in CACHE_DTYPES or not 1 <= tensor.shape[3] <= 256:
        raise Unmatched(
            f"the {role} cache is {tensor.dtype} with heads of {tensor.shape[3]}; allowed: {', '.join(map(str, CACHE_DTYPES))}, 1 to 256"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise Unmatched(f"the {role} cache is on {tensor.device}; allowed: cpu, cuda")


def _read_write(node: Node, cache: Node, role: str) -> FloatWrite:
    """What a write says.

    Raises:
        Unmatched: it is none that the pass knows.
    """
    unknown = Unmatched(f"the {role} cache is written by {described(node)}, in a way that the pass does not know")
    given = arguments(node) if hasattr(node.target, "_schema") else {}
    views: tuple[Node, ...] = ()
    if is_op(node, aten.index_copy_) and given["dim"] in (2, -2):
        target, position, new = given["self"], given["index"], given["source"]
    elif is_op(node, aten.index_put_) and not given["accumulate"] and _only_third(given["indices"]):
        target, position, new = given["self"], given["indices"][2], given["values"]
    elif is_op(node, aten.copy_):
        part, copies = unwrapped(given["self"])
        if is_op(part, aten.slice, aten.narrow):
            inner = arguments(part)
            target, position, new, views = inner["self"], inner["start"] or 0, given["src"], (*copies, part)
            if inner["dim"] not in (2, -2) or inner.get("step", 1) != 1 or not same_sizes(value(part).shape, value(new).shape):
                raise unknown
        else:
            raise unknown
    else:
        raise unknown
    base, copies = unwrapped(target)
    if base is not cache or not isinstance(new, Node):
        raise unknown
    if isinstance(position, int) and position < 0:
        raise Unmatched(f"{described(node)} counts columns from the end ({position})")
    return FloatWrite(node, cache, (node, *views, *copies), _with_all_dimensions(new), position)


def _with_all_dimensions(new: Node) -> Node:
    """[1, H, S, D] where ``new`` is a view [H, S, D] of that: ``cache[...] = new`` takes leading dimensions of size 1 off."""
    if is_op(new, aten.view, aten.reshape) and isinstance(source := new.args[0], Node):
        lead = value(source).dim() - value(new).dim()
        if lead > 0 and same_sizes(value(source).shape, (*[1] * lead, *value(new).shape)):
            return source
    return new


def _only_third(indices: list[Any]) -> bool:
    return len(indices) == 3 and indices[0] is None and indices[1] is None and isinstance(indices[2], Node)


# ---------------------------------------------------------------------------------------------------------- the position


def _same(left: Any, right: Any) -> bool:
    """Whether two positions are one value: one node, or the same pure function of the same inputs."""
    if not (isinstance(left, Node) and isinstance(right, Node)):
        return type(left) is type(right) and left == right
    if left is right:
        return True
    if left.op != "call_function" or left.target is not right.target or written(left) or len(left.args) != len(right.args):
        return False
    return left.kwargs == right.kwargs and all(map(_same, left.args, right.args))


def _check_position(write: FloatWrite, uses: _Uses) -> None:
    position, tokens = write.position, value(write.new).shape[2]
    if not isinstance(position, Node):
        return
    columns = position.meta["val"]
    if isinstance(columns, torch.Tensor):
        if columns.dtype not in (torch.int32, torch.int64) or columns.dim() != 1 or not known(columns.shape[0] == tokens):
            raise Unmatched(
                f"the position is {columns.dtype} {list(columns.shape)}; allowed: int32 or int64 [{tokens}], a column for each token"
            )
        if not known(tokens == 1) and not _is_consecutive(position):
            raise Unmatched(
                f"the {tokens} new tokens go to columns given by {described(position)}, which the graph does not show to be consecutive "
                "(as arange(n) + start does)"
            )
    # The start is computed again, before the graph runs, where what the cache already holds must be taken over.
    cone = start_nodes(position)
    memory = {storage for node in cone for storage in storages(node)}
    for storage in memory:
        for writer in uses.writers.get(storage, []):
            if uses.place[writer] < uses.place[position] or writer in cone:
                raise Unmatched(f"the position is changed in place before it is used, by {described(writer)}")


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
    roles = {"Keys": attention.key.passed, "Values": attention.value.passed, "attention weights": attention.inner[:-1]}
    owned = frozenset((attention.output, *(node for nodes in roles.values() for node in nodes)))
    for role, write in writes.items():
        for storage in storages(write.cache):
            for reader in uses.readers[storage]:
                if reader in write.nodes or is_op(reader, aten.sym_size):
                    continue
                if reader not in owned:
                    raise Unmatched(f"the {role} cache has another reader, {described(reader)}")
                if uses.place[reader] < uses.place[write.node]:
                    raise Unmatched(f"{described(reader)} reads the {role} cache before {described(write.node)} writes it")
    for role, nodes in roles.items():
        for node in nodes:
            for user in node.users:
                if user not in owned:
                    raise Unmatched(f"the {role} have another reader, {described(user)}")
    return owned
