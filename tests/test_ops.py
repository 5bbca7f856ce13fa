"""The operators as PyTorch sees them: opcheck, fakes, errors; and as the contract sees them: attention and update against the reference.

Runs on the CPU and, marked ``gpu``, on CUDA with the Triton kernels.
"""

import itertools

import pytest
import torch
from helpers import (
    ATTENTION_TOLERANCE,
    assert_close,
    assert_same_rows,
    poisoned_state,
    random_tokens,
    reference_of,
    reference_rows,
    valid_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from kivi_ops import KiviConfig, KiviState

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = KiviConfig(group_size=4, residual_length=8)


def layouts(x):
    """The same values contiguous, transposed, as every second element of a wider tensor, and with expanded heads."""
    yield "contiguous", x
    yield "transposed", x.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.stack([x, torch.full_like(x, float("nan"))], -1).flatten(-2)
    yield "sliced", wide[..., ::2]
    yield "expanded", x[:, :1].expand_as(x)


LAYOUTS = ["contiguous", "transposed", "sliced", "expanded"]


def in_layout(x, layout):
    return dict(layouts(x))[layout]


def filled_state(device="cpu", dtype=F32, tokens=21, rows=2, heads=2, capacity=40, dims=(8, 12), config=CONFIG, padding=(0, 3)):
    state = poisoned_state(config, rows, heads, capacity, *dims, dtype, padding[:rows], device)
    if tokens:
        key = random_tokens(rows, heads, tokens, dims[0], dtype, 0, device)
        value = random_tokens(rows, heads, tokens, dims[1], dtype, 1, device)
        state.append(key, value, torch.tensor(0, device=device))
    return state


def step_inputs(device="cpu", dtype=F32, new=3, rows=2, heads=2, query_heads=4, dims=(8, 12), seed=5):
    query = random_tokens(rows, query_heads, new, dims[0], dtype, seed, device) - 5
    return (
        query,
        random_tokens(rows, heads, new, dims[0], dtype, seed + 1, device),
        random_tokens(rows, heads, new, dims[1], dtype, seed + 2, device),
    )


def arguments(op, state, query, key, value, position, mask=None):
    """(args, kwargs) of a call of ``op`` on ``state``."""
    tensors = list(state.tensors().values())
    config, (capacity, dtype) = state.config, (state.capacity, state.dtype)
    if op == "attention":
        return (query, key, value, *tensors[:-1], position, mask), {**config.read_kwargs(capacity, dtype), "seal": config.seal}
    kwargs = config.op_kwargs(capacity, dtype)
    return (key, value, *tensors, position), {**kwargs, "seal": config.seal} if op == "update" else kwargs


# ------------------------------------------------------------------------------------------------------- PyTorch's view


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["attention", "append", "update"])
def test_opcheck_of_state_operators(op, layout, device):
    query, key, value = (in_layout(x, layout) for x in step_inputs(device))
    mask = torch.ones(2, 1, 3, 40, dtype=torch.bool, device=device).tril(21)
    args, kwargs = arguments(op, filled_state(device), query, key, value, torch.tensor([[21], [21]], device=device), mask)
    torch.library.opcheck(getattr(torch.ops.kivi, op).default, args, kwargs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_opcheck_of_quantisers(bits, layout, device):
    x = in_layout(random_tokens(2, 2, 11, 20, F16, device=device), layout)
    for role in ("key", "value"):
        quantize = getattr(torch.ops.kivi, f"quantize_pack_{role}").default
        torch.library.opcheck(quantize, (x, bits, 8))
        codes, scale, minimum = quantize(x, bits, 8, F32)
        restore = getattr(torch.ops.kivi, f"unpack_dequantize_{role}").default
        torch.library.opcheck(restore, (codes, scale, minimum, bits, 8, 20, F16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", ["none", "2-D", "4-D", "float"])
def test_opcheck_of_observe_padding(mask, device):
    padding = torch.zeros(3, dtype=torch.int32, device=device)
    visible = torch.arange(6, device=device) >= torch.tensor([0, 2, 6], device=device)[:, None]
    masks = {
        "none": None,
        "2-D": visible.long(),
        "4-D": visible[:, None, None],
        "float": torch.where(visible, 0.0, -torch.inf)[:, None, None],
    }
    torch.library.opcheck(torch.ops.kivi.observe_padding.default, (padding, masks[mask], torch.tensor(0, device=device), 4))


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_of_read_length(device):
    torch.library.opcheck(torch.ops.kivi.read_length.default, (torch.tensor(3, device=device),))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seal", ["after_attention", "before_attention"])
def test_the_live_length_as_position_is_read_before_it_is_written(seal, device):
    """Inductor drops a clone and hands the operators one tensor as both."""
    config = KiviConfig(group_size=4, residual_length=8, seal=seal)
    plain, aliased = (filled_state(device, config=config) for _ in range(2))
    _, key, value = step_inputs(device)
    expected = plain.update(key, value, torch.tensor(21, device=device))
    for actual, wanted in zip(aliased.update(key, value, aliased.length), expected, strict=True):
        assert torch.equal(actual, wanted)
    plain.append(key, value, torch.tensor(24, device=device))
    aliased.append(key, value, aliased.length)
    assert aliased.length == plain.length == 27
    assert_same_rows(valid_rows(aliased, [27, 24]), valid_rows(plain, [27, 24]))


def all_calls(device, layout):
    """Every operator once, as (name, overload, args, kwargs)."""
    state = filled_state(device)
    query, key, value = (in_layout(x, layout) for x in step_inputs(device))
    position = torch.tensor(21, device=device)
    for op in ("attention", "append", "update"):
        yield op, getattr(torch.ops.kivi, op).default, *arguments(op, state, query, key, value, position)
    yield "read_length", torch.ops.kivi.read_length.default, (state.length,), {}
    for role in ("key", "value"):
        x = in_layout(random_tokens(2, 2, 9, 20, F16, device=device), layout)
        quantize, restore = (getattr(torch.ops.kivi, f"{name}_{role}").default for name in ("quantize_pack", "unpack_dequantize"))
        yield f"quantize_pack_{role}", quantize, (x, 2, 8), {}
        yield f"unpack_dequantize_{role}", restore, (*quantize(x, 2, 8), 2, 8, 20, F16), {}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_strides_are_the_real_ones(layout, device):
    """opcheck's clones make inputs dense, so the layouts meet fake and real outputs here directly."""
    for name, op, args, kwargs in all_calls(device, layout):
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
            fake = op(*fakes, **kwargs)
        real = op(*args, **kwargs)
        for f, r in zip(*(x if isinstance(x, (tuple, list)) else [x] for x in (fake, real)), strict=True):
            if r is not None:
                assert (f.shape, f.stride(), f.dtype, f.device) == (r.shape, r.stride(), r.dtype, r.device), name


def test_fakes_add_no_guard_on_symbolic_sizes():
    for name, op, args, kwargs in all_calls("cpu", "contiguous"):
        env = ShapeEnv()
        with FakeTensorMode(shape_env=env) as mode:

            def symbolic(x, mode=mode):
                if not isinstance(x, torch.Tensor):
                    return x
                context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * x.dim())
                return mode.from_tensor(x, symbolic_context=context, source=torch._dynamo.source.ConstantSource(f"x{id(x)}"))

            fakes = [symbolic(x) for x in args]
            before = len(env.guards)
            op(*fakes, **kwargs)
            assert len(env.guards) == before, (name, env.guards[before:])


def test_schemas_declare_exactly_what_is_written():
    written = {"key_records", "value_records", "key_window", "value_window", "sealed", "length"}
    for op, mutated in (("append", written), ("update", written), ("attention", set()), ("observe_padding", {"left_padding"})):
        schema = getattr(torch.ops.kivi, op).default._schema
        assert {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write} == mutated


# -------------------------------------------------------------------------------------------------- attention's numbers


def masks(rows, heads, new, capacity, kind, seed=0):
    generator = torch.Generator().manual_seed(seed)
    visible = torch.rand(rows, heads, new, capacity, generator=generator) > 0.3
    return {
        "none": None,
        "causal": None,
        "bool": visible[:, :1],
        "bool per head": visible,
        "float": torch.randn(1, 1, new, capacity, generator=generator).masked_fill(~visible[:1, :1], -torch.inf),
        "one wide": visible[:, :1, :, :1],
        "short": visible[:, :1, :, : capacity // 2],
        "one row": visible[:1, :1, :1],
    }[kind]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("seal", ["after_attention", "before_attention"])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "bool per head", "float", "one wide", "short", "one row"])
def test_attention_equals_the_reference(kind, seal, dtype, device):
    config = KiviConfig(2, 4, group_size=4, residual_length=8, seal=seal)
    padding = [0, 3, 30]
    state = poisoned_state(config, 3, 2, 64, 8, 12, dtype, padding, device)
    reference = reference_of(state, padding)
    start = 0
    for turn, new in enumerate((21, 1, 4, 1, 1, 17)):
        query, key, value = step_inputs("cpu", dtype, new, rows=3, seed=10 * turn)
        mask = masks(3, 4, new, 64, kind, turn)
        expected = reference.attend(query, key, value, start, mask, kind == "causal", scale=0.3)
        on = lambda x: x if x is None else x.to(device)  # noqa: E731
        actual = state.step(
            on(query), on(key), on(value), torch.tensor(start, device=device), attn_mask=on(mask), is_causal=kind == "causal", scale=0.3
        )
        assert actual.dtype == dtype
        assert_close(f"step {turn}", actual, expected, ATTENTION_TOLERANCE[dtype])
        assert_same_rows(valid_rows(state, [max(0, start + new - p) for p in padding]), reference_rows(reference))
        start += new


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=30, deadline=None)
@given(
    dims=st.tuples(st.integers(32, 256), st.integers(32, 256)),
    bits=st.tuples(st.sampled_from([2, 4, 8]), st.sampled_from([2, 4, 8])),
    group=st.sampled_from([4, 16, 32, 64]),
    groups=st.integers(1, 4),
    heads=st.integers(1, 3),
    repeats=st.integers(1, 5),
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=3),
    new=st.integers(0, 9),
    dtype=st.sampled_from([F32, F16, BF16]),
    seal=st.sampled_from(["after_attention", "before_attention"]),
    softcap=st.sampled_from([None, 7.0]),
    causal=st.booleans(),
)
def test_any_shape_equals_the_reference(device, dims, bits, group, groups, heads, repeats, lengths, new, dtype, seal, softcap, causal):
    config = KiviConfig(*bits, group_size=group, residual_length=group * groups, seal=seal)
    rows = len(lengths)
    state = poisoned_state(config, rows, heads, 160, *dims, dtype, device=device)
    reference = reference_of(state)
    if max(lengths):  # all rows alike; those with a smaller length are rolled back to it by the step itself
        key, value = (random_tokens(rows, heads, max(lengths), d, dtype, s) for d, s in zip(dims, (0, 50), strict=True))
        state.append(key.to(device), value.to(device), torch.tensor(0, device=device))
        reference.append(key, value, 0)
    query, key, value = step_inputs("cpu", dtype, new, rows, heads, heads * repeats, dims)
    position = torch.tensor(lengths)[:, None]
    if new:
        expected = reference.attend(query, key, value, lengths, None, causal, softcap=softcap)
    actual = state.step(query.to(device), key.to(device), value.to(device), position.to(device), is_causal=causal, softcap=softcap)
    assert actual.shape == (rows, heads * repeats, new, dims[1])
    if new:
        assert_close("attention", actual, expected, ATTENTION_TOLERANCE[dtype])
        assert_same_rows(valid_rows(state, [n + new for n in lengths]), reference_rows(reference))
        assert state.length == max(lengths) + new


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_inputs_changes_nothing(layout, device):
    position = torch.tensor(21, device=device)
    query, key, value = step_inputs(device, dtype=F16)
    plain, other = (filled_state(device, F16) for _ in range(2))
    given = [in_layout(x, layout) for x in (query, key, value)]
    expected = plain.step(*(x.contiguous() for x in given), position)
    actual = other.step(*given, position)
    assert torch.equal(actual, expected)
    assert_same_rows(valid_rows(other, [24, 21]), valid_rows(plain, [24, 21]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "form", [lambda t: t, lambda t: t[None], lambda t: t + torch.arange(3, device=t.device), lambda t: t.expand(2, 1).clone(),
             lambda t: (t + torch.arange(3, device=t.device)).expand(2, 3), lambda t: t.to(torch.int32), lambda t: t.view(1, 1)],
    ids=["[]", "[1]", "[S]", "[B, 1]", "[B, S]", "int32", "[1, 1]"],
)  # fmt: skip
def test_every_form_of_position(form, device):
    plain, other = (filled_state(device) for _ in range(2))
    position = torch.tensor(21, device=device)
    expected = plain.step(*step_inputs(device), position)
    assert torch.equal(other.step(*step_inputs(device), form(position)), expected)
    assert other.length == 24


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("age", ["sealed", "window", "this step"])
def test_nan_shows(where, age, device):
    """Sealed, windowed or new: a NaN token shows in every query that sees it, in its KV head only."""
    state = filled_state(device, tokens=0, padding=(0, 0))
    key, value = random_tokens(2, 2, 30, 8, device=device), random_tokens(2, 2, 30, 12, seed=1, device=device)
    token = {"sealed": 4, "window": 28, "this step": 29}[age]
    {"key": key, "value": value}[where][0, 1, token, 3] = float("nan")
    state.append(key[:, :, :29], value[:, :, :29], torch.tensor(0, device=device))
    query = random_tokens(2, 4, 1, 8, device=device)
    output = state.attention(query, key[:, :, 29:], value[:, :, 29:], torch.tensor(29, device=device))
    shown = output.isnan().any(-1)[..., 0]
    assert shown.tolist() == [[False, False, True, True], [False] * 4]


@pytest.mark.parametrize("device", DEVICES)
def test_pad_tokens_of_nan_change_nothing(device):
    padding = [0, 6]
    clean, dirty = (poisoned_state(CONFIG, 2, 2, 40, 8, 12, F32, padding, device) for _ in range(2))
    start = 0
    for turn, new in enumerate((4, 20, 1)):  # the first chunk of row 1 is all pads
        query, key, value = step_inputs(device, new=new, seed=turn)
        pads = torch.arange(start, start + new, device=device) < torch.tensor(padding, device=device)[:, None]
        bad = [x.masked_fill(pads[:, None, :, None], float("nan")) for x in (query, key, value)]
        expected = clean.step(query, key, value, torch.tensor(start, device=device), is_causal=True)
        actual = dirty.step(bad[0], *bad[1:], torch.tensor(start, device=device), is_causal=True)
        real = ~pads[:, None, :, None].expand_as(actual)
        assert torch.equal(actual[real], expected[real])
        start += new
    assert_same_rows(valid_rows(dirty, [25, 19]), valid_rows(clean, [25, 19]))


# ------------------------------------------------------------------------------------------------------------- update


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("seal", ["after_attention", "before_attention"])
def test_update_returns_the_view(seal, dtype, device):
    config = KiviConfig(2, 4, group_size=4, residual_length=8, seal=seal, rollback_margin=2)
    padding = [0, 5, 30]
    state = poisoned_state(config, 3, 2, 64, 8, 12, dtype, padding, device)
    reference = reference_of(state, padding)
    start = 0
    for turn, new in enumerate((21, 1, 4, 1, 1, 30)):
        _, key, value = step_inputs("cpu", dtype, new, rows=3, seed=10 * turn)
        views = reference.step(key, value, start)
        seen = state.update(key.to(device), value.to(device), torch.tensor(start, device=device))
        for b, view in enumerate(views):
            for actual, expected in zip(seen, (view.key(), view.value()), strict=True):
                whole = torch.zeros(actual.shape[1:], dtype=torch.float64)
                whole[:, padding[b] : padding[b] + expected.shape[1]] = expected
                assert torch.equal(actual[b].cpu(), whole.to(dtype)), (turn, b)
        start += new
        assert_same_rows(valid_rows(state, [max(0, start - p) for p in padding]), reference_rows(reference))


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_and_no_tokens_do_nothing(device):
    state = filled_state(device)
    before = {name: x.clone() for name, x in state.tensors().items()}
    query, key, value = step_inputs(device, new=0)
    assert state.step(query, key, value, torch.tensor(7, device=device)).shape == (2, 4, 0, 12)
    views = state.update(key, value, torch.tensor(21, device=device))
    assert [list(x.shape) for x in views] == [[2, 2, 40, 8], [2, 2, 40, 12]]
    for name, x in state.tensors().items():
        assert torch.equal(
            x.view(torch.uint8) if x.dtype.is_floating_point else x,
            before[name].view(torch.uint8) if x.dtype.is_floating_point else before[name],
        ), name
    empty = KiviState.allocate(CONFIG, 0, 2, 40, 8, 12, F32, device)
    query, key, value = step_inputs(device, rows=0)
    assert empty.step(query, key, value, torch.tensor(0, device=device)).shape == (0, 4, 3, 12)
    assert empty.update(key, value, torch.tensor(0, device=device))[0].shape == (0, 2, 40, 8)


# ----------------------------------------------------------------------------------------------------------- capacity


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seal", ["after_attention", "before_attention"])
def test_past_the_capacity_is_dropped_and_shows_as_nan(seal, device):
    """Row 0 passes the end, row 1 does not; later steps stay NaN until a rollback below the capacity."""
    config = KiviConfig(group_size=4, residual_length=8, seal=seal)
    state = poisoned_state(config, 2, 2, 32, 8, 12, F32, (0, 0), device)
    reference = reference_of(state)
    at = lambda *rows: torch.tensor(rows, device=device)[:, None]  # noqa: E731
    for turn, (starts, new) in enumerate([((0, 0), 30), ((30, 10), 4), ((34, 14), 1), ((20, 15), 2)]):
        query, key, value = step_inputs("cpu", new=new, seed=turn)
        expected = reference.attend(query, key, value, list(starts))
        actual = state.step(query.to(device), key.to(device), value.to(device), at(*starts))
        passed = [start + new > 32 for start in starts]
        assert [row.isnan().all().item() for row in actual] == passed == [row.isnan().any().item() for row in actual]
        assert_close("attention", actual, expected, 1e-5)
        assert state.length == max(starts) + new
        assert_same_rows(valid_rows(state, [row.tokens for row in reference.rows]), reference_rows(reference))
    guard = KiviState.allocate(config, 1, 1, 8, 4, 4, F32, device)
    seen = guard.update(*(random_tokens(1, 1, 9, 4, device=device) for _ in range(2)), torch.tensor(0, device=device))
    assert seen[1].isnan().all() and guard.length == 9


# ----------------------------------------------------------------------------------------------------- observe_padding


@pytest.mark.parametrize("device", DEVICES)
def test_padding_is_learnt_while_a_row_is_empty_and_frozen_after(device):
    padding = torch.tensor([9, 9, 9], dtype=torch.int32, device=device)
    visible = (torch.arange(12, device=device) >= torch.tensor([0, 2, 7], device=device)[:, None])[:, None, None]

    def observe(mask, start, new):
        torch.ops.kivi.observe_padding(padding, mask, torch.tensor(start, device=device), new)
        return padding.tolist()

    assert observe(visible, 0, 4) == [0, 2, 4]  # row 2 sees nothing yet: still empty, all of this call is padding
    assert observe(visible, 4, 4) == [0, 2, 7]
    assert observe(~visible, 8, 4) == [0, 2, 7]  # rows hold tokens: frozen
    assert observe(None, 8, 1) == [0, 2, 7]
    assert observe(None, 0, 4) == [0, 0, 0]  # position 0 again: empty, and no mask means no padding


@pytest.mark.parametrize("device", DEVICES)
def test_padding_is_the_first_column_that_any_query_sees(device):
    """Under a sliding window the first visible column moves from query to query (and differs from head to head)."""
    columns = torch.arange(10, device=device)
    window = (columns <= columns[:, None]) & (columns > columns[:, None] - 3) & (columns >= 2)
    for mask in (window[None, None], torch.where(window, 0.0, torch.finfo(F32).min)[None, None]):
        padding = torch.zeros(1, dtype=torch.int32, device=device)
        torch.ops.kivi.observe_padding(padding, mask, torch.tensor(0, device=device), 10)
        assert padding.tolist() == [2]


# ------------------------------------------------------------------------------------------------------------- errors


def snapshot(state):
    return {name: (x.data_ptr(), x.clone().cpu().contiguous().flatten().view(torch.uint8)) for name, x in state.tensors().items()}


BAD = {
    "wrong dtype": (lambda s, q, k, v, p: (q, k.half(), v, p), TypeError, "key is torch.float16; allowed: torch.float32"),
    "wrong heads": (lambda s, q, k, v, p: (q, k[:, :1], v, p), ValueError, r"key has shape \[2, 1, 3, 8\]; allowed: \[2, 2, S, 8\]"),
    "wrong head size": (
        lambda s, q, k, v, p: (q, k, v[..., :4], p),
        ValueError,
        r"value has shape \[2, 2, 3, 4\]; allowed: \[2, 2, S, 12\]",
    ),
    "smaller batch": (
        lambda s, q, k, v, p: (q[:1], k[:1], v[:1], p),
        ValueError,
        "key has 1 rows but the state has 2; select the state's rows first",
    ),
    "key and value lengths": (lambda s, q, k, v, p: (q, k, v[:, :, :2], p), ValueError, "key has 3 new tokens and value 2"),
    "3-D key": (lambda s, q, k, v, p: (q, k[0], v, p), ValueError, r"key has shape \[2, 3, 8\]; allowed: \[B, H, S, D\]"),
    "float position": (
        lambda s, q, k, v, p: (q, k, v, p.float()),
        TypeError,
        "position is torch.float32; allowed: torch.int32, torch.int64",
    ),
    "1-D position for rows": (
        lambda s, q, k, v, p: (q, k, v, p.expand(2)),
        ValueError,
        r"position has shape \[2\]; allowed: \[\], \[1\], \[3\]",
    ),
    "needs grad": (lambda s, q, k, v, p: (q, k.requires_grad_(), v, p), RuntimeError, "key requires grad; call it under torch.no_grad"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", ["attention", "append", "update"])
@pytest.mark.parametrize("bad", BAD)
def test_bad_call_is_one_error_and_changes_nothing(bad, op, device):
    change, error, message = BAD[bad]
    state = filled_state(device)
    before = snapshot(state)
    query, key, value, position = change(state, *step_inputs(device), torch.tensor(21, device=device))
    args, kwargs = arguments(op, state, query, key, value, position)
    with pytest.raises(error, match=f"kivi::{op}.*{message}"):
        getattr(torch.ops.kivi, op)(*args, **kwargs)
    for name, (pointer, content) in snapshot(state).items():
        assert pointer == before[name][0] and torch.equal(content, before[name][1]), name


def replaced(args, old, new):
    return tuple(new if x is old else x for x in args)


@pytest.mark.parametrize("op", ["attention", "append", "update"])
def test_state_that_overlaps_is_refused(op):
    state = filled_state()
    args, kwargs = arguments(op, state, *step_inputs(), torch.tensor(21))
    call = getattr(torch.ops.kivi, op)
    expanded = state.key_window[:, :1].expand_as(state.key_window)
    with pytest.raises(ValueError, match="key_window has strides .* allowed: a contiguous tensor"):
        call(*replaced(args, state.key_window, expanded), **kwargs)
    pool = torch.zeros(3, *state.sealed.shape, dtype=torch.int32).flatten()
    padding, sealed = pool[1:3], pool[:4].view(2, 2)
    with pytest.raises(ValueError, match="sealed and left_padding overlap in memory"):
        call(*replaced(replaced(args, state.sealed, sealed), state.left_padding, padding), **kwargs)


@pytest.mark.parametrize("op", ["attention", "append", "update"])
@pytest.mark.parametrize(
    "choice, message",
    [
        ({"key_bits": 3}, "key_bits is 3; allowed: 2, 4, 8"),
        ({"key_bits": 4}, r"key_records is torch.int16 .*; allowed: torch.int16 \[2, 2"),
        ({"group_size": 5}, "group_size is 5; allowed: a power of two"),
        ({"capacity": 0}, "capacity is 0; allowed: 1 or more"),
        ({"capacity": 4000}, "key_records is torch.int16"),
        ({"metadata_dtype": torch.float64}, "metadata_dtype is torch.float64; allowed"),
        ({"residual_length": 9}, "residual_length is 9; allowed: a positive multiple"),
        ({"rollback_margin": -2}, "rollback_margin is -2; allowed"),
        ({"seal": "later"}, "seal is 'later'; allowed: after_attention, before_attention"),
    ],
)
def test_bad_format_is_one_error(op, choice, message):
    args, kwargs = arguments(op, filled_state(), *step_inputs(), torch.tensor(21))
    if set(choice) <= set(kwargs):
        with pytest.raises(ValueError, match=message):
            getattr(torch.ops.kivi, op)(*args, **{**kwargs, **choice})


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"attn_mask": torch.ones(2, 1, 3, 2) > 0}, ValueError, r"attn_mask is 2 columns wide; allowed: 1, or 3 \(the new tokens\) to 40"),
        ({"attn_mask": torch.ones(2, 1, 3, 41) > 0}, ValueError, "attn_mask is 41 columns wide"),
        ({"attn_mask": torch.ones(3, 40) > 0}, ValueError, r"attn_mask has shape \[3, 40\]; allowed: broadcastable to \[2, 4, 3, col"),
        ({"attn_mask": torch.ones(2, 1, 3, 40).long()}, TypeError, "attn_mask is torch.int64; allowed: torch.bool or a float dtype"),
        ({"attn_mask": torch.ones(2, 1, 3, 40, dtype=torch.bool), "is_causal": True}, ValueError, "is_causal is True with an attn_mask"),
        ({"softcap": 0.0}, ValueError, "softcap is 0.0; allowed: None or a positive number"),
    ],
)  # fmt: skip
def test_bad_attention_options(options, error, message):
    with pytest.raises(error, match=message):
        filled_state().attention(*step_inputs(), torch.tensor(21), **options)


