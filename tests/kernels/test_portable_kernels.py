"""The decode kernel in plain Triton where there may be no GPU, against the float64 reference: contract sections 3, 4 and 7.

Few and small, for the interpreter; test_decode_kernels.py has the rest.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from twin import Twin

from kivi_ops import KiviConfig
from kivi_ops.kernels import launch
from kivi_ops.kernels.decode import assignment
from kivi_ops.kernels.layout import record_layouts

FORMATS = {  # key bits, value bits, D, dtype, repeats, tokens: whole chunks and more
    "2x2-D128-fp16-gqa4": (2, 2, 128, torch.float16, 4, 330),
    "4x4-D128-bf16-gqa9": (4, 4, 128, torch.bfloat16, 9, 110),
    "2x4-D128-bf16-gqa1": (2, 4, 128, torch.bfloat16, 1, 180),
    "4x2-D64-fp16-gqa2": (4, 2, 64, torch.float16, 2, 310),
    "2x2-D64-bf16-gqa3": (2, 2, 64, torch.bfloat16, 3, 310),
}
MAIN = FORMATS["2x2-D128-fp16-gqa4"]


def twin_of(device: str, format: tuple, seal: str = "after_attention", **arguments: object) -> Twin:
    key_bits, value_bits, dim, dtype, repeats, tokens = format
    config = KiviConfig(key_bits, value_bits, 32, 32, seal)
    return Twin(device, config, tokens, repeats=repeats, key_dim=dim, dtype=dtype, kernel="portable", **arguments)


@pytest.fixture(autouse=True)
def splits_of_several_chunks(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    if device == "cpu":
        monkeypatch.setattr(launch, "DECODE_PROGRAMS", 3)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_steps(device: str, format: tuple) -> None:
    """Whole chunks, sealed slices, window and new tokens; then after a rollback, which leaves slices sealed on one side only."""
    twin = twin_of(device, format, capacity=640)
    end = format[-1]
    twin.append(0, end - 3)
    twin.step(end - 3, 3, is_causal=True)
    twin.step(end - 70, 2)


def test_short_and_padded_rows(device: str) -> None:
    """Rows of no token at all, of new tokens only, of a window, of the first sealed groups."""
    twin = twin_of(device, MAIN, "before_attention", left_padding=[3, 100], capacity=336)
    twin.step(0, 4, is_causal=True)
    twin.append(4, 60)
    twin.append(64, 41)
    twin.step(105, 2, is_causal=True)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(monkeypatch: pytest.MonkeyPatch, device: str, kind: str) -> None:
    monkeypatch.setattr(launch, "DECODE_PROGRAMS", 4)  # two a row, dealt by length
    twin = twin_of(device, MAIN, left_padding=[0, 80], capacity=336)
    keep = torch.rand(2, 4, 2, 336, generator=torch.Generator().manual_seed(3)) < 0.6
    keep[:, :, 0, :150] = False
    twin.append(0, 220)
    twin.step(220, 2, attn_mask=keep if kind == "bool" else torch.where(keep, 2.0, -torch.inf).half())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_extreme_scales(device: str, dtype: torch.dtype) -> None:
    """Values that fill float16 or go far beyond it, among others near its smallest numbers: weights are carried accordingly."""
    large, small = (2e4, 1e-4) if dtype == torch.float16 else (1e20, 1e-20)
    twin = twin_of(device, (2, 2, 128, dtype, 4, 270), capacity=288)
    for seed, x in enumerate((twin.key, twin.value, twin.query)):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
    twin.key[..., 3] *= 30
    twin.value[:, :, 100:140] *= large
    twin.value[:, :, 180:220] *= small
    twin.append(0, 269)
    twin.step(269, 1)


def test_a_broken_group_is_seen_unless_hidden(device: str) -> None:
    """NaN in a Key group reaches the heads that see it (contract section 1) and no other."""
    twin = twin_of(device, MAIN, heads=2, capacity=336)
    twin.key[0, 1, 70, 5] = float("inf")
    twin.append(0, 165)
    new = [x.to(device) for x in twin.new(165, 1)]
    output = twin.attend(*new, torch.tensor(165, device=device))
    assert output[0, :4].isfinite().all() and output[0, 4:].isnan().all()
    seen = torch.ones(1, 1, 1, 336, dtype=torch.bool, device=device)
    seen[..., 64:96] = False
    assert twin.attend(*new, torch.tensor(165, device=device), seen).isfinite().all()


def test_rows_past_the_capacity_are_nan_and_alone(device: str) -> None:
    twin = twin_of(device, MAIN, left_padding=[0, 10], capacity=160)
    twin.append(0, 150)
    position = torch.tensor([[159], [100]], device=device)
    output = twin.attend(*(x.to(device) for x in twin.new(150, 2)), position)
    assert output[0].isnan().all() and output[1].isfinite().all()


def test_strided_inputs(device: str) -> None:
    """Channels that are not adjacent, for which there is no other fast kernel."""
    twin = twin_of(device, MAIN, capacity=160)
    twin.append(0, 140)
    query, key, value = (x.to(device) for x in twin.new(140, 2))
    position = torch.tensor(140, device=device)
    transposed = [x.mT.contiguous().mT for x in (query, key, value)]
    assert torch.equal(twin.attend(*transposed, position), twin.attend(query, key, value, position))


def test_which_calls_are_decode_steps() -> None:
    """On the CPU, which has no Gluon; a call of float32, with a softcap or of another head size is the general kernel's."""

    def chosen(repeats: int, new_tokens: int, dim: int, dtype: torch.dtype = torch.float16, softcap: float | None = None) -> str:
        layouts = record_layouts(dim, dim, 2, 2, 32, dtype)
        query, key = (torch.empty(1, heads, new_tokens, dim, dtype=dtype) for heads in (repeats, 1))
        return launch._chosen(query, key, key, layouts, softcap)

    assert chosen(4, 1, 128) == chosen(16, 4, 64, torch.bfloat16) == "portable"
    assert chosen(4, 1, 96) == chosen(4, 1, 128, torch.float32) == chosen(4, 1, 128, softcap=3.0) == "general"


