"""The worked numbers of the contract, sections 1 to 5, on the reference and on the CPU implementation."""

import pytest
import torch
from helpers import assert_close, assert_same_rows, poisoned_state, random_tokens, reference_of, reference_rows, valid_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from kivi_ops import KiviConfig, KiviState
from kivi_ops.kernels.layout import pack_bytes, record_layout
from kivi_ops.reference import (
    error_terms,
    held_bytes,
    ideal_bytes,
    mixed_attention,
    quantize_group,
    quantize_key,
    quantize_value,
    restore,
    restore_key,
    restore_value,
)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


# ------------------------------------------------------------------------------------------------------ 1. one group


def test_grid_of_minus_one_to_one_has_no_zero():
    _, scale, minimum = quantize_group(torch.tensor([-1.0, 1.0]), 2, F32)
    grid = restore(torch.arange(4, dtype=torch.uint8), scale, minimum)
    torch.testing.assert_close(grid, torch.tensor([-1.0, -1 / 3, 1 / 3, 1.0]))


def test_codes_of_100_to_103_and_their_byte():
    codes, scale, minimum = quantize_group(torch.tensor([100.0, 101, 102, 103]), 2, F16)
    assert codes.tolist() == [0, 1, 2, 3] and scale == 1 and minimum == 100
    assert pack_bytes(codes[None], 2).tolist() == [[0xE4]]


@pytest.mark.parametrize("constant", [5.0, 0.0, -0.0])
def test_constant_groups_are_exact(constant):
    codes, scale, minimum = quantize_group(torch.full((32,), constant), 2, F16)
    assert codes.eq(0).all() and scale == 1 and minimum == constant and not minimum.signbit()


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_group_of_one_ulp_stays_within_it(bits, dtype):
    low = torch.tensor(5.0, dtype=dtype)
    high = torch.nextafter(low, torch.tensor(6.0, dtype=dtype))
    x = torch.stack([low, high, low, high])
    restored = restore(*quantize_group(x, bits, dtype)).to(dtype)  # the scale is rounded, so only the rounded result is exact
    assert torch.equal(restored, x)


