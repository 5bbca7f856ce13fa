"""One history given to the kernels and to the reference, or to the CPU implementation, so that tests read as a list of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from helpers import (
    ATTENTION_TOLERANCE,
    assert_close,
    assert_same_rows,
    poisoned_state,
    random_tokens,
    reference_of,
    reference_rows,
    valid_rows,
)
from torch import Tensor

from kivi_ops import KiviConfig, KiviState
from kivi_ops.kernels import launch
from kivi_ops.reference import ReferenceCache


def launch_append(state: KiviState, key: Tensor, value: Tensor, position: Tensor, count: Tensor | None = None) -> None:
    launch.append(key, value, *state.tensors().values(), position, count, **state.config.op_kwargs(state.capacity, state.dtype))


def launch_update(state: KiviState, key: Tensor, value: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    format = state.config.op_kwargs(state.capacity, state.dtype)
    return launch.update(key, value, *state.tensors().values(), position, seal=state.config.seal, **format)


def launch_attention(
    state: KiviState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    kernel: str = "auto",
) -> Tensor:
    read = tuple(state.tensors().values())[:-1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    format = state.config.read_kwargs(state.capacity, state.dtype)
    options = {"seal": state.config.seal, "kernel": kernel, **format}
    return launch.attention(query, key, value, *read, position, attn_mask, is_causal, scale, softcap, **options)


def tokens_held(state: KiviState, end: int) -> list[int]:
    """Tokens of each row after columns 0 .. end were written."""
    return [max(0, min(end, state.capacity) - padding) for padding in state.left_padding.tolist()]


class Twin:
    """A poisoned state for the kernels and a reference cache, with random Keys, Values and queries for ``tokens`` columns."""

    def __init__(
        self,
        device: str,
        config: KiviConfig,
        tokens: int,
        *,
        heads: int = 1,
        repeats: int = 1,
        key_dim: int = 32,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        capacity: int | None = None,
        left_padding: Sequence[int] = (0,),
        seed: int = 0,
        kernel: str = "auto",
    ) -> None:
        rows, value_dim, capacity = len(left_padding), value_dim or key_dim, capacity or tokens
        self.device, self.kernel = device, kernel
        self.state = poisoned_state(config, rows, heads, capacity, key_dim, value_dim, dtype, left_padding, device)
        self.reference: ReferenceCache = reference_of(self.state, left_padding)
        self.key = random_tokens(rows, heads, tokens, key_dim, dtype, seed)
        self.value = random_tokens(rows, heads, tokens, value_dim, dtype, seed + 1)
        self.query = random_tokens(rows, heads * repeats, tokens, key_dim, dtype, seed + 2) - 5
        for b, padding in enumerate(left_padding):
            for x in (self.key, self.value):
                x[b, :, :padding] = float("nan")  # pads are not tokens: nothing may depend on them

    def new(self, start: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value of columns start .. start + count, on the CPU."""
        columns = slice(start, start + count)
        return self.query[:, :, columns], self.key[:, :, columns], self.value[:, :, columns]

    def append(self, start: int, count: int) -> None:
        _, key, value = self.new(start, count)
        launch_append(self.state, key.to(self.device), value.to(self.device), torch.tensor(start, device=self.device))
        self.reference.append(key, value, start)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Attention by the kernel under test."""
        return launch_attention(self.state, query, key, value, position, attn_mask, kernel=self.kernel, **options)

    def step(self, start: int, count: int, **attention: Any) -> Tensor:
        """Attention and append in the configured order, the output held against the reference's."""
        query, key, value = self.new(start, count)
        expected = self.reference.attend(query, key, value, start, **attention)
        position = torch.tensor(start, device=self.device)
        query, key, value = (x.to(self.device) for x in (query, key, value))
        attention = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in attention.items()}
        if self.state.config.seal == "before_attention":
            launch_append(self.state, key, value, position)
        output = self.attend(query, key, value, position, **attention)
        if self.state.config.seal == "after_attention":
            launch_append(self.state, key, value, position)
        assert_close(f"attention at {start} + {count}", output, expected, ATTENTION_TOLERANCE[self.state.dtype])
        return output

    def check(self, end: int) -> None:
        """The valid part of the state is the reference's, bit for bit."""
        assert_same_rows(valid_rows(self.state, tokens_held(self.state, end)), reference_rows(self.reference))
        assert self.state.length.item() == end
