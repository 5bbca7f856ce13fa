"""What runs each operator on a GPU: grids, tile sizes and strides for the Triton kernels, one function an operator.

Arguments are already checked (:mod:`kivi_ops.ops`); shapes and errors are documented there. Launches depend on shapes alone and
read nothing back, so each can be captured in a graph; there is no autotuning for the same reason. Under Triton's interpreter the same
functions take CPU tensors. Must not know of models or graphs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kivi_ops.kernels.append import seal_kernel, step_kernel, write_kernel
from kivi_ops.kernels.attention import MASK_BOOL, MASK_CAUSAL, MASK_FLOAT, MASK_NONE, attention_kernel, combine_kernel
from kivi_ops.kernels.combine import combine_kernel as merge_kernel
from kivi_ops.kernels.decode import decode_kernel
from kivi_ops.kernels.layout import RecordLayout, record_layouts
from kivi_ops.kernels.prefill import prefill_kernel
from kivi_ops.kernels.quantize import quantize_pack_kernel, unpack_dequantize_kernel
from kivi_ops.kernels.update import view_kernel

TILE = 4096  # elements of a tile that is not fed to a dot: 32 registers a thread with 4 warps
# By the larger head size, padded: query rows at most, and tokens, of an attention tile. Few spills with 4 warps, and within
# the 99 KB of shared memory that every GPU since sm_80 has.
ATTENTION_BLOCKS = {128: (32, 32), 256: (16, 16)}
# Of an ``append`` program, which is one warp: nothing crosses warps, and many of them hide each other's waiting.
PROMPT_TILE = 1024  # elements of a tile: 32 registers a thread
PROMPT_REGISTERS = 128  # of a thread: 16 programs a multiprocessor, and few spills
STEP_TILE = 512
STEP_TOKENS = 16  # new tokens of a step at most
SPLIT_TOKENS = 256  # no split of attention holds fewer, unless its row does
SPLIT_PROGRAMS = 512  # attention programs wanted in all: about four for each multiprocessor of a large GPU

DECODE_ROWS = 128  # query rows (new tokens times query heads of a KV head) up to which a call is a decode step
DECODE_TOKENS = 16  # new tokens up to which it is one
DECODE_PROGRAMS = 8  # of the decode kernel for each multiprocessor: one wave
DECODE_STAGES = 2  # of the portable kernel: the next chunk is on its way while one is computed
DECODE_SPLITS = 512  # at most, of a row and head: more are slow to merge
# Rows of unlike length are dealt this many waves, so that the last programs to start are short; one where a row has RAGGED_SPLITS programs
# of it already, or where RAGGED_TOKENS, which a program has at least when all rows are full, would not be left.
RAGGED_WAVES = 4
RAGGED_SPLITS = 16
RAGGED_TOKENS = 1024


class PrefillTile(NamedTuple):
    """What a prefill program takes at a time, with what, and how many programs are wanted for each multiprocessor."""

    query_rows: int
    tokens: int
    warps: int
    registers: int
    stages: int  # 2: the next block of tokens is on its way while one is multiplied
    programs: int


# Measured on an H200, where one may take 227 KB: while one group of warps restores and exponentiates, another multiplies matrices.
PREFILL_FEW = PrefillTile(128, 64, 4, 255, 2, 2)
PREFILL_MANY = PrefillTile(256, 64, 8, 255, 3, 1)
PREFILL_MASKED = PrefillTile(128, 64, 8, 255, 2, 1)  # a tile of the mask takes registers
PREFILL_OTHER = PrefillTile(128, 64, 8, 255, 2, 2)  # other tensor cores take operands from registers; 99 KB of shared memory are enough
PREFILL_WIDE = PrefillTile(64, 32, 4, 255, 2, 2)  # head sizes above 128
COMBINE_ROWS = 16  # query rows of a program that merges the splits of tiles
# By the number of splits added up at a time up to which each holds: channels and warps of a merging program. Thin ones, because they
# become resident while the splits are still at work.
COMBINE_SHAPES = {16: (128, 1), 32: (64, 1), 64: (64, 4), 256: (32, 4)}


def _power(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def _blocks(n: int, size: int) -> int:
    return -(-n // size)


def _device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launch where the tensor is, not on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _position_stride(position: Tensor, rows: int) -> int:
    """Elements from one row's start to the next's; 0 where all rows share it."""
    return position.stride(0) if position.dim() == 2 and position.shape[0] == rows else 0


def _broadcast_strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _format(prefix: str, layout: RecordLayout) -> dict[str, int]:
    """The compile-time constants that describe one role's records to a kernel."""
    constants = {"DIM": layout.head_dim, "BITS": layout.bits, "TOKENS": layout.tokens, "PARTS": layout.channel_parts}
    return {prefix + name: value for name, value in constants.items()}


