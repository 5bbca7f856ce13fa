"""Edits the graph: update + attention becomes attention + append, or append + attention. Decides nothing.

Sites over a model's own float cache are given a state first (:func:`adopt`); their float writes stay.

Erases only nodes that a match owns, one by one: dead-code elimination would take cache writes along.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from kivi_ops.config import KiviConfig
from kivi_ops.passes.float_caches import FloatCache, FloatWrite, start_nodes
from kivi_ops.passes.match import STATE_NAMES, AttentionSite, Mask, cache_writes
from kivi_ops.passes.nodes import described, is_op, known, storages, value, written
from kivi_ops.passes.plan import Plan
from kivi_ops.passes.states import Binding, Start
from kivi_ops.passes.views import unwrapped
from kivi_ops.state import KiviState

aten = torch.ops.aten
kivi = torch.ops.kivi

_READ_FORMAT = ("capacity", "key_bits", "value_bits", "group_size", "metadata_dtype")
_APPEND_FORMAT = (*_READ_FORMAT, "residual_length", "rollback_margin")
_KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")


def carry_out(module: GraphModule, plans: Iterable[Plan]) -> None:
    """Carry ``plans`` out, in place. Every new node has ``meta["val"]``."""
    for plan in plans:
        _rewrite_site(module.graph, plan)
    module.graph.lint()
    module.recompile()


def adopt(module: GraphModule, plans: Sequence[Plan], config: KiviConfig, free: bool = False) -> tuple[list[Plan], list[Binding]]:
    """Give each site over a float cache what it lacks: the state's tensors, as further inputs of the graph, and positions checked by them.

    Returns:
        The plans, now complete, and for each such site, in the order of the new inputs, where its state is found.
    """
    graph = module.graph
    inputs = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
    complete = list(plans)
    writes = {index: plan.site.write for index, plan in enumerate(plans) if isinstance(plan.site.write, FloatCache)}
    states = {index: _state_inputs(graph, write, config, f"kivi_{place}") for place, (index, write) in enumerate(writes.items())}
    places = {node: place for place, node in enumerate(graph.nodes)}
    bindings: dict[int, Binding] = {}
    for sites in _by_position(graph, writes):
        first = min((writes[index] for index in sites), key=lambda write: places[write.node])
        position = _tensor_position(graph, first)
        start = _start(module, position, inputs)
        checked = _checked_position(graph, first, position, [states[index]["length"] for index in sites])
        for index in sites:
            write = writes[index]
            kwargs = config.op_kwargs(write.arguments["capacity"], write.new_key.dtype)
            new = {"key": _tokens(plans[index], write.key_write), "value": _tokens(plans[index], write.value_write)}
            given = {**write.arguments, **states[index], **kwargs, **new, **checked, "seal": config.seal}
            complete[index] = replace(plans[index], site=replace(plans[index].site, write=replace(write, arguments=given)))
            caches = (inputs[write.key_write.cache], inputs[write.value_write.cache])
            bindings[index] = Binding(*caches, start, config, write.regions, write.consecutive, free)
    return complete, [bindings[index] for index in writes]


def _by_position(graph: Graph, writes: Mapping[int, FloatCache]) -> Iterable[list[int]]:
    """The writes that go to one position: all that are told the same, with nothing in between that changes it in place."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    changes = [(places[node], storages(target)) for node in graph.nodes for target in written(node)]
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, write in writes.items():
        told, place = write.arguments["position"], places[write.node]
        memory = storages(told) if isinstance(told, Node) else set()
        groups[told, write.arguments["capacity"], sum(1 for at, changed in changes if at < place and changed & memory)].append(index)
    return groups.values()


def _tensor_position(graph: Graph, write: FloatCache) -> Node:
    """The position of a write as a tensor: an integer start becomes one."""
    position = write.arguments["position"]
    if isinstance(position, Node) and isinstance(position.meta["val"], torch.Tensor):
        return position
    with graph.inserting_before(write.node):
        return _call(graph, write.node, aten.scalar_tensor.default, position, dtype=torch.int64, device=write.new_key.device)


def _tokens(plan: Plan, write: FloatWrite) -> Node:
    """The new tokens of a write as [B, H, S, D], where the attention is."""
    graph, like, node = plan.site.node.graph, plan.site.node, write.new
    with graph.inserting_before(like):
        dims = [dim for dim in write.order if dim is not None]
        if dims != sorted(dims):
            node = _call(graph, like, aten.permute.default, node, dims)
        for place, dim in enumerate(write.order):
            if dim is None:
                node = _call(graph, like, aten.unsqueeze.default, node, place)
    return node


