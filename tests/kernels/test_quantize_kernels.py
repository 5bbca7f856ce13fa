"""Contract sections 1 and 2 for the Triton kernels: bit-equal to the reference, short edges and every dtype included."""

from __future__ import annotations

import pytest
import torch
from helpers import bits_of, random_tokens
from torch import Tensor

from kivi_ops import cpu
from kivi_ops.kernels import launch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def assert_as_cpu(role: str, x: Tensor, bits: int, group_size: int, metadata: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Quantise and restore on ``device`` and on the CPU; everything must be the same bits. Returns the device's codes, scale, min."""
    on_device = x if x.device.type == device else x.to(device)
    expected = getattr(cpu, f"quantize_pack_{role}")(x.cpu(), bits, group_size, metadata)
    actual = getattr(launch, f"quantize_pack_{role}")(on_device, bits, group_size, metadata)
    for name, a, e in zip(("codes", "scale", "min"), actual, expected, strict=True):
        assert a.shape == e.shape and a.dtype == e.dtype and a.is_contiguous(), name
        assert torch.equal(bits_of(a.cpu()), bits_of(e)), name
    for dtype in {x.dtype, torch.float32}:
        restored = getattr(launch, f"unpack_dequantize_{role}")(*actual, bits, group_size, x.shape[-1], dtype)
        wanted = getattr(cpu, f"unpack_dequantize_{role}")(*expected, bits, group_size, x.shape[-1], dtype)
        torch.testing.assert_close(restored.cpu(), wanted, rtol=0, atol=0, equal_nan=True)
    return actual


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("dtype", "metadata", "shape", "group_size"),
    [
        ("fp32", "fp32", (2, 3, 40, 100), 32),
        ("fp16", "fp16", (1, 70, 80), 64),
        ("bf16", "bf16", (9, 33), 4),
        ("fp32", "fp16", (5, 7), 2),
        ("bf16", "fp32", (3, 128), 128),
        ("fp16", "bf16", (2, 1, 300), 256),
    ],
    ids=lambda x: str(x),
)
def test_bits_equal_the_reference(
    role: str, bits: int, dtype: str, metadata: str, shape: tuple[int, ...], group_size: int, device: str
) -> None:
    x = (5 + torch.randn(shape, generator=torch.Generator().manual_seed(bits))).to(DTYPES[dtype])
    assert_as_cpu(role, x, bits, group_size, DTYPES[metadata], device)


def special_groups() -> dict[str, Tensor]:
    one = torch.tensor(1.0)
    ulp = torch.nextafter(one, torch.tensor(2.0)) - one
    nan, inf = float("nan"), float("inf")
    return {
        "constant": torch.tensor([5.0, 5.0, 5.0, 5.0]),
        "zero": torch.zeros(4),
        "signed_zeros": torch.tensor([-0.0, 0.0, 1.0, 2.0]),
        "minus_zeros": torch.tensor([-0.0, -0.0, -0.0, -0.0]),
        "one_ulp": torch.stack([one, one + ulp, one, one + ulp]),
        "tiny_range": torch.tensor([1e-40, 3e-40, 0.0, 2e-40]),
        "small_negative_minimum": torch.tensor([-1e-9, 0.0, 1.0, 2.0]),
        "fp16_range": torch.tensor([-65504.0, 65504.0, 0.0, 1.0]),
        "beyond_fp16": torch.tensor([-1.2e5, 1.2e5, 3.0, 7e4]),
        "all_beyond_fp16": torch.tensor([1e5, 1.1e5, 1.2e5, 1.3e5]),
        "whole_fp32_range": torch.tensor([-3.4e38, 3.4e38, 1.0, -1.0]),
        "biased": 600 + torch.tensor([-1.0, -0.5, 0.25, 1.0]),
        "halves": torch.tensor([0.0, 0.5, 1.5, 3.0]),
        "nan": torch.tensor([1.0, nan, 2.0, 3.0]),
        "inf": torch.tensor([1.0, inf, 2.0, 3.0]),
        "minus_inf": torch.tensor([-inf, -inf, -inf, -inf]),
        "all_nan": torch.tensor([nan, nan, nan, nan]),
    }


