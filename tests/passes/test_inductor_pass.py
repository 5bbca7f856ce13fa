"""The pass as Inductor's own custom pass: ``torch.compile(model, options=inductor_options())``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from chat_model import Decoder, call
from pass_models import CAPACITY, Model, assert_same_state, buffer_sizes, compiled_body, no_mask, run_steps, sdpa_repeat_kv
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code

from kivi_ops import KiviState
from kivi_ops.config import SEAL_ORDERS
from kivi_ops.passes import InductorPass, inductor_options, last_report
from kivi_ops.passes.backend import package_tag


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):  # a pass that is not run reports nothing
        yield


class Scaled(Model):
    """Holds a constant, which is an attribute of the traced graph."""

    def forward(self, x: Tensor, mask: Tensor, state: KiviState) -> Tensor:
        return super().forward(x * torch.tensor([1.0, 2.0] * (x.shape[-1] // 2)), mask, state)


@pytest.mark.parametrize("seal", SEAL_ORDERS)
def test_inductor_with_the_pass_gives_the_eager_answer_and_copies_no_state(seal: str) -> None:
    model = Scaled(sdpa_repeat_kv)
    state, expected_state = model.state(seal, residual_length=8), model.state(seal, residual_length=8)
    steps = [1] * 9
    compiled: Any = torch.compile(model, fullgraph=True, options=inductor_options(strict=True))
    expected = run_steps(model, expected_state, torch.bool, steps)
    actual, (code,) = run_and_get_code(run_steps, compiled, state, torch.bool, steps)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert_same_state(state, expected_state)
    body = compiled_body(code)
    assert (body.count("kivi.attention.default("), body.count("kivi.append.default("), body.count("kivi.update")) == (1, 1, 0)
    assert max(buffer_sizes(body)) < 2 * model.kv_heads * CAPACITY * model.key_dim
    report = last_report()
    assert report is not None and len(report.rewritten) == 1


def test_a_dynamic_number_of_tokens_is_rewritten() -> None:
    model = Model(sdpa_repeat_kv)
    state, expected_state = model.state(), model.state()
    steps = [5, 3, 7]
    compiled: Any = torch.compile(model, dynamic=True, options=inductor_options(strict=True))
    torch.testing.assert_close(
        run_steps(compiled, state, torch.bool, steps), run_steps(model, expected_state, torch.bool, steps), rtol=1e-5, atol=1e-5
    )
    assert_same_state(state, expected_state)


def test_what_the_pass_cannot_rewrite_is_reported_and_runs_as_it_was() -> None:
    class Both(Model):
        """Attention over a state, and over a float cache whose state nobody could hand in."""

        def __init__(self) -> None:
            super().__init__(sdpa_repeat_kv)
            self.decoder = Decoder(layers=1)

        def forward(self, x: Tensor, mask: Tensor, state: KiviState) -> Tensor:
            logits = self.decoder(x[..., 0].gt(0).long(), torch.tensor([3]))
            return super().forward(x, mask, state) + logits

    model = Both()
    state, expected_state = model.state(), model.state()
    expected = run_steps(model, expected_state, torch.bool, [1, 1])
    keys = model.decoder.caches[0].keys.clone()
    torch.testing.assert_close(
        run_steps(torch.compile(model, options=inductor_options()), state, torch.bool, [1, 1]), expected, rtol=1e-5, atol=1e-5
    )
    assert torch.equal(model.decoder.caches[0].keys, keys)
    report = last_report()
    assert report is not None and len(report.rewritten) == 1
    (refused,) = report.refused
    assert refused.how.startswith("a model's own float cache: its state would be a further input of the graph")


def test_strict_raises_and_graphs_without_an_update_are_left_alone() -> None:
    model = Model(no_mask)
    with pytest.raises(Exception, match="(?s)option 'strict' is True.*has no mask"):
        run_steps(torch.compile(model, options=inductor_options(strict=True)), model.state(), torch.bool, [1])
    decoder, reference = Decoder(layers=1), Decoder(layers=1)
    actual = call(torch.compile(decoder, options=inductor_options(strict=True)), 0)
    torch.testing.assert_close(actual, call(reference, 0), rtol=1e-5, atol=1e-5)


def test_gradients_are_refused_as_the_backend_does() -> None:
    model = Model(sdpa_repeat_kv)
    compiled: Any = torch.compile(model, options=inductor_options())
    with pytest.raises(Exception, match=r"kivi::update has no backward.* run the model under torch.no_grad\(\)"):
        compiled(torch.randn(2, 1, 32), torch.ones(2, 1, 1, CAPACITY, dtype=torch.bool), model.state())


def test_the_uuid_covers_source_version_and_options() -> None:
    plain, strict = InductorPass(), InductorPass(strict=True)
    assert isinstance(plain, CustomGraphPass)
    assert package_tag() in plain.uuid() and plain.uuid() == InductorPass().uuid() != strict.uuid()
    options = inductor_options(strict=True)
    assert options["post_grad_custom_post_pass"].uuid() == strict.uuid()
