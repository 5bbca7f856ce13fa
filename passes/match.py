"""Finds attention over a cache in a normalised graph and says what it is, or why it is left alone. Edits nothing.

Here a cache is what ``kivi::update`` returns (:mod:`kivi_ops.passes.float_caches` finds the others). Matched is attention over its columns,
or the first n of them, read in any way that :mod:`kivi_ops.passes.views` follows, spelled as ``scaled_dot_product_attention``, or as
``matmul, scale, softcap, masks, softmax, to, dropout, matmul``. Everything on a matched node is carried over, or the match is refused. Must
not know where nodes may be moved to (:mod:`kivi_ops.passes.plan`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kivi_ops.passes.nodes import arguments, constant, described, is_op, known, name, same_sizes, value
from kivi_ops.passes.views import COPIES, View, constant_factor, handed_on, view_of

aten = torch.ops.aten

_MASK_NAMES = {"seen": "bool mask", "hidden": "bool mask", "added": "float mask", "first": "is_causal"}
_HIDES = -1e4  # a score that no softmax sees beside any that is visible

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
    def new_key(self) -> Tensor:
        """Fake [B, H, S, D_k]."""
        return value(self.arguments["key"])

    @property
    def new_value(self) -> Tensor:
        """Fake [B, H, S, D_v]."""
        return value(self.arguments["value"])

    @property
    def start(self) -> Any:
        """The column of the first new token where it is a number, known or a symbol; None where a tensor says it."""
        return None

    @property
    def spelling(self) -> str:
        """What a report says of it: nothing, for the operator is its only spelling."""
        return ""


@dataclass(frozen=True)
class Mask:
    """One thing that decides which columns are seen. ``kind``: ``node`` is True where they are "seen", or where they are "hidden", or is
    "added" to the scores; or, without a node, new token i sees the "first" i + 1 columns of the cache."""

    kind: str
    node: Node | None = None


@dataclass(frozen=True)
class Attention:
    """One attention of a model, whatever it reads. ``inner`` are its own nodes, in the order in which they run, ``output`` the last.

    ``key``, ``value``: what it reads, in the order [B, H, C, D]. ``masks``: all of them at once.
    """

    spelling: str
    output: Node
    query: Node
    key: View
    value: View
    masks: tuple[Mask, ...]
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
        repeats = attention.key.dims[1].repeats
        if not known(repeats == 1):
            parts.append(f"heads x{repeats}")
        if attention.enable_gqa:
            parts.append("enable_gqa")
        parts.extend(dict.fromkeys(_MASK_NAMES[mask.kind] for mask in attention.masks))
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
    source = view_of(node).source
    return source.target is operator.getitem and is_op(source.args[0], torch.ops.kivi.update)


def _match_write(write: CacheWrite, attentions: Iterable[Node]) -> AttentionSite | Refusal:
    readers = []
    for node in attentions:
        values = attended_values(node)
        if values is not None and view_of(values).source is write.value:
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
        if attention.key.source is not write.key:
            raise Unmatched(f"{described(attention.output)} reads the Values of this update but Keys of {described(attention.key.source)}")
        for role, view in (("Keys", attention.key), ("Values", attention.value)):
            if not all(axis in (None, place) for place, axis in enumerate(view.axes)):
                raise Unmatched(f"attention reads the {role} with dimensions in the order {list(view.axes)}; allowed: [0, 1, 2, 3]")
        check_reads(write, attention)
        check_mask(write, attention)
        return AttentionSite(write, attention, _owned(write, attention))
    except Unmatched as unmatched:
        return Refusal(place, str(unmatched))


# --------------------------------------------------------------------------------------------------- unexplained readers


def _unexplained_reader(*outputs: Node) -> str:
    """What reads the cache where no attention does: the first reader that is neither a copy nor a head expansion."""
    queue = [(output, output) for output in outputs]
    while queue:
        root, node = queue.pop(0)
        for user in node.users:
            if is_op(user, aten.repeat, aten.tile):
                return f"heads are tiled by {described(user)}, which orders them otherwise than grouped attention does"
            if _reads_on(user, root):
                queue.append((root, user))
            elif user.op == "output":
                return "the cache's Keys and Values leave the graph (is there a graph break before the attention?)"
            elif is_op(user, aten.slice, aten.narrow):
                return f"only a part of the cache is read, by {described(user)}"
            else:
                return f"the cache is read by {described(user)}, which is no attention that the pass knows"
    return "the cache is read by nothing"


def _reads_on(user: Node, output: Node) -> bool:
    """Whether ``user`` is a step on the way from all of ``output`` to an attention."""
    view, sizes = view_of(user), value(output).shape
    return view.source is output and all(known(dim.size == sizes[dim.axis]) for dim in view.dims if dim.axis is not None)


# ------------------------------------------------------------------------------------------------------------- attention


def attended_values(node: Node) -> Node | None:
    """The Values that ``node`` attends over, None if it is no attention: enough to tell whose attention it is."""
    if is_op(node, aten.scaled_dot_product_attention):
        return arguments(node)["value"]
    if is_op(node, aten.matmul) and _softmax_above(node.args[0]) is not None:
        values = node.args[1]
        return values if isinstance(values, Node) else None
    return None


def unread_attention(node: Node) -> str | None:
    """Why ``node``, which is attention in a spelling that is not read, is refused; None if it is none."""
    if is_op(node, aten.bmm, aten.baddbmm, aten.einsum):
        factors = [leaf for item in node.args for leaf in (item if isinstance(item, (tuple, list)) else (item,))]
        if any(_softmax_above(factor) is not None for factor in factors):
            return f"attention is spelled with {described(node)}; allowed: scaled_dot_product_attention, or matmul over [B, H, C, D]"
    if isinstance(node.target, torch._ops.HigherOrderOperator) and "flex_attention" in name(node):
        return f"attention is {described(node)}, which may change scores in any way"
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
    scale, mask, key, query = given["scale"], given["attn_mask"], view_of(given["key"]), value(given["query"])
    if scale is not None and not isinstance(scale, (int, float)):
        raise Unmatched("the scale is computed in the graph")
    if key.factor != 1.0:
        scale = key.factor * (query.shape[-1] ** -0.5 if scale is None else scale)
    masks: tuple[Mask, ...] = ()
    if mask is not None:
        masks = (_mask(mask, "seen" if value(mask).dtype == torch.bool else "added"),)
    elif given["is_causal"]:
        masks = (Mask("first"),)
    return Attention(
        spelling="sdpa",
        output=node,
        query=given["query"],
        key=key,
        value=view_of(given["value"]),
        masks=masks,
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
        if not is_op(weights, aten.dropout, aten.to, aten._to_copy, *COPIES):
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
    scores, masks, passed = _masked_scores(softmax["self"])
    inner.extend(passed)
    scores, softcap, passed = _capped_scores(scores)
    inner.extend(passed)
    scores, scale, passed = _scaled_scores(scores)
    inner.extend(passed)
    if not is_op(scores, aten.matmul):
        raise Unmatched(f"attention scores go through {described(scores)}")
    inner.append(scores)
    query, keys = scores.args
    assert isinstance(query, Node) and isinstance(keys, Node)
    key = view_of(keys)
    *lead, channels, columns = key.dims  # of transposed Keys
    return Attention(
        spelling="eager",
        output=node,
        query=query,
        key=replace(key, dims=(*lead, columns, channels)),
        value=view_of(node.args[1]),  # type: ignore[arg-type]
        masks=masks,
        scale=scale * key.factor,
        softcap=softcap,
        enable_gqa=False,
        inner=tuple(reversed(inner)),
    )


def _masked_scores(node: Node) -> tuple[Node, tuple[Mask, ...], list[Node]]:
    """The scores under all that is added to them and all that hides some of them, those masks, and the nodes passed."""
    masks: list[Mask] = []
    passed: list[Node] = []
    while True:
        found, copies = _read_mask(node), []
        while found is None and _same_scores(node):  # a cast, where it is not the mask's
            copies.append(node)
            node = node.args[0]  # type: ignore[assignment]
            found = _read_mask(node)
        if found is None:
            return (copies[0] if copies else node), tuple(masks), passed
        passed.extend((*copies, node))
        masks.append(found[1])
        node = found[0]


def _read_mask(node: Node) -> tuple[Node, Mask] | None:
    """The scores and the mask of one masked sum, ``masked_fill`` or ``where``."""
    if is_op(node, aten.add, aten.add_):
        left, right = node.args
        if arguments(node)["alpha"] != 1 or not (isinstance(left, Node) and isinstance(right, Node)):
            raise Unmatched(f"attention scores go through {described(node)}, which adds no mask")
        scores, mask = (right, left) if _is_scores(right) and not _is_scores(left) else (left, right)
        return scores, _mask(mask, "added")
    if is_op(node, aten.masked_fill, aten.masked_fill_):
        scores, mask, fill, kind = *node.args, "hidden"
    elif is_op(node, aten.where) and len(node.args) == 3:
        mask, scores, fill, kind = *node.args, "seen"
        if constant(scores) is not None:
            scores, fill, kind = fill, scores, "hidden"
    else:
        return None
    hides = constant(fill)
    if hides is None or hides > _HIDES:
        shown = described(fill) if isinstance(fill, Node) else fill
        raise Unmatched(f"{described(node)} sets scores to {shown if hides is None else hides}; allowed: {_HIDES:g} or less, which hides")
    assert isinstance(scores, Node) and isinstance(mask, Node)
    return scores, _mask(mask, kind)


def _mask(node: Node, kind: str) -> Mask:
    dtype = value(node).dtype
    if kind == "added" and not dtype.is_floating_point:
        raise Unmatched(f"a mask of {dtype} is added to the scores; allowed: a float one")
    if kind != "added" and dtype != torch.bool:
        raise Unmatched(f"the mask is {dtype}; allowed: bool or a float dtype")
    return Mask(kind, node)


_SCORES = (aten.mul, aten.mul_, aten.div, aten.div_, aten.tanh, aten.tanh_, aten.masked_fill, aten.masked_fill_, aten.add, aten.add_)


def _is_scores(node: Any) -> bool:
    while isinstance(node, Node):
        if is_op(node, *_SCORES) or _same_scores(node):
            node = node.args[0]
        elif is_op(node, aten.where) and len(node.args) == 3:
            node = node.args[1] if constant(node.args[1]) is None else node.args[2]
        else:
            break
    return is_op(node, aten.matmul)


def _same_scores(node: Node) -> bool:
    """Whether ``node`` is its input, in another float dtype perhaps."""
    if is_op(node, aten.to, aten._to_copy):
        return value(node).dtype.is_floating_point and value(node).device == value(node.args[0]).device  # type: ignore[arg-type]
    return handed_on(node) is not None


def _capped_scores(node: Node) -> tuple[Node, float | None, list[Node]]:
    """``x`` and c of ``tanh(x / c) * c``, and the nodes passed; the node itself and None if it is no softcap."""
    factor = constant_factor(node)
    if factor is None or not is_op(node.args[0], aten.tanh, aten.tanh_):
        return node, None, []
    tanh = node.args[0]
    assert isinstance(tanh, Node)
    divided = tanh.args[0]
    assert isinstance(divided, Node)
    inverse = constant_factor(divided)
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
        factor = constant_factor(node)
        if factor is not None:
            scale *= factor
        elif not _same_scores(node):
            return node, scale, passed
        passed.append(node)
        node = node.args[0]  # type: ignore[assignment]


# ---------------------------------------------------------------------------------------------- does it fit the operator


def check_reads(write: CacheWrite, attention: Attention) -> None:
    """Attention reads the cache as [B, H, C, D], or some first columns of it, for a query of each new token."""
    new_key, new_value = write.new_key, write.new_value
    for role, view, new in (("Keys", attention.key, new_key), ("Values", attention.value, new_value)):
        shown = described(view.passed[0] if view.passed else view.source)
        if len(view.dims) != 4:
            raise Unmatched(f"attention reads the {role} in {len(view.dims)} dimensions, by {shown}; allowed: 4, [B, H, C, D]")
        rows, heads, columns, channels = view.dims
        if not all(known(dim.repeats == 1) for dim in (rows, columns, channels)):
            raise Unmatched(f"attention reads the {role} with rows, columns or channels repeated, by {shown}")
        if not (known(rows.size == new.shape[0]) and known(heads.size == new.shape[1]) and known(channels.size == new.shape[3])):
            raise Unmatched(
                f"attention reads the {role} as {[rows.size, heads.size, columns.size, channels.size]}, by {shown}; allowed: the rows, "
                f"heads and channels of the new tokens, {list(new.shape)}"
            )
        if columns.start != 0:
            raise Unmatched(f"attention reads the {role} from column {_shown(columns.start)} on, by {shown}; allowed: from the first")
    if attention.value.factor != 1.0:
        raise Unmatched(f"the Values are multiplied by {attention.value.factor} before attention")
    if not known(attention.key.dims[2].size == attention.value.dims[2].size):
        raise Unmatched(f"attention reads {attention.key.dims[2].size} columns of Keys and {attention.value.dims[2].size} of Values")
    query, output = value(attention.query), value(attention.output)
    if query.dim() != 4 or not same_sizes((query.shape[0], query.shape[2]), (new_key.shape[0], new_key.shape[2])):
        raise Unmatched(
            f"the query has shape {list(query.shape)}; allowed: [{new_key.shape[0]}, heads, {new_key.shape[2]}, D], a row and a query "
            "for each new token"
        )
    if query.dtype != new_key.dtype or output.dtype != new_key.dtype:
        raise Unmatched(
            f"the query is {query.dtype}, attention returns {output.dtype} and the cache holds {new_key.dtype}; allowed: one dtype"
        )
    repeats = attention.key.dims[1].repeats
    if not known(repeats == attention.value.dims[1].repeats):
        raise Unmatched(f"Key heads are repeated {repeats} times and Value heads {attention.value.dims[1].repeats}")
    heads = new_key.shape[1] * repeats
    # One head is broadcast to all by either spelling.
    fits = known(query.shape[1] == heads) or known(heads == 1) or (attention.enable_gqa and known(query.shape[1] % heads == 0))
    if not fits:
        raise Unmatched(f"{query.shape[1]} query heads meet {heads} Key heads")


def _shown(item: Any) -> str:
    return described(item) if isinstance(item, Node) else str(item)


def check_mask(write: CacheWrite, attention: Attention) -> None:
    """Masks that say which columns are visible: without one the float attention sees unwritten columns (zeros) too, unless it reads just
    the columns that are written."""
    columns, query = attention.key.dims[2].size, value(attention.query)
    start = write.start
    exact = start is not None and known(columns == start + query.shape[2])
    wide = exact
    for mask in attention.masks:
        if mask.node is None:
            wide = wide or _check_first_columns(columns, query.shape[2], start)
            continue
        shape = list(value(mask.node).shape)
        if len(shape) > 4:
            raise Unmatched(f"the mask has shape {shape}; allowed: at most 4 dimensions")
        padded = [1] * (4 - len(shape)) + shape
        for dim, axis in ((0, "rows"), (1, "heads"), (2, "new tokens")):
            if not (known(padded[dim] == 1) or known(padded[dim] == query.shape[dim])):
                raise Unmatched(f"the mask has {padded[dim]} {axis}; allowed: 1 or {query.shape[dim]}")
        if known(padded[3] == columns):
            wide = True
        elif not known(padded[3] == 1):
            raise Unmatched(f"the mask is {padded[3]} columns wide; allowed: 1 or {columns}, the columns that are read")
    if not attention.masks and not exact:
        which = f"all {columns}" if known(columns == write.arguments["capacity"]) else f"the first {columns}"
        raise Unmatched(f"attention over {which} columns has no mask, so it sees unwritten ones")
    if not wide:
        raise Unmatched(f"the mask is 1 columns wide, which hides no unwritten column; allowed: {columns}, the columns that are read")


def _check_first_columns(columns: Any, new_tokens: Any, start: Any) -> bool:
    """Whether "new token i sees the first i + 1 columns" can be said to the operator: by ``is_causal`` at position 0, else by a mask."""
    if not (known(start == 0) if start is not None else False) and not isinstance(columns, int) and not known(columns == new_tokens):
        raise Unmatched(
            f"is_causal=True counts from the first of {columns} columns, not from the new tokens' position; a mask would say which are seen"
        )
    return True


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
