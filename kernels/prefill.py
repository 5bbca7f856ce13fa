"""Attention of many query rows over a mixed state through tensor cores: prompts, chunks of prompts, later turns.

Plain Triton, for 16-bit queries. Each program restores a block of tokens once, rounded to the queries' dtype as a float cache would hold
it, for a large tile of query rows. What splits leave is merged by :mod:`kivi_ops.kernels.attention`, whose arguments these are. Must not
know of sealing or of how records came to be.

A row's tokens are taken in three stretches: blocks wholly in records, where nothing has to be selected; the few blocks that hold
a boundary or window rows; blocks of new tokens alone. Record addresses follow :mod:`kivi_ops.kernels.layout`. Tiles keep a record's channel
parts apart: position i of a tile is channel ``i // PART_BLOCK * (DIM // PARTS) + i % PART_BLOCK``, so that the fields of one word are
a broadcast of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kivi_ops.kernels.attention import MASK_BOOL, MASK_CAUSAL, MASK_FLOAT, MASK_NONE, split_span, store_output, tanh
from kivi_ops.kernels.common import INTERPRET, narrow, restore, restore_tile, row_span, visible_boundary, widen
from kivi_ops.kernels.decode import power

LOG2_E = tl.constexpr(1.4426950408889634)
# Weights are multiplied by 2^14, which the division by their sum undoes: float16 would flush those below 2^-25 of the largest to zero,
# and many of them make a sum.
WEIGHT_BITS = tl.constexpr(14.0)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 in ``DTYPE``, by the instruction for it."""
    if INTERPRET:
        result = narrow(x, DTYPE)
    else:
        result = x.to(DTYPE)
    return result


@triton.jit
def matrix_product(a, b, accumulated):
    """accumulated + a b in float32; the interpreter has no product of bfloat16."""
    if INTERPRET:
        result = accumulated + tl.dot(widen(a), widen(b), input_precision="ieee")
    else:
        result = tl.dot(a, b, accumulated)
    return result


@triton.constexpr_function
def takes_pairs(columns, bits, metadata, dtype):
    """Whether two neighbours along the last axis can be restored by each instruction."""
    return columns % 2 == 0 and metadata == dtype and (dtype == tl.float16 or bits < 8)


@triton.constexpr_function
def restore_assembly(bits, dtype):
    """Two codes at a time: put below the bits of a power of two, a code is that number plus the code."""
    kind, power, one, less = (
        ("f16", 0x64006400, 0x3C003C00, 0xE400E400) if dtype == tl.float16 else ("bf16", 0x43004300, 0x3F803F80, 0xC300C300)
    )
    mask = ((1 << bits) - 1) * 0x10001
    return f"""{{ .reg .b32 t, one, less; shr.u32 t, $2, $3; lop3.b32 t, t, {mask}, {power}, 0xEA;
        mov.b32 one, {one}; mov.b32 less, {less}; fma.rn.{kind}x2 t, t, one, less; fma.rn.{kind}x2 t, t, $4, $5;
        mov.b32 {{$0, $1}}, t; }}"""