def bound(x, scale, minimum, bits, dtype):
    """Contract section 1: max(scale / 2, (2^b - 1) * max(u * scale, eta / 2) + |min - stored min|), in float64."""
    info = torch.finfo(dtype)
    stored, exact = minimum.double(), x.double().amin(-1)
    unit, smallest = info.eps / 2, info.smallest_normal * info.eps
    scale = scale.double()
    rounding = (2**bits - 1) * (unit * scale).clamp(min=smallest / 2) + (stored - exact).abs()
    return torch.maximum(scale / 2, rounding)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("metadata", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("spread, offset", [(1.0, 0.0), (1e-3, 5.0), (0.5, 600.0), (1e4, 0.0), (1e-7, 0.0), (1e-4, -600.0)])
def test_error_bound(bits, metadata, spread, offset):
    x = (torch.randn(64, 32, generator=torch.Generator().manual_seed(bits)) * spread + offset).to(metadata)
    codes, scale, minimum = quantize_group(x, bits, metadata)
    error = (restore(codes, scale[:, None], minimum[:, None]).double() - x.double()).abs()
    slack = 2**-23 * x.double().abs().amax(-1)  # the one multiply and one add in float32
    constant = codes.eq(0).all(-1) & (scale == 1)
    allowed = torch.where(constant, x.double().amax(-1) - x.double().amin(-1) + bound(x, scale, minimum, bits, metadata), 0.0)
    allowed = torch.maximum(allowed, bound(x, scale, minimum, bits, metadata)) + slack
    assert (error <= allowed[:, None]).all()


def test_range_of_130000_in_float16_is_finite():
    x = torch.tensor([-65504.0, 65504.0, 0.0, 1.0], dtype=F16)
    codes, scale, minimum = quantize_group(x, 2, F16)
    assert scale == 43680 and minimum == -65504  # 131008 / 3 = 43669.3, rounded to float16
    assert codes.tolist() == [0, 3, 1, 1]  # against the stored scale: 65504 / 43680 = 1.4997


def test_outlier_that_metadata_cannot_hold_is_clamped_not_inf():
    x = torch.tensor([0.0, 1.0, 2.0, 1.2e5], dtype=BF16)
    codes, scale, minimum = quantize_group(x, 2, F16)
    assert codes.tolist() == [0, 0, 0, 3] and minimum == 0 and scale == torch.tensor(65504 / 3).to(F16)
    _, scale, minimum = quantize_group(-x, 2, F16)
    assert minimum == -65504 and scale.isfinite()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_group_restores_to_nan(bad):
    x = torch.tensor([[1.0, 2.0, bad, 3.0], [1.0, 2.0, 3.0, 4.0]])
    codes, scale, minimum = quantize_group(x, 2, F16)
    restored = restore(codes, scale[:, None], minimum[:, None])
    assert restored[0].isnan().all() and torch.equal(restored[1], x[1])


@pytest.mark.parametrize("field", ["key_bits", "value_bits"])
@pytest.mark.parametrize("bits", [0, 1, 3, 5, 16])
def test_other_bits_are_refused(field, bits):
    with pytest.raises(ValueError, match=rf"{field} is {bits}; allowed: 2, 4, 8"):
        KiviConfig(**{field: bits})


@pytest.mark.parametrize(
    "choice, message",
    [
        ({"residual_length": 100}, r"residual_length is 100; allowed: a positive multiple of group_size \(32\)"),
        ({"residual_length": 0}, "residual_length is 0"),
        ({"group_size": 24}, "group_size is 24; allowed: a power of two"),
        ({"group_size": 1}, "group_size is 1"),
        ({"seal": "later"}, "seal is 'later'; allowed: 'after_attention', 'before_attention'"),
        ({"rollback_margin": -1}, "rollback_margin is -1"),
        ({"metadata_dtype": torch.float64}, "metadata_dtype is torch.float64"),
    ],
)
def test_bad_choices_are_named(choice, message):
    with pytest.raises(ValueError, match=message):
        KiviConfig(**choice)


@pytest.mark.parametrize("value", [2.0, "2", True, None])
def test_bits_of_another_type_are_refused(value):
    with pytest.raises(TypeError, match="key_bits must be an int"):
        KiviConfig(key_bits=value)


# --------------------------------------------------------------------------------------------------------- 2. axes

KEY = torch.tensor([[100, 0, 1, -1], [101, 1.5, 1.5, -0.5], [102, 0.5, 2, 0], [103, 1, 2.5, 0.5]])
VALUE = torch.tensor([[-100.0] * 4, [1, 0, 1, 0], [100.0] * 4, [0.0] * 4])


def test_keys_per_channel_are_exact_and_per_token_are_not():
    query = torch.tensor([0.0, 1, 0, 0])
    per_channel = restore_key(*quantize_key(KEY, 2, 4, F32), 4)
    per_token = restore_value(*quantize_value(KEY, 2, 4, F32), 4)
    assert torch.equal(per_channel, KEY)
    assert torch.equal(per_token[0], torch.tensor([100.0, -1, -1, -1]))
    assert (per_channel @ query).argmax() == 1 and (per_token @ query).argmax() == 3


def test_values_per_token_are_exact_and_per_channel_are_not():
    weights = torch.tensor([0.0, 1, 0, 0])
    per_token = restore_value(*quantize_value(VALUE, 2, 4, F32), 4)
    per_channel = restore_key(*quantize_key(VALUE, 2, 4, F32), 4)
    assert torch.equal(weights @ per_token, torch.tensor([1.0, 0, 1, 0]))
    torch.testing.assert_close(weights @ per_channel, torch.full((4,), 33.333), atol=1e-3, rtol=0)


@pytest.mark.parametrize("dim", [33, 80, 96, 100, 112])
def test_short_channel_group_is_not_moved_by_masked_lanes(dim):
    value = random_tokens(1, 1, 3, dim)[0, 0]
    _, _, minimum = quantize_value(value, 2, 32, F32)
    assert torch.equal(minimum[:, -1], value[:, dim // 32 * 32 :].amin(-1) if dim % 32 else value[:, -32:].amin(-1))


# ------------------------------------------------------------------------------------------------------ 3. windows


def history(config, tokens, chunks, dtype=F16, rows=1, heads=2, key_dim=8, value_dim=12, padding=None, seed=0, capacity=None):
    """A poisoned state and a reference after ``tokens`` columns handed over in ``chunks`` (repeated as needed)."""
    state = poisoned_state(config, rows, heads, capacity or tokens + 3, key_dim, value_dim, dtype, padding)
    reference = reference_of(state, padding)
    key = random_tokens(rows, heads, tokens, key_dim, dtype, seed)
    value = random_tokens(rows, heads, tokens, value_dim, dtype, seed + 1)
    start, turn = 0, 0
    while start < tokens:
        end = min(tokens, start + chunks[turn % len(chunks)])
        state.append(key[:, :, start:end], value[:, :, start:end], torch.tensor(start))
        reference.append(key[:, :, start:end], value[:, :, start:end], start)
        start, turn = end, turn + 1
    return state, reference


TRACE = {  # T: (K float in logits, K float kept, V float in output, V float kept), R = 4, G = 2
    3: (3, 3, 3, 3),
    4: (4, 0, 4, 4),
    5: (1, 1, 5, 4),
    8: (4, 0, 5, 4),
    9: (1, 1, 5, 4),
}
BEFORE_TRACE = {3: (3, 3, 3, 3), 4: (0, 0, 4, 4), 5: (1, 1, 4, 4), 8: (0, 0, 4, 4), 9: (1, 1, 4, 4)}  # attends over what is kept


@pytest.mark.parametrize("seal, trace", [("after_attention", TRACE), ("before_attention", BEFORE_TRACE)])
def test_trace_of_the_reference(seal, trace):
    config = KiviConfig(residual_length=4, group_size=2, seal=seal)
    reference = reference_of(KiviState.allocate(config, 1, 1, 16, 4, 4, F32))
    key, value = random_tokens(1, 1, 9, 4), random_tokens(1, 1, 9, 4, seed=1)
    for t in range(9):
        (view,) = reference.step(key[:, :, t : t + 1], value[:, :, t : t + 1], t)
        row = reference.rows[0]
        kept = row.tokens - row.sealed[0], row.tokens - row.sealed[1]
        if t + 1 in trace:
            assert (view.key_float.shape[1], kept[0], view.value_float.shape[1], kept[1]) == trace[t + 1]


@pytest.mark.parametrize("seal", ["after_attention", "before_attention"])
def test_trace_shows_in_what_update_returns(seal):
    """A token is float in a step exactly if ``update`` returns it unchanged: float16 grids hold none of these float32 values."""
    config = KiviConfig(residual_length=4, group_size=2, seal=seal, metadata_dtype=F16)
    trace = TRACE if seal == "after_attention" else BEFORE_TRACE
    state = poisoned_state(config, 1, 1, 16, 32, 32, F32)
    key, value = random_tokens(1, 1, 9, 32), random_tokens(1, 1, 9, 32, seed=1)
    for t in range(9):
        seen_key, seen_value = state.update(key[:, :, t : t + 1], value[:, :, t : t + 1], torch.tensor(t))
        if t + 1 in trace:
            key_float, key_kept, value_float, value_kept = trace[t + 1]
            for seen, given, floats in ((seen_key, key, key_float), (seen_value, value, value_float)):
                exact = (seen[0, 0, : t + 1] == given[0, 0, : t + 1]).all(-1)
                assert exact.tolist() == [False] * (t + 1 - floats) + [True] * floats
            assert (t + 1 - state.sealed).tolist() == [[key_kept, value_kept]]


@pytest.mark.parametrize("chunks", [(300,), (1,), (7,), (33,), (1, 7, 33, 64)], ids=str)
def test_state_does_not_depend_on_chunks(chunks):
    config = KiviConfig(residual_length=32, group_size=8)
    state, reference = history(config, 300, chunks)
    whole, _ = history(config, 300, (300,))
    assert state.sealed.tolist() == [[288, 268]]
    assert_same_rows(valid_rows(state, [300]), valid_rows(whole, [300]))
    assert_same_rows(valid_rows(state, [300]), reference_rows(reference))


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 300),
    chunks=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    group=st.sampled_from([2, 4, 8, 32]),
    groups=st.integers(1, 4),
    margin=st.sampled_from([0, 0, 3]),
    bits=st.tuples(st.sampled_from([2, 4, 8]), st.sampled_from([2, 4, 8])),
    dims=st.tuples(st.sampled_from([4, 33, 64, 80, 100, 128]), st.sampled_from([4, 33, 64, 80, 100, 128])),
    dtype=st.sampled_from([F16, BF16, F32]),
    padding=st.lists(st.integers(0, 40), min_size=1, max_size=3),
)
def test_any_chunking_gives_the_reference_state(tokens, chunks, group, groups, margin, bits, dims, dtype, padding):
    config = KiviConfig(*bits, group_size=group, residual_length=group * groups, rollback_margin=margin)
    rows = len(padding)
    state, reference = history(config, tokens, chunks, dtype, rows, 2, *dims, padding=padding)
    assert_same_rows(valid_rows(state, [max(0, tokens - p) for p in padding]), reference_rows(reference))


def test_padded_row_equals_its_own_run():
    config = KiviConfig(residual_length=32, group_size=8)
    key, value = random_tokens(3, 2, 100, 16, F16), random_tokens(3, 2, 100, 16, F16, seed=1)
    padding = [0, 5, 37]
    state = poisoned_state(config, 3, 2, 128, 16, 16, F16, padding)
    for start, end in ((0, 70), (70, 71), (71, 100)):
        state.append(key[:, :, start:end], value[:, :, start:end], torch.tensor(start))
    batch = valid_rows(state, [100 - p for p in padding])
    for b, pads in enumerate(padding):
        alone = poisoned_state(config, 1, 2, 128, 16, 16, F16)
        alone.append(key[b : b + 1, :, pads:], value[b : b + 1, :, pads:], torch.tensor(0))
        assert_same_rows(batch[b : b + 1], valid_rows(alone, [100 - pads]))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), margin=st.sampled_from([0, 2, 5]), group=st.sampled_from([2, 4]), groups=st.integers(1, 3))
