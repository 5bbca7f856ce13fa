"""``rewrite`` and its companions as public functions over a graph, without ``torch.compile`` or with a backend of one's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from chat_model import Decoder, call
from helpers import assert_close
from pass_models import count_ops
from torch.fx import GraphModule

from kivi_ops import KiviConfig
from kivi_ops.passes import RewriteReport, inputs_of, last_report, normalise, rewrite, with_states
from kivi_ops.passes.states import owned_state

CONFIG = KiviConfig(group_size=4, residual_length=4)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Own:
    """A backend of one's own: every step in the open, the rewritten graph run as it is."""

    def __init__(self, change: Callable[[GraphModule], GraphModule] = lambda module: module, **options: Any) -> None:
        self.change, self.options = change, options
        self.graphs: list[GraphModule] = []
        self.reports: list[RewriteReport] = []

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = normalise(module, example_inputs)
        report = rewrite(graph, CONFIG, **self.options)
        graph = self.change(graph)
        assert len(inputs_of(graph, example_inputs, report)) == len(graph.graph.find_nodes(op="placeholder"))
        self.graphs.append(graph)
        self.reports.append(report)
        return with_states(graph.forward, report.bindings)


def decoded(backend: Own, steps: int = 11) -> Decoder:
    model, reference = Decoder(), Decoder()
    step = torch.compile(model, backend=backend, fullgraph=True)
    for start in range(steps):
        assert_close(f"at {start}", call(step, start), call(reference, start), 1e-5)
    return model


@pytest.mark.parametrize("free", [False, True], ids=["kept", "freed"])
def test_a_backend_of_ones_own_in_four_lines(free: bool) -> None:
    before, own = last_report(), Own(free_float_cache=free)
    model = decoded(own)
    (graph,), (report,) = own.graphs, own.reports
    assert [site.rewritten for site in report.sites] == [True, True] and len(report.bindings) == 2
    assert all(binding.config == CONFIG and binding.free is free for binding in report.bindings)
    cache: Any = model.caches[0]
    assert owned_state(cache.keys, cache.values, CONFIG).state.length == 11
    assert count_ops(graph)["aten.index_put_"] == (0 if free else 4)
    assert last_report() is before  # `rewrite` says it to its caller alone


def test_a_copy_of_the_rewritten_module_runs() -> None:
    decoded(Own(copy.deepcopy))


@pytest.mark.parametrize("free", [False, True], ids=["kept", "freed"])
def test_the_graph_is_whole_and_a_second_pass_has_nothing_to_do(free: bool) -> None:
    own = Own(free_float_cache=free)
    decoded(own, steps=1)
    (graph,) = own.graphs
    for node in graph.graph.nodes:
        assert node.op == "output" or "val" in node.meta, node
        assert not str(node.target).startswith("kivi.") or node.meta["stack_trace"], node
    code = graph.code
    report = rewrite(graph, CONFIG)
    assert (report.sites, report.bindings, graph.code) == ((), (), code)


def test_a_caller_that_cannot_hand_states_in_leaves_float_caches_alone_and_says_so() -> None:
    own = Own(float_caches=False)
    decoded(own, steps=2)
    (graph,), (report,) = own.graphs, own.reports
    assert not report.bindings and not report.rewritten
    assert {site.how for site in report.refused} == {
        "a model's own float cache: its state would be a further input of the graph, which this caller cannot give it"
    }
    assert not any(name.startswith("kivi.") for name in count_ops(graph))


def test_a_graph_that_no_compiler_gave_is_rewritten_too() -> None:
    """Traced by hand from a function of tensors; nothing of Dynamo's is there."""
    model, reference = Decoder(layers=1), Decoder(layers=1)

    def forward(keys: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, {"caches.0.keys": keys, "caches.0.values": values}, (tokens, start))

    cache: Any = model.caches[0]
    tokens, start = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([0])
    examples = (cache.keys, cache.values, tokens, start)
    traced = torch.fx.experimental.proxy_tensor.make_fx(forward, pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True)
    with torch.no_grad():
        graph = traced(*examples)
        report = rewrite(graph, CONFIG)
        run = with_states(graph.forward, report.bindings)
        for column in range(9):
            actual = run(cache.keys, cache.values, tokens + column, torch.tensor([column]))
            assert_close(f"at {column}", actual, reference(tokens + column, torch.tensor([column])), 1e-5)
    assert len(report.rewritten) == 1
    assert [example.shape for example in inputs_of(graph, examples, report)[:4]] == [example.shape for example in examples]
