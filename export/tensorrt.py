"""Torch-TensorRT: the dense parts of an exported model in engines, the operators of this package as PyTorch nodes between them.

A program is cut at its operators first: Torch-TensorRT would take the states for inputs of engines, whose dtypes it does not know. Needs
``torch_tensorrt``, an optional extra (``pip install 'kivi-ops[tensorrt]'``), and a GPU. Tested is all up to the making of engines (its dry
run), on a CPU; running them is not, for want of a machine that has both. Must not know of models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.passes.split_module import split_module

from kivi_ops.export.program import ExportedModel
from kivi_ops.export.rewrite import STATE_PREFIX
from kivi_ops.export.session import Session

_DENSE, _OPERATORS = "dense", "operators"


class TensorRTModel(Session):
    """A model of :func:`compile_tensorrt`, called as the one that it was made of and over the same state.

    ``steps``: its programs by name: modules whose children are dense parts, compiled, and operators in turn.
    """

    def __init__(self, steps: dict[str, nn.Module], model: ExportedModel) -> None:
        super().__init__(dict(steps), model._padded, model._state, model.batch_size, model.capacity, model.format)
        self.steps = steps


def compile_tensorrt(model: ExportedModel, **options: Any) -> TensorRTModel:
    """Compile the dense parts of the programs of ``model`` that take a fixed number of tokens; others run as they are.

    A model for this is one with a program for single tokens: ``export_model(..., separate_decode=True)``.

    Args:
        options: of ``torch_tensorrt.dynamo.compile``. ``dryrun=True`` cuts and partitions, and makes no engine.

    Raises:
        ImportError: torch_tensorrt is not installed.
        ValueError: no program takes a fixed number of tokens.
    """
    try:
        import torch_tensorrt
    except ImportError as error:
        raise ImportError("this needs Torch-TensorRT: pip install 'kivi-ops[tensorrt]'") from error
    fixed = {name: program for name, program in model.programs.items() if not program.range_constraints}
    if not fixed:
        raise ValueError("every program takes calls of any length; allowed: at least one of a fixed length (separate_decode=True)")
    steps: dict[str, nn.Module] = dict(model._steps)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, program in fixed.items():
            parts = cut(program.module(check_guards=False))
            for child, inputs in _inputs(parts, program.example_inputs[0]).items():  # type: ignore[index]
                part = torch.export.export(parts.get_submodule(child), inputs)
                parts.set_submodule(child, torch_tensorrt.dynamo.compile(part, arg_inputs=list(inputs), **options))
            steps[name] = _Step(parts)
    return TensorRTModel(steps, model)


def cut(module: GraphModule) -> GraphModule:
    """``module`` as calls of children in turn: dense parts with their weights, and ``kivi::`` operators in the order in which they ran."""
    part, before = 0, False
    parts: dict[Node, int] = {}
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            operator = str(node.target).startswith("kivi.")
            part, before = part + (operator != before), operator
            parts[node] = part
    operators = {place for node, place in parts.items() if str(node.target).startswith("kivi.")}
    return _named(split_module(module, module, parts.__getitem__, keep_original_order=True), operators)


def _named(module: GraphModule, operators: set[int]) -> GraphModule:
    """Children called ``dense_0``, ``operators_1``, ..., the dense ones with the weights that they use."""
    for node in module.graph.find_nodes(op="call_module"):
        number = int(str(node.target).rpartition("_")[2])
        name = f"{_OPERATORS if number in operators else _DENSE}_{number}"
        child: Any = module.get_submodule(str(node.target))
        if number not in operators:
            _take_weights(module, node, child)
        module.add_module(name, child)
        module.delete_submodule(str(node.target))
        node.target = name
    module.graph.lint()
    module.recompile()
    return module


def _take_weights(module: GraphModule, call: Node, child: GraphModule) -> None:
    """What ``child`` is handed out of an attribute of ``module`` becomes its own, so that engines have it as constants."""
    kept = []
    for place, (given, inside) in enumerate(zip(call.args, child.graph.find_nodes(op="placeholder"), strict=True)):
        if not (isinstance(given, Node) and given.op == "get_attr") or str(given.target).startswith(f"{STATE_PREFIX}."):
            kept.append(given)
            continue
        tensor: Any = module
        for part in str(given.target).split("."):
            tensor = getattr(tensor, part)
        child.register_buffer(f"weight_{place}", tensor.detach())
        with child.graph.inserting_before(inside):
            inside.replace_all_uses_with(child.graph.get_attr(f"weight_{place}"))
        child.graph.erase_node(inside)
    call.args = tuple(kept)
    child.graph.lint()
    child.recompile()


class _Step(nn.Module):
    """A cut program that returns what the program does: its logits."""

    def __init__(self, parts: GraphModule) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, *args: Tensor) -> Tensor:
        output = self.parts(*args)
        return output[0] if isinstance(output, (tuple, list)) else output


def _inputs(module: GraphModule, example_inputs: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """Zeros like what each dense part is given in a call. Told by fake tensors, so that no state changes."""
    found: dict[str, tuple[Any, ...]] = {}

    class Recorder(Interpreter):
        def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if target.startswith(_DENSE):
                found[target] = args
            return super().call_module(target, args, kwargs)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        Recorder(module).run(*(mode.from_tensor(tensor, static_shapes=True) for tensor in example_inputs))
    return {
        name: tuple(torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in args) for name, args in found.items()
    }
