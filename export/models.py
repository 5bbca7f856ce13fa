"""A causal language model of transformers as programs that carry its quantised cache: ``export_model``.

The model is traced with a cache whose layers call ``kivi::update`` on buffers of the traced module; :func:`rewrite` turns that into
attention and append. Must not know how a program is run or saved (:mod:`kivi_ops.export.program`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from kivi_ops.config import KiviConfig
from kivi_ops.export.program import ExportedModel
from kivi_ops.export.rewrite import STATE_PREFIX, rewrite
from kivi_ops.state import KiviState

_ATTENTION = "kivi_export"  # the name under which transformers knows _attention while a model is traced
_EXAMPLE_TOKENS = 7


def export_model(
    model: Any,
    config: KiviConfig | None = None,
    batch_size: int = 1,
    max_cache_len: int = 4096,
    *,
    separate_decode: bool = False,
    all_logits: bool = False,
    strict: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> ExportedModel:
    """Export a causal LM of transformers with its cache inside, quantised; weights are shared with ``model``.

    A program is called as ``program(input_ids int64 [B, S], start int64 [], left_padding int32 [B])`` and returns logits [B, 1, V] of the
    last token. ``start`` is the column of the first new token: 0 begins anew, a smaller one than before forgets what came after it.
    ``left_padding``: the pads before each row's first token, the same in every call of a conversation.

    Args:
        model: in evaluation mode; for every layer the pass must know its attention.
        config: ``KiviConfig()`` if None.
        batch_size: B. max_cache_len: capacity C in columns of the padded frame.
        separate_decode: a second program for calls of one token, which shares the state; compilers make more of it.
        all_logits: logits of every token of a call, [B, S, V].
        strict: whether a layer whose attention the pass leaves on ``kivi::update`` is an error; False: right and slow, with a warning.
        progress: told what happens next.

    Raises:
        ValueError: an argument that is not allowed, or a layer without a cache here.
        RuntimeError: ``strict`` is not met.
    """
    for name, size in (("batch_size", batch_size), ("max_cache_len", max_cache_len)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; allowed: an int of 1 or more")
    if model.training:
        raise ValueError("model is in training mode; allowed: model.eval()")
    config = config or KiviConfig()
    step = _Step(model, config, batch_size, max_cache_len, all_logits)
    made: dict[str, ExportedProgram] = {}
    for name in ("prefill", "decode") if separate_decode else ("model",):
        progress(f"tracing the {name} program" if separate_decode else "tracing the program")
        traced = step.trace(name)
        progress(f"rewriting the {name} program" if separate_decode else "rewriting the program")
        made[name] = rewrite(traced, config, strict=strict)
    return ExportedModel(made)


class _Layer(nn.Module):
    """The state of one layer as buffers, so that export finds them. Padding is the same in all layers, and an input of every call."""

    def __init__(self, state: KiviState) -> None:
        super().__init__()
        self.config, self.capacity = state.config, state.capacity
        for name, tensor in state.tensors().items():
            if name != "left_padding":
                self.register_buffer(name, tensor)

    def state(self, left_padding: Tensor) -> KiviState:
        return KiviState(self.config, self.capacity, left_padding=left_padding, **dict(self.named_buffers()))


class _Step(nn.Module):
    """``model`` over states that it owns."""

    def __init__(self, model: Any, config: KiviConfig, batch_size: int, capacity: int, all_logits: bool) -> None:
        super().__init__()
        self.model, self.rows, self.capacity, self.all_logits = model, batch_size, capacity, all_logits
        self.add_module(STATE_PREFIX, nn.ModuleList(_Layer(state) for state in _states(model, config, batch_size, capacity)))
        self.eval()

    def trace(self, name: str) -> ExportedProgram:
        tokens = 1 if name == "decode" else min(_EXAMPLE_TOKENS, self.capacity)
        ids = torch.zeros((self.rows, tokens), dtype=torch.int64, device=self.model.device)
        start = torch.zeros((), dtype=torch.int64, device=ids.device)
        padding = torch.zeros(self.rows, dtype=torch.int32, device=ids.device)
        shapes = None if name == "decode" else ({1: Dim("tokens", min=1, max=self.capacity)}, None, None)
        with torch.no_grad(), _branchless_attention(self.model):
            return torch.export.export(self, (ids, start, padding), dynamic_shapes=shapes, strict=False)

    def forward(self, input_ids: Tensor, start: Tensor, left_padding: Tensor) -> Any:
        states = [layer.state(left_padding) for layer in getattr(self, STATE_PREFIX)]
        columns = torch.arange(input_ids.shape[1], device=start.device) + start
        seen = torch.arange(self.capacity, device=start.device) >= left_padding[:, None]
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=seen,
            position_ids=(columns - left_padding[:, None]).clamp(min=0),
            use_cache=True,
            logits_to_keep=0 if self.all_logits else 1,
            **{_cache_argument(self.model): _traced_cache(states, start)},
        )
        return outputs.logits


def _states(model: Any, config: KiviConfig, batch_size: int, capacity: int) -> list[KiviState]:
    """An empty state for each layer, as wide as the Keys and Values that the model makes of one token.

    Raises:
        ValueError: a layer that keeps something else, or whose Keys and Values are another layer's.
    """
    from transformers import DynamicCache

    from kivi_ops.cache import KiviCache, KiviLayer

    layers = KiviCache(model.config, capacity, config).layers  # raises for models that no KiviCache fits
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device), **{_cache_argument(model): cache}, use_cache=True)
    for index, layer in enumerate(layers):
        if not isinstance(layer, KiviLayer) or index >= len(cache.layers) or not cache.layers[index].is_initialized:
            raise ValueError(
                f"layer {index} of {model.config.model_type!r} keeps no Keys and Values of its own; allowed: models whose layers all do"
            )
    return [
        KiviState.allocate(
            config,
            batch_size,
            layer.keys.shape[1],
            capacity,
            layer.keys.shape[-1],
            layer.values.shape[-1],
            layer.keys.dtype,
            layer.keys.device,
        )
        for layer in cache.layers
    ]


def _traced_cache(states: list[KiviState], start: Tensor) -> Any:
    """A cache of transformers over ``states`` for a call whose new tokens begin at column ``start``."""
    from transformers.cache_utils import Cache

    from kivi_ops.cache import KiviLayer

    class Layer(KiviLayer):
        def __init__(self, state: KiviState, index: int) -> None:
            super().__init__(state.capacity, state.config, index=index)
            self.state, self.is_initialized = state, True

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            assert self.state is not None
            return self.state.update(key_states, value_states, start)

        def get_seq_length(self) -> Tensor:  # type: ignore[override]
            return start

    return Cache(layers=[Layer(state, index) for index, state in enumerate(states)])


def _cache_argument(model: Any) -> str:
    from kivi_ops.demo import cache_argument

    return cache_argument(model)


@contextlib.contextmanager
def _branchless_attention(model: Any) -> Iterator[None]:
    """``model`` with :func:`_attention` instead of transformers' SDPA, which asks whether a call has one token: then a program could not
    take one and several."""
    if model.config._attn_implementation != "sdpa":
        yield
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_ATTENTION, _attention)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with a mask as transformers calls it: query [B, Hq, S, D] -> [B, S, Hq, D].

    Raises:
        ValueError: something that SDPA has no argument for; such a model needs ``attn_implementation="eager"``.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"attention of {type(module).__name__} takes {name!r}; allowed: a model with attn_implementation='eager'")
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).contiguous(), None
