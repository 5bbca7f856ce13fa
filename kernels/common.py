"""What the kernels share: float conversions, one group's numbers, a row's span of tokens, and reading tokens of a mixed state.

Record addresses follow :mod:`kivi_ops.kernels.layout`; its symbols in capitals are ``TOKENS`` (N), ``PARTS`` (H or P) and
``TOKEN_PARTS`` (E). Must not know of launches, grids or devices.

bf16 is widened and rounded by hand: the interpreter, which runs these kernels in tests without a GPU, truncates instead of
rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.constexpr_function
def assembly_type(dtype):
    """How PTX calls a 16-bit float."""
    return "bf16" if dtype == tl.bfloat16 else "f16"


@triton.jit
def widen(x):
    """float16, bfloat16 or float32 as float32, exactly."""
    if x.dtype == tl.bfloat16:
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """float32 rounded to nearest even in ``DTYPE``."""
    if DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(x != x, 0x7FC0, bits)  # the carry could turn a NaN into a number
        rounded = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = x.to(DTYPE)
    return rounded


@triton.jit
def constant_tile(value: tl.constexpr, like, DTYPE: tl.constexpr):
    """A tile of ``value`` in DTYPE, of the shape of ``like``; NaN is the quiet NaN that torch writes."""
    if DTYPE == tl.bfloat16:
        tile = narrow(tl.full(like.shape, value, tl.float32), DTYPE)
    else:
        tile = tl.full(like.shape, value, DTYPE)
    return tile


@triton.jit
def restore(codes, scale, minimum):
    """min + scale * code in float32; unfused where the launch says ``enable_fp_fusion=False`` (contract section 1)."""
    return widen(minimum) + widen(scale) * codes.to(tl.float32)


@triton.jit
def multiply_add(x, y, z):
    """x * y + z rounded once, whatever ``enable_fp_fusion`` says."""
    if INTERPRET:  # some versions of it round twice; float64 holds the product
        result = (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)
    else:
        result = tl.fma(x, y, z)
    return result


@triton.jit
def _smaller(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def extremes(low, high, AXIS: tl.constexpr):
    """The minimum of ``low`` and the maximum of ``high`` along ``AXIS``; NaN if there is one, which tl.min and tl.max would drop."""
    if INTERPRET:  # it would call our functions for one lane at a time
        nan = tl.max(((low != low) | (high != high)).to(tl.int32), AXIS) > 0
        minimum = tl.where(nan, float("nan"), tl.min(tl.where(low == low, low, float("inf")), AXIS))
        maximum = tl.where(nan, float("nan"), tl.max(tl.where(high == high, high, -float("inf")), AXIS))
    else:
        minimum, maximum = tl.reduce(low, AXIS, _smaller), tl.reduce(high, AXIS, _larger)
    return minimum, maximum


@triton.jit
def scaled_codes(x, scale, minimum, plain, AXIS: tl.constexpr, BITS: tl.constexpr, METADATA: tl.constexpr):
    """The codes of :func:`quantize_tile` for 16-bit metadata, without a division for each element.

    x: float32, tile; scale, minimum in METADATA and bool ``plain`` (false where all codes are 0), without ``AXIS``.

    round(div_rn(y, scale)), y = x - minimum, is wanted. 1 / scale is carried as ``inverse + rest``, so that the quotient is rounded once,
    with a relative error below 2^-38 before. That decides each code as the division does. With a scale of at most 11 significant bits
    a border (c + 1/2) * scale is itself a float32. If y is on it, both quotients are c + 1/2. If not, y / scale is at least one step of y
    away from c + 1/2, and the division rounds to it what is at most half of its step away, which is less by more than 2^-33 of it.
    tests/kernels has every border.
    """
    LEVELS: tl.constexpr = 2**BITS - 1
    scale, y = widen(scale), x - tl.expand_dims(widen(minimum), AXIS)
    if METADATA == tl.bfloat16:  # 1 / scale could overflow: a power of two brings the scale near 1
        unit = tl.maximum((254 << 23) - (scale.to(tl.int32, bitcast=True) & 0x7F800000), 1 << 22).to(tl.float32, bitcast=True)
        scale, y = scale * unit, y * tl.expand_dims(unit, AXIS)
    inverse = tl.where(plain, 1.0 / scale, 0.0)
    rest = multiply_add(-scale, inverse, tl.full(scale.shape, 1.0, tl.float32)) * inverse
    y = tl.minimum(tl.maximum(y, 0.0), tl.expand_dims(scale * (LEVELS * 1.0), AXIS))  # NaN becomes 0
    return multiply_add(y, tl.expand_dims(inverse, AXIS), y * tl.expand_dims(rest, AXIS))


@triton.jit
def divided_codes(x, scale, minimum, plain, AXIS: tl.constexpr, BITS: tl.constexpr):
    """:func:`scaled_codes` for float32 metadata."""
    code = tl.div_rn(x - tl.expand_dims(minimum, AXIS), tl.expand_dims(scale, AXIS))
    code = tl.minimum(tl.maximum(code, 0.0), 2.0**BITS - 1.0)
    return tl.where(tl.expand_dims(plain, AXIS), code, 0.0)


@triton.jit
def quantize_tile(x, valid, AXIS: tl.constexpr, BITS: tl.constexpr, METADATA: tl.constexpr):
    """Quantise groups that lie along ``AXIS`` (contract section 1).

    x: float32; valid: bool of its shape, lanes that belong to the group; None where all do.
    Returns int32 of its shape whose lower 16 bits are the code (the upper ones mean nothing: shift, add, and cut off), scale and min
    in METADATA without that axis.
    """
    LEVELS: tl.constexpr = 2**BITS - 1
    LARGEST: tl.constexpr = (
        65504.0 if METADATA == tl.float16 else (3.3895313892515355e38 if METADATA == tl.bfloat16 else 3.4028234663852886e38)
    )
    INFINITY: tl.constexpr = float("inf")
    if valid is None:
        minimum, maximum = extremes(x, x, AXIS)
    else:
        minimum, maximum = extremes(tl.where(valid, x, INFINITY), tl.where(valid, x, -INFINITY), AXIS)
    broken = ((tl.abs(minimum) < INFINITY) & (tl.abs(maximum) < INFINITY)) == 0
    minimum = tl.minimum(tl.maximum(minimum, -LARGEST), LARGEST)
    maximum = tl.minimum(tl.maximum(maximum, -LARGEST), LARGEST)
    minimum = tl.where(minimum == 0.0, 0.0, minimum)  # never -0.0
    scale = narrow(tl.minimum(tl.div_rn(maximum - minimum, LEVELS * 1.0), LARGEST), METADATA)
    minimum = narrow(minimum, METADATA)
    constant = widen(scale) == 0.0
    scale = tl.where(constant, constant_tile(1.0, scale, METADATA), scale)

    # Codes come from the stored, rounded pair.
    plain = (constant | broken) == 0
    if METADATA == tl.float32:
        code = divided_codes(x, scale, minimum, plain, AXIS, BITS)
    else:
        code = scaled_codes(x, scale, minimum, plain, AXIS, BITS, METADATA)
    codes = (code + 12582912.0).to(tl.int32, bitcast=True)  # 1.5 * 2^23: rounds half to even, into the lowest bits
    nan = constant_tile(float("nan"), scale, METADATA)
    return codes, tl.where(broken, nan, scale), tl.where(broken, nan, minimum)


@triton.jit
def row_span(position_ptr, position_stride, left_padding_ptr, row, new_tokens, capacity):
    """The columns of this call in one batch row: start column (int64), padding, and first and end as the row's own token indices.

    Columns past the capacity are cut off. ``first`` is negative where the call begins with pads.
    """
    start = tl.load(position_ptr + row * position_stride).to(tl.int64)
    padding = tl.load(left_padding_ptr + row)
    first, end = own_tokens(start, padding, new_tokens, capacity)
    return start, padding, first, end


@triton.jit
def own_tokens(start, padding, new_tokens, capacity):
    """First and end of :func:`row_span`."""
    first = (tl.minimum(start, capacity) - padding).to(tl.int32)
    end = (tl.minimum(start + new_tokens, capacity) - padding).to(tl.int32)
    return first, end


@triton.jit
def visible_boundary(sealed, first, AFTER: tl.constexpr):
    """Below which token a step reads records (contract section 3): ``sealed`` is the stored boundary."""
    if AFTER:
        boundary = tl.minimum(sealed, tl.maximum(first, 0))
    else:
        boundary = tl.where(first > 0, sealed, 0)  # a first prefill sees the floats it was given
    return boundary


@triton.jit
def restore_tile(
    words_ptr,
    meta_ptr,
    base_record,
    token,
    channel,
    inside,
    IS_KEY: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Sealed tokens as float32 [tokens, channels], 0 where ``inside`` is false.

    words_ptr: int16 records; meta_ptr: the same memory in the metadata dtype. base_record: number of the (row, head)'s first record,
    int64. token [tokens]; channel [channels].
    """
    TOKEN_PARTS: tl.constexpr = 16 // BITS // PARTS
    CODE_WORDS: tl.constexpr = DIM // PARTS * (GROUP if IS_KEY else TOKENS // TOKEN_PARTS)
    PAIRS: tl.constexpr = TOKEN_PARTS * DIM if IS_KEY else (DIM + GROUP - 1) // GROUP * TOKENS
    META_WORDS: tl.constexpr = meta_ptr.dtype.element_ty.primitive_bitwidth // 16
    META_RECORD: tl.constexpr = CODE_WORDS // META_WORDS + 2 * PAIRS  # a record, counted in metadata values
    PART_CHANNELS: tl.constexpr = DIM // PARTS

    record = (base_record + token // TOKENS)[:, None]
    local = token % TOKENS
    channel_part, channel_in_part = channel // PART_CHANNELS, channel % PART_CHANNELS
    if IS_KEY:
        token_part, token_in_part = local // GROUP, local % GROUP
        field = (channel_part * TOKEN_PARTS)[None, :] + token_part[:, None]
        word = (token_in_part * PART_CHANNELS)[:, None] + channel_in_part[None, :]
        pair = (token_part * DIM)[:, None] + channel[None, :]
    else:
        COLUMNS: tl.constexpr = TOKENS // TOKEN_PARTS
        token_part, token_in_part = local // COLUMNS, local % COLUMNS
        field = (token_part * PARTS)[:, None] + channel_part[None, :]
        word = token_in_part[:, None] + (channel_in_part * COLUMNS)[None, :]
        pair = local[:, None] + (channel // GROUP * TOKENS)[None, :]
    words = tl.load(words_ptr + record * (META_RECORD * META_WORDS) + word, mask=inside, other=0).to(tl.int32)
    codes = (words >> (field * BITS)) & (2**BITS - 1)
    pair_ptr = meta_ptr + record * META_RECORD + CODE_WORDS // META_WORDS + pair
    scale = tl.load(pair_ptr, mask=inside, other=0.0)
    minimum = tl.load(pair_ptr + PAIRS, mask=inside, other=0.0)
    return restore(codes, scale, minimum)


@triton.jit
def token_tile(
    words_ptr,
    meta_ptr,
    base_record,
    window_ptr,
    fresh_ptr,
    token_stride,
    channel_stride,
    block_start,
    boundary,
    first,
    end,
    window_rows,
    IS_KEY: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tokens ``block_start`` .. + BLOCK of one row and head as a step sees them: float32 [BLOCK, DIM_BLOCK], 0 outside 0 .. end.

    Records below ``boundary``, then the window, and from ``first`` on the new tokens. window_ptr and fresh_ptr point at the row and head.
    """
    token = block_start + tl.arange(0, BLOCK)
    channel = tl.arange(0, DIM_BLOCK)
    real = ((token >= 0) & (token < end))[:, None] & (channel < DIM)[None, :]
    tile = tl.zeros([BLOCK, DIM_BLOCK], tl.float32)
    if block_start < boundary:
        sealed = real & (token < boundary)[:, None]
        tile = restore_tile(words_ptr, meta_ptr, base_record, token, channel, sealed, IS_KEY, DIM, BITS, GROUP, TOKENS, PARTS)
    if block_start + BLOCK > boundary:
        if block_start < first:
            kept = real & ((token >= boundary) & (token < first))[:, None]
            row = (token % window_rows).to(tl.int64)[:, None]
            tile = tl.where(kept, widen(tl.load(window_ptr + row * DIM + channel[None, :], mask=kept, other=0.0)), tile)
        if block_start + BLOCK > first:
            fresh = real & ((token >= boundary) & (token >= first))[:, None]
            fresh_row = (token - first).to(tl.int64)[:, None] * token_stride
            fresh_channel = channel.to(tl.int64)[None, :] * channel_stride
            tile = tl.where(fresh, widen(tl.load(fresh_ptr + fresh_row + fresh_channel, mask=fresh, other=0.0)), tile)
    return tile