@pytest.mark.parametrize("metadata", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_special_groups(bits: int, metadata: str, device: str) -> None:
    groups = special_groups()
    rows = torch.stack(list(groups.values()))
    _, scale, minimum = assert_as_cpu("value", rows, bits, 4, DTYPES[metadata], device)
    assert_as_cpu("key", rows.T, bits, 4, DTYPES[metadata], device)
    for name, row_scale, row_min in zip(groups, scale[:, 0].cpu(), minimum[:, 0].cpu(), strict=True):
        broken = "nan" in name or "inf" in name
        assert row_scale.isnan() == row_min.isnan() == broken and not row_scale.isinf() and not row_min.isinf(), name
    zeros = [list(groups).index(name) for name in ("signed_zeros", "minus_zeros")]
    assert not torch.signbit(minimum[zeros].cpu()).any()


def test_worked_packing(device: str) -> None:
    codes, scale, minimum = launch.quantize_pack_value(torch.tensor([[100.0, 101.0, 102.0, 103.0]], device=device), 2, 4, torch.float32)
    assert (codes.item(), scale.item(), minimum.item()) == (0xE4, 1.0, 100.0)


@pytest.mark.parametrize("role", ["key", "value"])
def test_strides(role: str, device: str) -> None:
    x = random_tokens(2, 2, 24, 20, device=device)
    for view in (x.transpose(1, 2), x.transpose(2, 3), x[:, :, ::2, 1:], x[:1, :1].expand(2, 3, -1, -1)):
        assert_as_cpu(role, view, 4, 8, torch.float32, device)


def test_unpack_takes_any_strides(device: str) -> None:
    x = random_tokens(1, 1, 16, 16, device=device)
    packed = launch.quantize_pack_key(x, 2, 8, torch.float32)
    apart = tuple(y.transpose(-1, -2).contiguous().transpose(-1, -2) for y in packed)
    restored = (launch.unpack_dequantize_key(*parts, 2, 8, 16, torch.float32) for parts in (packed, apart))
    assert torch.equal(*restored)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (0, 3, 8)], ids=str)
def test_nothing(shape: tuple[int, ...], device: str) -> None:
    for role in ("key", "value"):
        codes, scale, _ = packed = getattr(launch, f"quantize_pack_{role}")(torch.zeros(shape, device=device), 2, 4, torch.float16)
        assert codes.shape == (*shape[:-1], 2) and scale.dtype == torch.float16
        assert getattr(launch, f"unpack_dequantize_{role}")(*packed, 2, 4, 8, torch.float32).shape == shape


def borders(metadata: torch.dtype, bits: int) -> Tensor:
    """Float32 groups with the borders (c + 1/2) * scale between codes and the float32 values just below and above each.

    The minimum is 0, the scale every positive value of ``metadata`` whose largest code it can hold; at 4 and 8 bits every 7th and 251st.
    """
    levels = 2**bits - 1
    step = 1 if bits == 2 else 7 if bits == 4 else 251
    patterns = torch.arange(1, 0x7C00 if metadata == torch.float16 else 0x7F80, step, dtype=torch.int16)
    scale = patterns.view(metadata).float()
    scale = scale[scale * levels <= torch.finfo(metadata).max][:, None]
    exact = (torch.arange(levels) + 0.5) * scale
    beside = (torch.nextafter(exact, torch.full_like(exact, to)) for to in (0.0, torch.inf))
    near = torch.stack([exact, *beside], -1).flatten(1)  # three for each border
    width = {2: 14, 4: 62, 8: 254}[bits]
    near = torch.nn.functional.pad(near, (0, -near.shape[1] % width)).unflatten(1, (-1, width))
    ends = torch.stack([torch.zeros_like(scale), levels * scale], -1).expand(-1, near.shape[1], -1)
    return torch.cat([near, ends], -1).flatten(0, 1)


@pytest.mark.parametrize("metadata", ["fp16", "bf16"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_borders_between_codes(bits: int, metadata: str, device: str) -> None:
    """Where a quotient that is not the division's would choose the other code."""
    x = borders(DTYPES[metadata], bits)
    _, scale, minimum = assert_as_cpu("value", x, bits, x.shape[1], DTYPES[metadata], device)
    assert not minimum.any() and torch.equal(scale.cpu().float() * (2**bits - 1), x[:, -1:])
