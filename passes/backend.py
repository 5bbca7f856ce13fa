"""``torch.compile(model, backend="kivi")``: graphs that attend over a cache go through the pass, then everything to another compiler.

The entry point is :func:`kivi`. Must not know how attention is spelled (:mod:`kivi_ops.passes.match`).
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config
from torch import Tensor
from torch._logging import getArtifactLogger, trace_structured
from torch.fx import GraphModule, Node

import kivi_ops
import kivi_ops.kernels
import kivi_ops.passes
from kivi_ops.config import KiviConfig
from kivi_ops.passes.nodes import arguments, is_op
from kivi_ops.passes.normalise import normalise
from kivi_ops.passes.options import Options
from kivi_ops.passes.pipeline import inputs_of, rewrite
from kivi_ops.passes.report import NO_UPDATE, RewriteReport, tell
from kivi_ops.passes.states import with_states

cache_config: Any = torch.compiler.config
log = logging.getLogger("kivi_ops.passes")
graph_log = getArtifactLogger("torch._dynamo.kivi", "graph_code")  # below torch's own logger: TORCH_LOGS=graph_code shows it


def kivi(
    module: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend: attention over a cache becomes ``kivi::attention`` and ``kivi::append``, the rest is compiled as ever.

    The cache is a :class:`KiviCache`, or the model's own static float cache; that is still written, and a state is kept beside it
    (:mod:`kivi_ops.passes.states`). A site that the pass does not understand stays as it is (right, and slow or unquantised) and is
    reported: :func:`kivi_ops.passes.last_report`, and the logger ``kivi_ops.passes``.

    Args:
        module, example_inputs: what Dynamo captured.
        mode: as in ``torch.compile``; since that refuses ``mode=`` beside ``options=``, the options have a ``"mode"`` too.
        options: ``"compiler"``: what compiles the rewritten graph: ``"inductor"`` (default), ``"aot_eager"``, ``"eager"``,
            ``"torch_tensorrt"`` or a callable backend. ``"strict"``: True makes a graph with no rewritten site, or with a refused one,
            an error. Fields of :class:`KiviConfig`: how float caches are quantised; must be those of the :class:`KiviCache` in the graph.

    Raises:
        ValueError, TypeError: an option that is unknown, impossible, or not the cache's.
        RuntimeError: a cache would need a gradient; ``strict`` is not met.
    """
    chosen = Options.read(mode, options)
    updates = updates_of(module)
    if not updates and not _attends(module):
        _tell(RewriteReport(note=NO_UPDATE), chosen)
        return _compile(module, example_inputs, chosen)
    needs_grad = check_gradients(module, example_inputs)
    for node in updates:
        _check_config(node, chosen.config)
    if needs_grad and not updates:
        _tell(RewriteReport(note="left float: it needs gradients; run the model under torch.no_grad()"), chosen)
        return _compile(module, example_inputs, chosen)
    try:
        normalised = normalise(module, example_inputs)
    except Exception as error:  # any failure to trace: compiled as it came, which is right and slow
        log.debug("normalising failed", exc_info=True)
        _tell(RewriteReport(note=f"the graph cannot be normalised: {type(error).__name__}: {error}"), chosen)
        _show(module)
        return _compile(module, example_inputs, chosen)
    report = rewrite(normalised, KiviConfig(**chosen.config), free_float_cache=chosen.free_float_cache)
    _tell(report, chosen)
    if not updates and not report.rewritten:
        return _compile(module, example_inputs, chosen)
    _show(normalised)
    compiled = _compile(normalised, inputs_of(normalised, example_inputs, report), chosen)
    return with_states(compiled, report.bindings) if report.bindings else compiled


