"""10,000 operator calls with arguments that are partly wrong: an error or a result, never a crash, never a byte outside of a tensor.

Every state tensor lies between guards that no call may touch; what is refused by a check leaves the state as it was. Wrong are shapes,
dtypes, strides, numbers of the format, and the contents of every integer tensor (positions, boundaries, padding, lengths).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers import bits_of
from torch import Tensor

from kivi_ops import KiviConfig, KiviState

CALLS = 10_000
GUARD = 64  # elements before and after each state tensor
EXPECTED = (ValueError, TypeError, RuntimeError, IndexError, NotImplementedError, OverflowError)
NUMBERS = (-(2**62), -(2**31), -1000, -1, 0, 1, 2, 3, 7, 31, 40, 41, 1000, 2**31 - 1, 2**31, 2**62)


class Guarded:
    """A state whose tensors are parts of larger ones."""

    def __init__(self, config: KiviConfig, rows: int, dtype: torch.dtype, capacity: int, device: str) -> None:
        state = KiviState.allocate(config, rows, 2, capacity, 16, 12, dtype, device)
        self.buffers, tensors = {}, {}
        for name, tensor in state.tensors().items():
            buffer = torch.full((tensor.numel() + 2 * GUARD,), 77, dtype=tensor.dtype, device=device)
            tensors[name] = buffer[GUARD : GUARD + tensor.numel()].view(tensor.shape).copy_(tensor)
            self.buffers[name] = buffer
        self.state = KiviState(config, capacity, **tensors)

    def assert_guards(self) -> None:
        for name, buffer in self.buffers.items():
            assert (buffer[:GUARD] == 77).all() and (buffer[-GUARD:] == 77).all(), f"written outside of {name}"

    def copy(self) -> dict[str, Tensor]:
        return {name: bits_of(tensor).clone() for name, tensor in self.state.tensors().items()}


def wrong_tensor(tensor: Tensor, chance: random.Random) -> Any:
    """Something near ``tensor``."""
    kind = chance.randrange(9)
    if kind == 0:
        return tensor.to(chance.choice([torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.bool]))
    if kind == 1 and tensor.dim():
        return tensor.narrow(chance.randrange(tensor.dim()), 0, 0)
    if kind == 2 and tensor.dim():
        return tensor.repeat_interleave(2, chance.randrange(tensor.dim()))
    if kind == 3 and tensor.dim() > 1:
        return tensor.transpose(*chance.sample(range(tensor.dim()), 2))
    if kind == 4:
        return tensor[None]
    if kind == 5 and tensor.dim():
        return tensor.select(chance.randrange(tensor.dim()), 0) if tensor.numel() else tensor
    if kind == 6 and tensor.dim():
        return tensor[..., :1].expand(tensor.shape)
    if kind == 7:
        return None
    if tensor.dtype in (torch.int32, torch.int64):
        limits = torch.iinfo(tensor.dtype)
        number = min(max(chance.choice(NUMBERS), limits.min), limits.max)
        return tensor.clone().fill_(number)
    return tensor.clone().fill_(chance.choice([float("nan"), float("inf"), 0.0, 6e4])) if tensor.dtype.is_floating_point else tensor


def wrong_number(value: Any, chance: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice([-(2**31), -1, 0, 1, 2, 3, 5, 8, 16, 17, 64, 255, 256, 257, 2**20, 2**62, "4", None, 4.5])
    if isinstance(value, str):
        return chance.choice(["", "after_attention", "before_attention", "never", 3])
    if isinstance(value, torch.dtype):
        return chance.choice([torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8])
    return chance.choice([-1.0, 0.0, 1e-30, 1e30, float("nan"), float("inf"), None, "x"])


def call(guarded: Guarded, chance: random.Random, device: str) -> tuple[str, list[Any], dict[str, Any]]:
    """A valid call."""
    state, config = guarded.state, guarded.state.config
    rows, new = state.sealed.shape[0], chance.choice([0, 1, 1, 3, 17])
    key, value = (torch.randn(rows, 2, new, dim, device=device).to(state.dtype) for dim in (16, 12))
    query = torch.randn(rows, 4, new, 16, device=device).to(state.dtype)
    length = int(state.length)
    start = chance.choice([length, length, max(0, length - 5), 0, state.capacity - new, state.capacity])
    position = torch.tensor(start, device=device)
    if chance.random() < 0.3:
        position = position + torch.arange(rows, device=device)[:, None]
    tensors = list(state.tensors().values())
    op = chance.choice(["attention", "append", "update", "observe_padding", "quantize_pack_key", "quantize_pack_value", "unpack"])
    if op == "attention":
        mask = torch.rand(rows, 1, new, state.capacity, device=device) > 0.3 if chance.random() < 0.5 else None
        options = {"is_causal": mask is None, "scale": 0.25, "softcap": chance.choice([None, 20.0])}
        read = config.read_kwargs(state.capacity, state.dtype) | {"seal": config.seal}
        return op, [query, key, value, *tensors[:-1], position, mask], options | read
    if op == "append":
        count = torch.tensor(new, device=device) if chance.random() < 0.3 else None
        return op, [key, value, *tensors, position, count], config.op_kwargs(state.capacity, state.dtype)
    if op == "update":
        return op, [key, value, *tensors, position], config.op_kwargs(state.capacity, state.dtype) | {"seal": config.seal}
    if op == "observe_padding":
        mask = torch.ones(rows, state.capacity, dtype=torch.int64, device=device) if chance.random() < 0.7 else None
        return op, [state.left_padding, mask, position, new], {}
    if op == "unpack":
        role = chance.choice(["key", "value"])
        x = key if role == "key" else value
        codes, scale, minimum = getattr(torch.ops.kivi, f"quantize_pack_{role}")(x, 4, 8)
        return f"unpack_dequantize_{role}", [codes, scale, minimum, 4, 8, x.shape[-1], state.dtype], {}
    return op, [key if op.endswith("key") else value, 4, 8, None], {}


def fuzz(calls: int, device: str, seed: int) -> dict[str, int]:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    outcomes = {"result": 0, "refused": 0, "error": 0}
    guarded = None
    for number in range(calls):
        if guarded is None or number % 8 == 0:
            bits, seal = chance.choices([2, 4, 8], k=2), chance.choice(["after_attention", "before_attention"])
            config = KiviConfig(*bits, group_size=8, residual_length=16, seal=seal, rollback_margin=chance.choice([0, 5]))
            dtype = chance.choice([torch.float32, torch.float16, torch.bfloat16])
            guarded = Guarded(config, chance.choice([1, 2]), dtype, 40, device)
        op, arguments, options = call(guarded, chance, device)
        for _ in range(chance.choice([0, 1, 1, 1, 2])):
            where = chance.randrange(len(arguments) + len(options))
            if where >= len(arguments):
                name = list(options)[where - len(arguments)]
                options[name] = wrong_number(options[name], chance)
            elif isinstance(arguments[where], Tensor):
                arguments[where] = wrong_tensor(arguments[where], chance)
            else:
                arguments[where] = wrong_number(arguments[where], chance)
        if chance.random() < 0.1:  # in the state itself
            tensor = chance.choice([guarded.state.sealed, guarded.state.left_padding, guarded.state.length])
            tensor.fill_(max(-(2**31), min(2**31 - 1, chance.choice(NUMBERS))))
        before, refusal = guarded.copy(), ""
        try:
            getattr(torch.ops.kivi, op)(*arguments, **options)
            if device != "cpu":
                torch.cuda.synchronize()
            outcomes["result"] += 1
        except EXPECTED as error:
            if str(error).startswith("kivi::") or "expected a value of type" in str(error).lower():
                refusal = str(error)
            outcomes["refused" if refusal else "error"] += 1
        if refusal:
            for name, now in guarded.copy().items():
                assert torch.equal(now, before[name]), f"call {number}, {op}: refused ({refusal}), yet {name} changed"
        guarded.assert_guards()
    return outcomes


def test_10000_wrong_calls() -> None:
    with torch.no_grad():
        outcomes = fuzz(CALLS, "cpu", seed=0)
    assert min(outcomes["result"], outcomes["refused"]) > CALLS / 10, outcomes


@pytest.mark.gpu
def test_wrong_calls_on_a_gpu() -> None:
    """Run it under compute-sanitizer too: what is read out of bounds shows there alone."""
    with torch.no_grad():
        fuzz(CALLS // 5, "cuda", seed=1)
