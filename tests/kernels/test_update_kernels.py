"""``update`` on the Triton kernels: append, and the float view of a step, bit-equal to the CPU implementation."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same_rows, poisoned_state, random_tokens, valid_rows
from twin import launch_update, tokens_held

from kivi_ops import KiviConfig, cpu

ORDERS = ["after_attention", "before_attention"]
FORMATS = {  # key bits, value bits, G, R, D_k, D_v, dtype, metadata
    "2x2-G4-D32-fp32": (2, 2, 4, 8, 32, 32, torch.float32, None),
    "4x2-G16-D100x80-fp16": (4, 2, 16, 16, 100, 80, torch.float16, torch.float32),
    "8x4-G8-D33x128-bf16": (8, 4, 8, 16, 33, 128, torch.bfloat16, None),
}


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("seal", ORDERS)
def test_views_and_state_equal_the_cpu(format: tuple, seal: str, device: str) -> None:
    """Prefill, decode, rollback, nothing new, and past the end; pads and unwritten columns are zeros, a lost row's Values NaN."""
    key_bits, value_bits, group, residual, key_dim, value_dim, dtype, metadata = format
    config = KiviConfig(key_bits, value_bits, group, residual, seal, metadata_dtype=metadata)
    capacity, padding = 3 * residual + 5, [0, 7]
    key, value = (random_tokens(2, 1, 60, dim, dtype, seed) for dim, seed in ((key_dim, 0), (value_dim, 1)))
    states = [poisoned_state(config, 2, 1, capacity, key_dim, value_dim, dtype, padding, where) for where in (device, "cpu")]
    kwargs = config.op_kwargs(capacity, dtype)
    for start, count in ((0, 5), (5, residual + 9), (residual + 14, 1), (residual + 3, 4), (residual + 7, 0), (2 * residual, residual + 6)):
        new = key[:, :, :count] + start, value[:, :, :count] - start
        actual = launch_update(states[0], *(x.to(device) for x in new), torch.tensor(start, device=device))
        expected = cpu.update(*new, *states[1].tensors().values(), torch.tensor(start), seal=seal, **kwargs)
        for a, e in zip(actual, expected, strict=True):
            assert a.is_contiguous() and a.dtype == dtype
            torch.testing.assert_close(a.cpu(), e, rtol=0, atol=0, equal_nan=True)
        assert states[0].length.item() == states[1].length.item()
        tokens = tokens_held(states[1], start + count)
        assert_same_rows(valid_rows(states[0], tokens), valid_rows(states[1], tokens))


@pytest.mark.parametrize("seal", ORDERS)
def test_rows_at_positions_of_their_own(seal: str, device: str) -> None:
    config = KiviConfig(group_size=4, residual_length=8, seal=seal)
    key, value = (random_tokens(3, 2, 30, 32, seed=seed) for seed in (0, 1))
    states = [poisoned_state(config, 3, 2, 32, 32, 32, torch.float32, [0, 2, 1], where) for where in (device, "cpu")]
    for starts, count in (([0, 0, 0], 21), ([21, 9, 0], 5), ([26, 14, 40], 3)):
        position = torch.tensor(starts)[:, None]
        new = key[:, :, :count] + starts[0], value[:, :, :count]
        actual = launch_update(states[0], *(x.to(device) for x in new), position.to(device))
        expected = cpu.update(*new, *states[1].tensors().values(), position, seal=seal, **config.op_kwargs(32, torch.float32))
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.cpu(), e, rtol=0, atol=0, equal_nan=True)


def test_no_rows(device: str) -> None:
    state = poisoned_state(KiviConfig(group_size=4, residual_length=8), 0, 2, 16, 32, 8, torch.float32, device=device)
    key, value = launch_update(state, *(torch.zeros(0, 2, 3, dim, device=device) for dim in (32, 8)), torch.tensor(0, device=device))
    assert key.shape == (0, 2, 16, 32) and value.shape == (0, 2, 16, 8)


@pytest.mark.gpu
@pytest.mark.slow
def test_offsets_beyond_two_to_the_31(device: str) -> None:
    """A view of more than 2^31 elements, from new tokens whose heads lie more than 2^31 elements apart: the last head must be right."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free memory")
    heads, capacity, dim, tokens = 17, 2**20, 128, 1000
    state = poisoned_state(KiviConfig(), 1, heads, capacity, dim, dim, torch.float16, device=device)
    apart = torch.empty((heads - 1) * 2**27 + tokens * dim, dtype=torch.float16, device=device)
    new = apart.as_strided((1, heads, tokens, dim), (0, 2**27, dim, 1))
    new.copy_(random_tokens(1, heads, tokens, dim, torch.float16))
    start = capacity - tokens
    state.sealed.fill_(start - 128)  # older tokens are poison, which no assertion reads
    views = launch_update(state, new, new, torch.tensor(start, device=device))
    for view in views:
        assert view.numel() > 2**31
        for head in (0, heads - 1):
            assert torch.equal(view[0, head, start:], new[0, head])
    again = launch_update(state, new[:, :, :0], new[:, :, :0], torch.tensor(capacity, device=device))
    for view in again:
        assert torch.equal(view[0, -1, -64:], new[0, -1, -64:]) or view is again[0]  # Values in the window are exact
    restored = again[0][0, -1, capacity - 128 :].float() - new[0, -1, -128:].float()
    assert restored.abs().max() < 1.5  # sealed at 2 bits: half a step of a range of about 6 sigma
