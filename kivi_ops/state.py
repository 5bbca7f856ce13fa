"""The quantised cache of one attention layer as plain tensors. Must not know of models, graphs or kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kivi_ops.config import CACHE_DTYPES, KiviConfig
from kivi_ops.kernels.layout import RecordLayout, record_layout, record_layouts


@dataclass(frozen=True)
class KiviState:
    """State of one layer: B rows, H KV heads, capacity C, each tensor with a storage of its own.

    ``key_records``, ``value_records``: int16 [B, H, records, words], sealed tokens (:mod:`kivi_ops.kernels.layout`).
    ``key_window``, ``value_window``: [B, H, W, D_k or D_v] in the cache's dtype; a token's row is its index mod W.
    ``sealed``: int32 [B, 2], Key and Value boundary of each row, in the row's own token index.
    ``left_padding``: int32 [B], pads before each row's first token.
    ``length``: int64 [], columns of the padded frame written so far.
    """

    config: KiviConfig
    capacity: int
    key_records: Tensor
    value_records: Tensor
    key_window: Tensor
    value_window: Tensor
    sealed: Tensor
    left_padding: Tensor
    length: Tensor

    @classmethod
    def allocate(
        cls,
        config: KiviConfig,
        batch_size: int,
        num_kv_heads: int,
        capacity: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> KiviState:
        """An empty state. ``capacity`` counts padded positions.

        Raises:
            ValueError: a size or dtype that no state can have.
        """
        if dtype not in CACHE_DTYPES:
            raise ValueError(f"cache dtype is {dtype}; allowed: {', '.join(map(str, CACHE_DTYPES))}")
        for name, size in (("num_kv_heads", num_kv_heads), ("capacity", capacity)):
            if size < 1:
                raise ValueError(f"{name} is {size}; allowed: 1 or more")
        for name, size in (("key_dim", key_dim), ("value_dim", value_dim)):
            if not 1 <= size <= 256:
                raise ValueError(f"{name} is {size}; allowed: 1 to 256")
        metadata = config.metadata_dtype or dtype
        key, value = record_layouts(key_dim, value_dim, config.key_bits, config.value_bits, config.group_size, metadata)
        sealable = capacity - config.residual_length - config.rollback_margin
        rows = (batch_size, num_kv_heads)
        window = config.window(capacity)

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            config,
            capacity,
            key_records=zeros((*rows, key.records(capacity), key.words), torch.int16),
            value_records=zeros((*rows, value.records(sealable), value.words), torch.int16),
            key_window=zeros((*rows, window, key_dim), dtype),
            value_window=zeros((*rows, window, value_dim), dtype),
            sealed=zeros((batch_size, 2), torch.int32),
            left_padding=zeros((batch_size,), torch.int32),
            length=zeros((), torch.int64),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every state tensor by name, in the order in which the operators take them."""
        names = ("key_records", "value_records", "key_window", "value_window", "sealed", "left_padding", "length")
        return {name: getattr(self, name) for name in names}

    @property
    def dtype(self) -> torch.dtype:
        return self.key_window.dtype

    @property
    def key_layout(self) -> RecordLayout:
        config, dim = self.config, self.key_window.shape[-1]
        return record_layout("key", dim, config.key_bits, config.group_size, config.metadata_dtype or self.dtype)

    @property
    def value_layout(self) -> RecordLayout:
        config, dim = self.config, self.value_window.shape[-1]
        return record_layout("value", dim, config.value_bits, config.group_size, config.metadata_dtype or self.dtype)

    def held_bytes(self) -> int:
        """Bytes of all storages, windows and rounding included (contract section 5)."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors().values())

    def to(self, device: torch.device | str) -> KiviState:
        """This state's values on another device, itself if it is there already."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return self if moved["length"] is self.length else replace(self, **moved)

    def with_room(self, capacity: int, config: KiviConfig | None = None) -> KiviState:
        """A new state with the same tokens, another capacity, and perhaps another ``rollback_margin``. Nothing is quantised again.

        Raises:
            ValueError: the tokens held, or the Values sealed among them, do not fit; or ``config`` differs in more than its margin.
        """
        config = self.config if config is None else config
        if replace(config, rollback_margin=self.config.rollback_margin) != self.config:
            raise ValueError(f"config is {config}; allowed: {self.config} with another rollback_margin")
        held, sealed, (rows, heads) = int(self.length), self.most_sealed(), self.key_window.shape[:2]
        least = held
        if sealed:
            least = max(least, sealed + config.residual_length + config.rollback_margin)  # their records (contract section 5)
        if capacity < least:
            raise ValueError(f"capacity is {capacity}; allowed: {least} or more, for {held} tokens of which {sealed} Values are sealed")
        sizes = (self.key_window.shape[-1], self.value_window.shape[-1])
        new = KiviState.allocate(config, rows, heads, capacity, *sizes, self.dtype, self.length.device)
        for name in ("key_records", "value_records"):
            old, records = getattr(self, name), getattr(new, name)
            kept = min(old.shape[2], records.shape[2])
            records[:, :, :kept] = old[:, :, :kept]
        for name in ("sealed", "left_padding", "length"):
            getattr(new, name).copy_(getattr(self, name))
        # A window row's token is the last one before the end whose index gives that row; where it lay before is its index again.
        before, after = self.key_window.shape[2], new.key_window.shape[2]
        last = (held - 1 - self.left_padding.to(torch.int64))[:, None]
        token = last - (last - torch.arange(after, device=last.device)) % after
        source = (token % before)[:, None, :, None]
        for name in ("key_window", "value_window"):
            old = getattr(self, name)
            getattr(new, name).copy_(old.gather(2, source.expand(rows, heads, after, old.shape[-1])))
        return new

    def most_sealed(self) -> int:
        """The largest Value boundary of any row, as the next call finds it. Waits for the device."""
        if self.sealed.shape[0] == 0:
            return 0
        return int(self.sealed[:, 1].minimum((self.length - self.left_padding).clamp(min=0)).amax())

    def reset(self) -> None:
        """Forget every token, in place: addresses stay. Records and windows are left as they are; nothing reads them."""
        for tensor in (self.sealed, self.left_padding, self.length):
            tensor.zero_()

    # The operators, with this state and its configuration filled in.

    def append(self, key: Tensor, value: Tensor, position: Tensor, count: Tensor | None = None) -> None:
        """``kivi::append`` (see :mod:`kivi_ops.ops`)."""
        torch.ops.kivi.append(key, value, *self.tensors().values(), position, count, **self.config.op_kwargs(self.capacity, self.dtype))

    def update(self, key: Tensor, value: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """``kivi::update`` (see :mod:`kivi_ops.ops`)."""
        return torch.ops.kivi.update(
            key,
            value,
            *self.tensors().values(),
            position,
            **self.config.op_kwargs(self.capacity, self.dtype),
            seal=self.config.seal,
        )

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """``kivi::attention`` (see :mod:`kivi_ops.ops`)."""
        read = list(self.tensors().values())[:-1]
        return torch.ops.kivi.attention(
            query,
            key,
            value,
            *read,
            position,
            attn_mask,
            is_causal,
            scale,
            softcap,
            **self.config.read_kwargs(self.capacity, self.dtype),
            seal=self.config.seal,
        )

    def step(self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, **attention: object) -> Tensor:
        """Attention and append in the order that ``config.seal`` names; returns the attention output."""
        if self.config.seal == "before_attention":
            self.append(key, value, position)
            return self.attention(query, key, value, position, **attention)  # type: ignore[arg-type]
        output = self.attention(query, key, value, position, **attention)  # type: ignore[arg-type]
        self.append(key, value, position)
        return output