@pytest.mark.parametrize("heads", [0, 3, 5])
def test_query_heads_must_be_a_multiple(heads):
    query, key, value = step_inputs(query_heads=heads)
    with pytest.raises(ValueError, match="query has shape .* allowed: .*a multiple of 2"):
        filled_state().attention(query, key, value, torch.tensor(21))


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["attention", "append", "update"])
def test_mixed_devices_are_refused(op):
    state = filled_state("cuda")
    query, key, value = step_inputs("cuda")
    args, kwargs = arguments(op, state, query, key, value, torch.tensor(21))
    with pytest.raises(ValueError, match="position is on cpu; allowed: cuda:0"):
        getattr(torch.ops.kivi, op)(*args, **kwargs)


def test_quantisers_name_what_is_wrong():
    ops, x = torch.ops.kivi, torch.randn(1, 1, 8, 8)
    with pytest.raises(ValueError, match="key_bits is 1; allowed: 2, 4, 8"):
        ops.quantize_pack_key(x, 1, 8)
    with pytest.raises(TypeError, match="value is torch.float64"):
        ops.quantize_pack_value(x.double(), 2, 8)
    with pytest.raises(RuntimeError, match="key requires grad"):
        ops.quantize_pack_key(x.clone().requires_grad_(), 2, 8)
    codes, scale, minimum = ops.quantize_pack_key(x, 2, 8)
    with pytest.raises(ValueError, match=r"codes is torch.uint8 \[1, 1, 8, 2\]; allowed: uint8 \[..., T, 4\]"):
        ops.unpack_dequantize_key(codes, scale, minimum, 4, 8, 8, F32)
    with pytest.raises(ValueError, match=r"scale is torch.float32 \[1, 1, 1, 8\]; allowed: torch.float32 \[1, 1, 2, 8\]"):
        ops.unpack_dequantize_key(codes, scale, minimum, 2, 4, 8, F32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens, dim", list(itertools.product([0, 1, 5, 32, 70], [1, 8, 33])))
def test_quantisers_round_trip(tokens, dim, device):
    """Two-level data is lossless at any bits and length, short edge groups included."""
    x = torch.randint(0, 2, (2, 1, tokens, dim), generator=torch.Generator().manual_seed(0)).to(F16).to(device)
    for role, bits in itertools.product(("key", "value"), (2, 4, 8)):
        codes, scale, minimum = getattr(torch.ops.kivi, f"quantize_pack_{role}")(x, bits, 32, F32)
        again = getattr(torch.ops.kivi, f"unpack_dequantize_{role}")(codes, scale, minimum, bits, 32, dim, F16)
        assert torch.equal(again, x), (role, bits)
