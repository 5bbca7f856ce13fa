"""``rewrite``: float caches out, states in, the same numbers as eager KIVI, whichever way the program was captured."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from export_models import CAPACITY, CONFIG, WIDTH, Attention, R, eager, grouped, index_copy, over_state, run, sdpa, setitem, slice_setitem
from export_models import step_inputs as inputs
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from kivi_ops import KiviConfig
from kivi_ops.export import rewrite
from kivi_ops.passes import last_report


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


SEALED = ("key_records", "value_records", "key_window", "value_window", "sealed", "length")  # what ``append`` changes


def capture(model: nn.Module, tokens: int = 5, dynamic: bool = True, strict: bool = False, decompose: bool = False) -> ExportedProgram:
    size = Dim("tokens", min=1, max=CAPACITY)
    shapes = ({1: size}, {2: size}, None) if dynamic else None
    program = torch.export.export(model, (*inputs(0, tokens), torch.tensor(0)), dynamic_shapes=shapes, strict=strict)
    return program.run_decompositions() if decompose else program


def names(program: ExportedProgram) -> list[str]:
    return [str(node.target.overloadpacket) for node in program.graph.nodes if hasattr(node.target, "overloadpacket")]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for step, pair in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5, msg=lambda text, step=step: f"call {step}: {text}")


@pytest.mark.parametrize("decompose", [False, True], ids=["training-ir", "decomposed"])
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("write", [index_copy, setitem], ids=["index_copy_", "setitem"])
def test_a_dynamic_program_gives_what_eager_kivi_gives(write: Any, strict: bool, decompose: bool) -> None:
    model = Attention(write)
    program = rewrite(capture(model, strict=strict, decompose=decompose), CONFIG, strict=True)
    program.validate()
    calls = [7] + [1] * (2 * R + 3) + [2]
    assert_same(run(program.module(), calls), run(over_state(model), calls))
    again = program.run_decompositions()
    assert set(again.graph_signature.buffers_to_mutate.values()) == {f"kivi_state.0.{name}" for name in SEALED}
    again.validate()


@pytest.mark.parametrize("decompose", [False, True], ids=["training-ir", "decomposed"])
@pytest.mark.parametrize("spell", [sdpa, eager, grouped])
def test_a_static_step_gives_what_eager_kivi_gives(spell: Any, decompose: bool) -> None:
    model = Attention(setitem, spell)
    program = rewrite(capture(model, 1, dynamic=False, decompose=decompose), CONFIG, strict=True)
    calls = [1] * (2 * R + 3)
    assert_same(run(program.module(), calls), run(over_state(model), calls))


@pytest.mark.parametrize("decompose", [False, True], ids=["training-ir", "decomposed"])
def test_a_start_that_is_a_python_integer(decompose: bool) -> None:
    model = Attention(slice_setitem)
    program = torch.export.export(model, (*inputs(0, 1), 3), dynamic_shapes=(None, None, Dim.DYNAMIC))
    program = rewrite(program.run_decompositions() if decompose else program, CONFIG, strict=True)
    calls = [1] * (2 * R + 3)
    assert_same(run(program.module(), calls, int), run(over_state(model), calls, int))


@pytest.mark.parametrize("seal", ["after_attention", "before_attention"])
def test_the_configuration_is_carried(seal: str) -> None:
    model, config = Attention(), KiviConfig(key_bits=4, value_bits=8, group_size=8, residual_length=8, seal=seal, rollback_margin=2)
    program = rewrite(capture(model), config, strict=True)
    calls = [9, 3] + [1] * 18
    assert_same(run(program.module(), calls), run(over_state(model, config), calls))


def test_signature_and_state_dict_hold_the_state_and_no_float_cache() -> None:
    model = Attention()
    source = capture(model)
    program = rewrite(source, CONFIG)
    weights = {name for name in model.state_dict() if not name.endswith("_cache")}
    state = {f"kivi_state.0.{name}" for name in (*SEALED, "left_padding")}
    assert set(program.state_dict) == set(program.graph_signature.buffers) | set(program.graph_signature.parameters) == weights | state
    assert not program.constants and all(not program.state_dict[name].count_nonzero() for name in state)
    assert all(program.state_dict[name].data_ptr() == model.state_dict()[name].data_ptr() for name in weights)
    assert all(tensor.shape[-2:] != (CAPACITY, 16) for tensor in program.state_dict.values())
    assert not {"aten.index_copy_", "aten.scaled_dot_product_attention"} & set(names(program))
    assert (names(program).count("kivi.attention"), names(program).count("kivi.append")) == (1, 1)
    assert "k_cache" in source.state_dict  # left as it was


def test_the_range_of_a_dynamic_length_is_kept() -> None:
    program = rewrite(capture(Attention()), CONFIG).module()
    start = torch.tensor(0)
    for tokens in (1, 2, CAPACITY):
        assert program(*inputs(0, tokens), start).shape == (2, tokens, WIDTH)
    x, mask = torch.zeros(2, CAPACITY + 1, WIDTH), torch.ones(2, 1, CAPACITY + 1, CAPACITY, dtype=torch.bool)
    with pytest.raises(Exception, match=str(CAPACITY)):
        program(x, mask, start)


def test_tokens_past_the_capacity_give_nan_until_a_rollback() -> None:
    program = rewrite(capture(Attention()), CONFIG).module()
    program(*inputs(0, CAPACITY - 1), torch.tensor(0))
    assert program(*inputs(CAPACITY - 1, 1), torch.tensor(CAPACITY - 1)).isfinite().all()
    assert program(*inputs(0, 1), torch.tensor(CAPACITY)).isnan().all()
    assert program(*inputs(0, 1), torch.tensor(3)).isfinite().all()


class Constants(nn.Module):
    """A model that holds its cache outside of its buffers, and counts its tokens: what transformers' StaticCache is to export."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()
        self.held = [self.inner._buffers.pop(name) for name in ("k_cache", "v_cache")] + [torch.tensor(0)]

    def forward(self, x: Tensor, mask: Tensor, unused: Tensor) -> Tensor:
        query, key, value = self.inner.project(x)
        keys, values, count = self.held
        columns = torch.arange(x.shape[1]) + count
        keys.index_copy_(2, columns, key)
        values.index_copy_(2, columns, value)
        count.add_(x.shape[1])
        return self.inner.merge(sdpa(query, keys, values, mask))


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_caches_that_were_lifted_as_constants(strict: bool) -> None:
    model = Constants()
    source = capture(model, strict=strict)
    assert len(source.constants) == 3
    program = rewrite(source, CONFIG, strict=True)
    assert not program.constants
    calls = [7] + [1] * (2 * R + 3)
    again = program.run_decompositions()
    assert_same(run(program.module(), calls), run(over_state(model.inner), calls))
    changed = set(again.graph_signature.buffers_to_mutate.values())
    (counter,) = changed - {f"kivi_state.0.{name}" for name in SEALED}
    assert counter.startswith("kivi_state.model.")


