"""The kernels of a decode step in the form that compilers can put into a package: every tensor of a state is one argument.

The launchers hand records over twice, as words and as metadata. In a graph that would be two tensors, and two copies of the state; here
the second pointer is cast inside of the kernel. The rest, arguments and grids, is :mod:`kivi_ops.kernels.launch`. Only plain Triton, and no
launch that depends on the one before it: Inductor writes these kernels out again. Must not know of models or graphs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton
from triton.runtime.jit import JITFunction

from kivi_ops.kernels import launch
from kivi_ops.kernels.append import step_kernel
from kivi_ops.kernels.attention import attention_kernel, combine_kernel
from kivi_ops.kernels.combine import combine_kernel as merge_kernel
from kivi_ops.kernels.decode import decode_kernel


@triton.jit
def packaged_decode_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_words_ptr,
    value_words_ptr,
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
    """:func:`decode_kernel` of metadata in the dtype of the windows."""
    decode_kernel(
        query_ptr,
        key_ptr,
        value_ptr,
        key_words_ptr,
        key_words_ptr.to(tl.pointer_type(key_window_ptr.dtype.element_ty), bitcast=True),
        value_words_ptr,
        value_words_ptr.to(tl.pointer_type(value_window_ptr.dtype.element_ty), bitcast=True),
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
        AFTER,
        MASK,
        REPEATS,
        DIM,
        KEY_BITS,
        KEY_TOKENS,
        VALUE_BITS,
        VALUE_TOKENS,
        ROW_BLOCK,
        SIGNAL,
        STAGES,
    )


@triton.jit
def packaged_attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_words_ptr,
    value_words_ptr,
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
):
    """:func:`attention_kernel` of metadata in the dtype of the windows."""
    attention_kernel(
        query_ptr,
        key_ptr,
        value_ptr,
        key_words_ptr,
        key_words_ptr.to(tl.pointer_type(key_window_ptr.dtype.element_ty), bitcast=True),
        value_words_ptr,
        value_words_ptr.to(tl.pointer_type(value_window_ptr.dtype.element_ty), bitcast=True),
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
        AFTER,
        MASK,
        HAS_SOFTCAP,
        REPEATS,
        GROUP,
        KEY_DIM,
        KEY_DIM_BLOCK,
        KEY_BITS,
        KEY_TOKENS,
        KEY_PARTS,
        VALUE_DIM,
        VALUE_DIM_BLOCK,
        VALUE_BITS,
        VALUE_TOKENS,
        VALUE_PARTS,
        SPLITS,
        QUERY_BLOCK,
        TOKEN_BLOCK,
    )


@triton.jit
def packaged_step_kernel(
    key_ptr,
    value_ptr,
    key_words_ptr,
    value_words_ptr,
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
    """:func:`step_kernel` of metadata in the dtype of the windows."""
    step_kernel(
        key_ptr,
        value_ptr,
        key_words_ptr,
        key_words_ptr.to(tl.pointer_type(key_window_ptr.dtype.element_ty), bitcast=True),
        value_words_ptr,
        value_words_ptr.to(tl.pointer_type(value_window_ptr.dtype.element_ty), bitcast=True),
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
        HAS_COUNT,
        RESIDUAL,
        MARGIN,
        WINDOW,
        GROUP,
        KEY_DIM,
        KEY_BITS,
        KEY_TOKENS,
        KEY_PARTS,
        KEY_COLUMN_BLOCK,
        VALUE_DIM,
        VALUE_BITS,
        VALUE_TOKENS,
        VALUE_PARTS,
        VALUE_GROUP_BLOCK,
        TOKEN_BLOCK,
        ROW_BLOCK,
    )


class _Packaged:
    """Stands where a launcher names a kernel: ``kernel[grid](...)`` becomes a node of the graph that is traced."""

    def __init__(self, kernel: Any, packaged: Any) -> None:
        self.kernel, self.packaged = kernel, packaged

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            named = {**dict(zip(self.kernel.arg_names, args, strict=False)), **kwargs}
            wanted = {*self.packaged.arg_names, "num_warps", "num_stages"}  # no other option is kept by Inductor
            run = wrap_triton(self.packaged) if isinstance(self.packaged, JITFunction) else self.packaged  # else: the interpreter
            run[grid](**{name: value for name, value in named.items() if name in wanted})

        return call


_KERNELS = {
    "decode_kernel": _Packaged(decode_kernel, packaged_decode_kernel),
    "merge_kernel": _Packaged(merge_kernel, merge_kernel),
    "attention_kernel": _Packaged(attention_kernel, packaged_attention_kernel),
    "combine_kernel": _Packaged(combine_kernel, combine_kernel),
    "step_kernel": _Packaged(step_kernel, packaged_step_kernel),
}


@contextlib.contextmanager
def _packaged() -> Iterator[None]:
    """The launchers launch the kernels of this module."""
    replaced = {**_KERNELS, "_dependent": lambda device: False}
    held = {name: getattr(launch, name) for name in replaced}
    try:
        for name, kernel in replaced.items():
            setattr(launch, name, kernel)
        yield
    finally:
        for name, kernel in held.items():
            setattr(launch, name, kernel)


def takes(query: Tensor, metadata_dtype: torch.dtype) -> bool:
    """Whether this module has kernels for a call: one new token, and metadata in the 16-bit dtype of the cache.

    With metadata of 32 bits a fused multiply-add would matter where codes are chosen again (contract section 1), and Inductor fuses.
    """
    return query.shape[2] == 1 and metadata_dtype == query.dtype and query.dtype in (torch.float16, torch.bfloat16)


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
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    **format: Any,
) -> Tensor:
    """``kivi::attention`` (:mod:`kivi_ops.ops`) of one new token."""
    state = (key_records, value_records, key_window, value_window, sealed, left_padding)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    widths = (format["key_bits"], format["value_bits"], format["group_size"], format["metadata_dtype"])
    layouts = launch.record_layouts(key.shape[-1], value.shape[-1], *widths)
    kernel = "portable" if launch.is_decode_step(query, layouts, key.shape[1], softcap) else "general"
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(torch.uint8)  # Inductor takes no view of a bool tensor in another dtype
    with _packaged():
        return launch.attention(query, key, value, *state, position, attn_mask, is_causal, scale, softcap, **format, kernel=kernel)


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
    count: Tensor | None = None,
    **format: Any,
) -> None:
    """``kivi::append`` (:mod:`kivi_ops.ops`) of one new token."""
    state = (key_records, value_records, key_window, value_window, sealed, left_padding, length)
    with _packaged():
        launch.append(key, value, *state, position, count, **format)
