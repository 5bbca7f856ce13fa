"""The pass inside somebody else's Inductor: ``torch.compile(model, options=inductor_options())``, or a backend that calls ``compile_fx``.

It rewrites attention over a :class:`KiviCache`. A model's own float cache needs a state, a further input of the graph that a pass cannot
add; such sites are reported, and left float. Must not know how attention is spelled.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from kivi_ops.passes.backend import check_gradients, package_tag, updates_of
from kivi_ops.passes.normalise import normalise
from kivi_ops.passes.pipeline import rewrite
from kivi_ops.passes.report import tell


class InductorPass(CustomGraphPass):
    """For Inductor's ``pre_grad_custom_pass``: a graph as Dynamo captured it, in place. :func:`inductor_options` says what goes with it.

    ``strict``: True makes a refused site an error (RuntimeError). From a warm compile cache newer torch takes the result, without the pass,
    and nothing is reported.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict

    def __call__(self, graph: Graph) -> None:
        module = graph.owning_module
        if module is None or not updates_of(module):
            return
        examples = [node.meta.get("example_value", node.meta.get("val")) for node in graph.find_nodes(op="placeholder")]
        check_gradients(module, examples)
        normalised = normalise(module, examples)
        report = rewrite(normalised, float_caches=False)
        tell(report, self.strict)
        if report.rewritten:
            _replace(module, normalised)

    def uuid(self) -> tuple[str, ...]:
        """For Inductor's cache: everything of ours that what is compiled depends on."""
        return (type(self).__qualname__, package_tag(), f"strict={self.strict}")


class _InTheCacheKey(CustomGraphPass):
    """Does nothing: torch 2.11 and 2.12 leave pre-grad passes out of the key of their compile cache, but no pass that runs later."""

    def __init__(self, uuid: tuple[str, ...]) -> None:
        self._uuid = uuid

    def __call__(self, graph: Graph) -> None:
        pass

    def uuid(self) -> tuple[str, ...]:
        return self._uuid


def inductor_options(strict: bool = False) -> dict[str, Any]:
    """Inductor's options for graphs over a :class:`KiviCache`: ``options=`` of ``torch.compile``, ``config_patches=`` of ``compile_fx``.

    With the pass comes ``reorder_for_locality=False``: reordering would move attention behind the ``append`` that overwrites what it
    reads, at the price of a copy of the whole state.
    """
    rewriting = InductorPass(strict)
    return {
        "pre_grad_custom_pass": rewriting,
        "post_grad_custom_post_pass": _InTheCacheKey(rewriting.uuid()),
        "reorder_for_locality": False,
    }


def _replace(module: GraphModule, by: GraphModule) -> None:
    """Put the nodes of ``by`` in place of those of ``module``, whose graph is somebody else's object."""
    graph = module.graph
    inputs = [getattr(node, "_dynamo_source", None) for node in graph.find_nodes(op="placeholder")]
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)
    for name, tensor in (*by.named_parameters(), *by.named_buffers()):
        if not hasattr(module, name):
            module.register_buffer(name, tensor)
    output = graph.graph_copy(by.graph, {})
    graph.output(output)
    for node, source in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        node._dynamo_source = source
    if hasattr(by, "_param_name_to_source"):
        module._param_name_to_source = by._param_name_to_source
    graph.lint()
    module.recompile()