@triton.jit
def assignment_kernel(
    out_ptr, position_ptr, left_padding_ptr, splits, finest, rows, capacity, CHUNK: tl.constexpr, ROW_BLOCK: tl.constexpr
):
    index = tl.program_id(0)
    row, begin, count = assignment(index, splits, finest, position_ptr, 1, left_padding_ptr, rows, 1, capacity, CHUNK, ROW_BLOCK)
    tl.store(out_ptr + 3 * index, row)
    tl.store(out_ptr + 3 * index + 1, begin)
    tl.store(out_ptr + 3 * index + 2, count)


LENGTHS = {  # position of the new token of each row, and the left padding
    "like": ([4000, 4010, 3990], [0, 0, 0]),
    "padded-alike": ([4000, 4010, 3990], [20, 0, 40]),
    "1-to-128": ([1_000, 128_000, 3_000, 64_000, 500], [0, 0, 0, 0, 0]),
    "mostly-padding": ([4000, 4000], [0, 3900]),
    "one-long": ([131_000, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]),
    "empty": ([0, 0], [0, 0]),
}


@pytest.mark.parametrize("finest", [2, 6], ids="finest-{}".format)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_programs_are_dealt_to_rows_by_length(device: str, lengths: tuple[list[int], list[int]], finest: int) -> None:
    """Rows in order, each with neighbouring programs; none of them has more than 9/8 of an even share of the work."""
    splits, chunk = 2, 128
    position, padding = (torch.tensor(x, device=device) for x in lengths)
    rows = len(position)
    room = rows * (finest + 1)
    out = torch.full((room, 3), -1, dtype=torch.int64, device=device)
    assignment_kernel[(room,)](out, position, padding.int(), splits, finest, rows, 131_072, CHUNK=chunk, ROW_BLOCK=32)

    dealt = out[:, 0].bincount(minlength=rows + 1)[:rows]
    begin = dealt.cumsum(0) - dealt
    for row in range(rows):
        assert out[begin[row] : begin[row] + dealt[row]].tolist() == [[row, begin[row], dealt[row]]] * int(dealt[row])
    assert (dealt >= 1).all() and (out[dealt.sum() :, 0] == rows).all()
    work = (position + 1 - padding).double() / chunk + 2
    if (work.max() - work.min()) / work.mean() < 0.05:
        assert dealt.tolist() == [splits] * rows
    else:
        assert (work / dealt).max() <= 9 / 8 * work.sum() / (rows * finest) + 1  # counted in whole chunks
