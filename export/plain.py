"""``kivi::attention`` and ``kivi::append`` as tensor expressions: no host reads, no Python per row, so that a compiler takes them whole.

For packages that run without this one on a CPU (:mod:`kivi_ops.export.package`). The same numbers as :mod:`kivi_ops.cpu`, whose state
they share; each call works on all of the capacity, so its cost grows with that. Must not know of exported programs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kivi_ops import reference
from kivi_ops.kernels.layout import RecordLayout, record_layouts
from kivi_ops.ops import row_starts


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
    """:func:`kivi_ops.ops.attention`."""
    layouts = record_layouts(key.shape[-1], value.shape[-1], key_bits, value_bits, group_size, metadata_dtype)
    rows, query_heads, new_tokens, dim = query.shape
    heads = key.shape[1]
    start = row_starts(position, rows)
    first = (start - left_padding)[:, None]
    token = torch.arange(capacity, device=query.device)[None]
    exists = token < first + new_tokens
    if seal == "after_attention":
        ends = torch.minimum(sealed, first.clamp(min=0))
    else:  # a first prefill sees the floats that it was given, in both orders
        ends = torch.where(first > 0, sealed, 0)
    sources = ((key_records, key_window, key), (value_records, value_window, value))
    keys, values = (
        torch.where(exists[:, None, :, None], _tokens(*source, layout, ends[:, place, None], first, token), 0.0)
        for place, (source, layout) in enumerate(zip(sources, layouts, strict=True))
    )
    grouped = query.float().contiguous().view(rows, heads, query_heads // heads * new_tokens, dim)
    scores = grouped @ keys.transpose(-1, -2) * (1 / math.sqrt(dim) if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.unflatten(2, (query_heads // heads, new_tokens))
    visible = exists[:, None, None, None]
    if attn_mask is not None:
        shown, bias = _mask_of_tokens(attn_mask, token + left_padding[:, None], heads)
        visible, scores = visible & shown, scores if bias is None else scores + bias
    elif is_causal:
        last = first + torch.arange(new_tokens, device=query.device)
        visible = visible & (token[:, None] <= last[..., None])[:, None, None]
    scores = torch.where(visible, scores, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(largest == -torch.inf, 0.0, largest)).flatten(2, 3)
    total = weights.sum(-1, keepdim=True)
    output = torch.where(total == 0, 0.0, weights @ values / total)
    output = output.unflatten(2, (query_heads // heads, new_tokens))
    output = torch.cat(output.unbind(1), 1)  # a view of two dimensions as one would ask how many the new tokens are
    past_capacity = (start + new_tokens > capacity)[:, None, None, None]
    return torch.where(past_capacity, math.nan, output).to(query.dtype)


def _tokens(records: Tensor, window: Tensor, new: Tensor, layout: RecordLayout, boundary: Tensor, first: Tensor, token: Tensor) -> Tensor:
    """Every token 0 .. C - 1 of each row: records below the ``boundary``, then window, then the new ones. float32 [B, H, C, D]."""
    capacity = token.shape[-1]
    restored = _restore(records, layout)
    held = restored.shape[2]  # Values of the last tokens have no records
    restored = torch.nn.functional.pad(restored, (0, 0, 0, capacity - held)) if held < capacity else restored[:, :, :capacity]
    floats = torch.where(_column(token < first), window[:, :, token[0] % window.shape[2]], _gather(new, token - first))
    return torch.where(_column(token < boundary), restored, floats.float())


def _restore(records: Tensor, layout: RecordLayout) -> Tensor:
    """[B, H, records, words] -> float32 [B, H, records * N, D]."""
    words, scale, minimum = layout.split(records)
    codes = layout.unpack(words).flatten(2, 3)
    if layout.role == "key":
        return reference.restore_key(codes, scale.flatten(2, 3), minimum.flatten(2, 3), layout.group_size)
    scale, minimum = (x.transpose(-1, -2).flatten(2, 3) for x in (scale, minimum))
    return reference.restore_value(codes, scale, minimum, layout.group_size)


def _column(of_tokens: Tensor) -> Tensor:
    """[B, n] beside [B, H, n, D]."""
    return of_tokens[:, None, :, None]


def _gather(new: Tensor, index: Tensor) -> Tensor:
    """``new`` [B, H, S, D] at ``index`` [B, n], the nearest one where there is none: [B, H, n, D]."""
    rows, heads, new_tokens, dim = new.shape
    index = index.clamp(min=0, max=new_tokens - 1).expand(rows, -1)
    return new.gather(2, _column(index).expand(rows, heads, index.shape[1], dim))


def _mask_of_tokens(mask: Tensor, column: Tensor, heads: int) -> tuple[Tensor, Tensor | None]:
    """A mask by a row's own tokens, which lie at ``column`` [B, C]: what it shows and what it adds, [B, H or 1, r or 1, S or 1, C]."""
    width = mask.shape[-1]
    index = column.clamp(max=width - 1)[:, None, None].expand(-1, mask.shape[1], mask.shape[2], -1)
    found = mask.expand(column.shape[0], -1, -1, -1).gather(3, index)
    inside = (column < width)[:, None, None, None] if width > 1 else torch.ones_like(column[:1, :1], dtype=torch.bool)[:, None, None, None]
    found = found[:, None] if mask.shape[1] == 1 else found.unflatten(1, (heads, -1))
    return (inside & found, None) if mask.dtype == torch.bool else (inside, found.float())


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
    *,
    capacity: int,
    key_bits: int,
    value_bits: int,
    group_size: int,
    metadata_dtype: torch.dtype,
    residual_length: int,
    rollback_margin: int,
) -> None:
    """:func:`kivi_ops.ops.append`."""
    key_layout, value_layout = record_layouts(key.shape[-1], value.shape[-1], key_bits, value_bits, group_size, metadata_dtype)
    start = row_starts(position, key.shape[0])
    after = start + (key.shape[2] if count is None else count.reshape(()).clamp(0, key.shape[2]))
    first = start - left_padding
    held = (start.clamp(max=capacity) - left_padding).clamp(min=0)
    tokens = torch.maximum(held, after.clamp(max=capacity) - left_padding)
    # reference.next_boundaries, for all rows
    begin = torch.minimum(sealed, held[:, None])
    settled = (tokens - rollback_margin).clamp(min=0)
    end = torch.maximum(begin, torch.stack([settled // residual_length * residual_length, settled - residual_length], 1))
    whole = begin[:, 0] // group_size * group_size  # the group that holds the old boundary is quantised again
    new_key_records = _sealed(key_records, key_layout, key_window, key, begin[:, 0], end[:, 0], first, whole)
    new_value_records = _sealed(value_records, value_layout, value_window, value, begin[:, 1], end[:, 1], first, begin[:, 1])
    for window, new in ((key_window, key), (value_window, value)):
        size = window.shape[2]
        row = torch.arange(size, device=window.device)
        newest = tokens[:, None] - 1 - (tokens[:, None] - 1 - row) % size  # of the tokens that may lie in a row of the window
        window.copy_(torch.where(_column((newest >= held[:, None]) & (newest >= 0)), _gather(new, newest - first[:, None]), window))
    for records, change in ((key_records, new_key_records), (value_records, new_value_records)):
        if change is not None:
            records.scatter_(2, *change)
    sealed.copy_(end)
    length.copy_(after.max())


def _sealed(
    records: Tensor, layout: RecordLayout, window: Tensor, new: Tensor, begin: Tensor, end: Tensor, first: Tensor, whole: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Which records change when tokens ``begin`` .. ``end`` [B] are sealed, and to what: an index and as many records [B, H, n, words].

    ``whole`` [B]: from which token on codes are chosen anew. None where there are no records.
    """
    total, size = records.shape[2], layout.tokens
    if total == 0:
        return None
    touched = total
    if not isinstance(new.shape[2], torch.SymInt):  # a number of records that is a symbol would not stay one: views of it ask what it is
        # Tokens that are not sealed yet lie in the window or are new; with the group around the boundary they touch so many records.
        touched = min(total, -(-(window.shape[2] + new.shape[2] + layout.group_size) // size) + 1)
    place = (whole // size).clamp(max=total - touched)[:, None] + torch.arange(touched, device=records.device)
    index = _column(place).expand(-1, records.shape[1], touched, layout.words)
    present = records.gather(2, index)
    token = (place[..., None] * size + torch.arange(size, device=records.device)).flatten(1)
    floats = torch.where(_column(token < first[:, None]), _at(window, token % window.shape[2]), _gather(new, token - first[:, None]))
    floats = torch.where(_column(token < begin[:, None]), _restore(present, layout), floats.float())
    words, scale, minimum = layout.split(present)
    chosen = (token >= whole[:, None]) & (token < end[:, None]) & (begin < end)[:, None]
    if layout.role == "key":
        codes, new_scale, new_minimum = reference.quantize_key(floats, layout.bits, layout.group_size, layout.metadata_dtype)
        grid = chosen[:, :: layout.group_size]
        grids = [x.unflatten(2, (touched, layout.token_parts)) for x in (new_scale, new_minimum)]
        chosen_grid = grid.unflatten(1, (touched, layout.token_parts))[:, None, :, :, None]
    else:
        codes, new_scale, new_minimum = reference.quantize_value(floats, layout.bits, layout.group_size, layout.metadata_dtype)
        grids = [x.unflatten(2, (touched, size)).transpose(-1, -2) for x in (new_scale, new_minimum)]
        chosen_grid = chosen.unflatten(1, (touched, size))[:, None, :, None]
    codes = torch.where(_column(chosen), codes, layout.unpack(words).flatten(2, 3))
    scale, minimum = (torch.where(chosen_grid, x, old) for x, old in zip(grids, (scale, minimum), strict=True))
    metadata = (x.flatten(3).contiguous().view(torch.int16) for x in (scale, minimum))
    return index, torch.cat([layout.pack(codes.unflatten(2, (touched, size))), *metadata], -1)


def _at(window: Tensor, index: Tensor) -> Tensor:
    """``window`` [B, H, W, D] at ``index`` [B, n]."""
    return window.gather(2, _column(index).expand(-1, window.shape[1], index.shape[1], window.shape[3]))
