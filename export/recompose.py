"""What ``run_decompositions`` took apart, put together again as far as the pass reads it: cache writes and attention.

A decomposed program is functional: a cache is computed anew and copied back at the end, and ``scaled_dot_product_attention`` is a dozen
nodes. Works on the graph before it is traced again, on the fake tensors that it came with. Must not know of KIVI.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, Node

from kivi_ops.passes.nodes import arguments, is_op, same_sizes, value
from kivi_ops.passes.views import unwrapped

aten = torch.ops.aten

_IN_PLACE = {aten.index_put: aten.index_put_, aten.index_copy: aten.index_copy_, aten.scatter: aten.scatter_}
# What the steps may leave without a reader. Never "all that is unused": that would be cache writes too.
_PURE = (
    *(aten.bmm, aten.matmul, aten.mul, aten.where, aten.logical_not, aten.any, aten.eq, aten.full_like, aten.zeros_like),
    *(aten.view, aten._unsafe_view, aten.reshape, aten.expand, aten.clone, aten.slice, aten.copy),
)


def recompose(graph: Graph) -> None:
    """Edit ``graph`` in place. What is not recognised stays as it is; nodes whose results are no longer used go."""
    for step in (_write_in_place, _join_rows_and_heads, _drop_guard_of_softmax, _move_factor_of_keys):
        for node in list(graph.nodes):
            step(graph, node)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op == "call_function" and is_op(node, *_PURE):
            graph.erase_node(node)
    graph.lint()


def _write_in_place(graph: Graph, copy_back: Node) -> None:
    """``new = index_put(cache, ...)`` .. ``copy_(cache, new)`` becomes ``index_put_(cache, ...)``; slice_scatter, a copy into a slice."""
    if not is_op(copy_back, aten.copy_):
        return
    cache, new = copy_back.args[:2]
    if not (isinstance(new, Node) and new.args and new.args[0] is cache and isinstance(cache, Node)):
        return
    places = {node: place for place, node in enumerate(graph.nodes)}
    before = places[new]
    if any(places[user] > before and user is not copy_back for user in cache.users):
        return  # someone still wants what the cache was
    with graph.inserting_before(new):
        if is_op(new, aten.slice_scatter):
            given = arguments(new)
            part = graph.call_function(aten.slice.Tensor, (cache, *(given[name] for name in ("dim", "start", "end", "step"))))
            part.meta = dict(new.meta, val=value(given["src"]))
            source = given["src"]
            if is_op(source, aten.copy):
                source = source.args[1]
            _like(graph.call_function(aten.copy_.default, (part, source)), part)
            written = cache
        elif (packet := getattr(new.target, "overloadpacket", None)) in _IN_PLACE:
            overload = getattr(_IN_PLACE[packet], new.target._overloadname)  # type: ignore[union-attr]
            written = _like(graph.call_function(overload, new.args, new.kwargs), new)
        else:
            return
    graph.erase_node(copy_back)
    new.replace_all_uses_with(written)
    graph.erase_node(new)


def _join_rows_and_heads(graph: Graph, bmm: Node) -> None:
    """``view(bmm(view(a), view(b)))`` over [B * H, .., ..] becomes ``matmul(a, b)`` over [B, H, .., ..]."""
    if not is_op(bmm, aten.bmm):
        return
    left, right = (_four_dimensional(operand) for operand in bmm.args)
    if left is None or right is None or not same_sizes(value(left).shape[:2], value(right).shape[:2]):
        return
    shape = (*value(left).shape[:3], value(right).shape[3])
    if not all(is_op(user, aten.view, aten._unsafe_view, aten.reshape) and same_sizes(value(user).shape, shape) for user in bmm.users):
        return
    for user in list(bmm.users):
        with graph.inserting_before(user):
            product = _like(graph.call_function(aten.matmul.default, (left, right)), user)
        user.replace_all_uses_with(product)
        graph.erase_node(user)


def _four_dimensional(operand: Any) -> Node | None:
    """The [B, H, m, n] that an operand [B * H, m, n] of a bmm is a view of, through copies."""
    operand, _ = unwrapped(operand)
    if not is_op(operand, aten.view, aten._unsafe_view, aten.reshape):
        return None
    source = operand.args[0]
    if not isinstance(source, Node) or value(source).dim() != 4 or not same_sizes(value(source).shape[2:], value(operand).shape[1:]):
        return None
    return unwrapped(source)[0]


def _drop_guard_of_softmax(graph: Graph, where: Node) -> None:
    """A softmax that gives 0 where every score is -inf: the operator does that anyway."""
    if not is_op(where, aten.where):
        return
    condition, zeros, softmax = where.args
    node: Any = condition
    if not (isinstance(softmax, Node) and is_op(softmax, aten._softmax, aten.softmax) and is_op(zeros, aten.full_like, aten.zeros_like)):
        return
    if is_op(zeros, aten.full_like) and zeros.args[1] != 0:  # type: ignore[union-attr]
        return
    for packet in (aten.logical_not, aten.any, aten.logical_not):
        if not is_op(node, packet):
            return
        node = node.args[0]
    if not is_op(node, aten.eq) or node.args != (softmax.args[0], -math.inf):
        return
    where.replace_all_uses_with(softmax)


def _move_factor_of_keys(graph: Graph, matmul: Node) -> None:
    """``matmul(query, keys * c)`` becomes ``matmul(query, keys) * c``."""
    if not is_op(matmul, aten.matmul):
        return
    query, keys = matmul.args
    scaled, _ = unwrapped(keys)  # type: ignore[arg-type]
    if not is_op(scaled, aten.mul) or not isinstance(scaled.args[1], (int, float)):
        return
    with graph.inserting_before(matmul):
        product = _like(graph.call_function(aten.matmul.default, (query, scaled.args[0])), matmul)
        result = _like(graph.call_function(aten.mul.Scalar, (product, scaled.args[1])), matmul)
    matmul.replace_all_uses_with(result)


def _like(node: Node, model: Node) -> Node:
    node.meta = dict(model.meta)
    return node
