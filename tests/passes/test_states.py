"""What the states beside a model's own float cache live through: writes from outside, rollbacks, jumps, failures, a freed float cache."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from chat_model import Cache, Decoder, call
from helpers import assert_close, assert_same_rows, valid_rows
from pass_models import Recorder
from torch import Tensor
from torch.fx import GraphModule

from kivi_ops import KiviConfig, KiviState
from kivi_ops.config import SEAL_ORDERS
from kivi_ops.passes import last_report
from kivi_ops.passes.states import held_states, owned_state

R = 4
OPTIONS: dict[str, Any] = {"group_size": 4, "residual_length": R}
CONFIG = KiviConfig(**OPTIONS)
CAPACITY = 48


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(model: Decoder, compiler: Any = "eager", **options: Any) -> Any:
    options = {"compiler": compiler, "strict": True, **OPTIONS, **options}
    return torch.compile(model, backend="kivi", fullgraph=True, options=options)


def assert_same(actual: Tensor, expected: Tensor, where: Any = "") -> None:
    assert_close(f"logits {where}", actual, expected, 1e-5)


def assert_states_follow(model: Decoder, tokens: int) -> None:
    """Each state equals one that was given the float cache's tokens at once."""
    for cache in model.caches:
        assert isinstance(cache, Cache)
        state = owned_state(cache.keys, cache.values, CONFIG).state
        fresh = KiviState.allocate(CONFIG, *cache.keys.shape, cache.values.shape[-1], cache.keys.dtype)
        fresh.append(cache.keys[:, :, :tokens], cache.values[:, :, :tokens], torch.tensor(0))
        rows = [tokens] * cache.keys.shape[0]
        assert_same_rows(valid_rows(state, rows), valid_rows(fresh, rows))


def snapshot(model: Decoder) -> list[Tensor]:
    states = (owned_state(cache.keys, cache.values, CONFIG).state for cache in model.caches)
    return [tensor.clone() for state in states for tensor in state.tensors().values()]


# ------------------------------------------------------------------------------------------------------ writes from outside


def zero_all(model: Decoder) -> None:
    for buffer in model.buffers_of_caches():
        buffer.zero_()


def one_view_of_values(model: Decoder) -> None:
    model.caches[1].values[0, 1, 2:4].mul_(-1)


def eager_call(model: Decoder) -> None:
    call(model, 3, 3)


def under_inference_mode(model: Decoder) -> None:
    with torch.inference_mode():
        model(torch.full((2, 2), 9), torch.tensor([2]))


def with_backend(backend: str) -> Callable[[Decoder], None]:
    def write(model: Decoder) -> None:
        with torch.no_grad():
            torch.compile(lambda keys: keys[:, :, 1:4].mul_(-1), backend=backend)(model.caches[0].keys)

    return write


def a_refused_graph(model: Decoder) -> None:
    def forward(tokens: Tensor, start: Tensor) -> Tensor:
        return model(tokens, start) + model.caches[0].keys.sum() + model.caches[1].keys.sum()

    with torch.no_grad():
        torch.compile(forward, backend="kivi", options={"compiler": "eager", **OPTIONS})(torch.full((2, 2), 9), torch.tensor([2]))
    report = last_report()
    assert report is not None and len(report.refused) == 2


def through_data_and_said_so(model: Decoder) -> None:
    model.caches[0].keys.data[:, :, :3] *= -1
    torch.autograd.graph.increment_version(model.caches[0].keys)


OUTSIDE: dict[str, Callable[[Decoder], None]] = {
    "zeroed": zero_all,
    "view": one_view_of_values,
    "eager-call": eager_call,
    "inference-mode": under_inference_mode,
    "aot_eager": with_backend("aot_eager"),
    "inductor": with_backend("inductor"),
    "refused-graph": a_refused_graph,
    "data-announced": through_data_and_said_so,
}


