"""A small decoder of our own with a float cache in buffers (gpt-fast's way), for tests of what states live through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 32

F = torch.nn.functional


class Cache(nn.Module):
    """Keys and Values [B, H, C, D] of one layer."""

    def __init__(self, rows: int, heads: int, capacity: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(rows, heads, capacity, dim, dtype=dtype), persistent=False)
        self.register_buffer("values", torch.zeros(rows, heads, capacity, dim, dtype=dtype), persistent=False)

    def update(self, position: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[:, :, position] = key
        self.values[:, :, position] = value
        return self.keys, self.values


class Block(nn.Module):
    """Keys and Values have two levels, which any number of bits restores exactly; ``lossless=False``: as they come."""

    def __init__(self, width: int, heads: int, kv_heads: int, lossless: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.lossless = heads, kv_heads, width // heads, lossless
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor, position: Tensor, cache: Cache) -> Tensor:
        rows, tokens, width = x.shape
        split = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
        query, key, value = (part.view(rows, tokens, -1, self.dim).transpose(1, 2) for part in self.qkv(x).split(split, dim=-1))
        if self.lossless:
            key, value = key.sign(), value.sign()
        keys, values = cache.update(position, key, value)
        keys, values = (held.repeat_interleave(self.heads // self.kv_heads, dim=1) for held in (keys, values))
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return x + self.out(attended.transpose(1, 2).reshape(rows, tokens, width))


class Decoder(nn.Module):
    """``decoder(tokens [B, S], start [1])``: logits [B, S, V] of tokens that go to the columns from ``start`` on."""

    def __init__(
        self,
        layers: int = 2,
        rows: int = 2,
        capacity: int = 48,
        width: int = 32,
        heads: int = 4,
        kv_heads: int = 2,
        lossless: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.capacity, self.dtype = rows, capacity, dtype
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, lossless) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(capacity, capacity, dtype=torch.bool)), persistent=False)
        self.to(dtype).eval().requires_grad_(False)
        self.new_caches()

    def new_caches(self) -> None:
        """Caches of zeros in place of those that there are."""
        device = self.embed.weight.device
        block: Any = self.blocks[0]
        self.caches = nn.ModuleList(Cache(self.rows, block.kv_heads, self.capacity, block.dim, self.dtype).to(device) for _ in self.blocks)

    def buffers_of_caches(self) -> list[Tensor]:
        return [buffer for cache in self.caches for buffer in cache.buffers()]

    def forward(self, tokens: Tensor, start: Tensor, hidden: Tensor | None = None) -> Tensor:
        """``hidden`` [B, 1, 1, C]: columns that nobody sees, True where so."""
        position = torch.arange(tokens.shape[1], device=tokens.device) + start
        mask = self.mask[position][None, None]
        if hidden is not None:
            mask = mask & ~hidden
        x = self.embed(tokens)
        for block, cache in zip(self.blocks, self.caches, strict=True):
            x = block(x, mask, position, cache)
        return self.head(F.layer_norm(x, x.shape[-1:]))


def tokens_at(start: int, tokens: int, rows: int = 2, device: str = "cpu") -> Tensor:
    """Some tokens that depend on where they stand."""
    return ((torch.arange(start, start + tokens) * 7 + torch.arange(rows)[:, None] * 3) % VOCABULARY).to(device)


@torch.no_grad()
def call(forward: Any, start: int, tokens: int = 1, rows: int = 2, device: str = "cpu", **more: Any) -> Tensor:
    return forward(tokens_at(start, tokens, rows, device), torch.tensor([start], device=device), **more)
