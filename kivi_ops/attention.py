"""Attention that transformers calls by the name ``"kivi"``: eager, over the quantised state itself.

``model.set_attn_implementation("kivi")`` once :class:`~kivi_ops.KiviCache` was imported. The cache then hands a layer's new Keys and Values
on as they are, with a mark that names the state, and attention here meets that state: no float copy of the cache is ever made. Without
such a mark (no cache, another cache, a graph being traced, where ``kivi::update`` stays for the backend) it is transformers' own float
attention. What the operator cannot do (attention sinks, position biases, dropout) runs over the float view of ``kivi::update``, with a
warning that says why. ``generate`` does not compile a model whose attention it is; for ``backend="kivi"`` keep ``"sdpa"``.

Must not know how a cache counts, checks or pads.
"""

from __future__ import annotations

import sys
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kivi_ops.state import KiviState

NAME = "kivi"

_MARK = "_kivi_expected"
_THREAD = threading.local()  # .expected: what the last `expect` of this thread marked, until its attention comes


@dataclass
class _Expected:
    """Marked new Keys: their ``state``, where they begin, and whether the state holds them already."""

    state: KiviState
    position: Tensor
    layer: int
    appended: bool = False


def expect(state: KiviState, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Mark new Keys and Values [B, H, S, D], so that :func:`kivi_attention` attends over ``state`` and appends them.

    Raises:
        RuntimeError: what was marked before never came to attention, so the model's attention is not this one.
    """
    last = getattr(_THREAD, "expected", None)
    _THREAD.expected = None
    if last is not None:
        raise RuntimeError(_lost(last.layer))
    key, value = key.view_as(key), value.view_as(value)  # tensors of our own: the mark must not outlive them on the model's
    expected = _Expected(state, state.length.clone(), layer)
    setattr(key, _MARK, expected)
    _THREAD.expected = expected
    return key, value


def _lost(layer: int) -> str:
    return (
        f"the Keys that KiviCache returned for layer {layer} did not reach the attention function {NAME!r}: it was interrupted, or the "
        'model changes them in between or has an attention of its own; then use model.set_attn_implementation("sdpa")'
    )


def kivi_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers' ``AttentionInterface`` wants it.

    Args:
        query: [B, Hq, S, D_k]. key, value: what the cache returned. attention_mask: bool or additive [B or 1, heads or 1, S, columns].

    Returns:
        [B, S, Hq, D_v], and None for the weights, which nobody computes.

    Raises:
        RuntimeError: the Keys are not those that a cache has just returned in this thread.
    """
    expected: _Expected | None = None if torch.compiler.is_compiling() else getattr(key, _MARK, None)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "softcap": softcap, **kwargs}
    if expected is None:
        if not torch.compiler.is_compiling() and (last := getattr(_THREAD, "expected", None)) is not None:
            _THREAD.expected = None
            raise RuntimeError(_lost(last.layer))
        return _float_attention(module, query, key, value, attention_mask, causal, options), None
    _THREAD.expected = None
    state, position = expected.state, expected.position
    if reason := _unsupported(dropout, kwargs):
        warnings.warn(f"{type(module).__name__} attends over a float copy of its KiviCache layer: {reason}", stacklevel=2)
        if expected.appended:
            raise RuntimeError(f"{type(module).__name__} reads Keys of layer {expected.layer} again, which {NAME!r} cannot with {reason}")
        expected.appended = True
        floats = state.update(key, value, position)
        return _float_attention(module, query, *floats, attention_mask, causal, options, position), None
    query = query.to(key.dtype)  # under autocast Keys are in its dtype already
    attention: dict[str, Any] = {
        "attn_mask": attention_mask,
        "is_causal": causal and attention_mask is None,
        "scale": scaling,
        "softcap": softcap,
    }
    if expected.appended:  # a layer that shares these Keys and Values
        output = state.attention(query, key, value, position, **attention)
    else:
        output = state.step(query, key, value, position, **attention)
        expected.appended = True
    return output.transpose(1, 2).contiguous(), None


def _unsupported(dropout: float, options: dict[str, Any]) -> str:
    """Why the operator cannot compute this attention, or nothing."""
    if dropout:
        return "dropout"
    for name, reason in (("s_aux", "attention sinks"), ("position_bias", "a position bias"), ("head_mask", "a head mask")):
        if options.get(name) is not None:
            return reason
    return ""


def _float_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    options: dict[str, Any],
    position: Tensor | None = None,
) -> Tensor:
    """transformers' own attention over float Keys and Values [B, H, columns, D], query i at column ``position`` + i."""
    softcap, sinks = options["softcap"], options.get("s_aux")
    if softcap is None and sinks is None:
        del options["softcap"]
        return sdpa_attention_forward(module, query, key, value, mask, **options)[0]
    # Only a model's eager attention knows of these; it wants an additive mask and none left out.
    new_tokens, columns = query.shape[2], key.shape[2]
    if mask is None and causal and new_tokens > 1 or mask is None and position is not None:
        start = columns - new_tokens if position is None else position
        last = start + torch.arange(new_tokens, device=query.device)[:, None]
        mask = (torch.arange(columns, device=query.device) <= last)[None, None]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, torch.finfo(query.dtype).min)
    eager = sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
    return eager(module, query, key, value, mask, **options)[0]


ALL_ATTENTION_FUNCTIONS.register(NAME, kivi_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