def test_rollback_by_a_smaller_position(data, margin, group, groups):
    config = KiviConfig(group_size=group, residual_length=group * groups, rollback_margin=margin)
    state = poisoned_state(config, 2, 1, 80, 6, 6, F16, [0, 3])
    reference = reference_of(state, [0, 3])
    held = 0
    for turn in range(data.draw(st.integers(1, 8))):
        start = held - data.draw(st.integers(0, held))
        new = data.draw(st.integers(1, min(20, 80 - start)))
        key, value = random_tokens(2, 1, new, 6, F16, seed=2 * turn), random_tokens(2, 1, new, 6, F16, seed=2 * turn + 1)
        state.append(key, value, torch.tensor(start))
        reference.append(key, value, start)
        held = start + new
        assert_same_rows(valid_rows(state, [held, max(0, held - 3)]), reference_rows(reference))


def test_rollback_within_the_margin_leaves_no_trace():
    config = KiviConfig(group_size=4, residual_length=8, rollback_margin=5)
    key, value = random_tokens(1, 1, 60, 8, F16), random_tokens(1, 1, 60, 8, F16, seed=1)
    rejected = random_tokens(1, 1, 5, 8, F16, seed=9)
    straight = poisoned_state(config, 1, 1, 64, 8, 8, F16)
    straight.append(key, value, torch.tensor(0))
    state = poisoned_state(config, 1, 1, 64, 8, 8, F16)
    for t in range(60):
        state.append(key[:, :, t : t + 1], value[:, :, t : t + 1], torch.tensor(t))
        if t % 7 == 6 and t < 55:
            state.append(rejected, rejected, torch.tensor(t + 1))  # a draft of 5, then rejected: the next call starts at t + 1
    assert_same_rows(valid_rows(state, [60]), valid_rows(straight, [60]))


