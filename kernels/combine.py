"""Merges what the splits of a row left: one softmax over all of its tokens (contract section 4). Must not know how a split was computed."""

from __future__ import annotations

import triton
import triton.language as tl

from kivi_ops.kernels.common import narrow


@triton.jit(do_not_specialize=["new_tokens", "capacity"])
def combine_kernel(
    partial_ptr,
    maximum_ptr,
    total_ptr,
    spans_ptr,
    position_ptr,
    out_ptr,
    position_stride,
    heads,
    new_tokens,
    capacity,
    REPEATS: tl.constexpr,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPLITS: tl.constexpr,
    WAIT: tl.constexpr,
):
    """One program: CHANNELS channels of one query row. Grid: (B * H, query rows, D / CHANNELS).

    partial: float32 [slots, query rows, D], weighted sums; maximum (base 2) and total: float32 [slots, query rows]; spans: int32
    [B * H, 2], the first slot of a row and head and their number. Of a slot whose maximum is -inf nothing else counts. A query that sees
    nothing gets 0; rows past the capacity get NaN. SPLITS: slots added up at a time. WAIT: the kernel was launched early and waits here.
    """
    row_head = tl.program_id(0).to(tl.int64)
    query_row = tl.program_id(1)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    query_rows = new_tokens * REPEATS
    start = tl.load(position_ptr + row_head // heads * position_stride)
    if WAIT:
        tl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    first = tl.load(spans_ptr + 2 * row_head).to(tl.int64)
    count = tl.load(spans_ptr + 2 * row_head + 1)

    maximum = float("-inf")
    total = 0.0
    summed = tl.zeros([CHANNELS], tl.float32)
    for begin in range(0, count, SPLITS):
        split = begin + tl.arange(0, SPLITS)
        slot = (first + split) * query_rows + query_row
        maxima = tl.load(maximum_ptr + slot, mask=split < count, other=float("-inf"))
        totals = tl.load(total_ptr + slot, mask=split < count, other=0.0)
        partial = tl.load(partial_ptr + slot[:, None] * DIM + channel[None, :], mask=(split < count)[:, None], other=0.0)
        peak = tl.maximum(maximum, tl.max(maxima, 0))
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        decay = tl.exp2(maximum - shift)
        empty = maxima == float("-inf")
        weight = tl.exp2(maxima - shift)  # NaN where the split's total is NaN
        total = total * decay + tl.sum(tl.where(empty, 0.0, totals * weight), 0)
        summed = summed * decay + tl.sum(tl.where(empty[:, None], 0.0, partial * weight[:, None]), 0)
        maximum = peak
    output = tl.where(total == 0.0, 0.0, summed / total)
    output = tl.where(start + new_tokens > capacity, float("nan"), output)
    target = (row_head * REPEATS + query_row % REPEATS) * new_tokens + query_row // REPEATS
    tl.store(out_ptr + target * DIM + channel, narrow(output, out_ptr.dtype.element_ty))
