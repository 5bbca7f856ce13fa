"""Decode attention over packed records, in plain Triton: codes go to the tensor cores as they are stored.

The general kernel (:mod:`kivi_ops.kernels.attention`) restores every element; here none is. A field masked in place in a 16-bit word *is* a
float16 subnormal, code * 2^(-24 + its place in the byte), which the tensor cores keep. So codes are one operand as they lie in memory, and
the grid goes into the other, small one: logits = (q * scale) . code + q . min, output = (p * scale) . code + p . min. Fields of a word
belong to different groups, so each field is a product of its own and nothing is shuffled.

q * scale, p and p * scale are carried as two float16 parts, x = high + low: one part alone costs an error of 8e-4 where Values have zero
mean. A block has 8 query rows; the low parts are rows 8 .. 15 of the same tensor core operand, so the second part costs no second product.

One launch covers a row's tokens: *bulk* programs take whole chunks that are sealed on both sides, *tail* programs one slice of 32 of the
other tokens each (the last partial records, the windows, the new tokens). Every program leaves the same kind of partial result for
:func:`combine`. Serves G = 32, D_k = D_v of 64 or 128, 2 and 4 bits (mixed too), 16-bit floats. Must not know of sealing or launches.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from kivi_ops.kernels.attention import MASK_BOOL, MASK_CAUSAL, MASK_NONE
from kivi_ops.kernels.common import narrow, row_span, visible_boundary, widen

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # the interpreter has no inline assembly

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def field(words, BIT: tl.constexpr, BITS: tl.constexpr):
    """The codes at ``BIT`` of uint16 words, as float16 code * 2^(-24 + BIT % 8)."""
    MASK: tl.constexpr = ((1 << BITS) - 1) << (BIT % 8)
    if INTERPRET:
        codes = ((words >> (BIT // 8 * 8)) & MASK).to(tl.float16, bitcast=True)
    else:
        TWO: tl.constexpr = MASK * 0x10001
        if BIT < 8:
            codes = tl.inline_asm_elementwise(f"and.b32 $0, $1, {TWO};", "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
        else:
            codes = tl.inline_asm_elementwise(
                f"{{ .reg .b32 t; shr.u32 t, $1, 8; and.b32 $0, t, {TWO}; }}", "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
            )
    return codes


@triton.jit
def split_float(x):
    """float32 as two float16 parts."""
    if INTERPRET:
        high = x.to(tl.float16)
        low = (x - high.to(tl.float32)).to(tl.float16)
    else:
        high, low = tl.inline_asm_elementwise(
            """{ .reg .b16 a, b; .reg .f32 u, v; cvt.rn.f16x2.f32 $0, $3, $2; mov.b32 {a, b}, $0; cvt.f32.f16 u, a; cvt.f32.f16 v, b;
            sub.f32 u, $2, u; sub.f32 v, $3, v; cvt.rn.f16x2.f32 $1, v, u; }""",
            "=&r,=&r,f,f",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return high, low


@triton.jit
def times(a, b):
    """float16 a * b as two float16 parts, exact but for underflow."""
    if INTERPRET:
        high = (a.to(tl.float32) * b.to(tl.float32)).to(tl.float16)
        low = (a.to(tl.float32) * b.to(tl.float32) - high.to(tl.float32)).to(tl.float16)
    else:
        high, low = tl.inline_asm_elementwise(
            "{ .reg .b32 t; mul.rn.f16x2 $0, $2, $3; neg.f16x2 t, $0; fma.rn.f16x2 $1, $2, $3, t; }",
            "=&r,=&r,r,r",
            [a, b],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return high, low


@triton.jit
def times_add(a, b, c):
    """float16 a * b + c, rounded once."""
    if INTERPRET:
        result = (a.to(tl.float32) * b.to(tl.float32) + c.to(tl.float32)).to(tl.float16)
    else:
        result = tl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.float16, is_pure=True, pack=2)
    return result


@triton.jit
def power(x):
    """2^x. ``tl.exp2`` spends four instructions on results below 2^-126, which here are nothing."""
    if INTERPRET:
        result = tl.exp2(x)
    else:
        result = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def dot(a, b, accumulated):
    """a @ b + accumulated, the products exact; the interpreter would multiply the bits of bfloat16."""
    if INTERPRET:
        result = tl.dot(widen(a), widen(b), accumulated)
    else:
        result = tl.dot(a, b, accumulated)
    return result


@triton.jit
def stack(high, low):
    """[ROWS, K] twice -> [2 * ROWS, K]. The parts of one row come to lie in the same thread: nothing moves.

    Not ``tl.join``, for whose sake the compiler would order a dot's operands differently.
    """
    first = (tl.arange(0, 2) == 0)[:, None, None]
    return tl.reshape(tl.where(first, high[None, :, :], low[None, :, :]), [2 * high.shape[0], high.shape[1]])


@triton.jit
def unstack(x):
    """[2 * ROWS, N] -> [ROWS, N]: the sum of both parts."""
    return tl.sum(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), 0)


@triton.jit
def two_slices(x):
    """[64] -> its halves."""
    return tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2]), (1, 0)))


@triton.jit
def pick(x, INDEX: tl.constexpr):
    """Column ``INDEX`` of [ROWS, 8]: [ROWS]."""
    return tl.sum(tl.where((tl.arange(0, 8) == INDEX)[None, :], x, 0.0), 1)


@triton.jit
def power_of_two_above(x):
    """(2^-e, 2^e) with x * 2^-e in [0.5, 1) for positive normal float32 x, 1 for the rest."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    usual = (bits > 0) & (bits < 0x7E000000)
    down = tl.where(usual, (253 << 23) - bits, 127 << 23).to(tl.float32, bitcast=True)
    up = tl.where(usual, bits + (1 << 23), 127 << 23).to(tl.float32, bitcast=True)
    return down, up


