"""The two kernels of ``attention``: softmax sums over splits of a row's tokens, then their log-sum-exp merge.

Lengths are read on the device and the grid depends on shapes alone, so that a captured graph replays at any length. Must not know of
sealing or of how records came to be.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kivi_ops.kernels.common import narrow, row_span, token_tile, visible_boundary, widen

MASK_NONE = tl.constexpr(0)
MASK_CAUSAL = tl.constexpr(1)
MASK_BOOL = tl.constexpr(2)
MASK_FLOAT = tl.constexpr(3)


@triton.jit
def tanh(x):
    """tanh to about float32's accuracy: a series near 0, an exponential elsewhere (the interpreter has no libdevice)."""
    square = x * x
    series = x * (1.0 - square * (0.3333333333333333 - square * (0.13333333333333333 - square * 0.05396825396825397)))
    decay = tl.exp(-2.0 * tl.abs(x))
    tail = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.2, series, tl.where(x < 0.0, -tail, tail))


@triton.jit
def split_span(end, split, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """How many splits hold any of the tokens 0 .. end, and the tokens of this one: whole blocks, the same number in each split."""
    blocks = tl.cdiv(tl.maximum(end, 0), BLOCK)
    per_split = tl.maximum(tl.cdiv(blocks, SPLITS), 1)
    begin = split * per_split * BLOCK
    return tl.cdiv(blocks, per_split), begin, tl.minimum(begin + per_split * BLOCK, end)


@triton.jit
def store_output(
    out_ptr,
    accumulated,
    total,
    past_capacity,
    query_row,
    row_head,
    new_tokens,
    channel,
    channel_inside,
    REPEATS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Divide, round and store query rows (token-major: new token * REPEATS + head of the group) to [B, Hq, S, D_v].

    channel: that of each column of ``accumulated``; channel_inside: whether there is one.
    """
    output = tl.where((total == 0.0)[:, None], 0.0, accumulated / total[:, None])  # 0 where nothing is visible
    output = tl.where(past_capacity, float("nan"), output)
    mask = (query_row < new_tokens * REPEATS)[:, None] & channel_inside[None, :]
    target = (row_head * REPEATS + query_row % REPEATS) * new_tokens + query_row // REPEATS
    tl.store(out_ptr + target[:, None] * DIM + channel[None, :], narrow(output, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_words_ptr,
    key_meta_ptr,
    value_words_ptr,
    value_meta_ptr,
    key_window_ptr,
    value_window_ptr,
    sealed_ptr,
    left_padding_ptr,
    position_ptr,
    mask_ptr,
    out_ptr,
    partial_ptr,
    maximum_ptr,
    total_ptr,
    query_row_stride,
    query_head_stride,
    query_token_stride,
    query_channel_stride,
    key_row_stride,
    key_head_stride,
    key_token_stride,
    key_channel_stride,
    value_row_stride,
    value_head_stride,
    value_token_stride,
    value_channel_stride,
    position_stride,
    mask_row_stride,
    mask_head_stride,
    mask_token_stride,
    mask_column_stride,
    mask_columns,
    heads,
    new_tokens,
    capacity,
    window_rows,
    key_records,
    value_records,
    scale,
    softcap,
    AFTER: tl.constexpr,
    MASK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    REPEATS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_DIM_BLOCK: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_TOKENS: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_BLOCK: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_TOKENS: tl.constexpr,
    VALUE_PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
):
    """One program: QUERY_BLOCK query rows of one batch row and KV head over one split of its tokens.

    Query rows are the REPEATS query heads of the KV head for each new token. With one split the output is stored; otherwise the float32
    maximum, total and weighted sum of every row [B * H, SPLITS, rows, ...], which only splits that hold tokens write.
    """
    split = tl.program_id(0) % SPLITS
    row_head = (tl.program_id(0) // SPLITS).to(tl.int64)
    row, head = row_head // heads, row_head % heads
    start, padding, first, end = row_span(position_ptr, position_stride, left_padding_ptr, row, new_tokens, capacity)
    past_capacity = start + new_tokens > capacity
    end = tl.where(past_capacity, 0, end)  # the whole row will be NaN
    active_splits, split_begin, split_end = split_span(end, split, SPLITS, TOKEN_BLOCK)
    if (SPLITS > 1) & (split >= active_splits):
        return
    key_boundary = visible_boundary(tl.load(sealed_ptr + 2 * row), first, AFTER)
    value_boundary = visible_boundary(tl.load(sealed_ptr + 2 * row + 1), first, AFTER)

    query_row = tl.program_id(1) * QUERY_BLOCK + tl.arange(0, QUERY_BLOCK)
    query_head = head * REPEATS + query_row % REPEATS
    query_token = (query_row // REPEATS).to(tl.int64)
    channel = tl.arange(0, KEY_DIM_BLOCK)
    query_at = query_ptr + row * query_row_stride + (query_head * query_head_stride + query_token * query_token_stride)[:, None]
    query_mask = (query_row < new_tokens * REPEATS)[:, None] & (channel < KEY_DIM)[None, :]
    query = widen(tl.load(query_at + channel.to(tl.int64)[None, :] * query_channel_stride, mask=query_mask, other=0.0))
    if MASK == MASK_CAUSAL:  # tokens after the block's last query are seen by none of them
        last_query = tl.minimum((tl.program_id(1) + 1) * QUERY_BLOCK - 1, new_tokens * REPEATS - 1) // REPEATS
        split_end = tl.minimum(split_end, first + last_query + 1)

    maximum = tl.full([QUERY_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_BLOCK], tl.float32)
    accumulated = tl.zeros([QUERY_BLOCK, VALUE_DIM_BLOCK], tl.float32)
    for block_start in range(split_begin, split_end, TOKEN_BLOCK):
        keys = token_tile(
            key_words_ptr,
            key_meta_ptr,
            row_head * key_records,
            key_window_ptr + row_head * window_rows * KEY_DIM,
            key_ptr + row * key_row_stride + head * key_head_stride,
            key_token_stride,
            key_channel_stride,
            block_start,
            key_boundary,
            first,
            end,
            window_rows,
            True,
            KEY_DIM,
            KEY_DIM_BLOCK,
            KEY_BITS,
            GROUP,
            KEY_TOKENS,
            KEY_PARTS,
            TOKEN_BLOCK,
        )
        logits = tl.dot(query, tl.trans(keys), input_precision="tf32x3") * scale
        if HAS_SOFTCAP:
            logits = softcap * tanh(logits / softcap)
        token = block_start + tl.arange(0, TOKEN_BLOCK)
        visible = (token < end)[None, :] & (query_row < new_tokens * REPEATS)[:, None]
        if MASK == MASK_CAUSAL:
            visible = visible & (token[None, :] <= (first + query_token)[:, None])
        elif MASK != MASK_NONE:
            column = (token + padding).to(tl.int64)[None, :]
            visible = visible & (column < mask_columns)
            mask_at = mask_ptr + row * mask_row_stride + (query_head * mask_head_stride + query_token * mask_token_stride)[:, None]
            mask = tl.load(mask_at + column * mask_column_stride, mask=visible, other=0)
            if MASK == MASK_BOOL:
                visible = visible & (mask != 0)
            else:
                logits += widen(mask)
        logits = tl.where(visible, logits, float("-inf"))

        # A NaN logit may be dropped by max, but its own exponential is NaN and stays in the total.
        block_maximum = tl.maximum(maximum, tl.max(logits, 1))
        shift = tl.where(block_maximum == float("-inf"), 0.0, block_maximum)
        weights = tl.exp(logits - shift[:, None])
        decay = tl.exp(maximum - shift)
        maximum = block_maximum
        total = total * decay + tl.sum(weights, 1)
        values = token_tile(
            value_words_ptr,
            value_meta_ptr,
            row_head * value_records,
            value_window_ptr + row_head * window_rows * VALUE_DIM,
            value_ptr + row * value_row_stride + head * value_head_stride,
            value_token_stride,
            value_channel_stride,
            block_start,
            value_boundary,
            first,
            end,
            window_rows,
            False,
            VALUE_DIM,
            VALUE_DIM_BLOCK,
            VALUE_BITS,
            GROUP,
            VALUE_TOKENS,
            VALUE_PARTS,
            TOKEN_BLOCK,
        )
        accumulated = accumulated * decay[:, None] + tl.dot(weights, values, input_precision="tf32x3")

    value_channel = tl.arange(0, VALUE_DIM_BLOCK)
    inside = value_channel < VALUE_DIM
    if SPLITS == 1:
        store_output(out_ptr, accumulated, total, past_capacity, query_row, row_head, new_tokens, value_channel, inside, REPEATS, VALUE_DIM)
    else:
        query_rows = new_tokens * REPEATS
        slot = (row_head * SPLITS + split) * query_rows + query_row
        mask_rows = query_row < query_rows
        tl.store(maximum_ptr + slot, maximum, mask=mask_rows)
        tl.store(total_ptr + slot, total, mask=mask_rows)
        partial_mask = mask_rows[:, None] & inside[None, :]
        tl.store(partial_ptr + slot[:, None] * VALUE_DIM + value_channel[None, :], accumulated, mask=partial_mask)


@triton.jit
def combine_kernel(
    partial_ptr,
    maximum_ptr,
    total_ptr,
    left_padding_ptr,
    position_ptr,
    out_ptr,
    position_stride,
    heads,
    new_tokens,
    capacity,
    REPEATS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
):
    """Merge the splits that hold tokens, with one global normalisation. SPLITS and TOKEN_BLOCK are those of the first kernel."""
    row_head = tl.program_id(0).to(tl.int64)
    row = row_head // heads
    start, padding, first, end = row_span(position_ptr, position_stride, left_padding_ptr, row, new_tokens, capacity)
    past_capacity = start + new_tokens > capacity
    active_splits, split_begin, split_end = split_span(tl.where(past_capacity, 0, end), 0, SPLITS, TOKEN_BLOCK)

    query_rows = new_tokens * REPEATS
    query_row = tl.program_id(1) * QUERY_BLOCK + tl.arange(0, QUERY_BLOCK)
    channel = tl.arange(0, VALUE_DIM_BLOCK)
    mask_rows = query_row < query_rows
    inside = channel < VALUE_DIM
    partial_mask = mask_rows[:, None] & inside[None, :]
    maximum = tl.full([QUERY_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_BLOCK], tl.float32)
    accumulated = tl.zeros([QUERY_BLOCK, VALUE_DIM_BLOCK], tl.float32)
    for split in range(active_splits):
        slot = (row_head * SPLITS + split) * query_rows + query_row
        split_maximum = tl.load(maximum_ptr + slot, mask=mask_rows, other=float("-inf"))
        merged = tl.maximum(maximum, split_maximum)
        shift = tl.where(merged == float("-inf"), 0.0, merged)
        decay, weight = tl.exp(maximum - shift), tl.exp(split_maximum - shift)
        total = total * decay + tl.load(total_ptr + slot, mask=mask_rows, other=0.0) * weight
        partial = tl.load(partial_ptr + slot[:, None] * VALUE_DIM + channel[None, :], mask=partial_mask, other=0.0)
        accumulated = accumulated * decay[:, None] + partial * weight[:, None]
        maximum = merged
    store_output(out_ptr, accumulated, total, past_capacity, query_row, row_head, new_tokens, channel, inside, REPEATS, VALUE_DIM)