@triton.jit
def half(x, DTYPE: tl.constexpr):
    """The lower half of int32 as a 16-bit float."""
    return x.to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def restore_pairs(words, shift, scale, minimum, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """:func:`restored` where words, scale and minimum are int32 of two neighbours each."""
    if INTERPRET:
        code = words >> shift
        low = narrow(restore(code & (2**BITS - 1), half(scale, DTYPE), half(minimum, DTYPE)), DTYPE)
        high = narrow(restore((code >> 16) & (2**BITS - 1), half(scale >> 16, DTYPE), half(minimum >> 16, DTYPE)), DTYPE)
    else:
        ASSEMBLY: tl.constexpr = restore_assembly(BITS, DTYPE)
        given = [words, shift, scale, minimum]
        low, high = tl.inline_asm_elementwise(ASSEMBLY, "=h,=h,r,r,r,r", given, dtype=(tl.int16, tl.int16), is_pure=True, pack=1)
        low, high = low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def restored(
    words_ptr,
    meta_ptr,
    word,
    pair,
    shift,
    word_inside,
    pair_inside,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """min + scale * code in ``DTYPE``, of the field at bit ``shift`` of words, WIDTH of which lie at each address.

    word and pair: addresses of words and scales, counted in WIDTH of them; PAIRS: from a scale to its minimum. With a WIDTH of 2 the last
    axis is one more. Where nothing is inside, anything; looked at only if MASKED.
    """
    if WIDTH == 2:
        words_at = words_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + word
        scale_at = meta_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + pair
    else:
        words_at, scale_at = words_ptr + word, meta_ptr + pair
    if MASKED:
        words = tl.load(words_at, mask=word_inside, other=0)
        scale = tl.load(scale_at, mask=pair_inside, other=0)
        minimum = tl.load(scale_at + PAIRS // WIDTH, mask=pair_inside, other=0)
    else:
        words, scale, minimum = tl.load(words_at), tl.load(scale_at), tl.load(scale_at + PAIRS // WIDTH)
    if WIDTH == 2:
        tile = restore_pairs(words, shift, scale, minimum, BITS, DTYPE)
    else:
        tile = rounded(restore((words >> shift.to(tl.int16)) & (2**BITS - 1), scale, minimum), DTYPE)
    return tile


@triton.jit
def part_channels(DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """The channel at each position of a tile, and whether there is one."""
    PART_BLOCK: tl.constexpr = DIM_BLOCK // PARTS
    place = tl.arange(0, DIM_BLOCK)
    in_part = place % PART_BLOCK
    return place // PART_BLOCK * (DIM // PARTS) + in_part, in_part < DIM // PARTS


@triton.jit
def sealed_keys(
    words_ptr,
    meta_ptr,
    base_record,
    block_start,
    DTYPE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys ``block_start`` .. + BLOCK, all sealed: [BLOCK, DIM_BLOCK], 0 where there is no channel. BLOCK divides ``block_start``."""
    TOKEN_PARTS: tl.constexpr = 16 // BITS // PARTS
    COLUMNS: tl.constexpr = DIM // PARTS
    COLUMN_BLOCK: tl.constexpr = DIM_BLOCK // PARTS
    PAIRS: tl.constexpr = TOKEN_PARTS * DIM
    META_WORDS: tl.constexpr = meta_ptr.dtype.element_ty.primitive_bitwidth // 16
    META_RECORD: tl.constexpr = GROUP * COLUMNS // META_WORDS + 2 * PAIRS
    WIDTH: tl.constexpr = 2 if takes_pairs(COLUMNS, BITS, meta_ptr.dtype.element_ty, DTYPE) else 1
    SIZE: tl.constexpr = GROUP if GROUP < BLOCK else BLOCK  # tokens of a group in the block
    GROUPS: tl.constexpr = BLOCK // SIZE
    LOADS: tl.constexpr = 1 if BLOCK <= TOKENS else GROUPS  # groups of one record are fields of the same words

    # [token group, token, channel part, column]; addresses are counted in WIDTH words or grids
    group = (block_start + tl.arange(0, GROUPS) * SIZE)[:, None, None, None]
    source = (block_start + tl.arange(0, LOADS) * SIZE)[:, None, None, None]
    row = source % GROUP + tl.arange(0, SIZE)[None, :, None, None]
    part = tl.arange(0, PARTS)[None, None, :, None]
    column = tl.arange(0, COLUMN_BLOCK // WIDTH)[None, None, None, :]
    token_part = group // GROUP % TOKEN_PARTS
    word = (base_record + source // TOKENS) * (META_RECORD * META_WORDS // WIDTH) + row * (COLUMNS // WIDTH) + column
    pair = (base_record + group // TOKENS) * (META_RECORD // WIDTH) + GROUP * COLUMNS // META_WORDS // WIDTH
    pair += token_part * (DIM // WIDTH) + part * (COLUMNS // WIDTH) + column
    shift = (part * TOKEN_PARTS + token_part) * BITS
    inside = column < COLUMNS // WIDTH
    tile = restored(words_ptr, meta_ptr, word, pair, shift, inside, inside, BITS, DTYPE, PAIRS, WIDTH, COLUMNS < COLUMN_BLOCK)
    return tl.reshape(tile, [BLOCK, DIM_BLOCK])


@triton.jit
def sealed_values(
    words_ptr,
    meta_ptr,
    base_record,
    block_start,
    DTYPE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Values ``block_start`` .. + BLOCK, all sealed, as they lie: [DIM_BLOCK, BLOCK], anything where there is no channel."""
    TOKEN_PARTS: tl.constexpr = 16 // BITS // PARTS
    ROWS: tl.constexpr = DIM // PARTS
    ROW_BLOCK: tl.constexpr = DIM_BLOCK // PARTS
    COLUMNS: tl.constexpr = TOKENS // TOKEN_PARTS
    PAIRS: tl.constexpr = (DIM + GROUP - 1) // GROUP * TOKENS
    META_WORDS: tl.constexpr = meta_ptr.dtype.element_ty.primitive_bitwidth // 16
    META_RECORD: tl.constexpr = ROWS * COLUMNS // META_WORDS + 2 * PAIRS
    WIDTH: tl.constexpr = 2 if takes_pairs(COLUMNS, BITS, meta_ptr.dtype.element_ty, DTYPE) else 1
    SIZE: tl.constexpr = GROUP if GROUP < ROW_BLOCK else ROW_BLOCK  # channels of a group in a part
    GROUPS: tl.constexpr = ROW_BLOCK // SIZE

    # [channel part, channel group, channel, token]; tokens and addresses are counted in WIDTH of them
    token = (block_start // WIDTH + tl.arange(0, BLOCK // WIDTH))[None, None, None, :]
    part = tl.arange(0, PARTS)[:, None, None, None]
    group = tl.arange(0, GROUPS)[None, :, None, None]
    row = group * SIZE + tl.arange(0, SIZE)[None, None, :, None]
    record, local = base_record + token // (TOKENS // WIDTH), token % (TOKENS // WIDTH)
    word = record * (META_RECORD * META_WORDS // WIDTH) + row * (COLUMNS // WIDTH) + local % (COLUMNS // WIDTH)
    pair = record * (META_RECORD // WIDTH) + ROWS * COLUMNS // META_WORDS // WIDTH
    pair += (part * (ROWS // GROUP) + group) * (TOKENS // WIDTH) + local
    shift = (local // (COLUMNS // WIDTH) * PARTS + part) * BITS
    tile = restored(words_ptr, meta_ptr, word, pair, shift, row < ROWS, group * SIZE < ROWS, BITS, DTYPE, PAIRS, WIDTH, ROWS < ROW_BLOCK)
    return tl.reshape(tile, [DIM_BLOCK, BLOCK])


@triton.jit
def new_tokens_tile(fresh_ptr, token_stride, channel_stride, token, channel, inside, first):
    """New tokens in their dtype, [tokens, channels], 0 where ``inside`` is false."""
    at = fresh_ptr + (token - first).to(tl.int64)[:, None] * token_stride + channel.to(tl.int64)[None, :] * channel_stride
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def mixed_tile(
    words_ptr,
    meta_ptr,
    base_record,
    window_ptr,
    fresh_ptr,
    token_stride,
    channel_stride,
    token,
    channel,
    channel_inside,
    boundary,
    first,
    end,
    window_rows,
    IS_KEY: tl.constexpr,
    DTYPE: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Tokens wherever they are: below ``boundary`` in records, then in the window, from ``first`` on new. [tokens, channels], 0 outside."""
    real = (token < end)[:, None] & channel_inside[None, :]
    sealed = real & (token < boundary)[:, None]
    kept = real & ((token >= boundary) & (token < first))[:, None]
    fresh = real & ((token >= boundary) & (token >= first))[:, None]
    tile = rounded(restore_tile(words_ptr, meta_ptr, base_record, token, channel, sealed, IS_KEY, DIM, BITS, GROUP, TOKENS, PARTS), DTYPE)
    row = (token % window_rows).to(tl.int64)[:, None]
    tile = tl.where(kept, tl.load(window_ptr + row * DIM + channel[None, :], mask=kept, other=0.0), tile)
    return tl.where(fresh, new_tokens_tile(fresh_ptr, token_stride, channel_stride, token, channel, fresh, first), tile)


@triton.jit
def tile_logits(
    query,
    keys,
    token,
    query_row,
    visible,
    mask_ptr,
    mask_token_stride,
    mask_head_stride,
    mask_column_stride,
    mask_columns,
    padding,
    first,
    end,
    scale,
    softcap,
    MASK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    REPEATS: tl.constexpr,
    ALL_SEEN: tl.constexpr,
):
    """Logits of a tile of queries and tokens, -inf where a token is not visible. ALL_SEEN: but for a given mask, all are.

    They are to be multiplied by :func:`logit_unit` for the exponent of 2.
    """
    logits = matrix_product(query, tl.trans(keys), tl.zeros([query.shape[0], keys.shape[0]], tl.float32))
    if HAS_SOFTCAP:
        logits = (softcap * LOG2_E) * tanh(logits * (scale / softcap))
    elif MASK == MASK_FLOAT:
        logits = logits * (scale * LOG2_E)
    if not ALL_SEEN:
        seen = (token < end)[None, :]
        if MASK == MASK_CAUSAL:
            seen = seen & (token[None, :] <= (first + query_row // REPEATS)[:, None])
        logits = tl.where(seen, logits, float("-inf"))
    if (MASK != MASK_NONE) & (MASK != MASK_CAUSAL):
        column = (token + padding).to(tl.int64)
        given = visible[:, None] & ((token < end) & (column < mask_columns))[None, :]
        query_at = (query_row % REPEATS) * mask_head_stride + (query_row // REPEATS).to(tl.int64) * mask_token_stride
        mask = tl.load(mask_ptr + query_at[:, None] + (column * mask_column_stride)[None, :], mask=given, other=0)
        if MASK == MASK_BOOL:
            given = given & (mask != 0)
        else:
            logits += widen(mask) * LOG2_E
        logits = tl.where(given, logits, float("-inf"))
    return logits


@triton.jit
def logit_unit(scale, MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """What brings :func:`tile_logits` to base 2: above 0, so that maxima may be taken first and the product folded into a subtraction."""
    if HAS_SOFTCAP or MASK == MASK_FLOAT:
        unit = 1.0
    else:
        unit = tl.maximum(scale, 1e-30) * LOG2_E  # not 0: -inf stays -inf
    return unit


@triton.jit
def softmax_step(logits, unit, maximum, total, accumulated):
    """Weights of a tile's tokens, times 2^WEIGHT_BITS; the running maximum, total and weighted sum, the latter two brought to it.

    maximum and total: [query rows, 1], since the compiler would keep vectors, unlike matrices, in the layout of a mask that was loaded.
    """
    # A NaN logit may be dropped by max, but its own exponential is NaN and stays in the total.
    highest = tl.maximum(maximum, tl.max(logits, 1)[:, None] * unit)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = power(logits * unit - (shift - WEIGHT_BITS))
    decay = power(maximum - shift)
    return weights, highest, total * decay + tl.sum(weights, 1)[:, None], accumulated * decay


@triton.jit
def prefill_kernel(
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
    STAGES: tl.constexpr,
):
    """One program: QUERY_BLOCK query rows of one batch row and KV head over one split of its tokens.

    Grid, arguments and results are those of ``attention_kernel`` in :mod:`kivi_ops.kernels.attention`; scale >= 0.
    STAGES: blocks of records and of new tokens that are on their way at a time.
    """
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
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

    query_rows = new_tokens * REPEATS
    query_row = tl.program_id(1) * QUERY_BLOCK + tl.arange(0, QUERY_BLOCK)
    live = query_row < query_rows
    key_channel, key_inside = part_channels(KEY_DIM, KEY_DIM_BLOCK, KEY_PARTS)
    value_channel, value_inside = part_channels(VALUE_DIM, VALUE_DIM_BLOCK, VALUE_PARTS)
    query_at = (head * REPEATS + query_row % REPEATS) * query_head_stride + (query_row // REPEATS).to(tl.int64) * query_token_stride
    query_at = query_ptr + row * query_row_stride + query_at[:, None] + key_channel.to(tl.int64)[None, :] * query_channel_stride
    query = tl.load(query_at, mask=live[:, None] & key_inside[None, :], other=0.0)
    unit = logit_unit(scale, MASK, HAS_SOFTCAP)

    # The stretches: records alone from split_begin, mixed from sealed_end, new tokens alone from fresh_begin.
    sealed_end = tl.minimum(tl.minimum(key_boundary, value_boundary), split_end)
    if MASK == MASK_CAUSAL:
        first_query = tl.program_id(1) * QUERY_BLOCK // REPEATS
        last_query = tl.minimum((tl.program_id(1) + 1) * QUERY_BLOCK - 1, query_rows - 1) // REPEATS
        sealed_end = tl.minimum(sealed_end, first + first_query + 1)  # seen by every query of the block
        split_end = tl.minimum(split_end, first + last_query + 1)  # seen by any
    sealed_end = tl.maximum(sealed_end, 0) // TOKEN_BLOCK * TOKEN_BLOCK
    sealed_end = tl.maximum(sealed_end, split_begin)
    fresh_begin = tl.maximum(tl.maximum(key_boundary, value_boundary), tl.maximum(first, 0))
    fresh_begin = tl.maximum((fresh_begin + TOKEN_BLOCK - 1) // TOKEN_BLOCK * TOKEN_BLOCK, sealed_end)

    key_words_record, value_words_record = row_head * key_records, row_head * value_records
    key_fresh_ptr = key_ptr + row * key_row_stride + head * key_head_stride
    value_fresh_ptr = value_ptr + row * value_row_stride + head * value_head_stride
    mask_at = mask_ptr + row * mask_row_stride + head * REPEATS * mask_head_stride
    maximum = tl.full([QUERY_BLOCK, 1], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_BLOCK, 1], tl.float32)
    accumulated = tl.zeros([QUERY_BLOCK, VALUE_DIM_BLOCK], tl.float32)

    for block_start in tl.range(split_begin, sealed_end, TOKEN_BLOCK, num_stages=STAGES):
        keys = sealed_keys(
            key_words_ptr,
            key_meta_ptr,
            key_words_record,
            block_start,
            DTYPE,
            KEY_DIM,
            KEY_DIM_BLOCK,
            KEY_BITS,
            GROUP,
            KEY_TOKENS,
            KEY_PARTS,
            TOKEN_BLOCK,
        )
        logits = tile_logits(
            query,
            keys,
            block_start + tl.arange(0, TOKEN_BLOCK),
            query_row,
            live,
            mask_at,
            mask_token_stride,
            mask_head_stride,
            mask_column_stride,
            mask_columns,
            padding,
            first,
            end,
            scale,
            softcap,
            MASK,
            HAS_SOFTCAP,
            REPEATS,
            True,
        )
        weights, maximum, total, accumulated = softmax_step(logits, unit, maximum, total, accumulated)
        values = sealed_values(
            value_words_ptr,
            value_meta_ptr,
            value_words_record,
            block_start,
            DTYPE,
            VALUE_DIM,
            VALUE_DIM_BLOCK,
            VALUE_BITS,
            GROUP,
            VALUE_TOKENS,
            VALUE_PARTS,
            TOKEN_BLOCK,
        )
        accumulated = matrix_product(rounded(weights, DTYPE), tl.trans(values), accumulated)

    MIXED_BLOCK: tl.constexpr = TOKEN_BLOCK // 2  # each place a token may be in takes registers
    for block_start in tl.range(sealed_end, tl.minimum(fresh_begin, split_end), MIXED_BLOCK, num_stages=1):
        token = block_start + tl.arange(0, MIXED_BLOCK)
        keys = mixed_tile(
            key_words_ptr,
            key_meta_ptr,
            key_words_record,
            key_window_ptr + row_head * window_rows * KEY_DIM,
            key_fresh_ptr,
            key_token_stride,
            key_channel_stride,
            token,
            key_channel,
            key_inside,
            key_boundary,
            first,
            end,
            window_rows,
            True,
            DTYPE,
            KEY_DIM,
            KEY_BITS,
            GROUP,
            KEY_TOKENS,
            KEY_PARTS,
        )
        logits = tile_logits(
            query,
            keys,
            token,
            query_row,
            live,
            mask_at,
            mask_token_stride,
            mask_head_stride,
            mask_column_stride,
            mask_columns,
            padding,
            first,
            end,
            scale,
            softcap,
            MASK,
            HAS_SOFTCAP,
            REPEATS,
            False,
        )
        weights, maximum, total, accumulated = softmax_step(logits, unit, maximum, total, accumulated)
        values = mixed_tile(
            value_words_ptr,
            value_meta_ptr,
            value_words_record,
            value_window_ptr + row_head * window_rows * VALUE_DIM,
            value_fresh_ptr,
            value_token_stride,
            value_channel_stride,
            token,
            value_channel,
            value_inside,
            value_boundary,
            first,
            end,
            window_rows,
            False,
            DTYPE,
            VALUE_DIM,
            VALUE_BITS,
            GROUP,
            VALUE_TOKENS,
            VALUE_PARTS,
        )
        accumulated = matrix_product(rounded(weights, DTYPE), values, accumulated)

    for block_start in tl.range(fresh_begin, split_end, TOKEN_BLOCK, num_stages=STAGES):
        token = block_start + tl.arange(0, TOKEN_BLOCK)
        real = (token < end)[:, None]
        keys = new_tokens_tile(key_fresh_ptr, key_token_stride, key_channel_stride, token, key_channel, real & key_inside[None, :], first)
        logits = tile_logits(
            query,
            keys,
            token,
            query_row,
            live,
            mask_at,
            mask_token_stride,
            mask_head_stride,
            mask_column_stride,
            mask_columns,
            padding,
            first,
            end,
            scale,
            softcap,
            MASK,
            HAS_SOFTCAP,
            REPEATS,
            False,
        )
        weights, maximum, total, accumulated = softmax_step(logits, unit, maximum, total, accumulated)
        values = new_tokens_tile(
            value_fresh_ptr, value_token_stride, value_channel_stride, token, value_channel, real & value_inside[None, :], first
        )
        accumulated = matrix_product(rounded(weights, DTYPE), values, accumulated)

    maximum, total = tl.reshape(maximum, [QUERY_BLOCK]), tl.reshape(total, [QUERY_BLOCK])
    if SPLITS == 1:
        store_output(
            out_ptr, accumulated, total, past_capacity, query_row, row_head, new_tokens, value_channel, value_inside, REPEATS, VALUE_DIM
        )
    else:
        slot = (row_head * SPLITS + split) * query_rows + query_row
        tl.store(maximum_ptr + slot, maximum / LOG2_E, mask=live)
        tl.store(total_ptr + slot, total, mask=live)
        partial_at = partial_ptr + slot[:, None] * VALUE_DIM + value_channel[None, :]
        tl.store(partial_at, accumulated, mask=live[:, None] & value_inside[None, :])