class _Explained(Exception):
    """Ends a compilation when all that was wanted is its report."""


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> RewriteReport:
    """Print which attentions of ``model(*args, **kwargs)`` the backend would rewrite, and why not the others; return that report.

    The model is captured as one graph and neither compiled nor run; caches must be allocated, and stay as they are.

    Raises:
        Exception: what Dynamo raises where the model is not one graph.
    """
    found: list[RewriteReport] = []

    def capture(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if not updates_of(module) and not _attends(module):
            found.append(RewriteReport(note=NO_UPDATE))
        else:
            found.append(rewrite(normalise(module, example_inputs)))
        raise _Explained

    try:
        with torch.no_grad(), torch._dynamo.config.patch(suppress_errors=False):
            torch.compile(model, backend=capture, fullgraph=True)(*args, **kwargs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, _Explained):
            raise
    report = found[-1] if found else RewriteReport(note="nothing to compile")
    print(report)
    return report


def _attends(module: GraphModule) -> bool:
    """Whether anything in a Dynamo graph may be attention."""
    return any("softmax" in str(node.target) or "scaled_dot_product" in str(node.target) for node in _nodes(module))


def updates_of(module: GraphModule) -> list[Node]:
    """The ``kivi::update`` nodes, whether they call the operator or its packet."""
    update = torch.ops.kivi.update
    return [node for node in _nodes(module) if node.target is update or is_op(node, update)]


def _nodes(module: GraphModule) -> list[Node]:
    """All nodes, those in graphs of higher-order operators too."""
    return [node for inner in module.modules() if isinstance(inner, GraphModule) for node in inner.graph.nodes]


def _tell(report: RewriteReport, options: Options) -> None:
    if options.free_float_cache and not report.rewritten and report.note != NO_UPDATE:
        raise RuntimeError(f"option 'free_float_cache' is True, and this graph may need the float caches: {report}")
    tell(report, options.strict)


def _show(module: GraphModule) -> None:
    def code() -> str:
        return module.print_readable(print_output=False, include_stride=True, include_device=True)

    graph_log.debug("%s", torch._logging.LazyString(lambda: f"graph rewritten by backend='kivi'\n{code()}"))
    trace_structured("artifact", lambda: {"name": "kivi_rewritten_graph", "encoding": "string"}, payload_fn=code)


# ---------------------------------------------------------------------------------------------------------------- checks


def _needs_grad(module: GraphModule, example_inputs: Sequence[Any]) -> set[Node]:
    """The nodes whose results would have a gradient."""
    grad = torch.is_grad_enabled()
    examples = iter(example_inputs)
    inputs: set[Node] = set()
    needs_grad: set[Node] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            example = next(examples)
            if isinstance(example, Tensor) and example.requires_grad:
                inputs.add(node)
        elif node.target is torch._C._set_grad_enabled:
            grad = node.args[0]
        elif node.target in ("detach", torch.detach) or not grad:
            continue
        elif any(source in needs_grad or source in inputs for source in node.all_input_nodes):
            needs_grad.add(node)
    return needs_grad


def check_gradients(module: GraphModule, example_inputs: Sequence[Any]) -> set[Node]:
    """The nodes whose results would have a gradient.

    Raises:
        RuntimeError: an update is among them. It has no backward: say so now, and not when the compiled graph first runs.
    """
    needs_grad = _needs_grad(module, example_inputs)
    if any(node in needs_grad for node in updates_of(module)):
        raise RuntimeError(
            "kivi::update has no backward, and its Keys or Values depend on an input that requires grad; run the model under "
            "torch.no_grad()"
        )
    return needs_grad


def _check_config(update: Node, config: Mapping[str, Any]) -> None:
    given = arguments(update)
    for name, wanted in config.items():
        held = given[name]
        if isinstance(held, Node):  # under dynamic=True Dynamo hands numbers in, as symbols that it has already settled
            held = held.meta["example_value"]
        if name == "metadata_dtype" and wanted is None:
            wanted = given["key_window"].meta["example_value"].dtype  # the cache's own
        if wanted != held:
            raise ValueError(
                f"option {name!r} is {wanted!r} but the cache's KiviConfig has {held!r}; allowed: the cache's own, or leave it out"
            )


# ------------------------------------------------------------------------------------------------------------- compilers


def _compile(module: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    if callable(options.compiler):
        return options.compiler(module, example_inputs)
    return _COMPILERS[options.compiler](module, example_inputs, options)


def _inductor(module: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx as typed_compile_fx

    compile_fx: Any = typed_compile_fx  # its type says what export gets
    patches = torch._inductor.list_mode_options(options.mode)
    if not _holds_kivi(module):
        return compile_fx(module, example_inputs, config_patches=patches or None)
    # Reordering would move attention behind the `append` that overwrites what it reads, at the price of a copy of the whole state.
    patches = {**patches, "reorder_for_locality": False}
    with cache_config.patch(cache_key_tag=cache_config.cache_key_tag + package_tag()):
        return compile_fx(module, example_inputs, config_patches=patches)


def _aot_eager(module: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    from functorch.compile import aot_module_simplified, nop

    return aot_module_simplified(module, example_inputs, fw_compiler=nop, keep_inference_input_mutations=True)


def _eager(module: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    return module.forward


def _torch_tensorrt(module: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    import torch_tensorrt  # noqa: F401  registers the backend

    return torch._dynamo.lookup_backend("torch_tensorrt")(module, list(example_inputs))


_COMPILERS: dict[str, Callable[[GraphModule, Sequence[Any], Options], Callable[..., Any]]] = {
    "inductor": _inductor,
    "aot_eager": _aot_eager,
    "eager": _eager,
    "torch_tensorrt": _torch_tensorrt,
}


def _holds_kivi(module: GraphModule) -> bool:
    """Whether any operator of ours is called, also by a model that uses them itself."""
    return any(str(node.target).startswith("kivi.") for node in _nodes(module))


@functools.cache
def package_tag() -> str:
    """Version and digest of this package's source. torch's compile caches know operators by name alone: it goes into their keys, so that
    no graph that was compiled against other operators is served."""
    digest = hashlib.sha256()
    for package in (kivi_ops, kivi_ops.kernels, kivi_ops.passes):
        folder = Path(str(package.__file__)).parent
        for file in sorted(folder.glob("*.py")):
            digest.update(f"{package.__name__}/{file.name}\0".encode() + file.read_bytes())
    return f"kivi_ops-{kivi_ops.__version__}-{digest.hexdigest()}"
