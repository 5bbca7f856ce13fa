"""An exported program as the graph that the pass reads, and that graph as a module that can be exported again.

In the pass's graph every tensor is an input: first the program's parameters, buffers and constants, then what the caller hands in. Must
not know of KIVI.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map, tree_unflatten

from kivi_ops.export.recompose import recompose
from kivi_ops.passes.nodes import is_op
from kivi_ops.passes.normalise import normalise


@dataclass(frozen=True)
class ProgramGraph:
    """``module``: the pass's graph. ``tensors``: what its first inputs stand for, by their names in the program, in their order.
    ``kept_out``: those names that are not in the program's state dict. ``inputs``: the caller's, after those."""

    module: GraphModule
    tensors: dict[str, Tensor]
    kept_out: frozenset[str]
    inputs: tuple[Node, ...]
    codegen: Any


def open_program(program: ExportedProgram) -> ProgramGraph:
    """The graph of ``program`` for the pass: every tensor an input, mutations in place, a fake tensor on each node.

    Raises:
        Exception: what tracing raises, for a graph that cannot be traced again.
    """
    whole: Any = program.module(check_guards=False)
    graph, copies, tensors = Graph(), {}, {}
    for node in whole.graph.find_nodes(op="get_attr"):
        attribute = _attribute(whole, node.target)
        if node.users and isinstance(attribute, Tensor) and node.target not in tensors:
            tensors[node.target] = attribute
            copies[node.target] = graph.placeholder(node.name)
    inputs = whole.graph.find_nodes(op="placeholder")
    for node in whole.graph.nodes:
        if node.op == "get_attr" and node.target in copies:
            copies[node] = copies[node.target]
        elif not is_op(node, torch.ops.aten._assert_tensor_metadata):  # says what tracing again finds out
            copies[node] = graph.node_copy(node, copies.__getitem__)
    recompose(graph)
    with torch.no_grad():
        traced = normalise(GraphModule(whole, graph), [*tensors.values(), *(node.meta["val"] for node in inputs)])
    specs = program.graph_signature.input_specs
    stored = {spec.target for spec in specs if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.persistent is not False}
    placeholders = traced.graph.find_nodes(op="placeholder")
    return ProgramGraph(
        module=traced,
        tensors=tensors,
        kept_out=frozenset(tensors) - stored,
        inputs=tuple(placeholders[len(tensors) :]),
        codegen=whole.graph._codegen,
    )


def bound(opened: ProgramGraph, added: Mapping[Node, tuple[str, Tensor]], renamed: Mapping[str, str]) -> GraphModule:
    """A module that is called as the program was, with its tensors, and those ``added`` for further inputs, as attributes again.

    Tensors that nothing uses are left out; those ``renamed`` are buffers of the state dict under their new names.
    """
    graph, copies, attributes = Graph(), {}, {}
    held = dict(zip(opened.module.graph.find_nodes(op="placeholder"), opened.tensors.items(), strict=False)) | dict(added)
    for node in opened.module.graph.nodes:
        if node.op == "placeholder" and node in held:
            if node.users:
                name, tensor = held[node]
                name = renamed.get(name, name)
                attributes[name] = tensor
                copies[node] = graph.create_node("get_attr", name)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                attributes[node.target] = _attribute(opened.module, node.target)
    graph.set_codegen(copy.copy(opened.codegen))
    module = GraphModule(attributes, graph)
    for name in opened.kept_out & attributes.keys():
        path, _, last = name.rpartition(".")
        module.get_submodule(path)._non_persistent_buffers_set.add(last)
    return module


def export_again(module: GraphModule, program: ExportedProgram, inputs: tuple[Node, ...]) -> ExportedProgram:
    """``module`` exported for the calls that ``program`` takes: the same example inputs, dynamic sizes and ranges.

    Args:
        inputs: the nodes that stand for the caller's inputs, flat.
    """
    if program.example_inputs is None:
        leaves = [_example(node.meta["val"]) for node in inputs]
        args, kwargs = tree_unflatten(leaves, program.call_spec.in_spec)
    else:
        # A tensor that is handed in twice would get one shape twice.
        args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, program.example_inputs)
    sizes = _Sizes(program)
    specs = tree_unflatten([sizes.of(node.meta["val"]) for node in inputs], program.call_spec.in_spec)
    dynamic = dict(zip(inspect.signature(module.forward).parameters, specs[0], strict=False)) | specs[1]
    with torch.no_grad():
        return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic, strict=False)


class _Sizes:
    """The symbols of a program as dimensions to export with."""

    def __init__(self, program: ExportedProgram) -> None:
        self._ranges = {str(symbol): bounds for symbol, bounds in program.range_constraints.items()}
        self._dims: dict[str, Any] = {}

    def of(self, fake: Any) -> Any:
        """What ``dynamic_shapes`` says of an input."""
        if isinstance(fake, Tensor):
            return {dim: self._dim(size) for dim, size in enumerate(fake.shape) if isinstance(size, torch.SymInt)} or None
        return Dim.DYNAMIC if isinstance(fake, torch.SymInt) else None

    def _dim(self, size: Any) -> Any:
        expression = size.node.expr
        if not expression.is_symbol:
            return Dim.AUTO  # 2 * s: follows from the sizes that it is made of
        name = str(expression)
        if name not in self._dims:
            limits = {}
            if name in self._ranges:
                for limit, bound in (("min", self._ranges[name].lower), ("max", self._ranges[name].upper)):
                    if bound.is_Integer:
                        limits[limit] = int(bound)
            self._dims[name] = Dim(name, **limits)
        return self._dims[name]


def _example(fake: Any) -> Any:
    if not isinstance(fake, Tensor):
        return fake.node.hint if isinstance(fake, torch.SymInt) else fake
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in fake.shape]
    return torch.zeros(sizes, dtype=fake.dtype, device=fake.device)


def _attribute(module: Any, path: Any) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module
