"""Decode attention over packed records, in plain Triton: codes go to the tensor cores as they are stored.

The general kernel (:mod:`kivi_ops.kernels.attention`) restores every element; here none is. A field masked in place in a 16-bit word *is*
a subnormal of the cache's dtype, code * 2^-24 (float16) or 2^-133 (bfloat16) times a power of two for its place, and tensor cores keep
subnormals. So codes are one operand as they lie in memory, and the grid goes into the other, small one: logits = (q * scale) . code +
q . min, output = (p * scale) . code + p . min. Fields of a word belong to different groups, so each has a product of its own and nothing
is shuffled.

q * scale, p and p * scale are carried as two parts, x rounded and what that lost: one part alone costs an error of 2^-12 of every term,
which Values of zero mean do not average away. A program has 8 query rows; the low parts are rows 8 .. 15 of the same tensor core operand,
so they cost no second product. And tensor cores truncate when they accumulate: every chunk is added up on its own, then to the rest in
float32, rounded. (Triton's interpreter has no inline assembly, hence two spellings of each tile operation.)

Whole chunks of sealed tokens (one Key and one Value record, or several of the shorter one with mixed bits) are dealt to a row's splits in
turn. What is left of a row (sealed tokens of its last records, the windows, the new tokens) follows as *slices* of 32 tokens, dealt on in
turn. Every split leaves its maximum, total and weighted sum to :mod:`kivi_ops.kernels.combine`.

Serves G = 32, D_k = D_v of 64 or 128, 2 and 4 bits, metadata in the cache's 16-bit dtype. Must not know of sealing or launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kivi_ops.kernels.attention import MASK_BOOL, MASK_CAUSAL, MASK_NONE
from kivi_ops.kernels.common import INTERPRET, assembly_type, narrow, own_tokens, row_span, visible_boundary, widen

LOG2_E = tl.constexpr(1.4426950408889634)
ROWS = tl.constexpr(8)  # query rows of a program
SLICE = tl.constexpr(32)  # tokens of one product: a group
HALF = tl.constexpr(64)  # channels of a Key word's row, tokens of a Value word's row
CODES = tl.constexpr(2048)  # words of either record that hold codes: SLICE * HALF
SLICE_PLACE = tl.constexpr(4)  # where slices put a field: subnormal in both dtypes, and far from the last bit (slice_assembly too)


# ------------------------------------------------------------------------------------------------- places, units, assembly


@triton.constexpr_function
def place(bit, bits, dtype):
    """The bit at which :func:`unpack` leaves the field at ``bit``: the same for fields 8 bits apart.

    float16 has room for two bits more than a byte, and tensor cores truncate the less the higher a code lies.
    """
    return 8 if bits == 2 and bit % 8 == 0 and dtype == tl.float16 else bit % 8


@triton.constexpr_function
def unit(at, dtype):
    """What a sum over codes at bit ``at`` is to be multiplied by (with 2^13 more for bfloat16: float32 does not hold 2^133)."""
    return 2.0 ** ((120 if dtype == tl.bfloat16 else 24) - at)


@triton.constexpr_function
def unpack_assembly(bit, bits, dtype):
    at = place(bit, bits, dtype)
    mask = ((1 << bits) - 1 << at) * 0x10001
    if at == bit:
        return f"and.b32 $0, $1, {mask};"
    return f"{{ .reg .b32 t; prmt.b32 t, $1, $1, 0x2301; and.b32 $0, t, {mask}; }}"  # the bytes of each word exchanged


@triton.constexpr_function
def slice_assembly(bits):
    mask = ((1 << bits) - 1) * 0x10001
    return f"{{ .reg .b32 t; shr.u32 t, $1, $2; and.b32 t, t, {mask}; shl.b32 $0, t, 4; }}"


@triton.constexpr_function
def parts_assembly(kind):
    """Two float32 -> (both rounded, what that lost)."""
    back = {
        "f16": "mov.b32 {a, b}, $0; cvt.f32.f16 x, a; cvt.f32.f16 y, b;",
        "bf16": "{ .reg .b32 t; shl.b32 t, $0, 16; mov.b32 x, t; and.b32 t, $0, 0xffff0000; mov.b32 y, t; }",
    }[kind]
    return (
        f"{{ .reg .b16 a, b; .reg .f32 x, y; cvt.rn.{kind}x2.f32 $0, $3, $2; {back}\n"
        f"sub.f32 x, $2, x; sub.f32 y, $3, y; cvt.rn.{kind}x2.f32 $1, y, x; }}"
    )


@triton.constexpr_function
def product_assembly(kind):
    """a * b -> (rounded, what that lost). Before sm_90 bfloat16 has no product but this: -0.0 added."""
    return f"{{ .reg .b32 t; mov.b32 t, 0x80008000; fma.rn.{kind}x2 $0, $2, $3, t; neg.{kind}x2 t, $0; fma.rn.{kind}x2 $1, $2, $3, t; }}"


# ------------------------------------------------------------------------------------------------------------ tiles


@triton.jit
def unpack(words, BIT: tl.constexpr, BITS: tl.constexpr, T: tl.constexpr):
    """The codes at ``BIT`` of uint16 words, as subnormals of T at bit ``place(BIT, BITS, T)``."""
    if INTERPRET:
        PLACE: tl.constexpr = place(BIT, BITS, T)
        codes = (((words >> BIT) & ((1 << BITS) - 1)) << PLACE).to(tl.uint16).to(T, bitcast=True)
    else:
        ASSEMBLY: tl.constexpr = unpack_assembly(BIT, BITS, T)
        codes = tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2).to(T, bitcast=True)
    return codes


@triton.jit
def unpack_slice(words, bit, BITS: tl.constexpr, T: tl.constexpr):
    """The codes at ``bit``, known only now, as subnormals of T at SLICE_PLACE."""
    if INTERPRET:
        codes = (((words >> tl.cast(bit, tl.uint16)) & ((1 << BITS) - 1)) << SLICE_PLACE).to(tl.uint16).to(T, bitcast=True)
    else:
        ASSEMBLY: tl.constexpr = slice_assembly(BITS)
        codes = tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,r", [words, bit], dtype=tl.int16, is_pure=True, pack=2).to(T, bitcast=True)
    return codes


@triton.jit
def parts(x, T: tl.constexpr):
    """float32 as two parts in T."""
    if INTERPRET:
        high = narrow(x, T)
        low = narrow(x - widen(high), T)
    else:
        ASSEMBLY: tl.constexpr = parts_assembly(assembly_type(T))
        high, low = tl.inline_asm_elementwise(ASSEMBLY, "=&r,=&r,f,f", [x], dtype=(tl.int16, tl.int16), is_pure=True, pack=2)
        high, low = high.to(T, bitcast=True), low.to(T, bitcast=True)
    return high, low


@triton.jit
def times(a, b, T: tl.constexpr):
    """a * b as two parts, exact but for underflow."""
    if INTERPRET:
        high = narrow(widen(a) * widen(b), T)
        low = narrow(widen(a) * widen(b) - widen(high), T)
    else:
        ASSEMBLY: tl.constexpr = product_assembly(assembly_type(T))
        high, low = tl.inline_asm_elementwise(ASSEMBLY, "=&r,=&r,r,r", [a, b], dtype=(tl.int16, tl.int16), is_pure=True, pack=2)
        high, low = high.to(T, bitcast=True), low.to(T, bitcast=True)
    return high, low


@triton.jit
def times_add(a, b, c, T: tl.constexpr):
    """a * b + c, rounded once."""
    if INTERPRET:
        result = narrow(widen(a) * widen(b) + widen(c), T)
    else:
        ASSEMBLY: tl.constexpr = f"fma.rn.{assembly_type(T)}x2 $0, $1, $2, $3;"
        result = tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,r", [a, b, c], dtype=tl.int16, is_pure=True, pack=2).to(T, bitcast=True)
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
def alone(high):
    """[ROWS, K] -> [2 * ROWS, K], the low parts 0."""
    return stack(high, tl.zeros(high.shape, high.dtype))


@triton.jit
def unstack(x):
    """[2 * ROWS, N] -> [ROWS, N]: the sum of both parts."""
    return tl.sum(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), 0)


@triton.jit
def scaled_parts(high, low, grid, T: tl.constexpr):
    """(high + low) [ROWS, K] times ``grid`` [K], as one operand [2 * ROWS, K]."""
    grid = tl.broadcast_to(grid[None, :], high.shape)
    product_high, product_low = times(high, grid, T)
    return stack(product_high, times_add(low, grid, product_low, T))


@triton.jit
def two_slices(x):
    """[64] -> its halves."""
    return tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2]), (1, 0)))


@triton.jit
def pick(x, COLUMN: tl.constexpr):
    """One column of [ROWS, 8]: [ROWS]."""
    return tl.sum(tl.where((tl.arange(0, 8) == COLUMN)[None, :], x, 0.0), 1)


@triton.jit
def power_of_two_above(x):
    """(2^-e, 2^e) with x * 2^-e in [0.5, 1) for positive normal float32 x, 1 for the rest."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    usual = (bits > 0) & (bits < 0x7E000000)
    down = tl.where(usual, (253 << 23) - bits, 127 << 23).to(tl.float32, bitcast=True)
    up = tl.where(usual, bits + (1 << 23), 127 << 23).to(tl.float32, bitcast=True)
    return down, up


