"""Decode attention for NVIDIA GPUs (Gluon): codes go to the tensor cores as they are stored, one warp a program.

What makes it fast (measured; the arithmetic budget is under three lane operations an element):

- Operands are swapped: codes are the A operand, 16 tokens or channels by 16, and the B operand's 8 columns are query rows of a KV head.
- A field masked in place in a 16-bit word *is* a subnormal of the cache's dtype, code * 2^-24 (float16) or 2^-133 (bfloat16) times a
  power of two for its place, and tensor cores keep subnormals. So unpacking is one ``and`` for two elements. Fields of a word belong to
  different groups (:mod:`kivi_ops.kernels.layout`), so each has a product of its own and nothing is shuffled.
- The grid goes into the small operand: logits = (q * scale) . code + q . min, output = (p * scale) . code + p . min.
- A record's Key half and Value half arrive by separate asynchronous copies into single buffers; each is requested while the other is used.

And exact enough (contract section 7):

- Rounding q * scale would move logits by an amount that grows with q. So it is carried in two parts, what was rounded and what that lost:
  beside each other in the 8 columns where a program has at most 4 query rows (PAIRED), else in a product each.
- Weights p, and p * scale, are rounded once each in float16, as flash attention rounds its weights; in bfloat16, 8 times as coarse, they
  are carried in two parts also (VALUE_LOW).
- Tensor cores truncate when they accumulate. A chunk is added up on its own, then to the rest in float32, rounded.

Whole chunks of sealed tokens (one Key and one Value record, or two of the shorter with mixed bits) are dealt to a row's splits in turn.
What is left of a row (sealed tokens of its last records, the windows, the new tokens) follows as *slices* of 32 tokens, dealt on in turn:
more work of the same kind, not another launch. Every split leaves its maximum, total and weighted sum to :mod:`kivi_ops.kernels.combine`.

Serves G = 32, D_k = D_v of 64 or 128, 2 and 4 bits, metadata in the cache's dtype. Must not know of sealing or launches.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kivi_ops.kernels import common
from kivi_ops.kernels.attention import MASK_BOOL, MASK_CAUSAL, MASK_NONE
from kivi_ops.kernels.common import assembly_type

row_span = gluon.jit(common.row_span.fn)
own_tokens = gluon.jit(common.own_tokens.fn)
visible_boundary = gluon.jit(common.visible_boundary.fn)
# Both renamed after Triton 3.6
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

LOG2_E = gl.constexpr(1.4426950408889634)
NEGATIVE_ZEROS = "0x80008000"  # added to two products they change nothing: before sm_90 bfloat16 has no other multiplication

MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]))
A = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
B = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))  # 16 bytes a lane
SWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))  # ldmatrix without bank conflicts
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # batch rows, or columns of a mask
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
ACROSS = gl.constexpr(gl.SliceLayout(0, MMA.value))  # a vector over query rows
DOWN = gl.constexpr(gl.SliceLayout(1, MMA.value))  # a vector over tokens or channels


# ------------------------------------------------------------------------------------------------------ inline assembly


@triton.constexpr_function
def raised(dtype):
    """Places by which codes are moved up in float16: tensor cores truncate at a fixed distance below its smallest normal number, and a
    code's bits, weights of one linear scale up to bit 10, should not lie near that. bfloat16 has no room above, and no need."""
    return 3 if dtype == gl.float16 else 0


@triton.constexpr_function
def unpack_assembly(bits, up):
    """All fields of a register of two words, ``up`` places higher: a mask each, and a shift for each byte."""
    fields = 16 // bits
    word = f"${fields}"
    text = f"{{ .reg .b32 low, high; shr.u32 high, {word}, {8 - up};\n"
    text += f"shl.b32 low, {word}, {up};\n" if up else f"mov.b32 low, {word};\n"
    for field in range(fields):
        bit = field * bits
        text += f"and.b32 ${field}, {'high' if bit >= 8 else 'low'}, {(((1 << bits) - 1) << bit % 8 + up) * 0x10001:#010x};\n"
    return text + "}"


@triton.constexpr_function
def product_assembly(kind, weights):
    """high = round(x * s) and low = what that lost. With ``weights``, x itself has two parts, and low takes x_low * s too."""
    scale = "$4" if weights else "$3"
    text = f"{{ .reg .b32 high, low, minus, zero; mov.b32 zero, {NEGATIVE_ZEROS};\n"
    text += f"fma.rn.{kind}x2 high, $2, {scale}, zero; neg.{kind}x2 minus, high; fma.rn.{kind}x2 low, $2, {scale}, minus;\n"
    if weights:
        text += f"fma.rn.{kind}x2 low, $3, {scale}, low;\n"
    return text + "mov.b32 $0, high; mov.b32 $1, low; }"


@triton.constexpr_function
def paired_assembly(kind, weights):
    """In one operand: round(x * s) in the columns where ``signed`` is -x and ``late`` 0, and what that lost where both are x."""
    scale = "$4" if weights else "$3"
    multiply = f"mul.rn.f16x2 high, $1, {scale};"
    if kind == "bf16":
        multiply = f"mov.b32 low, {NEGATIVE_ZEROS}; fma.rn.bf16x2 high, $1, {scale}, low;"
    text = f"{{ .reg .b32 high, low; {multiply} neg.{kind}x2 high, high; fma.rn.{kind}x2 low, $2, {scale}, high;\n"
    if weights:
        text += f"fma.rn.{kind}x2 low, $3, {scale}, low;\n"
    return text + "mov.b32 $0, low; }"


@triton.constexpr_function
def weights_assembly(kind):
    """Two float32 neighbours of an accumulator row -> high and low parts, each 8 x 8 tile transposed into a B operand."""
    back = {
        "f16": "mov.b32 {a, b}, high; cvt.f32.f16 x, a; cvt.f32.f16 y, b;",
        "bf16": "shl.b32 low, high, 16; mov.b32 x, low; and.b32 low, high, 0xffff0000; mov.b32 y, low;",
    }[kind]
    return (
        "{ .reg .b32 high, low; .reg .b16 a, b; .reg .f32 x, y;\n"
        f"cvt.rn.{kind}x2.f32 high, $3, $2; {back}\n"
        f"sub.f32 x, $2, x; sub.f32 y, $3, y; cvt.rn.{kind}x2.f32 low, y, x;\n"
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, high; movmatrix.sync.aligned.m8n8.trans.b16 $1, low; }"
    )


