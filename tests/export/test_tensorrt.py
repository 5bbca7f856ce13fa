"""Programs cut into dense parts and operators; with Torch-TensorRT installed, its partitions of the dense parts, on a CPU (a dry run)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_package import gpt_fast

from kivi_ops.export.tensorrt import compile_tensorrt, cut

DRY_RUN = """
import sys
import torch
# Without a driver, importing torch_tensorrt needs these.
torch.cuda.get_device_capability, torch.cuda.current_device = lambda *a: (9, 0), lambda: 0
torch.cuda.mem_get_info = lambda *a: (2**36, 2**36)
import torch_tensorrt
from test_package import gpt_fast
from kivi_ops.export.tensorrt import compile_tensorrt
torch.set_grad_enabled(False)
model = gpt_fast(tokens=1)
compiled = compile_tensorrt(model, dryrun=True, min_block_size=1)
parts = compiled.steps["model"].parts
assert [name for name, _ in parts.dense_2.named_children()] == ["_run_on_acc_0"], "one engine"
assert any("weight" in name for name, _ in parts.dense_2.named_buffers()), "with its weights"
ids = torch.randint(60, (20, 2, 1))
expected = [model(token) for token in ids]
compiled.reset()
for token, logits in zip(ids, expected):
    torch.testing.assert_close(compiled(token), logits)
"""


def test_a_cut_program_gives_what_it_gave() -> None:
    model = gpt_fast(tokens=1)
    with torch.no_grad():
        parts = cut(model.programs["model"].module(check_guards=False))
        ids = torch.randint(60, (20, 2, 1), generator=torch.Generator().manual_seed(0))
        expected = [model(token) for token in ids]
        model.reset()
        for start, (token, logits) in enumerate(zip(ids, expected, strict=True)):
            torch.testing.assert_close(parts(token, torch.tensor(start))[0], logits)
    children = [str(node.target) for node in parts.graph.find_nodes(op="call_module")]
    assert children == ["dense_0", "operators_1", "dense_2"]
    targets = [str(node.target) for node in parts.operators_1.graph.nodes if node.op == "call_function"]
    assert targets == ["kivi.attention.default", "kivi.append.default"]
    dense = [node for child in (parts.dense_0, parts.dense_2) for node in child.graph.nodes]
    assert not any("kivi." in str(node.target) for node in dense)
    assert any(node.op == "get_attr" for node in dense), "weights are theirs"


def test_without_torch_tensorrt_or_a_fixed_length_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    with pytest.raises(ImportError, match=r"pip install 'kivi-ops\[tensorrt\]'"):
        compile_tensorrt(gpt_fast(tokens=1))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch_tensorrt") is None, reason="needs torch_tensorrt")
def test_engines_lie_between_the_operators() -> None:
    here = Path(__file__).parent
    code = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]\n{DRY_RUN}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
