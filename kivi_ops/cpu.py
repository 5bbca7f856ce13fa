"""The operators on the CPU: plain torch over packed state, a row at a time, streaming over blocks of tokens.

Positions and boundaries are read on the host, which costs nothing there. Arguments are already checked (:mod:`kivi_ops.ops`).
Must not know of models or graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kivi_ops import reference
from kivi_ops.kernels.layout import RecordLayout, pack_bytes, record_layouts, unpack_bytes

BLOCK_TOKENS = 1024  # tokens restored at a time by attention: bounds its workspace, whatever the length


def quantize_pack_key(key: Tensor, bits: int, group_size: int, metadata_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale, minimum = reference.quantize_key(key, bits, group_size, metadata_dtype)
    return pack_bytes(codes, bits), scale.contiguous(), minimum.contiguous()


def quantize_pack_value(value: Tensor, bits: int, group_size: int, metadata_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale, minimum = reference.quantize_value(value, bits, group_size, metadata_dtype)
    return pack_bytes(codes, bits), scale, minimum


def unpack_dequantize_key(
    codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    return reference.restore_key(unpack_bytes(codes, bits, head_dim), scale, minimum, group_size).to(dtype)


def unpack_dequantize_value(
    codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    return reference.restore_value(unpack_bytes(codes, bits, head_dim), scale, minimum, group_size).to(dtype)


# ------------------------------------------------------------------------------------------------- sealed records


def _restore(records: Tensor, layout: RecordLayout, first: int, end: int) -> Tensor:
    """Sealed tokens ``first`` .. ``end`` of one row: records int16 [H, records, words] -> float32 [H, end - first, D]."""
    begin, stop = first // layout.tokens, -(-end // layout.tokens)
    words, scale, minimum = layout.split(records[:, begin:stop])
    codes = layout.unpack(words).flatten(1, 2)[:, first - begin * layout.tokens : end - begin * layout.tokens]
    if layout.role == "key":
        scale, minimum = scale.flatten(1, 2), minimum.flatten(1, 2)  # [H, groups, D]
        groups = torch.arange(first, end) // layout.group_size - begin * layout.token_parts
        return reference.restore(codes, scale[:, groups], minimum[:, groups])
    tokens = slice(first - begin * layout.tokens, end - begin * layout.tokens)
    scale, minimum = (x.transpose(-1, -2).flatten(1, 2)[:, tokens] for x in (scale, minimum))  # [H, tokens, groups]
    return reference.restore_value(codes, scale, minimum, layout.group_size)


def _seal(records: Tensor, layout: RecordLayout, first: int, floats: Tensor) -> None:
    """Quantise ``floats`` [H, n, D], tokens ``first`` .., into one row's records; the other tokens' fields and grids stay."""
    end, size = first + floats.shape[1], layout.group_size
    begin, stop = first // layout.tokens, -(-end // layout.tokens)
    words, scale, minimum = layout.split(records[:, begin:stop])
    tokens = slice(first - begin * layout.tokens, end - begin * layout.tokens)
    codes = layout.unpack(words)
    where: tuple[slice | Tensor, ...]
    if layout.role == "key":
        new_codes, *grid = reference.quantize_key(floats, layout.bits, size, layout.metadata_dtype)
        groups = torch.arange(tokens.start // size, tokens.stop // size)
        where = (slice(None), groups // layout.token_parts, groups % layout.token_parts)
    else:
        new_codes, *grid = reference.quantize_value(floats, layout.bits, size, layout.metadata_dtype)
        columns = torch.arange(tokens.start, tokens.stop)
        where = (slice(None), columns // layout.tokens, slice(None), columns % layout.tokens)
        grid = [x.transpose(0, 1) for x in grid]  # two index tensors with a slice between put the indexed axis first
    codes.flatten(1, 2)[:, tokens] = new_codes
    words.copy_(layout.pack(codes))
    scale[where], minimum[where] = grid


# ------------------------------------------------------------------------------------------------------- one row


@dataclass
class _Row:
    """One batch row of a call, in host integers."""

    index: int
    start: int  # column of the first new token
    padding: int
    sealed: tuple[int, int]

    @property
    def first(self) -> int:
        """Index of the first new column as a token of this row; negative if it is a pad."""
        return self.start - self.padding


def _rows(position: Tensor, left_padding: Tensor, sealed: Tensor) -> Iterator[_Row]:
    from kivi_ops.ops import row_starts

    starts = row_starts(position, left_padding.shape[0]).tolist()
    for index, row in enumerate(zip(starts, left_padding.tolist(), sealed.tolist(), strict=True)):
        start, padding, (key, value) = row
        yield _Row(index, start, max(0, padding), (max(0, key), max(0, value)))  # whatever a caller put there


def _visible_boundaries(row: _Row, seal: str) -> tuple[int, int]:
    """Below which token this step's attention reads records, for Key and Value."""
    if seal == "after_attention":
        held = max(0, row.first)
        return min(row.sealed[0], held), min(row.sealed[1], held)
    return row.sealed if row.first > 0 else (0, 0)  # a first prefill sees the floats it was given, in both orders


