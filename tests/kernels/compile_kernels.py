"""Compile every kernel for a GPU that need not be there, with the very arguments that the launchers pass. A script of test_compile.py.

Usage: python compile_kernels.py <compute capability, such as 90> <case> ...

Each launch of a case is compiled instead of run; prints one JSON line a kernel with its registers, spilled bytes and instructions. A case
that begins with the name of a decode kernel, such as gluon-fp16-2-2-128-4-causal (dtype, bits, D, query rows, mask), is one launch of it,
and so is one of the prefill kernel; any other is every operator by the general kernels. Must run without TRITON_INTERPRET, whose kernels
are never compiled.
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
from kivi_ops.kernels import gluon_decode, launch

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
FAST_KERNELS = ("decode_kernel", "merge_kernel", "prefill_kernel")  # of launch, beside Gluon's
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

    def __init__(self, kernel: Any, name: str, case: str) -> None:
        self.kernel, self.name, self.case = kernel, name, case

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile(*args: Any, **kwargs: Any) -> None:
            compiled = self.kernel.warmup(*args, grid=grid, **kwargs)
            print(json.dumps({"case": self.case, "kernel": self.name, **resources(compiled)}), flush=True)

        return compile


def resources(compiled: Any) -> dict[str, int]:
    """Registers of a thread, bytes of local memory, bytes of shared memory of a program, and instructions.

    Instructions in all and of the main loop, the one with the most tensor core products; and how many of those load or store spills.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([triton.knobs.nvidia.cuobjdump.path, what, file.name], capture_output=True, text=True, check=True).stdout
            for what in ("-res-usage", "-sass")
        )
    found = {name: int(re.search(rf"{name}:(\d+)", usage).group(1)) for name in ("REG", "STACK")}
    code = {int(at, 16): text for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)}
    jumps = [(int(to.group(1), 16), at) for at, text in code.items() if (to := re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text))]
    loops = [[text for at, text in code.items() if begin <= at <= end] for begin, end in jumps if begin < end]
    loop = max(loops, key=lambda texts: sum("MMA" in text for text in texts), default=[])
    return {
        "registers": found["REG"],
        "stack_bytes": found["STACK"],
        "shared_bytes": compiled.metadata.shared,
        "instructions": len(code),
        "loop_instructions": len(loop),
        "loop_spills": sum(bool(re.search(r"\b(LDL|STL)\b", text)) for text in loop),
    }


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
        launch.attention(query, key, value, *tensors[:-1], position, mask, causal, 0.1, softcap, **read, seal=seal, kernel="general")
        if seal == "after_attention":
            prompt = (torch.zeros(rows, heads, 300, dim, dtype=dtype) for dim in dims)
            launch.append(key, value, *tensors, position, bounded, **write)
            launch.append(*prompt, *tensors, position, bounded, **write)
    launch.update(key, value, *tensors, position, **write, seal=seal)
    for name, x, width in (("key", key, bits[0]), ("value", value, bits[1])):
        packed = getattr(launch, f"quantize_pack_{name}")(x, width, group, metadata)
        getattr(launch, f"unpack_dequantize_{name}")(*packed, width, group, x.shape[-1], dtype)


def launch_fast(kernel: str, dtype: torch.dtype, bits: tuple[int, int], dim: int, query_rows: int, mask: str) -> None:
    """One launch of one kernel of attention, with ``query_rows`` for each KV head; the mask "causal", "bool" or "float".

    A decode kernel gets one new token and as many query heads, the prefill kernel 4 query heads and new tokens for the rest.
    """
    rows, heads, capacity = 2, 2, 1024
    repeats = 4 if kernel == "prefill" else query_rows
    new_tokens = query_rows // repeats
    config = KiviConfig(*bits, 32, 128)
    state = KiviState.allocate(config, rows, heads, capacity, dim, dim, dtype)
    query, key = (torch.zeros(rows, n * heads, new_tokens, dim, dtype=dtype) for n in (repeats, 1))
    masks = {
        "causal": None,
        "bool": torch.ones(rows, 1, new_tokens, capacity, dtype=torch.bool),
        "float": torch.zeros(rows, repeats * heads, new_tokens, capacity, dtype=dtype),
    }
    tensors = tuple(state.tensors().values())[:-1]
    position = torch.zeros(rows, 1, dtype=torch.int64)
    read = config.read_kwargs(capacity, dtype)
    launch.attention(query, key, key, *tensors, position, masks[mask], mask == "causal", 0.1, None, **read, seal=config.seal, kernel=kernel)


def main() -> None:
    capability, *cases = sys.argv[1:]
    triton.runtime.driver.set_active(NoDevice(int(capability)))
    # What launchers ask of the device, which is not here.
    launch._gluon = lambda device: gluon_decode
    launch._dependent = lambda device: int(capability) >= 90
    launch._wgmma = lambda device: int(capability) == 90
    kernels = {name: getattr(launch, name) for name in (*KERNELS, *FAST_KERNELS)}
    gluon_kernel = gluon_decode.decode_kernel
    for case in cases:
        for name, kernel in kernels.items():
            setattr(launch, name, CompileOnly(kernel, name, case))
        gluon_decode.decode_kernel = CompileOnly(gluon_kernel, "gluon_decode", case)
        if case.split("-")[0] in ("gluon", "portable", "prefill"):
            kernel, dtype, key_bits, value_bits, dim, query_rows, mask = case.split("-")
            launch_fast(kernel, DTYPES[dtype], (int(key_bits), int(value_bits)), int(dim), int(query_rows), mask)
        else:
            dtype, metadata, key_bits, value_bits, group, key_dim, value_dim, new_tokens = case.split("-")
            numbers = (int(key_bits), int(value_bits)), int(group), (int(key_dim), int(value_dim)), int(new_tokens)
            launch_all(DTYPES[dtype], DTYPES[metadata], *numbers)


if __name__ == "__main__":
    main()
