"""Where every code, scale and min of a sealed token lies in memory. The only place that says so.

Sealed tokens of one KV head are kept in *records*: contiguous runs of 16-bit words that hold ``tokens`` consecutive
tokens, first the packed codes, then the scales, then the minima (in the metadata dtype). Record r of a row holds the
tokens r * tokens ... (r + 1) * tokens - 1 **of the row's own token index**.

A word holds F = 16 / bits codes, its *fields*; field f occupies bits f * bits upwards (little-endian). Fields of one word
always belong to different groups or channel parts, so that a kernel can mask one field of many words and multiply it with one
operand, without shuffling anything:

    Key    words [G][D / H]      field f = h * E + g : token g * G + row,             channel h * (D / H) + column
           scales, minima [E][D] token group g, channel
    Value  words [D / P][N / E]  field f = e * P + p : token e * (N / E) + column,    channel p * (D / P) + row
           scales, minima [ceil(D / G)][N]  channel group, token

with N tokens a record, H or P channel parts and E = F / H or F / P token parts. A Value word's fields run over tokens alone
(P = 1) where the head size does not split into whole groups, so no channel is ever padded. At D = 128, G = 32 and 2 bits a
record is 128 tokens in 6,144 bytes; at D = 64 it is 256 tokens.

Pure Python and torch; must not know of Triton, devices or caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

NAME, VERSION = "kivi-records", 1


@dataclass(frozen=True)
class RecordLayout:
    """One record's arrangement; see the module docstring for the symbols."""

    role: str  # "key" or "value"
    head_dim: int
    bits: int
    group_size: int
    metadata_dtype: torch.dtype

    @cached_property
    def fields(self) -> int:
        return 16 // self.bits

    @cached_property
    def tokens(self) -> int:
        """N, tokens of one record: the same rule for Key and Value."""
        halves = 2 if self.head_dim > 64 and self.head_dim % 2 == 0 else 1
        return self.group_size * self.fields // halves

    @cached_property
    def channel_parts(self) -> int:
        """H of a Key record, P of a Value record."""
        if self.role == "key":
            return self.group_size * self.fields // self.tokens
        for parts in (4, 2):
            if parts <= self.fields and self.head_dim % (parts * self.group_size) == 0:
                return parts
        return 1

    @cached_property
    def token_parts(self) -> int:
        """E."""
        return self.fields // self.channel_parts

    @cached_property
    def rows(self) -> int:
        return self.group_size if self.role == "key" else self.head_dim // self.channel_parts

    @cached_property
    def columns(self) -> int:
        return self.head_dim // self.channel_parts if self.role == "key" else self.tokens // self.token_parts

    @cached_property
    def code_words(self) -> int:
        return self.rows * self.columns

    @cached_property
    def metadata_shape(self) -> tuple[int, int]:
        if self.role == "key":
            return self.token_parts, self.head_dim
        return -(-self.head_dim // self.group_size), self.tokens

    @cached_property
    def metadata_size(self) -> int:
        """Values in the scales; as many in the minima."""
        return self.metadata_shape[0] * self.metadata_shape[1]

    @cached_property
    def words(self) -> int:
        """16-bit words of a whole record."""
        return self.code_words + 2 * self.metadata_size * self.metadata_dtype.itemsize // 2

    def records(self, tokens: int) -> int:
        """Records that hold ``tokens`` tokens."""
        return -(-max(0, tokens) // self.tokens)

    def pack(self, codes: Tensor) -> Tensor:
        """Codes uint8 [..., N, D] -> words int16 [..., code_words]."""
        lead, parts, tokens = codes.shape[:-2], self.channel_parts, self.token_parts
        grid = codes.reshape(*lead, tokens, self.tokens // tokens, parts, self.head_dim // parts).to(torch.int32)
        # to [row, column, field]
        order = (-3, -1, -2, -4) if self.role == "key" else (-1, -3, -4, -2)
        grid = grid.permute(*range(len(lead)), *(d + grid.dim() for d in order)).reshape(*lead, self.code_words, self.fields)
        shift = torch.arange(0, 16, self.bits, dtype=torch.int32, device=codes.device)
        return (grid << shift).sum(-1, dtype=torch.int32).to(torch.int16)

    def unpack(self, words: Tensor) -> Tensor:
        """Words int16 [..., code_words] -> codes uint8 [..., N, D]."""
        lead, parts, tokens = words.shape[:-1], self.channel_parts, self.token_parts
        shift = torch.arange(0, 16, self.bits, dtype=torch.int16, device=words.device)
        grid = ((words[..., None] >> shift) & (2**self.bits - 1)).to(torch.uint8)
        if self.role == "key":  # [row = token, column = channel, h, g] -> [g, token, h, channel]
            grid = grid.reshape(*lead, self.rows, self.columns, parts, tokens)
            order = (-1, -4, -2, -3)
        else:  # [row = channel, column = token, e, p] -> [e, token, p, channel]
            grid = grid.reshape(*lead, self.rows, self.columns, tokens, parts)
            order = (-2, -3, -1, -4)
        return grid.permute(*range(len(lead)), *(d + grid.dim() for d in order)).reshape(*lead, self.tokens, self.head_dim)

    def split(self, records: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of int16 [..., words]: codes int16 [..., code_words], scale and min [..., *metadata_shape]."""
        codes = records[..., : self.code_words]
        metadata = records[..., self.code_words :].view(self.metadata_dtype)
        scale, minimum = metadata[..., : self.metadata_size], metadata[..., self.metadata_size :]
        shape = self.metadata_shape
        return codes, scale.unflatten(-1, shape), minimum.unflatten(-1, shape)


@lru_cache(maxsize=256)
def record_layout(role: str, head_dim: int, bits: int, group_size: int, metadata_dtype: torch.dtype) -> RecordLayout:
    """The layout of a Key (``role="key"``) or Value record; cached, since operators ask for it on every call."""
    return RecordLayout(role, head_dim, bits, group_size, metadata_dtype)


def record_layouts(
    key_dim: int, value_dim: int, key_bits: int, value_bits: int, group_size: int, metadata_dtype: torch.dtype
) -> tuple[RecordLayout, RecordLayout]:
    """The Key and the Value layout of one state."""
    return (
        record_layout("key", key_dim, key_bits, group_size, metadata_dtype),
        record_layout("value", value_dim, value_bits, group_size, metadata_dtype),
    )


def pack_bytes(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [..., D] -> little-endian bytes uint8 [..., ceil(D * bits / 8)]: [0, 1, 2, 3] at 2 bits is 0xE4."""
    per_byte = 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_byte))
    shift = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)
    return (codes.unflatten(-1, (-1, per_byte)).to(torch.int32) << shift).sum(-1, dtype=torch.int32).to(torch.uint8)


def unpack_bytes(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """The inverse of :func:`pack_bytes`: uint8 [..., ceil(D * bits / 8)] -> codes uint8 [..., D]."""
    shift = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shift) & (2**bits - 1)).flatten(-2)[..., :head_dim]
