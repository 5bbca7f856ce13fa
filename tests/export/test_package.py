"""Packages of AOTInductor: they give what the exported programs give, keep their state, and run where only torch is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import GptFast
from torch import Tensor
from torch.export import Dim

from kivi_ops import KiviConfig
from kivi_ops.export import CompiledModel, ExportedModel, compile_package, export_model, rewrite

CAPACITY, R = 48, 8
CONFIG = KiviConfig(key_bits=8, value_bits=8, group_size=4, residual_length=R)
STEPS = 2 * R + 3
PROMPT = torch.arange(14).reshape(2, 7) * 5 % 60

WITHOUT_KIVI_OPS = """
import sys
import torch

sys.modules["kivi_ops"] = sys.modules["triton"] = None  # any import of them fails
path, calls, result = sys.argv[1:]
step = torch._inductor.aoti_load_package(path)
outputs = []
for turn in range(2):  # start 0 begins anew
    start = 0
    for ids in torch.load(calls):
        outputs.append(step(ids, torch.tensor(start)))
        start += ids.shape[1]
torch.save(outputs, result)
"""


@pytest.fixture(autouse=True, scope="module")
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def gpt_fast(device: str = "cpu", dtype: torch.dtype = torch.float32, tokens: int | None = None) -> ExportedModel:
    """A rewritten program for calls of ``tokens`` tokens, or of any number."""
    model = GptFast(rows=2, capacity=CAPACITY, layers=1).to(device, dtype)
    shapes = None if tokens else ({1: Dim("tokens", min=1, max=CAPACITY)}, None)
    ids = torch.zeros(2, tokens or 7, dtype=torch.int64, device=device)
    program = torch.export.export(model, (ids, torch.tensor(0, device=device)), dynamic_shapes=shapes)
    return ExportedModel(rewrite(program, CONFIG, strict=True))


def calls() -> list[Tensor]:
    steps = torch.randint(60, (STEPS, 2, 1), generator=torch.Generator().manual_seed(1))
    return [PROMPT, *steps, PROMPT[:, :2]]


def assert_same(actual: list[Tensor], expected: list[Tensor], ratio: float = 1e-4) -> None:
    for step, (a, e) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(
            a[:, -1].cpu(), e[:, -1].cpu(), rtol=ratio, atol=ratio, msg=lambda text, step=step: f"call {step}: {text}"
        )


needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExportedModel, Path]:
    model, path = gpt_fast(), tmp_path_factory.mktemp("package") / "model.pt2"
    compile_package(model, path)
    return model, path


@needs_compiler
def test_a_package_keeps_its_state_where_only_torch_is_installed(package: Any, tmp_path: Path) -> None:
    model, path = package
    torch.save([ids.contiguous() for ids in calls()], tmp_path / "calls.pt")
    arguments = [str(path), str(tmp_path / "calls.pt"), str(tmp_path / "result.pt")]
    subprocess.run([sys.executable, "-c", WITHOUT_KIVI_OPS, *arguments], check=True, timeout=300)
    model.reset()
    assert_same(torch.load(tmp_path / "result.pt"), 2 * [model(ids) for ids in calls()])


@needs_compiler
def test_a_package_is_a_model_like_the_one_it_was_made_of(package: Any, tmp_path: Path) -> None:
    model, path = package
    compiled = CompiledModel.load(path)
    assert (compiled.batch_size, compiled.capacity, compiled.held_bytes()) == (2, CAPACITY, model.held_bytes())
    model.reset()
    assert torch.equal(compiled.generate(PROMPT, STEPS), model.generate(PROMPT, STEPS))
    compiled.save_state(tmp_path / "state.pt")
    model.reset()
    model.load_state(tmp_path / "state.pt")  # a conversation moves from one to the other
    assert torch.equal(compiled.generate(PROMPT[:, 2:4], 5), model.generate(PROMPT[:, 2:4], 5))
    compiled.reset()
    model.reset()
    assert_same([compiled(ids) for ids in calls()], [model(ids) for ids in calls()])
    with pytest.raises(ValueError, match="allowed: 48 in all"):
        compiled(torch.zeros(2, 48, dtype=torch.int64))
    with pytest.raises(ValueError, match="is a compiled package"):
        ExportedModel.load(path)


@needs_compiler
@pytest.mark.slow
def test_prefill_and_decode_of_a_transformer_share_state_and_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=60, head_dim=16, **sizes)).eval()
    model = export_model(network, CONFIG, 2, CAPACITY, separate_decode=True)
    steps: list[str] = []
    compile_package(model, tmp_path / "model.pt2", weights=False, progress=steps.append)
    assert steps == ["compiling the prefill program", "compiling the decode program"]
    with pytest.raises(ValueError, match="holds no weights"):
        CompiledModel.load(tmp_path / "model.pt2")
    weights = {name: tensor.clone() for name, tensor in model.programs["decode"].state_dict.items()}
    compiled, padding = CompiledModel.load(tmp_path / "model.pt2", weights), torch.tensor([0, 3])
    first, *rest = calls()
    assert_same([compiled(first, padding), *map(compiled, rest)], [model(first, padding), *map(model, rest)])


def test_what_no_package_can_hold_is_refused(tmp_path: Path) -> None:
    model = gpt_fast(tokens=1)
    with pytest.raises(ValueError, match="allowed: a name that ends in .pt2"):
        compile_package(model, tmp_path / "model.so")
    model.save(tmp_path / "program.pt2")
    with pytest.raises(ValueError, match="is no package of kivi_ops"):
        CompiledModel.load(tmp_path / "program.pt2")
    code = f"from kivi_ops.export import *; compile_package(ExportedModel.load({str(tmp_path / 'program.pt2')!r}), 'model.pt2')"
    environment = {**os.environ, "CXX": str(tmp_path / "no-such-compiler")}  # read when Inductor is imported
    result = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "a package needs a C++ compiler" in result.stderr and not (tmp_path / "model.pt2").exists()
    for node in model.programs["model"].graph.find_nodes(op="call_function", target=torch.ops.kivi.attention.default):
        node.target = torch.ops.kivi.update.default  # as where the pass left a site alone
    with pytest.raises(ValueError, match="holds kivi::update, which a package cannot"):
        compile_package(model, tmp_path / "model.pt2")


# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 8], ids=["decode-kernel", "general-kernel"])
def test_a_package_for_a_gpu(bits: int, tmp_path: Path) -> None:
    """float16, a program for prompts of any length and one for single tokens, in a process of its own; then as a model."""
    model = gpu_llama(bits)
    compile_package(model, tmp_path / "model.pt2")
    first, *rest = calls()
    compiled, padding = CompiledModel.load(tmp_path / "model.pt2"), torch.tensor([0, 3])
    actual, expected = ([step(first, padding), *map(step, rest)] for step in (compiled, model))
    assert_same(actual, expected, 0.02)
    compiled.reset()
    model.reset()
    assert_same([compiled(ids) for ids in calls()], [model(ids) for ids in calls()], 0.02)
    moved = compiled._state["kivi_state.0.length"]
    assert moved.is_cuda and int(moved) == compiled.tokens_held


@pytest.mark.gpu
def test_a_decode_program_for_a_gpu_holds_the_portable_kernels(tmp_path: Path) -> None:
    from torch._inductor.utils import run_and_get_cpp_code

    model = gpu_llama(2)
    decode = ExportedModel({"decode": model.programs["decode"]})
    _, code = run_and_get_cpp_code(compile_package, decode, tmp_path / "model.pt2")
    for kernel in ("packaged_decode_kernel", "packaged_step_kernel"):
        assert kernel in code
    assert code.count("aoti_torch_proxy_executor_call_function") == 0, "no operator is called by name"


def gpu_llama(bits: int) -> ExportedModel:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=60, head_dim=64, initializer_range=0.1, **sizes)
    network = transformers.LlamaForCausalLM(config).eval().to("cuda", torch.float16)
    return export_model(network, KiviConfig(bits, bits, group_size=32, residual_length=32), 2, 256, separate_decode=True)
