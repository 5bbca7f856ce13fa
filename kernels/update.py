"""The float view that ``update`` returns: every token of a row restored into the padded frame. Must not know of sealing."""

from __future__ import annotations

import triton
import triton.language as tl

from kivi_ops.kernels.common import narrow, row_span, token_tile, visible_boundary


@triton.jit
def view_kernel(
    fresh_ptr,
    words_ptr,
    meta_ptr,
    window_ptr,
    sealed_ptr,
    left_padding_ptr,
    position_ptr,
    out_ptr,
    row_stride,
    head_stride,
    token_stride,
    channel_stride,
    position_stride,
    heads,
    new_tokens,
    capacity,
    window_rows,
    records,
    AFTER: tl.constexpr,
    IS_KEY: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
):
    """One program: TOKEN_BLOCK columns of one row and head, of the Keys or of the Values; out is contiguous [B, H, C, D]."""
    column_blocks = tl.cdiv(capacity, TOKEN_BLOCK)
    block = tl.program_id(0) % column_blocks
    row_head = (tl.program_id(0) // column_blocks).to(tl.int64)
    row, head = row_head // heads, row_head % heads
    start, padding, first, end = row_span(position_ptr, position_stride, left_padding_ptr, row, new_tokens, capacity)
    boundary = visible_boundary(tl.load(sealed_ptr + 2 * row + (0 if IS_KEY else 1)), first, AFTER)
    tile = token_tile(
        words_ptr,
        meta_ptr,
        row_head * records,
        window_ptr + row_head * window_rows * DIM,
        fresh_ptr + row * row_stride + head * head_stride,
        token_stride,
        channel_stride,
        block * TOKEN_BLOCK - padding,
        boundary,
        first,
        end,
        window_rows,
        IS_KEY,
        DIM,
        DIM_BLOCK,
        BITS,
        GROUP,
        TOKENS,
        PARTS,
        TOKEN_BLOCK,
    )
    if not IS_KEY:
        tile = tl.where(start + new_tokens > capacity, float("nan"), tile)
    column = block * TOKEN_BLOCK + tl.arange(0, TOKEN_BLOCK)
    channel = tl.arange(0, DIM_BLOCK)
    mask = (column < capacity)[:, None] & (channel < DIM)[None, :]
    target = (row_head * capacity + column)[:, None] * DIM + channel[None, :]
    tl.store(out_ptr + target, narrow(tile, out_ptr.dtype.element_ty), mask=mask)
