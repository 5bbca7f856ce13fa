"""The attention kernels under measurement, each forced by name, and the float attention that they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kivi_ops import KiviState
from kivi_ops.benchmarks.common import Machine

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # contract section 7
FLOAT_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def kivi_kernels(
    state: KiviState, query: Tensor, key: Tensor, value: Tensor, position: Tensor, is_causal: bool = False
) -> dict[str, Callable[[], Tensor]]:
    """By name: ``"auto"``, what the operator itself chooses, and for decode steps on a GPU ``"portable"``, plain Triton."""
    found: dict[str, Callable[[], Tensor]] = {"auto": lambda: state.attention(query, key, value, position, is_causal=is_causal)}
    if query.device.type == "cpu":
        return found
    from kivi_ops.kernels import launch

    if launch.is_decode_step(query, (state.key_layout, state.value_layout), key.shape[1], None):
        tensors = list(state.tensors().values())[:-1]
        format: dict[str, Any] = {**state.config.read_kwargs(state.capacity, state.dtype), "seal": state.config.seal, "kernel": "portable"}
        arguments = (query, key, value, *tensors, position, None, is_causal, query.shape[-1] ** -0.5, None)
        found["portable"] = lambda: launch.attention(*arguments, **format)
    return found


def float_microseconds(machine: Machine, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> tuple[float, float, str]:
    """The fastest float attention that takes these arguments: its times with a dirty and a clean L2, and its name.

    Raises:
        RuntimeError: none takes them.
    """

    def attend() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    if not machine.is_gpu:
        return *machine.dirty_and_clean(attend), "CPU"
    times, reasons = [], []
    for name, backend in FLOAT_BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                times.append((*machine.dirty_and_clean(attend), name))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # "No available kernel"
            reasons.append(f"{name}: {str(error).splitlines()[0]}")
    if not times:
        raise RuntimeError("no float attention runs here: " + "; ".join(reasons))
    return min(times)


def check(name: str, actual: Tensor, expected: Tensor) -> float:
    """The relative error of an attention output.

    Raises:
        ArithmeticError: it is above the contract's tolerance: a time would say nothing.
    """
    error = float((actual.double() - expected).norm() / expected.norm())
    if not error <= TOLERANCE[actual.dtype]:
        raise ArithmeticError(f"{name} is wrong: relative error {error:.1e}, allowed {TOLERANCE[actual.dtype]:.0e}")
    return error