# ------------------------------------------------------------------------------------------------- functional operators


def _quantize_pack(x: Tensor, bits: int, group_size: int, metadata_dtype: torch.dtype, per_channel: bool) -> tuple[Tensor, Tensor, Tensor]:
    *lead, tokens, dim = x.shape
    grid = (_blocks(tokens, group_size), dim) if per_channel else (tokens, _blocks(dim, group_size))
    codes = x.new_empty((*lead, tokens, _blocks(dim * bits, 8)), dtype=torch.uint8)
    scale = x.new_empty((*lead, *grid), dtype=metadata_dtype)
    minimum = torch.empty_like(scale)
    if x.numel() == 0:
        return codes, scale, minimum
    x = x.reshape(-1, tokens, dim)
    if per_channel:
        token_block = group_size
        channel_block = max(min(_power(dim), TILE // token_block), 8 // bits)
    else:
        channel_block = max(min(_power(dim), TILE // 16), group_size, 8 // bits)
        token_block = min(_power(tokens), TILE // channel_block)
    with _device(x):
        quantize_pack_kernel[(x.shape[0] * _blocks(tokens, token_block) * _blocks(dim, channel_block),)](
            x,
            codes,
            scale,
            minimum,
            *x.stride(),
            tokens,
            DIM=dim,
            PER_CHANNEL=per_channel,
            BITS=bits,
            GROUP=group_size,
            TOKEN_BLOCK=token_block,
            CHANNEL_BLOCK=channel_block,
            enable_fp_fusion=False,
        )
    return codes, scale, minimum


def _unpack_dequantize(
    codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, head_dim: int, dtype: torch.dtype, per_channel: bool
) -> Tensor:
    out = codes.new_empty((*codes.shape[:-1], head_dim), dtype=dtype)
    if out.numel() == 0:
        return out
    tokens = codes.shape[-2]
    channel_block = min(_power(head_dim), TILE // 16)
    token_block = min(_power(tokens), TILE // channel_block)
    batch = out.numel() // (tokens * head_dim)
    with _device(codes):
        unpack_dequantize_kernel[(batch * _blocks(tokens, token_block) * _blocks(head_dim, channel_block),)](
            codes.contiguous(),
            scale.contiguous(),
            minimum.contiguous(),
            out,
            tokens,
            DIM=head_dim,
            PER_CHANNEL=per_channel,
            BITS=bits,
            GROUP=group_size,
            TOKEN_BLOCK=token_block,
            CHANNEL_BLOCK=channel_block,
            enable_fp_fusion=False,
        )
    return out


def quantize_pack_key(key: Tensor, bits: int, group_size: int, metadata_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return _quantize_pack(key, bits, group_size, metadata_dtype, True)


def quantize_pack_value(value: Tensor, bits: int, group_size: int, metadata_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return _quantize_pack(value, bits, group_size, metadata_dtype, False)


def unpack_dequantize_key(
    codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    return _unpack_dequantize(codes, scale, minimum, bits, group_size, head_dim, dtype, True)


def unpack_dequantize_value(
    codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    return _unpack_dequantize(codes, scale, minimum, bits, group_size, head_dim, dtype, False)


# ------------------------------------------------------------------------------------------------------------- attention


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1  # the interpreter


@cache
def _dependent(device: torch.device) -> bool:
    """Whether a kernel can be launched while the one before it ends (sm_90 and later)."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _wgmma(device: torch.device) -> bool:
    """Whether tensor cores multiply matrices that lie in shared memory, for four warps at a time (sm_90 alone)."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] == 9


@cache
def _gluon(device: torch.device) -> Any | None:
    """The module of the Gluon kernel, where it can run: tensor cores of sm_80 or later and a Triton that it was tried with."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    if not (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 9):
        return None
    from kivi_ops.kernels import gluon_decode

    return gluon_decode


class AttentionCall(NamedTuple):
    """The arguments of one :func:`attention`, the mask as kernels take it. Symbols as in :mod:`kivi_ops.ops`."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_records: Tensor
    value_records: Tensor
    key_window: Tensor
    value_window: Tensor
    sealed: Tensor
    left_padding: Tensor
    position: Tensor
    layouts: tuple[RecordLayout, RecordLayout]
    kind: int  # of mask: MASK_NONE, ...
    mask: Tensor
    mask_strides: tuple[int, ...]
    mask_columns: int
    capacity: int
    scale: float
    softcap: float | None
    seal: str

    @property
    def heads(self) -> int:
        return self.value.shape[1]

    @property
    def repeats(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[1] // self.heads

    @property
    def query_rows(self) -> int:
        """Of a row and KV head: its query heads for each new token."""
        return self.query.shape[2] * self.repeats


def is_decode_step(query: Tensor, layouts: tuple[RecordLayout, RecordLayout], heads: int, softcap: float | None) -> bool:
    """Whether a call over ``heads`` KV heads is one that the decode kernels take: few query rows, and a common shape."""
    key, value = layouts
    return (
        key.head_dim == value.head_dim
        and key.head_dim in (64, 128)
        and key.group_size == 32
        and key.bits in (2, 4)
        and value.bits in (2, 4)
        and key.metadata_dtype == query.dtype
        and query.dtype in (torch.float16, torch.bfloat16)
        and softcap is None
        and query.shape[2] <= DECODE_TOKENS
        and query.shape[2] * (query.shape[1] // heads) <= DECODE_ROWS
    )


def is_prefill(query: Tensor, layouts: tuple[RecordLayout, RecordLayout], heads: int) -> bool:
    """Whether a call over ``heads`` KV heads has query rows enough for a tile of the prefill kernel."""
    rows = query.shape[2] * (query.shape[1] // heads)
    return (
        (rows > DECODE_ROWS or query.shape[2] > DECODE_TOKENS)
        and query.dtype in (torch.float16, torch.bfloat16)
        and max(layout.head_dim for layout in layouts) <= 256
    )


def _chosen(query: Tensor, key: Tensor, value: Tensor, layouts: tuple[RecordLayout, RecordLayout], softcap: float | None) -> str:
    """Which kernel serves a call."""
    if is_prefill(query, layouts, key.shape[1]):
        return "prefill"
    if not is_decode_step(query, layouts, key.shape[1], softcap):
        return "general"
    adjacent = query.stride(3) == key.stride(3) == value.stride(3) == 1
    return "gluon" if adjacent and _gluon(query.device) is not None else "portable"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_records: Tensor,
    value_records: Tensor,
    key_window: Tensor,
    value_window: Tensor,
    sealed: Tensor,
    left_padding: Tensor,
    position: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
    *,
    capacity: int,
    key_bits: int,
    value_bits: int,
    group_size: int,
    metadata_dtype: torch.dtype,
    seal: str,
    kernel: str = "auto",
) -> Tensor:
    """``kernel``: one of them by name instead of the choice by shapes, to test or measure it. ``attn_mask`` may be uint8 for bool."""
    if attn_mask is None:
        kind, mask, columns = MASK_CAUSAL if is_causal else MASK_NONE, query, 0
        mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    else:
        kind = MASK_BOOL if attn_mask.dtype in (torch.bool, torch.uint8) else MASK_FLOAT
        mask = attn_mask.view(torch.uint8) if attn_mask.dtype == torch.bool else attn_mask
        mask_strides = _broadcast_strides(attn_mask)
        columns = capacity if attn_mask.shape[3] == 1 else attn_mask.shape[3]
    call = AttentionCall(
        query,
        key,
        value,
        key_records,
        value_records,
        key_window,
        value_window,
        sealed,
        left_padding,
        position,
        record_layouts(key.shape[-1], value.shape[-1], key_bits, value_bits, group_size, metadata_dtype),
        kind.value,
        mask,
        mask_strides,
        columns,
        capacity,
        scale,
        softcap,
        seal,
    )
    name = _chosen(query, key, value, call.layouts, softcap) if kernel == "auto" else kernel
    run = {"general": _general_attention, "prefill": _prefill_attention, "gluon": _gluon_attention, "portable": _portable_attention}[name]
    with _device(query):
        return run(call)


def _general_attention(call: AttentionCall) -> Tensor:
    key_block, value_block = (max(16, _power(layout.head_dim)) for layout in call.layouts)
    largest_query_block, token_block = ATTENTION_BLOCKS[max(128, key_block, value_block)]
    query_block = min(max(16, _power(call.query_rows)), largest_query_block)
    wanted = _blocks(SPLIT_PROGRAMS, call.query.shape[0] * call.heads * _blocks(call.query_rows, query_block))
    return _tiled_attention(call, attention_kernel, (query_block, token_block, key_block, value_block), wanted, {"num_stages": 1})


def _prefill_attention(call: AttentionCall) -> Tensor:
    if call.scale < 0:  # the kernel takes maxima before it scales
        call = call._replace(query=-call.query, scale=-call.scale)
    # Channel parts of a record stay apart, each padded by itself.
    key_block, value_block = (max(16, layout.channel_parts * _power(layout.head_dim // layout.channel_parts)) for layout in call.layouts)
    tile = _prefill_tile(call, max(key_block, value_block))
    programs = call.query.shape[0] * call.heads * _blocks(call.query_rows, tile.query_rows)
    wanted = max(1, tile.programs * _multiprocessors(call.query.device) // programs)
    options = {"STAGES": tile.stages, "num_warps": tile.warps, "maxnreg": tile.registers}
    return _tiled_attention(call, prefill_kernel, (tile.query_rows, tile.tokens, key_block, value_block), wanted, options)


def _prefill_tile(call: AttentionCall, channels: int) -> PrefillTile:
    if channels > 128:
        return PREFILL_WIDE
    if not _wgmma(call.query.device):
        return PREFILL_OTHER
    if call.kind in (MASK_BOOL.value, MASK_FLOAT.value):
        return PREFILL_MASKED
    return PREFILL_FEW if call.query_rows <= PREFILL_FEW.query_rows else PREFILL_MANY


def _tiled_attention(call: AttentionCall, kernel: Any, blocks: tuple[int, int, int, int], wanted: int, options: dict[str, int]) -> Tensor:
    """A kernel that takes tiles of query rows over ``wanted`` splits of the tokens at most, and the merge.

    blocks: query rows, tokens, channels of a Key and of a Value of a tile.
    """
    query, key, value, position, capacity = call.query, call.key, call.value, call.position, call.capacity
    key_layout, value_layout = call.layouts
    metadata_dtype = key_layout.metadata_dtype
    rows, query_heads, new_tokens, _ = query.shape
    heads, query_rows, value_dim = call.heads, call.query_rows, value.shape[3]
    query_block, token_block, key_block, value_block = blocks
    splits = min(wanted, _blocks(capacity, SPLIT_TOKENS))

    out = query.new_empty((rows, query_heads, new_tokens, value_dim))
    slots = (rows * heads, splits, query_rows)
    partial = maximum = total = out
    if splits > 1:
        partial = query.new_empty((*slots, value_dim), dtype=torch.float32)
        maximum, total = (query.new_empty(slots, dtype=torch.float32) for _ in range(2))
    position_stride = _position_stride(position, rows)
    shape = {"REPEATS": call.repeats, "VALUE_DIM_BLOCK": value_block, "SPLITS": splits, "TOKEN_BLOCK": token_block}
    kernel[(rows * heads * splits, _blocks(query_rows, query_block))](
        query,
        key,
        value,
        call.key_records,
        call.key_records.view(metadata_dtype),
        call.value_records,
        call.value_records.view(metadata_dtype),
        call.key_window,
        call.value_window,
        call.sealed,
        call.left_padding,
        position,
        call.mask,
        out,
        partial,
        maximum,
        total,
        *query.stride(),
        *key.stride(),
        *value.stride(),
        position_stride,
        *call.mask_strides,
        call.mask_columns,
        heads,
        new_tokens,
        capacity,
        call.key_window.shape[2],
        call.key_records.shape[2],
        call.value_records.shape[2],
        call.scale,
        1.0 if call.softcap is None else call.softcap,
        AFTER=call.seal == "after_attention",
        MASK=call.kind,
        HAS_SOFTCAP=call.softcap is not None,
        GROUP=key_layout.group_size,
        KEY_DIM_BLOCK=key_block,
        **_format("KEY_", key_layout),
        **_format("VALUE_", value_layout),
        **shape,
        **options,
        QUERY_BLOCK=query_block,
        enable_fp_fusion=True,
    )
    if splits > 1:
        combine_block = min(query_block, COMBINE_ROWS)
        combine_kernel[(rows * heads, _blocks(query_rows, combine_block))](
            partial,
            maximum,
            total,
            call.left_padding,
            position,
            out,
            position_stride,
            heads,
            new_tokens,
            capacity,
            VALUE_DIM=value_dim,
            **shape,
            QUERY_BLOCK=combine_block,
            enable_fp_fusion=True,
        )
    return out


def _gluon_attention(call: AttentionCall) -> Tensor:
    module = _gluon(call.query.device)
    assert module is not None
    call = call._replace(key=_aligned(call.key), value=_aligned(call.value))  # rows are copied 16 bytes at a time
    shared_mask = call.mask_strides[1] == 0 and (call.mask_strides[2] == 0 or call.query.shape[2] == 1)
    constants = {
        "MASK_SHARED": shared_mask,
        "VALUE_LOW": call.query.dtype == torch.bfloat16,  # one part of 8 bits would be too coarse
        "PAIRED": call.query_rows <= 4,
    }
    return _decode_attention(call, module.decode_kernel, torch.uint16, constants)


def _portable_attention(call: AttentionCall) -> Tensor:
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (call.query, call.key, call.value))
    call = call._replace(query=query, key=key, value=value)
    key_layout, value_layout = call.layouts
    constants = {"KEY_TOKENS": key_layout.tokens, "VALUE_TOKENS": value_layout.tokens, "STAGES": DECODE_STAGES}
    return _decode_attention(call, decode_kernel, torch.int16, constants)


def _decode_attention(call: AttentionCall, kernel: Any, words: torch.dtype, constants: dict[str, Any]) -> Tensor:
    """One of the decode kernels, which take the same arguments but for the dtype of ``words`` and some ``constants``; and the merge."""
    query, dtype = call.query, call.query.dtype
    rows, _, new_tokens, dim = query.shape
    splits = _split(query, call.heads, _blocks(call.query_rows, 8), call.capacity)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    kernel[splits.grid](
        query,
        call.key,
        call.value,
        call.key_records.view(words),
        call.key_records.view(dtype),
        call.value_records.view(words),
        call.value_records.view(dtype),
        call.key_window,
        call.value_window,
        call.sealed,
        call.left_padding,
        call.position,
        call.mask,
        *splits.results,
        *query.stride()[:3],
        *call.key.stride()[:3],
        *call.value.stride()[:3],
        _position_stride(call.position, rows),
        *call.mask_strides,
        call.mask_columns,
        rows,
        call.heads,
        new_tokens,
        call.capacity,
        call.key_window.shape[2],
        call.key_records.shape[2],
        call.value_records.shape[2],
        splits.fewest,
        splits.finest,
        call.scale,
        AFTER=call.seal == "after_attention",
        MASK=call.kind,
        REPEATS=call.repeats,
        DIM=dim,
        KEY_BITS=call.layouts[0].bits,
        VALUE_BITS=call.layouts[1].bits,
        ROW_BLOCK=splits.row_block,
        SIGNAL=_dependent(query.device),
        num_warps=1,
        enable_fp_fusion=True,
        **constants,
    )
    _merge(splits, call.position, out, call.heads, call.capacity)
    return out


def _aligned(x: Tensor) -> Tensor:
    """``x`` itself where rows and heads begin on 16 bytes, or a copy where they do."""
    if x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:3]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


class Splits(NamedTuple):
    """How the programs of a decode kernel share the tokens of rows, and what they leave for the merge."""

    fewest: int  # number of a row and head where rows are of like length
    finest: int  # the same on average where they are not
    grid: tuple[int, int, int]
    row_block: int  # rows at most that programs are dealt to by length; 1: every row gets the same number
    results: tuple[Tensor, Tensor, Tensor, Tensor]  # weighted sums, maxima, totals; of a row and head the first slot and their number


def _split(query: Tensor, heads: int, query_blocks: int, capacity: int) -> Splits:
    """One wave of programs in all, or where rows are many and may be of unlike length, up to RAGGED_WAVES."""
    rows, query_heads, new_tokens, dim = query.shape
    wave = DECODE_PROGRAMS * _multiprocessors(query.device)
    count = finest = min(max(1, wave // (rows * heads * query_blocks)), _blocks(capacity, 32), DECODE_SPLITS)
    if rows > 1 and count < RAGGED_SPLITS and capacity >= RAGGED_WAVES * count * RAGGED_TOKENS:
        finest = RAGGED_WAVES * count
    ragged = rows > 1 and finest > 1
    grid = (heads, rows * (finest + 1)) if ragged else (rows * heads, count)
    slots = (grid[0] * grid[1], query_heads // heads * new_tokens)
    partial = query.new_empty((*slots, dim), dtype=torch.float32)
    maximum, total = (query.new_empty(slots, dtype=torch.float32) for _ in range(2))
    spans = query.new_empty((rows * heads, 2), dtype=torch.int32)
    return Splits(count, finest, (*grid, query_blocks), max(32, _power(rows)) if ragged else 1, (partial, maximum, total, spans))


def _merge(splits: Splits, position: Tensor, out: Tensor, heads: int, capacity: int) -> None:
    rows, query_heads, new_tokens, dim = out.shape
    repeats = query_heads // heads
    dependent = _dependent(out.device)
    most = min(_power(2 * splits.finest if splits.row_block > 1 else splits.fewest), 256)
    channels, warps = next(shape for slots, shape in COMBINE_SHAPES.items() if most <= slots)
    merge_kernel[(rows * heads, repeats * new_tokens, _blocks(dim, channels))](
        *splits.results,
        position,
        out,
        _position_stride(position, rows),
        heads,
        new_tokens,
        capacity,
        REPEATS=repeats,
        DIM=dim,
        CHANNELS=min(channels, dim),
        SPLITS=most,
        WAIT=dependent,
        num_warps=warps,
        enable_fp_fusion=True,
        **({"launch_pdl": True} if dependent else {}),
    )


# ---------------------------------------------------------------------------------------------------------------- append


def append(
    key: Tensor,
    value: Tensor,
    key_records: Tensor,
    value_records: Tensor,
    key_window: Tensor,
    value_window: Tensor,
    sealed: Tensor,
    left_padding: Tensor,
    length: Tensor,
    position: Tensor,
    count: Tensor | None,
    *,
    capacity: int,
    key_bits: int,
    value_bits: int,
    group_size: int,
    metadata_dtype: torch.dtype,
    residual_length: int,
    rollback_margin: int,
) -> None:
    rows, heads, new_tokens, _ = key.shape
    window_rows = key_window.shape[2]
    layouts = record_layouts(key.shape[-1], value.shape[-1], key_bits, value_bits, group_size, metadata_dtype)
    records = (key_records, key_records.view(metadata_dtype), value_records, value_records.view(metadata_dtype))
    windows = (key_window, value_window)
    given = (position, position if count is None else count, *key.stride(), *value.stride(), _position_stride(position, rows))
    key_blocks, key_columns = _column_blocks(layouts[0], STEP_TILE)
    # A step counts its programs in the bits of a boundary that no token index of this capacity needs (the sign's stays 0).
    boundary_shift = 31 - (heads * max(key_blocks, new_tokens)).bit_length()
    with _device(key):
        if new_tokens <= min(STEP_TOKENS, window_rows, layouts[1].columns) and capacity < 1 << boundary_shift:
            step_kernel[(rows, heads, new_tokens + key_blocks)](
                key,
                value,
                *records,
                *windows,
                sealed,
                left_padding,
                length,
                *given,
                rows,
                heads,
                new_tokens,
                capacity,
                key_records.shape[2],
                value_records.shape[2],
                boundary_shift,
                HAS_COUNT=count is not None,
                RESIDUAL=residual_length,
                MARGIN=rollback_margin,
                WINDOW=window_rows,
                GROUP=group_size,
                **_format("KEY_", layouts[0]),
                KEY_COLUMN_BLOCK=key_columns,
                **_format("VALUE_", layouts[1]),
                VALUE_GROUP_BLOCK=_power(_blocks(layouts[1].rows, group_size)),
                TOKEN_BLOCK=_power(new_tokens),
                ROW_BLOCK=128,
                num_warps=1,
                enable_fp_fusion=False,
            )
            return
        (key_programs, key_columns), (value_programs, value_columns) = (
            _seal_programs(layout, tensor.shape[2], new_tokens + window_rows)
            for layout, tensor in zip(layouts, (key_records, value_records), strict=True)
        )
        programs = key_programs + value_programs
        seal_kernel[(rows * heads * programs,)](
            key,
            value,
            *records,
            *windows,
            sealed,
            left_padding,
            *given,
            heads,
            new_tokens,
            capacity,
            window_rows,
            key_records.shape[2],
            value_records.shape[2],
            key_programs,
            programs,
            residual_length,
            rollback_margin,
            HAS_COUNT=count is not None,
            GROUP=group_size,
            **_format("KEY_", layouts[0]),
            KEY_COLUMN_BLOCK=key_columns,
            KEY_SMALL_BLOCK=min(key_columns, _column_blocks(layouts[0], STEP_TILE)[1]),
            **_format("VALUE_", layouts[1]),
            VALUE_COLUMN_BLOCK=value_columns,
            VALUE_SMALL_BLOCK=min(value_columns, _column_blocks(layouts[1], STEP_TILE)[1]),
            num_warps=1,
            maxnreg=PROMPT_REGISTERS,
            enable_fp_fusion=False,
        )
        written = min(new_tokens, window_rows)
        dims = [_power(layout.head_dim) for layout in layouts]
        token_block = min(_power(written), max(1, TILE // max(dims)))
        write_programs = _blocks(written, token_block)
        write_kernel[(rows * heads * write_programs,)](
            key,
            value,
            *windows,
            sealed,
            left_padding,
            length,
            *given,
            rows,
            heads,
            new_tokens,
            capacity,
            window_rows,
            write_programs,
            residual_length,
            rollback_margin,
            HAS_COUNT=count is not None,
            KEY_DIM=layouts[0].head_dim,
            KEY_DIM_BLOCK=dims[0],
            VALUE_DIM=layouts[1].head_dim,
            VALUE_DIM_BLOCK=dims[1],
            TOKEN_BLOCK=token_block,
            ROW_BLOCK=128,
            enable_fp_fusion=True,
        )


def _column_blocks(layout: RecordLayout, tile: int) -> tuple[int, int]:
    """Blocks of at most ``tile`` words that the columns of a row of groups are cut into, and columns of a block."""
    size = max(1, min(_power(layout.columns), tile // layout.group_size))
    return _blocks(layout.columns, size), size


def _seal_programs(layout: RecordLayout, records: int, tokens: int) -> tuple[int, int]:
    """Programs a row and head needs to seal ``tokens`` consecutive tokens wherever they lie, and columns of each one's block."""
    blocks, size = _column_blocks(layout, PROMPT_TILE)
    touched = min(records, _blocks(tokens + layout.group_size, layout.tokens) + 1)
    return touched * _blocks(layout.rows, layout.group_size) * blocks, size


# ---------------------------------------------------------------------------------------------------------------- update


def update(
    key: Tensor,
    value: Tensor,
    key_records: Tensor,
    value_records: Tensor,
    key_window: Tensor,
    value_window: Tensor,
    sealed: Tensor,
    left_padding: Tensor,
    length: Tensor,
    position: Tensor,
    *,
    seal: str,
    **format: Any,
) -> tuple[Tensor, Tensor]:
    rows, heads, new_tokens, _ = key.shape
    capacity, group_size = format["capacity"], format["group_size"]
    layouts = record_layouts(key.shape[-1], value.shape[-1], format["key_bits"], format["value_bits"], group_size, format["metadata_dtype"])
    views = key.new_empty((rows, heads, capacity, key.shape[3])), value.new_empty((rows, heads, capacity, value.shape[3]))
    if rows == 0:
        return views
    state = (key_records, value_records, key_window, value_window, sealed, left_padding, length)
    if seal == "before_attention" and new_tokens:
        append(key, value, *state, position, None, **format)
    sources = ((key, key_records, key_window), (value, value_records, value_window))
    with _device(key):
        for (fresh, records, window), layout, view in zip(sources, layouts, views, strict=True):
            dim_block = _power(layout.head_dim)
            token_block = min(_power(capacity), TILE // dim_block)
            view_kernel[(rows * heads * _blocks(capacity, token_block),)](
                fresh,
                records,
                records.view(format["metadata_dtype"]),
                window,
                sealed,
                left_padding,
                position,
                view,
                *fresh.stride(),
                _position_stride(position, rows),
                heads,
                new_tokens,
                capacity,
                window.shape[2],
                records.shape[2],
                AFTER=seal == "after_attention",
                IS_KEY=layout.role == "key",
                GROUP=group_size,
                DIM_BLOCK=dim_block,
                **_format("", layout),
                TOKEN_BLOCK=token_block,
                enable_fp_fusion=False,
            )
    if seal == "after_attention" and new_tokens:
        append(key, value, *state, position, None, **format)
    return views
