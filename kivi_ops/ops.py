"""The operators of ``torch.ops.kivi``: schemas, argument checks, fake kernels, and which implementation runs where.

Symbols: B rows, Hq / H query / KV heads, S new tokens, D_k / D_v head sizes, C capacity, R residual length. All positions,
mask columns and capacities are in the padded frame; a row's own token index is its column less its left padding.

State tensors are those of :class:`kivi_ops.state.KiviState`, which also fills the keyword arguments in. Numbers follow the contract
whichever device runs: :mod:`kivi_ops.cpu` (plain torch) or :mod:`kivi_ops.kernels` (Triton). Every check happens before anything is
written. There is no backward: a direct call that would need one raises.

Must not know of models, transformers or graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kivi_ops.config import BITS, CACHE_DTYPES, METADATA_DTYPES, SEAL_ORDERS
from kivi_ops.kernels.layout import record_layouts

_LIBRARY = torch.library.Library("kivi", "DEF")  # module level: a collected Library takes its operators along

_STATE = (
    "Tensor{a} key_records, Tensor{b} value_records, Tensor{c} key_window, Tensor{d} value_window, Tensor{e} sealed, Tensor left_padding"
)
_READ_STATE = _STATE.format(a="", b="", c="", d="", e="")
_WRITE_STATE = _STATE.format(a="(a!)", b="(b!)", c="(c!)", d="(d!)", e="(e!)") + ", Tensor(f!) length"
_FORMAT = "int capacity, int key_bits, int value_bits, int group_size, ScalarType metadata_dtype"
_WINDOW = "int residual_length, int rollback_margin"
_UNPACK = "(Tensor codes, Tensor scale, Tensor min, int bits, int group_size, int head_dim, ScalarType dtype) -> Tensor"

SCHEMAS = {
    "quantize_pack_key": "(Tensor key, int bits, int group_size, ScalarType? metadata_dtype=None) -> (Tensor, Tensor, Tensor)",
    "quantize_pack_value": "(Tensor value, int bits, int group_size, ScalarType? metadata_dtype=None) -> (Tensor, Tensor, Tensor)",
    "unpack_dequantize_key": _UNPACK,
    "unpack_dequantize_value": _UNPACK,
    "attention": f"(Tensor query, Tensor key, Tensor value, {_READ_STATE}, Tensor position, Tensor? attn_mask=None, "
    f"bool is_causal=False, float? scale=None, float? softcap=None, *, {_FORMAT}, str seal) -> Tensor",
    "append": f"(Tensor key, Tensor value, {_WRITE_STATE}, Tensor position, Tensor? count=None, *, {_FORMAT}, {_WINDOW}) -> ()",
    "update": f"(Tensor key, Tensor value, {_WRITE_STATE}, Tensor position, *, {_FORMAT}, {_WINDOW}, str seal) -> (Tensor, Tensor)",
    "read_length": "(Tensor length) -> Tensor",
    "observe_padding": "(Tensor(a!) left_padding, Tensor? attn_mask, Tensor position, SymInt new_tokens) -> ()",
}


# ---------------------------------------------------------------------------------------------------------------- checks


def _expect(condition: bool, message: str, error: type[Exception] = ValueError) -> None:
    if not condition:
        raise error(message)


def _check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    _expect(value in allowed, f"{name} is {value!r}; allowed: {', '.join(map(str, allowed))}")


def _check_no_grad(op: str, **tensors: Tensor | None) -> None:
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            _expect(
                tensor is None or not tensor.requires_grad,
                f"kivi::{op} has no backward, and {name} requires grad; call it under torch.no_grad() or detach {name}",
                RuntimeError,
            )


def _check_devices(op: str, device: torch.device, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        _expect(
            tensor is None or tensor.device == device,
            f"kivi::{op}: {name} is on {getattr(tensor, 'device', None)}; allowed: {device}, where the first argument is",
        )


def _check_new_tokens(op: str, key: Tensor, value: Tensor, key_window: Tensor, value_window: Tensor) -> None:
    """New Keys and Values against the windows that they will enter: [B, H, S, D]."""
    for name, tensor, window in (("key", key, key_window), ("value", value, value_window)):
        _expect(tensor.dim() == 4, f"kivi::{op}: {name} has shape {list(tensor.shape)}; allowed: [B, H, S, D]")
        rows, heads, _, dim = window.shape
        _expect(
            tensor.shape[0] == rows,
            f"kivi::{op}: {name} has {tensor.shape[0]} rows but the state has {rows}; select the state's rows first",
        )
        _expect(
            tensor.shape[1] == heads and tensor.shape[3] == dim,
            f"kivi::{op}: {name} has shape {list(tensor.shape)}; allowed: [{rows}, {heads}, S, {dim}] for this state",
        )
        _expect(
            tensor.dtype == window.dtype,
            f"kivi::{op}: {name} is {tensor.dtype}; allowed: {window.dtype}, the dtype of the state's windows",
            TypeError,
        )
    _expect(
        key.shape[2] == value.shape[2],
        f"kivi::{op}: key has {key.shape[2]} new tokens and value {value.shape[2]}; allowed: the same number",
    )


def _check_position(op: str, position: Tensor, rows: int, new_tokens: int) -> None:
    """[], [1] or [S] for all rows; [B, 1] or [B, S] (or one row for all) a row each."""
    _expect(
        position.dtype in (torch.int32, torch.int64),
        f"kivi::{op}: position is {position.dtype}; allowed: torch.int32, torch.int64",
        TypeError,
    )
    shape = list(position.shape)
    right = position.dim() <= 2 and (position.dim() == 0 or shape[-1] in (1, new_tokens))
    if position.dim() == 2:
        right = right and shape[0] in (1, rows)
    _expect(
        right,
        f"kivi::{op}: position has shape {shape}; allowed: [], [1], [{new_tokens}] for all rows, "
        f"[{rows}, 1], [{rows}, {new_tokens}] per row",
    )


def _check_format(op: str, capacity: int, key_bits: int, value_bits: int, group_size: int, metadata_dtype: torch.dtype) -> None:
    _expect(capacity >= 1, f"kivi::{op}: capacity is {capacity}; allowed: 1 or more")
    _check_choice(f"kivi::{op}: key_bits", key_bits, BITS)
    _check_choice(f"kivi::{op}: value_bits", value_bits, BITS)
    _check_choice(f"kivi::{op}: metadata_dtype", metadata_dtype, METADATA_DTYPES)
    _expect(
        2 <= group_size <= 256 and group_size & (group_size - 1) == 0,
        f"kivi::{op}: group_size is {group_size}; allowed: a power of two from 2 to 256",
    )


def _check_state(
    op: str, state: dict[str, Tensor], capacity: int, key_bits: int, value_bits: int, group_size: int, metadata_dtype: torch.dtype
) -> None:
    """Shapes, dtypes and memory of a state, with or without ``length``, against the format it claims to have."""
    key_window, value_window = state["key_window"], state["value_window"]
    _check_devices(op, key_window.device, **state)
    for name in ("key_window", "value_window"):
        window = state[name]
        _expect(
            window.dim() == 4 and window.dtype in CACHE_DTYPES and 1 <= window.shape[-1] <= 256,
            f"kivi::{op}: {name} is {window.dtype} {list(window.shape)}; allowed: [B, H, W, D] of float32, float16 or bfloat16",
        )
    rows, heads, window_rows, key_dim = key_window.shape
    value_dim = value_window.shape[3]
    _expect(
        list(value_window.shape) == [rows, heads, window_rows, value_dim] and value_window.dtype == key_window.dtype,
        f"kivi::{op}: value_window is {value_window.dtype} {list(value_window.shape)}; allowed: {key_window.dtype} "
        f"{[rows, heads, window_rows]} + [D_v], as key_window",
    )
    key, value = record_layouts(key_dim, value_dim, key_bits, value_bits, group_size, metadata_dtype)
    # Values of the last tokens never leave the window, so fewer than capacity tokens need records (contract section 5).
    expected = {
        "key_records": (torch.int16, [rows, heads, key.records(capacity), key.words]),
        "value_records": (torch.int16, [rows, heads, value.records(max(0, capacity - window_rows)), value.words]),
        "sealed": (torch.int32, [rows, 2]),
        "left_padding": (torch.int32, [rows]),
        "length": (torch.int64, []),
    }
    spans = []
    for name, tensor in state.items():
        if name in expected:
            dtype, shape = expected[name]
            _expect(
                tensor.dtype == dtype and list(tensor.shape) == shape,
                f"kivi::{op}: {name} is {tensor.dtype} {list(tensor.shape)}; allowed: {dtype} {shape} for this format",
            )
        _expect(
            tensor.is_contiguous(),
            f"kivi::{op}: {name} has strides {tensor.stride()} for shape {list(tensor.shape)}; allowed: a contiguous tensor, "
            "since state that overlaps or skips cannot be written safely",
        )
        if tensor.numel():
            spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.itemsize, name))
    spans.sort()
    for (_, end, first), (start, _, second) in zip(spans, spans[1:], strict=False):
        _expect(end <= start, f"kivi::{op}: {first} and {second} overlap in memory; allowed: a storage for each")


def _check_mask(op: str, mask: Tensor, rows: int, heads: int, new_tokens: int, capacity: int) -> None:
    _expect(
        mask.dtype == torch.bool or mask.dtype.is_floating_point,
        f"kivi::{op}: attn_mask is {mask.dtype}; allowed: torch.bool or a float dtype",
        TypeError,
    )
    shape = list(mask.shape)
    _expect(
        mask.dim() == 4 and shape[0] in (1, rows) and shape[1] in (1, heads) and shape[2] in (1, new_tokens),
        f"kivi::{op}: attn_mask has shape {shape}; allowed: broadcastable to [{rows}, {heads}, {new_tokens}, columns]",
    )
    _expect(
        shape[3] == 1 or new_tokens <= shape[3] <= capacity,
        f"kivi::{op}: attn_mask is {shape[3]} columns wide; allowed: 1, or {new_tokens} (the new tokens) to {capacity} (the capacity)",
    )


def _check_append(op: str, key: Tensor, value: Tensor, state: tuple[Tensor, ...], position: Tensor, format: dict[str, Any]) -> None:
    names = ("key_records", "value_records", "key_window", "value_window", "sealed", "left_padding", "length")
    tensors = dict(zip(names, state, strict=True))
    _check_no_grad(op, key=key, value=value, key_window=tensors["key_window"], value_window=tensors["value_window"])
    _check_devices(op, key.device, value=value, position=position, **tensors)
    residual_length, rollback_margin = format["residual_length"], format["rollback_margin"]
    read = {name: format[name] for name in ("capacity", "key_bits", "value_bits", "group_size", "metadata_dtype")}
    _check_format(op, **read)
    _expect(
        residual_length >= 1 and residual_length % format["group_size"] == 0,
        f"kivi::{op}: residual_length is {residual_length}; allowed: a positive multiple of group_size ({format['group_size']})",
    )
    _expect(rollback_margin >= 0, f"kivi::{op}: rollback_margin is {rollback_margin}; allowed: 0 or more")
    window = tensors["key_window"]
    rows = min(residual_length, format["capacity"]) + rollback_margin
    _expect(
        window.dim() == 4 and window.shape[2] == rows,
        f"kivi::{op}: key_window has shape {list(window.shape)}; allowed: [B, H, {rows}, D_k] for this residual_length and margin",
    )
    _check_state(op, tensors, **read)
    _check_new_tokens(op, key, value, tensors["key_window"], tensors["value_window"])
    _check_position(op, position, key.shape[0], key.shape[2])


def _check_quantize(op: str, name: str, x: Tensor, bits: int, group_size: int, metadata_dtype: torch.dtype | None) -> None:
    _check_no_grad(op, **{name: x})
    _expect(
        x.dim() >= 2 and x.dtype in CACHE_DTYPES,
        f"kivi::{op}: {name} is {x.dtype} {list(x.shape)}; allowed: [..., T, D] of float32, float16 or bfloat16",
        TypeError,
    )
    _check_format(op, 1, bits, bits, group_size, metadata_dtype or x.dtype)


def _check_unpack(
    op: str, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    _check_no_grad(op, scale=scale, min=minimum)
    _check_devices(op, codes.device, scale=scale, min=minimum)
    _check_format(op, 1, bits, bits, group_size, scale.dtype)
    _check_choice(f"kivi::{op}: dtype", dtype, CACHE_DTYPES)
    width = -(-head_dim * bits // 8)
    _expect(
        codes.dtype == torch.uint8 and codes.dim() >= 2 and codes.shape[-1] == width,
        f"kivi::{op}: codes is {codes.dtype} {list(codes.shape)}; allowed: uint8 [..., T, {width}]",
    )
    tokens = codes.shape[-2]
    groups = [-(-tokens // group_size), head_dim] if op.endswith("key") else [tokens, -(-head_dim // group_size)]
    shape = [*codes.shape[:-2], *groups]
    for name, tensor in (("scale", scale), ("min", minimum)):
        _expect(
            list(tensor.shape) == shape and tensor.dtype == scale.dtype,
            f"kivi::{op}: {name} is {tensor.dtype} {list(tensor.shape)}; allowed: {scale.dtype} {shape}",
        )


# ---------------------------------------------------------------------------------------------- checked implementations


def _implementation(device: torch.device) -> Any:
    if device.type == "cpu":
        from kivi_ops import cpu

        return cpu
    try:
        from kivi_ops.kernels import launch
    except ImportError as error:
        raise RuntimeError(f"kivi_ops needs Triton for tensors on {device}, and it cannot be imported: {error}") from error
    return launch


def quantize_pack_key(key: Tensor, bits: int, group_size: int, metadata_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise Keys per channel: groups of ``group_size`` consecutive tokens (contract sections 1 and 2).

    Args:
        key: [..., T, D], float32, float16 or bfloat16; the last token group may be short.

    Returns:
        codes uint8 [..., T, ceil(D * bits / 8)] (little-endian along channels), scale and min [..., ceil(T / G), D].
    """
    _check_quantize("quantize_pack_key", "key", key, bits, group_size, metadata_dtype)
    return _implementation(key.device).quantize_pack_key(key, bits, group_size, metadata_dtype or key.dtype)


