"""The transformers cache: one :class:`KiviState` per attention layer behind the interface that models and ``generate`` expect.

Written for transformers 5.17 to 5.24. What a layer stores and what its attention sees is decided by the operators alone; this module
allocates, counts, checks what the host can know, and learns left padding. Must not know of graphs, passes or kernels.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.cache_utils import (
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicCache,
    EncoderDecoderCache,
    get_layer_types_and_kwargs,
)
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_tracing

from kivi_ops import attention
from kivi_ops.config import KiviConfig
from kivi_ops.kernels import layout
from kivi_ops.state import KiviState

KIVI_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

# Up to 5.17 a positive argument of `crop` is the size to keep; later versions refuse it.
_CROP_TAKES_A_SIZE = Version(transformers.__version__) < Version("5.18")


# Tokens of a draft that a cache is ready for when generate announces an assistant: more than transformers' usual 20.
DRAFT_TOKENS = 32
# A longer draft widens the margin further, up to here; a longer call is taken for a prompt.
LONGEST_DRAFT = 128


@dataclass
class _Shared:
    """What the layers of a cache know together.

    ``config``, ``capacity``: of all states, those to come too.
    ``counts``: int [B], the left padding that a state allocated now starts with. ``explicit``: the user gave it, so no mask may change it.
    ``layers``: those that hold Keys and Values, in order. ``drafting``: rollbacks are to be expected (assisted decoding).
    ``may_be_padded``: rows of unknown padding are worth a warning.
    ``attention_name``: the model's attention implementation, which may change at any time.
    ``broken``: why some of the layers are in another state than the rest, until :meth:`KiviCache.reset`.
    """

    config: KiviConfig
    capacity: int
    counts: Tensor | None = None
    explicit: bool = False
    layers: list[KiviLayer] = field(default_factory=list, repr=False)
    drafting: bool = False
    may_be_padded: bool = True
    attention_name: Callable[[], str | None] = lambda: None
    broken: str | None = None

    def lengths(self) -> list[int]:
        """Columns that each layer with a state holds. Waits for the device, once."""
        lengths = [layer.state.length for layer in self.layers if layer.state is not None]
        if not lengths or lengths[0].device.type == "cpu":
            return [int(length) for length in lengths]
        return torch.stack([length.to(lengths[0].device) for length in lengths]).tolist()

    @contextlib.contextmanager
    def whole(self, what: str) -> Iterator[None]:
        """Around what changes one layer after another: if it fails half way, the cache says so from then on."""
        try:
            yield
        except BaseException as error:
            self.broken = f"{what} failed half way ({type(error).__name__}: {error})"
            raise

    def rebuild(self, capacity: int, config: KiviConfig) -> None:
        """Give every layer room for ``capacity`` columns under ``config``; states are allocated anew, all of them or none."""
        with _ordinary_tensors():
            states = [None if layer.state is None else layer.state.with_room(capacity, config) for layer in self.layers]
        self.config, self.capacity = config, capacity
        for layer, state in zip(self.layers, states, strict=True):
            layer.config, layer.max_cache_len = config, capacity
            if state is not None:
                layer._hold(state)

    def widen(self, margin: int) -> None:
        """Raise the rollback margin to ``margin``, or as far as the Values already sealed leave room: further than what can still come."""
        for layer in self.layers:
            if layer.state is not None and (sealed := layer.state.most_sealed()):
                margin = min(margin, self.capacity - self.config.residual_length - sealed)
        if margin > self.config.rollback_margin:
            self.rebuild(self.capacity, replace(self.config, rollback_margin=margin))

    def check(self) -> None:
        """Raise if an exception left the layers in different states. Not in a graph, where there is no host."""
        if self.broken is not None:
            raise RuntimeError(f"KiviCache cannot be used, since {self.broken}: reset() it")
        if len(set(lengths := self.lengths())) > 1:
            raise RuntimeError(
                f"KiviCache's layers hold {_briefly(lengths)} tokens, so a forward did not reach all of them (an exception, or a cache for "
                "another model): crop(0) forgets what only some of them hold, reset() everything"
            )


@contextlib.contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Around allocation: an inference tensor could never be written outside of inference mode again."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _briefly(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


class KiviLayer(CacheLayerMixin, nn.Module):
    """Keys and Values of one attention layer in a :class:`KiviState`, whatever span its mask lets through.

    A sliding or chunked layer keeps all tokens too: the mask is built at full width and hides the old ones.

    A module, for Dynamo's sake: it takes a module's integers as constants, while others become symbols once two caches differ in them.

    ``is_croppable``, as transformers means it ("a rollback leaves no trace"), holds with a ``rollback_margin``, by up to that many tokens
    (contract section 3). ``crop`` works without, yet a token that was sealed stays quantised.

    Args:
        max_cache_len: capacity C in columns of the padded frame.
        config: how the layer is quantised.
        shared: what the layers of a cache know together.
        index: the layer's place in its cache, for messages.
        is_first: whether it is its cache's first. On an accelerator that layer alone reads the length to check the capacity, since
            each read waits for the device; on a CPU all do.
    """

    is_sliding = False

    def __init__(
        self,
        max_cache_len: int,
        config: KiviConfig,
        shared: _Shared | None = None,
        index: int = 0,
        is_first: bool = True,
    ) -> None:
        nn.Module.__init__(self)
        CacheLayerMixin.__init__(self)  # the mixin does not call on
        self.max_cache_len = max_cache_len
        self.config = config
        self.index = index
        self.is_first = is_first
        self.state: KiviState | None = None
        self._shared = _Shared(config, max_cache_len) if shared is None else shared
        self._shared.layers.append(self)

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]  # a class attribute there
        """Whether ``generate`` may compile its decode steps: not with attention that meets the state eagerly."""
        return self._shared.attention_name() != attention.NAME

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # a class attribute there
        return self.config.rollback_margin > 0

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
        held = self._shared.lengths()
        if held and max(held) > key_states.shape[2]:
            raise RuntimeError(
                f"KiviCache layer {self.index} has no state yet, but others hold {_briefly(held)} tokens and this call brings "
                f"{key_states.shape[2]}: a forward did not reach all layers (an exception, or a cache for another model); reset() it"
            )
        rows, heads, _, key_dim = key_states.shape
        counts = self._shared.counts
        if counts is None and rows > 1 and self.is_first and self._shared.may_be_padded:
            warnings.warn(
                f"KiviCache is not told the attention mask and takes its {rows} rows as unpadded. If they are left-padded, pads are "
                "quantised as tokens: use KiviCache.for_model(model, ...) or left_padding= (zeros say that there is none).",
                stacklevel=2,
            )
        if counts is not None and counts.shape[0] != rows:
            raise ValueError(f"left_padding is for {counts.shape[0]} rows but the batch has {rows}; allowed: one count per row")
        with _ordinary_tensors():
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

    def _become(self, state: KiviState | None) -> None:
        """Hold ``state``, in place where the one that is held has its shapes, dtypes and device."""
        if state is None:
            self.state, self.is_initialized = None, False
            if hasattr(self, "batch_size"):
                del self.batch_size
            return
        if self.state is not None and self.state.config == state.config and self.state.capacity == state.capacity:
            pairs = list(zip(self.state.tensors().values(), state.tensors().values(), strict=True))
            if all((old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device) for old, new in pairs):
                for old, new in pairs:
                    old.copy_(new)
                return
        self._hold(state)

    # -------------------------------------------------------------------------------------------------------- one step

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append Keys [B, H, S, D_k] and Values [B, H, S, D_v]; return what this step's attention may see (``kivi::update``).

        Returns:
            Float [B, H, C, D_k] and [B, H, C, D_v] in the padded frame. For a model whose attention is ``"kivi"``, eagerly, the new Keys
            and Values themselves, which that attention appends.

        Raises:
            ValueError: another number of rows than the state's, or tokens past the capacity where the length can be read.
            RuntimeError: no state yet while a graph is traced.
        """
        self.check_room(key_states.shape[0], key_states.shape[2])
        key_states, value_states = self._in_one_dtype(key_states, value_states)
        if self.state is None:
            self.lazy_initialization(key_states, value_states)
        assert self.state is not None
        if self._shared.attention_name() == attention.NAME and not torch.compiler.is_compiling() and not is_tracing(key_states):
            return attention.expect(self.state, key_states, value_states, self.index)
        # A copy: the operator advances `length`, and with seal="before_attention" attention would see the advanced value.
        return self.state.update(key_states, value_states, self.state.length.clone())

    def _in_one_dtype(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Under autocast Keys may come rotated in float32 and Values in autocast's dtype, in which attention is going to read both."""
        kind = key.device.type
        if not torch.is_autocast_enabled(kind):
            return key, value
        dtype = torch.get_autocast_dtype(kind) if self.state is None else self.state.dtype
        return key.to(dtype), value.to(dtype)

    def check_room(self, rows: int, new_tokens: int) -> None:
        """Raise if a call of ``rows`` x ``new_tokens`` does not fit, as far as the host can tell."""
        if self.state is not None and rows != self.batch_size:
            advice = "select its rows first (batch_select_indices)" if rows < self.batch_size else "repeat its rows"
            raise ValueError(
                f"KiviCache holds {self.batch_size} rows but this call has {rows}; allowed: the same number: {advice}, or use a new cache"
            )
        if torch.compiler.is_compiling():  # no host there: the operator drops what does not fit and shows it as NaN
            return
        if self.is_first and self.state is not None and not is_tracing(self.state.length):
            self._shared.check()
        held = 0 if self.state is None else self.tokens_held()
        if held is not None and held + new_tokens > self.max_cache_len:
            raise ValueError(
                f"KiviCache holds {held} tokens and this call brings {new_tokens} more; allowed: {self.max_cache_len} "
                "(max_cache_len) in all: resize() it, reset() it or use a larger one"
            )
        if self.is_first and self._shared.drafting and held and self.config.rollback_margin < new_tokens - 1 <= LONGEST_DRAFT:
            self._shared.widen(min(LONGEST_DRAFT, 1 << (new_tokens - 2).bit_length()))  # doubled, so that few drafts copy the cache

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
        _check_crop(tokens_to_remove)
        if self.state is not None:
            self.state.length.copy_(_shortened(self.state.length, tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was, in place. ``beam_idx``: int [B].

        Raises:
            ValueError: another number of rows, or rows that are not there (where ``beam_idx`` is on the host).
        """
        if self.state is None:
            return
        _check_beams(beam_idx, self.batch_size)
        for tensor in self._row_tensors().values():
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` (int [N], or bool [B]) in a state of their own: addresses change, graphs are compiled again."""
        if self.state is not None:
            self._hold(self._rows(lambda tensor: tensor[indices.to(tensor.device)]))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times in a state of its own: addresses change, graphs are compiled again."""
        if self.state is not None:
            self._hold(self._rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0)))

    def _rows(self, change: Callable[[Tensor], Tensor]) -> KiviState:
        """A state of storages of its own with ``change`` made to what has rows."""
        assert self.state is not None
        with _ordinary_tensors():
            rows: dict[str, Any] = {name: change(tensor) for name, tensor in self._row_tensors().items()}
            return replace(self.state, length=self.state.length.clone(), **rows)

    def _row_tensors(self) -> dict[str, Tensor]:
        assert self.state is not None
        return {name: tensor for name, tensor in self.state.tensors().items() if name != "length"}

    def offload(self) -> None:
        """Move the state to the CPU until :meth:`prefetch`: addresses change, graphs are compiled again."""
        if self.state is not None:
            home = self.device
            self._move("cpu")
            self.device = home

    def prefetch(self) -> None:
        """Move the state back to where it was before :meth:`offload`."""
        self._move(getattr(self, "device", "cpu"))

    def _move(self, device: torch.device | str) -> None:
        if self.state is not None:
            with _ordinary_tensors():
                moved = self.state.to(device)
            if moved is not self.state:
                self._hold(moved)


def _check_crop(tokens_to_remove: int) -> None:
    if tokens_to_remove > 0 and not _CROP_TAKES_A_SIZE:
        raise ValueError(f"crop was given {tokens_to_remove}; allowed: 0 or less, minus the number of tokens to remove")


def _shortened(length: Tensor, tokens_to_remove: int) -> Tensor:
    """A length after ``crop``."""
    if tokens_to_remove > 0:
        return length.clamp(max=tokens_to_remove)
    return (length + tokens_to_remove).clamp(min=0)


def _check_beams(beam_idx: Tensor, rows: int) -> None:
    if beam_idx.shape != (rows,) or beam_idx.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"reorder_cache was given {beam_idx.dtype} beam_idx of shape {list(beam_idx.shape)}; allowed: [{rows}], one int entry per row"
        )
    if beam_idx.device.type == "cpu" and rows and not 0 <= int(beam_idx.min()) <= int(beam_idx.max()) < rows:
        raise ValueError(f"reorder_cache was given beam_idx {beam_idx.tolist()}; allowed: 0 to {rows - 1}")


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

    Eager: after ``model.set_attn_implementation("kivi")`` attention reads the quantised state (:mod:`kivi_ops.attention`), with any
    other a float copy of one layer at a time. Compiled: ``update`` is one ``kivi::update`` node a layer, which ``backend="kivi"`` turns
    into attention over the quantised state and which any other backend runs as it is. State is allocated at the first eager forward
    (``generate`` prefills eagerly) or by :meth:`early_initialization`, never in a graph. It has no backward: run it under
    ``torch.no_grad()``.

    Left padding must be known, for pads are no tokens (contract section 2), and a cache is not told the mask: give ``left_padding=``
    or make the cache by :meth:`for_model`. Otherwise more than one row is warned about once, as it may be padded; a single padded row
    cannot be noticed. Right results need the model's own mask in every case.

    Layers that only hold linear-attention states, or nothing, are transformers' own. Flash attention is refused, as it would attend to
    unwritten columns. An encoder-decoder takes :meth:`for_encoder_decoder`.

    Args:
        model_config: the model's config (a composite one's text part counts).
        max_cache_len: capacity C in columns of the padded frame, pads counted.
        config: how Keys and Values are quantised; ``KiviConfig()`` if None.
        left_padding: pads before each row's first token: int [B], or a 0/1 attention mask [B, T]. Kept until :meth:`reset`.

    Raises:
        ValueError, TypeError: an argument that is not allowed; a layer type without a cache here.
    """

    _is_self_attention = False

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
        _check_capacity(max_cache_len)
        if getattr(model_config, "is_encoder_decoder", False) and not self._is_self_attention:
            raise ValueError(
                f"{model_config.model_type!r} is an encoder-decoder, whose cross-attention needs a cache of its own; allowed: "
                "KiviCache.for_encoder_decoder(...)"
            )
        text_config = self._decoder_config(model_config)
        if is_flash_attention_requested(text_config):
            raise ValueError(
                f"attn_implementation is {text_config._attn_implementation!r}; allowed with KiviCache: one that takes a mask, such as "
                "'sdpa' or 'eager', since unwritten columns must be hidden"
            )
        watched = model_config if self._is_self_attention else text_config  # of an encoder-decoder, text_config is a copy
        self._shared = _Shared(
            config,
            max_cache_len,
            may_be_padded=not self._is_self_attention,
            attention_name=lambda: getattr(watched, "_attn_implementation", None),
        )
        if getattr(text_config, "kv_lora_rank", None) is not None:
            # What is cached is not what attention reads: latents, or Keys in parts.
            self._shared.attention_name = lambda: None
        self._attachment: _Attachment | None = None
        self._warned_of_mask = False
        super().__init__(layers=_make_layers(text_config, max_cache_len, config, self._shared))
        if left_padding is not None:
            self.set_left_padding(left_padding)

    @staticmethod
    def _decoder_config(model_config: Any) -> Any:
        return model_config.get_text_config(decoder=True)

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

    @classmethod
    def for_encoder_decoder(
        cls,
        model_config: transformers.PreTrainedConfig,
        max_cache_len: int = 4096,
        config: KiviConfig | None = None,
        left_padding: Tensor | Sequence[int] | None = None,
    ) -> EncoderDecoderCache:
        """A cache for an encoder-decoder: the decoder's self-attention in a ``KiviCache`` (``.self_attention_cache``).

        Cross-attention stays float in a ``DynamicCache``: its Keys and Values are written once, and no token is ever appended to them.
        Without ``left_padding`` the decoder's rows are taken as unpadded, as ``generate`` starts them.
        """
        cache = _SelfAttentionCache(model_config, max_cache_len, config, left_padding)
        return EncoderDecoderCache(cache, DynamicCache())

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
        self._shared.counts, self._shared.explicit = counts, True
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
        if self._attachment is not None and self._shared.counts is None:
            self._shared.counts = torch.zeros(batch_size, dtype=torch.int32)  # to be learnt by the hook
        for layer, heads, key_dim, value_dim in zip(self.layers, *sizes, strict=True):
            if isinstance(layer, KiviLayer) and not layer.is_initialized:
                empty = torch.empty((batch_size, heads, 0, key_dim), dtype=dtype, device=device)
                layer.lazy_initialization(empty, empty.new_empty((batch_size, heads, 0, value_dim)))

    # ------------------------------------------------------------------------------------------------------- properties

    @property
    def config(self) -> KiviConfig:
        """How Keys and Values are quantised."""
        return self._shared.config

    @property
    def max_cache_len(self) -> int:
        """Capacity in columns of the padded frame."""
        return self._shared.capacity

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
        self._shared.counts, self._shared.explicit, self._shared.broken = None, False, None
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of every layer (see :meth:`KiviLayer.crop`).

        Tokens that an interrupted forward gave to some layers only are forgotten first: ``crop(0)`` makes such a cache whole again.
        """
        margin = self.config.rollback_margin
        if self._shared.drafting and -tokens_to_remove > margin:
            warnings.warn(
                f"{-tokens_to_remove} drafted tokens were rejected at once, which rollback_margin={margin} does not cover: tokens that "
                f"they sealed stay quantised. Use KiviConfig(rollback_margin={-tokens_to_remove}) or shorter drafts.",
                stacklevel=2,
            )
        _check_crop(tokens_to_remove)
        for layer in self.layers:  # those that may refuse come first
            if not isinstance(layer, KiviLayer):
                layer.crop(tokens_to_remove)
        lengths = [layer.state.length for layer in self._shared.layers if layer.state is not None]
        if lengths:
            least = torch.stack([length.to(lengths[0].device) for length in lengths]).amin()
            for length in lengths:
                length.copy_(_shortened(least, tokens_to_remove))

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row i becomes what row ``beam_idx[i]`` was, in place. ``beam_idx``: int tensor [B].

        Raises:
            ValueError: see :meth:`KiviLayer.reorder_cache`.
        """
        if self._shared.counts is not None:
            _check_beams(beam_idx, self._shared.counts.shape[0])
        if self.batch_size >= 0:
            _check_beams(beam_idx, self.batch_size)
        with self._shared.whole("reorder_cache"):
            super().reorder_cache(beam_idx)
        self._move_counts(beam_idx)

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Keep the rows ``indices`` (int [N], or bool [B]); state is allocated anew, so compile again.

        Raises:
            ValueError: ``indices`` of another form. IndexError: rows that are not there. NotImplementedError: a layer that cannot.
        """
        index = _row_indices(indices)
        if index.device.type == "cpu" and self.batch_size >= 0:
            torch.empty(self.batch_size)[index]  # rows that are not there are noticed here, where it is not a device's fatal error
        self._require("batch_select_indices")
        self._replace_rows("batch_select_indices", lambda tensor: tensor[index.to(tensor.device)], index)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times; state is allocated anew, so compile again.

        Raises:
            ValueError: less than once. NotImplementedError: a layer that cannot.
        """
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise ValueError(f"repeats is {repeats!r}; allowed: an int of 1 or more")
        self._require("batch_repeat_interleave")
        self._replace_rows("batch_repeat_interleave", lambda tensor: tensor.repeat_interleave(repeats, dim=0), repeats)

    def batch_split(self, full_batch_size: int, split_size: int) -> list[KiviCache]:
        """Caches of ``split_size`` rows each (the last one of what is left), with states of their own.

        Raises:
            ValueError: another number of rows, or a split of none. NotImplementedError: a layer that cannot.
        """
        if full_batch_size != self.batch_size or split_size < 1:
            raise ValueError(
                f"batch_split was given {full_batch_size} rows and splits of {split_size}; allowed: {self.batch_size} rows, splits of 1 "
                "or more"
            )
        self._require("batch_select_indices")
        return [self._selected(index) for index in torch.arange(full_batch_size).split(split_size)]

    def _selected(self, index: Tensor) -> KiviCache:
        """A cache of its own with the rows ``index`` of this one."""
        selected = copy.copy(self)
        shared = selected._shared = replace(self._shared, layers=[])
        selected.layers = []
        for layer in self.layers:
            if isinstance(layer, KiviLayer):
                own: Any = KiviLayer(shared.capacity, shared.config, shared, layer.index, layer.is_first)
                if layer.state is not None:
                    own._hold(layer._rows(lambda tensor: tensor[index.to(tensor.device)]))
            else:
                own = copy.deepcopy(layer)
                own.batch_select_indices(index)
            selected.layers.append(own)
        selected._move_counts(index)
        return selected

    def _replace_rows(self, method: str, change: Callable[[Tensor], Tensor], argument: Any) -> None:
        """All layers or, where one cannot allocate its new state, none."""
        counts = None if self._shared.counts is None else change(self._shared.counts)
        states = [None if layer.state is None else layer._rows(change) for layer in self._shared.layers]
        with self._shared.whole(method):
            for layer in self.layers:
                if not isinstance(layer, KiviLayer):
                    getattr(layer, method)(argument)
            for kivi, state in zip(self._shared.layers, states, strict=True):
                if state is not None:
                    kivi._hold(state)
        self._shared.counts = counts

    def resize(self, max_cache_len: int) -> None:
        """Change the capacity and keep all tokens; nothing is quantised again. State is allocated anew, so compile again.

        Raises:
            ValueError: not an int of 1 or more, or less than what is held needs.
            RuntimeError: in a graph.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError("KiviCache.resize allocates, which a graph cannot; call it eagerly")
        _check_capacity(max_cache_len)
        counts = self._shared.counts
        if counts is not None and counts.numel() and int(counts.max()) > max_cache_len:
            raise ValueError(f"max_cache_len is {max_cache_len}; allowed: {int(counts.max())} or more, the left padding")
        self._shared.rebuild(max_cache_len, self.config)

    def activate_past_recording(self) -> None:
        """Be ready for rollbacks, as ``generate`` asks for with an assistant: a ``rollback_margin`` of at least ``DRAFT_TOKENS``.

        A longer draft widens it further when it comes (eagerly), up to ``LONGEST_DRAFT``. State is allocated anew, so compile again.
        """
        super().activate_past_recording()
        self._shared.drafting = True
        self._shared.widen(DRAFT_TOKENS)

    def to(self, device: torch.device | str) -> KiviCache:
        """Move all states to ``device``; addresses change, so compile again. Returns the cache."""
        with self._shared.whole(f"to({device})"):
            for layer in self.layers:
                if isinstance(layer, KiviLayer):
                    layer._move(device)
                else:
                    _move_foreign(layer, device)
        return self

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Move a layer's state to the CPU until :meth:`prefetch`; windows do not matter here, as every layer keeps all tokens."""
        self.layers[layer_idx].offload()

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Move a layer's state back."""
        self.layers[layer_idx].prefetch()

    # ---------------------------------------------------------------------------------------------------------- saving

    def state_dict(self) -> dict[str, Any]:
        """Everything this cache holds, as plain values and copies of its tensors, for ``torch.save`` and :meth:`load_state_dict`."""
        with _ordinary_tensors():
            layers = [
                ({} if layer.state is None else {name: tensor.clone() for name, tensor in layer.state.tensors().items()})
                if isinstance(layer, KiviLayer)
                else _plain(vars(layer))
                for layer in self.layers
            ]
        return {
            "layout": layout.NAME,
            "version": layout.VERSION,
            "config": asdict(self.config),
            "max_cache_len": self.max_cache_len,
            "left_padding": _plain(self._shared.counts),
            "left_padding_given": self._shared.explicit,
            "layers": layers,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Become what :meth:`state_dict` saved: in place where this cache has states of the same shapes, else in new ones.

        New states are where the saved tensors are (``map_location`` of ``torch.load``). The margin and the capacity become the saved ones.

        Raises:
            ValueError: a layout, version, configuration, model or tensor that does not fit; nothing is changed then.
        """
        for name, here in (("layout", layout.NAME), ("version", layout.VERSION)):
            if saved.get(name) != here:
                raise ValueError(f"the saved cache has {name} {saved.get(name)!r}; allowed: {here!r}")
        config, capacity = KiviConfig(**saved["config"]), saved["max_cache_len"]
        if replace(config, rollback_margin=self.config.rollback_margin) != self.config:
            raise ValueError(f"the saved cache has {config}; allowed: {self.config} with any rollback_margin")
        if len(saved["layers"]) != len(self.layers):
            raise ValueError(f"the saved cache has {len(saved['layers'])} layers; allowed: {len(self.layers)}")
        states = {}
        with _ordinary_tensors():
            for layer, held in zip(self.layers, saved["layers"], strict=True):
                if isinstance(layer, KiviLayer):
                    states[layer.index] = _restored(layer.index, config, capacity, held)
                elif set(held) != set(vars(layer)):
                    raise ValueError(f"the saved cache has {sorted(held)} in layer {layer}; allowed: {sorted(vars(layer))}")
        with self._shared.whole("load_state_dict"):
            self._shared.config, self._shared.capacity = config, capacity
            self._shared.counts, self._shared.explicit = _plain(saved["left_padding"]), saved["left_padding_given"]
            for layer, held in zip(self.layers, saved["layers"], strict=True):
                if isinstance(layer, KiviLayer):
                    layer.config, layer.max_cache_len = config, capacity
                    layer._become(states[layer.index])
                else:
                    vars(layer).update(_plain(held))
        self._shared.broken = None

    def _require(self, method: str) -> None:
        """Before any layer is touched."""
        for index, layer in enumerate(self.layers):
            if not hasattr(layer, method):
                raise NotImplementedError(f"{method}: layer {index} is a {type(layer).__name__}, which cannot")

    def _move_counts(self, index: Tensor) -> None:
        if (counts := self._shared.counts) is not None:
            self._shared.counts = counts[index.to(counts.device)]

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
            self._shared.counts = counts
            return
        held = None if torch.compiler.is_compiling() else first.tokens_held()
        if held and not bool((first.state.left_padding >= held).any()):
            return  # no row is empty: an eager decode step costs a read here, not an operator per layer
        for layer in self._kivi_layers():
            layer.observe_padding(attention_mask, new_tokens)


class _SelfAttentionCache(KiviCache):
    """The decoder's half of :meth:`KiviCache.for_encoder_decoder`."""

    _is_self_attention = True

    @staticmethod
    def _decoder_config(model_config: Any) -> Any:
        config = model_config.get_text_config(decoder=True)
        layers = getattr(model_config, "num_decoder_layers", None)  # T5's own name for it; it may differ from the encoder's
        if layers is not None and layers != config.num_hidden_layers:
            config = copy.deepcopy(config)
            config.num_hidden_layers = layers
        return config


def _check_capacity(max_cache_len: Any) -> None:
    if isinstance(max_cache_len, bool) or not isinstance(max_cache_len, int) or max_cache_len < 1:
        raise ValueError(f"max_cache_len is {max_cache_len!r}; allowed: an int of 1 or more")


def _row_indices(indices: Tensor | Sequence[int]) -> Tensor:
    index = torch.as_tensor(indices)
    if index.dim() != 1 or index.dtype.is_floating_point:
        raise ValueError(f"indices are {index.dtype} {list(index.shape)}; allowed: int [N], or bool with an entry per row")
    return index


def _plain(value: Any) -> Any:
    """``value`` with copies of its tensors, if ``torch.save`` and a safe ``torch.load`` take it as it is.

    Raises:
        NotImplementedError: they do not.
    """
    if isinstance(value, Tensor):
        with _ordinary_tensors():
            return value.clone()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return value
    raise NotImplementedError(f"a layer of transformers' own holds a {type(value).__name__}, which cannot be saved")


def _restored(index: int, config: KiviConfig, capacity: int, saved: Mapping[str, Tensor]) -> KiviState | None:
    """A saved state in storages of its own, or None if there was none.

    Raises:
        ValueError: it is not one of that configuration and capacity.
    """
    if not saved:
        return None
    try:
        key, value = saved["key_window"], saved["value_window"]
        sizes = (key.shape[0], key.shape[1], capacity, key.shape[3], value.shape[3])
        expected = KiviState.allocate(config, *sizes, key.dtype, "meta").tensors()
    except (KeyError, IndexError) as error:
        raise ValueError(f"the saved cache lacks parts of layer {index}: {error}") from error
    for name, tensor in expected.items():
        if name not in saved or saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
            found = f"{saved[name].dtype} {list(saved[name].shape)}" if name in saved else "nothing"
            raise ValueError(f"the saved cache has {found} as {name} of layer {index}; allowed: {tensor.dtype} {list(tensor.shape)}")
    return KiviState(config, capacity, **{name: saved[name].clone() for name in expected})


def _move_foreign(layer: Any, device: torch.device | str) -> None:
    """Move a layer of transformers' own."""
    moved = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, vars(layer))
    vars(layer).update(moved)
    if getattr(layer, "device", None) is not None:
        layer.device = torch.device(device)


def _make_layers(text_config: transformers.PreTrainedConfig, max_cache_len: int, config: KiviConfig, shared: _Shared) -> list[Any]:
    """A :class:`KiviLayer` for each layer that holds K and V, transformers' own for those that do not."""
    layer_types, kwargs = get_layer_types_and_kwargs(text_config)
    layers: list[Any] = []
    for index, layer_type in enumerate(layer_types):
        layer_class: Any = STATIC_LAYER_TYPE_MAPPING.get(layer_type)
        if layer_type in KIVI_LAYER_TYPES:
            first = not any(isinstance(layer, KiviLayer) for layer in layers)
            layers.append(KiviLayer(max_cache_len, config, shared, index, is_first=first))
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
    if tokens is None or not isinstance(cache, KiviCache) or cache._attachment is None or cache._shared.explicit:
        return
    if torch.compiler.is_compiling() and tokens.shape[1] == 1:
        return  # rows hold tokens by then; the decode graph stays free of it
    if cache._attachment.model() is model:
        cache._observe(call.get("attention_mask"), tokens.shape[0], tokens.shape[1])
