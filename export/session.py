"""A conversation over compiled or exported steps that share one quantised cache: counts tokens, checks calls, generates, saves.

Must not know where the steps come from, nor of transformers: an exported program runs without it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kivi_ops.kernels.layout import NAME, VERSION

_RESET = ("sealed", "length")  # all that is left of a state whose tokens are forgotten


class Session:
    """What runs a model step by step.

    Args:
        steps: programs by name, called as ``step(input_ids int64 [B, S], start int64 [])`` or with ``left_padding int32 [B]`` besides.
            ``"decode"``, where there is one, serves calls of a single token, any other name all calls.
        padded: the names of those that take ``left_padding``.
        state: every tensor that the steps change, by its name in the program.
        batch_size: B. capacity: C, in columns of the padded frame.
        format: how the state is quantised and laid out, as plain JSON data: a saved state fits where that is equal.
    """

    def __init__(
        self,
        steps: Mapping[str, Callable[..., Any]],
        padded: frozenset[str],
        state: Mapping[str, Tensor],
        batch_size: int,
        capacity: int,
        format: Mapping[str, Any],
    ) -> None:
        self.batch_size, self.capacity, self.format = batch_size, capacity, dict(format)
        self._steps, self._padded, self._state = dict(steps), padded, dict(state)
        self.device = next(iter(self._state.values())).device
        self._held = 0
        self._left_padding = torch.zeros(batch_size, dtype=torch.int32, device=self.device)

    # -------------------------------------------------------------------------------------------------------- one call

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, left_padding: Tensor | None = None) -> Tensor:
        """Logits of the next tokens, which are written after those held so far.

        Args:
            input_ids: int64 [B, S], 1 <= S <= C less what is held.
            left_padding: int [B], the pads before each row's first token, in the first call after a reset; None for none.

        Raises:
            ValueError, TypeError: another number of rows, another dtype, more tokens than there is room for, padding in a later call.
        """
        self._check_ids(input_ids)
        self._check_room(input_ids.shape[1])
        self._set_padding(left_padding)
        name = "decode" if "decode" in self._steps and input_ids.shape[1] == 1 and self._held else self._general
        start = torch.full((), self._held, dtype=torch.int64, device=self.device)
        # Contiguous, since compiled steps go by the strides that they were compiled for, unchecked.
        given = (input_ids.to(self.device).contiguous(), start, *([self._left_padding] if name in self._padded else []))
        logits = self._steps[name](*given)
        self._held += input_ids.shape[1]
        return logits

    @property
    def _general(self) -> str:
        return next((name for name in self._steps if name != "decode"), "decode")

    def _check_ids(self, input_ids: Tensor) -> None:
        if not isinstance(input_ids, Tensor) or input_ids.dtype != torch.int64:
            raise TypeError(f"input_ids is {getattr(input_ids, 'dtype', type(input_ids).__name__)}; allowed: a torch.int64 tensor")
        if input_ids.dim() != 2 or input_ids.shape[1] < 1:
            raise ValueError(f"input_ids has shape {list(input_ids.shape)}; allowed: [{self.batch_size}, S] with S of 1 or more")
        if input_ids.shape[0] != self.batch_size:
            raise ValueError(
                f"input_ids has {input_ids.shape[0]} rows; allowed: {self.batch_size}, the batch_size that the model was exported with"
            )

    def _check_room(self, new_tokens: int) -> None:
        if self._held + new_tokens > self.capacity:
            raise ValueError(
                f"{self._held} tokens are held and {new_tokens} more are wanted; allowed: {self.capacity} in all, the max_cache_len that "
                "the model was exported with: reset() it, or export it with a larger one"
            )

    def _set_padding(self, left_padding: Tensor | None) -> None:
        if left_padding is None:
            if self._held == 0:
                self._left_padding.zero_()
            return
        if not isinstance(left_padding, Tensor) or left_padding.dtype.is_floating_point or left_padding.shape != (self.batch_size,):
            shape = list(left_padding.shape) if isinstance(left_padding, Tensor) else left_padding
            raise ValueError(f"left_padding is {shape}; allowed: an int tensor [{self.batch_size}]")
        if self._held:
            raise ValueError(f"left_padding was given while {self._held} tokens are held; allowed: in the first call, or after reset()")
        if not self._padded and bool(left_padding.any()):
            raise ValueError("left_padding was given; allowed: None, for these programs take no padding")
        if not 0 <= int(left_padding.min()) <= int(left_padding.max()) <= self.capacity:
            raise ValueError(f"left_padding is {left_padding.tolist()}; allowed: 0 to {self.capacity}")
        self._left_padding.copy_(left_padding)

    # ------------------------------------------------------------------------------------------------------ generation

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        eos_token_id: int | None = None,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """New tokens [B, N] after ``input_ids``, which follow what is held: the next turn of a conversation needs its own tokens only.

        The cache then holds all that was given and returned. N is ``max_new_tokens``, or less where every row ended; a row that ended is
        filled up with ``eos_token_id``.

        Args:
            input_ids: int64 [B, S]. attention_mask: [B, S], zeros before each row's first token; in the first call alone.
            temperature: 0 takes the likeliest token.

        Raises:
            ValueError, TypeError: as for a call; no room for all the new tokens.
        """
        tokens = list(
            self.stream(
                input_ids,
                max_new_tokens,
                attention_mask=attention_mask,
                eos_token_id=eos_token_id,
                temperature=temperature,
                generator=generator,
            )
        )
        return torch.stack(tokens, 1) if tokens else input_ids.new_empty((self.batch_size, 0))

    def stream(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        eos_token_id: int | None = None,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """:meth:`generate`, one int64 [B] at a time. Stopping early is fine: a token is held once the next is asked for."""
        self._check_ids(input_ids)
        if max_new_tokens < 0 or temperature < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens} and temperature {temperature}; allowed: 0 or more")
        self._check_room(input_ids.shape[1] + max_new_tokens)
        return self._stream(input_ids, self._counted(attention_mask, input_ids), max_new_tokens, eos_token_id, temperature, generator)

    def _stream(
        self,
        input_ids: Tensor,
        left_padding: Tensor | None,
        max_new_tokens: int,
        eos_token_id: int | None,
        temperature: float,
        generator: torch.Generator | None,
    ) -> Iterator[Tensor]:
        logits = self(input_ids, left_padding)
        ended = torch.zeros(self.batch_size, dtype=torch.bool, device=logits.device)
        for _ in range(max_new_tokens):
            token = _choose(logits[:, -1], temperature, generator)
            if eos_token_id is not None:
                token = torch.where(ended, eos_token_id, token)
                ended = ended | (token == eos_token_id)
            yield token.to(input_ids.device)
            logits = self(token[:, None])
            if eos_token_id is not None and bool(ended.all()):
                return

    def _counted(self, attention_mask: Tensor | None, input_ids: Tensor) -> Tensor | None:
        """The pads that a mask shows, None for none."""
        if attention_mask is None:
            return None
        if attention_mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask has shape {list(attention_mask.shape)}; allowed: {list(input_ids.shape)}, as input_ids")
        seen = attention_mask != 0
        padding = (seen.cumsum(1) == 0).sum(1)
        if not bool((seen.sum(1) == seen.shape[1] - padding).all()):
            raise ValueError("attention_mask hides a token after a row's first one; allowed: zeros before it only")
        return padding if bool(padding.any()) else None

    # ------------------------------------------------------------------------------------------------------ life cycle

    @property
    def tokens_held(self) -> int:
        """Columns written so far, pads counted."""
        return self._held

    def held_bytes(self) -> int:
        """Bytes of all that the steps change: the quantised cache, windows and rounding included."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._state.values())

    def reset(self) -> None:
        """Forget every token and all padding."""
        for name, tensor in self._state.items():
            if name.rpartition(".")[2] in _RESET:
                tensor.zero_()
        self._held = 0

    def rewind(self, length: int) -> None:
        """Forget all but the first ``length`` columns. A token that was sealed stays quantised (contract section 3).

        Raises:
            ValueError: more than are held.
        """
        if not 0 <= length <= self._held:
            raise ValueError(f"length is {length}; allowed: 0 to {self._held}, the tokens held")
        self._held = length

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation so far to a file, to go on with it by :meth:`load_state`, in another process too."""
        tensors = {name: tensor.cpu() for name, tensor in self._state.items()}
        head = json.dumps(self._head())
        torch.save({"kivi": head, "held": self._held, "left_padding": self._left_padding.cpu(), "tensors": tensors}, path)

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Go on with a saved conversation in place of the present one.

        Raises:
            ValueError: no state, or one of another layout, configuration, capacity or batch; nothing is changed then.
        """
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(saved, dict) or "kivi" not in saved:
            raise ValueError(f"{os.fspath(path)} holds no saved state; allowed: a file of save_state()")
        found, wanted = json.loads(saved["kivi"]), self._head()
        for name, value in wanted.items():
            if found.get(name) != value:
                raise ValueError(f"the state in {os.fspath(path)} has {name} {found.get(name)!r}; allowed: {value!r}, as this model")
        tensors = saved["tensors"]
        for name, tensor in self._state.items():
            given = tensors.get(name)
            if given is None or given.shape != tensor.shape or given.dtype != tensor.dtype:
                shape = "missing" if given is None else f"{given.dtype} {list(given.shape)}"
                raise ValueError(f"{name} is {shape} in {os.fspath(path)}; allowed: {tensor.dtype} {list(tensor.shape)}, as this model")
        for name, tensor in self._state.items():
            tensor.copy_(tensors[name])
        self._left_padding.copy_(saved["left_padding"])
        self._held = saved["held"]

    def _head(self) -> dict[str, Any]:
        return {"layout": [NAME, VERSION], "batch_size": self.batch_size, "capacity": self.capacity, **self.format}


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """A token for each row of logits [B, V]: int64 [B]."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)[:, 0]
