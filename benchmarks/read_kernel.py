"""A plain read: how fast the same bytes can come from memory when nothing is done with them. Also what flushes L2 with clean lines."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, BLOCKS = 4096, 4
PROGRAM_BYTES = BLOCK * BLOCKS * 4


@triton.jit
def _read_kernel(x_ptr, sums_ptr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int32)
    for block in range(BLOCKS):
        total += tl.load(x_ptr + (program * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_ptr + program, tl.sum(total, 0))  # so that no load is left out


def read(x: torch.Tensor, sums: torch.Tensor) -> None:
    """Read int32 [n * 16384]; ``sums``: int32 [n], written."""
    _read_kernel[(x.numel() // (BLOCK * BLOCKS),)](x, sums, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=4)