@triton.constexpr_function
def spread_assembly(first_row, count, width):
    """From an accumulator [16, 8]: the sums of ``count`` runs of ``width`` rows from ``first_row`` on, each spread over all rows."""
    source = 4 * count + (2 if first_row >= 8 else 0)
    text = "{ .reg .b32 lane; .reg .f32 u, v, w; mov.u32 lane, %laneid; and.b32 lane, lane, 3;\n"
    text += f"mov.f32 u, ${source}; mov.f32 v, ${source + 1};\n"
    distance = 1
    while distance < width:
        for name in "uv":
            text += f"shfl.sync.bfly.b32 w, {name}, {4 * distance}, 0x1f, 0xffffffff; add.f32 {name}, {name}, w;\n"
        distance *= 2
    text += f"add.u32 lane, lane, {first_row % 8 * 4};\n"
    for run in range(count):
        first, second, third, fourth = (f"${4 * run + k}" for k in range(4))
        text += f"shfl.sync.idx.b32 {first}, u, lane, 0x1f, 0xffffffff; shfl.sync.idx.b32 {second}, v, lane, 0x1f, 0xffffffff;\n"
        text += f"mov.f32 {third}, {first}; mov.f32 {fourth}, {second}; add.u32 lane, lane, {4 * width};\n"
    return text + "}"


@triton.constexpr_function
def constraints(outputs, output, inputs, kind):
    return ",".join([output] * outputs + [kind] * inputs)


@triton.constexpr_function
def smallest(dtype):
    """1 over the smallest subnormal of ``dtype``; of bfloat16's 2^133 float32 cannot hold 2^13, which the kernel calls REST."""
    return 2.0**120 if dtype == gl.bfloat16 else 2.0**24


@triton.constexpr_function
def unit(field, bits, dtype):
    """What a product with the codes of ``field`` as :func:`unpack` leaves them is to be multiplied by."""
    return smallest(dtype) / 2.0 ** (field * bits % 8 + raised(dtype))


# ---------------------------------------------------------------------------------------------------------------- tiles


@gluon.jit
def unpack(words, BITS: gl.constexpr, T: gl.constexpr):
    """The 16 / BITS fields of uint16 words: tiles of code / unit(field), subnormals of T or just above."""
    FIELDS: gl.constexpr = 16 // BITS
    TEXT: gl.constexpr = unpack_assembly(BITS, raised(T))
    REGISTERS: gl.constexpr = constraints(FIELDS, "=&r", 1, "r")
    if FIELDS == 8:
        fields = gl.inline_asm_elementwise(TEXT, REGISTERS, [words], dtype=(gl.int16,) * 8, is_pure=True, pack=2)
    else:
        fields = gl.inline_asm_elementwise(TEXT, REGISTERS, [words], dtype=(gl.int16,) * 4, is_pure=True, pack=2)
    codes = ()
    for i in gl.static_range(FIELDS):
        codes = codes + (fields[i].to(T, bitcast=True),)
    return codes


@gluon.jit
def field(words, bit, BITS: gl.constexpr, T: gl.constexpr):
    """The field at ``bit`` of uint16 words, known only now: codes times T's smallest subnormal."""
    MASK: gl.constexpr = (2**BITS - 1) * 0x10001
    TEXT: gl.constexpr = f"{{ .reg .b32 t; shr.u32 t, $1, $2; and.b32 $0, t, {MASK}; }}"
    return gl.inline_asm_elementwise(TEXT, "=r,r,r,r", [words, bit], dtype=gl.int16, is_pure=True, pack=2).to(T, bitcast=True)


@gluon.jit
def keep(x, mask, T: gl.constexpr):
    """16-bit x where the int16 ``mask`` is -1, 0 where it is 0, NaN or not."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, mask], dtype=gl.int16, is_pure=True, pack=2).to(T, bitcast=True)


@gluon.jit
def product(x, scale, T: gl.constexpr):
    """x * scale as high and low parts."""
    TEXT: gl.constexpr = product_assembly(assembly_type(T), False)
    high, low = gl.inline_asm_elementwise(TEXT, "=r,=r,r,r", [x, scale], dtype=(gl.int16,) * 2, is_pure=True, pack=2)
    return high.to(T, bitcast=True), low.to(T, bitcast=True)


@gluon.jit
def weighted(high, low, scale, T: gl.constexpr):
    """(high + low) * scale as high and low parts."""
    TEXT: gl.constexpr = product_assembly(assembly_type(T), True)
    high, low = gl.inline_asm_elementwise(TEXT, "=r,=r,r,r,r", [high, low, scale], dtype=(gl.int16,) * 2, is_pure=True, pack=2)
    return high.to(T, bitcast=True), low.to(T, bitcast=True)


@gluon.jit
def paired_product(signed, late, scale, T: gl.constexpr):
    """x * scale in one operand, the high parts beside the low ones; ``signed`` and ``late``: see :func:`paired_assembly`."""
    TEXT: gl.constexpr = paired_assembly(assembly_type(T), False)
    return gl.inline_asm_elementwise(TEXT, "=r,r,r,r", [signed, late, scale], dtype=gl.int16, is_pure=True, pack=2).to(T, bitcast=True)


@gluon.jit
def paired_weighted(signed, late, low, scale, T: gl.constexpr):
    """:func:`paired_product` of a weight that has a low part itself."""
    TEXT: gl.constexpr = paired_assembly(assembly_type(T), True)
    parts = [signed, late, low, scale]
    return gl.inline_asm_elementwise(TEXT, "=r,r,r,r,r", parts, dtype=gl.int16, is_pure=True, pack=2).to(T, bitcast=True)


@gluon.jit
def paired_weights(high, low, low_half, T: gl.constexpr):
    """Operands of :func:`paired_weighted` and, last, high and low side by side; ``low_half`` is -1 in the columns of the low parts."""
    signed, late, low, both = gl.inline_asm_elementwise(
        """{ .reg .b32 s; not.b32 s, $6; and.b32 s, s, 0x80008000; xor.b32 $0, $4, s; and.b32 $1, $4, $6; and.b32 $2, $5, $6;
        lop3.b32 $3, $4, $5, $6, 0xd8; }""",
        "=&r,=&r,=&r,=&r,r,r,r", [high, low, low_half], dtype=(gl.int16,) * 4, is_pure=True, pack=2,
    )  # fmt: skip
    return signed.to(T, bitcast=True), late.to(T, bitcast=True), low.to(T, bitcast=True), both.to(T, bitcast=True)


@gluon.jit
def add_pairs(tile):
    """Columns c and c + 4 of an accumulator added up, in both."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 other; shfl.sync.bfly.b32 other, $1, 2, 0x1f, 0xffffffff; add.f32 $0, $1, other; }",
        "=f,f", [tile], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def operand(tile):
    """What movmatrix left of an accumulator [32, 8], named as the B operand that it is: a relabelling that moves nothing."""
    return gl.convert_layout(tile.reshape([2, 2, 8, 8]).permute([0, 1, 3, 2]).reshape([32, 8]), B, assert_trivial=True)


