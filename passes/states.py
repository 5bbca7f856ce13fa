"""The quantised state that the backend keeps beside a model's own float cache, at run time. Must not know of graphs.

One :class:`KiviState` per pair of cache tensors, or of parts of them, and :class:`KiviConfig`, found by the identity of the tensors and
released with them.

**The float cache stays** (default). Rewritten graphs go on writing it, so it is always complete, and it is what counts: what a rewritten
graph did not write itself is taken over before the next one runs. The rules:

- *Writes from outside* (an eager prefill, ``reset()``, another compiled graph, this one as a refused or a float one) are noticed by the
  tensors' version counters. Everything before the call's first new column is taken over then, and on first use.
- *Writes that no counter shows* (through ``.data``, NumPy or DLPack, from a kernel of your own, by replaying a CUDA graph of your own) are
  not noticed. Say so: ``torch.autograd.graph.increment_version((keys, values))``.
- *Inference tensors*, allocated under ``torch.inference_mode()``, have no version counter. They are taken over before every call, which is
  right and slow; a warning says so once. Tensors allocated outside are fine, also when they are used under it.
- *Back*: a smaller position is a rollback, position 0 a reset; nothing else need be told. Contract section 3 says what becomes of sealed
  tokens.
- *Forward*: a call whose first new column lies beyond what the state holds, with no write from outside since, would attend over columns
  that the state never saw. It changes no state and its attention is NaN, as past the capacity; so are later ones, until a position within
  what is held, or a write from outside. To jump on purpose, say that the float cache counts: ``increment_version`` as above.
- *Padding*: a float cache knows none. Pads are ordinary tokens that the mask hides; they count in the windows, and those at the left share
  a Key group with real tokens (use a :class:`KiviCache` where that matters).
- *Other shapes*: another capacity, other options, another number of rows is another state.
- *Columns*: where a graph does not show that several new tokens' columns follow one another (an input says them), that is checked before it
  runs, on the host: ValueError if not.

**``free_float_cache=True``**: the caller promises that from the first call on everything which touches the cache is compiled with this
option and rewritten (what is refused raises when it is compiled). The first call takes over what the cache holds before its first new
column and frees its memory, one layer after the other; float writes are gone from the graph. The tensors stay, with sizes and no storage.
What touches one later fails: a write, a view or a compiled graph raises RuntimeError ("... storage of size 0", "Cannot access data pointer
of Tensor"), as does this package's own state with other options. PyTorch does not check an eager read of a *whole* tensor (``keys.sum()``):
that ends the process, by a segmentation fault on a CPU and an illegal memory access on a GPU, rather than giving a wrong number. A reset
is position 0 (``cache.reset()`` writes). All other rules hold, but for jumps: nothing is left that they could be made from.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from kivi_ops.config import KiviConfig
from kivi_ops.passes.regions import Region
from kivi_ops.state import KiviState

log = logging.getLogger("kivi_ops.passes")


@dataclass(frozen=True)
class Start:
    """A call's position as a function of its graph's inputs: ``compute`` takes those at ``places``."""

    compute: Callable[..., Tensor]
    places: tuple[int, ...]

    def __call__(self, *args: Any) -> Tensor:
        return self.compute(*(args[place] for place in self.places))


@dataclass(frozen=True)
class Binding:
    """Where a rewritten site finds its caches among the graph's inputs, and the column at which the call's new tokens start.

    ``key``, ``value``: places of the cache tensors; ``regions``: which part of each is the cache. ``start``: from all inputs of the graph
    to an int tensor whose first element it is; ``consecutive``: whether its others are known to be those that follow. ``free``: the graph
    does without the float caches; they are no inputs of what was compiled.
    """

    key: int
    value: int
    start: Callable[..., Any]
    config: KiviConfig
    regions: tuple[Region, Region] = (Region(), Region())
    consecutive: bool = True
    free: bool = False


class Owned:
    """A state and what is known of the float tensors it follows. Holds none of them."""

    def __init__(self, key: Tensor, value: Tensor, config: KiviConfig, regions: tuple[Region, Region]) -> None:
        self.regions = regions
        with torch.inference_mode(False):  # an inference tensor could never be written outside of inference mode again
            key_part, value_part = self.parts(key, value)
            rows, heads, capacity, key_dim = key_part.shape
            self.state = KiviState.allocate(config, rows, heads, capacity, key_dim, value_part.shape[-1], key.dtype, key.device)
        for tensor in self.state.tensors().values():
            torch._dynamo.mark_static_address(tensor)
        self.value = TensorWeakRef(value)
        self.versions: tuple[int, int] | None = None
        self.freed = False  # the state is all there is

    def parts(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The caches [B, H, C, D] in the tensors that hold them."""
        key_region, value_region = self.regions
        return key_region.of(key.detach()), value_region.of(value.detach())

    def catch_up(self, key: Tensor, value: Tensor, start: Callable[[], Tensor]) -> None:
        """Take the first ``start()`` columns over if the float tensors were written since :meth:`note`, or may have been."""
        if not self.freed and (self.versions is None or self.versions != _versions(key, value)):
            self.versions = None
            position = torch.zeros((), dtype=torch.int64, device=key.device)
            with torch.no_grad():
                self.state.append(*self.parts(key, value), position, start().reshape(-1)[:1])

    def note(self, key: Tensor, value: Tensor) -> None:
        """The state follows the float tensors as they are now."""
        self.versions = None if self.freed else _versions(key, value)