def _checked_position(graph: Graph, first: FloatCache, position: Node, lengths: list[Node]) -> dict[str, Node]:
    """What attention and ``append`` are told where all states hold ``position`` tokens; else something that writes none and gives NaN.

    Without this a call that starts beyond what the states hold would attend over columns that they never saw. There is no host to tell.
    """
    node, capacity = first.node, first.arguments["capacity"]

    def call(target: Any, *args: Any) -> Node:
        return _call(graph, node, target, *args)

    with graph.inserting_before(node):
        start = call(aten.to.dtype, call(aten.select.int, call(aten.reshape.default, position, [-1]), 0, 0), torch.int64)
        held = call(aten.amin.default, call(aten.stack.default, lengths))
        beyond = call(aten.gt.Tensor, start, held)
        append_position = call(aten.where.self, beyond, held, start)
        count = call(aten.where.Scalar, beyond, 0, capacity)
        # From what `append` is told, which is computed before it writes a length, not from the lengths: Inductor may come to this later.
        position = call(aten.where.ScalarSelf, call(aten.eq.Scalar, count, 0), capacity, append_position)
    return {"position": position, "append_position": append_position, "count": count}


def _state_inputs(graph: Graph, write: FloatCache, config: KiviConfig, prefix: str) -> dict[str, Node]:
    """New inputs of the graph, after all others, for a state that fits the two caches."""
    key: Any = write.new_key
    (rows, heads, _, key_dim), value_dim, capacity = key.shape, write.new_value.shape[-1], write.arguments["capacity"]
    with key.fake_mode:
        state = KiviState.allocate(config, rows, heads, capacity, key_dim, value_dim, key.dtype, key.device)
    nodes = {}
    for name, tensor in state.tensors().items():
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            node = graph.placeholder(f"{prefix}_{name}")
        # CUDA graphs go by this mark: the address stays, and another cache's state may stand in another place.
        node.meta = {"val": tensor, "example_value": tensor, "tensor_dict": {"_dynamo_static_input_type": "unguarded"}}
        node._dynamo_source = None  # Dynamo knows of no such input, and AOTAutograd wants to be told so
        nodes[name] = node
    return nodes


def release(module: GraphModule, places: set[int]) -> None:
    """Take float caches out of a graph whose attentions no longer read them: what writes them, and the inputs ``places`` themselves.

    Raises:
        RuntimeError: something else reads one.
    """
    graph = module.graph
    inputs = graph.find_nodes(op="placeholder")
    caches = [inputs[place] for place in sorted(places)]
    memory = {storage for cache in caches for storage in storages(cache)}

    def goes(node: Node) -> bool:
        """Whether all that ``node`` does is to write the caches, or to read them for nobody."""
        touches = any(storages(source) & memory for source in node.all_input_nodes)
        return touches and not node.users and all(storages(target) <= memory for target in written(node))

    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and goes(node):
            graph.erase_node(node)
    for cache in caches:
        if cache.users:
            reader = described(next(iter(cache.users)))
            raise RuntimeError(f"option 'free_float_cache' is True, and a float cache cannot go: it has another reader, {reader}")
        graph.erase_node(cache)
    graph.lint()
    module.recompile()


def _start(module: GraphModule, position: Node, inputs: Mapping[Node, int]) -> Start:
    """``position`` as a function of the graph's own inputs."""
    graph, cone = Graph(), start_nodes(position)
    copies: dict[Node, Node] = {}
    wanted = [node for node in module.graph.nodes if node in cone]
    places = [inputs[node] for node in wanted if node in inputs]
    for node in wanted:
        copies[node] = graph.placeholder(node.name) if node in inputs else graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {}
    graph.output(copies[position])
    return Start(GraphModule(module, graph), tuple(places))


def settle_positions(module: GraphModule) -> None:
    """Give every ``kivi::update`` a position that cannot turn into the live ``length``, which it advances.

    A clone is not enough: Inductor drops it and hands the operator one tensor to read as position and to write as length. A copy in
    another dtype stays.
    """
    for write in cache_writes(module.graph):
        position, length = write.arguments["position"], write.arguments["length"]
        if storages(unwrapped(position)[0]) & storages(length):
            with module.graph.inserting_before(write.node):
                settled = _call(module.graph, write.node, aten.to.dtype, position, torch.int32)
            index = list(write.arguments).index("position")
            if index < len(write.node.args):
                write.node.update_arg(index, settled)
            else:
                write.node.update_kwarg("position", settled)
    module.graph.lint()
    module.recompile()