@pytest.mark.parametrize("outside", OUTSIDE)
def test_whatever_else_writes_the_float_cache_is_taken_over(outside: str) -> None:
    model, reference = Decoder(), Decoder()
    step = compiled(model)
    for start in range(R + 3):
        assert_same(call(step, start), call(reference, start), start)
    OUTSIDE[outside](model)
    if outside == "refused-graph":
        torch._dynamo.reset()
        step = compiled(model)
    with torch.no_grad():
        for ours, theirs in zip(reference.buffers_of_caches(), model.buffers_of_caches(), strict=True):
            ours.copy_(theirs)
    for start in range(R + 3, 2 * R + 5):
        assert_same(call(step, start), call(reference, start), start)
    assert_states_follow(model, 2 * R + 5)


def test_nothing_is_taken_over_while_all_writes_are_ours() -> None:
    model = Decoder()
    step = compiled(model)
    call(step, 0, 3)
    kept = owned_state(model.caches[0].keys, model.caches[0].values, CONFIG)
    kept.state.value_window.fill_(float("nan"))
    assert call(step, 3).isnan().all()


def test_a_shorter_second_conversation_in_the_same_cache_by_position_alone() -> None:
    model, reference = Decoder(), Decoder()
    step = compiled(model)
    for first, steps in ((11, 9), (3, 14)):
        assert_same(call(step, 0, first), call(reference, 0, first), f"prompt of {first}")
        for start in range(first, first + steps):
            assert_same(call(step, start), call(reference, start), start)
    assert_states_follow(model, 17)


@pytest.mark.parametrize("prompt", [1, 6])
def test_a_single_row(prompt: int) -> None:
    """``keys[:, :, position] = key`` is traced without the dimension of the rows where there is one."""
    model, reference = Decoder(rows=1), Decoder(rows=1)
    step = compiled(model)
    assert_same(call(step, 0, prompt, rows=1), call(reference, 0, prompt, rows=1), "prompt")
    for start in range(prompt, prompt + 2 * R + 3):
        assert_same(call(step, start, rows=1), call(reference, start, rows=1), start)
    assert_states_follow(model, prompt + 2 * R + 3)


@pytest.mark.parametrize("back", [1, R, 2 * R + 1])
def test_a_smaller_position_is_a_rollback(back: int) -> None:
    model, reference = Decoder(), Decoder()
    step = compiled(model)
    for start in (*range(14), *range(14 - back, 24)):
        assert_same(call(step, start), call(reference, start), start)


