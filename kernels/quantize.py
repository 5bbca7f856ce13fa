"""The functional operators' kernels: float to byte-packed codes and grids, and back. Must not know of caches or records."""

from __future__ import annotations

import triton
import triton.language as tl

from kivi_ops.kernels.common import narrow, quantize_tile, restore, widen


@triton.jit
def quantize_pack_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    min_ptr,
    batch_stride,
    token_stride,
    channel_stride,
    tokens,
    DIM: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
):
    """One program: TOKEN_BLOCK tokens (with PER_CHANNEL one group of them) x CHANNEL_BLOCK channels of one [T, D] matrix.

    Outputs are contiguous: codes [., T, bytes], scale and min [., ceil(T / G), D] or [., T, ceil(D / G)].
    """
    METADATA: tl.constexpr = scale_ptr.dtype.element_ty
    PER_BYTE: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = (DIM + PER_BYTE - 1) // PER_BYTE
    GROUPS: tl.constexpr = (DIM + GROUP - 1) // GROUP
    CHANNEL_BLOCKS: tl.constexpr = (DIM + CHANNEL_BLOCK - 1) // CHANNEL_BLOCK
    program = tl.program_id(0)
    channel_block = program % CHANNEL_BLOCKS
    token_blocks = tl.cdiv(tokens, TOKEN_BLOCK)
    token_block = program // CHANNEL_BLOCKS % token_blocks
    batch = (program // CHANNEL_BLOCKS // token_blocks).to(tl.int64)

    token = token_block * TOKEN_BLOCK + tl.arange(0, TOKEN_BLOCK).to(tl.int64)
    channel = channel_block * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
    valid = (token < tokens)[:, None] & (channel < DIM)[None, :]
    source = x_ptr + batch * batch_stride + token[:, None] * token_stride + channel.to(tl.int64)[None, :] * channel_stride
    x = widen(tl.load(source, mask=valid, other=0.0))

    if PER_CHANNEL:
        codes, scale, minimum = quantize_tile(x, valid, 0, BITS, METADATA)
        pair = (batch * token_blocks + token_block) * DIM + channel
        inside = channel < DIM
    else:
        SHAPE: tl.constexpr = (TOKEN_BLOCK, CHANNEL_BLOCK // GROUP, GROUP)
        codes, scale, minimum = quantize_tile(tl.reshape(x, SHAPE), tl.reshape(valid, SHAPE), 2, BITS, METADATA)
        codes = tl.reshape(codes, (TOKEN_BLOCK, CHANNEL_BLOCK))
        group = channel_block * (CHANNEL_BLOCK // GROUP) + tl.arange(0, CHANNEL_BLOCK // GROUP)
        pair = (batch * tokens + token)[:, None] * GROUPS + group[None, :]
        inside = (token < tokens)[:, None] & (group < GROUPS)[None, :]
    tl.store(scale_ptr + pair, scale, mask=inside)
    tl.store(min_ptr + pair, minimum, mask=inside)

    codes = tl.reshape(tl.where(valid, codes, 0), (TOKEN_BLOCK, CHANNEL_BLOCK // PER_BYTE, PER_BYTE))
    packed = tl.sum(codes << (tl.arange(0, PER_BYTE) * BITS)[None, None, :], 2)
    byte = channel_block * (CHANNEL_BLOCK // PER_BYTE) + tl.arange(0, CHANNEL_BLOCK // PER_BYTE)
    target = codes_ptr + (batch * tokens + token)[:, None] * BYTES + byte[None, :]
    tl.store(target, packed.to(tl.uint8), mask=(token < tokens)[:, None] & (byte < BYTES)[None, :])


@triton.jit
def unpack_dequantize_kernel(
    codes_ptr,
    scale_ptr,
    min_ptr,
    out_ptr,
    tokens,
    DIM: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
):
    """The inverse: one program restores TOKEN_BLOCK x CHANNEL_BLOCK values. Everything is contiguous."""
    PER_BYTE: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = (DIM + PER_BYTE - 1) // PER_BYTE
    GROUPS: tl.constexpr = (DIM + GROUP - 1) // GROUP
    CHANNEL_BLOCKS: tl.constexpr = (DIM + CHANNEL_BLOCK - 1) // CHANNEL_BLOCK
    program = tl.program_id(0)
    channel_block = program % CHANNEL_BLOCKS
    token_blocks = tl.cdiv(tokens, TOKEN_BLOCK)
    token_block = program // CHANNEL_BLOCKS % token_blocks
    batch = (program // CHANNEL_BLOCKS // token_blocks).to(tl.int64)

    token = token_block * TOKEN_BLOCK + tl.arange(0, TOKEN_BLOCK).to(tl.int64)
    channel = channel_block * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
    inside = (token < tokens)[:, None] & (channel < DIM)[None, :]
    row = (batch * tokens + token)[:, None]
    if PER_CHANNEL:
        pair = (batch * tl.cdiv(tokens, GROUP) + token // GROUP)[:, None] * DIM + channel[None, :]
    else:
        pair = row * GROUPS + (channel // GROUP)[None, :]
    packed = tl.load(codes_ptr + row * BYTES + (channel // PER_BYTE)[None, :], mask=inside, other=0).to(tl.int32)
    codes = (packed >> (channel % PER_BYTE * BITS)[None, :]) & (2**BITS - 1)
    scale = tl.load(scale_ptr + pair, mask=inside, other=0.0)
    minimum = tl.load(min_ptr + pair, mask=inside, other=0.0)
    restored = narrow(restore(codes, scale, minimum), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * DIM + channel[None, :], restored, mask=inside)