def test_count_says_how_many_are_valid():
    config = KiviConfig(residual_length=8, group_size=4)
    key, value = random_tokens(1, 1, 40, 8), random_tokens(1, 1, 40, 8, seed=1)
    counted, plain = (poisoned_state(config, 1, 1, 40, 8, 8, F32) for _ in range(2))
    counted.append(key, value, torch.tensor(0), torch.tensor(23))
    plain.append(key[:, :, :23], value[:, :, :23], torch.tensor(0))
    assert counted.length == 23
    assert_same_rows(valid_rows(counted, [23]), valid_rows(plain, [23]))


# -------------------------------------------------------------------------------------------------- 4. one softmax


def nine_tokens():
    logits = torch.tensor([0.0] * 8 + [9.0]).clamp(min=1).log()  # eight of 0 and one of ln 9
    key = logits[:, None]
    value = torch.arange(1.0, 10)[:, None]
    return torch.ones(1, 1), key, value


def test_one_softmax_over_both_parts():
    query, key, value = nine_tokens()
    output = mixed_attention(query, key[:8], key[8:], value[:4], value[4:], scale=1.0)
    torch.testing.assert_close(output.item(), 117 / 17)
    assert round(output.item(), 6) == 6.882353
    sealed, floats = (mixed_attention(query, k, k[:0], v, v[:0], scale=1.0) for k, v in ((key[:8], value[:8]), (key[8:], value[8:])))
    assert (sealed + floats).item() == pytest.approx(13.5)  # what two separate softmaxes would give


