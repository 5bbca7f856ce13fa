"""Merges what the splits of a row left: one softmax over all of its tokens (contract section 4). Must not know how a split was computed."""

from __future__ import annotations

import triton
import triton.language as tl

from kivi_ops.kernels.common import narrow


@triton.jit(do_not_specialize=["new_tokens", "capacity", "splits"])
def combine_kernel(
    partial_ptr,
    maximum_ptr,
    total_ptr,
    position_ptr,
    out_ptr,
    position_stride,
    heads,
    new_tokens,
    capacity,
    splits,
    REPEATS: tl.constexpr,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    WAIT: tl.constexpr,
):
    """One program: CHANNELS channels of one query row. Grid: (B * H, query rows, D / CHANNELS).

    partial: float32 [B * H, splits, rows, D], weighted sums; maximum (base 2) and total: float32 [B * H, splits, rows]. Of a split whose
    maximum is -inf nothing else counts. A query row that sees nothing gets 0; rows past the capacity get NaN. ALL_SPLITS: a power of two
    not below ``splits``; SPLITS of them are added up at a time. WAIT: the kernel was launched early and waits here for the splits.
    """
    row_head = tl.program_id(0).to(tl.int64)
    query_row = tl.program_id(1)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    query_rows = new_tokens * REPEATS
    start = tl.load(position_ptr + row_head // heads * position_stride)
    first_slot = row_head * splits * query_rows + query_row
    if WAIT:
        tl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)

    split = tl.arange(0, ALL_SPLITS)
    maxima = tl.load(maximum_ptr + first_slot + split * query_rows, mask=split < splits, other=float("-inf"))
    totals = tl.load(total_ptr + first_slot + split * query_rows, mask=split < splits, other=0.0)
    highest = tl.max(maxima, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.where(maxima == float("-inf"), 0.0, totals * tl.exp2(maxima - shift)), 0)
    summed = tl.zeros([CHANNELS], tl.float32)
    for begin in range(0, splits, SPLITS):
        some = begin + tl.arange(0, SPLITS)
        slot = first_slot + some * query_rows
        partial = tl.load(partial_ptr + slot[:, None] * DIM + channel[None, :], mask=(some < splits)[:, None], other=0.0)
        highs = tl.load(maximum_ptr + slot, mask=some < splits, other=float("-inf"))
        weight = tl.exp2(highs - shift)
        summed += tl.sum(tl.where((highs == float("-inf"))[:, None], 0.0, partial * weight[:, None]), 0)
    output = tl.where(total == 0.0, 0.0, summed / total)
    output = tl.where(start + new_tokens > capacity, float("nan"), output)
    target = (row_head * REPEATS + query_row % REPEATS) * new_tokens + query_row // REPEATS
    tl.store(out_ptr + target * DIM + channel, narrow(output, out_ptr.dtype.element_ty))
