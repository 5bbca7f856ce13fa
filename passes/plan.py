"""Decides whether a matched site may be rewritten where it stands, and what the rewrite needs to know. Edits nothing.

Attention and ``append`` both go where the attention's last node is. That is later than the update and than the nodes that first read
the Query, so nothing in between may read the state or change what they read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Graph, Node

from kivi_ops.passes.float_caches import FloatCache
from kivi_ops.passes.match import AttentionSite, Refusal
from kivi_ops.passes.nodes import described, known, storages, value, written


@dataclass(frozen=True)
class Plan:
    """A site to be rewritten. ``order``: the permutation of dimensions under which the attention's result is dense, for the nodes after it
    were traced on its strides."""

    site: AttentionSite
    order: tuple[int, ...]


def plan(graph: Graph, site: AttentionSite) -> Plan | Refusal:
    """How to rewrite ``site``, or why not."""
    write, attention = site.write, site.attention
    state = {storage for node in write.state for storage in storages(node)}
    between = _between(graph, write.node, attention.output, site)
    for node in between:
        if any(storages(read) & state for read in node.all_input_nodes):
            return Refusal(attention.output, f"the state has a reader between its update and its attention, {described(node)}")
    moved = [write.arguments["key"], write.arguments["value"]]
    if not isinstance(write, FloatCache):  # whose position is read where it writes
        moved.append(write.arguments["position"])
    late = [attention.query, *(mask.node for mask in attention.masks if mask.node is not None)]
    for first, inputs in ((write.node, moved), (attention.inner[0], late)):
        changed = _changed(_between(graph, first, attention.output, site), inputs)
        if changed is not None:
            return Refusal(attention.output, f"an input of the attention is changed in place before its end, by {described(changed)}")
    order = dense_order(value(attention.output))
    if order is None:
        return Refusal(
            attention.output, f"the attention's result has strides {value(attention.output).stride()}, which are dense in no order"
        )
    return Plan(site, order)


def _between(graph: Graph, first: Node, last: Node, site: AttentionSite) -> list[Node]:
    """The nodes that run after ``first`` and before ``last`` and are not the site's own."""
    nodes = list(graph.nodes)
    inside = nodes[nodes.index(first) + 1 : nodes.index(last)]
    return [node for node in inside if node not in site.owned]


def _changed(nodes: Iterable[Node], inputs: Iterable[Node]) -> Node | None:
    """The first of ``nodes`` that changes one of ``inputs`` in place."""
    read = {storage for node in inputs for storage in storages(node)}
    for node in nodes:
        if any(storages(target) & read for target in written(node)):
            return node
    return None


def dense_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The permutation under which ``tensor`` is contiguous (the identity if it is so already), None if there is no such order."""
    for order in itertools.permutations(range(tensor.dim())):
        step = 1
        for dim in reversed(order):
            size, stride = tensor.shape[dim], tensor.stride(dim)
            if not (known(size == 1) or known(stride == step)):
                break
            step = step * size
        else:
            return order
    return None
