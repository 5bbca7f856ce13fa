"""What the tests share: random states, the valid part of a state as plain arrays, and comparisons that say what differed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kivi_ops import KiviConfig, KiviState
from kivi_ops.reference import ReferenceCache, ReferenceRow


def bits_of(x: Tensor) -> Tensor:
    """The same bytes as integers, so that NaN equals NaN and -0.0 differs from 0.0."""
    if not x.dtype.is_floating_point:
        return x
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


def valid_rows(state: KiviState, tokens: Sequence[int]) -> list[dict[str, Tensor]]:
    """Per row what is valid in ``state``, unpacked, when the rows hold ``tokens`` tokens: the part that contract section 3 promises."""
    rows = []
    for b, (key_end, value_end) in enumerate(state.sealed.tolist()):
        row: dict[str, Tensor] = {"sealed": torch.tensor([key_end, value_end])}
        for name, layout, end in (("key", state.key_layout, key_end), ("value", state.value_layout, value_end)):
            records, window = getattr(state, f"{name}_records")[b].cpu(), getattr(state, f"{name}_window")[b].cpu()
            words, scale, minimum = layout.split(records)
            row[f"{name}_codes"] = layout.unpack(words).flatten(1, 2)[:, :end]
            if name == "key":
                groups = -(-end // layout.group_size)
                row["key_scale"], row["key_min"] = (x.flatten(1, 2)[:, :groups] for x in (scale, minimum))
            else:
                row["value_scale"], row["value_min"] = (x.transpose(-1, -2).flatten(1, 2)[:, :end] for x in (scale, minimum))
            row[f"{name}_window"] = window[:, torch.arange(end, max(end, tokens[b])) % window.shape[1]]
        rows.append(row)
    return rows


def reference_rows(cache: ReferenceCache) -> list[dict[str, Tensor]]:
    """The same of a reference cache."""

    def one(row: ReferenceRow) -> dict[str, Tensor]:
        (key_end, value_end), groups = row.sealed, -(-row.sealed[0] // cache.config.group_size)
        return {
            "sealed": torch.tensor(row.sealed),
            "key_codes": row.key_codes[:, :key_end],
            "key_scale": row.key_scale[:, :groups],
            "key_min": row.key_min[:, :groups],
            "key_window": row.key[:, key_end : row.tokens],
            "value_codes": row.value_codes[:, :value_end],
            "value_scale": row.value_scale[:, :value_end],
            "value_min": row.value_min[:, :value_end],
            "value_window": row.value[:, value_end : row.tokens],
        }

    return [one(row) for row in cache.rows]


def assert_same_rows(actual: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert len(actual) == len(expected)
    for b, (a, e) in enumerate(zip(actual, expected, strict=True)):
        for name in e:
            assert a[name].shape == e[name].shape, f"row {b}: {name} is {list(a[name].shape)}, expected {list(e[name].shape)}"
            same = bits_of(a[name]) == bits_of(e[name])
            assert same.all(), f"row {b}: {name} differs in {int((~same).sum())} of {same.numel()} places"


def assert_close(name: str, actual: Tensor, expected: Tensor, ratio: float) -> None:
    """Relative norm of the error at most ``ratio``; NaN must be where NaN is expected."""
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert actual.shape == expected.shape, f"{name}: {list(actual.shape)}, expected {list(expected.shape)}"
    assert torch.equal(actual.isnan(), expected.isnan()), (
        f"{name}: NaN in {int(actual.isnan().sum())} places, not {int(expected.isnan().sum())}"
    )
    actual, expected = actual.nan_to_num(), expected.nan_to_num()
    error, size = (actual - expected).norm().item(), expected.norm().item()
    assert error <= ratio * max(size, 1e-30) or error == 0.0, f"{name}: relative error {error / max(size, 1e-30):.2e}, allowed {ratio:.0e}"


# Contract section 7, attention against float64 over the same state.
ATTENTION_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random_tokens(
    rows: int, heads: int, tokens: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu"
) -> Tensor:
    """Keys or Values [B, H, T, D] around 5, so that a masked lane read as 0 moves a minimum (lmdeploy#4849)."""
    generator = torch.Generator().manual_seed(seed)
    return (5 + torch.randn(rows, heads, tokens, dim, generator=generator)).to(dtype).to(device)


def poisoned_state(
    config: KiviConfig,
    rows: int,
    heads: int,
    capacity: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    left_padding: Sequence[int] | None = None,
    device: str = "cpu",
) -> KiviState:
    """An empty state whose unwritten memory is all NaN: nothing may read it."""
    state = KiviState.allocate(config, rows, heads, capacity, key_dim, value_dim, dtype, device)
    for records in (state.key_records, state.value_records):
        records.fill_(-1)  # 0xFFFF is NaN in every metadata dtype
    for window in (state.key_window, state.value_window):
        window.fill_(float("nan"))
    if left_padding is not None:
        state.left_padding.copy_(torch.tensor(left_padding, dtype=torch.int32))
    return state


def reference_of(state: KiviState, left_padding: Sequence[int] | None = None) -> ReferenceCache:
    """An empty reference cache of the same shape and configuration."""
    rows, heads, _, key_dim = state.key_window.shape
    return ReferenceCache(
        state.config, rows, heads, state.capacity, key_dim, state.value_window.shape[-1], state.dtype, list(left_padding or []) or None
    )
