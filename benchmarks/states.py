"""States that hold many random tokens at once, without a prefill, and what attention over them must give.

Any bit pattern is a valid code, so random words with finite scales and minima are a cache like any other. Must not know of timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kivi_ops import KiviConfig, KiviState
from kivi_ops.reference import ideal_bytes, next_boundaries


def fill(state: KiviState, tokens: int | Sequence[int]) -> None:
    """Make every row of an allocated state hold ``tokens`` random tokens (or ``tokens[b]``), in place.

    Rows of different lengths are left-padded to the longest, which becomes ``length``. Restored elements have a spread of about 1.
    """
    rows = state.sealed.shape[0]
    held = [tokens] * rows if isinstance(tokens, int) else list(tokens)
    config = state.config
    for records, layout, bits in (
        (state.key_records, state.key_layout, config.key_bits),
        (state.value_records, state.value_layout, config.value_bits),
    ):
        records.random_(-(2**15), 2**15)
        _, scale, minimum = layout.split(records)
        scale.uniform_(1 / (2**bits - 1), 3 / (2**bits - 1))
        minimum.normal_(-1.0, 0.5)
    for window in (state.key_window, state.value_window):
        window.normal_()
    sealed = [next_boundaries((0, 0), 0, count, config.residual_length, config.rollback_margin)[1] for count in held]
    state.sealed.copy_(torch.tensor(sealed, dtype=torch.int32))
    state.left_padding.copy_(max(held) - torch.tensor(held, dtype=torch.int32))
    state.length.fill_(max(held))


def random_state(
    config: KiviConfig,
    heads: int,
    tokens: Sequence[int],
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
    room: int = 256,
) -> KiviState:
    """A new state whose row b holds ``tokens[b]`` random tokens, with ``room`` for more."""
    state = KiviState.allocate(config, len(tokens), heads, max(tokens) + room, dim, dim, dtype, device)
    fill(state, tokens)
    return state


def needed_bytes(config: KiviConfig, heads: int, tokens: Sequence[int], dim: int, dtype: torch.dtype) -> float:
    """Bytes that attention over such a state must read (contract section 5, first formula)."""
    total = 0.0
    for count in tokens:
        key_end, value_end = next_boundaries((0, 0), 0, count, config.residual_length, config.rollback_margin)[1]
        total += heads * ideal_bytes(config, count, count - key_end, count - value_end, dim, dim, dtype)
    return total


def exact_attention(state: KiviState, row: int, head: int, query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Tensor:
    """Causal attention of one row and KV head in float64.

    The tokens come from ``kivi::update``, which restores them by other code than the attention kernels, on a copy in float32.

    Args:
        query, key, value: as for ``kivi::attention``, of all rows and heads.

    Returns:
        float64 [query heads of this KV head, S, D_v].
    """
    one = (slice(row, row + 1), slice(head, head + 1))
    copies = {name: getattr(state, name)[one].clone() for name in ("key_records", "value_records")}
    windows = {name: getattr(state, name)[one].float() for name in ("key_window", "value_window")}
    counts = {name: getattr(state, name)[row : row + 1].clone() for name in ("sealed", "left_padding")}
    config = replace(state.config, metadata_dtype=state.config.metadata_dtype or state.dtype)
    alone = replace(state, config=config, **copies, **windows, **counts, length=state.length.clone())
    keys, values = alone.update(key[one].float(), value[one].float(), position.clone())
    start, padding, new = int(position), int(state.left_padding[row]), key.shape[2]
    repeats = query.shape[1] // key.shape[1]
    k, v = (x[0, 0, padding : start + new].double() for x in (keys, values))
    q = query[row, head * repeats : (head + 1) * repeats].double()
    logits = q @ k.T * query.shape[-1] ** -0.5
    later = torch.arange(start + new - padding, device=k.device) > start - padding + torch.arange(new, device=k.device)[:, None]
    return logits.masked_fill(later, float("-inf")).softmax(-1) @ v
