"""What a node of a normalised graph is: small questions with small answers, none of which edits anything or adds a guard."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true as known

aten = torch.ops.aten

_SAME_NUMBER = (aten.lift_fresh_copy, aten.detach, aten.detach_, aten.alias, aten.clone, aten.to, aten._to_copy)


@dataclass(frozen=True)
class Location:
    """Where in the model a node comes from: ``layer`` is the module's path, ``source`` file, line and function; "" if not known."""

    layer: str = ""
    source: str = ""


def is_op(node: Any, *packets: torch._ops.OpOverloadPacket) -> bool:
    """Whether ``node`` calls any overload of one of ``packets``."""
    return isinstance(node, Node) and getattr(node.target, "overloadpacket", None) in packets


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a node that calls an operator (or its packet) by their names in the schema, defaults filled in."""
    target: Any = node.target
    schema = getattr(target, "default", target)._schema.arguments
    given = dict(zip((argument.name for argument in schema), node.args, strict=False)) | node.kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in schema}


def value(node: Node) -> Tensor:
    """The fake tensor that stands for what ``node`` returns."""
    return node.meta["val"]


def same_sizes(left: Iterable[Any], right: Iterable[Any]) -> bool:
    """Whether two shapes are known to be equal."""
    left, right = tuple(left), tuple(right)
    return len(left) == len(right) and all(known(a == b) for a, b in zip(left, right, strict=True))


def storages(node: Node) -> set[int]:
    """Identities of the storages that ``node`` returns, so that views of one tensor are seen to share it."""
    leaves = node.meta.get("val")
    leaves = leaves if isinstance(leaves, (tuple, list)) else (leaves,)
    return {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)}


def written(node: Node) -> list[Node]:
    """The inputs that ``node`` changes in place; of a higher-order operator, which does not say, all."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return node.all_input_nodes
    schema = getattr(node.target, "_schema", None)
    if schema is None or is_op(node, torch.ops.aten.detach_):  # which traces of torch.tensor(...) have, and which changes no element
        return []
    values = arguments(node)
    changed = (values[argument.name] for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write)
    flat = (leaf for item in changed for leaf in (item if isinstance(item, (tuple, list)) else (item,)))
    return [leaf for leaf in flat if isinstance(leaf, Node)]


def number(item: Any) -> Any:
    """What stands for a number in the graph's arguments: itself, or the value of its node."""
    return item.meta.get("val") if isinstance(item, Node) else item


def constant(item: Any) -> float | None:
    """The one number that ``item`` is in every run: a Python number, or a tensor that was made of one while tracing or in the graph."""
    while is_op(item, *_SAME_NUMBER) and item.meta["val"].dtype.is_floating_point:
        item = item.args[0]
    if isinstance(item, (int, float)):
        return float(item)
    if is_op(item, aten.full):
        item = arguments(item)["fill_value"]
    elif is_op(item, aten.scalar_tensor):
        item = arguments(item)["s"]
    elif is_op(item, aten.sqrt):
        inner = constant(item.args[0])
        return None if inner is None or inner < 0 else math.sqrt(inner)
    elif isinstance(item, Node) and item.op == "get_attr" and str(item.target).startswith("_tensor_constant"):
        tensor = getattr(item.graph.owning_module, str(item.target))
        item = tensor.item() if tensor.numel() == 1 and type(tensor) is Tensor else None
    return float(item) if isinstance(item, (int, float)) else None


def name(node: Node) -> str:
    """``aten.mul`` and the like, for messages."""
    if node.op == "output":
        return "the graph's output"
    if node.op == "placeholder":
        return "an input of the graph"
    return str(getattr(node.target, "overloadpacket", None) or getattr(node.target, "__name__", None) or node.target)


def described(node: Node) -> str:
    """A node's name with the model's source line."""
    source = location(node).source
    return f"{name(node)} ({source})" if source else name(node)


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def location(node: Node) -> Location:
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    source = ""
    if frames:
        file, line, function = frames[-1].group("file", "line", "function")
        source = f"{os.path.basename(file)}:{line} in {function}"
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return Location(re.sub(r"^L(\[[^\]]*\])+\.?", "", path), source)
