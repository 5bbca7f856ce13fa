"""The kernels as packages hold them give what the launchers give, bit for bit; and a graph takes them in as few nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import bits_of
from torch import Tensor
from twin import Twin

from kivi_ops import KiviConfig
from kivi_ops.kernels import launch, packaged

CASES = {  # bits, D_k, D_v, dtype, repeats
    "decode-kernel-fp16": (2, 64, 64, torch.float16, 2),
    "decode-kernel-bf16": (4, 64, 64, torch.bfloat16, 1),
    "general-kernel-fp16": (8, 16, 32, torch.float16, 2),
}
SEALS = ["after_attention", "before_attention", "after_attention"]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    if device == "cpu":
        monkeypatch.setattr(launch, "DECODE_PROGRAMS", 3)
        monkeypatch.setattr(launch, "SPLIT_PROGRAMS", 4)


def twins(device: str, name: str, seal: str) -> list[Twin]:
    bits, key_dim, value_dim, dtype, repeats = CASES[name]
    config = KiviConfig(bits, bits, 32, 32, seal)
    shape = {"heads": 2, "repeats": repeats, "key_dim": key_dim, "value_dim": value_dim, "dtype": dtype, "left_padding": (0, 7)}
    return [Twin(device, config, 72, capacity=600, **shape) for _ in range(2)]


def calls(twin: Twin, start: int) -> tuple[list[Tensor], tuple[Tensor, ...], dict[str, Any]]:
    """New query, key and value, the state, and what formats it."""
    tensors = [x.to(twin.device) for x in twin.new(start, 1)]
    return tensors, tuple(twin.state.tensors().values()), twin.state.config.op_kwargs(twin.state.capacity, twin.state.dtype)


@pytest.mark.parametrize("name, seal", list(zip(CASES, SEALS, strict=True)), ids=CASES)
def test_steps_give_what_the_launchers_give(device: str, name: str, seal: str) -> None:
    plain, packed = twins(device, name, seal)
    for twin in (plain, packed):
        twin.append(0, 63)
    mask = torch.ones(2, 1, 1, 600, dtype=torch.bool, device=device)
    for start in (63, 64):
        position = torch.tensor(start, device=device)
        outputs = []
        for twin, module in ((plain, launch), (packed, packaged)):
            (query, key, value), state, format = calls(twin, start)
            read = twin.state.config.read_kwargs(600, twin.state.dtype)
            other = {"kernel": "portable" if name.startswith("decode") else "general"} if module is launch else {}
            if seal == "before_attention":
                module.append(key, value, *state, position, None, **format)
            arguments = (query, key, value, *state[:-1], position, mask, False, 0.2, None)
            outputs.append(module.attention(*arguments, **read, seal=seal, **other))
            if seal == "after_attention":
                module.append(key, value, *state, position, None, **format)
        assert torch.equal(bits_of(outputs[0]), bits_of(outputs[1]))
        for one, other in zip(plain.state.tensors().values(), packed.state.tensors().values(), strict=True):
            assert torch.equal(bits_of(one), bits_of(other))


def test_what_is_taken() -> None:
    query = torch.zeros(1, 2, 1, 64, dtype=torch.float16)
    assert packaged.takes(query, torch.float16)
    assert not packaged.takes(query, torch.float32)
    assert not packaged.takes(query.float(), torch.float32)
    assert not packaged.takes(torch.zeros(1, 2, 2, 64, dtype=torch.float16), torch.float16)


# As on a GPU that need not be there: fake tensors, and a driver that only names its architecture.
TRACE = """
import contextlib, sys
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from compile_kernels import NoDevice
from kivi_ops import KiviConfig, KiviState
from kivi_ops.kernels import launch, packaged

triton.runtime.driver.set_active(NoDevice(90))
launch._multiprocessors, launch._device = (lambda device: 132), (lambda tensor: contextlib.nullcontext())
config, names, dim = KiviConfig(), ("query", "key", "value", "position"), int(sys.argv[1])
with FakeTensorMode(), torch.no_grad():
    state = KiviState.allocate(config, 2, 2, 4096, dim, dim, torch.float16, "cuda")
    query, key, value = (torch.zeros(2, heads, 1, dim, dtype=torch.float16, device="cuda") for heads in (8, 2, 2))

    def step(query, key, value, mask, position, *state):
        read, write = config.read_kwargs(4096, torch.float16), config.op_kwargs(4096, torch.float16)
        output = packaged.attention(query, key, value, *state[:-1], position, mask > 0, **read, seal=config.seal)
        packaged.append(key, value, *state, position, **write)
        return output

    mask, position = torch.zeros(2, 1, 1, 4096, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    graph = make_fx(dispatch_functionalize(step))(query, key, value, mask, position, *state.tensors().values()).graph
for node in graph.nodes:
    if node.target is torch.ops.aten.view.dtype:
        assert node.args[0].meta["val"].dtype != torch.bool, "Inductor lowers no such view"
    if "triton_kernel" in str(node.target):
        changed = node.kwargs["tensors_to_clone"]
        print(*(name for name in changed if name.split("_")[1] in ("words", "window") or name in ("sealed_ptr", "length_ptr")))
"""


@pytest.mark.parametrize("dim", [64, 80], ids=["decode-kernel", "general-kernel"])
def test_a_graph_sees_that_append_alone_changes_the_state(dim: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    result = subprocess.run([sys.executable, "-c", TRACE, str(dim)], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    attention, merge, append = result.stdout.splitlines()
    assert attention.strip() == merge.strip() == ""
    assert append.split() == ["key_words_ptr", "value_words_ptr", "key_window_ptr", "value_window_ptr", "sealed_ptr", "length_ptr"]
