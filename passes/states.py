"""The quantised state that the backend keeps beside a model's own float cache, at run time. Must not know of graphs.

One :class:`KiviState` per pair of cache tensors and :class:`KiviConfig`, found by the identity of the tensors and released with them. The
float cache stays complete and is what counts: whatever in it was not written through a rewritten graph is taken over before the next.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from kivi_ops.config import KiviConfig
from kivi_ops.state import KiviState

log = logging.getLogger("kivi_ops.passes")


@dataclass(frozen=True)
class Binding:
    """Where a rewritten site finds its caches among the graph's inputs, and the column at which the call's new tokens start.

    ``key``, ``value``: places of the cache tensors. ``start``: from all inputs of the graph to an int tensor whose first element it is.
    """

    key: int
    value: int
    start: Callable[..., Any]
    config: KiviConfig


class Owned:
    """A state and what is known of the float tensors it follows. Holds none of them."""

    def __init__(self, key: Tensor, value: Tensor, config: KiviConfig) -> None:
        with torch.inference_mode(False):  # an inference tensor could never be written outside of inference mode again
            rows, heads, capacity, key_dim = key.shape
            self.state = KiviState.allocate(config, rows, heads, capacity, key_dim, value.shape[-1], key.dtype, key.device)
        for tensor in self.state.tensors().values():
            torch._dynamo.mark_static_address(tensor)
        self.value = TensorWeakRef(value)
        self.versions: tuple[int, int] | None = None

    def catch_up(self, key: Tensor, value: Tensor, start: Callable[[], Tensor]) -> None:
        """Take the first ``start()`` columns over if the float tensors were written since :meth:`note`, or may have been."""
        if self.versions is None or self.versions != _versions(key, value):
            self.versions = None
            position = torch.zeros((), dtype=torch.int64, device=key.device)
            with torch.no_grad():
                self.state.append(key.detach(), value.detach(), position, start().reshape(-1)[:1])

    def note(self, key: Tensor, value: Tensor) -> None:
        """The state follows the float tensors as they are now."""
        self.versions = _versions(key, value)


_OWNED = WeakTensorKeyDictionary()  # Key cache -> {config: Owned}


def owned_state(key: Tensor, value: Tensor, config: KiviConfig) -> Owned:
    """The state of a pair of float caches [B, H, C, D_k], [B, H, C, D_v], made if there is none."""
    states: dict[KiviConfig, Owned] = _OWNED.setdefault(key, {})
    owned = states.get(config)
    if owned is None or owned.value() is not value:
        if key.is_inference() or value.is_inference():
            log.warning(
                "a float cache was allocated under torch.inference_mode(): it has no version counter, so all of it is quantised again "
                "before every step; allocate it outside"
            )
        owned = states[config] = Owned(key, value, config)
    return owned


def held_states() -> list[KiviState]:
    """The states of all float caches that are alive, for tests and for counting bytes."""
    return [owned.state for states in _OWNED.values() for owned in states.values()]


def with_states(compiled: Callable[..., Any], bindings: list[Binding]) -> Callable[..., Any]:
    """A rewritten graph as what Dynamo calls: finds the states of the caches it is handed, and hands them on as further inputs."""

    def run(*args: Any) -> Any:
        pairs = [(args[binding.key], args[binding.value]) for binding in bindings]
        states = [owned_state(*pair, binding.config) for pair, binding in zip(pairs, bindings, strict=True)]
        for owned, pair, binding in zip(states, pairs, bindings, strict=True):
            owned.catch_up(*pair, functools.partial(binding.start, *args))
        for owned in states:
            owned.versions = None  # a call that fails half way leaves nothing to rely on
        result = compiled(*args, *(tensor for owned in states for tensor in owned.state.tensors().values()))
        for owned, pair in zip(states, pairs, strict=True):
            owned.note(*pair)
        return result

    return run


def _versions(key: Tensor, value: Tensor) -> tuple[int, int] | None:
    """None for inference tensors, which have no version counter: nothing is known of their writes."""
    return None if key.is_inference() or value.is_inference() else (key._version, value._version)