@triton.jit
def weight_bits(scales, T: tl.constexpr):
    """w such that weights up to 2^w times any of a tuple of scales stay in T's range: they are carried so that small ones stay normal.

    NaN does not count: its group's minimum is NaN as well.
    """
    BITS: tl.constexpr = 40 if T == tl.bfloat16 else 15
    ROOM: tl.constexpr = 79 if T == tl.bfloat16 else 0  # from scales of 2^this on
    most = widen(scales[0])
    for i in tl.static_range(1, len(scales)):
        most = tl.maximum(most, widen(scales[i]))
    most = tl.max(tl.where(most == most, most, 0.0), 0)
    exponent = (most.to(tl.int32, bitcast=True) >> 23) - 126
    return BITS - tl.maximum(exponent - ROOM, 0).to(tl.float32)


@triton.jit
def mask_logits(
    logits,
    token,
    end,
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
    """Base-2 logits [ROWS, tokens] with -inf where a token is not visible: from ``end`` on, or by the mask."""
    visible = (token < end)[None, :] & (query_row < new_tokens * REPEATS)[:, None]
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
def shares(work, total, programs):
    """Of ``programs`` dealt in proportion to ``work`` [rows], of which ``total`` is the sum; 0 without work."""
    share = (8 * programs * work + 7 * total - 1) // (8 * total)
    return tl.where(work > 0, tl.maximum(share, 1), 0)


@triton.jit
def assignment(
    index,
    splits,
    finest,
    position_ptr,
    position_stride,
    left_padding_ptr,
    rows,
    new_tokens,
    capacity,
    CHUNK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):
    """Deal programs of a head to rows in proportion to their lengths. Every program does it alone.

    Rows of like length get ``splits`` programs each, one wave in all. Where that does not come out even, ``finest`` * rows are dealt.
    A row with work for x programs gets x rounded up, unless that is within an eighth, and one at least: rows * (finest + 1) at most.

    Returns for program ``index`` its row (``rows``: it has none), the row's first program and how many the row has.
    """
    row = tl.arange(0, ROW_BLOCK)
    real = row < rows
    start = tl.load(position_ptr + row * position_stride, mask=real, other=0).to(tl.int64)
    padding = tl.load(left_padding_ptr + row, mask=real, other=0)
    first, end = own_tokens(start, padding, new_tokens, capacity)
    work = tl.where(real, tl.maximum(end, 0) // CHUNK + 2, 0)
    total = tl.sum(work, 0)
    share = shares(work, total, rows * splits)
    share = tl.where(tl.sum(share, 0) > rows * splits, shares(work, total, rows * finest), share)
    last = tl.cumsum(share, 0)
    before = real & (last <= index)
    mine = tl.sum(before.to(tl.int32), 0)
    return mine, tl.max(tl.where(before, last, 0), 0), tl.sum(tl.where(row == mine, share, 0), 0)


# ------------------------------------------------------------------------------------------------------------ slices


@triton.jit
def slice_logits(
    begin,
    record_ptr,
    meta_ptr,
    window_ptr,
    fresh_ptr,
    token_stride,
    boundary,
    first,
    end,
    window_rows,
    queries,
    to_logit,
    code_to_logit,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    T: tl.constexpr,
):
    """Base-2 logits [ROWS, SLICE] of tokens from ``begin`` on: from a record below ``boundary``, else from the window or the new tokens.

    Both forms are computed and one is chosen, so that no load waits for another. Pointers are those of the row and head.
    """
    HALVES: tl.constexpr = DIM // HALF
    SLICES: tl.constexpr = TOKENS // SLICE
    RECORD: tl.constexpr = CODES + 2 * SLICES * DIM
    channel = tl.arange(0, HALF)
    token = begin + tl.arange(0, SLICE)
    every = (channel >= 0)[:, None]
    sealed = (token < boundary)[None, :]
    kept = ((token >= boundary) & (token < first) & (token < end))[None, :]
    new = ((token >= boundary) & (token >= first) & (token < end))[None, :]
    part = begin % TOKENS // SLICE
    base = begin // TOKENS * RECORD
    words_at = record_ptr + base + (tl.arange(0, SLICE) * HALF)[None, :] + channel[:, None]
    words = tl.load(words_at, mask=(begin + 0 * token < boundary)[None, :] & every, other=0).to(tl.uint16, bitcast=True)
    meta_at = meta_ptr + base + CODES + part * DIM + channel
    window_at = window_ptr + (token % window_rows * DIM)[None, :] + channel[:, None]
    fresh_at = fresh_ptr + ((token - first).to(tl.int64) * token_stride)[None, :] + channel[:, None]
    coded = tl.zeros([2 * ROWS, SLICE], tl.float32)
    floats = tl.zeros([2 * ROWS, SLICE], tl.float32)
    bias = tl.zeros([2 * ROWS, 8], tl.float32)
    for half in tl.static_range(HALVES):
        grid = tl.load(meta_at + half * HALF, mask=begin + 0 * channel < boundary, other=0.0)
        minimum = tl.load(meta_at + SLICES * DIM + half * HALF, mask=begin + 0 * channel < boundary, other=0.0)
        keys = tl.load(window_at + half * HALF, mask=kept & every, other=0.0)
        fresh = tl.load(fresh_at + half * HALF, mask=new & every, other=0.0)
        high, low = times(queries[half], tl.broadcast_to(grid[None, :], [ROWS, HALF]), T)
        coded = dot(stack(high, low), unpack_slice(words, (part + half * SLICES) * BITS, BITS, T), coded)
        bias = dot(alone(queries[half]), tl.broadcast_to(minimum[:, None], [HALF, 8]), bias)
        floats = dot(alone(queries[half]), keys, floats)
        floats = dot(alone(queries[half]), fresh, floats)
    logits = unstack(coded) * (code_to_logit * 0.5**SLICE_PLACE)[:, None] + (pick(unstack(bias), 0) * to_logit)[:, None]
    return tl.where(sealed, logits, unstack(floats) * to_logit[:, None])


@triton.jit
def slice_values(
    begin,
    logits,
    shift,
    total,
    sums,
    record_ptr,
    meta_ptr,
    window_ptr,
    fresh_ptr,
    token_stride,
    boundary,
    first,
    end,
    window_rows,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    REST: tl.constexpr,
    T: tl.constexpr,
):
    """(shift, total, sums) with the Values of tokens from ``begin`` on added. A token is all zeros in the form that it does not have."""
    GROUPS: tl.constexpr = DIM // SLICE
    RECORD: tl.constexpr = CODES + 2 * GROUPS * TOKENS
    channel = tl.arange(0, SLICE)
    every = (channel >= 0)[None, :]
    token = begin + tl.arange(0, SLICE)
    sealed = token < boundary
    kept = ((token >= boundary) & (token < first) & (token < end))[:, None]
    new = ((token >= boundary) & (token >= first) & (token < end))[:, None]
    local = begin % TOKENS
    base = begin // TOKENS * RECORD
    meta_at = meta_ptr + base + CODES + local + tl.arange(0, SLICE)
    words_at = record_ptr + base + (channel * HALF)[None, :] + (local % HALF + tl.arange(0, SLICE))[:, None]
    words = tl.load(words_at, mask=(begin + 0 * token < boundary)[:, None] & every, other=0).to(tl.uint16, bitcast=True)
    window_at = window_ptr + (token % window_rows * DIM)[:, None] + channel[None, :]
    fresh_at = fresh_ptr + ((token - first).to(tl.int64) * token_stride)[:, None] + channel[None, :]
    group_8 = tl.arange(0, 8)
    low_at = meta_at[:, None] + (group_8 * TOKENS)[None, :] + GROUPS * TOKENS
    minima = tl.load(low_at, mask=sealed[:, None] & (group_8 < GROUPS)[None, :], other=0.0)
    grids = ()
    for group in tl.static_range(GROUPS):
        grids = grids + (tl.load(meta_at + group * TOKENS, mask=sealed, other=0.0),)
    new_shift = tl.maximum(shift, tl.max(logits, 1) - weight_bits(grids, T))
    finite = tl.where(new_shift == float("-inf"), 0.0, new_shift)
    decay = power(shift - finite)
    weights = power(logits - finite[:, None])
    high, low = parts(weights, T)
    both = stack(high, low)
    bias = unstack(dot(both, minima, tl.zeros([2 * ROWS, 8], tl.float32)))
    added = ()
    for group in tl.static_range(GROUPS):
        codes = unpack_slice(words, (local // HALF * GROUPS + group) * BITS, BITS, T)
        coded = dot(scaled_parts(high, low, grids[group], T), codes, tl.zeros([2 * ROWS, SLICE], tl.float32))
        values = tl.load(window_at + group * SLICE, mask=kept & every, other=0.0)
        fresh = tl.load(fresh_at + group * SLICE, mask=new & every, other=0.0)
        floats = dot(both, fresh, dot(both, values, tl.zeros([2 * ROWS, SLICE], tl.float32)))
        slice_sum = unstack(coded) * REST * unit(SLICE_PLACE, T) + unstack(floats) + pick(bias, group)[:, None]
        added = added + (sums[group] * decay[:, None] + slice_sum,)
    return new_shift, total * decay + tl.sum(weights, 1), added


# ------------------------------------------------------------------------------------------------------------ kernel


@triton.jit(do_not_specialize=["splits", "finest", "rows", "new_tokens", "capacity", "mask_columns", "key_records", "value_records"])
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
    spans_ptr,
    query_row_stride,
    query_head_stride,
    query_token_stride,
    key_row_stride,
    key_head_stride,
    key_token_stride,
    value_row_stride,
    value_head_stride,
    value_token_stride,
    position_stride,
    mask_row_stride,
    mask_head_stride,
    mask_token_stride,
    mask_column_stride,
    mask_columns,
    rows,
    heads,
    new_tokens,
    capacity,
    window_rows,
    key_records,
    value_records,
    splits,
    finest,
    scale,
    AFTER: tl.constexpr,
    MASK: tl.constexpr,
    REPEATS: tl.constexpr,
    DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_TOKENS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_TOKENS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    SIGNAL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: ROWS query rows of one batch row and KV head over chunks and slices ``split``, ``split + splits``, ... of its tokens.

    Query rows are the REPEATS query heads of the KV head for each new token. Channels of every tensor are adjacent. Grid: (B * H,
    splits, query blocks), or with ROW_BLOCK > 1 (H, B * (finest + 1), query blocks) and programs dealt to rows by :func:`assignment`.
    Writes to a slot of its own maximum (base 2; -inf where the split saw nothing, and then nothing else counts) and total float32 [slots,
    rows] and the weighted sum [slots, rows, D]; and spans int32 [B * H, 2], the first slot of a row and head and their number. SIGNAL: the
    combine may be launched while this kernel ends.
    """
    T: tl.constexpr = key_window_ptr.dtype.element_ty
    CHUNK: tl.constexpr = KEY_TOKENS if KEY_TOKENS > VALUE_TOKENS else VALUE_TOKENS
    HALVES: tl.constexpr = DIM // HALF  # Key channel parts
    GROUPS: tl.constexpr = DIM // SLICE  # Value channel parts, each one group of channels
    KEY_SLICES: tl.constexpr = KEY_TOKENS // SLICE
    VALUE_PARTS: tl.constexpr = VALUE_TOKENS // HALF
    KEY_RUN: tl.constexpr = CHUNK // KEY_TOKENS  # records of a chunk
    VALUE_RUN: tl.constexpr = CHUNK // VALUE_TOKENS
    KEY_PAIRS: tl.constexpr = KEY_SLICES * DIM
    VALUE_PAIRS: tl.constexpr = GROUPS * VALUE_TOKENS
    KEY_RECORD: tl.constexpr = CODES + 2 * KEY_PAIRS
    VALUE_RECORD: tl.constexpr = CODES + 2 * VALUE_PAIRS
    OUTPUTS: tl.constexpr = 4 if (DIM == 128 or VALUE_BITS == 2) else 2  # accumulators: one for each group and place
    REST: tl.constexpr = 8192.0 if T == tl.bfloat16 else 1.0
    QUERY_UP: tl.constexpr = 2.0**60 if T == tl.bfloat16 else 1.0  # queries are carried times this: products with codes stay normal

    if ROW_BLOCK == 1:
        row_head = tl.program_id(0).to(tl.int64)
        split = tl.program_id(1)
        row, head = row_head // heads, row_head % heads
        first_slot = row_head * splits
    else:
        head = tl.program_id(0).to(tl.int64)
        first_slot = head * rows * (finest + 1)
        row, begin, splits = assignment(
            tl.program_id(1), splits, finest, position_ptr, position_stride, left_padding_ptr, rows, new_tokens, capacity, CHUNK, ROW_BLOCK
        )
        if row >= rows:
            return
        row_head = row * heads + head
        split = tl.program_id(1) - begin
        first_slot += begin
    if (split == 0) & (tl.program_id(2) == 0):
        tl.store(spans_ptr + 2 * row_head, first_slot.to(tl.int32))
        tl.store(spans_ptr + 2 * row_head + 1, splits)
    start, padding, first, end = row_span(position_ptr, position_stride, left_padding_ptr, row, new_tokens, capacity)
    end = tl.where(start + new_tokens > capacity, 0, end)  # the row will be NaN: the combine's work
    key_boundary = visible_boundary(tl.load(sealed_ptr + 2 * row), first, AFTER)
    value_boundary = visible_boundary(tl.load(sealed_ptr + 2 * row + 1), first, AFTER)
    chunks = tl.minimum(tl.minimum(key_boundary, value_boundary), tl.minimum(tl.maximum(first, 0), end)) // CHUNK

    key_words_ptr += row_head * key_records * KEY_RECORD
    key_meta_ptr += row_head * key_records * KEY_RECORD
    value_words_ptr += row_head * value_records * VALUE_RECORD
    value_meta_ptr += row_head * value_records * VALUE_RECORD
    channel = tl.arange(0, HALF)
    token_in_slice = tl.arange(0, SLICE)
    group_8 = tl.arange(0, 8)
    query_row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    query_rows = new_tokens * REPEATS
    query_head = head * REPEATS + query_row % REPEATS
    query_token = (query_row // REPEATS).to(tl.int64)
    mask_at = mask_ptr + row * mask_row_stride + query_head * mask_head_stride + query_token * mask_token_stride

    # The product with the identity puts the query where the tensor cores leave their results, which is where the parts of a row meet for
    # free. It is carried times a power of two for each row.
    row_16 = tl.arange(0, 2 * ROWS)
    at = tl.program_id(2) * ROWS + row_16
    query_at = (head * REPEATS + at % REPEATS) * query_head_stride + (at // REPEATS).to(tl.int64) * query_token_stride
    query_at = query_ptr + row * query_row_stride + query_at[:, None] + channel[None, :]
    real = ((row_16 < ROWS) & (at < query_rows))[:, None] & (channel >= 0)[None, :]
    identity = narrow(tl.where(channel[:, None] == channel[None, :], 1.0, 0.0), T)
    exact = ()
    for half in tl.static_range(HALVES):
        query = tl.load(query_at + half * HALF, mask=real, other=0.0)
        exact = exact + (unstack(dot(query, identity, tl.zeros([2 * ROWS, HALF], tl.float32))),)
    query_most = tl.max(tl.abs(exact[0]), 1)
    if HALVES == 2:
        query_most = tl.maximum(query_most, tl.max(tl.abs(exact[1]), 1))
    query_down, query_up = power_of_two_above(query_most)
    queries = ()
    for half in tl.static_range(HALVES):
        queries = queries + (narrow(exact[half] * (query_down * QUERY_UP)[:, None], T),)
    to_logit = query_up * (scale * (LOG2_E / QUERY_UP))  # base 2
    code_to_logit = query_up * (scale * (LOG2_E * REST / QUERY_UP * unit(0, T)))

    shift = tl.full([ROWS], float("-inf"), tl.float32)  # base-2 logarithm of the unit that weights are carried in
    output = ()
    for _ in tl.static_range(OUTPUTS):
        output = output + (tl.zeros([ROWS, SLICE], tl.float32),)
    low_sums = tl.zeros([ROWS, 8], tl.float32)  # a column for each group: p . min
    total = tl.zeros([ROWS, 8], tl.float32)  # the same in every column
    ones = narrow(tl.full([SLICE, 8], 1.0, tl.float32), T)

    for chunk in tl.range(split, chunks, splits, num_stages=STAGES):
        logits = ()
        for record in tl.static_range(KEY_RUN):
            base = (chunk * KEY_RUN + record) * KEY_RECORD
            words = tl.load(key_words_ptr + base + (token_in_slice * HALF)[None, :] + channel[:, None]).to(tl.uint16, bitcast=True)
            meta_at = key_meta_ptr + base + CODES + channel
            bias = tl.zeros([2 * ROWS, 8], tl.float32)
            for half in tl.static_range(HALVES):
                low_at = meta_at[:, None] + (group_8 * DIM + (KEY_PAIRS + half * HALF))[None, :]
                low = tl.load(low_at, mask=(group_8 < KEY_SLICES)[None, :] & (channel >= 0)[:, None], other=0.0)
                bias = dot(alone(queries[half]), low, bias)
            bias = unstack(bias) * to_logit[:, None]
            for part in tl.static_range(KEY_SLICES):
                product = tl.zeros([2 * ROWS, SLICE], tl.float32)
                for half in tl.static_range(HALVES):
                    grid = tl.load(meta_at + (part * HALVES + half) * HALF)
                    high, low = times(queries[half], tl.broadcast_to(grid[None, :], [ROWS, HALF]), T)
                    product = dot(stack(high, low), unpack(words, (half * KEY_SLICES + part) * KEY_BITS, KEY_BITS, T), product)
                factor = code_to_logit * (unit(place(part * KEY_BITS, KEY_BITS, T), T) / unit(0, T))
                logit = unstack(product) * factor[:, None] + pick(bias, part)[:, None]
                if MASK > 1:
                    token = token_in_slice + (chunk * CHUNK + (record * KEY_SLICES + part) * SLICE)
                    logit = mask_logits(
                        logit, token, end, query_row, mask_at, mask_column_stride, mask_columns, padding, first, new_tokens, MASK, REPEATS
                    )
                logits = logits + (logit,)

        grids = ()
        for record in tl.static_range(VALUE_RUN):
            base = (chunk * VALUE_RUN + record) * VALUE_RECORD
            for i in tl.static_range(GROUPS * VALUE_PARTS):
                grids = grids + (tl.load(value_meta_ptr + base + CODES + i * HALF + channel),)
        highest = logits[0]
        for i in tl.static_range(1, len(logits)):
            highest = tl.maximum(highest, logits[i])
        new_shift = tl.maximum(shift, tl.max(highest, 1) - weight_bits(grids, T))
        finite = tl.where(new_shift == float("-inf"), 0.0, new_shift) if MASK > 1 else new_shift
        decay = power(shift - finite)
        shift = new_shift

        # Weights of every slice, and their products with minima and ones.
        highs = ()
        lows = ()
        fresh_low = tl.zeros([2 * ROWS, 8], tl.float32)
        fresh_total = tl.zeros([2 * ROWS, 8], tl.float32)
        for record in tl.static_range(VALUE_RUN):
            base = (chunk * VALUE_RUN + record) * VALUE_RECORD
            low_at = value_meta_ptr + base + CODES + VALUE_PAIRS + (group_8 * VALUE_TOKENS)[None, :] + token_in_slice[:, None]
            for i in tl.static_range(2 * VALUE_PARTS):
                high, low = parts(power(logits[record * 2 * VALUE_PARTS + i] - finite[:, None]), T)
                highs = highs + (high,)
                lows = lows + (low,)
                minimum = tl.load(low_at + i * SLICE, mask=(group_8 < GROUPS)[None, :] & (token_in_slice >= 0)[:, None], other=0.0)
                fresh_low = dot(stack(high, low), minimum, fresh_low)
                fresh_total = dot(stack(high, low), ones, fresh_total)
        low_sums = low_sums * decay[:, None] + unstack(fresh_low)
        total = total * decay[:, None] + unstack(fresh_total)

        words = ()
        for record in tl.static_range(VALUE_RUN):
            base = (chunk * VALUE_RUN + record) * VALUE_RECORD
            words_at = value_words_ptr + base + (token_in_slice * HALF)[None, :] + token_in_slice[:, None]
            words = words + (tl.load(words_at).to(tl.uint16, bitcast=True), tl.load(words_at + SLICE).to(tl.uint16, bitcast=True))
        added = ()
        for block in tl.static_range(OUTPUTS // GROUPS):
            for group in tl.static_range(GROUPS):
                fresh = tl.zeros([2 * ROWS, SLICE], tl.float32)
                for record in tl.static_range(VALUE_RUN):
                    for part in tl.static_range(VALUE_PARTS):
                        if part * GROUPS % OUTPUTS == block * GROUPS:
                            two_grids = two_slices(grids[(record * GROUPS + group) * VALUE_PARTS + part])
                            for half in tl.static_range(2):
                                high = highs[(record * VALUE_PARTS + part) * 2 + half]
                                low = lows[(record * VALUE_PARTS + part) * 2 + half]
                                codes = unpack(words[2 * record + half], (part * GROUPS + group) * VALUE_BITS, VALUE_BITS, T)
                                fresh = dot(scaled_parts(high, low, two_grids[half], T), codes, fresh)
                added = added + (output[block * GROUPS + group] * decay[:, None] + unstack(fresh),)
        output = added

    # From here on in plain units: sums [ROWS, 32 channels] a group, and the total.
    sums = ()
    for group in tl.static_range(GROUPS):
        whole = output[group] * REST * unit(place(group * VALUE_BITS, VALUE_BITS, T), T)
        if OUTPUTS > GROUPS:
            whole += output[GROUPS + group] * REST * unit(place((GROUPS + group) * VALUE_BITS, VALUE_BITS, T), T)
        sums = sums + (whole + pick(low_sums, group)[:, None],)
    total = pick(total, 0)

    key_window_ptr += row_head * window_rows * DIM
    value_window_ptr += row_head * window_rows * DIM
    key_ptr += row * key_row_stride + head * key_head_stride
    value_ptr += row * value_row_stride + head * value_head_stride
    slices = tl.cdiv(tl.maximum(end, 0) - chunks * CHUNK, SLICE)
    for index in tl.range((split + splits - chunks % splits) % splits, slices, splits, num_stages=1):
        begin = chunks * CHUNK + index * SLICE
        logit = slice_logits(
            begin, key_words_ptr, key_meta_ptr, key_window_ptr, key_ptr, key_token_stride, key_boundary, first, end,
            window_rows, queries, to_logit, code_to_logit, DIM, KEY_BITS, KEY_TOKENS, T,
        )  # fmt: skip
        logit = mask_logits(
            logit, begin + token_in_slice, end, query_row, mask_at, mask_column_stride, mask_columns, padding, first, new_tokens,
            MASK, REPEATS,
        )  # fmt: skip
        shift, total, sums = slice_values(
            begin, logit, shift, total, sums, value_words_ptr, value_meta_ptr, value_window_ptr, value_ptr, value_token_stride,
            value_boundary, first, end, window_rows, DIM, VALUE_BITS, VALUE_TOKENS, REST, T,
        )  # fmt: skip

    if SIGNAL:
        tl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    slot = (first_slot + split) * query_rows + query_row
    # A NaN total must be seen by the combine, even where no logit was a number.
    tl.store(maximum_ptr + slot, tl.where(total != total, total, shift), mask=query_row < query_rows)
    tl.store(total_ptr + slot, total, mask=query_row < query_rows)
    target = partial_ptr + slot[:, None] * DIM + token_in_slice[None, :]
    for group in tl.static_range(GROUPS):
        tl.store(target + group * SLICE, sums[group], mask=(query_row < query_rows)[:, None] & (token_in_slice >= 0)[None, :])
