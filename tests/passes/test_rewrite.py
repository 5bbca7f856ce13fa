"""What the rewrite leaves behind is a whole graph: values on every node, nothing lost, nothing moved past what it reads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pass_models import CONFIG, WIDTH, Model, Recorder, assert_same_state, causal_mask, count_ops, no_mask, run_steps, sdpa_repeat_kv
from torch import Tensor, nn
from torch.fx import GraphModule

from kivi_ops import KiviState
from kivi_ops.config import SEAL_ORDERS
from kivi_ops.passes import last_report, rewrite
from kivi_ops.passes.plan import dense_order


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def rewritten(model: nn.Module, state: Any, new_tokens: int = 3, **options: Any) -> GraphModule:
    recorder = Recorder()
    with torch.no_grad():
        x = torch.randn(2, new_tokens, WIDTH)
        torch.compile(model, backend=recorder, fullgraph=True, **options)(x, causal_mask(0, new_tokens), state)
    return recorder.modules[-1]


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("seal", SEAL_ORDERS)
def test_the_graph_is_whole(seal: str, dynamic: bool | None) -> None:
    model = Model(sdpa_repeat_kv)
    module = rewritten(model, model.state(seal), dynamic=dynamic)
    module.graph.lint()
    for node in module.graph.nodes:
        assert node.op == "output" or "val" in node.meta, node
    order = [str(node.target) for node in module.graph.nodes if "kivi." in str(node.target)]
    expected = ["kivi.attention.default", "kivi.append.default"]
    assert order == (expected if seal == "after_attention" else expected[::-1])
    attention, append = (
        module.graph.find_nodes(op="call_function", target=getattr(torch.ops.kivi, op).default)[0] for op in ("attention", "append")
    )
    assert attention.meta["val"].shape[1:] == (4, 3, 16) or dynamic
    assert attention.meta["stack_trace"] and append.meta["val"] is None
    assert attention.kwargs["seal"] == seal and append.kwargs["residual_length"] == CONFIG.residual_length


def test_a_copy_of_the_module_runs() -> None:
    model = Model(sdpa_repeat_kv)
    recorder = Recorder(compiler=lambda module, example_inputs: copy.deepcopy(module).forward)
    expected_state, state = model.state(), model.state()
    expected = run_steps(model, expected_state, torch.bool, [3, 1])
    torch.testing.assert_close(run_steps(torch.compile(model, backend=recorder), state, torch.bool, [3, 1]), expected, rtol=1e-5, atol=1e-5)
    assert_same_state(state, expected_state)


def test_a_second_pass_finds_nothing_left_and_changes_nothing() -> None:
    model = Model(sdpa_repeat_kv)
    module = rewritten(model, model.state())
    code = module.code
    report = rewrite(module)
    assert report.sites == () and module.code == code


def test_a_position_that_is_the_live_length_is_copied_ahead_of_the_update() -> None:
    """With "before" order attention would otherwise see the advanced length, and ``append`` would read what it writes."""

    class Live(Model):
        def forward(self, x: Tensor, mask: Tensor, state: KiviState) -> Tensor:
            query, key, value = self.project(x)
            keys, values = state.update(key, value, state.length)
            return self.o(self.spell(query, keys, values, mask).transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))

    live, told = Live(sdpa_repeat_kv), Model(sdpa_repeat_kv)
    for seal in SEAL_ORDERS:
        torch._dynamo.reset()
        expected_state, state = told.state(seal), live.state(seal)
        expected = run_steps(told, expected_state, torch.bool, [5, 1, 1, 1, 1])
        recorder = Recorder()
        actual = run_steps(torch.compile(live, backend=recorder), state, torch.bool, [5, 1, 1, 1, 1])
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert_same_state(state, expected_state)
        for module in recorder.modules:
            (append,) = module.graph.find_nodes(op="call_function", target=torch.ops.kivi.append.default)
            length, position = append.args[8], append.args[9]
            assert length.op == "placeholder" and str(position.target) == "aten.to.dtype" and position.meta["val"].dtype == torch.int32


def test_nodes_after_the_attention_find_the_strides_they_were_traced_with() -> None:
    """A ``contiguous()`` that changed nothing is not in the graph: what follows it is a ``view``, which needs the same strides."""

    class Views(Model):
        def forward(self, x: Tensor, mask: Tensor, state: KiviState) -> Tensor:
            query, key, value = self.project(x)
            keys, values = state.update(key, value, state.length.clone())
            attended = self.spell(query, keys, values, mask).transpose(1, 2).contiguous()
            return self.o(attended.view(x.shape[0], x.shape[1], -1))

    model = Views(sdpa_repeat_kv)
    for dynamic in (None, True):
        torch._dynamo.reset()
        expected = run_steps(model, model.state(), torch.bool, [5, 3, 1])
        actual = run_steps(torch.compile(model, backend=Recorder(strict=True), dynamic=dynamic), model.state(), torch.bool, [5, 3, 1])
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "order", "expected"),
    [
        ((2, 3, 4), (0, 1, 2), (0, 1, 2)),
        ((2, 3, 4, 5), (0, 2, 1, 3), (0, 2, 1, 3)),
        ((2, 3, 1, 5), (0, 2, 1, 3), (0, 1, 2, 3)),  # a dimension of size 1 is anywhere
        ((2, 3, 4), (2, 0, 1), (2, 0, 1)),
    ],
    ids=["contiguous", "tokens-first", "one-token", "last-first"],
)
def test_dense_order(shape: tuple[int, ...], order: tuple[int, ...], expected: tuple[int, ...]) -> None:
    dense = torch.empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
    assert dense.shape == shape and dense_order(dense) == expected


def test_a_tensor_with_holes_has_no_dense_order() -> None:
    assert dense_order(torch.empty(2, 3, 8)[..., ::2]) is None


def test_layers_are_rewritten_or_refused_each_for_itself_and_other_writes_are_kept() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good, self.bad = Model(sdpa_repeat_kv), Model(no_mask)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor, mask: Tensor, states: list[KiviState]) -> Tensor:
            self.calls.add_(1)
            x = self.bad(self.good(x, mask, states[0]), mask, states[1])
            self.calls.mul_(2)
            return x

    model = Two()
    expected_states, states = ([model.good.state(), model.bad.state()] for _ in range(2))
    recorder = Recorder()
    with torch.no_grad():
        x, mask = torch.randn(2, 5, WIDTH), causal_mask(0, 5)
        expected = model(x, mask, expected_states)
        actual = torch.compile(model, backend=recorder, fullgraph=True)(x, mask, states)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert_same_state(states[0], expected_states[0])
    assert model.calls == (2 + 1) * 2
    report = last_report()
    assert report is not None
    assert [(site.layer, site.rewritten) for site in report.sites] == [("good", True), ("bad", False)]
    before, after = recorder.before[0], recorder.after[0]
    assert [before[op] for op in ("kivi.update", "aten.add_", "aten.mul_")] == [2, 1, 1]
    assert [after[op] for op in ("kivi.update", "kivi.append", "aten.add_", "aten.mul_")] == [1, 1, 1, 1]
    assert count_ops(recorder.modules[0]) == after
