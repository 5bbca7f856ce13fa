"""The pass as one function over a graph, and what a backend does around it. Must not know of any compiler or of ``torch.compile``.

A backend of your own (``examples/own_backend.py`` is one)::

    def backend(module, example_inputs):
        graph = normalise(module, example_inputs)
        report = rewrite(graph, KiviConfig(key_bits=4))
        compiled = my_compiler(graph, inputs_of(graph, example_inputs, report))
        return with_states(compiled, report.bindings)
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import GraphModule

from kivi_ops.config import KiviConfig
from kivi_ops.passes.float_caches import match_float_caches
from kivi_ops.passes.match import AttentionSite, Refusal, match
from kivi_ops.passes.nodes import location, value
from kivi_ops.passes.plan import Plan, plan
from kivi_ops.passes.report import RewriteReport, SiteReport
from kivi_ops.passes.rewrite import adopt, carry_out, release, settle_lengths, settle_positions
from kivi_ops.passes.states import freed_inputs

NOT_FOUND = "attention is inside a higher-order operator, or spelled in no way that the pass knows"
NO_INPUTS = "a model's own float cache: its state would be a further input of the graph, which this caller cannot give it"


def rewrite(
    module: GraphModule, config: KiviConfig | None = None, *, float_caches: bool = True, free_float_cache: bool = False
) -> RewriteReport:
    """Rewrite the attentions of a normalised graph, in place: match, plan, edit.

    An attention over a ``kivi::update`` needs nothing further. One over a model's own float cache reads a quantised state: the graph has
    that state's tensors as further inputs, behind all others and in the order of ``report.bindings``, which say where each is found.

    Args:
        module: pre-dispatch ATen with mutations kept and ``meta["val"]`` on every node (:func:`kivi_ops.passes.normalise`).
        config: how float caches are quantised, ``KiviConfig()`` if None; a ``kivi::update`` has its own.
        float_caches: False leaves float caches alone, where nobody could hand their states in, and reports them as refused.
        free_float_cache: take the float writes and the float caches themselves out of the graph (:mod:`kivi_ops.passes.states`).

    Returns:
        What became of each site. The graph is linted and recompiled; every new node has ``meta["val"]``; a second run finds nothing to do.

    Raises:
        RuntimeError: ``free_float_cache`` and a site is refused, or something else in the graph still reads the cache; the graph is not to
            be used then.
    """
    settle_positions(module)
    settle_lengths(module)
    plans: list[Plan] = []
    sites: list[SiteReport] = []
    places = {node: place for place, node in enumerate(module.graph.nodes)}
    own = match_float_caches(module.graph)
    if not float_caches:
        own = [Refusal(found.node, NO_INPUTS) if isinstance(found, AttentionSite) else found for found in own]
    for found in sorted([*match(module.graph), *own], key=lambda found: places[found.node]):
        outcome = plan(module.graph, found) if isinstance(found, AttentionSite) else found
        where = location(found.node)
        if isinstance(outcome, Refusal):
            sites.append(SiteReport(False, outcome.reason, where.layer, where.source))
        else:
            plans.append(outcome)
            sites.append(SiteReport(True, outcome.site.spelling, where.layer, where.source))
    report = RewriteReport(tuple(sites), "" if sites else NOT_FOUND)
    if free_float_cache and report.refused:
        raise RuntimeError(f"option 'free_float_cache' is True, and the float caches cannot go: not every attention is rewritten: {report}")
    plans, bindings = adopt(module, plans, config or KiviConfig(), free_float_cache)
    carry_out(module, plans)
    if free_float_cache:
        release(module, freed_inputs(bindings))
    return RewriteReport(report.sites, report.note, tuple(bindings))


def inputs_of(module: GraphModule, example_inputs: Sequence[Any], report: RewriteReport) -> list[Any]:
    """Example inputs of a rewritten graph: those that it had, without freed caches, and the states'.

    The latter are fakes where there is a tracing context, as in a backend that Dynamo calls, real zeros elsewhere.
    """
    freed = freed_inputs(report.bindings)
    kept = [example for place, example in enumerate(example_inputs) if place not in freed]
    context = TracingContext.try_get()
    mode = context.fake_mode if context and context.fake_mode else contextlib.nullcontext()
    with mode:
        states = [
            torch.zeros(like.shape, dtype=like.dtype, device=like.device)
            for like in (value(node) for node in module.graph.find_nodes(op="placeholder")[len(kept) :])
        ]
    return [*kept, *states]
