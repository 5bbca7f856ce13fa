"""Normalising keeps what Dynamo said and what the model wrote, and makes nothing up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pass_models import CAPACITY, WIDTH, Model, causal_mask, count_ops, run_steps, sdpa_repeat_kv
from torch import Tensor, nn
from torch.fx import GraphModule

from kivi_ops.passes.nodes import location, storages
from kivi_ops.passes.normalise import normalise


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Normaliser:
    """A Dynamo backend that keeps each graph as it came and normalised, and runs the normalised one."""

    def __init__(self) -> None:
        self.pairs: list[tuple[GraphModule, GraphModule]] = []

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.pairs.append((module, normalise(module, example_inputs)))
        return self.pairs[-1][1].forward


def normalised(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
    backend = Normaliser()
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True, **options)(*args)
    return backend.pairs[-1]


def test_what_dynamo_said_of_the_inputs_is_kept() -> None:
    model = Model(sdpa_repeat_kv)
    state = model.state()
    before, after = normalised(model, torch.randn(2, 3, WIDTH), causal_mask(0, 3), state)
    assert after.meta["dynamo_compile_id"] == before.meta["dynamo_compile_id"]
    assert after._param_name_to_source == before._param_name_to_source
    static = 0
    for old, new in zip(before.graph.find_nodes(op="placeholder"), after.graph.find_nodes(op="placeholder"), strict=True):
        assert new._dynamo_source is old._dynamo_source
        assert new.meta["tensor_dict"] == old.meta["tensor_dict"]
        assert new.meta["val"].shape == old.meta["example_value"].shape
        static += new.meta["tensor_dict"].get("_dynamo_static_input_type") is not None
    assert static >= len(state.tensors())


def test_every_node_has_a_value_and_a_place_in_the_model() -> None:
    model = nn.Sequential()
    model.add_module("layer", Model(sdpa_repeat_kv))
    state = model.layer.state()
    _, after = normalised(lambda x, mask: model.layer(x, mask, state), torch.randn(2, 1, WIDTH), causal_mask(0, 1))
    for node in after.graph.nodes:
        assert node.op == "output" or "val" in node.meta, node
    (attention,) = (node for node in after.graph.nodes if "scaled_dot_product" in str(node.target))
    assert location(attention).source.startswith("pass_models.py:") and location(attention).source.endswith("in sdpa_repeat_kv")
    assert location(attention).layer.endswith("layer")


def test_writes_without_a_reader_are_kept() -> None:
    def writes(buffer: Tensor, x: Tensor, position: Tensor) -> Tensor:
        buffer.index_copy_(0, position, x)
        buffer[:, 0] = 7
        position.add_(1)
        return x + 1

    buffer, position = torch.zeros(4, 3), torch.tensor([2])
    _, after = normalised(writes, buffer, torch.ones(1, 3), position)
    assert {"aten.index_copy_", "aten.add_"} <= set(count_ops(after))
    assert buffer.tolist() == [[7, 0, 0], [7, 0, 0], [7, 1, 1], [7, 0, 0]] and position.tolist() == [3]


def test_fakes_of_the_front_door_are_left_alone() -> None:
    """AOTAutograd uses the tracing context's fakes again: they must not have been written to, nor have become views of the pass's own."""
    seen = []

    def backend(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        mode = torch._guards.TracingContext.get().fake_mode
        fake = mode.from_tensor(example_inputs[0], static_shapes=True)
        version = fake._version
        after = normalise(module, example_inputs)
        seen.append((mode.from_tensor(example_inputs[0], static_shapes=True) is fake, fake._version == version))
        return after.forward

    torch.compile(lambda x: x.add_(1), backend=backend)(torch.zeros(3))
    assert seen == [(True, True)]


def test_views_of_one_tensor_share_a_storage() -> None:
    def reads(base: Tensor, row: Tensor, other: Tensor) -> Tensor:
        return base.view(-1)[2:] + row.sum() + other.sum()

    base = torch.arange(12.0).view(3, 4)
    _, after = normalised(reads, base, base[1], torch.ones(2))
    names = {node.name: node for node in after.graph.nodes}
    first, second, other = after.graph.find_nodes(op="placeholder")
    assert storages(first) == storages(second) == storages(names["view"]) != storages(other)


def test_symbolic_sizes_are_the_placeholders_own() -> None:
    before, after = normalised(lambda x, n: x[:n] * 2, torch.randn(7, 5), 4, dynamic=True)
    for old, new in zip(before.graph.find_nodes(op="placeholder"), after.graph.find_nodes(op="placeholder"), strict=True):
        expected, actual = old.meta["example_value"], new.meta["val"]
        assert str(getattr(actual, "shape", actual)) == str(getattr(expected, "shape", expected))
    (view,) = (node for node in after.graph.nodes if str(node.target) == "aten.slice.Tensor")
    assert isinstance(view.meta["val"].shape[0], torch.SymInt)


def test_inputs_of_symbolic_size_that_share_memory_are_refused() -> None:
    base = torch.randn(8, 6)
    with pytest.raises(Exception, match="inputs of symbolic size share memory"):
        normalised(lambda a, b: a + b.sum(), base[:4], base[2:], dynamic=True)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_constants_that_tracing_makes_reach_the_compiler(compiler: str) -> None:
    def spell(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return sdpa_repeat_kv(q * torch.tensor(0.5) + torch.tensor([1.0, 2.0] * 8), k, v, mask)

    model = Model(spell)
    expected = run_steps(model, model.state(), torch.bool, [3])
    compiled = torch.compile(model, backend="kivi", options={"compiler": compiler, "strict": True})
    torch.testing.assert_close(run_steps(compiled, model.state(), torch.bool, [3]), expected, rtol=1e-5, atol=1e-5)


def test_a_number_of_inputs_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 placeholders but there are 2 example inputs"):
        normalise(torch.fx.symbolic_trace(lambda x: x + 1), [torch.ones(1), torch.ones(1)])


def test_a_graph_from_elsewhere_is_normalised_too() -> None:
    """No Dynamo: no sources, no tracing context."""
    after = normalise(torch.fx.symbolic_trace(lambda x: torch.softmax(x, -1) + 1), [torch.ones(2, CAPACITY)])
    assert count_ops(after) == {"aten.softmax": 1, "aten.add": 1}
    torch.testing.assert_close(after(torch.ones(2, CAPACITY))[0, 0], torch.tensor(1 + 1 / CAPACITY))
