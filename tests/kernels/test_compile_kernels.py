"""Every kernel compiles for real GPUs, with the launchers' own arguments, on a machine that has none.

The interpreter accepts programs that the compiler does not, so this is what stands between a change and a broken GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# dtype - metadata - Key bits - Value bits - G - D_k - D_v - new tokens: every dtype and width of code, odd and padded head sizes
CASES = {
    90: ["fp16-fp16-2-2-32-128-128-1", "bf16-bf16-2-4-32-64-64-16", "fp16-fp32-4-8-64-100-256-3", "fp32-bf16-8-2-2-33-2-16"],
    80: ["bf16-fp16-8-4-128-256-96-1", "fp32-bf16-8-2-2-80-33-16"],
}
SHARED_BYTES = 99 * 1024  # of a program, on every GPU since sm_80


@pytest.mark.parametrize("capability", CASES, ids="sm_{}".format)
def test_every_kernel_compiles(capability: int) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), str(capability), *CASES[capability]]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    reports = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    print(*reports, sep="\n")
    assert {report["case"] for report in reports} == set(CASES[capability])
    assert len({report["kernel"] for report in reports}) == 8
    for report in reports:
        assert report["shared_bytes"] <= SHARED_BYTES, report
        assert report["stack_bytes"] <= 512, f"spills: {report}"
