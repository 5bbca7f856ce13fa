"""The two kernels of ``append``: seal what is due into records, then write the windows, boundaries and length.

Everything that moves from step to step (position, padding, boundaries, count) is read on the device, so that a captured graph replays
at any length. No program reads what another of the same launch writes. Must not know of queries or attention.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kivi_ops.kernels.common import quantize_tile, restore, row_span, widen


@triton.jit
def valid_tokens(count_ptr, new_tokens, HAS_COUNT: tl.constexpr):
    """How many of the new tokens count: int64."""
    if HAS_COUNT:
        count = tl.minimum(tl.maximum(tl.load(count_ptr).to(tl.int64), 0), new_tokens)
    else:
        count = tl.zeros([], tl.int64) + new_tokens
    return count


@triton.jit
def next_boundaries(sealed_ptr, row, first, end, residual_length, rollback_margin):
    """Key and Value boundary of a row as this call finds them and as it leaves them (contract section 3)."""
    held = tl.maximum(first, 0)
    key_begin = tl.minimum(tl.load(sealed_ptr + 2 * row), held)
    value_begin = tl.minimum(tl.load(sealed_ptr + 2 * row + 1), held)
    settled = tl.maximum(tl.maximum(held, end) - rollback_margin, 0)
    key_end = tl.maximum(key_begin, settled // residual_length * residual_length)
    value_end = tl.maximum(value_begin, settled - residual_length)
    return key_begin, key_end, value_begin, value_end


@triton.jit
def seal_block(
    words_ptr,
    meta_ptr,
    base_record,
    window_ptr,
    fresh_ptr,
    token_stride,
    channel_stride,
    program,
    begin,
    end,
    first,
    window_rows,
    IS_KEY: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
):
    """Seal tokens ``begin`` .. ``end`` as far as they lie in this program's block of record words, [GROUP, COLUMN_BLOCK].

    A read-modify-write, field by field, of words and grids that no other program touches: a block's rows are whole groups. Fields of
    other tokens stay as they are. A Key group below ``end`` that holds ``begin`` is quantised again, from its restored values below
    ``begin`` and the floats above.
    """
    TOKEN_PARTS: tl.constexpr = 16 // BITS // PARTS
    ROWS: tl.constexpr = GROUP if IS_KEY else DIM // PARTS
    COLUMNS: tl.constexpr = DIM // PARTS if IS_KEY else TOKENS // TOKEN_PARTS
    PAIRS: tl.constexpr = TOKEN_PARTS * DIM if IS_KEY else (DIM + GROUP - 1) // GROUP * TOKENS
    META_WORDS: tl.constexpr = meta_ptr.dtype.element_ty.primitive_bitwidth // 16
    META_RECORD: tl.constexpr = ROWS * COLUMNS // META_WORDS + 2 * PAIRS  # a record, counted in metadata values
    ROW_BLOCKS: tl.constexpr = (ROWS + GROUP - 1) // GROUP
    COLUMN_BLOCKS: tl.constexpr = (COLUMNS + COLUMN_BLOCK - 1) // COLUMN_BLOCK
    LEVELS: tl.constexpr = 2**BITS - 1

    column_block = program % COLUMN_BLOCKS
    row_block = program // COLUMN_BLOCKS % ROW_BLOCKS
    record = begin // TOKENS + program // (COLUMN_BLOCKS * ROW_BLOCKS)
    if (begin < end) & (record * TOKENS < end):
        row = row_block * GROUP + tl.arange(0, GROUP)
        column = column_block * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
        inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
        words_at = words_ptr + (base_record + record) * (META_RECORD * META_WORDS) + row[:, None] * COLUMNS + column[None, :]
        scale_ptr = meta_ptr + (base_record + record) * META_RECORD + ROWS * COLUMNS // META_WORDS
        words = tl.load(words_at, mask=inside, other=0).to(tl.int32)
        for field in range(16 // BITS):
            if IS_KEY:
                local = field % TOKEN_PARTS * GROUP  # the field's first token in the record
                size = GROUP
                token = (record * TOKENS + local + row)[:, None]
                channel = (field // TOKEN_PARTS * COLUMNS + column)[None, :]
                pair = field % TOKEN_PARTS * DIM + field // TOKEN_PARTS * COLUMNS + column
            else:
                local = field // PARTS * COLUMNS + column_block * COLUMN_BLOCK
                size = COLUMN_BLOCK
                token = (record * TOKENS + field // PARTS * COLUMNS + column)[None, :]
                channel = (field % PARTS * ROWS + row)[:, None]
                pair = (field % PARTS * (ROWS // GROUP) + row_block) * TOKENS + field // PARTS * COLUMNS + column
            field_begin = record * TOKENS + local
            if (field_begin < end) & (field_begin + size > begin):
                due = inside & (token < end) & ((token >= begin) | IS_KEY)
                kept = due & (token >= begin) & (token < first)
                fresh = due & (token >= begin) & (token >= first)
                window_at = window_ptr + (token % window_rows).to(tl.int64) * DIM + channel
                fresh_at = fresh_ptr + (token - first).to(tl.int64) * token_stride + channel.to(tl.int64) * channel_stride
                x = tl.where(
                    fresh,
                    widen(tl.load(fresh_at, mask=fresh, other=0.0)),
                    widen(tl.load(window_at, mask=kept, other=0.0)),
                )
                if IS_KEY:
                    if field_begin < begin:
                        scale = tl.load(scale_ptr + pair, mask=column < COLUMNS, other=0.0)
                        minimum = tl.load(scale_ptr + PAIRS + pair, mask=column < COLUMNS, other=0.0)
                        old = restore((words >> (field * BITS)) & LEVELS, scale[None, :], minimum[None, :])
                        x = tl.where(due & (token < begin), old, x)
                codes, scale, minimum = quantize_tile(x, due, 0, BITS, meta_ptr.dtype.element_ty)
                words = tl.where(due, (words & ~(LEVELS << (field * BITS))) | (codes << (field * BITS)), words)
                store_pair = tl.max(due.to(tl.int32), 0) > 0
                tl.store(scale_ptr + pair, scale, mask=store_pair)
                tl.store(scale_ptr + PAIRS + pair, minimum, mask=store_pair)
        tl.store(words_at, words.to(tl.int16), mask=inside)


@triton.jit
def seal_kernel(
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
    count_ptr,
    key_row_stride,
    key_head_stride,
    key_token_stride,
    key_channel_stride,
    value_row_stride,
    value_head_stride,
    value_token_stride,
    value_channel_stride,
    position_stride,
    heads,
    new_tokens,
    capacity,
    window_rows,
    key_records,
    value_records,
    key_programs,
    programs,
    residual_length,
    rollback_margin,
    HAS_COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_TOKENS: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    KEY_COLUMN_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_TOKENS: tl.constexpr,
    VALUE_PARTS: tl.constexpr,
    VALUE_COLUMN_BLOCK: tl.constexpr,
):
    """First launch: records, from the windows as the last call left them and the new tokens.

    Grid: ``programs`` for each row and KV head, the first ``key_programs`` of them for Keys: enough for the records that
    S + W tokens can touch. Those without a due token return at once.
    """
    program = tl.program_id(0) % programs
    row_head = (tl.program_id(0) // programs).to(tl.int64)
    row, head = row_head // heads, row_head % heads
    count = valid_tokens(count_ptr, new_tokens, HAS_COUNT)
    start, padding, first, end = row_span(position_ptr, position_stride, left_padding_ptr, row, count, capacity)
    key_begin, key_end, value_begin, value_end = next_boundaries(sealed_ptr, row, first, end, residual_length, rollback_margin)
    if program < key_programs:
        seal_block(
            key_words_ptr,
            key_meta_ptr,
            row_head * key_records,
            key_window_ptr + row_head * window_rows * KEY_DIM,
            key_ptr + row * key_row_stride + head * key_head_stride,
            key_token_stride,
            key_channel_stride,
            program,
            key_begin,
            key_end,
            first,
            window_rows,
            True,
            KEY_DIM,
            KEY_BITS,
            GROUP,
            KEY_TOKENS,
            KEY_PARTS,
            KEY_COLUMN_BLOCK,
        )
    else:
        seal_block(
            value_words_ptr,
            value_meta_ptr,
            row_head * value_records,
            value_window_ptr + row_head * window_rows * VALUE_DIM,
            value_ptr + row * value_row_stride + head * value_head_stride,
            value_token_stride,
            value_channel_stride,
            program - key_programs,
            value_begin,
            value_end,
            first,
            window_rows,
            False,
            VALUE_DIM,
            VALUE_BITS,
            GROUP,
            VALUE_TOKENS,
            VALUE_PARTS,
            VALUE_COLUMN_BLOCK,
        )


@triton.jit
def write_window(
    fresh_ptr,
    token_stride,
    channel_stride,
    window_ptr,
    token,
    live,
    first,
    window_rows,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Copy new tokens ``token`` [n] where ``live`` into their window rows."""
    channel = tl.arange(0, DIM_BLOCK)
    mask = live[:, None] & (channel < DIM)[None, :]
    source = fresh_ptr + (token - first).to(tl.int64)[:, None] * token_stride + channel.to(tl.int64)[None, :] * channel_stride
    row = (token % window_rows).to(tl.int64)[:, None] * DIM + channel[None, :]
    tl.store(window_ptr + row, tl.load(source, mask=mask), mask=mask)