@gluon.jit
def pieces(tile):
    """A B operand [32, 8] as two [16, 8]."""
    first, second = gl.split(tile.reshape([2, 16, 8]).permute([1, 2, 0]))
    return gl.convert_layout(first, B, assert_trivial=True), gl.convert_layout(second, B, assert_trivial=True)


@gluon.jit
def weights(p, T: gl.constexpr):
    """float32 accumulator [32, 8] as high and low parts of a B operand."""
    TEXT: gl.constexpr = weights_assembly(assembly_type(T))
    high, low = gl.inline_asm_elementwise(TEXT, "=r,=r,f,f", [p], dtype=(gl.int16,) * 2, is_pure=True, pack=2)
    return operand(high.to(T, bitcast=True)), operand(low.to(T, bitcast=True))


@gluon.jit
def over_rows(tile):
    """[16, 8] of equal rows as [32, 8]."""
    return gl.convert_layout(gl.join(tile, tile).permute([2, 0, 1]).reshape([32, 8]), MMA, assert_trivial=True)


@gluon.jit
def spread(sums, FIRST_ROW: gl.constexpr, COUNT: gl.constexpr, WIDTH: gl.constexpr):
    """Tuple of COUNT tiles [32, 8]: rows FIRST_ROW + i * WIDTH .. + WIDTH of an accumulator [16, 8], added up, in every row."""
    TEXT: gl.constexpr = spread_assembly(FIRST_ROW, COUNT, WIDTH)
    REGISTERS: gl.constexpr = constraints(4 * COUNT, "=&f", 4, "f")
    if COUNT == 8:
        tiles = gl.inline_asm_elementwise(TEXT, REGISTERS, [sums], dtype=(gl.float32,) * 8, is_pure=True, pack=4)
    elif COUNT == 4:
        tiles = gl.inline_asm_elementwise(TEXT, REGISTERS, [sums], dtype=(gl.float32,) * 4, is_pure=True, pack=4)
    else:
        tiles = gl.inline_asm_elementwise(TEXT, REGISTERS, [sums], dtype=(gl.float32,) * 2, is_pure=True, pack=4)
    spread_tiles = ()
    for i in gl.static_range(COUNT):
        spread_tiles = spread_tiles + (over_rows(tiles[i]),)
    return spread_tiles


@gluon.jit
def scale_row(scales, ROW: gl.constexpr):
    """One row of a buffer [n, k] down the k of a B operand: [k, 1]."""
    return scales.slice(ROW, 1, 0).permute((1, 0)).load(B)


@gluon.jit
def exponent(x):
    """e with x < 2^(e + 1), of a float32 x >= 0; -127 for 0."""
    return (x.to(gl.int32, bitcast=True) >> 23) - 127


