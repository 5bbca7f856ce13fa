"""Finds attention over a cache in a normalised graph and says what it is, or why it is left alone. Edits nothing.

Here a cache is what ``kivi::update`` returns (:mod:`kivi_ops.passes.float_caches` finds the others). Matched is attention over all of
its columns, read directly or through copies and head expansion (``unsqueeze`` + ``expand`` + ``reshape``, ``repeat_interleave``,
``enable_gqa``), spelled as ``scaled_dot_product_attention`` with a mask, or as ``matmul, scale, softcap, + mask, softmax, to, dropout,
matmul``. Everything on a matched node is carried over, or the match is refused. Must not know where nodes may be moved to
(:mod:`kivi_ops.passes.plan`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from kivi_ops.passes.nodes import arguments, described, is_op, known, name, same_sizes, value

aten = torch.ops.aten

STATE_NAMES = ("key_records", "value_records", "key_window", "value_window", "sealed", "left_padding", "length")


@dataclass(frozen=True)
class CacheWrite:
    """A ``kivi::update`` node: its arguments by name, and the nodes that take its two results (None: nothing does)."""

    node: Node
    arguments: dict[str, Any]
    key: Node | None
    value: Node | None

    @property
    def state(self) -> list[Node]:
        return [self.arguments[state] for state in STATE_NAMES]

    @property
    def spelling(self) -> str:
        """What a report says of it: nothing, for the operator is its only spelling."""
        return ""


@dataclass(frozen=True)
class Read:
    """What an attention reads at last: ``source``, each head ``repeats`` times in a row, through the nodes ``passed`` (last one first)."""

    source: Node
    repeats: int
    passed: tuple[Node, ...]


@dataclass(frozen=True)
class Attention:
    """One attention of a model, whatever it reads. ``inner`` are its own nodes, in the order in which they run, ``output`` the last."""

    spelling: str
    output: Node
    query: Node
    key: Read
    value: Read
    attn_mask: Node | None
    scale: float | None
    softcap: float | None
    enable_gqa: bool
    inner: tuple[Node, ...]


@dataclass(frozen=True)
class AttentionSite:
    """An attention over what a ``write`` returned. ``owned``: all nodes that go with it, in no order, the write among them."""

    write: CacheWrite
    attention: Attention
    owned: frozenset[Node]

    @property
    def node(self) -> Node:
        return self.attention.output

    @property
    def spelling(self) -> str:
        """The spelling in words, for a report."""
        attention = self.attention
        parts = [attention.spelling]
        if attention.key.repeats > 1:
            parts.append(f"heads x{attention.key.repeats}")
        if attention.enable_gqa:
            parts.append("enable_gqa")
        if attention.attn_mask is not None:
            parts.append("bool mask" if value(attention.attn_mask).dtype == torch.bool else "float mask")
        if attention.softcap is not None:
            parts.append("softcap")
        if self.write.spelling:
            parts.append(self.write.spelling)
        return ", ".join(parts)


@dataclass(frozen=True)
class Refusal:
    """A cache whose attention is left as it is. ``node``: where to look in the model."""

    node: Node
    reason: str


class Unmatched(Exception):
    """Why a site is refused, from wherever that is noticed."""


def match(graph: Graph) -> list[AttentionSite | Refusal]:
    """Every ``kivi::update`` of ``graph``, in the order in which they run, with its attention or the reason for having none."""
    attentions = [node for node in graph.nodes if attended_values(node) is not None]
    return [_match_write(write, attentions) for write in cache_writes(graph)]


def cache_writes(graph: Graph) -> list[CacheWrite]:
    writes = []
    for node in graph.nodes:
        if is_op(node, torch.ops.kivi.update):
            outputs: dict[int, Node] = {}
            for user in node.users:
                outputs.setdefault(user.args[1], user)
            writes.append(CacheWrite(node, arguments(node), outputs.get(0), outputs.get(1)))
    return writes


def is_update_result(node: Node) -> bool:
    """Whether ``node`` reads, at last, what a ``kivi::update`` returned."""
    source = read_through(node).source
    return source.target is operator.getitem and is_op(source.args[0], torch.ops.kivi.update)


def _match_write(write: CacheWrite, attentions: Iterable[Node]) -> AttentionSite | Refusal:
    readers = []
    for node in attentions:
        values = attended_values(node)
        if values is not None and read_through(values).source is write.value:
            readers.append(node)
    place = readers[0] if readers else write.node
    try:
        if write.key is None or write.value is None:
            raise Unmatched("only one of the two results of the update is read")
        if not readers:
            raise Unmatched(_unexplained_reader(write.key, write.value))
        if len(readers) > 1:
            raise Unmatched(f"{len(readers)} attentions read one update")
        attention = read_attention(readers[0])
        check_reads(write, attention)
        check_mask(write, attention)
        return AttentionSite(write, attention, _owned(write, attention))
    except Unmatched as unmatched:
        return Refusal(place, str(unmatched))


# ----------------------------------------------------------------------------------------------- from a read to its source

_COPIES = (
    *(aten.alias, aten.detach, aten.contiguous, aten.clone, aten.to, aten._to_copy, aten.slice, aten.expand),
    *(aten.view, aten.reshape, aten._unsafe_view),
)


def handed_on(node: Node) -> Node | None:
    """The node whose elements ``node`` returns unchanged, each at its place: a copy, or a view that turns out to be of the whole."""
    if not is_op(node, *_COPIES):
        return None
    source = node.args[0]
    if not isinstance(source, Node):
        return None
    before, after = value(source), value(node)
    whole = same_sizes(before.shape, after.shape) and before.dtype == after.dtype and before.device == after.device
    return source if whole else None


def unwrapped(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """The first node upwards that is no copy, and the copies passed."""
    passed = []
    while (source := handed_on(node)) is not None:
        passed.append(node)
        node = source
    return node, tuple(passed)


def expanded_heads(node: Node) -> Read | None:
    """The source of [B, H * n, C, D] where ``node`` repeats each head of [B, H, C, D] n times in a row, else None.

    ``repeat`` and ``tile`` are not that: they order heads the other way.
    """
    if is_op(node, aten.repeat_interleave):
        given = arguments(node)
        source, repeats, dim = given.get("self"), given.get("repeats"), given.get("dim")
        if isinstance(source, Node) and isinstance(repeats, int) and value(source).dim() == 4 and dim in (1, -3):
            return Read(source, repeats, (node,))
        return None
    if not is_op(node, aten.reshape, aten.view, aten._unsafe_view, aten.flatten):
        return None
    wide, above = unwrapped(node.args[0])  # type: ignore[arg-type]
    if not is_op(wide, aten.expand):
        return None
    narrow, between = unwrapped(wide.args[0])  # type: ignore[arg-type]
    if not is_op(narrow, aten.unsqueeze) or arguments(narrow)["dim"] not in (2, -3):
        return None
    source = narrow.args[0]
    assert isinstance(source, Node)
    if value(source).dim() != 4:
        return None
    rows, heads, columns, dim = value(source).shape
    repeats = value(wide).shape[2]
    if not isinstance(repeats, int) or not same_sizes(value(wide).shape, (rows, heads, repeats, columns, dim)):
        return None
    if not same_sizes(value(node).shape, (rows, heads * repeats, columns, dim)):
        return None
    return Read(source, repeats, (node, *above, wide, *between, narrow))


def read_through(node: Node) -> Read:
    """What ``node`` reads, through copies and head expansions."""
    repeats = 1
    passed: list[Node] = []
    while True:
        node, copies = unwrapped(node)
        passed.extend(copies)
        heads = expanded_heads(node)
        if heads is None:
            return Read(node, repeats, tuple(passed))
        repeats *= heads.repeats
        passed.extend(heads.passed)
        node = heads.source


def _unexplained_reader(*outputs: Node) -> str:
    """What reads the cache where no attention does: the first reader that is neither a copy nor a head expansion."""
    queue = list(outputs)
    while queue:
        node = queue.pop(0)
        for user in node.users:
            if is_op(user, aten.repeat, aten.tile):
                return f"heads are tiled by {described(user)}, which orders them otherwise than grouped attention does"
            if is_op(user, aten.unsqueeze) or (is_op(user, aten.expand) and value(user).dim() == 5) or _reads_on(user, node):
                queue.append(user)
            elif user.op == "output":
                return "the cache's Keys and Values leave the graph (is there a graph break before the attention?)"
            elif is_op(user, aten.slice, aten.narrow):
                return f"only a part of the cache is read, by {described(user)}"
            else:
                return f"the cache is read by {described(user)}, which is no attention that the pass knows"
    return "the cache is read by nothing"


def _reads_on(user: Node, node: Node) -> bool:
    heads = expanded_heads(user)
    return handed_on(user) is node or (heads is not None and node in (heads.source, *heads.passed))


# ------------------------------------------------------------------------------------------------------------- attention


def attended_values(node: Node) -> Node | None:
    """The Values that ``node`` attends over, None if it is no attention: enough to tell whose attention it is."""
    if is_op(node, aten.scaled_dot_product_attention):
        return arguments(node)["value"]
    if is_op(node, aten.matmul) and _softmax_above(node.args[0]) is not None:
        values = node.args[1]
        return values if isinstance(values, Node) else None
    return None


def read_attention(node: Node) -> Attention:
    """Everything that an attention's nodes say.

    Raises:
        Unmatched: something on them that the operator cannot be told.
    """
    if is_op(node, aten.scaled_dot_product_attention):
        return _read_sdpa(node)
    return _read_eager(node)


def _read_sdpa(node: Node) -> Attention:
    given = arguments(node)
    if given["dropout_p"] != 0:
        raise Unmatched(f"attention drops out weights (dropout_p={given['dropout_p']})")
    if given["is_causal"] is not False:
        raise Unmatched(
            "is_causal=True counts from the first column of the whole buffer, not from the new tokens' position; a mask would say which"
        )
    scale = given["scale"]
    if scale is not None and not isinstance(scale, (int, float)):
        raise Unmatched("the scale is computed in the graph")
    return Attention(
        spelling="sdpa",
        output=node,
        query=given["query"],
        key=read_through(given["key"]),
        value=read_through(given["value"]),
        attn_mask=given["attn_mask"],
        scale=None if scale is None else float(scale),
        softcap=None,
        enable_gqa=bool(given["enable_gqa"]),
        inner=(node,),
    )


def _softmax_above(weights: Any) -> Node | None:
    """The softmax whose result reaches ``weights`` through dropout, casts and copies."""
    while isinstance(weights, Node):
        if is_op(weights, aten.softmax, aten._softmax):
            return weights
        if not is_op(weights, aten.dropout, aten.to, aten._to_copy, *_COPIES):
            return None
        weights = weights.args[0]
    return None


def _read_eager(node: Node) -> Attention:
    """``matmul(dropout(softmax(softcap(matmul(q, k.T) * scale) + mask).to(dtype)), v)``, read upwards from its last node."""
    inner = [node]
    above: Any = node.args[0]
    while not is_op(above, aten.softmax, aten._softmax):
        if is_op(above, aten.dropout):
            dropout = arguments(above)
            if dropout["train"] is not False and dropout["p"] != 0:
                raise Unmatched(f"attention drops out weights (p={dropout['p']})")
        elif is_op(above, aten.to, aten._to_copy):
            if not value(above).dtype.is_floating_point or value(above).device != value(node).device:
                raise Unmatched(f"attention weights become {value(above).dtype} on {value(above).device}")
        elif handed_on(above) is None:
            raise Unmatched(f"attention weights go through {described(above)}")
        inner.append(above)
        above = above.args[0]
    softmax = arguments(above)
    if softmax["dim"] not in (-1, value(above).dim() - 1):
        raise Unmatched(f"softmax runs over dimension {softmax['dim']}, not over the columns")
    inner.append(above)
    scores = softmax["self"]
    mask = None
    if is_op(scores, aten.add, aten.add_):
        inner.append(scores)
        scores, mask = _masked_scores(scores)
    scores, softcap, passed = _capped_scores(scores)
    inner.extend(passed)
    scores, scale, passed = _scaled_scores(scores)
    inner.extend(passed)
    if not is_op(scores, aten.matmul):
        raise Unmatched(f"attention scores go through {described(scores)}")
    inner.append(scores)
    query, keys = scores.args
    assert isinstance(query, Node) and isinstance(keys, Node)
    keys, copies = unwrapped(keys)
    if not _swaps_last_two(keys):
        raise Unmatched(f"attention scores are a product with {described(keys)}, not with transposed Keys")
    key = read_through(keys.args[0])  # type: ignore[arg-type]
    return Attention(
        spelling="eager",
        output=node,
        query=query,
        key=Read(key.source, key.repeats, (*copies, keys, *key.passed)),
        value=read_through(node.args[1]),  # type: ignore[arg-type]
        attn_mask=mask,
        scale=scale,
        softcap=softcap,
        enable_gqa=False,
        inner=tuple(reversed(inner)),
    )


def _masked_scores(node: Node) -> tuple[Node, Node]:
    """Scores and float mask of their sum, whichever comes first."""
    left, right = node.args
    if arguments(node)["alpha"] != 1 or not (isinstance(left, Node) and isinstance(right, Node)):
        raise Unmatched(f"attention scores go through {described(node)}, which adds no mask")
    scores, mask = (right, left) if _is_scores(right) and not _is_scores(left) else (left, right)
    if not value(mask).dtype.is_floating_point:
        raise Unmatched(f"a mask of {value(mask).dtype} is added to the scores; allowed: a float one")
    return scores, mask


def _is_scores(node: Any) -> bool:
    while is_op(node, aten.mul, aten.mul_, aten.div, aten.div_, aten.tanh, aten.tanh_, aten.to, aten._to_copy, *_COPIES):
        node = node.args[0]
    return is_op(node, aten.matmul)


def _capped_scores(node: Node) -> tuple[Node, float | None, list[Node]]:
    """``x`` and c of ``tanh(x / c) * c``, and the nodes passed; the node itself and None if it is no softcap."""
    factor = _factor(node)
    if factor is None or not is_op(node.args[0], aten.tanh, aten.tanh_):
        return node, None, []
    tanh = node.args[0]
    assert isinstance(tanh, Node)
    divided = tanh.args[0]
    assert isinstance(divided, Node)
    inverse = _factor(divided)
    if inverse is None or factor <= 0 or not math.isclose(factor * inverse, 1.0, rel_tol=1e-6):
        raise Unmatched(f"attention scores go through {described(tanh)}, which is no softcap tanh(x / c) * c")
    source = divided.args[0]
    assert isinstance(source, Node)
    return source, factor, [node, tanh, divided]


def _scaled_scores(node: Node) -> tuple[Node, float, list[Node]]:
    """The product of Query and Keys under its constant factors, their product, and the nodes passed."""
    scale = 1.0
    passed: list[Node] = []
    while True:
        factor = _factor(node)
        if factor is not None:
            scale *= factor
        elif is_op(node, aten.to, aten._to_copy):
            if not value(node).dtype.is_floating_point:
                raise Unmatched(f"attention scores become {value(node).dtype}")
        elif handed_on(node) is None:
            return node, scale, passed
        passed.append(node)
        node = node.args[0]  # type: ignore[assignment]


def _factor(node: Node) -> float | None:
    """c of ``x * c`` or ``x / (1 / c)`` with a constant c."""
    if is_op(node, aten.mul, aten.mul_) and isinstance(node.args[1], (int, float)):
        return float(node.args[1])
    if is_op(node, aten.div, aten.div_) and isinstance(node.args[1], (int, float)) and arguments(node).get("rounding_mode") is None:
        return 1.0 / node.args[1] if node.args[1] else None
    return None


def _swaps_last_two(node: Node) -> bool:
    dims = value(node).dim()
    if is_op(node, aten.mT):
        return True
    if is_op(node, aten.transpose):
        given = arguments(node)
        return {given["dim0"] % dims, given["dim1"] % dims} == {dims - 2, dims - 1}
    if is_op(node, aten.permute):
        order = [dim % dims for dim in arguments(node)["dims"]]
        return order == [*range(dims - 2), dims - 1, dims - 2]
    return False


# ---------------------------------------------------------------------------------------------- does it fit the operator


def check_reads(write: CacheWrite, attention: Attention) -> None:
    if attention.key.source is not write.key or attention.value.source is not write.value:
        raise Unmatched(f"{described(attention.output)} reads the Values of this update but Keys of {described(attention.key.source)}")
    query, new_key = value(attention.query), value(write.arguments["key"])
    if query.dim() != 4 or not same_sizes((query.shape[0], query.shape[2]), (new_key.shape[0], new_key.shape[2])):
        raise Unmatched(
            f"the query has shape {list(query.shape)}; allowed: [{new_key.shape[0]}, heads, {new_key.shape[2]}, D], a row and a query "
            "for each new token"
        )
    output = value(attention.output)
    if query.dtype != new_key.dtype or output.dtype != new_key.dtype:
        raise Unmatched(
            f"the query is {query.dtype}, attention returns {output.dtype} and the cache holds {new_key.dtype}; allowed: one dtype"
        )
    if attention.key.repeats != attention.value.repeats:
        raise Unmatched(f"Key heads are repeated {attention.key.repeats} times and Value heads {attention.value.repeats}")
    heads = new_key.shape[1] * attention.key.repeats
    # One head is broadcast to all by either spelling.
    fits = known(query.shape[1] == heads) or known(heads == 1) or (attention.enable_gqa and known(query.shape[1] % heads == 0))
    if not fits:
        raise Unmatched(f"{query.shape[1]} query heads meet {heads} Key heads")


def check_mask(write: CacheWrite, attention: Attention) -> None:
    """A mask that says which columns are visible: without one the float attention sees unwritten columns (zeros) too."""
    capacity = write.arguments["capacity"]
    if attention.attn_mask is None:
        raise Unmatched(f"attention over all {capacity} columns has no mask, so it sees unwritten ones")
    mask, query = value(attention.attn_mask), value(attention.query)
    shape = list(mask.shape)
    if mask.dim() != 4:
        raise Unmatched(f"the mask has shape {shape}; allowed: 4 dimensions")
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise Unmatched(f"the mask is {mask.dtype}; allowed: bool or a float dtype")
    for dim, axis in ((0, "rows"), (1, "heads"), (2, "new tokens")):
        if not (known(mask.shape[dim] == 1) or known(mask.shape[dim] == query.shape[dim])):
            raise Unmatched(f"the mask has {mask.shape[dim]} {axis}; allowed: 1 or {query.shape[dim]}")
    if not known(mask.shape[3] == capacity):
        raise Unmatched(f"the mask is {mask.shape[3]} columns wide, which hides no unwritten column; allowed: {capacity}, the capacity")


def _owned(write: CacheWrite, attention: Attention) -> frozenset[Node]:
    """The nodes that go with the site; an ``Unmatched`` if anything else reads one."""
    assert write.key is not None and write.value is not None
    roles = {
        "Keys": (write.key, *attention.key.passed),
        "Values": (write.value, *attention.value.passed),
        "attention weights": attention.inner[:-1],
    }
    owned = frozenset((write.node, attention.output, *(node for nodes in roles.values() for node in nodes)))
    for role, nodes in roles.items():
        for node in nodes:
            for user in node.users:
                if user not in owned:
                    raise Unmatched(f"the {role} have another reader, {described(user)}")
    for user in write.node.users:
        if user not in owned:
            raise Unmatched(f"the update has another reader, {name(user)}")
    return owned