def test_a_cache_that_is_not_empty_is_refused() -> None:
    model = Attention()
    model.v_cache[0, 0, 0, 0] = 1.0
    with pytest.raises(ValueError, match="'v_cache' is not empty.*allowed: all zeros"):
        rewrite(capture(model), CONFIG)
    model = Constants()
    model.held[2].fill_(3)
    with pytest.raises(ValueError, match="which the program changes, is not zero"):
        rewrite(capture(model), CONFIG)


def without_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def test_a_refused_site_stays_float_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = Attention(spell=without_mask)
    source = capture(model)
    with caplog.at_level(logging.WARNING, "kivi_ops.passes"):
        program = rewrite(source, CONFIG)
    assert "has no mask" in caplog.text and len(last_report().refused) == 1
    calls = [3, 1, 1]
    assert_same(run(program.module(), calls), run(capture(Attention(spell=without_mask)).module(), calls))
    with pytest.raises(RuntimeError, match="(?s)'strict' is True.*has no mask"):
        rewrite(capture(Attention(spell=without_mask)), CONFIG, strict=True)


def test_a_rewritten_program_can_be_rewritten_again() -> None:
    model = Attention()
    program = rewrite(rewrite(capture(model), CONFIG), CONFIG)
    calls = [7, 1, 1]
    assert_same(run(program.module(), calls), run(over_state(model), calls))


class ToldColumns(Attention):
    """Writes its tokens to columns that an input names one by one, as ``input_pos`` does."""

    def forward(self, x: Tensor, mask: Tensor, columns: Tensor) -> Tensor:
        query, key, value = self.project(x)
        self.k_cache[:, :, columns] = key
        self.v_cache[:, :, columns] = value
        return self.merge(sdpa(query, self.k_cache, self.v_cache, mask))


def test_columns_that_nothing_shows_to_be_consecutive_are_refused_unless_there_is_one() -> None:
    several = torch.export.export(ToldColumns(), (*inputs(0, 3), torch.arange(3)))
    with pytest.raises(ValueError, match="cannot check that they follow one another; allowed: columns such as arange"):
        rewrite(several, CONFIG)
    one = rewrite(torch.export.export(ToldColumns(), (*inputs(0, 1), torch.arange(1))), CONFIG, strict=True)
    calls = [1] * (2 * R + 3)
    step = one.module()
    assert_same(run(lambda x, mask, start: step(x, mask, start[None]), calls), run(over_state(Attention()), calls))
