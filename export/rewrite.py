"""``rewrite``: a program's float caches out, quantised states in. Decides nothing about attention (:mod:`kivi_ops.passes`)."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kivi_ops.config import KiviConfig
from kivi_ops.export.graphs import ProgramGraph, bound, export_again, open_program
from kivi_ops.passes import pipeline
from kivi_ops.passes.match import STATE_NAMES
from kivi_ops.passes.nodes import storages, value, written
from kivi_ops.passes.report import tell
from kivi_ops.passes.rewrite import release

STATE_PREFIX = "kivi_state"  # buffers are called kivi_state.<layer>.<tensor>


def rewrite(exported_program: ExportedProgram, config: KiviConfig | None = None, *, strict: bool = False) -> ExportedProgram:
    """A program that attends over quantised states where ``exported_program`` attends over float caches.

    The float caches (buffers, or constants that were lifted) are gone; the states are buffers ``kivi_state.<layer>.<tensor>``, zero as
    allocated. Whatever else the program changes (a counter of tokens) becomes a buffer ``kivi_state.model.<name>``. A site over
    ``kivi::update`` becomes ``kivi::attention`` and ``kivi::append``, with its own configuration. Sites that the pass does not understand
    stay float and are reported (:func:`kivi_ops.passes.last_report`, and the logger ``kivi_ops.passes``).

    Args:
        exported_program: of ``torch.export``, strict or not, before or after ``run_decompositions``; left as it is, weights are shared.
        config: how float caches are quantised, ``KiviConfig()`` if None.
        strict: whether a program in which any site, or every site, stays float is an error.

    Raises:
        ValueError: a float cache, or anything else that the program changes, is not zero; a cache that cannot go; columns of new tokens
            that nothing shows to be consecutive.
        RuntimeError: ``strict`` is not met.
    """
    opened = open_program(exported_program)
    graph = opened.module.graph
    first_state = len(opened.tensors) + len(opened.inputs)
    inputs = graph.find_nodes(op="placeholder")
    report = pipeline.rewrite(opened.module, config)
    tell(report, strict)
    bindings = report.bindings
    states_of = graph.find_nodes(op="placeholder")[first_state:]
    caches = {place for binding in bindings for place in (binding.key, binding.value)}
    for place in caches:
        _check_cache(opened, inputs, place)
    if not all(binding.consecutive for binding in bindings):
        raise ValueError(
            "the columns to which several new tokens go are told by an input, and a program cannot check that they follow one another; "
            "allowed: columns such as arange(S) + start, or calls of one token"
        )
    try:
        release(opened.module, caches)
    except RuntimeError as error:
        raise ValueError(f"a float cache cannot leave the program: {error}") from error
    for name in [list(opened.tensors)[place] for place in caches]:
        del opened.tensors[name]
    names = [f"{STATE_PREFIX}.{index}.{name}" for index in _free_indices(opened, len(bindings)) for name in STATE_NAMES]
    states = {
        node: (name, torch.zeros(value(node).shape, dtype=value(node).dtype, device=value(node).device))
        for node, name in zip(states_of, names, strict=True)
    }
    return export_again(bound(opened, states, _other_state(opened)), exported_program, opened.inputs)


def _free_indices(opened: ProgramGraph, count: int) -> range:
    """Numbers of layers that no state in the program has yet."""
    taken = [int(layer) for name in opened.tensors if (layer := name.removeprefix(f"{STATE_PREFIX}.").split(".")[0]).isdecimal()]
    first = max(taken, default=-1) + 1
    return range(first, first + count)


def _check_cache(opened: ProgramGraph, inputs: list[Node], place: int) -> None:
    """Raises:
    ValueError: a float cache is not the program's own, or holds something, and nobody would hand that to the state.
    """
    if place >= len(opened.tensors):
        name = inputs[place].name
        raise ValueError(f"the float cache {name!r} is an input of the program; allowed: a buffer or a constant, which the program owns")
    name, tensor = list(opened.tensors.items())[place]
    if tensor.count_nonzero():
        raise ValueError(f"the float cache {name!r} is not empty, and its tokens would be lost; allowed: all zeros (reset it, then export)")


def _other_state(opened: ProgramGraph) -> dict[str, str]:
    """Tensors that the program changes besides: the counter of a float cache, the cache of a site that stayed float. From their names to
    new ones beside the states, so that everything a call changes is found under one name and starts at zero.

    Raises:
        ValueError: one is not zero.
    """
    owners = zip(opened.module.graph.find_nodes(op="placeholder"), opened.tensors.items(), strict=False)
    changed = {storage for node in opened.module.graph.nodes for target in written(node) for storage in storages(target)}
    found = [pair for node, pair in owners if storages(node) & changed and not pair[0].startswith(f"{STATE_PREFIX}.")]
    for name, tensor in found:
        if tensor.count_nonzero():
            raise ValueError(
                f"{name!r}, which the program changes, is not zero; allowed: a program that was exported before its first step"
            )
    return {name: f"{STATE_PREFIX}.model.{name.replace('.', '_')}" for name, _ in found}