def settle_lengths(module: GraphModule) -> None:
    """Let what depends on a ``length`` before it is written read a copy (:func:`kivi_ops.ops.read_length` says why).

    Positions are left alone: the writes themselves are all that uses them.
    """
    graph = module.graph
    places = {node: place for place, node in enumerate(graph.nodes)}
    writes = {write.node for write in cache_writes(graph)}

    def only_feeds_writes(node: Node) -> bool:
        return all(user in writes or (is_op(user, aten.clone, aten.to, aten._to_copy) and only_feeds_writes(user)) for user in node.users)

    first_write: dict[Node, int] = {}
    for write in cache_writes(graph):
        length = write.arguments["length"]
        first_write[length] = min(places[write.node], first_write.get(length, places[write.node]))
    for length, place in first_write.items():
        readers = [user for user in length.users if user not in writes and not is_op(user, kivi.read_length)]
        readers = [user for user in readers if places[user] < place and not only_feeds_writes(user)]
        if readers:
            first = min(readers, key=lambda user: places[user])
            with graph.inserting_before(first):
                copy = _call(graph, first, kivi.read_length.default, length)
            for user in readers:
                user.replace_input_with(length, copy)
    graph.lint()
    module.recompile()


def _rewrite_site(graph: Graph, plan: Plan) -> None:
    site, given = plan.site, plan.site.write.arguments
    attention, output = site.attention, site.attention.output
    position = given["position"]
    state = {name: given[name] for name in STATE_NAMES}
    read_state = [node for name, node in state.items() if name != "length"]

    def append() -> None:
        kwargs = {name: given[name] for name in _APPEND_FORMAT}
        at = (given.get("append_position", position), given.get("count"))
        _call(graph, output, kivi.append.default, given["key"], given["value"], *state.values(), *at, **kwargs)

    def attend() -> Node:
        return _call(
            graph,
            output,
            kivi.attention.default,
            *(attention.query, given["key"], given["value"], *read_state, position),
            *(mask, is_causal, attention.scale, attention.softcap),
            **{name: given[name] for name in (*_READ_FORMAT, "seal")},
        )

    with graph.inserting_before(output):
        mask, is_causal = _one_mask(graph, site)
        if given["seal"] == "before_attention":
            append()
            result = attend()
        else:
            result = attend()
            append()
        result = _in_order(graph, result, plan.order)
    output.replace_all_uses_with(result)
    _erase(graph, site)


def _one_mask(graph: Graph, site: AttentionSite) -> tuple[Node | None, bool]:
    """All masks of a site as the operator's ``attn_mask`` (four dimensions), and its ``is_causal``."""
    output, query, terms = site.attention.output, site.attention.query, site.attention.masks

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        return _call(graph, output, target, *args, **kwargs)

    def seen(term: Mask) -> Node:
        if term.node is None:
            columns, tokens = site.attention.key.dims[2].size, value(query).shape[2]
            tokens = tokens if isinstance(tokens, int) else call(aten.sym_size.int, query, 2)
            shape = [tokens, columns if isinstance(columns, int) else tokens]
            device = value(query).device
            return call(aten.tril.default, call(aten.ones.default, shape, dtype=torch.bool, device=device))
        return call(aten.logical_not.default, term.node) if term.kind == "hidden" else term.node

    if len(terms) == 1 and terms[0].node is None and site.write.start is not None and known(site.write.start == 0):
        return None, True
    visible = _joined([seen(term) for term in terms if term.kind != "added"], aten.logical_and.default, call)
    mask = _joined([term.node for term in terms if term.kind == "added"], aten.add.Tensor, call)
    if mask is None:
        mask = visible
    elif visible is not None:
        hides = call(aten.scalar_tensor.default, -torch.inf, dtype=value(mask).dtype, device=value(mask).device)
        mask = call(aten.where.self, visible, mask, hides)
    while mask is not None and value(mask).dim() < 4:
        mask = call(aten.unsqueeze.default, mask, 0)
    return mask, False


def _joined(nodes: Sequence[Any], target: Any, call: Callable[..., Node]) -> Any:
    return functools.reduce(lambda left, right: call(target, left, right), nodes) if nodes else None


def _in_order(graph: Graph, node: Node, order: tuple[int, ...]) -> Node:
    """The same tensor, laid out densely in ``order``."""
    if order == tuple(sorted(order)):
        return node
    inverse = [order.index(dim) for dim in range(len(order))]
    moved = _call(graph, node, aten.permute.default, node, list(order))
    dense = _call(graph, node, aten.contiguous.default, moved)
    return _call(graph, node, aten.permute.default, dense, inverse)


def _call(graph: Graph, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node with its fake value, which says that it comes from where ``like`` does."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {key: like.meta[key] for key in _KEPT_META if key in like.meta}
    with _fake_mode(like):
        node.meta["val"] = target(*torch.fx.node.map_arg(args, value), **torch.fx.node.map_arg(kwargs, value))
    return node


def _fake_mode(node: Node) -> Any:
    """The mode that what ``node`` returns was traced in."""
    fakes = (leaf for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, FakeTensor))
    return next((fake.fake_mode for fake in fakes), contextlib.nullcontext())


def _erase(graph: Graph, site: AttentionSite) -> None:
    for node in reversed(list(graph.nodes)):
        if node in site.owned:
            graph.erase_node(node)
