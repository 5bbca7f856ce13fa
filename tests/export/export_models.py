"""Small models with caches of their own, to be exported, and what eager KIVI gives for them. Kept apart from what runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kivi_ops import KiviConfig, KiviState

F = torch.nn.functional

R = 4
CONFIG = KiviConfig(group_size=4, residual_length=R)
CAPACITY = 40
WIDTH, HEADS, KV_HEADS, DIM = 32, 4, 2, 16
VOCABULARY = 64


def repeat_kv(x: Tensor, repeats: int) -> Tensor:
    rows, heads, tokens, dim = x.shape
    return x[:, :, None].expand(rows, heads, repeats, tokens, dim).reshape(rows, heads * repeats, tokens, dim)


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, repeat_kv(key, 2), repeat_kv(value, 2), attn_mask=mask)


def eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = query @ repeat_kv(key, 2).transpose(2, 3) * DIM**-0.5 + torch.where(mask, 0.0, torch.finfo(query.dtype).min)
    return torch.softmax(scores, dim=-1) @ repeat_kv(value, 2)


def grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def index_copy(cache: Tensor, start: Any, new: Tensor) -> None:
    cache.index_copy_(2, torch.arange(new.shape[2]) + start, new)


def setitem(cache: Tensor, start: Any, new: Tensor) -> None:
    cache[:, :, torch.arange(new.shape[2]) + start] = new


def slice_setitem(cache: Tensor, start: Any, new: Tensor) -> None:
    cache[:, :, start : start + new.shape[2]] = new


class Attention(nn.Module):
    """One layer over a float cache [2, KV_HEADS, CAPACITY, DIM] that it owns: ``write`` fills it, ``spell`` attends."""

    def __init__(self, write: Callable[..., None] = index_copy, spell: Callable[..., Tensor] = sdpa) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write, self.spell = write, spell
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        self.o = nn.Linear(HEADS * DIM, WIDTH)
        self.register_buffer("k_cache", torch.zeros(2, KV_HEADS, CAPACITY, DIM))
        self.register_buffer("v_cache", torch.zeros(2, KV_HEADS, CAPACITY, DIM))
        self.eval()

    def project(self, x: Tensor) -> list[Tensor]:
        return [part(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for part in (self.q, self.k, self.v)]

    def merge(self, attended: Tensor) -> Tensor:
        return self.o(attended.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, mask: Tensor, start: Any) -> Tensor:
        query, key, value = self.project(x)
        self.write(self.k_cache, start, key)
        self.write(self.v_cache, start, value)
        return self.merge(self.spell(query, self.k_cache, self.v_cache, mask))


def over_state(model: Attention, config: KiviConfig = CONFIG) -> Callable[..., Tensor]:
    """The same layer over a :class:`KiviState`, eager."""
    state = KiviState.allocate(config, 2, KV_HEADS, CAPACITY, DIM, DIM, torch.float32)

    def forward(x: Tensor, mask: Tensor, start: Any) -> Tensor:
        query, key, value = model.project(x)
        return model.merge(state.step(query, key, value, torch.as_tensor(start), attn_mask=mask))

    return forward


def step_inputs(start: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Hidden states [2, tokens, WIDTH] and the causal mask [2, 1, tokens, CAPACITY]."""
    generator = torch.Generator().manual_seed(start)
    visible = torch.arange(CAPACITY) <= start + torch.arange(tokens)[:, None]
    return torch.randn(2, tokens, WIDTH, generator=generator), visible.expand(2, 1, tokens, CAPACITY).contiguous()


@torch.no_grad()
def run(forward: Callable[..., Tensor], calls: Sequence[int], start_type: type = Tensor) -> list[Tensor]:
    """Outputs of ``forward`` for calls of so many tokens each, one after the other."""
    outputs, start = [], 0
    for tokens in calls:
        outputs.append(forward(*step_inputs(start, tokens), start if start_type is int else torch.tensor(start)))
        start += tokens
    return outputs


class Block(nn.Module):
    """A layer in the style of gpt-fast: buffers written at ``input_pos``, the mask a row of a table."""

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wqkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.wo = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.register_buffer("k_cache", torch.zeros(rows, KV_HEADS, capacity, DIM), persistent=False)
        self.register_buffer("v_cache", torch.zeros(rows, KV_HEADS, capacity, DIM), persistent=False)
        self.state: KiviState | None = None  # instead of the two

    def forward(self, x: Tensor, input_pos: Tensor, mask: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        split = [heads * DIM for heads in (HEADS, KV_HEADS, KV_HEADS)]
        parts = self.wqkv(self.norm(x)).split(split, dim=-1)
        query, key, value = (part.view(rows, tokens, -1, DIM).transpose(1, 2) for part in parts)
        if self.state is not None:
            y = self.state.step(query, key, value, input_pos, attn_mask=mask)
        else:
            self.k_cache[:, :, input_pos] = key
            self.v_cache[:, :, input_pos] = value
            keys, values = (cache.repeat_interleave(HEADS // KV_HEADS, dim=1) for cache in (self.k_cache, self.v_cache))
            y = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        x = x + self.wo(y.transpose(1, 2).reshape(rows, tokens, -1))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class GptFast(nn.Module):
    """A small language model of our own, in the style of gpt-fast: logits = model(token_ids [B, S], start [])."""

    def __init__(self, rows: int = 1, capacity: int = CAPACITY, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(capacity, WIDTH)
        self.layers = nn.ModuleList(Block(rows, capacity) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("causal_mask", torch.ones(capacity, capacity).tril().bool(), persistent=False)
        self.eval()

    def forward(self, idx: Tensor, start: Tensor) -> Tensor:
        input_pos = torch.arange(idx.shape[1], device=idx.device) + start
        mask = self.causal_mask[None, None, input_pos]
        x = self.embedding(idx) + self.position(input_pos)
        for layer in self.layers:
            x = layer(x, input_pos, mask)
        return self.head(x)

    def over_states(self, config: KiviConfig) -> GptFast:
        """Itself, attending over :class:`KiviState` from now on."""
        for layer in self.layers:
            rows, heads, capacity, dim = layer.k_cache.shape
            layer.state = KiviState.allocate(config, rows, heads, capacity, dim, dim, torch.float32)
        return self