def _read(
    records: Tensor, layout: RecordLayout, window: Tensor, new: Tensor, boundary: int, first_new: int, begin: int, end: int
) -> Tensor:
    """Tokens ``begin`` .. ``end`` of one row, float32 [H, n, D]: records below the boundary, then window, then the new tokens."""
    parts = []
    if begin < boundary:
        parts.append(_restore(records, layout, begin, min(end, boundary)))
    old, stop = max(begin, boundary), min(end, first_new)
    if old < stop:
        parts.append(window[:, torch.arange(old, stop) % window.shape[1]].float())
    fresh = max(begin, boundary, first_new)
    if fresh < end:
        parts.append(new[:, fresh - first_new : end - first_new].float())
    return torch.cat(parts, 1) if len(parts) != 1 else parts[0]


# ------------------------------------------------------------------------------------------------------- operators


@torch.autocast("cpu", enabled=False)  # float32 inside, whatever the model around it runs in
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
) -> Tensor:
    batch, query_heads, new_tokens, _ = query.shape
    heads = key.shape[1]
    key_layout, value_layout = record_layouts(key.shape[-1], value.shape[-1], key_bits, value_bits, group_size, metadata_dtype)
    output = query.new_empty((batch, query_heads, new_tokens, value.shape[-1]))
    for row in _rows(position, left_padding, sealed):
        b = row.index
        if row.start + new_tokens > capacity:
            output[b] = float("nan")
            continue
        key_end, value_end = _visible_boundaries(row, seal)
        tokens = max(0, row.first + new_tokens)
        q = query[b].float().reshape(heads, -1, query.shape[-1])  # [H, repeats * S, D_k]
        running = _OnlineSoftmax(q, value.shape[-1])
        block = BLOCK_TOKENS // max(key_layout.tokens, value_layout.tokens) * max(key_layout.tokens, value_layout.tokens)
        block = max(block, key_layout.tokens, value_layout.tokens)
        for begin in range(0, tokens, block):
            end = min(begin + block, tokens)
            k = _read(key_records[b], key_layout, key_window[b], key[b], key_end, row.first, begin, end)
            v = _read(value_records[b], value_layout, value_window[b], value[b], value_end, row.first, begin, end)
            logits = (q @ k.transpose(-1, -2)) * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            mask = None if attn_mask is None else attn_mask[b if attn_mask.shape[0] > 1 else 0]
            bias = _bias(mask, is_causal, row, new_tokens, begin, end)
            if bias is not None:
                if bias.dim() == 3 and bias.shape[0] > 1:
                    bias = bias.unflatten(0, (heads, -1))
                logits = (logits.unflatten(1, (-1, new_tokens)) + bias).flatten(1, 2)
            running.add(logits, v)
        output[b] = running.result().reshape(query_heads, new_tokens, -1)
    return output


class _OnlineSoftmax:
    """softmax(logits) @ values over blocks of tokens with one global normalisation (log-sum-exp)."""

    def __init__(self, query: Tensor, value_dim: int) -> None:
        lead = query.shape[:-1]
        self.maximum = query.new_full((*lead, 1), -torch.inf)
        self.total = query.new_zeros((*lead, 1))
        self.output = query.new_zeros((*lead, value_dim))

    def add(self, logits: Tensor, values: Tensor) -> None:
        maximum = torch.maximum(self.maximum, logits.amax(-1, keepdim=True))
        shift = torch.where(maximum == -torch.inf, 0.0, maximum)  # nothing visible so far: exp(-inf - 0) is 0
        weights = torch.exp(logits - shift)
        decay = torch.exp(self.maximum - shift)
        self.total = self.total * decay + weights.sum(-1, keepdim=True)
        self.output = self.output * decay + weights @ values
        self.maximum = maximum

    def result(self) -> Tensor:
        return torch.where(self.total == 0, 0.0, self.output / self.total)