@gluon.jit
def power_of_two(e):
    """2^e in float32, e within -126 .. 127."""
    return ((gl.minimum(gl.maximum(e, -126), 127) + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def fetch(words, scales, minima, words_ptr, meta_ptr, base, wanted, BITS: gl.constexpr, RECORDS: gl.constexpr, BELOW: gl.constexpr):
    """Request RECORDS records from ``base`` on (in 16-bit words): codes [32, 64] and pairs [16 / BITS, 64] each, if ``wanted``.

    A record's minima go to 8 rows of ``minima`` (rows BELOW .. BELOW + 8 of every 8 + BELOW): 8 of them at 2 bits. At 4 bits there
    are 4, and the 4 rows before them are its scales again, for a swizzled buffer is written 8 rows at a time.
    """
    PAIR_ROWS: gl.constexpr = 16 // BITS
    RECORD: gl.constexpr = 2048 + 2 * PAIR_ROWS * 64
    row_32 = gl.arange(0, 32, gl.SliceLayout(1, COPY))[:, None] * 64
    row_8 = gl.arange(0, 8, gl.SliceLayout(1, COPY))[:, None] * 64
    row_pairs = gl.arange(0, PAIR_ROWS, gl.SliceLayout(1, COPY))[:, None] * 64
    column = gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    for record in gl.static_range(RECORDS):
        at = base + record * RECORD
        copy_to_shared(words.slice(32 * record, 32, 0), words_ptr + at + row_32 + column, (row_32 + column >= 0) & wanted)
        at += 2048
        copy_to_shared(
            scales.slice(PAIR_ROWS * record, PAIR_ROWS, 0), meta_ptr + at + row_pairs + column, (row_pairs + column >= 0) & wanted
        )
        at += PAIR_ROWS * 64 - (8 - PAIR_ROWS) * 64
        to = minima.slice((8 + BELOW) * record + BELOW, 8, 0)
        copy_to_shared(to, meta_ptr + at + row_8 + column, (row_8 + column >= 0) & wanted)
    async_copy.commit_group()


@gluon.jit
def interleave(sums, WIDTH: gl.constexpr):
    """Of WIDTH accumulators [16, 8], row r from the one numbered r % WIDTH."""
    row = gl.arange(0, 16, DOWN)[:, None]
    merged = sums[0]
    for i in gl.static_range(1, WIDTH):
        merged = gl.where(row % WIDTH == i, sums[i], merged)
    return merged


@gluon.jit
def visibility(
    logit,
    token,
    query_row,
    padding,
    mask_ptr,
    mask_at,
    mask_column_stride,
    mask_columns,
    new_tokens,
    REPEATS: gl.constexpr,
    MASK: gl.constexpr,
    MASK_SHARED: gl.constexpr,
):
    """Hide and bias logits [32, 8] (base 2) of ``token`` [32] as a bool or float mask says; mask_at [8]: each query row's mask row."""
    column = token + padding
    if MASK_SHARED:  # one mask row for all query rows of the program
        held = (column >= 0) & (column < mask_columns)
        mask = gl.load(mask_ptr + column.to(gl.int64) * mask_column_stride, mask=held, other=0)[:, None]
        held = held[:, None]
    else:
        held = ((column >= 0) & (column < mask_columns))[:, None] & (query_row < new_tokens * REPEATS)[None, :]
        mask = gl.load(mask_ptr + mask_at[None, :] + column.to(gl.int64)[:, None] * mask_column_stride, mask=held, other=0)
    if MASK == MASK_BOOL:
        logit = gl.where(held & (mask != 0), logit, float("-inf"))
    else:
        logit = gl.where(held, logit + mask.to(gl.float32) * LOG2_E, float("-inf"))
    return logit


@gluon.jit
def finite_shift(maximum):
    return gl.where(maximum == float("-inf"), 0.0, maximum)


@gluon.jit
def open_columns(begin, mask_ptr, mask_column_stride, mask_columns, padding, wanted, COUNT: gl.constexpr, MASK: gl.constexpr):
    """1 where a mask row shared by all queries leaves tokens ``begin`` .. + COUNT as they are, else 0: int32 [COUNT]."""
    column = begin + padding + gl.arange(0, COUNT, LINE)
    held = (column >= 0) & (column < mask_columns) & wanted
    mask = gl.load(mask_ptr + column.to(gl.int64) * mask_column_stride, mask=held, other=0)
    if MASK == MASK_BOOL:
        leaves = mask != 0
    else:
        leaves = mask == 0
    return (held & leaves).to(gl.int32)


# ----------------------------------------------------------------------------------------------------------- assignment


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def shares(work, total, programs):
    """Of ``programs`` dealt in proportion to ``work`` [rows], of which ``total`` is the sum; 0 without work."""
    share = (8 * programs * work + 7 * total - 1) // (8 * total)
    return gl.where(work > 0, gl.maximum(share, 1), 0)


@gluon.jit
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
    CHUNK: gl.constexpr,
    ROW_BLOCK: gl.constexpr,
):
    """Deal programs of a head to rows in proportion to their lengths. Every program does it alone.

    Rows of like length get ``splits`` programs each, one wave in all. Where that does not come out even, ``finest`` * rows are dealt.
    A row with work for x programs gets x rounded up, unless that is within an eighth, and one at least: rows * (finest + 1) at most.

    Returns for program ``index`` its row (``rows``: it has none), the row's first program and how many the row has.
    """
    row = gl.arange(0, ROW_BLOCK, LINE)
    real = row < rows
    start = gl.load(position_ptr + row * position_stride, real, 0).to(gl.int64)
    padding = gl.load(left_padding_ptr + row, real, 0)
    first, end = own_tokens(start, padding, new_tokens, capacity)
    work = gl.where(real, gl.maximum(end, 0) // CHUNK + 2, 0)
    total = gl.sum(work, 0)
    share = shares(work, total, rows * splits)
    share = gl.where(gl.sum(share, 0) > rows * splits, shares(work, total, rows * finest), share)
    last = gl.associative_scan(share, 0, add)
    before = real & (last <= index)
    mine = gl.sum(before.to(gl.int32), 0)
    return mine, gl.max(gl.where(before, last, 0), 0), gl.sum(gl.where(row == mine, share, 0), 0)


# --------------------------------------------------------------------------------------------------------------- slices
#
# A slice has sealed tokens, float ones or both, on the Key and the Value side. What it may need is requested early, by loads that are
# masked where the tokens are of the other kind, and then only the products that are due are made: hardly more than one memory latency.


@gluon.jit
def float_rows(buffer, window_at, fresh_at, token_stride, begin, boundary, first, end, window_rows, DIM: gl.constexpr):
    """Request tokens ``begin`` .. + 32 that are not sealed, from the window or the new tokens, into ``buffer`` [32, DIM]; 0 for others."""
    held = begin + gl.arange(0, 32, gl.SliceLayout(1, COPY))
    kept_at = window_at + (held % window_rows).to(gl.int64) * DIM
    fresh_rows = fresh_at + (held - first).to(gl.int64) * token_stride
    at = gl.multiple_of(gl.where(held < first, kept_at, fresh_rows)[:, None], [16, 16])
    wanted = ((held >= boundary) & (held < end))[:, None]
    for half in gl.static_range(DIM // 64):
        column = (64 * half + gl.arange(0, 64, gl.SliceLayout(0, COPY)))[None, :]
        copy_to_shared(buffer.slice(64 * half, 64, 1), at + column, wanted & (column >= 0))


@gluon.jit
def sealed_keys(words_at, meta_at, begin, boundary, DIM: gl.constexpr, BITS: gl.constexpr):
    """For each 16 channels of a half record: words [32, 16]; then for each of 16 channels: scales [16, 1] and minima [16 (equal), 16]."""
    FIELDS: gl.constexpr = 16 // BITS
    PARTS: gl.constexpr = FIELDS // (DIM // 64)
    row = gl.arange(0, 32, gl.SliceLayout(1, A))[:, None]
    row_16 = gl.arange(0, 16, gl.SliceLayout(1, A))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, A))[None, :]
    channel = gl.arange(0, 16, gl.SliceLayout(1, B))[:, None]
    wanted = begin < boundary
    at = begin // (32 * PARTS) * (2048 + 128 * FIELDS)
    grids_at = meta_at + at + 2048 + begin % (32 * PARTS) // 32 * DIM
    words = ()
    scales = ()
    minima = ()
    for step in gl.static_range(4):
        words = words + (gl.load(words_at + at + row * 64 + column + 16 * step, wanted, 0),)
    for step in gl.static_range(DIM // 16):
        scales = scales + (gl.load(grids_at + 16 * step + channel, wanted, 0.0),)
        minima_at = grids_at + FIELDS * 64 + 16 * step + column + 0 * row_16
        minima = minima + (gl.load(minima_at, wanted, 0.0),)
    return words, scales, minima


@gluon.jit
def sealed_value_scales(meta_at, begin, boundary, DIM: gl.constexpr, BITS: gl.constexpr):
    """A tuple of scales [32, 1] of each group of channels, 0 from ``boundary`` on, and the largest of all."""
    FIELDS: gl.constexpr = 16 // BITS
    GROUPS: gl.constexpr = DIM // 32
    TOKENS: gl.constexpr = 64 * FIELDS // GROUPS
    T: gl.constexpr = meta_at.dtype.element_ty
    token = gl.arange(0, 32, gl.SliceLayout(1, B))[:, None]
    grids_at = meta_at + begin // TOKENS * (2048 + 128 * FIELDS) + 2048 + begin % TOKENS
    # Loaded whole and then cut: a mask that differs between neighbours would make each load two.
    sealed = gl.where(begin + token < boundary, -1, 0).to(gl.int16)
    scales = ()
    largest = gl.full([32, 1], 0.0, gl.float32, B)
    for group in gl.static_range(GROUPS):
        scale = keep(gl.load(grids_at + group * TOKENS + token, begin < boundary, 0.0), sealed, T)
        scales = scales + (scale,)
        largest = gl.maximum(largest, scale.to(gl.float32))
    return scales, gl.max(gl.max(largest, 0), 0)


@gluon.jit
def sealed_values(words_at, meta_at, begin, boundary, DIM: gl.constexpr, BITS: gl.constexpr):
    """Words [32, 32], and minima [16 (groups), 32] that are 0 from ``boundary`` on."""
    FIELDS: gl.constexpr = 16 // BITS
    GROUPS: gl.constexpr = DIM // 32
    TOKENS: gl.constexpr = 64 * FIELDS // GROUPS
    T: gl.constexpr = meta_at.dtype.element_ty
    row = gl.arange(0, 32, gl.SliceLayout(1, A))[:, None]
    row_16 = gl.arange(0, 16, gl.SliceLayout(1, A))[:, None]
    column = gl.arange(0, 32, gl.SliceLayout(0, A))[None, :]
    at = begin // TOKENS * (2048 + 128 * FIELDS)
    local = begin % TOKENS
    words = gl.load(words_at + at + row * 64 + local % 64 + column, begin < boundary, 0)
    minima_at = meta_at + at + 2048 + local + 64 * FIELDS + row_16 % GROUPS * TOKENS + column
    minima = gl.load(minima_at, begin < boundary, 0.0)
    return words, keep(minima, gl.where(begin + column < boundary, -1, 0).to(gl.int16), T)


# --------------------------------------------------------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["splits", "finest", "rows", "new_tokens", "capacity", "mask_columns", "key_records", "value_records"])
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
    AFTER: gl.constexpr,
    MASK: gl.constexpr,
    MASK_SHARED: gl.constexpr,
    REPEATS: gl.constexpr,
    DIM: gl.constexpr,
    KEY_BITS: gl.constexpr,
    VALUE_BITS: gl.constexpr,
    VALUE_LOW: gl.constexpr,
    PAIRED: gl.constexpr,
    ROW_BLOCK: gl.constexpr,
    SIGNAL: gl.constexpr,
):
    """One program: 8 query rows of one batch row and KV head over the chunks and slices ``split``, ``split + splits``, ... of its tokens.

    Query rows are the REPEATS query heads of the KV head for each new token. Channels of every tensor are adjacent. Writes to a
    slot maximum (base 2; -inf where the split saw nothing, and then nothing else counts) and total, float32 [B * H * splits, query rows],
    and the weighted sum [..., D]; and for each row and head its first slot and how many it has, int32 [B * H, 2].

    Grid: with ROW_BLOCK 1 (B * H, splits, query blocks); else ROW_BLOCK is a power of two not below B, the grid is (H, B * (finest + 1),
    query blocks), and programs are dealt to rows by :func:`assignment`.
    """
    T: gl.constexpr = key_window_ptr.dtype.element_ty
    BF16: gl.constexpr = T == gl.bfloat16
    KEY_FIELDS: gl.constexpr = 16 // KEY_BITS
    VALUE_FIELDS: gl.constexpr = 16 // VALUE_BITS
    HALVES: gl.constexpr = DIM // 64  # Key channel parts
    KEY_PARTS: gl.constexpr = KEY_FIELDS // HALVES  # Key token parts
    GROUPS: gl.constexpr = DIM // 32  # Value channel parts
    VALUE_PARTS: gl.constexpr = VALUE_FIELDS // GROUPS  # Value token parts
    KEY_TOKENS: gl.constexpr = 32 * KEY_PARTS
    VALUE_TOKENS: gl.constexpr = 64 * VALUE_PARTS
    CHUNK: gl.constexpr = KEY_TOKENS if KEY_TOKENS > VALUE_TOKENS else VALUE_TOKENS
    KEY_RUN: gl.constexpr = CHUNK // KEY_TOKENS  # records of a chunk
    VALUE_RUN: gl.constexpr = CHUNK // VALUE_TOKENS
    KEY_RECORD: gl.constexpr = 2048 + 128 * KEY_FIELDS
    VALUE_RECORD: gl.constexpr = 2048 + 128 * VALUE_FIELDS
    OUTPUTS: gl.constexpr = GROUPS if GROUPS > 8 // VALUE_BITS else 8 // VALUE_BITS  # accumulators: channel parts by places in a byte
    REST: gl.constexpr = 2.0**13 if BF16 else 1.0  # of 2^133, which float32 cannot hold
    QUERY_UP: gl.constexpr = 60 if BF16 else 0  # queries are carried times 2^this, so that products with codes stay normal in float32
    WEIGHT_UP: gl.constexpr = 40 if BF16 else 10  # and weights times 2^this, so that small ones stay normal in T
    SCALE_ROOM: gl.constexpr = 79 if BF16 else 4  # with Value scales from 2^this up, weights are carried smaller instead

    if ROW_BLOCK == 1:
        row_head = gl.program_id(0)
        split = gl.program_id(1)
        row, head = row_head // heads, row_head % heads
        first_slot = row_head * splits
    else:
        head = gl.program_id(0)
        index = gl.program_id(1)
        slots = rows * (finest + 1)
        row, begin, splits = assignment(
            index, splits, finest, position_ptr, position_stride, left_padding_ptr, rows, new_tokens, capacity, CHUNK, ROW_BLOCK
        )
        if row >= rows:
            return
        row_head = row * heads + head
        split = index - begin
        first_slot = head * slots + begin
    if (split == 0) & (gl.program_id(2) == 0):
        gl.store(spans_ptr + 2 * row_head, first_slot)
        gl.store(spans_ptr + 2 * row_head + 1, splits)
    key_words = gl.allocate_shared_memory(gl.uint16, [32 * KEY_RUN, 64], SWIZZLED)
    key_scales = gl.allocate_shared_memory(T, [KEY_FIELDS * KEY_RUN, 64], PLAIN)
    key_minima = gl.allocate_shared_memory(T, [16, 64], SWIZZLED)
    value_words = gl.allocate_shared_memory(gl.uint16, [32 * VALUE_RUN, 64], SWIZZLED)
    value_scales = gl.allocate_shared_memory(T, [VALUE_FIELDS * VALUE_RUN, 64], PLAIN)
    value_minima = gl.allocate_shared_memory(T, [16 * VALUE_RUN, 64], SWIZZLED)

    # The first records do not depend on the length: request them before it arrives.
    words_at = key_words_ptr + row_head.to(gl.int64) * key_records * KEY_RECORD
    key_at = key_meta_ptr + row_head.to(gl.int64) * key_records * KEY_RECORD
    held = (split + 1) * KEY_RUN <= key_records
    fetch(key_words, key_scales, key_minima, words_at, key_at, split * KEY_RUN * KEY_RECORD, held, KEY_BITS, KEY_RUN, 0)
    value_words_at = value_words_ptr + row_head.to(gl.int64) * value_records * VALUE_RECORD
    value_at = value_meta_ptr + row_head.to(gl.int64) * value_records * VALUE_RECORD
    window_at = row_head.to(gl.int64) * window_rows * DIM
    key_window_at = key_window_ptr + window_at
    value_window_at = value_window_ptr + window_at
    key_fresh_at = key_ptr + row.to(gl.int64) * key_row_stride + head.to(gl.int64) * key_head_stride
    value_fresh_at = value_ptr + row.to(gl.int64) * value_row_stride + head.to(gl.int64) * value_head_stride
    start, padding, first, end = row_span(position_ptr, position_stride, left_padding_ptr, row, new_tokens, capacity)
    end = gl.where(start + new_tokens > capacity, 0, end)  # the row will be NaN: the combine's work
    key_boundary = visible_boundary(gl.load(sealed_ptr + 2 * row), first, AFTER)
    value_boundary = visible_boundary(gl.load(sealed_ptr + 2 * row + 1), first, AFTER)
    chunks = gl.minimum(gl.minimum(key_boundary, value_boundary), gl.minimum(gl.maximum(first, 0), end)) // CHUNK

    ROWS: gl.constexpr = 4 if PAIRED else 8
    column_b = gl.arange(0, 8, gl.SliceLayout(0, B))
    low_half = gl.where(column_b >= ROWS, -1, 0).to(gl.int16)[None, :]
    row_b = column_b % ROWS + gl.program_id(2) * ROWS
    channel_b = gl.arange(0, 16, gl.SliceLayout(1, B))
    query_base = query_ptr + row.to(gl.int64) * query_row_stride
    query_at = ((head * REPEATS + row_b % REPEATS).to(gl.int64) * query_head_stride + (row_b // REPEATS) * query_token_stride)[None, :]
    query_real = (row_b < new_tokens * REPEATS)[None, :] & (channel_b >= 0)[:, None]
    floats = ()
    largest = gl.full([16, 8], 0.0, gl.float32, B)
    for step in gl.static_range(DIM // 16):
        tile = gl.load(query_base + query_at + channel_b[:, None] + 16 * step, query_real, 0.0).to(gl.float32)
        floats = floats + (tile,)
        largest = gl.maximum(largest, gl.abs(tile))
    query_exponent = exponent(gl.max(gl.max(largest, 0), 0)) + 1
    query_exponent = gl.minimum(gl.maximum(query_exponent, -60), 54)
    down = power_of_two(QUERY_UP - query_exponent)
    queries = ()
    signed_queries = ()
    for step in gl.static_range(DIM // 16):
        tile = floats[step] * down
        if PAIRED:
            queries = queries + (gl.where((column_b >= ROWS)[None, :], tile, 0.0).to(T),)
            signed_queries = signed_queries + (gl.where((column_b >= ROWS)[None, :], tile, -tile).to(T),)
        else:
            queries = queries + (tile.to(T),)
    to_logit = scale * LOG2_E * power_of_two(query_exponent - QUERY_UP)
    code_to_logit = to_logit * REST

    column = gl.arange(0, 8, ACROSS)
    query_row = column % ROWS + gl.program_id(2) * ROWS
    query_head = head * REPEATS + query_row % REPEATS
    mask_base = mask_ptr + row.to(gl.int64) * mask_row_stride
    mask_at = query_head.to(gl.int64) * mask_head_stride + (query_row // REPEATS).to(gl.int64) * mask_token_stride
    token_32 = gl.arange(0, 32, DOWN)
    row_a = gl.arange(0, 16, gl.SliceLayout(1, A))[:, None]
    column_a = gl.arange(0, 16, gl.SliceLayout(0, A))[None, :]
    zero_16 = gl.full([16, 8], 0.0, gl.float32, MMA)
    zero_32 = gl.full([32, 8], 0.0, gl.float32, MMA)
    maximum = gl.full([8], float("-inf"), gl.float32, ACROSS)
    output = ()
    for _ in gl.static_range(OUTPUTS):
        output = output + (zero_32,)
    bias_sums = ()  # rows 0 .. 7: the sum of p; rows 8 .. 15: p . min
    for _ in gl.static_range(VALUE_PARTS):
        bias_sums = bias_sums + (zero_16,)

    # Most chunks of a row are hidden from nobody. Whether the next one is, is asked for an iteration ahead.
    ASK: gl.constexpr = (MASK > 1) and MASK_SHARED
    next_open = 0
    if ASK:
        next_open = open_columns(split * CHUNK, mask_base, mask_column_stride, mask_columns, padding, split < chunks, CHUNK, MASK)

    for chunk in range(split, chunks, splits):
        async_copy.wait_group(0)  # the Keys are here; request the Values only now
        base = chunk * VALUE_RUN * VALUE_RECORD
        fetch(value_words, value_scales, value_minima, value_words_at, value_at, base, chunk < chunks, VALUE_BITS, VALUE_RUN, 8)
        logits = ()
        for _ in gl.static_range(CHUNK // 32):
            logits = logits + (zero_32,)
        bias = ()
        for _ in gl.static_range(HALVES):
            bias = bias + (zero_16,)
        for step in gl.static_range(4):
            scales = key_scales.slice(16 * step, 16, 1)
            minima = key_minima.slice(16 * step, 16, 1).load(A)
            next_bias = ()
            for half in gl.static_range(HALVES):
                next_bias = next_bias + (mma_v2(minima, queries[4 * half + step], bias[half]),)
            bias = next_bias
            next_logits = ()
            for record in gl.static_range(KEY_RUN):
                codes = unpack(key_words.slice(32 * record, 32, 0).slice(16 * step, 16, 1).load(A), KEY_BITS, T)
                # Products that add up in one accumulator wait for each other, so the parts take turns.
                tiles = ()
                for part in gl.static_range(KEY_PARTS):
                    tiles = tiles + (logits[record * KEY_PARTS + part],)
                for half in gl.static_range(HALVES):
                    next_tiles = ()
                    lows = ()
                    for part in gl.static_range(KEY_PARTS):
                        grid = scale_row(scales, record * KEY_FIELDS + part * HALVES + half)
                        if PAIRED:
                            high = paired_product(signed_queries[4 * half + step], queries[4 * half + step], grid, T)
                        else:
                            high, low = product(queries[4 * half + step], grid, T)
                            lows = lows + (low,)
                        next_tiles = next_tiles + (mma_v2(codes[half * KEY_PARTS + part], high, tiles[part]),)
                    tiles = next_tiles
                    if not PAIRED:
                        next_tiles = ()
                        for part in gl.static_range(KEY_PARTS):
                            next_tiles = next_tiles + (mma_v2(codes[half * KEY_PARTS + part], lows[part], tiles[part]),)
                        tiles = next_tiles
                next_logits = next_logits + tiles
            logits = next_logits
        following = chunk + splits
        if ASK:
            now_open = next_open
            begin = following * CHUNK
            wanted = following < chunks
            next_open = open_columns(begin, mask_base, mask_column_stride, mask_columns, padding, wanted, CHUNK, MASK)
        base = following * KEY_RUN * KEY_RECORD
        fetch(key_words, key_scales, key_minima, words_at, key_at, base, following < chunks, KEY_BITS, KEY_RUN, 0)

        biases = interleave(bias, HALVES) * to_logit
        seen = ()
        for record in gl.static_range(KEY_RUN):
            shifts = spread(biases, 8 * record + 8 - KEY_FIELDS, KEY_PARTS, HALVES)
            for part in gl.static_range(KEY_PARTS):
                logit = logits[record * KEY_PARTS + part] * (code_to_logit * unit(part, KEY_BITS, T)) + shifts[part]
                if PAIRED:
                    logit = add_pairs(logit)
                seen = seen + (logit,)
        if MASK > 1:
            shown = 0
            if ASK:
                shown = gl.min(now_open, 0)
            if shown == 0:
                masked = ()
                for part in gl.static_range(CHUNK // 32):
                    logit = visibility(
                        seen[part], chunk * CHUNK + part * 32 + token_32, query_row, padding, mask_base, mask_at, mask_column_stride,
                        mask_columns, new_tokens, REPEATS, MASK, MASK_SHARED,
                    )  # fmt: skip
                    masked = masked + (logit,)
                seen = masked
        tallest = seen[0]
        for part in gl.static_range(1, CHUNK // 32):
            tallest = gl.maximum(tallest, seen[part])
        peak = gl.max(tallest, 0)
        async_copy.wait_group(1)  # the Values are here
        room = gl.max(gl.max(value_scales.load(COPY).to(gl.float32), 1), 0)
        lift = gl.maximum(exponent(room) - SCALE_ROOM, 0) - WEIGHT_UP
        peak = gl.maximum(maximum, peak + lift.to(gl.float32))
        if MASK > 1:
            shift = finite_shift(peak)
        else:
            shift = peak
        decay = gl.exp2(maximum - shift)
        maximum = peak
        # A chunk is added up on its own, then to the rest in float32: tensor cores truncate, and over a long row that would add up.
        fresh = ()
        for _ in gl.static_range(OUTPUTS):
            fresh = fresh + (zero_32,)
        fresh_sums = ()
        for _ in gl.static_range(VALUE_PARTS):
            fresh_sums = fresh_sums + (zero_16,)
        for record in gl.static_range(VALUE_RUN):
            for half in gl.static_range(2):
                operands = ()
                for part in gl.static_range(VALUE_PARTS):
                    high, low = weights(gl.exp2(seen[2 * VALUE_PARTS * record + 2 * part + half] - shift[None, :]), T)
                    if PAIRED and VALUE_LOW:
                        signed, high, low, both = paired_weights(high, low, low_half, T)
                        operands = operands + (pieces(high), pieces(low), pieces(signed), pieces(both))
                    else:
                        operands = operands + (pieces(high), pieces(low), (), ())
                for quarter in gl.static_range(2):
                    words = value_words.slice(32 * record, 32, 0).slice(32 * half + 16 * quarter, 16, 1)
                    codes = unpack(words.load(A), VALUE_BITS, T)
                    scales = value_scales.slice(32 * half + 16 * quarter, 16, 1)
                    minima = value_minima.slice(16 * record, 16, 0).slice(32 * half + 16 * quarter, 16, 1).load(A)
                    minima = gl.where((row_a < 8) & (column_a >= 0), 1.0, minima.to(gl.float32)).to(T)
                    next_sums = ()
                    for part in gl.static_range(VALUE_PARTS):
                        high = operands[4 * part][quarter]
                        low = operands[4 * part + 1][quarter]
                        if PAIRED and VALUE_LOW:
                            next_sums = next_sums + (mma_v2(minima, operands[4 * part + 3][quarter], fresh_sums[part]),)
                        elif VALUE_LOW:
                            next_sums = next_sums + (mma_v2(minima, low, mma_v2(minima, high, fresh_sums[part])),)
                        else:
                            next_sums = next_sums + (mma_v2(minima, high, fresh_sums[part]),)
                        next_fresh = ()
                        lows = ()
                        for i in gl.static_range(OUTPUTS):
                            target = fresh[i]
                            if (part * GROUPS) % OUTPUTS <= i and i < (part * GROUPS) % OUTPUTS + GROUPS:
                                grid = scale_row(scales, record * VALUE_FIELDS + i % GROUPS * VALUE_PARTS + part)
                                if PAIRED and VALUE_LOW:
                                    high_product = paired_weighted(operands[4 * part + 2][quarter], high, low, grid, T)
                                elif VALUE_LOW:
                                    high_product, low_product = weighted(high, low, grid, T)
                                    lows = lows + (low_product,)
                                else:
                                    high_product = high * grid
                                target = mma_v2(codes[part * GROUPS + i % GROUPS], high_product, target)
                            next_fresh = next_fresh + (target,)
                        fresh = next_fresh
                        if VALUE_LOW and not PAIRED:
                            next_fresh = ()
                            for i in gl.static_range(OUTPUTS):
                                target = fresh[i]
                                if (part * GROUPS) % OUTPUTS <= i and i < (part * GROUPS) % OUTPUTS + GROUPS:
                                    target = mma_v2(codes[part * GROUPS + i % GROUPS], lows[i - (part * GROUPS) % OUTPUTS], target)
                                next_fresh = next_fresh + (target,)
                            fresh = next_fresh
                    fresh_sums = next_sums
        added = ()
        for i in gl.static_range(OUTPUTS):
            added = added + (output[i] * decay[None, :] + fresh[i],)
        output = added
        added = ()
        for i in gl.static_range(VALUE_PARTS):
            added = added + (bias_sums[i] * decay[None, :] + fresh_sums[i],)
        bias_sums = added

    # From here on in plain units: sums [32 channels, 8] a group, and the total.
    if PAIRED and VALUE_LOW:
        added = ()
        for i in gl.static_range(OUTPUTS):
            added = added + (add_pairs(output[i]),)
        output = added
        added = ()
        for i in gl.static_range(VALUE_PARTS):
            added = added + (add_pairs(bias_sums[i]),)
        bias_sums = added
    ones = bias_sums[0]
    for i in gl.static_range(1, VALUE_PARTS):
        ones += bias_sums[i]
    total = gl.sum(gl.where((gl.arange(0, 16, DOWN) == 0)[:, None], ones, 0.0), 0)
    shifts = spread(interleave(bias_sums, VALUE_PARTS), 16 - VALUE_FIELDS, GROUPS, VALUE_PARTS)
    sums = ()
    for group in gl.static_range(GROUPS):
        whole = output[group] * REST * unit(group, VALUE_BITS, T)
        if OUTPUTS > GROUPS:
            whole += output[GROUPS + group] * REST * unit(GROUPS + group, VALUE_BITS, T)
        sums = sums + (whole + shifts[group],)

    # The buffers below may take the place of those above, into which requests that nobody needed can still be under way.
    async_copy.wait_group(0)
    thread_barrier()
    float_keys = gl.allocate_shared_memory(T, [32, DIM], SWIZZLED)
    float_values = gl.allocate_shared_memory(T, [32, DIM], SWIZZLED)
    count = gl.cdiv(gl.maximum(end, 0) - chunks * CHUNK, 32)
    for index in range((split + splits - chunks % splits) % splits, count, splits):
        begin = chunks * CHUNK + 32 * index
        token = begin + token_32
        float_rows(float_keys, key_window_at, key_fresh_at, key_token_stride, begin, key_boundary, first, end, window_rows, DIM)
        float_rows(float_values, value_window_at, value_fresh_at, value_token_stride, begin, value_boundary, first, end, window_rows, DIM)
        async_copy.commit_group()
        words, scales, minima = sealed_keys(words_at, key_at, begin, key_boundary, DIM, KEY_BITS)
        value_grids, room = sealed_value_scales(value_at, begin, value_boundary, DIM, VALUE_BITS)

        logit = zero_32
        if begin < key_boundary:
            from_codes = zero_32
            bias_16 = zero_16
            bit = begin % KEY_TOKENS // 32 * KEY_BITS
            for step in gl.static_range(4):
                for half in gl.static_range(HALVES):
                    query = queries[4 * half + step]
                    codes = field(words[step], bit + half * KEY_PARTS * KEY_BITS, KEY_BITS, T)
                    if PAIRED:
                        both = paired_product(signed_queries[4 * half + step], query, scales[4 * half + step], T)
                        from_codes = mma_v2(codes, both, from_codes)
                    else:
                        high, low = product(query, scales[4 * half + step], T)
                        from_codes = mma_v2(codes, low, mma_v2(codes, high, from_codes))
                    bias_16 = mma_v2(minima[4 * half + step], query, bias_16)
            logit = from_codes * (code_to_logit * smallest(T)) + over_rows(bias_16) * to_logit
        value_words_32, value_minima_16 = sealed_values(value_words_at, value_at, begin, value_boundary, DIM, VALUE_BITS)
        async_copy.wait_group(0)
        if begin + 32 > key_boundary:
            from_floats = zero_32
            for step in gl.static_range(DIM // 16):
                from_floats = mma_v2(float_keys.slice(16 * step, 16, 1).load(A), queries[step], from_floats)
            logit = gl.where((token < key_boundary)[:, None], logit, from_floats * to_logit)
        if PAIRED:
            logit = add_pairs(logit)
        visible = (token < end)[:, None] & (query_row < new_tokens * REPEATS)[None, :]
        if MASK == MASK_CAUSAL:
            visible = visible & (token[:, None] <= (first + query_row // REPEATS)[None, :])
        elif MASK != MASK_NONE:
            logit = visibility(
                logit, token, query_row, padding, mask_base, mask_at, mask_column_stride, mask_columns, new_tokens,
                REPEATS, MASK, MASK_SHARED,
            )  # fmt: skip
        logit = gl.where(visible, logit, float("-inf"))
        lift = gl.maximum(exponent(room) - SCALE_ROOM, 0) - WEIGHT_UP
        peak = gl.maximum(maximum, gl.max(logit, 0) + lift.to(gl.float32))
        shift = finite_shift(peak)
        decay = gl.exp2(maximum - shift)
        maximum = peak
        p = gl.exp2(logit - shift[None, :])
        total = total * decay + gl.sum(p, 0)
        high, low = weights(p, T)
        next_sums = ()
        for group in gl.static_range(GROUPS):
            next_sums = next_sums + (sums[group] * decay[None, :],)
        sums = next_sums
        if begin < value_boundary:
            lows = spread(mma_v2(value_minima_16, low, mma_v2(value_minima_16, high, zero_16)), 0, GROUPS, 1)
            bit = begin % VALUE_TOKENS // 64 * GROUPS * VALUE_BITS
            next_sums = ()
            for group in gl.static_range(GROUPS):
                codes = field(value_words_32, bit + group * VALUE_BITS, VALUE_BITS, T)
                high_product, low_product = weighted(high, low, value_grids[group], T)
                whole = mma_v2(codes, low_product, mma_v2(codes, high_product, zero_32)) * REST * smallest(T)
                next_sums = next_sums + (sums[group] + whole + lows[group],)
            sums = next_sums
        if begin + 32 > value_boundary:
            next_sums = ()
            for group in gl.static_range(GROUPS):
                values = float_values.slice(32 * group, 32, 1).permute((1, 0)).load(A)
                next_sums = next_sums + (mma_v2(values, low, mma_v2(values, high, sums[group])),)
            sums = next_sums

    if SIGNAL:  # the combine may start to launch
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    query_rows = new_tokens * REPEATS
    slot = (first_slot + split).to(gl.int64) * query_rows + query_row
    real = (query_row < query_rows) & (column < ROWS)
    gl.store(maximum_ptr + slot, gl.where(total != total, total, maximum), real)
    gl.store(total_ptr + slot, total, real)
    target = partial_ptr + slot[None, :] * DIM + token_32[:, None]
    for group in gl.static_range(GROUPS):
        gl.store(target + group * 32, sums[group], real[None, :] & (token_32 >= 0)[:, None])
