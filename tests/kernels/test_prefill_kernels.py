"""The prefill kernel against the float64 reference: chunks over a history in records, window and new tokens, in 16-bit dtypes."""

from __future__ import annotations

import pytest
import torch
from helpers import ATTENTION_TOLERANCE, assert_close
from twin import Twin, launch_append, launch_attention

from kivi_ops import KiviConfig
from kivi_ops.kernels import launch

SMALL = KiviConfig(group_size=16, residual_length=16)
HALF, BRAIN = torch.float16, torch.bfloat16


FORMATS = {  # key bits, value bits, G, R, D_k, D_v, dtype, metadata
    "2x2-G32-D128-fp16": (2, 2, 32, 32, 128, 128, HALF, None),
    "2x4-G32-D64-bf16": (2, 4, 32, 64, 64, 64, BRAIN, None),
    "4x8-G32-D128-bf16": (4, 8, 32, 32, 128, 128, BRAIN, None),
    "8x2-G16-D100x96-fp16-fp32": (8, 2, 16, 32, 100, 96, HALF, torch.float32),
    "4x2-G8-D18x33-fp16": (4, 2, 8, 8, 18, 33, HALF, None),
    "2x4-G128-D80x192-bf16-fp16": (2, 4, 128, 128, 80, 192, BRAIN, HALF),
}


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_every_format(format: tuple, device: str) -> None:
    """A chunk over records, window and a boundary inside of a block; queries around 5, which a large logit error would show."""
    key_bits, value_bits, group, residual, key_dim, value_dim, dtype, metadata = format
    config = KiviConfig(key_bits, value_bits, group, residual, metadata_dtype=metadata)
    history = 128 + 2 * residual + 9
    twin = Twin(
        device, config, history + 18, repeats=2, key_dim=key_dim, value_dim=value_dim, dtype=dtype, left_padding=[3], kernel="prefill"
    )
    twin.query += 5
    twin.append(0, history)
    twin.step(history, 18, is_causal=True)


@pytest.mark.parametrize(("seal", "causal"), [("after_attention", True), ("before_attention", False)], ids=["after-causal", "before-all"])
def test_a_history_of_chunks(seal: str, causal: bool, device: str) -> None:
    """First prefill, chunks and a rollback into records, rows padded and poisoned: each output is the reference's."""
    config = KiviConfig(group_size=16, residual_length=32, seal=seal)
    twin = Twin(device, config, 250, repeats=3, dtype=HALF, left_padding=[0, 40], kernel="prefill")
    for start, count in ((0, 90), (90, 70), (160, 1), (141, 50)):
        twin.step(start, count, is_causal=causal)


@pytest.mark.parametrize("seal", ["after_attention", "before_attention"])
def test_rows_at_positions_of_their_own(seal: str, device: str) -> None:
    """One row goes on, one is rolled back into its records, one starts over."""
    config = KiviConfig(group_size=16, residual_length=32, seal=seal)
    twin = Twin(device, config, 170, left_padding=[0, 2, 0], dtype=HALF, kernel="prefill")
    twin.append(0, 150)
    starts = [150, 101, 0]
    query, key, value = twin.new(150, 20)
    expected = twin.reference.attend(query, key, value, starts, is_causal=True)
    position = torch.tensor(starts, device=device)[:, None]
    query, key, value = (x.to(device) for x in (query, key, value))
    if seal == "before_attention":
        launch_append(twin.state, key, value, position)
    output = launch_attention(twin.state, query, key, value, position, is_causal=True, kernel="prefill")
    assert_close("attention", output, expected, ATTENTION_TOLERANCE[HALF])


@pytest.mark.parametrize("kind", ["bool", "bool_narrow_per_head", "float_transposed", "float_hides_fp16"])
def test_masks(kind: str, device: str) -> None:
    generator = torch.Generator().manual_seed(7)
    full = torch.rand(2, 4, 17, 160, generator=generator)
    mask = {
        "bool": full[:, :1] < 0.6,
        "bool_narrow_per_head": full[:1, ..., :150] < 0.6,
        "float_transposed": (3 * full - 1).transpose(2, 3).contiguous().transpose(2, 3),
        "float_hides_fp16": torch.where(full[:, :1] < 0.6, full[:, :1], -torch.inf).half(),
    }[kind]
    twin = Twin(device, SMALL, 150, heads=2, repeats=2, left_padding=[0, 3], capacity=160, dtype=HALF, kernel="prefill")
    twin.append(0, 133)
    twin.step(133, 17, attn_mask=mask)


@pytest.mark.parametrize(("scale", "softcap"), [(-0.5, None), (0.0, None), (None, 0.7), (-0.5, 5.0)], ids=str)
def test_scale_and_softcap(scale: float | None, softcap: float | None, device: str) -> None:
    twin = Twin(device, SMALL, 150, repeats=2, dtype=HALF, kernel="prefill")
    twin.append(0, 133)
    twin.step(133, 17, is_causal=True, scale=scale, softcap=softcap)


def test_many_small_weights_count(device: str) -> None:
    """Weights of 2^-28 of the largest, which float16 would flush to zero, make all of the output."""
    twin = Twin(device, KiviConfig(8, 8, 16, 16), 300, dtype=HALF, kernel="prefill")
    twin.key.zero_()
    twin.key[:, :, 100, 0] = 255 / 16  # exact at 8 bits
    twin.query[..., 0] = 1.25
    twin.value.fill_(1000.0)
    twin.value[:, :, 100] = 0.0
    twin.append(0, 283)
    twin.step(283, 17, scale=1.0)


def test_what_nothing_sees_is_zero_and_what_does_not_fit_is_nan(device: str) -> None:
    twin = Twin(device, SMALL, 150, left_padding=[0, 148], dtype=HALF, capacity=150, kernel="prefill")
    twin.append(0, 130)
    mask = torch.ones(2, 1, 20, 150, dtype=torch.bool)
    mask[0, 0, 3] = False
    output = twin.step(130, 20, attn_mask=mask)
    assert not output[0, :, 3].any() and output[0, :, 4].all()
    query, key, value = (x.to(device) for x in twin.new(130, 20))
    query[1] = 1.0
    output = launch_attention(twin.state, query, key, value, torch.tensor([[131], [130]], device=device), is_causal=True, kernel="prefill")
    assert output[0].isnan().all() and not output[1, :, :18].any() and output[1, :, 18:].isfinite().all()


def test_splits_share_one_normalisation(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 600, 130 and 30 tokens in four splits: some full, some empty, one row all in one."""
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 6)
    twin = Twin(device, SMALL, 600, repeats=2, left_padding=[0, 470, 570], capacity=2048, dtype=HALF, kernel="prefill")
    twin.append(0, 580)
    twin.step(580, 20, is_causal=True)


def test_many_query_rows_choose_this_kernel() -> None:
    def chosen(new_tokens: int, query_heads: int = 8, dtype: torch.dtype = HALF, dim: int = 128) -> str:
        query = torch.empty(1, query_heads, new_tokens, dim, dtype=dtype)
        key = torch.empty(1, 2, new_tokens, dim, dtype=dtype)
        layouts = launch.record_layouts(dim, dim, 2, 2, 32, dtype)
        return launch._chosen(query, key, key, layouts, None)

    assert chosen(17) == chosen(16, query_heads=32) == chosen(512, dtype=BRAIN, dim=256) == "prefill"
    assert chosen(512, dtype=torch.float32) == chosen(512, dim=288) == "general"
    assert chosen(1) not in ("prefill", "general")