_OWNED = WeakTensorKeyDictionary()  # Key cache -> {(config, regions): Owned}
_WHOLE = (Region(), Region())


def owned_state(key: Tensor, value: Tensor, config: KiviConfig, regions: tuple[Region, Region] = _WHOLE) -> Owned:
    """The state of a pair of float caches, whose ``regions`` are [B, H, C, D_k] and [B, H, C, D_v], made if there is none."""
    states: dict[tuple[KiviConfig, tuple[Region, Region]], Owned] = _OWNED.setdefault(key, {})
    owned = states.get((config, regions))
    if owned is None or owned.value() is not value:
        if _is_freed(key) or _is_freed(value):
            raise RuntimeError(
                "backend='kivi': free_float_cache=True has freed this float cache, so that no state with other options or of another shape "
                f"can be made from it; wanted {config}, there is {', '.join(str(other) for other, _ in states) or 'none'}"
            )
        if key.is_inference() or value.is_inference():
            log.warning(
                "a float cache was allocated under torch.inference_mode(): it has no version counter, so all of it is quantised again "
                "before every step; allocate it outside"
            )
        owned = states[config, regions] = Owned(key, value, config, regions)
    return owned


def held_states() -> list[KiviState]:
    """The states of all float caches that are alive, for tests and for counting bytes."""
    return [owned.state for states in _OWNED.values() for owned in states.values()]


def freed_inputs(bindings: Iterable[Binding]) -> set[int]:
    """Places of the inputs that a rewritten graph no longer has."""
    return {place for binding in bindings if binding.free for place in (binding.key, binding.value)}


def with_states(compiled: Callable[..., Any], bindings: Sequence[Binding]) -> Callable[..., Any]:
    """A rewritten graph as what Dynamo calls: finds the states of the caches it is handed, and hands them on as further inputs."""
    freed = freed_inputs(bindings)
    last = {place: binding for binding in bindings for place in (binding.key, binding.value)}  # several layers may be in one tensor
    to_check = list(dict.fromkeys(binding.start for binding in bindings if not binding.consecutive))

    def run(*args: Any) -> Any:
        given_back = 0
        pairs = [(args[binding.key], args[binding.value]) for binding in bindings]
        for columns in to_check:
            _check_consecutive(columns(*args))
        states = []
        for pair, binding in zip(pairs, bindings, strict=True):
            key_region, value_region = binding.regions
            owned = owned_state(*pair, binding.config, (key_region.told(args), value_region.told(args)))
            if owned.freed and not binding.free:
                raise RuntimeError(
                    "backend='kivi': free_float_cache=True has freed this float cache, and a graph compiled without that option writes it"
                )
            owned.catch_up(*pair, functools.partial(binding.start, *args))
            states.append(owned)
            if binding.free:
                owned.freed = True
                given_back += sum(_free(args[place]) for place in (binding.key, binding.value) if last[place] is binding)
        if given_back:
            log.info("freed float caches of %d bytes", given_back)
        for owned in states:
            owned.versions = None  # a call that fails half way leaves nothing to rely on
        kept = [arg for place, arg in enumerate(args) if place not in freed] if freed else args
        result = compiled(*kept, *(tensor for owned in states for tensor in owned.state.tensors().values()))
        for owned, pair in zip(states, pairs, strict=True):
            owned.note(*pair)
        return result

    return run


def _check_consecutive(columns: Tensor) -> None:
    """Raises:
    ValueError: the columns [S] that a call's new tokens go to do not follow one another. Nothing has been written yet.
    """
    if not torch.equal(columns, columns[0] + torch.arange(len(columns), dtype=columns.dtype, device=columns.device)):
        shown = ", ".join(map(str, columns[:8].tolist())) + (", ..." if len(columns) > 8 else "")
        raise ValueError(
            f"backend='kivi': the new tokens go to the cache's columns [{shown}]; allowed: columns that follow one another. Run such "
            "a call uncompiled (torch.compiler.set_stance('force_eager')): what it writes is taken over"
        )


def _free(tensor: Tensor) -> int:
    """Give the memory back; how many bytes. What is left has sizes, so that Dynamo knows it again, and fails if it is written or viewed."""
    size = tensor.untyped_storage().nbytes()
    if size:
        tensor.untyped_storage().resize_(0)
        torch._C._set_throw_on_mutable_data_ptr(tensor)
    return size


def _is_freed(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _versions(key: Tensor, value: Tensor) -> tuple[int, int] | None:
    """None for inference tensors, which have no version counter: nothing is known of their writes."""
    return None if key.is_inference() or value.is_inference() else (key._version, value._version)
