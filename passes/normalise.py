"""Any front door's graph to the one IR that the pass reads: pre-dispatch ATen, mutations kept, a fake tensor on every node.

Must not know of KIVI.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_leaves

from kivi_ops.passes.nodes import described


def normalise(module: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """Trace a Dynamo graph again as pre-dispatch ATen operators on fake inputs; ``module`` is left as it was.

    What Dynamo said of the inputs is kept (sources, static addresses, sizes that are symbols), since AOTAutograd and CUDA graphs go by it.

    Args:
        module: a graph from Dynamo, or any module of one whose placeholders are flat.
        example_inputs: one per placeholder: tensors, fake or real, and numbers.

    Raises:
        Exception: whatever tracing raises, for a graph that cannot be traced.
    """
    before = module.graph.find_nodes(op="placeholder")
    if len(before) != len(example_inputs):
        raise ValueError(f"the graph has {len(before)} placeholders but there are {len(example_inputs)} example inputs")
    mode = _own_fake_mode(example_inputs)
    fakes = _fakes(before, example_inputs, mode)
    with mode, enable_python_dispatcher(), preserve_node_meta():
        traced = make_fx(_Run(module).run, pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    for old, new in zip(before, traced.graph.find_nodes(op="placeholder"), strict=True):
        new.meta = old.meta | new.meta
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    for node in traced.graph.nodes:
        if any(
            torch._C._functorch.is_functorch_wrapped_tensor(leaf) for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)
        ):
            raise ValueError(f"{described(node)} was traced inside torch.vmap, as flex_attention is, and means nothing outside of it")
    for node in traced.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        node.meta.setdefault("val", None)  # as tracing says of everything else that returns nothing
    traced.meta.update(module.meta)
    if hasattr(module, "_param_name_to_source"):
        # Constants that tracing made (of torch.tensor(2.0), say) are attributes now, and every attribute must have a source.
        attributes = (name for name, _ in (*traced.named_parameters(), *traced.named_buffers()))
        sources: dict[str, Any] = {name: ConstantSource(f"kivi_{name}") for name in attributes}
        sources.update(module._param_name_to_source)  # type: ignore[arg-type]
        traced._param_name_to_source = sources  # type: ignore[assignment]
    return traced


class _Run(Interpreter):
    """Under dynamic=True Dynamo makes a float attribute of a module an input and a symbol: here the number that it has, by a guard."""

    def run_node(self, n: Node) -> Any:
        number = n.meta.get("example_value")
        if n.op == "call_method" and n.target == "item" and isinstance(number, torch.SymFloat) and n.all_input_nodes[0].op == "placeholder":
            return float(number)
        return super().run_node(n)


def _own_fake_mode(example_inputs: Sequence[Any]) -> FakeTensorMode:
    """A mode of the pass's own over the same symbols: tracing mutates fakes, and those of the front door are used again after it."""
    context = TracingContext.try_get()
    theirs = (context and context.fake_mode) or detect_fake_mode(example_inputs)
    return FakeTensorMode(shape_env=theirs.shape_env if theirs else None, allow_non_fake_inputs=True)


def _fakes(placeholders: Sequence[Node], examples: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """One fake per placeholder, with the symbols that the placeholder's own sizes have."""
    fakes: list[Any] = []
    owners: dict[int, int] = {}  # storage of an example -> how many examples are in it
    symbolic = set()
    for node, example in zip(placeholders, examples, strict=True):
        if not isinstance(example, Tensor):
            size = node.meta.get("example_value", node.meta.get("val"))
            fakes.append(size if isinstance(size, torch.SymInt) else example)
            continue
        storage = example.untyped_storage()._cdata
        owners[storage] = owners.get(storage, 0) + 1
        like = example if isinstance(example, FakeTensor) else node.meta.get("example_value", node.meta.get("val"))
        if not _is_symbolic(like) and not isinstance(example, FakeTensor):
            fakes.append(mode.from_tensor(example, static_shapes=True))  # keeps who shares a storage with whom
            continue
        symbolic.add(storage)
        assert isinstance(like, Tensor)
        with mode:
            fakes.append(
                torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device, requires_grad=like.requires_grad)
            )
    if any(owners[storage] > 1 for storage in symbolic):
        raise ValueError("inputs of symbolic size share memory, and which writes reach which could not be told")
    return fakes


def _is_symbolic(like: Any) -> bool:
    return isinstance(like, Tensor) and any(isinstance(size, torch.SymInt) for size in (*like.shape, *like.stride()))
