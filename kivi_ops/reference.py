"""The contract as code: quantisation, windows, mixed attention and memory in plain torch. The specification every test compares with.

Written to be read beside the contract, one section after the other, and to be obviously right rather than fast. Attention runs in
float64; codes are chosen in float32, as everywhere. Must not know of packed memory, kernels, devices or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kivi_ops.config import KiviConfig

# ------------------------------------------------------------------------------------------------------- 1. one group


def quantize_group(x: Tensor, bits: int, metadata_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise groups that lie along the last axis (contract section 1).

    Args:
        x: [..., G], any float dtype; arithmetic is float32.

    Returns:
        codes uint8 [..., G]; scale and min [...] in ``metadata_dtype``, NaN for a group that is not finite.
    """
    x = x.to(torch.float32)
    steps = float(2**bits - 1)
    largest = torch.finfo(metadata_dtype).max
    finite = x.isfinite().all(-1)
    minimum = x.amin(-1).clamp(-largest, largest)
    minimum = torch.where(minimum == 0, 0.0, minimum)  # never -0.0: min(-0.0, 0.0) differs between machines
    maximum = x.amax(-1).clamp(-largest, largest)
    scale = ((maximum - minimum) / steps).clamp(max=largest).to(metadata_dtype)
    minimum = minimum.to(metadata_dtype)
    constant = scale == 0
    scale = torch.where(constant, 1.0, scale).to(metadata_dtype)
    ratio = (x - minimum.to(torch.float32)[..., None]) / scale.to(torch.float32)[..., None]
    codes = ratio.round().clamp(0, steps)  # torch rounds half to even
    codes = torch.where((constant | ~finite)[..., None], 0.0, codes).to(torch.uint8)
    nan = torch.full((), float("nan"), dtype=metadata_dtype, device=x.device)
    return codes, torch.where(finite, scale, nan), torch.where(finite, minimum, nan)