def test_cutting_values_at_the_key_boundary_is_an_error():
    query, key, value = nine_tokens()
    with pytest.raises(ValueError, match="the Key boundary must not cut the Values"):
        mixed_attention(query, key[:8], key[8:], value[:4], value[8:], scale=1.0)


def test_worked_softmax_through_the_operators():
    """The nine tokens through real state: R = 4, G = 2, Keys split 8 + 1 and Values 4 + 5; 8 bits hold these numbers exactly enough."""
    config = KiviConfig(8, 8, group_size=2, residual_length=4)
    query, key, value = nine_tokens()
    state = poisoned_state(config, 1, 1, 16, 1, 1, F32)
    state.append(key[None, None, :8], value[None, None, :8], torch.tensor(0))
    assert state.sealed.tolist() == [[8, 4]]
    output = state.attention(query[None, None], key[None, None, 8:], value[None, None, 8:], torch.tensor(8), scale=1.0)
    assert output.item() == pytest.approx(117 / 17, rel=1e-6)


def test_query_that_sees_nothing_gives_zero():
    x = torch.randn(3, 4)
    hidden = torch.full((3, 3), -torch.inf).tril(-1)
    hidden[1] = -torch.inf
    output = mixed_attention(x, x[:0], x, x[:0], x, bias=hidden.double())
    assert output[1].eq(0).all() and not output[0].eq(0).any()


def test_error_terms_add_up():
    query, key, value = (torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    key_hat, value_hat = key + 0.1, value - 0.2 * value.sign()
    key_term, value_term = error_terms(query, key, value, key_hat, value_hat)
    whole = mixed_attention(query, key_hat, key[..., :0, :], value_hat, value[..., :0, :]) - mixed_attention(
        query, key, key[..., :0, :], value, value[..., :0, :]
    )
    assert_close("key term + value term", key_term + value_term, whole, 1e-12)


# ------------------------------------------------------------------------------------------------------- 5. memory


def test_worked_memory():
    config = KiviConfig()
    assert ideal_bytes(config, 4096, 0, 128, 128, 128, F16) == 410 * 1024
    assert 2 * 4096 * 128 * 2 == 2 * 1024**2  # one KV head and row in float16
    sealed = ideal_bytes(config, 1, 0, 0, 128, 128, F16) * 8 / (2 * 128)
    assert sealed == 3.0  # bits an element: 5.33x smaller than 16, not 8x


@pytest.mark.parametrize("capacity", [50, 127, 128, 129, 4096, 5000])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (100, 80), (33, 256)], ids=str)
@pytest.mark.parametrize(
    "config", [KiviConfig(), KiviConfig(4, 8, 64, 64, rollback_margin=6), KiviConfig(8, 2, metadata_dtype=F32)], ids=str
)
def test_held_bytes_are_the_formula(capacity, dims, config):
    rows, heads = 3, 2
    state = KiviState.allocate(config, rows, heads, capacity, *dims, F16)
    records = (state.key_layout.tokens, state.value_layout.tokens)
    formula = rows * heads * held_bytes(config, capacity, *records, *dims, F16)
    assert 0 <= state.held_bytes() - formula <= 64 * rows


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_held_bytes_are_within_5_percent_of_the_ideal(bits, dim):
    config = KiviConfig(bits, bits)
    for capacity in (4096, 5000, 32768):
        layout = record_layout("key", dim, bits, 32, F16)
        held = held_bytes(config, capacity, layout.tokens, layout.tokens, dim, dim, F16)
        assert held <= 1.05 * ideal_bytes(config, capacity, 128, 128, dim, dim, F16)