def _bias(mask: Tensor | None, is_causal: bool, row: _Row, new_tokens: int, begin: int, end: int) -> Tensor | None:
    """What is added to the logits of tokens ``begin`` .. ``end``: [heads or 1, S or 1, n], -inf where hidden; None if all are seen."""
    if mask is not None:
        if mask.shape[-1] > 1:
            columns = slice(min(begin + row.padding, mask.shape[-1]), min(end + row.padding, mask.shape[-1]))
            mask = mask[..., columns]
            beyond = end - begin - mask.shape[-1]
        else:
            mask, beyond = mask.expand(*mask.shape[:-1], end - begin), 0
        bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask.float()
        return torch.nn.functional.pad(bias, (0, beyond), value=-torch.inf)
    if is_causal and end - 1 > row.first:
        last = row.first + torch.arange(new_tokens)[:, None]
        return torch.zeros(new_tokens, end - begin).masked_fill(torch.arange(begin, end) > last, -torch.inf)
    return None


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
    key_layout, value_layout = record_layouts(key.shape[-1], value.shape[-1], key_bits, value_bits, group_size, metadata_dtype)
    new_tokens = key.shape[2] if count is None else min(max(int(count), 0), key.shape[2])
    window_rows = key_window.shape[2]
    longest = 0
    for row in _rows(position, left_padding, sealed):
        b, first = row.index, row.first
        held = max(0, min(row.start, capacity) - row.padding)
        tokens = max(held, min(row.start + new_tokens, capacity) - row.padding)
        (key_begin, value_begin), (key_end, value_end) = reference.next_boundaries(
            row.sealed, held, tokens, residual_length, rollback_margin
        )
        if key_begin < key_end:
            whole = key_begin // group_size * group_size  # the group that holds the old boundary is quantised again
            floats = _read(key_records[b], key_layout, key_window[b], key[b], key_begin, first, whole, key_end)
            _seal(key_records[b], key_layout, whole, floats)
        if value_begin < value_end:
            floats = _read(value_records[b], value_layout, value_window[b], value[b], value_begin, first, value_begin, value_end)
            _seal(value_records[b], value_layout, value_begin, floats)
        # Records, boundaries, windows, length: whoever is interrupted in between leaves what a rollback to the old length would.
        sealed[b, 0], sealed[b, 1] = key_end, value_end
        written = torch.arange(max(held, tokens - window_rows), tokens)
        for window, new in ((key_window[b], key[b]), (value_window[b], value[b])):
            window[:, written % window_rows] = new[:, written - first]
        longest = max(longest, row.start + new_tokens)
    length.fill_(longest)


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
    capacity = format["capacity"]
    rows, heads, new_tokens, _ = key.shape
    layouts = record_layouts(
        key.shape[-1], value.shape[-1], format["key_bits"], format["value_bits"], format["group_size"], format["metadata_dtype"]
    )
    state = (key_records, value_records, key_window, value_window, sealed, left_padding, length)
    views = tuple(x.new_zeros((rows, heads, capacity, x.shape[-1])) for x in (key, value))

    if seal == "before_attention" and new_tokens:
        append(key, value, *state, position, None, **format)
    for row in _rows(position, left_padding, sealed):
        b = row.index
        tokens = max(0, min(row.start + new_tokens, capacity) - row.padding)
        ends = _visible_boundaries(row, seal)
        sources = ((key_records, key_window, key), (value_records, value_window, value))
        for view, layout, end, (records, window, new) in zip(views, layouts, ends, sources, strict=True):
            if tokens:
                floats = _read(records[b], layout, window[b], new[b], end, row.first, 0, tokens)
                view[b, :, row.padding : row.padding + tokens] = floats
        if row.start + new_tokens > capacity:
            views[1][b] = float("nan")
    if seal == "after_attention" and new_tokens:
        append(key, value, *state, position, None, **format)
    return views[0], views[1]
