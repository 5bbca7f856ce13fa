"""The transformers cache: one :class:`KiviState` per attention layer behind the interface that models and ``generate`` expect.

Written for transformers 5.17 to 5.24. What a layer stores and what its attention sees is decided by the operators alone; this module
allocates, counts, checks what the host can know, and learns left padding. Must not know of graphs, passes or kernels.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import (
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    get_layer_types_and_kwargs,
)
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_tracing

from kivi_ops.config import KiviConfig
from kivi_ops.state import KiviState

KIVI_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

# Up to 5.17 a positive argument of `crop` is the size to keep; later versions refuse it.
_CROP_TAKES_A_SIZE = Version(transformers.__version__) < Version("5.18")


@dataclass
class _LeftPadding:
    """What a cache knows of its rows' padding before their state exists; one object for all layers.

    ``counts``: int [B], what a state allocated now starts with. ``explicit``: the user gave them, so no mask may change them.
    """

    counts: Tensor | None = None
    explicit: bool = False


class KiviLayer(CacheLayerMixin, nn.Module):
    """Keys and Values of one attention layer in a :class:`KiviState`, whatever span its mask lets through.

    A sliding or chunked layer keeps all tokens too: the mask is built at full width and hides the old ones.

    A module, for Dynamo's sake: it takes a module's integers as constants, while others become symbols once two caches differ in them.

    ``is_croppable``, as transformers means it ("a rollback leaves no trace"), holds with a ``rollback_margin``, by up to that many tokens
    (contract section 3). ``crop`` works without, yet a token that was sealed stays quantised.

    Args:
        max_cache_len: capacity C in columns of the padded frame.
        config: how the layer is quantised.
        left_padding: shared by the layers of a cache.
        index: the layer's place in its cache, for messages.
        is_first: whether it is its cache's first. On an accelerator that layer alone reads the length to check the capacity, since
            each read waits for the device; on a CPU all do.
    """

    is_compileable = True
    is_sliding = False

    def __init__(
        self,
        max_cache_len: int,
        config: KiviConfig,
        left_padding: _LeftPadding | None = None,
        index: int = 0,
        is_first: bool = True,
    ) -> None:
        nn.Module.__init__(self)
        CacheLayerMixin.__init__(self)  # the mixin does not call on
        self.max_cache_len = max_cache_len
        self.config = config
        self.index = index
        self.is_first = is_first
        self.is_croppable = config.rollback_margin > 0
        self.state: KiviState | None = None
        self._left_padding = left_padding if left_padding is not None else _LeftPadding()

    def __repr__(self) -> str:
        return f"KiviLayer(index={self.index}, max_cache_len={self.max_cache_len}, is_initialized={self.is_initialized})"

    # ------------------------------------------------------------------------------------------------------- allocation

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the state for Keys [B, H, any, D_k] and Values [B, H, any, D_v], outside of any graph.

        Raises:
            RuntimeError: while a graph is traced or captured.
            ValueError: sizes that no state can have, or ``left_padding`` for another number of rows.
        """
        if torch.compiler.is_compiling():
            _refuse_allocation(self.index)
        if is_tracing(key_states):
            raise RuntimeError(_allocation_message(self.index))
        rows, heads, _, key_dim = key_states.shape
        counts = self._left_padding.counts
        if counts is None and rows > 1 and self.is_first:
            warnings.warn(
                f"KiviCache is not told the attention mask and takes its {rows} rows as unpadded. If they are left-padded, pads are "
                "quantised as tokens: use KiviCache.for_model(model, ...) or left_padding= (zeros say that there is none).",
                stacklevel=2,
            )
        if counts is not None and counts.shape[0] != rows:
            raise ValueError(f"left_padding is for {counts.shape[0]} rows but the batch has {rows}; allowed: one count per row")
        with torch.inference_mode(False):  # an inference tensor could never be written outside of inference mode again
            state = KiviState.allocate(
                self.config,
                rows,
                heads,
                self.max_cache_len,
                key_dim,
                value_states.shape[-1],
                key_states.dtype,
                key_states.device,
            )
        if counts is not None:
            state.left_padding.copy_(counts)
        self._hold(state)

    def _hold(self, state: KiviState) -> None:
        for tensor in state.tensors().values():
            torch._dynamo.mark_static_address(tensor)
            torch._dynamo.mark_static(tensor)  # a graph per shape, as there is one per capacity anyway
        self.state = state
        self.batch_size = state.sealed.shape[0]
        self.device = state.length.device
        self.is_initialized = True

    # -------------------------------------------------------------------------------------------------------- one step

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append Keys [B, H, S, D_k] and Values [B, H, S, D_v]; return what this step's attention may see (``kivi::update``).

        Returns:
            Float [B, H, C, D_k] and [B, H, C, D_v] in the padded frame.

        Raises:
            ValueError: another number of rows than the state's, or tokens past the capacity where the length can be read.
            RuntimeError: no state yet while a graph is traced.
        """
        self.check_room(key_states.shape[0], key_states.shape[2])
        if self.state is None:
            self.lazy_initialization(key_states, value_states)
        assert self.state is not None
        # A copy: the operator advances `length`, and with seal="before_attention" attention would see the advanced value.
        return self.state.update(key_states, value_states, self.state.length.clone())

    def check_room(self, rows: int, new_tokens: int) -> None:
        """Raise if a call of ``rows`` x ``new_tokens`` does not fit, as far as the host can tell."""
        if self.state is not None and rows != self.batch_size:
            advice = "select its rows first (batch_select_indices)" if rows < self.batch_size else "repeat its rows"
            raise ValueError(
                f"KiviCache holds {self.batch_size} rows but this call has {rows}; allowed: the same number: {advice}, or use a new cache"
            )
        if torch.compiler.is_compiling():  # no host there: the operator drops what does not fit and shows it as NaN
            return
        held = 0 if self.state is None else self.tokens_held()
        if held is not None and held + new_tokens > self.max_cache_len:
            raise ValueError(
                f"KiviCache holds {held} tokens and this call brings {new_tokens} more; allowed: {self.max_cache_len} "
                "(max_cache_len) in all: reset() it or use a larger one"
            )

    def tokens_held(self) -> int | None:
        """Columns written so far, None where the host should not or cannot read it."""
        if self.state is None:
            return 0
        length = self.state.length
        if is_tracing(length) or not (self.is_first or length.device.type == "cpu"):
            return None
        return int(length)

    def observe_padding(self, attention_mask: Tensor | None, new_tokens: int) -> None:
        """``kivi::observe_padding`` for the S tokens that come next."""
        if self.state is not None:
            if attention_mask is not None:
                attention_mask = attention_mask.to(self.state.length.device)
            torch.ops.kivi.observe_padding(self.state.left_padding, attention_mask, self.state.length, new_tokens)

    # ------------------------------------------------------------------------------------------- what transformers asks

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width and offset of the mask: all C columns."""
        return self.max_cache_len, 0

    def get_seq_length(self) -> Tensor | int:  # type: ignore[override]  # a tensor, as transformers' StaticLayer does
        """Columns written so far: the state's own int64 [] once there is one (it changes in place), in a graph a copy of it, else 0."""
        if self.state is None:
            return 0
        return torch.ops.kivi.read_length(self.state.length) if torch.compiler.is_compiling() else self.state.length

    def get_max_length(self) -> int:
        return self.max_cache_len

    # ------------------------------------------------------------------------------------------------------ life cycle

    def reset(self) -> None:
        """Forget all tokens and their padding in place."""
        if self.state is not None:
            self.state.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens: only ``length`` moves (contract section 3).

        In transformers 5.17 a positive number is the size to keep, as in its own layers; later it is an error, as there.
        """
        if tokens_to_remove > 0 and not _CROP_TAKES_A_SIZE:
            raise ValueError(f"crop was given {tokens_to_remove}; allowed: 0 or less, minus the number of tokens to remove")
        if self.state is None or tokens_to_remove == 0:
            return
        if tokens_to_remove > 0:
            self.state.length.clamp_(max=tokens_to_remove)
        else:
            self.state.length.add_(tokens_to_remove).clamp_(min=0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was, in place. ``beam_idx``: int [B].

        Raises:
            ValueError: another number of rows.
        """
        if self.state is None:
            return
        if beam_idx.shape != (self.batch_size,):
            raise ValueError(
                f"reorder_cache was given beam_idx of shape {list(beam_idx.shape)}; allowed: [{self.batch_size}], one entry per row"
            )
        for tensor in self._row_tensors().values():
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` (int [N], or bool [B]) in a state of their own: addresses change, graphs are compiled again."""
        if self.state is None:
            return
        rows: dict[str, Any] = {name: tensor[indices.to(tensor.device)] for name, tensor in self._row_tensors().items()}
        self._hold(replace(self.state, **rows))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times in a state of its own: addresses change, graphs are compiled again."""
        if self.state is None:
            return
        rows: dict[str, Any] = {name: tensor.repeat_interleave(repeats, dim=0) for name, tensor in self._row_tensors().items()}
        self._hold(replace(self.state, **rows))

    def _row_tensors(self) -> dict[str, Tensor]:
        assert self.state is not None
        return {name: tensor for name, tensor in self.state.tensors().items() if name != "length"}

    def offload(self) -> None:
        raise NotImplementedError("KiviCache does not offload its layers: their state keeps its address")

    def prefetch(self) -> None:
        raise NotImplementedError("KiviCache does not offload its layers: their state keeps its address")


def _allocation_message(index: int) -> str:
    return (
        f"KiviCache layer {index} has no state yet and a graph is being traced, which would bake the allocation into the graph; "
        "run the prefill eagerly, or call cache.early_initialization(...) first"
    )


@torch._dynamo.assume_constant_result  # runs while Dynamo traces; a plain `raise` there is a graph break, and allocates after all
def _refuse_allocation(index: int) -> None:
    raise RuntimeError(_allocation_message(index))


class KiviCache(Cache):
    """A cache for ``model.generate(..., past_key_values=cache)`` (newer: ``cache=cache``) and for a model's own forward.

    Eager, or compiled: ``update`` is then one ``kivi::update`` node a layer, which ``backend="kivi"`` turns into attention over the
    quantised state and which any other backend runs as it is. State is allocated at the first eager forward (``generate`` prefills
    eagerly) or by :meth:`early_initialization`, never in a graph. It has no backward: run it under ``torch.no_grad()``.

    Left padding must be known, for pads are no tokens (contract section 2), and a cache is not told the mask: give ``left_padding=``
    or make the cache by :meth:`for_model`. Otherwise more than one row is warned about once, as it may be padded; a single padded row
    cannot be noticed. Right results need the model's own mask in every case.

    Layers that only hold linear-attention states, or nothing, are transformers' own. Flash attention is refused, as it would attend to
    unwritten columns. Do not use it for cross-attention.

    Args:
        model_config: the model's config (a composite one's text part counts).
        max_cache_len: capacity C in columns of the padded frame, pads counted.
        config: how Keys and Values are quantised; ``KiviConfig()`` if None.
        left_padding: pads before each row's first token: int [B], or a 0/1 attention mask [B, T]. Kept until :meth:`reset`.

    Raises:
        ValueError, TypeError: an argument that is not allowed; a layer type without a cache here.
    """

    def __init__(
        self,
        model_config: transformers.PreTrainedConfig,
        max_cache_len: int = 4096,
        config: KiviConfig | None = None,
        left_padding: Tensor | Sequence[int] | None = None,
    ) -> None:
        config = KiviConfig() if config is None else config
        if not isinstance(config, KiviConfig):
            raise TypeError(f"config is a {type(config).__name__}; allowed: a KiviConfig (the model's config is the first argument)")
        if isinstance(max_cache_len, bool) or not isinstance(max_cache_len, int) or max_cache_len < 1:
            raise ValueError(f"max_cache_len is {max_cache_len!r}; allowed: an int of 1 or more")
        if getattr(model_config, "is_encoder_decoder", False):
            raise ValueError(f"KiviCache is for decoder-only models; {model_config.model_type!r} is an encoder-decoder")
        text_config = model_config.get_text_config(decoder=True)
        if is_flash_attention_requested(text_config):
            raise ValueError(
                f"attn_implementation is {text_config._attn_implementation!r}; allowed with KiviCache: one that takes a mask, such as "
                "'sdpa' or 'eager', since unwritten columns must be hidden"
            )
        self.config = config
        self._capacity = max_cache_len
        self._left_padding = _LeftPadding()
        self._attachment: _Attachment | None = None
        self._warned_of_mask = False
        super().__init__(layers=_make_layers(text_config, max_cache_len, config, self._left_padding))
        if left_padding is not None:
            self.set_left_padding(left_padding)

    @classmethod
    def for_model(cls, model: transformers.PreTrainedModel, max_cache_len: int = 4096, config: KiviConfig | None = None) -> KiviCache:
        """A cache that learns left padding from the attention mask of ``model``'s forwards (of ``generate`` too).

        A forward pre-hook on ``model``, one for all its caches, reads the 2-D or 4-D mask of a call that is given this very cache, while
        a row is still empty. It goes with :meth:`detach` or with the last such cache. It acts when ``model`` itself is called:
        ``torch.compile(model.forward)`` goes past it, so prefill by ``model(...)``; a compiled step of one token is left alone.
        A mask of another kind (flex attention's ``BlockMask``) is warned about once.
        """
        cache = cls(model.config, max_cache_len, config)
        cache._attachment = _Attachment.of(model)
        return cache

    def detach(self) -> None:
        """Stop reading the model's masks; what was learnt stays."""
        self._attachment = None

    def set_left_padding(self, left_padding: Tensor | Sequence[int]) -> None:
        """Say how the rows of an empty cache are padded (as ``left_padding=``), until :meth:`reset`.

        Raises:
            ValueError, TypeError: not counts or a mask, another number of rows, or tokens are held already.
        """
        counts = _padding_counts(left_padding, self.max_cache_len)
        if held := self.tokens_held():
            raise ValueError(f"left_padding was set while the cache holds {held} tokens; allowed: an empty cache, reset() it first")
        rows = self.batch_size
        if rows not in (-1, counts.shape[0]):
            raise ValueError(f"left_padding is for {counts.shape[0]} rows but the cache has {rows}; allowed: one count per row")
        self._left_padding.counts, self._left_padding.explicit = counts, True
        for layer in self._kivi_layers():
            if layer.state is not None:
                layer.state.left_padding.copy_(counts)

    def early_initialization(
        self,
        batch_size: int,
        num_heads: int | list[int],
        head_dim: int | list[int],
        dtype: torch.dtype,
        device: torch.device | str,
        value_head_dim: int | list[int] | None = None,
    ) -> None:
        """Allocate every layer's state now. Lists have an entry per layer; ``value_head_dim`` is ``head_dim`` if None."""
        count = len(self.layers)
        sizes: list[list[int]] = []
        for name, size in (
            ("num_heads", num_heads),
            ("head_dim", head_dim),
            ("value_head_dim", head_dim if value_head_dim is None else value_head_dim),
        ):
            sizes.append([size] * count if isinstance(size, int) else list(size))
            if len(sizes[-1]) != count:
                raise ValueError(f"{name} has {len(sizes[-1])} entries; allowed: an int, or one for each of {count} layers")
        if self._attachment is not None and self._left_padding.counts is None:
            self._left_padding.counts = torch.zeros(batch_size, dtype=torch.int32)  # to be learnt by the hook
        for layer, heads, key_dim, value_dim in zip(self.layers, *sizes, strict=True):
            if isinstance(layer, KiviLayer) and not layer.is_initialized:
                empty = torch.empty((batch_size, heads, 0, key_dim), dtype=dtype, device=device)
                layer.lazy_initialization(empty, empty.new_empty((batch_size, heads, 0, value_dim)))

    # ------------------------------------------------------------------------------------------------------- properties

    @property
    def max_cache_len(self) -> int:
        """Capacity in columns of the padded frame."""
        return self._capacity

    @property
    def max_batch_size(self) -> int:
        """Rows of the state, -1 before there is one: a call has exactly as many."""
        return self.batch_size

    def tokens_held(self) -> int | None:
        """Columns written so far (pads counted), None while a graph is traced or captured. Waits for the device."""
        layer = next(self._kivi_layers(), None)
        return None if layer is None else layer.tokens_held()

    def held_bytes(self) -> int:
        """Bytes of all storages that this cache holds, windows and rounding included (contract section 5)."""
        total = 0
        for layer in self.layers:
            if isinstance(layer, KiviLayer):
                total += 0 if layer.state is None else layer.state.held_bytes()
            else:  # a constant-size state of transformers' own
                total += sum(leaf.untyped_storage().nbytes() for leaf in tree_leaves(vars(layer)) if isinstance(leaf, Tensor))
        return total

    def __repr__(self) -> str:
        config, held, tokens = self.config, self.held_bytes(), self.tokens_held()
        quantised = sum(1 for _ in self._kivi_layers())
        layers = str(quantised) if quantised == len(self.layers) else f"{quantised} of {len(self.layers)}"
        rows = self.batch_size
        return (
            f"KiviCache(key_bits={config.key_bits}, value_bits={config.value_bits}, group_size={config.group_size}, "
            f"residual_length={config.residual_length}, layers={layers}, max_cache_len={self.max_cache_len}, "
            f"batch_size={'unset' if rows < 0 else rows}, tokens={'unknown' if tokens is None else tokens}, "
            f"held={held:,} bytes ({held / 2**20:.1f} MiB))"
        )

    # ------------------------------------------------------------------------------------------------------ life cycle

    def reset(self) -> None:
        """Forget all tokens and all padding, given or learnt, in place: rows, storages and compiled graphs stay."""
        self._left_padding.counts, self._left_padding.explicit = None, False
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of every layer (see :meth:`KiviLayer.crop`)."""
        layers: list[Any] = sorted(self.layers, key=lambda layer: isinstance(layer, KiviLayer))
        for layer in layers:  # those that may refuse come first
            layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row i becomes what row ``beam_idx[i]`` was, in place. ``beam_idx``: int tensor [B]."""
        super().reorder_cache(beam_idx)
        self._move_counts(beam_idx)

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Keep the rows ``indices`` (int [N], or bool [B]); state is allocated anew, so compile again.

        Raises:
            ValueError: ``indices`` of another form. NotImplementedError: a layer that cannot.
        """
        index = torch.as_tensor(indices)
        if index.dim() != 1 or index.dtype.is_floating_point:
            raise ValueError(f"indices are {index.dtype} {list(index.shape)}; allowed: int [N], or bool with an entry per row")
        self._require("batch_select_indices")
        super().batch_select_indices(index)
        self._move_counts(index)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times; state is allocated anew, so compile again.

        Raises:
            NotImplementedError: a layer that cannot.
        """
        self._require("batch_repeat_interleave")
        super().batch_repeat_interleave(repeats)
        if (counts := self._left_padding.counts) is not None:
            self._left_padding.counts = counts.repeat_interleave(repeats)

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        self.layers[layer_idx].offload()

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        self.layers[layer_idx].prefetch()

    def _require(self, method: str) -> None:
        """Before any layer is touched."""
        for index, layer in enumerate(self.layers):
            if not hasattr(layer, method):
                raise NotImplementedError(f"{method}: layer {index} is a {type(layer).__name__}, which cannot")

    def _move_counts(self, index: Tensor) -> None:
        if (counts := self._left_padding.counts) is not None:
            self._left_padding.counts = counts[index.to(counts.device)]

    def _kivi_layers(self) -> Any:
        return (layer for layer in self.layers if isinstance(layer, KiviLayer))

    # ---------------------------------------------------------------------------------------------------- left padding

    def _observe(self, attention_mask: Any, rows: int, new_tokens: int) -> None:
        """Learn padding from the mask of a call that comes next, for every layer, once that call is known to fit."""
        if isinstance(attention_mask, dict):  # a mask per layer type; any of them shows each token at least to itself
            attention_mask = attention_mask.get("full_attention", next(iter(attention_mask.values()), None))
        if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.dim() not in (2, 4)):
            if not self._warned_of_mask:
                warnings.warn(
                    f"KiviCache cannot learn left padding from an attention mask that is a {type(attention_mask).__name__}; readable: "
                    "tensors of 2 or 4 dimensions. If the batch is padded, give left_padding=.",
                    stacklevel=2,
                )
                self._warned_of_mask = True
            return
        first = next(self._kivi_layers(), None)
        if first is None:
            return
        first.check_room(rows, new_tokens)
        if first.state is None:
            device = "cpu" if attention_mask is None else attention_mask.device
            counts = torch.zeros(rows, dtype=torch.int32, device=device)
            torch.ops.kivi.observe_padding(counts, attention_mask, torch.zeros((), dtype=torch.int64, device=device), new_tokens)
            self._left_padding.counts = counts
            return
        held = None if torch.compiler.is_compiling() else first.tokens_held()
        if held and not bool((first.state.left_padding >= held).any()):
            return  # no row is empty: an eager decode step costs a read here, not an operator per layer
        for layer in self._kivi_layers():
            layer.observe_padding(attention_mask, new_tokens)


def _make_layers(
    text_config: transformers.PreTrainedConfig, max_cache_len: int, config: KiviConfig, left_padding: _LeftPadding
) -> list[Any]:
    """A :class:`KiviLayer` for each layer that holds K and V, transformers' own for those that do not."""
    layer_types, kwargs = get_layer_types_and_kwargs(text_config)
    layers: list[Any] = []
    for index, layer_type in enumerate(layer_types):
        layer_class: Any = STATIC_LAYER_TYPE_MAPPING.get(layer_type)
        if layer_type in KIVI_LAYER_TYPES:
            first = not any(isinstance(layer, KiviLayer) for layer in layers)
            layers.append(KiviLayer(max_cache_len, config, left_padding, index, is_first=first))
        elif layer_class is not None and not issubclass(layer_class, CacheLayerMixin):
            own = kwargs[index] if isinstance(kwargs, list) else kwargs  # 5.17 has one dict for all layers
            layers.append(layer_class(max_cache_len=max_cache_len, **own))
        else:
            raise ValueError(
                f"layer {index} of {text_config.model_type!r} is {layer_type!r}, for which KiviCache has no layer; allowed: "
                f"{', '.join(KIVI_LAYER_TYPES)}, and layers without Keys and Values"
            )
    return layers


def _padding_counts(left_padding: Tensor | Sequence[int], capacity: int) -> Tensor:
    """Counts [B] as they are, or the zeros before each row's first one of a mask [B, T]: int32 [B]."""
    given = torch.as_tensor(left_padding)
    if given.dim() == 1 and given.dtype not in (torch.bool,) and not given.dtype.is_floating_point:
        counts = given.to(torch.int32)
    elif given.dim() == 2 and bool(((given == 0) | (given == 1)).all()):
        counts = torch.zeros(given.shape[0], dtype=torch.int32, device=given.device)
        start = torch.zeros((), dtype=torch.int64, device=given.device)
        torch.ops.kivi.observe_padding(counts, given, start, given.shape[1])
    else:
        raise ValueError(
            f"left_padding is {given.dtype} {list(given.shape)}; allowed: int counts [B], or an attention mask [B, T] of 0 and 1"
        )
    if counts.numel() and not 0 <= int(counts.min()) <= int(counts.max()) <= capacity:
        raise ValueError(f"left_padding is {counts.tolist()}; allowed: 0 to {capacity} (max_cache_len)")
    return counts


# -------------------------------------------------------------------------------------------------- the hook on a model


class _Attachment:
    """Keeps the padding hook on a model for as long as any cache refers to it.

    One hook for all caches of a model: a compiled call depends on which hooks there are, so a hook per cache would compile again for
    each. Neither the hook nor the model refers to a cache.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        names = tuple(inspect.signature(model.forward).parameters)
        handle = model.register_forward_pre_hook(partial(_observe_padding, names), with_kwargs=True)
        weakref.finalize(self, handle.remove)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Attachment:
        return self  # a copied cache is used with the same model

    @classmethod
    def of(cls, model: nn.Module) -> _Attachment:
        reference = _ATTACHMENTS.get(model)
        attachment = None if reference is None else reference()
        if attachment is None:
            attachment = cls(model)
            _ATTACHMENTS[model] = weakref.ref(attachment)
        return attachment


_ATTACHMENTS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_Attachment]] = weakref.WeakKeyDictionary()


def _observe_padding(names: tuple[str, ...], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: hand a call's mask to the cache in that call, if that cache asked for it. ``names``: forward's parameters."""
    call = {**dict(zip(names, args, strict=False)), **kwargs}
    tokens = call.get("inputs_embeds") if call.get("input_ids") is None else call["input_ids"]
    cache = call.get("past_key_values") if call.get("cache") is None else call["cache"]
    if tokens is None or not isinstance(cache, KiviCache) or cache._attachment is None or cache._left_padding.explicit:
        return
    if torch.compiler.is_compiling() and tokens.shape[1] == 1:
        return  # rows hold tokens by then; the decode graph stays free of it
    if cache._attachment.model() is model:
        cache._observe(call.get("attention_mask"), tokens.shape[0], tokens.shape[1])