@triton.jit
def largest(scales, so_far):
    """The largest of a tuple of [64] scales and ``so_far``, as float32; NaN does not count, its group's minimum is NaN as well."""
    most = widen(scales[0])
    for i in tl.static_range(1, len(scales)):
        most = tl.maximum(most, widen(scales[i]))
    return tl.maximum(tl.max(tl.where(most == most, most, 0.0), 0), so_far)


@triton.jit
def normaliser(scales, so_far, WIDE: tl.constexpr):
    """(2^-e, 2^e) that bring bfloat16 scales into float16's range; float16 ones stay as they are."""
    if WIDE:
        down, up = power_of_two_above(largest(scales, so_far))
    else:
        down, up = 1.0, 1.0
    return down, up


@triton.jit
def weight_bits(largest_scale, WIDE: tl.constexpr):
    """w such that 2^w times any scale stays below 2^15; bfloat16 scales (WIDE) are normalised themselves.

    Softmax weights are carried times 2^w, so that small ones stay normal in float16.
    """
    if WIDE:
        bits = 15.0
    else:
        exponent = (largest_scale.to(tl.int32, bitcast=True) >> 23) - 126
        bits = 15.0 - tl.maximum(exponent, 0).to(tl.float32)
    return bits


@triton.jit
def half_scale(scale, down, WIDE: tl.constexpr):
    """A scale as float16: bfloat16 times the power of two ``down``."""
    if WIDE:
        scale = (widen(scale) * down).to(tl.float16)
    return scale


@triton.jit
def native_split(x, like):
    """float32 as two parts in the dtype of ``like``: 22 bits in float16, 16 in bfloat16, whose range is wanted."""
    if like.dtype == tl.bfloat16:
        high = x.to(tl.bfloat16)
        low = (x - widen(high)).to(tl.bfloat16)
    else:
        high, low = split_float(x)
    return high, low