def restore(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """min + scale * code in float32: one multiply, rounded, then one add. All arguments broadcast; scale and min are the stored ones."""
    return minimum.to(torch.float32) + scale.to(torch.float32) * codes.to(torch.float32)


# ------------------------------------------------------------------------------------ 2. which elements share a grid


def _whole_groups(x: Tensor, group_size: int) -> Tensor:
    """[..., n] -> [..., ceil(n / G), G], a short last group filled by repeating its last element, which moves neither min nor max."""
    size = x.shape[-1]
    groups = -(-size // group_size)
    index = torch.arange(groups * group_size, device=x.device).clamp(max=size - 1)
    return x.index_select(-1, index).unflatten(-1, (groups, group_size))


def quantize_value(value: Tensor, bits: int, group_size: int, metadata_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Per token: groups of G channels. [..., T, D] -> codes uint8 [..., T, D], scale and min [..., T, ceil(D / G)]."""
    if value.numel() == 0:
        empty = value.new_empty((*value.shape[:-1], -(-value.shape[-1] // group_size)), dtype=metadata_dtype)
        return value.to(torch.uint8), empty, empty.clone()
    codes, scale, minimum = quantize_group(_whole_groups(value, group_size), bits, metadata_dtype)
    return codes.flatten(-2)[..., : value.shape[-1]], scale, minimum


def quantize_key(key: Tensor, bits: int, group_size: int, metadata_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Per channel: groups of G tokens. [..., T, D] -> codes uint8 [..., T, D], scale and min [..., ceil(T / G), D]."""
    codes, scale, minimum = quantize_value(key.transpose(-1, -2), bits, group_size, metadata_dtype)
    return codes.transpose(-1, -2), scale.transpose(-1, -2), minimum.transpose(-1, -2)


def restore_value(codes: Tensor, scale: Tensor, minimum: Tensor, group_size: int) -> Tensor:
    """The inverse of :func:`quantize_value`: float32 [..., T, D]."""
    channels = torch.arange(codes.shape[-1], device=codes.device) // group_size
    return restore(codes, scale[..., channels], minimum[..., channels])


def restore_key(codes: Tensor, scale: Tensor, minimum: Tensor, group_size: int) -> Tensor:
    """The inverse of :func:`quantize_key`: float32 [..., T, D]."""
    tokens = torch.arange(codes.shape[-2], device=codes.device) // group_size
    return restore(codes, scale[..., tokens, :], minimum[..., tokens, :])


# --------------------------------------------------------------------------------------------------------- 3. windows


def next_boundaries(
    sealed: tuple[int, int], start: int, end: int, residual_length: int, rollback_margin: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The (Key, Value) boundaries of a row as a call finds them, and as it leaves them (contract section 3).

    Args:
        sealed: boundaries before the call, in tokens. start, end: tokens before and after the new ones, start <= end.
    """
    key, value = min(sealed[0], start), min(sealed[1], start)  # a smaller start is a rollback
    settled = max(0, end - rollback_margin)
    return (key, value), (
        max(key, settled // residual_length * residual_length),
        max(value, settled - residual_length),
    )


@dataclass
class View:
    """What one row's attention sees, oldest token first: [H, n, D] each. The float parts follow the sealed ones."""

    key_sealed: Tensor
    key_float: Tensor
    value_sealed: Tensor
    value_float: Tensor

    def key(self) -> Tensor:
        return torch.cat([self.key_sealed.double(), self.key_float.double()], -2)

    def value(self) -> Tensor:
        return torch.cat([self.value_sealed.double(), self.value_float.double()], -2)


class ReferenceRow:
    """One batch row: all its tokens in float, and the codes and grids of those that are sealed, unpacked.

    ``key_axis="token"`` quantises Keys along the wrong axis, to show what that costs.
    """

    def __init__(
        self, config: KiviConfig, heads: int, capacity: int, key_dim: int, value_dim: int, dtype: torch.dtype, key_axis: str
    ) -> None:
        if key_axis not in ("channel", "token"):
            raise ValueError(f"key_axis is {key_axis!r}; allowed: 'channel', 'token'")
        self.config, self.capacity, self.key_axis = config, capacity, key_axis
        size = config.group_size
        metadata = config.metadata_dtype or dtype
        nan = float("nan")
        key_grid = (heads, -(-capacity // size), key_dim) if key_axis == "channel" else (heads, capacity, -(-key_dim // size))
        value_grid = (heads, capacity, -(-value_dim // size))
        self.key = torch.full((heads, capacity, key_dim), nan, dtype=dtype)
        self.value = torch.full((heads, capacity, value_dim), nan, dtype=dtype)
        self.key_codes = torch.zeros(self.key.shape, dtype=torch.uint8)
        self.value_codes = torch.zeros(self.value.shape, dtype=torch.uint8)
        self.key_scale, self.key_min = (torch.full(key_grid, nan, dtype=metadata) for _ in range(2))
        self.value_scale, self.value_min = (torch.full(value_grid, nan, dtype=metadata) for _ in range(2))
        self.sealed = (0, 0)
        self.tokens = 0

    def restored_key(self, end: int) -> Tensor:
        """Sealed Keys of the tokens before ``end``, float32 [H, end, D_k]."""
        size = self.config.group_size
        if self.key_axis == "token":
            return restore_value(self.key_codes[:, :end], self.key_scale[:, :end], self.key_min[:, :end], size)
        groups = -(-end // size)
        return restore_key(self.key_codes[:, :end], self.key_scale[:, :groups], self.key_min[:, :groups], size)

    def restored_value(self, end: int) -> Tensor:
        """Sealed Values of the tokens before ``end``, float32 [H, end, D_v]."""
        grids = self.value_scale[:, :end], self.value_min[:, :end]
        return restore_value(self.value_codes[:, :end], *grids, self.config.group_size)

    def view(self, tokens: int, sealed: tuple[int, int]) -> View:
        """The first ``tokens`` tokens, sealed below each boundary and float from there on."""
        key_end, value_end = sealed
        return View(
            self.restored_key(key_end),
            self.key[:, key_end:tokens],
            self.restored_value(value_end),
            self.value[:, value_end:tokens],
        )

    def write(self, key: Tensor, value: Tensor, start: int) -> None:
        """Store new tokens ``start`` .. in float: [H, n, D]. Sealing is :meth:`seal`, so that attention can come between."""
        end = start + key.shape[1]
        self.key[:, start:end], self.value[:, start:end] = key, value
        self.tokens = end

    def seal(self, start: int) -> None:
        """Move the boundaries after tokens ``start`` .. were written, and quantise what they passed."""
        config, size = self.config, self.config.group_size
        (key, value), (key_end, value_end) = next_boundaries(
            self.sealed, start, self.tokens, config.residual_length, config.rollback_margin
        )
        if key < key_end and self.key_axis == "token":
            grid = quantize_value(self.key[:, key:key_end], config.key_bits, size, self.key_scale.dtype)
            self.key_codes[:, key:key_end], self.key_scale[:, key:key_end], self.key_min[:, key:key_end] = grid
        elif key < key_end:
            # The group that holds the old boundary is quantised again, from its restored and its new values.
            first = key // size * size
            floats = torch.cat([self.restored_key(key)[:, first:], self.key[:, key:key_end].float()], 1)
            grid = quantize_key(floats, config.key_bits, size, self.key_scale.dtype)
            groups = slice(first // size, key_end // size)
            self.key_codes[:, first:key_end], self.key_scale[:, groups], self.key_min[:, groups] = grid
        if value < value_end:
            grid = quantize_value(self.value[:, value:value_end], config.value_bits, size, self.value_scale.dtype)
            tokens = slice(value, value_end)
            self.value_codes[:, tokens], self.value_scale[:, tokens], self.value_min[:, tokens] = grid
        self.sealed = (key_end, value_end)


class ReferenceCache:
    """A KIVI cache of B rows as :class:`ReferenceRow` objects; positions are in the padded frame, one per row."""

    def __init__(
        self,
        config: KiviConfig,
        batch_size: int,
        heads: int,
        capacity: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype = torch.float32,
        left_padding: list[int] | None = None,
        key_axis: str = "channel",
    ) -> None:
        self.config, self.capacity, self.dtype = config, capacity, dtype
        self.left_padding = left_padding or [0] * batch_size
        self.rows = [ReferenceRow(config, heads, capacity, key_dim, value_dim, dtype, key_axis) for _ in range(batch_size)]

    def step(self, key: Tensor, value: Tensor, position: list[int] | int) -> list[View | None]:
        """Append S new tokens, [B, H, S, D], and return each row's view for this step's attention, None where it passed the capacity."""
        starts = [position] * len(self.rows) if isinstance(position, int) else position
        views: list[View | None] = []
        for row, padding, start, new_key, new_value in zip(self.rows, self.left_padding, starts, key, value, strict=True):
            pads = max(0, padding - start)  # of this call's columns; they are not tokens
            room = self.capacity - start  # columns past the capacity are dropped
            first = max(0, min(start, self.capacity) - padding)
            row.write(new_key[:, pads : max(0, room)], new_value[:, pads : max(0, room)], first)
            held = min(row.sealed[0], first), min(row.sealed[1], first)
            view = row.view(row.tokens, held) if self.config.seal == "after_attention" else None
            row.seal(first)
            if view is None:
                view = row.view(row.tokens, row.sealed if first > 0 else (0, 0))
            views.append(view if new_key.shape[1] <= room else None)
        return views

    def append(self, key: Tensor, value: Tensor, position: list[int] | int) -> None:
        """:meth:`step` without its view."""
        self.step(key, value, position)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position: list[int] | int,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """One step whole: append, and attend in the configured order. [B, Hq, S, D_v] in float64."""
        starts = [position] * len(self.rows) if isinstance(position, int) else position
        output = []
        for b, view in enumerate(self.step(key, value, position)):
            heads, new_tokens = query.shape[1], query.shape[2]
            if view is None:
                output.append(torch.full((heads, new_tokens, value.shape[-1]), float("nan"), dtype=torch.float64))
                continue
            tokens, padding = self.rows[b].tokens, self.left_padding[b]
            mask = None if attn_mask is None else attn_mask.expand(len(self.rows), heads, new_tokens, attn_mask.shape[-1])[b]
            visible = visibility(mask, is_causal, starts[b] - padding, new_tokens, tokens, padding)
            repeats = heads // key.shape[1]
            parts = (view.key_sealed, view.key_float, view.value_sealed, view.value_float)
            key_sealed, key_float, value_sealed, value_float = (x.double().repeat_interleave(repeats, 0) for x in parts)
            output.append(mixed_attention(query[b], key_sealed, key_float, value_sealed, value_float, visible, scale, softcap))
        return torch.stack(output) if output else query.new_zeros((*query.shape[:3], value.shape[-1]), dtype=torch.float64)


# ----------------------------------------------------------------------------------------------------- 4. one softmax


def visibility(mask: Tensor | None, is_causal: bool, start: int, new_tokens: int, tokens: int, padding: int) -> Tensor | None:
    """What is added to one row's logits, float64 [..., S, tokens] (-inf hides), or None if every token is seen.

    Args:
        mask: [..., S, columns] bool or float in the padded frame (column = token + padding), 1 wide or any width.
        start: tokens before this call's first column (negative if that column is a pad).
    """
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=torch.float64)
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask.double()
        if bias.shape[-1] == 1:
            return bias.expand(*bias.shape[:-1], tokens)
        missing = max(0, tokens + padding - bias.shape[-1])
        return torch.nn.functional.pad(bias, (0, missing), value=-torch.inf)[..., padding : padding + tokens]
    if is_causal:
        last = start + torch.arange(new_tokens)[:, None]
        return torch.zeros(new_tokens, tokens, dtype=torch.float64).masked_fill(torch.arange(tokens) > last, -torch.inf)
    return None


def mixed_attention(
    query: Tensor,
    key_sealed: Tensor,
    key_float: Tensor,
    value_sealed: Tensor,
    value_float: Tensor,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One softmax over sealed and float tokens, in float64 (contract section 4).

    Args:
        query: [..., S, D_k]; the rest [..., n, D]. Keys and Values may be cut at different tokens; their totals must agree.
        bias: added to the logits, [..., S, n] with -inf for hidden tokens.

    Raises:
        ValueError: Keys and Values are not of the same number of tokens, as when Values are cut at the Key boundary.
    """
    keys, values = key_sealed.shape[-2] + key_float.shape[-2], value_sealed.shape[-2] + value_float.shape[-2]
    if keys != values:
        raise ValueError(
            f"Keys are {key_sealed.shape[-2]} + {key_float.shape[-2]} tokens and Values {value_sealed.shape[-2]} + "
            f"{value_float.shape[-2]}; allowed: the same total (the Key boundary must not cut the Values)"
        )
    key = torch.cat([key_sealed.double(), key_float.double()], -2)
    logits = query.double() @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias
    if keys == 0:
        return logits.new_zeros((*logits.shape[:-1], value_sealed.shape[-1]))
    weights = logits.softmax(-1)
    weights = torch.where((logits == -torch.inf).all(-1, keepdim=True), 0.0, weights)  # a query that sees nothing gives 0
    cut = value_sealed.shape[-2]  # the Values' own boundary
    return weights[..., :cut] @ value_sealed.double() + weights[..., cut:] @ value_float.double()


def error_terms(query: Tensor, key: Tensor, value: Tensor, key_hat: Tensor, value_hat: Tensor) -> tuple[Tensor, Tensor]:
    """The two parts of the output error: (p_hat - p) V, the Key error's damage, and p_hat (V_hat - V), the Value error's.

    All [..., tokens, D], every token visible; float64 [..., S, D_v] each. Their sum is the whole error (contract section 4).
    """
    query, key, value, key_hat, value_hat = (x.double() for x in (query, key, value, key_hat, value_hat))
    weights, weights_hat = (((query @ k.transpose(-1, -2)) * query.shape[-1] ** -0.5).softmax(-1) for k in (key, key_hat))
    return (weights_hat - weights) @ value, weights_hat @ (value_hat - value)


# ---------------------------------------------------------------------------------------------------------- 5. memory


def sealed_bytes(config: KiviConfig, key_tokens: float, value_tokens: float, key_dim: int, value_dim: int, dtype: torch.dtype) -> float:
    """Bytes of sealed tokens of one KV head and row: codes, scales and minima."""
    e = (config.metadata_dtype or dtype).itemsize
    size = config.group_size
    key = key_tokens * key_dim * (config.key_bits / 8 + 2 * e / size)
    return key + value_tokens * (value_dim * config.value_bits / 8 + 2 * e * -(-value_dim // size))


def ideal_bytes(
    config: KiviConfig, tokens: int, key_float: int, value_float: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> float:
    """Bytes of T tokens of one KV head and row with rK and rV of them in float: contract section 5, first formula."""
    floats = (key_float * key_dim + value_float * value_dim) * dtype.itemsize
    return sealed_bytes(config, tokens - key_float, tokens - value_float, key_dim, value_dim, dtype) + floats


def held_bytes(
    config: KiviConfig, capacity: int, key_record: int, value_record: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> float:
    """Bytes a cache holds for one KV head and row: contract section 5, second formula (up to 64 bytes a row and layer come on top).

    Args:
        key_record, value_record: tokens of one record; capacities are rounded up to whole records.
    """
    key_tokens = -(-capacity // key_record) * key_record
    sealable = max(0, capacity - config.residual_length - config.rollback_margin)
    value_tokens = -(-sealable // value_record) * value_record
    windows = config.window(capacity) * (key_dim + value_dim) * dtype.itemsize
    return sealed_bytes(config, key_tokens, value_tokens, key_dim, value_dim, dtype) + windows
