"""The kernels of ``append``: seal what is due into records, write the windows, the boundaries and the length.

A step of few tokens is one launch (:func:`step_kernel`), a prompt two (:func:`seal_kernel`, :func:`write_kernel`). Everything that moves
from step to step (position, padding, boundaries, count) is read on the device, so that a captured graph replays at any length.
Must not know of queries or attention.

Why no program's result depends on the order in which the programs of a launch run:

- ``position``, ``count``, ``left_padding`` and the new tokens are written by none.
- A record word and the grids beside it belong to one program, and so do, in a step, the window rows it reads: the token that takes
  a row is written by the program that seals the row's token. In a prompt the windows are written by the second launch.
- ``length`` is read by none and written by one.
- A boundary is read by every program of its row and written by the last one that has read it; :func:`take_boundary` says how.
  In a prompt the second launch writes it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kivi_ops.kernels.common import own_tokens, quantize_tile, restore, row_span, widen


@triton.jit
def valid_tokens(count_ptr, new_tokens, HAS_COUNT: tl.constexpr):
    """How many of the new tokens count: int64."""
    if HAS_COUNT:
        count = tl.minimum(tl.maximum(tl.load(count_ptr).to(tl.int64), 0), new_tokens)
    else:
        count = tl.zeros([], tl.int64) + new_tokens
    return count


@triton.jit
def next_key_boundary(boundary, first, end, residual_length, rollback_margin):
    """A row's Key boundary as this call finds it and as it leaves it (contract section 3)."""
    held = tl.maximum(first, 0)
    begin = tl.minimum(boundary, held)
    settled = tl.maximum(tl.maximum(held, end) - rollback_margin, 0)
    return begin, tl.maximum(begin, settled // residual_length * residual_length)


@triton.jit
def next_value_boundary(boundary, first, end, residual_length, rollback_margin):
    """The same for Values."""
    held = tl.maximum(first, 0)
    begin = tl.minimum(boundary, held)
    return begin, tl.maximum(begin, tl.maximum(held, end) - rollback_margin - residual_length)


@triton.jit
def take_boundary(boundary_ptr, programs, shift):
    """A boundary as the last call left it, and whether this program is the last of ``programs`` to take it and so the one to replace it.

    Each program adds 1 to a count in the bits from ``shift`` upwards, which are 0 between calls, and finds what was there before: the read
    *is* the announcement. All of it happens at one address, where even relaxed operations have one order, and the replacement comes after
    ``programs`` of them: no program can find the new boundary, nor miss the old one.
    """
    found = tl.atomic_add(boundary_ptr, 1 << shift, sem="relaxed")
    return found & ((1 << shift) - 1), (found >> shift) == programs - 1


@triton.jit
def longest_row(position_ptr, position_stride, rows, ROW_BLOCK: tl.constexpr):
    """The largest start column of a call: int64, 0 at least."""
    longest = tl.zeros([ROW_BLOCK], tl.int64)
    for block in range(0, rows, ROW_BLOCK):
        row = block + tl.arange(0, ROW_BLOCK).to(tl.int64)
        longest = tl.maximum(longest, tl.load(position_ptr + row * position_stride, mask=row < rows, other=0).to(tl.int64))
    return tl.max(longest, 0)


@triton.jit
def fill_block(
    words_ptr,
    meta_ptr,
    record,
    fresh_ptr,
    token_stride,
    channel_stride,
    row_block,
    column_block,
    IS_KEY: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
):
    """Write one block of a record's words, [GROUP, COLUMN_BLOCK], and the grids of its groups, from the record's tokens at ``fresh_ptr``.

    No part of the block may lie outside of the words. ``record`` is int64.
    """
    TOKEN_PARTS: tl.constexpr = 16 // BITS // PARTS
    ROWS: tl.constexpr = GROUP if IS_KEY else DIM // PARTS
    COLUMNS: tl.constexpr = DIM // PARTS if IS_KEY else TOKENS // TOKEN_PARTS
    PAIRS: tl.constexpr = TOKEN_PARTS * DIM if IS_KEY else (DIM + GROUP - 1) // GROUP * TOKENS
    META_WORDS: tl.constexpr = meta_ptr.dtype.element_ty.primitive_bitwidth // 16
    META_RECORD: tl.constexpr = ROWS * COLUMNS // META_WORDS + 2 * PAIRS  # a record, counted in metadata values

    row = row_block * GROUP + tl.arange(0, GROUP)
    column = column_block * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    scale_ptr = meta_ptr + record * META_RECORD + ROWS * COLUMNS // META_WORDS
    if IS_KEY:
        offset = row.to(tl.int64)[:, None] * token_stride + column.to(tl.int64)[None, :] * channel_stride
    else:
        offset = column.to(tl.int64)[None, :] * token_stride + row.to(tl.int64)[:, None] * channel_stride
    words = tl.zeros([GROUP, COLUMN_BLOCK], tl.int32)
    weight = tl.full([], 1, tl.int32)  # of a field in its word
    nought = tl.zeros([], tl.int64)
    for field in range(16 // BITS):
        if IS_KEY:
            token_part, channel_part = field % TOKEN_PARTS, field // TOKEN_PARTS
            first_token, first_channel = token_part * GROUP, channel_part * COLUMNS
            pair = token_part * DIM + first_channel + column
        else:
            token_part, channel_part = field // PARTS, field % PARTS
            first_token, first_channel = token_part * COLUMNS, channel_part * ROWS
            pair = (channel_part * (ROWS // GROUP) + row_block) * TOKENS + first_token + column
        field_ptr = fresh_ptr + (nought + first_token) * token_stride + (nought + first_channel) * channel_stride
        fresh_at = field_ptr + offset
        if IS_KEY:
            fresh_at = tl.max_contiguous(fresh_at, (1, 2))
        x = widen(tl.load(fresh_at))
        codes, scale, minimum = quantize_tile(x, None, 0, BITS, meta_ptr.dtype.element_ty)
        words += codes * weight
        weight *= 2**BITS
        tl.store(scale_ptr + pair, scale)
        tl.store(scale_ptr + PAIRS + pair, minimum)
    words_at = words_ptr + record * (META_RECORD * META_WORDS) + row[:, None] * COLUMNS + column[None, :]
    tl.store(tl.max_contiguous(words_at, (1, 2)), words.to(tl.int16))


@triton.jit
def change_block(
    words_ptr,
    meta_ptr,
    base_record,
    record,
    window_ptr,
    fresh_ptr,
    token_stride,
    channel_stride,
    row_block,
    column_block,
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
    """Seal tokens ``begin`` .. ``end`` as far as they lie in one block of a record's words, [GROUP, COLUMN_BLOCK].

    A read-modify-write, field by field, of words and grids that no other program touches: a block's rows are whole groups. Fields of
    other tokens stay as they are. A Key group below ``end`` that holds ``begin`` is quantised again, from its restored values below
    ``begin`` and the floats above. ``base_record`` (int64) is the row and head's first record.
    """
    TOKEN_PARTS: tl.constexpr = 16 // BITS // PARTS
    ROWS: tl.constexpr = GROUP if IS_KEY else DIM // PARTS
    COLUMNS: tl.constexpr = DIM // PARTS if IS_KEY else TOKENS // TOKEN_PARTS
    PAIRS: tl.constexpr = TOKEN_PARTS * DIM if IS_KEY else (DIM + GROUP - 1) // GROUP * TOKENS
    META_WORDS: tl.constexpr = meta_ptr.dtype.element_ty.primitive_bitwidth // 16
    META_RECORD: tl.constexpr = ROWS * COLUMNS // META_WORDS + 2 * PAIRS  # a record, counted in metadata values
    LEVELS: tl.constexpr = 2**BITS - 1

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
    SMALL_BLOCK: tl.constexpr,
):
    """Seal tokens ``begin`` .. ``end`` as far as they lie in this program's block of record words.

    A block whose tokens are all new and all due, as most of a prompt's are, is written without reading anything else. The
    rest is done SMALL_BLOCK columns at a time, since it takes more registers.
    """
    TOKEN_PARTS: tl.constexpr = 16 // BITS // PARTS
    ROWS: tl.constexpr = GROUP if IS_KEY else DIM // PARTS
    COLUMNS: tl.constexpr = DIM // PARTS if IS_KEY else TOKENS // TOKEN_PARTS
    ROW_BLOCKS: tl.constexpr = (ROWS + GROUP - 1) // GROUP
    COLUMN_BLOCKS: tl.constexpr = (COLUMNS + COLUMN_BLOCK - 1) // COLUMN_BLOCK

    column_block = program % COLUMN_BLOCKS
    row_block = program // COLUMN_BLOCKS % ROW_BLOCKS
    record = begin // TOKENS + program // (COLUMN_BLOCKS * ROW_BLOCKS)
    start, stop = record * TOKENS, (record + 1) * TOKENS
    whole = (start >= begin) & (start >= first) & (stop <= end)
    if ROWS % GROUP == 0 and COLUMNS % COLUMN_BLOCK == 0:
        if whole:
            fill_block(
                words_ptr,
                meta_ptr,
                base_record + record,
                fresh_ptr + (start - first).to(tl.int64) * token_stride,
                token_stride,
                channel_stride,
                row_block,
                column_block,
                IS_KEY,
                DIM,
                BITS,
                GROUP,
                TOKENS,
                PARTS,
                COLUMN_BLOCK,
            )
    else:
        whole = False
    if (begin < end) & (start < end) & (whole == 0):
        for part in range(COLUMN_BLOCK // SMALL_BLOCK):
            change_block(
                words_ptr,
                meta_ptr,
                base_record,
                record,
                window_ptr,
                fresh_ptr,
                token_stride,
                channel_stride,
                row_block,
                column_block * (COLUMN_BLOCK // SMALL_BLOCK) + part,
                begin,
                end,
                first,
                window_rows,
                IS_KEY,
                DIM,
                BITS,
                GROUP,
                TOKENS,
                PARTS,
                SMALL_BLOCK,
            )


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
    KEY_SMALL_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_TOKENS: tl.constexpr,
    VALUE_PARTS: tl.constexpr,
    VALUE_COLUMN_BLOCK: tl.constexpr,
    VALUE_SMALL_BLOCK: tl.constexpr,
):
    """First launch of a prompt: records, from the windows as the last call left them and the new tokens.

    Grid: ``programs`` for each row and KV head, the first ``key_programs`` of them for Keys: enough for the records that
    S + W tokens can touch. Those without a due token return at once.
    """
    program = tl.program_id(0) % programs
    row_head = (tl.program_id(0) // programs).to(tl.int64)
    row, head = row_head // heads, row_head % heads
    count = valid_tokens(count_ptr, new_tokens, HAS_COUNT)
    start, padding, first, end = row_span(position_ptr, position_stride, left_padding_ptr, row, count, capacity)
    if program < key_programs:
        begin, stop = next_key_boundary(tl.load(sealed_ptr + 2 * row), first, end, residual_length, rollback_margin)
        seal_block(
            key_words_ptr,
            key_meta_ptr,
            row_head * key_records,
            key_window_ptr + row_head * window_rows * KEY_DIM,
            key_ptr + row * key_row_stride + head * key_head_stride,
            key_token_stride,
            key_channel_stride,
            program,
            begin,
            stop,
            first,
            window_rows,
            True,
            KEY_DIM,
            KEY_BITS,
            GROUP,
            KEY_TOKENS,
            KEY_PARTS,
            KEY_COLUMN_BLOCK,
            KEY_SMALL_BLOCK,
        )
    else:
        begin, stop = next_value_boundary(tl.load(sealed_ptr + 2 * row + 1), first, end, residual_length, rollback_margin)
        seal_block(
            value_words_ptr,
            value_meta_ptr,
            row_head * value_records,
            value_window_ptr + row_head * window_rows * VALUE_DIM,
            value_ptr + row * value_row_stride + head * value_head_stride,
            value_token_stride,
            value_channel_stride,
            program - key_programs,
            begin,
            stop,
            first,
            window_rows,
            False,
            VALUE_DIM,
            VALUE_BITS,
            GROUP,
            VALUE_TOKENS,
            VALUE_PARTS,
            VALUE_COLUMN_BLOCK,
            VALUE_SMALL_BLOCK,
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
    """Second launch of a prompt: the last W new tokens into the windows, then ``sealed`` and ``length``.

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
        _, key_end = next_key_boundary(tl.load(sealed_ptr + 2 * row), first, end, residual_length, rollback_margin)
        _, value_end = next_value_boundary(tl.load(sealed_ptr + 2 * row + 1), first, end, residual_length, rollback_margin)
        tl.store(sealed_ptr + 2 * row, key_end)
        tl.store(sealed_ptr + 2 * row + 1, value_end)
    if tl.program_id(0) == 0:
        tl.store(length_ptr, longest_row(position_ptr, position_stride, rows, ROW_BLOCK) + count)


@triton.jit
def step_value(
    fresh_ptr,
    channel_stride,
    words_ptr,
    meta_ptr,
    base_record,
    window_ptr,
    boundary_ptr,
    boundary_shift,
    programs,
    index,
    start,
    padding,
    count,
    capacity,
    RESIDUAL: tl.constexpr,
    MARGIN: tl.constexpr,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
):
    """Write new Value ``index``, at ``fresh_ptr``, into its window row, and first seal the one that it takes that row from, if due.

    Sealing is a read-modify-write of one token's fields and grids. ``base_record`` is the row and head's first record.
    """
    TOKEN_PARTS: tl.constexpr = 16 // BITS // PARTS
    ROWS: tl.constexpr = DIM // PARTS
    COLUMNS: tl.constexpr = TOKENS // TOKEN_PARTS
    GROUPS: tl.constexpr = (ROWS + GROUP - 1) // GROUP  # of a part
    META_WORDS: tl.constexpr = meta_ptr.dtype.element_ty.primitive_bitwidth // 16
    META_RECORD: tl.constexpr = ROWS * COLUMNS // META_WORDS + 2 * PARTS * GROUPS * TOKENS  # a record, counted in metadata values

    group = tl.arange(0, GROUP_BLOCK)
    row = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # of a part's channels
    part = tl.arange(0, PARTS)
    channel = part[:, None, None] * ROWS + row[None, :, :]
    inside = tl.broadcast_to((row < ROWS)[None, :, :], channel.shape)
    new = tl.load(fresh_ptr + channel.to(tl.int64) * channel_stride, mask=inside)
    found, last = take_boundary(boundary_ptr, programs, boundary_shift)
    first, end = own_tokens(start, padding, count, capacity)
    begin, stop = next_value_boundary(found, first, end, RESIDUAL, MARGIN)
    token = first + index
    if (token >= 0) & (token < end):
        window_at = window_ptr + token % WINDOW * DIM + channel
        old_token = token - WINDOW
        if old_token >= begin:
            record, local = base_record + old_token // TOKENS, old_token % TOKENS
            shift = local // COLUMNS * (PARTS * BITS)
            words_at = words_ptr + record * (META_RECORD * META_WORDS) + row * COLUMNS + local % COLUMNS
            pair = (part[:, None] * GROUPS + group[None, :]) * TOKENS + local
            pair_at = meta_ptr + record * META_RECORD + ROWS * COLUMNS // META_WORDS + pair
            words = tl.load(words_at, mask=row < ROWS, other=0).to(tl.int32)
            old = tl.load(window_at, mask=inside, other=0.0)
            tl.debug_barrier()  # every thread has read the row that is written below
            codes, scale, minimum = quantize_tile(widen(old), inside, 2, BITS, meta_ptr.dtype.element_ty)
            fields = tl.sum(codes << (part * BITS)[:, None, None], 0)
            words = (words & ~((2 ** (PARTS * BITS) - 1) << shift)) | (fields << shift)
            tl.store(words_at, words.to(tl.int16), mask=row < ROWS)
            whole = tl.broadcast_to((group < GROUPS)[None, :], pair.shape)
            tl.store(pair_at, scale, mask=whole)
            tl.store(pair_at + PARTS * GROUPS * TOKENS, minimum, mask=whole)
        tl.store(window_at, new, mask=inside)
    if last:
        tl.store(boundary_ptr, stop)


@triton.jit
def step_key(
    fresh_ptr,
    token_stride,
    channel_stride,
    words_ptr,
    meta_ptr,
    base_record,
    window_ptr,
    boundary_ptr,
    boundary_shift,
    programs,
    column_block,
    start,
    padding,
    count,
    new_tokens,
    capacity,
    RESIDUAL: tl.constexpr,
    MARGIN: tl.constexpr,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
):
    """Seal the Keys that are due and write the new ones into the window, in the channels of one block of the words' columns."""
    COLUMNS: tl.constexpr = DIM // PARTS
    index = tl.arange(0, TOKEN_BLOCK)
    column = column_block * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    channel = (tl.arange(0, PARTS)[:, None] * COLUMNS + column[None, :])[None, :, :]
    inside = (index < new_tokens)[:, None, None] & tl.broadcast_to((column < COLUMNS)[None, None, :], channel.shape)
    offset = index.to(tl.int64)[:, None, None] * token_stride + channel.to(tl.int64) * channel_stride
    new = tl.load(fresh_ptr + offset, mask=inside)
    found, last = take_boundary(boundary_ptr, programs, boundary_shift)
    first, end = own_tokens(start, padding, count, capacity)
    begin, stop = next_key_boundary(found, first, end, RESIDUAL, MARGIN)
    if begin < stop:
        for record in range(begin // TOKENS, (stop + TOKENS - 1) // TOKENS):
            change_block(
                words_ptr,
                meta_ptr,
                base_record,
                record,
                window_ptr,
                fresh_ptr,
                token_stride,
                channel_stride,
                0,
                column_block,
                begin,
                stop,
                first,
                WINDOW,
                True,
                DIM,
                BITS,
                GROUP,
                TOKENS,
                PARTS,
                COLUMN_BLOCK,
            )
        tl.debug_barrier()  # every thread has read the rows that are written below
    token = first + index
    live = (token >= 0) & (token < end)
    window_row = tl.where(live, token, 0) % WINDOW * DIM
    tl.store(window_ptr + window_row[:, None, None] + channel, new, mask=inside & live[:, None, None])
    if last:
        tl.store(boundary_ptr, stop)


@triton.jit
def step_kernel(
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
    key_records,
    value_records,
    boundary_shift,
    HAS_COUNT: tl.constexpr,
    RESIDUAL: tl.constexpr,
    MARGIN: tl.constexpr,
    WINDOW: tl.constexpr,
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
    VALUE_GROUP_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):
    """A whole step of S <= W new tokens, S at most the columns of a Value record's words.

    Grid: rows, KV heads, then S programs for Values and the rest for Keys. A Value program has one new token, and the old one whose
    window row that takes: at most S Values can be due, and these are they. Being consecutive, they lie in different words. A Key
    program has some columns of the words, in every record, and their channels, in every window row.

    What a program needs first is asked for before anything is waited for: one trip to memory, and a second one if something is due.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row_head = row * heads + head
    program = tl.program_id(2)
    start = tl.load(position_ptr + row * position_stride).to(tl.int64)
    padding = tl.load(left_padding_ptr + row)
    count = valid_tokens(count_ptr, new_tokens, HAS_COUNT)
    if program < new_tokens:
        step_value(
            value_ptr + row * value_row_stride + head * value_head_stride + program.to(tl.int64) * value_token_stride,
            value_channel_stride,
            value_words_ptr,
            value_meta_ptr,
            row_head * value_records,
            value_window_ptr + row_head * WINDOW * VALUE_DIM,
            sealed_ptr + 2 * row + 1,
            boundary_shift,
            heads * new_tokens,
            program,
            start,
            padding,
            count,
            capacity,
            RESIDUAL,
            MARGIN,
            WINDOW,
            VALUE_DIM,
            VALUE_BITS,
            GROUP,
            VALUE_TOKENS,
            VALUE_PARTS,
            VALUE_GROUP_BLOCK,
        )
    else:
        step_key(
            key_ptr + row * key_row_stride + head * key_head_stride,
            key_token_stride,
            key_channel_stride,
            key_words_ptr,
            key_meta_ptr,
            row_head * key_records,
            key_window_ptr + row_head * WINDOW * KEY_DIM,
            sealed_ptr + 2 * row,
            boundary_shift,
            heads * (tl.num_programs(2) - new_tokens),
            program - new_tokens,
            start,
            padding,
            count,
            new_tokens,
            capacity,
            RESIDUAL,
            MARGIN,
            WINDOW,
            KEY_DIM,
            KEY_BITS,
            GROUP,
            KEY_TOKENS,
            KEY_PARTS,
            KEY_COLUMN_BLOCK,
            TOKEN_BLOCK,
        )
        if (row_head == 0) & (program == new_tokens):
            tl.store(length_ptr, longest_row(position_ptr, position_stride, rows, ROW_BLOCK) + count)