def quantize_pack_value(
    value: Tensor, bits: int, group_size: int, metadata_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise Values per token: groups of ``group_size`` consecutive channels (contract sections 1 and 2).

    Args:
        value: [..., T, D], float32, float16 or bfloat16; the last channel group may be short.

    Returns:
        codes uint8 [..., T, ceil(D * bits / 8)] (little-endian along channels), scale and min [..., T, ceil(D / G)].
    """
    _check_quantize("quantize_pack_value", "value", value, bits, group_size, metadata_dtype)
    return _implementation(value.device).quantize_pack_value(value, bits, group_size, metadata_dtype or value.dtype)


def unpack_dequantize_key(
    codes: Tensor, scale: Tensor, min: Tensor, bits: int, group_size: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    """The inverse of :func:`quantize_pack_key`: [..., T, D] of ``dtype``, rounded once."""
    _check_unpack("unpack_dequantize_key", codes, scale, min, bits, group_size, head_dim, dtype)
    return _implementation(codes.device).unpack_dequantize_key(codes, scale, min, bits, group_size, head_dim, dtype)


def unpack_dequantize_value(
    codes: Tensor, scale: Tensor, min: Tensor, bits: int, group_size: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    """The inverse of :func:`quantize_pack_value`: [..., T, D] of ``dtype``, rounded once."""
    _check_unpack("unpack_dequantize_value", codes, scale, min, bits, group_size, head_dim, dtype)
    return _implementation(codes.device).unpack_dequantize_value(codes, scale, min, bits, group_size, head_dim, dtype)


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
    *,
    capacity: int,
    key_bits: int,
    value_bits: int,
    group_size: int,
    metadata_dtype: torch.dtype,
    seal: str,
) -> Tensor:
    """Attention of S new tokens over a row's state and themselves, one softmax (contract sections 3 and 4).

    With ``seal="after_attention"`` it goes before the step's ``append``, with ``"before_attention"`` after it.

    Args:
        query: [B, Hq, S, D_k]; Hq a multiple of H, query head h reads KV head h // (Hq // H).
        key, value: [B, H, S, D_k], [B, H, S, D_v], the new tokens, in the state's dtype.
        position: start of the new tokens: [], [1] or [S] for all rows, [B, 1] or [B, S] per row.
        attn_mask: bool (True = visible) or float (added to the logits), broadcastable to [B, Hq, S, columns]; columns are absolute
            positions, those beyond it are hidden. Excludes ``is_causal``.
        is_causal: new token i sees tokens up to position + i; False sees all that exist.
        scale: factor of the logits, 1 / sqrt(D_k) if None. softcap: s becomes softcap * tanh(s / softcap) before the mask.

    Returns:
        [B, Hq, S, D_v], contiguous, in the state's dtype. A query that sees nothing gives 0; a row whose new tokens pass the capacity
        gives NaN.

    Raises:
        ValueError, TypeError, RuntimeError: an argument that does not fit; the message says which, what it was, what is allowed.
    """
    op = "attention"
    _check_no_grad(op, query=query, key=key, value=value, attn_mask=attn_mask)
    _check_devices(op, query.device, key=key, value=value, key_records=key_records, position=position, attn_mask=attn_mask)
    _check_choice(f"kivi::{op}: seal", seal, SEAL_ORDERS)
    _check_format(op, capacity, key_bits, value_bits, group_size, metadata_dtype)
    state = {
        "key_records": key_records,
        "value_records": value_records,
        "key_window": key_window,
        "value_window": value_window,
        "sealed": sealed,
        "left_padding": left_padding,
    }
    _check_state(op, state, capacity, key_bits, value_bits, group_size, metadata_dtype)
    _check_new_tokens(op, key, value, key_window, value_window)
    rows, heads, new_tokens, key_dim = key.shape
    _expect(
        query.dim() == 4
        and (query.shape[0], query.shape[2], query.shape[3]) == (rows, new_tokens, key_dim)
        and query.shape[1] > 0
        and query.shape[1] % heads == 0,
        f"kivi::{op}: query has shape {list(query.shape)}; allowed: [{rows}, a multiple of {heads}, {new_tokens}, {key_dim}]",
    )
    _expect(query.dtype == key.dtype, f"kivi::{op}: query is {query.dtype}; allowed: {key.dtype}, the dtype of key", TypeError)
    _check_position(op, position, rows, new_tokens)
    if attn_mask is not None:
        _check_mask(op, attn_mask, rows, query.shape[1], new_tokens, capacity)
        _expect(not is_causal, f"kivi::{op}: is_causal is True with an attn_mask; allowed: one of the two")
    _expect(softcap is None or softcap > 0, f"kivi::{op}: softcap is {softcap}; allowed: None or a positive number")
    if query.numel() == 0:
        return query.new_empty((rows, query.shape[1], new_tokens, value.shape[3]))
    return _implementation(query.device).attention(
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
        attn_mask,
        is_causal,
        key_dim**-0.5 if scale is None else scale,
        softcap,
        capacity=capacity,
        key_bits=key_bits,
        value_bits=value_bits,
        group_size=group_size,
        metadata_dtype=metadata_dtype,
        seal=seal,
    )


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
    """Write S new tokens at ``position`` and seal what is due, all decided on the device (contract section 3).

    A smaller position than before is a rollback. Columns left of a row's padding and past the capacity are dropped. ``length`` becomes the
    largest start + S. Mutates the five state tensors and ``length``, nothing else.

    Args:
        key, value: [B, H, S, D_k], [B, H, S, D_v] in the state's dtype.
        position: as in :func:`attention`.
        count: how many of the S tokens are valid, a 0-d or [1] int tensor; None means all.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`attention`.
    """
    state = (key_records, value_records, key_window, value_window, sealed, left_padding, length)
    _check_append("append", key, value, state, position, format)
    if count is not None:
        _check_devices("append", key.device, count=count)
        _expect(
            count.numel() == 1 and count.dtype in (torch.int32, torch.int64),
            f"kivi::append: count is {count.dtype} {list(count.shape)}; allowed: one int32 or int64",
        )
    if key.shape[0] and key.shape[2]:
        _implementation(key.device).append(key, value, *state, _apart(position, length), count, **format)


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
    """:func:`append`, and the float Keys and Values that this step's attention may see, for attention that is not :func:`attention`.

    Returns:
        [B, H, C, D_k] and [B, H, C, D_v] in the padded frame and the state's dtype, zeros in pad and unwritten columns; NaN Values in a
        row that passed the capacity.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`attention`.
    """
    state = (key_records, value_records, key_window, value_window, sealed, left_padding, length)
    _check_choice("kivi::update: seal", seal, SEAL_ORDERS)
    _check_append("update", key, value, state, position, format)
    return _implementation(key.device).update(key, value, *state, _apart(position, length), seal=seal, **format)


def read_length(length: Tensor) -> Tensor:
    """A copy of ``length`` that compilers do not see through.

    Inductor may evaluate what was computed from an input after an operator of ours has changed that input (seen in torch 2.13: masks and
    rotary angles of later layers, one token late). So whatever in a graph depends on the length before the step reads this copy.
    """
    return length.clone()


def _apart(position: Tensor, length: Tensor) -> Tensor:
    """``position`` as it was before ``length`` is written, when a compiler made one tensor of the two."""
    return position.clone() if position.data_ptr() == length.data_ptr() else position


def observe_padding(left_padding: Tensor, attn_mask: Tensor | None, position: Tensor, new_tokens: int) -> None:
    """Learn the left padding of rows that hold no token yet from the mask of this call.

    Such a row's padding becomes the first of the call's own columns (start .. start + S - 1) that any query sees, start + S if there is
    none; without a mask, 0 at start 0 and unchanged after. A row that holds a token keeps its padding.

    Args:
        left_padding: int32 [B], mutated.
        attn_mask: None, [B, columns] (a 2-D mask of tokens, any dtype, non-zero = visible), or 4-D as in :func:`attention`.
        position: as in :func:`attention`. new_tokens: S.

    Raises:
        ValueError, TypeError: as :func:`attention`.
    """
    op, rows = "observe_padding", left_padding.shape[0] if left_padding.dim() == 1 else -1
    _expect(
        rows >= 0 and left_padding.dtype == torch.int32 and left_padding.is_contiguous(),
        f"kivi::{op}: left_padding is {left_padding.dtype} {list(left_padding.shape)}; allowed: contiguous int32 [B]",
    )
    _check_devices(op, left_padding.device, attn_mask=attn_mask, position=position)
    _check_position(op, position, rows, new_tokens)
    if attn_mask is not None:
        _expect(
            attn_mask.dim() in (2, 4) and attn_mask.shape[0] in (1, rows),
            f"kivi::{op}: attn_mask has shape {list(attn_mask.shape)}; allowed: [{rows}, columns] or [{rows}, heads, S, columns]",
        )
        width = attn_mask.shape[-1]
        _expect(
            width == 1 or width >= new_tokens,
            f"kivi::{op}: attn_mask is {width} columns wide; allowed: 1, or {new_tokens} (the new tokens) or more",
        )
    if rows == 0 or new_tokens == 0:
        return
    start = row_starts(position, rows)
    empty = (start == 0) | (left_padding >= start)
    if attn_mask is None:
        padding = torch.where(start == 0, 0, left_padding)
    else:
        columns = start[:, None] + torch.arange(new_tokens, device=left_padding.device)
        padding = start + _hidden_prefix(attn_mask, columns)
    left_padding.copy_(torch.where(empty, padding, left_padding))


def _hidden_prefix(attn_mask: Tensor, columns: Tensor) -> Tensor:
    """How many of ``columns`` [B, S] (absolute), from the first on, no query of any head sees: [B]."""
    if attn_mask.dim() == 4 and attn_mask.dtype.is_floating_point:
        attn_mask = attn_mask > torch.finfo(attn_mask.dtype).min  # additive: finfo.min and -inf hide
    visible = attn_mask != 0
    if visible.dim() == 4:
        visible = visible.any(1).any(1)
    rows, new_tokens = columns.shape
    visible = visible.expand(rows, visible.shape[-1])
    if visible.shape[-1] == 1:
        seen = visible.expand(rows, new_tokens)
    else:
        inside = columns < visible.shape[-1]
        seen = visible.gather(1, columns.clamp(max=visible.shape[-1] - 1)) & inside
    return (seen.cumsum(1) == 0).sum(1)


def row_starts(position: Tensor, rows: int) -> Tensor:
    """The start column of each row's new tokens: int64 [B], from any allowed form of ``position``."""
    start = position.reshape(1) if position.dim() == 0 else position[..., 0].reshape(-1)
    return start.to(torch.int64).expand(rows)


# ----------------------------------------------------------------------------------------- fake kernels (shapes alone)


def _fake_quantize_key(key: Tensor, bits: int, group_size: int, metadata_dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    *lead, tokens, dim = key.shape
    codes = key.new_empty((*lead, tokens, (dim * bits + 7) // 8), dtype=torch.uint8)
    grid = (*lead, (tokens + group_size - 1) // group_size, dim)
    return codes, *(key.new_empty(grid, dtype=metadata_dtype or key.dtype) for _ in range(2))


def _fake_quantize_value(value: Tensor, bits: int, group_size: int, metadata_dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    *lead, tokens, dim = value.shape
    codes = value.new_empty((*lead, tokens, (dim * bits + 7) // 8), dtype=torch.uint8)
    grid = (*lead, tokens, (dim + group_size - 1) // group_size)
    return codes, *(value.new_empty(grid, dtype=metadata_dtype or value.dtype) for _ in range(2))


def _fake_unpack(codes: Tensor, scale: Tensor, min: Tensor, bits: int, group_size: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], head_dim), dtype=dtype)


def _fake_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[1], query.shape[2], value.shape[3]))


def _fake_read_length(length: Tensor) -> Tensor:
    return length.new_empty(length.shape)


def _fake_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _fake_update(key: Tensor, value: Tensor, *args: Any, capacity: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
    rows, heads = key.shape[0], key.shape[1]
    return key.new_empty((rows, heads, capacity, key.shape[3])), value.new_empty((rows, heads, capacity, value.shape[3]))


_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "quantize_pack_key": (quantize_pack_key, _fake_quantize_key),
    "quantize_pack_value": (quantize_pack_value, _fake_quantize_value),
    "unpack_dequantize_key": (unpack_dequantize_key, _fake_unpack),
    "unpack_dequantize_value": (unpack_dequantize_value, _fake_unpack),
    "attention": (attention, _fake_attention),
    "append": (append, _fake_nothing),
    "update": (update, _fake_update),
    "read_length": (read_length, _fake_read_length),
    "observe_padding": (observe_padding, _fake_nothing),
}


def _with_tensors(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` behind a check that no tensor it needs is None, which the dispatcher lets through."""
    arguments = getattr(torch.ops.kivi, name).default._schema.arguments
    needed = [(index, argument.name) for index, argument in enumerate(arguments) if str(argument.type) == "Tensor"]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for index, argument in needed:
            _expect(args[index] is not None, f"kivi::{name}: {argument} is None; allowed: a tensor", TypeError)
        return function(*args, **kwargs)

    return checked


for _name, (_function, _fake) in _OPERATORS.items():
    _LIBRARY.define(_name + SCHEMAS[_name], tags=(torch.Tag.pt2_compliant_tag,))
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _with_tensors(_name, _function), _device)
    torch.library.register_fake(f"kivi::{_name}", _fake, lib=_LIBRARY)