@triton.jit
def write_kernel(
    key_ptr,
    value_ptr,
    key_window_ptr,
    value_window_ptr,
    sealed_ptr,
    left_padding_ptr,
    length_ptr,
    position_ptr,
    count_ptr,
    key_row_stride,
    key_head_stride,
    key_token_stride,
    key_channel_stride,
    value_row_stride,
    value_head_stride,
    value_token_stride,
    value_channel_stride,
    position_stride,
    rows,
    heads,
    new_tokens,
    capacity,
    window_rows,
    programs,
    residual_length,
    rollback_margin,
    HAS_COUNT: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_DIM_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):
    """Second launch: the last W new tokens into the windows, then ``sealed`` and ``length``.

    Grid: ``programs`` for each row and KV head, TOKEN_BLOCK tokens each, counted back from the last one.
    """
    program = tl.program_id(0) % programs
    row_head = (tl.program_id(0) // programs).to(tl.int64)
    row, head = row_head // heads, row_head % heads
    count = valid_tokens(count_ptr, new_tokens, HAS_COUNT)
    start, padding, first, end = row_span(position_ptr, position_stride, left_padding_ptr, row, count, capacity)

    back = program * TOKEN_BLOCK + tl.arange(0, TOKEN_BLOCK)
    token = end - 1 - back
    live = (back < window_rows) & (token >= 0) & (token >= first)
    write_window(
        key_ptr + row * key_row_stride + head * key_head_stride,
        key_token_stride,
        key_channel_stride,
        key_window_ptr + row_head * window_rows * KEY_DIM,
        token,
        live,
        first,
        window_rows,
        KEY_DIM,
        KEY_DIM_BLOCK,
    )
    write_window(
        value_ptr + row * value_row_stride + head * value_head_stride,
        value_token_stride,
        value_channel_stride,
        value_window_ptr + row_head * window_rows * VALUE_DIM,
        token,
        live,
        first,
        window_rows,
        VALUE_DIM,
        VALUE_DIM_BLOCK,
    )
    if (program == 0) & (head == 0):
        key_begin, key_end, value_begin, value_end = next_boundaries(sealed_ptr, row, first, end, residual_length, rollback_margin)
        tl.store(sealed_ptr + 2 * row, key_end)
        tl.store(sealed_ptr + 2 * row + 1, value_end)
    if tl.program_id(0) == 0:
        longest = tl.zeros([ROW_BLOCK], tl.int64)
        for block in range(0, rows, ROW_BLOCK):
            other = block + tl.arange(0, ROW_BLOCK).to(tl.int64)
            starts = tl.load(position_ptr + other * position_stride, mask=other < rows, other=0).to(tl.int64)
            longest = tl.maximum(longest, starts)
        tl.store(length_ptr, tl.max(longest, 0) + count)