@triton.jit
def mask_logits(
    logits,
    token,
    limit,
    query_row,
    mask_at,
    mask_column_stride,
    mask_columns,
    padding,
    first,
    new_tokens,
    MASK: tl.constexpr,
    REPEATS: tl.constexpr,
):
    """Base-2 logits [ROWS, tokens] with -inf where a token is not visible: past ``limit``, or by the mask."""
    visible = (token < limit)[None, :] & (query_row < new_tokens * REPEATS)[:, None]
    if MASK == MASK_CAUSAL:
        visible = visible & (token[None, :] <= (first + query_row // REPEATS)[:, None])
    elif MASK != MASK_NONE:
        column = (token + padding).to(tl.int64)[None, :]
        visible = visible & (column < mask_columns)
        mask = tl.load(mask_at[:, None] + column * mask_column_stride, mask=visible, other=0)
        if MASK == MASK_BOOL:
            visible = visible & (mask != 0)
        else:
            logits += widen(mask) * LOG2_E
    return tl.where(visible, logits, float("-inf"))


@triton.jit
def store_partial(partial_ptr, maximum_ptr, total_ptr, slot, mask_rows, reference, total, output, DIM: tl.constexpr):
    """One program's result: log weights' reference, total and weighted sum, a tuple of [ROWS, 32] a group of channels."""
    # A NaN total must be seen by the combine, even where no logit was a number.
    finite = tl.where(reference == float("-inf"), 0.0, reference * LN_2)
    tl.store(maximum_ptr + slot, tl.where(total == 0.0, float("-inf"), finite), mask=mask_rows)
    tl.store(total_ptr + slot, total, mask=mask_rows)
    channel = tl.arange(0, 32)
    for group in tl.static_range(DIM // 32):
        target = partial_ptr + slot[:, None] * DIM + (channel + group * 32)[None, :]
        tl.store(target, output[group], mask=mask_rows[:, None] & (channel >= 0)[None, :])


@triton.jit
def decode_kernel(
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
    AFTER: tl.constexpr,
    MASK: tl.constexpr,
    REPEATS: tl.constexpr,
    DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_TOKENS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_TOKENS: tl.constexpr,
    TAIL_SPLITS: tl.constexpr,
    BULK_SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: ROWS query rows of one batch row and KV head over one slice of the tail, or over every BULK_SPLITS-th chunk.

    A chunk is CHUNK tokens: one Key and one Value record, or several of the shorter one with mixed bits.
    """
    ROWS: tl.constexpr = 8
    SLICE: tl.constexpr = 32  # tokens of one product: a group
    HALF: tl.constexpr = 64  # channels of a Key word's row, tokens of a Value word's row
    SUBNORMAL: tl.constexpr = 16777216.0  # 2^24
    CHUNK: tl.constexpr = KEY_TOKENS if KEY_TOKENS > VALUE_TOKENS else VALUE_TOKENS
    HALVES: tl.constexpr = DIM // HALF  # Key channel parts
    GROUPS: tl.constexpr = DIM // SLICE  # Value channel parts, each one group of channels
    KEY_SLICES: tl.constexpr = KEY_TOKENS // SLICE
    VALUE_PARTS: tl.constexpr = VALUE_TOKENS // HALF
    CODES: tl.constexpr = SLICE * HALF  # words of either record
    KEY_PAIRS: tl.constexpr = KEY_SLICES * DIM
    VALUE_PAIRS: tl.constexpr = GROUPS * VALUE_TOKENS
    KEY_RECORD: tl.constexpr = CODES + 2 * KEY_PAIRS
    VALUE_RECORD: tl.constexpr = CODES + 2 * VALUE_PAIRS
    KEY_MASK: tl.constexpr = (1 << KEY_BITS) - 1
    VALUE_MASK: tl.constexpr = (1 << VALUE_BITS) - 1
    OUTPUTS: tl.constexpr = 4 if (DIM == 128 or VALUE_BITS == 2) else 2  # one for each group and place in the byte
    WIDE: tl.constexpr = key_meta_ptr.dtype.element_ty == tl.bfloat16
    SPLITS: tl.constexpr = TAIL_SPLITS + BULK_SPLITS

    split = tl.program_id(0) % SPLITS
    row_head = (tl.program_id(0) // SPLITS).to(tl.int64)
    row, head = row_head // heads, row_head % heads
    start, padding, first, end = row_span(position_ptr, position_stride, left_padding_ptr, row, new_tokens, capacity)
    key_boundary = visible_boundary(tl.load(sealed_ptr + 2 * row), first, AFTER)
    value_boundary = visible_boundary(tl.load(sealed_ptr + 2 * row + 1), first, AFTER)
    past_capacity = start + new_tokens > capacity
    bulk = tl.minimum(tl.minimum(key_boundary, value_boundary), tl.maximum(first, 0)) // CHUNK * CHUNK

    query_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask_rows = query_row < new_tokens * REPEATS
    query_rows = new_tokens * REPEATS
    slot = (row_head * SPLITS + split) * query_rows + query_row
    slice_start = bulk + split * SLICE
    chunk = split - TAIL_SPLITS
    idle = tl.where(split < TAIL_SPLITS, slice_start >= end, chunk >= bulk // CHUNK) | past_capacity
    if idle:
        tl.store(maximum_ptr + slot, tl.full([ROWS], float("-inf"), tl.float32), mask=mask_rows)
        return

    channel = tl.arange(0, HALF)
    token_in_slice = tl.arange(0, SLICE)
    group_8 = tl.arange(0, 8)
    query_head = head * REPEATS + query_row % REPEATS
    query_token = (query_row // REPEATS).to(tl.int64)
    mask_at = mask_ptr + row * mask_row_stride + query_head * mask_head_stride + query_token * mask_token_stride

    # The query twice: as it is, for products with minima and floats, and times the scale's power of two, for products with codes. The
    # product with the identity puts it where the tensor cores leave their results, which is where the parts of a row meet for free.
    row_16 = tl.arange(0, 2 * ROWS)
    at = tl.program_id(1) * ROWS + row_16
    query_at = (head * REPEATS + at % REPEATS) * query_head_stride + (at // REPEATS).to(tl.int64) * query_token_stride
    query_at = query_ptr + row * query_row_stride + query_at[:, None] + channel.to(tl.int64)[None, :] * query_channel_stride
    real = ((row_16 < ROWS) & (at < new_tokens * REPEATS))[:, None] & (channel >= 0)[None, :]
    identity = tl.where(channel[:, None] == channel[None, :], 1.0, 0.0).to(query_ptr.dtype.element_ty)
    nothing = tl.zeros([2 * ROWS, HALF], tl.float32)
    queries = ()
    exact = ()
    for half in tl.static_range(HALVES):
        query = tl.load(query_at + half * HALF * query_channel_stride, mask=real, other=0.0)
        queries = queries + (query,)
        exact = exact + (unstack(dot(query, identity, nothing)),)
    query_most = tl.max(tl.abs(exact[0]), 1)
    if HALVES == 2:
        query_most = tl.maximum(query_most, tl.max(tl.abs(exact[1]), 1))
    query_down, query_up = power_of_two_above(query_most)
    parts = ()
    for half in tl.static_range(HALVES):
        parts = parts + ((exact[half] * query_down[:, None]).to(tl.float16),)
    natural = scale * LOG2_E  # logits are in base 2
    code_logit = query_up * (natural * SUBNORMAL)

    if split < TAIL_SPLITS:
        token = slice_start + token_in_slice
        in_window = (token < first) & (token < end)
        is_new = (token >= first) & (token < end)
        window_row = (token % window_rows).to(tl.int64)

        # Keys: both as codes and as floats; each token's logit is one of them. Loads wait for nothing.
        sealed = token < key_boundary
        any_sealed = slice_start + 0 * channel < key_boundary
        local = slice_start % KEY_TOKENS
        part = local // SLICE
        base = (row_head * key_records + slice_start // KEY_TOKENS) * KEY_RECORD
        words = tl.load(
            key_words_ptr + base + (token_in_slice * HALF)[None, :] + channel[:, None],
            mask=sealed[None, :] & (channel >= 0)[:, None],
            other=0,
        ).to(tl.uint16, bitcast=True)
        meta = key_meta_ptr + base + CODES + part * DIM + channel
        scales = ()
        for half in tl.static_range(HALVES):
            scales = scales + (tl.load(meta + half * HALF, mask=any_sealed, other=0.0),)
        key_down, key_up = normaliser(scales, 0.0, WIDE)
        coded = tl.zeros([2 * ROWS, SLICE], tl.float32)
        floats = tl.zeros([2 * ROWS, SLICE], tl.float32)
        bias = tl.zeros([2 * ROWS, 8], tl.float32)
        window_at = key_window_ptr + (row_head * window_rows + window_row)[None, :] * DIM + channel[:, None]
        fresh_at = key_ptr + row * key_row_stride + head * key_head_stride + (token - first).to(tl.int64)[None, :] * key_token_stride
        fresh_at = fresh_at + channel.to(tl.int64)[:, None] * key_channel_stride
        for half in tl.static_range(HALVES):
            codes = ((words >> ((part + half * KEY_SLICES) * KEY_BITS).to(tl.uint16)) & KEY_MASK).to(tl.float16, bitcast=True)
            high, low = times(parts[half], tl.broadcast_to(half_scale(scales[half], key_down, WIDE)[None, :], [ROWS, HALF]))
            coded = tl.dot(stack(high, low), codes, coded)
            minimum = tl.load(meta + KEY_PAIRS + half * HALF, mask=any_sealed, other=0.0)
            bias = dot(queries[half], tl.broadcast_to(minimum[:, None], [HALF, 8]), bias)
            keys = tl.load(window_at + half * HALF, mask=(in_window & (sealed == 0))[None, :] & (channel >= 0)[:, None], other=0.0)
            fresh = tl.load(
                fresh_at + half * HALF * key_channel_stride, mask=(is_new & (sealed == 0))[None, :] & (channel >= 0)[:, None], other=0.0
            )
            floats = dot(queries[half], tl.where((is_new & (sealed == 0))[None, :], fresh, keys), floats)
        logits = unstack(coded) * (code_logit * key_up)[:, None] + (pick(unstack(bias), 0) * natural)[:, None]
        logits = tl.where(sealed[None, :], logits, unstack(floats) * natural)
        logits = mask_logits(
            logits, token, end, query_row, mask_at, mask_column_stride, mask_columns, padding, first, new_tokens, MASK, REPEATS
        )

        # Values likewise; a token is all zeros in the form that it does not have.
        sealed = token < value_boundary
        local = slice_start % VALUE_TOKENS
        base = (row_head * value_records + slice_start // VALUE_TOKENS) * VALUE_RECORD
        meta = value_meta_ptr + base + CODES + local + token_in_slice
        scales = ()
        for group in tl.static_range(GROUPS):
            scales = scales + (tl.load(meta + group * VALUE_TOKENS, mask=sealed, other=0.0),)
        tail_most = largest(scales, 0.0)
        value_down, value_up = normaliser(scales, 0.0, WIDE)
        reference = tl.max(logits, 1)
        shift = tl.where(reference == float("-inf"), 0.0, reference) - weight_bits(tail_most, WIDE)
        weights = power(logits - shift[:, None])
        total = tl.sum(weights, 1)
        high, low = split_float(weights)
        native_high, native_low = native_split(weights, scales[0])
        native = stack(native_high, native_low)
        window_at = value_window_ptr + (row_head * window_rows + window_row)[:, None] * DIM + token_in_slice[None, :]
        fresh_at = value_ptr + row * value_row_stride + head * value_head_stride
        fresh_at = fresh_at + (token - first).to(tl.int64)[:, None] * value_token_stride
        fresh_at = fresh_at + token_in_slice.to(tl.int64)[None, :] * value_channel_stride
        words_at = value_words_ptr + base + (token_in_slice * HALF)[None, :] + (local % HALF + token_in_slice)[:, None]
        words = tl.load(words_at, mask=sealed[:, None] & (token_in_slice >= 0)[None, :], other=0).to(tl.uint16, bitcast=True)
        output = ()
        for group in tl.static_range(GROUPS):
            codes = ((words >> ((local // HALF * GROUPS + group) * VALUE_BITS).to(tl.uint16)) & VALUE_MASK).to(tl.float16, bitcast=True)
            grid = tl.broadcast_to(half_scale(scales[group], value_down, WIDE)[None, :], [ROWS, SLICE])
            scaled_high, scaled_low = times(high, grid)
            coded = tl.dot(stack(scaled_high, times_add(low, grid, scaled_low)), codes)
            minimum = tl.load(meta + VALUE_PAIRS + group * VALUE_TOKENS, mask=sealed, other=0.0)
            window_mask = (in_window & (sealed == 0))[:, None] & (token_in_slice >= 0)[None, :]
            fresh_mask = (is_new & (sealed == 0))[:, None] & (token_in_slice >= 0)[None, :]
            floats = tl.load(window_at + group * SLICE, mask=window_mask, other=0.0)
            fresh = tl.load(fresh_at + group * SLICE * value_channel_stride, mask=fresh_mask, other=0.0)
            floats = tl.where((is_new & (sealed == 0))[:, None], fresh, floats)
            floats = tl.where(sealed[:, None], tl.broadcast_to(minimum[:, None], [SLICE, SLICE]), floats)
            added = dot(native, floats, tl.zeros([2 * ROWS, SLICE], tl.float32))
            output = output + (unstack(coded) * (SUBNORMAL * value_up) + unstack(added),)
        store_partial(partial_ptr, maximum_ptr, total_ptr, slot, mask_rows, shift, total, output, DIM)
        return

    shift = tl.full([ROWS], float("-inf"), tl.float32)  # base-2 logarithm of the unit that weights are carried in
    value_most = 0.0  # largest Value scale so far
    value_unit = 1.0  # of the codes' part of the output; a power of two, bfloat16 only
    output = ()
    for _ in tl.static_range(OUTPUTS):
        output = output + (tl.zeros([2 * ROWS, SLICE], tl.float32),)
    minima = tl.zeros([2 * ROWS, 8], tl.float32)
    total = tl.zeros([2 * ROWS, 8], tl.float32)
    ones = tl.full([SLICE, 8], 1.0, tl.float16)

    for chunk in tl.range(split - TAIL_SPLITS, bulk // CHUNK, BULK_SPLITS, num_stages=STAGES):
        logits = ()
        for record in tl.static_range(CHUNK // KEY_TOKENS):
            base = (row_head * key_records + chunk * (CHUNK // KEY_TOKENS) + record) * KEY_RECORD
            words = tl.load(key_words_ptr + base + (token_in_slice * HALF)[None, :] + channel[:, None]).to(tl.uint16, bitcast=True)
            meta = key_meta_ptr + base + CODES + channel
            bias = tl.zeros([2 * ROWS, 8], tl.float32)
            for half in tl.static_range(HALVES):
                low_at = meta[:, None] + (group_8 * DIM + (KEY_PAIRS + half * HALF))[None, :]
                low = tl.load(low_at, mask=(group_8 < KEY_SLICES)[None, :] & (channel >= 0)[:, None], other=0.0)
                bias = dot(queries[half], low, bias)
            bias = unstack(bias) * natural
            scales = ()
            for i in tl.static_range(KEY_SLICES * HALVES):
                scales = scales + (tl.load(meta + i * HALF),)
            key_down, key_up = normaliser(scales, 0.0, WIDE)
            for part in tl.static_range(KEY_SLICES):
                product = tl.zeros([2 * ROWS, SLICE], tl.float32)
                for half in tl.static_range(HALVES):
                    grid = half_scale(scales[part * HALVES + half], key_down, WIDE)
                    high, low = times(parts[half], tl.broadcast_to(grid[None, :], [ROWS, HALF]))
                    product = tl.dot(stack(high, low), field(words, (half * KEY_SLICES + part) * KEY_BITS, KEY_BITS), product)
                factor = code_logit * (key_up * 0.5 ** (part * KEY_BITS % 8))
                logit = unstack(product) * factor[:, None] + pick(bias, part)[:, None]
                if MASK > 1:
                    token = token_in_slice + (chunk * CHUNK + (record * KEY_SLICES + part) * SLICE)
                    logit = mask_logits(
                        logit, token, end, query_row, mask_at, mask_column_stride, mask_columns, padding, first, new_tokens, MASK, REPEATS
                    )
                logits = logits + (logit,)

        scales = ()
        for record in tl.static_range(CHUNK // VALUE_TOKENS):
            base = (row_head * value_records + chunk * (CHUNK // VALUE_TOKENS) + record) * VALUE_RECORD
            for i in tl.static_range(GROUPS * VALUE_PARTS):
                scales = scales + (tl.load(value_meta_ptr + base + CODES + i * HALF + channel),)
        value_most = largest(scales, value_most)
        highest = logits[0]
        for part in tl.static_range(1, len(logits)):
            highest = tl.maximum(highest, logits[part])
        reference = tl.max(highest, 1)
        reference = tl.where(reference == float("-inf"), 0.0, reference) if MASK > 1 else reference
        new_shift = tl.maximum(shift, reference - weight_bits(value_most, WIDE))
        decay = power(shift - new_shift)
        shift = new_shift
        decay_16 = tl.reshape(tl.broadcast_to(decay[None, :], [2, ROWS]), [2 * ROWS])[:, None]
        minima *= decay_16
        total *= decay_16
        value_down = 1.0
        if WIDE:
            value_down, value_up = power_of_two_above(value_most)
            decay_16 *= value_unit * value_down
            value_unit = value_up
        scaled = ()
        for i in tl.static_range(OUTPUTS):
            scaled = scaled + (output[i] * decay_16,)
        output = scaled

        for record in tl.static_range(CHUNK // VALUE_TOKENS):
            base = (row_head * value_records + chunk * (CHUNK // VALUE_TOKENS) + record) * VALUE_RECORD
            words_at = value_words_ptr + base + (token_in_slice * HALF)[None, :] + token_in_slice[:, None]
            words = (tl.load(words_at).to(tl.uint16, bitcast=True), tl.load(words_at + SLICE).to(tl.uint16, bitcast=True))
            low_at = value_meta_ptr + base + CODES + VALUE_PAIRS + (group_8 * VALUE_TOKENS)[None, :] + token_in_slice[:, None]
            for part in tl.static_range(VALUE_PARTS):
                grids = ()
                for group in tl.static_range(GROUPS):
                    grid = half_scale(scales[(record * GROUPS + group) * VALUE_PARTS + part], value_down, WIDE)
                    grids = grids + (two_slices(grid),)
                for half in tl.static_range(2):
                    weights = power(logits[(record * VALUE_PARTS + part) * 2 + half] - shift[:, None])
                    high, low = split_float(weights)
                    both = stack(high, low)
                    total = tl.dot(both, ones, total)
                    minimum = tl.load(
                        low_at + (part * 2 + half) * SLICE, mask=(group_8 < GROUPS)[None, :] & (token_in_slice >= 0)[:, None], other=0.0
                    )
                    if WIDE:
                        native_high, native_low = native_split(weights, minimum)
                        minima = dot(stack(native_high, native_low), minimum, minima)
                    else:
                        minima = tl.dot(both, minimum, minima)
                    updated = ()
                    for group in tl.static_range(GROUPS):
                        grid = tl.broadcast_to(grids[group][half][None, :], [ROWS, SLICE])
                        scaled_high, scaled_low = times(high, grid)
                        codes = field(words[half], (part * GROUPS + group) * VALUE_BITS, VALUE_BITS)
                        target = output[(part * GROUPS + group) % OUTPUTS]
                        updated = updated + (tl.dot(stack(scaled_high, times_add(low, grid, scaled_low)), codes, target),)
                    if OUTPUTS == GROUPS:
                        output = updated
                    elif part % 2 == 0:
                        output = updated + output[GROUPS:]
                    else:
                        output = output[:GROUPS] + updated

    minima = unstack(minima)
    whole = ()
    for group in tl.static_range(GROUPS):
        codes_sum = unstack(output[group]) * (SUBNORMAL / 2 ** (group * VALUE_BITS % 8))
        if OUTPUTS > GROUPS:
            codes_sum += unstack(output[GROUPS + group]) * (SUBNORMAL / 2 ** ((GROUPS + group) * VALUE_BITS % 8))
        if WIDE:
            codes_sum *= value_unit
        whole = whole + (codes_sum + pick(minima, group)[:, None],)
    store_partial(partial_ptr, maximum_ptr, total_ptr, slot, mask_rows, shift, pick(unstack(total), 0), whole, DIM)


@triton.jit
def combine(
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
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    WAIT: tl.constexpr,
):
    """Merge partial results [B * H, SPLITS, query rows, ...] with one global normalisation: one query row, DIM_BLOCK channels a program.

    A slot whose maximum is -inf counts for nothing, whatever else lies in it. WAIT: launched while the first kernel still runs.
    """
    row_head = tl.program_id(0).to(tl.int64)
    row = row_head // heads
    query_row = tl.program_id(1)
    query_rows = new_tokens * REPEATS
    channel = tl.program_id(2) * DIM_BLOCK + tl.arange(0, DIM_BLOCK)
    start, padding, first, end = row_span(position_ptr, position_stride, left_padding_ptr, row, new_tokens, capacity)
    if WAIT:
        tl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    merged = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    output = tl.zeros([DIM_BLOCK], tl.float32)
    for begin in tl.static_range(0, SPLITS, SPLIT_BLOCK):
        split = begin + tl.arange(0, SPLIT_BLOCK)
        slot = (row_head * SPLITS + split) * query_rows + query_row
        exists = split < SPLITS
        # All loads at once: a slot that turns out to be idle is dropped only after it was read.
        maximum = tl.load(maximum_ptr + slot, mask=exists, other=float("-inf"))
        split_total = tl.load(total_ptr + slot, mask=exists, other=0.0)
        partial = tl.load(partial_ptr + slot[:, None] * DIM + channel[None, :], mask=exists[:, None] & (channel < DIM)[None, :], other=0.0)
        active = maximum > float("-inf")
        highest = tl.maximum(merged, tl.max(maximum, 0))
        reference = tl.where(highest == float("-inf"), 0.0, highest)
        decay = tl.exp(merged - reference)
        weight = tl.exp(maximum - tl.max(reference, 0))
        total = total * decay + tl.sum(tl.where(active, split_total * weight, 0.0), 0)
        output = output * decay + tl.sum(tl.where(active[:, None], partial * weight[:, None], 0.0), 0)
        merged = highest
    output = tl.where(total == 0.0, 0.0, output / total)  # 0 where nothing is visible
    output = tl.where(start + new_tokens > capacity, float("nan"), output)
    target = (row_head * REPEATS + query_row % REPEATS) * new_tokens + query_row // REPEATS
    tl.store(out_ptr + target * DIM + channel, narrow(output, out_ptr.dtype.element_ty), mask=channel < DIM)