def test_a_call_that_fails_half_way_leaves_nothing_to_rely_on() -> None:
    fails = False

    def compiler(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if fails:
                args[-1].fill_(99)  # the last state's length
                raise MemoryError
            return module.forward(*args)

        return run

    model, reference = Decoder(), Decoder()
    step = compiled(model, compiler)
    for start in range(6):
        assert_same(call(step, start), call(reference, start), start)
    fails = True
    with pytest.raises(MemoryError):
        call(step, 6)
    fails = False
    for start in range(6, 12):
        assert_same(call(step, start), call(reference, start), start)


# ------------------------------------------------------------------------------------------------------------------- jumps


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("seal", SEAL_ORDERS)
def test_a_jump_beyond_what_is_held_is_nan_and_changes_no_state(seal: str, compiler: str) -> None:
    config = KiviConfig(**OPTIONS, seal=seal)
    model, reference = Decoder(), Decoder()
    step = compiled(model, compiler, seal=seal)
    for start in range(6):
        assert_same(call(step, start), call(reference, start), start)
    states = [owned_state(cache.keys, cache.values, config).state for cache in model.caches]
    before = [tensor.clone() for state in states for tensor in state.tensors().values()]
    for start in (9, 10, 7):
        assert call(step, start).isnan().all(), start
    after = [tensor for state in states for tensor in state.tensors().values()]
    assert all(map(torch.equal, after, before))
    for start in (6, 7, 8, 4, 5):  # within what is held
        assert_same(call(step, start), call(reference, start), start)


def test_a_jump_that_is_announced_attends_over_what_the_float_cache_holds() -> None:
    model, reference = Decoder(), Decoder()
    step = compiled(model)
    for start in range(10):
        assert_same(call(step, start), call(reference, start), start)
    assert_same(call(step, 2), call(reference, 2), "back")
    torch.autograd.graph.increment_version(model.buffers_of_caches())
    for start in range(10, 16):
        assert_same(call(step, start), call(reference, start), start)


def test_a_first_call_beyond_the_start_takes_over_what_is_there() -> None:
    model, reference = Decoder(), Decoder()
    assert_same(call(compiled(model), 5), call(reference, 5))  # five columns of zeros, which the mask shows


# ----------------------------------------------------------------------------------------------------------------- padding


def test_left_padding_in_a_float_cache_is_ordinary_tokens_that_the_mask_hides() -> None:
    hidden = torch.zeros(2, 1, 1, CAPACITY, dtype=torch.bool)
    hidden[1, ..., :3] = True
    model, plain = Decoder(lossless=False), Decoder(lossless=False)
    step = compiled(model)
    actual = [call(step, start, tokens, hidden=hidden) for start, tokens in ((0, 7), *((start, 1) for start in range(7, 20)))]
    assert_states_follow(model, 20)
    padding = [owned_state(cache.keys, cache.values, CONFIG).state.left_padding.tolist() for cache in model.caches]
    assert padding == [[0, 0]] * 2
    assert not any(logits.isnan().any() for logits in actual)
    # A first prefill is exact, so pads that the mask hides change nothing there.
    assert_same(actual[0][1, 3:], call(plain, 0, 7, hidden=hidden)[1, 3:])


# ------------------------------------------------------------------------------------------------------------------ release


def test_states_are_released_with_the_float_caches() -> None:
    gc.collect()
    held = len(held_states())
    model = Decoder()
    step = compiled(model)
    call(step, 0)
    alive = weakref.ref(owned_state(model.caches[0].keys, model.caches[0].values, CONFIG).state)
    assert len(held_states()) == held + 2
    model.new_caches()
    gc.collect()
    assert len(held_states()) == held and alive() is None
    call(step, 0)  # with caches that it has not seen
    assert len(held_states()) == held + 2


# ------------------------------------------------------------------------------------------------------- a freed float cache


def freed(model: Decoder) -> bool:
    return all(buffer.untyped_storage().nbytes() == 0 for buffer in model.buffers_of_caches())


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_without_its_float_cache_a_model_goes_on_as_before(compiler: str) -> None:
    model, reference = Decoder(), Decoder()
    recorder = Recorder(None if compiler == "eager" else torch._dynamo.lookup_backend(compiler), free_float_cache=True, **OPTIONS)
    step = torch.compile(model, backend=recorder, fullgraph=True)
    sizes = [buffer.shape for buffer in model.buffers_of_caches()]
    prompts = (1, 1) if compiler == "inductor" else (7, 3)  # more graphs take it long
    for first, steps in zip(prompts, (3 * R, 2 * R), strict=True):  # the second conversation begins at position 0
        assert_same(call(step, 0, first), call(reference, 0, first), f"prompt of {first}")
        assert freed(model) and [buffer.shape for buffer in model.buffers_of_caches()] == sizes
        for start in range(first, first + steps):
            assert_same(call(step, start), call(reference, start), start)
    for start in range(5, 9):  # a rollback
        assert_same(call(step, start), call(reference, start), start)
    assert call(step, 20).isnan().all()
    for before, after in zip(recorder.before, recorder.after, strict=True):
        assert (before["aten.index_put_"], after["aten.index_put_"]) == (4, 0)
        assert (after["kivi.attention"], after["kivi.append"]) == (2, 2)
    for module in recorder.modules:
        inputs = module.graph.find_nodes(op="placeholder")
        assert not any("keys" in node.name or "values" in node.name for node in inputs if not node.name.startswith("kivi"))
        assert all(node.users for node in inputs if node.name.startswith("kivi"))
        module.graph.lint()


def test_what_an_eager_prefill_wrote_is_taken_over_before_the_cache_is_freed() -> None:
    model, reference = Decoder(), Decoder()
    call(model, 0, 9)
    call(reference, 0, 9)
    step = compiled(model, free_float_cache=True)
    for start in range(9, 9 + 2 * R):
        assert_same(call(step, start), call(reference, start), start)
    assert freed(model)


TOUCHES: dict[str, Callable[[Decoder], Any]] = {
    "an eager call": lambda model: call(model, 5),
    "a reset": lambda model: model.caches[0].keys.zero_(),
    "a slice": lambda model: model.caches[0].values[:, :, :3],
    "index_copy_": lambda model: model.caches[0].keys.index_copy_(2, torch.tensor([1]), torch.zeros(2, 2, 1, 8)),
    "NumPy": lambda model: model.caches[0].keys.numpy(),
    "attention": lambda model: torch.nn.functional.scaled_dot_product_attention(*[model.caches[0].keys] * 3),
    "another compiled graph": lambda model: torch.compile(lambda keys: keys.add_(1), backend="inductor")(model.caches[0].keys),
    "this backend without the option": lambda model: call(compiled(model), 5),
    "this backend with other bits": lambda model: call(compiled(model, free_float_cache=True, key_bits=8), 5),
}


@pytest.mark.parametrize("touch", TOUCHES, ids=[name.replace(" ", "-") for name in TOUCHES])
def test_a_freed_float_cache_that_is_touched_is_an_error(touch: str) -> None:
    model = Decoder()
    call(compiled(model, free_float_cache=True), 0, 5)
    torch._dynamo.reset()
    states = snapshot(model)
    with pytest.raises(RuntimeError, match="storage of size 0|Cannot access data pointer of Tensor|has freed this float cache"):
        TOUCHES[touch](model)
    assert all(map(torch.equal, snapshot(model), states))


class SecondReader(Decoder):
    """The first layer's Keys are read once more."""

    def forward(self, tokens: Tensor, start: Tensor, hidden: Tensor | None = None) -> Tensor:
        return super().forward(tokens, start, hidden) + self.caches[0].keys.mean()


class WithOwnState(Decoder):
    """Nothing is refused, but a cache is among what the graph returns."""

    def forward(self, tokens: Tensor, start: Tensor, hidden: Tensor | None = None) -> Any:
        return super().forward(tokens, start, hidden), self.caches[0].keys.shape[2] * 2


def test_a_graph_that_cannot_be_rewritten_whole_raises_before_anything_is_freed() -> None:
    model = SecondReader()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="(?s)'free_float_cache' is True.*Keys cache has another reader"):
        call(torch.compile(model, backend="kivi", options={"compiler": "eager", "free_float_cache": True}), 0)
    assert not freed(model) and not model.caches[0].keys.any()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="'free_float_cache' is True.*needs gradients"):
        model.requires_grad_(True)
        torch.compile(model, backend="kivi", options={"free_float_cache": True})(torch.zeros(2, 1, dtype=torch.int64), torch.tensor([0]))


def test_the_shape_of_a_freed_cache_may_be_asked_for() -> None:
    model, reference = WithOwnState(), WithOwnState()
    step = compiled(model, free_float_cache=True)
    for start in range(3):
        (actual, columns), (expected, _) = call(step, start), call(reference, start)
        assert_same(actual, expected, start)
        assert columns == 2 * CAPACITY
    assert freed(model)


def test_a_freed_cache_is_released_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()
    held = len(held_states())
    model, reference = Decoder(), Decoder()
    step = compiled(model, free_float_cache=True)
    with caplog.at_level(logging.INFO, logger="kivi_ops.passes"):
        call(step, 0, 5)
    total = sum(buffer.numel() * 4 for buffer in model.buffers_of_caches())
    assert any(re.search(rf"freed float caches of {total} bytes", record.getMessage()) for record in caplog.records)
    model.new_caches()
    gc.collect()
    assert len(held_states()) == held
    for start in range(3):
        assert_same(call(step, start), call(reference, start), start)
    assert freed(model)
