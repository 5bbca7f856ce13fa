"""Compile every kernel for a GPU that need not be there, with the very arguments that the launchers pass. A script of test_compile.py.

Usage: python compile_kernels.py <compute capability, such as 90> <case> ...

Each launch of a case is compiled instead of run; prints one JSON line a kernel with its registers and spilled bytes. Must run without
TRITON_INTERPRET, whose kernels are never compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from kivi_ops import KiviConfig, KiviState
from kivi_ops.kernels import launch

KERNELS = (
    "quantize_pack_kernel",
    "unpack_dequantize_kernel",
    "attention_kernel",
    "combine_kernel",
    "step_kernel",
    "seal_kernel",
    "write_kernel",
    "view_kernel",
)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class NoDevice:
    """What Triton's compiler asks a driver for, when nothing will be launched."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class CompileOnly:
    """Stands where a launcher names a kernel: ``kernel[grid](...)`` compiles for those arguments and reports."""

    def __init__(self, kernel: Any, case: str) -> None:
        self.kernel, self.case = kernel, case

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile(*args: Any, **kwargs: Any) -> None:
            compiled = self.kernel.warmup(*args, grid=grid, **kwargs)
            print(json.dumps({"case": self.case, "kernel": self.kernel.__name__, **resources(compiled)}), flush=True)

        return compile


def resources(compiled: Any) -> dict[str, int]:
    """Registers of a thread, bytes of local memory it spills to, bytes of shared memory of a program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(re.search(rf"{name}:(\d+)", text).group(1)) for name in ("REG", "STACK")}  # type: ignore[union-attr]
    return {"registers": found["REG"], "stack_bytes": found["STACK"], "shared_bytes": compiled.metadata.shared}


def launch_all(
    dtype: torch.dtype, metadata: torch.dtype, bits: tuple[int, int], group: int, dims: tuple[int, int], new_tokens: int
) -> None:
    """Every operator once, with enough variants to reach each branch that is decided when compiling."""
    rows, heads, repeats, capacity = 2, 2, 4, 1024
    key, value = (torch.zeros(rows, heads, new_tokens, dim, dtype=dtype) for dim in dims)
    query = torch.zeros(rows, heads * repeats, new_tokens, dims[0], dtype=dtype)
    position, count = torch.zeros(rows, 1, dtype=torch.int64), torch.ones((), dtype=torch.int64)
    for seal, bounded, mask, causal, softcap in (
        ("after_attention", None, None, True, None),
        ("after_attention", count, torch.ones(rows, 1, new_tokens, capacity, dtype=torch.bool), False, None),
        ("before_attention", None, torch.zeros(1, 1, 1, capacity, dtype=dtype), False, 30.0),
    ):
        config = KiviConfig(*bits, group, max(128, group), seal, 0, metadata)
        state = KiviState.allocate(config, rows, heads, capacity, *dims, dtype)
        read, write = config.read_kwargs(capacity, dtype), config.op_kwargs(capacity, dtype)
        tensors = tuple(state.tensors().values())
        launch.attention(query, key, value, *tensors[:-1], position, mask, causal, 0.1, softcap, **read, seal=seal)
        if seal == "after_attention":
            prompt = (torch.zeros(rows, heads, 300, dim, dtype=dtype) for dim in dims)
            launch.append(key, value, *tensors, position, bounded, **write)
            launch.append(*prompt, *tensors, position, bounded, **write)
    launch.update(key, value, *tensors, position, **write, seal=seal)
    for name, x, width in (("key", key, bits[0]), ("value", value, bits[1])):
        packed = getattr(launch, f"quantize_pack_{name}")(x, width, group, metadata)
        getattr(launch, f"unpack_dequantize_{name}")(*packed, width, group, x.shape[-1], dtype)


def main() -> None:
    capability, *cases = sys.argv[1:]
    triton.runtime.driver.set_active(NoDevice(int(capability)))
    kernels = {name: getattr(launch, name) for name in KERNELS}
    for case in cases:
        dtype, metadata, key_bits, value_bits, group, key_dim, value_dim, new_tokens = case.split("-")
        for name, kernel in kernels.items():
            setattr(launch, name, CompileOnly(kernel, case))
        numbers = (int(key_bits), int(value_bits)), int(group), (int(key_dim), int(value_dim)), int(new_tokens)
        launch_all(DTYPES[dtype], DTYPES[metadata], *numbers)


if __name__ == "__main__":
    main()
