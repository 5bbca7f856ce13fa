"""``torch.compile(model, backend="kivi")``: options, errors, reports, compilers, and what reaches Inductor and its caches."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pass_models import (
    CAPACITY,
    CONFIG,
    PREFILL_AND_DECODE,
    WIDTH,
    Model,
    Recorder,
    assert_same_state,
    buffer_sizes,
    causal_mask,
    compiled_body,
    no_mask,
    run_steps,
    sdpa_repeat_kv,
)
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import kivi_ops
from kivi_ops import KiviState
from kivi_ops.config import SEAL_ORDERS
from kivi_ops.passes import RewriteReport, SiteReport, last_report, reports
from kivi_ops.passes.backend import package_tag
from kivi_ops.passes.options import Options


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="kivi", fullgraph=True, options={"compiler": "eager", **options})


def one_step(model: Any, state: KiviState, new_tokens: int = 1) -> Tensor:
    return run_steps(model, state, torch.bool, [new_tokens])[0]


# --------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 2}, "unknown option 'bits' of backend='kivi'; allowed: compiler, mode, strict, free_float_cache, key_bits, value_bits,"),
        ({"key_bits": 3}, "KiviConfig.key_bits is 3; allowed: 2, 4, 8"),
        ({"group_size": 32, "residual_length": 40}, "KiviConfig.residual_length is 40; allowed: a positive multiple of group_size (32)"),
        ({"compiler": "nvfuser"}, "option 'compiler' is 'nvfuser'; allowed: inductor, aot_eager, eager, torch_tensorrt, or a callable"),
        ({"mode": "fast"}, "mode is 'fast'; allowed: default, "),
    ],
    ids=["unknown", "bits", "residual", "compiler", "mode"],
)
def test_a_wrong_option_is_named_with_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Options.read(None, options)
    model = Model(sdpa_repeat_kv)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=re.escape(message)):
        one_step(torch.compile(model, backend="kivi", options=options), model.state())


def test_strict_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match="option 'strict' is 1; allowed: True, False"):
        Options.read(None, {"strict": 1})


def test_two_modes_are_an_error() -> None:
    assert Options.read("reduce-overhead", {"mode": "reduce-overhead"}).mode == "reduce-overhead"
    with pytest.raises(ValueError, match="mode is 'default' and option 'mode' is 'max-autotune'; allowed: one of the two"):
        Options.read("default", {"mode": "max-autotune"})


@pytest.mark.skipif(importlib.util.find_spec("torch_tensorrt") is not None, reason="torch_tensorrt is installed")
def test_a_compiler_that_is_not_installed_is_named() -> None:
    with pytest.raises(ValueError, match="'torch_tensorrt', which is not installed"):
        Options.read(None, {"compiler": "torch_tensorrt"})


def test_an_option_that_differs_from_the_caches_configuration_names_both() -> None:
    model = Model(sdpa_repeat_kv)
    state = model.state(value_bits=4)
    for option, message in (
        ({"value_bits": 2}, "option 'value_bits' is 2 but the cache's KiviConfig has 4"),
        ({"seal": "before_attention"}, "option 'seal' is 'before_attention' but the cache's KiviConfig has 'after_attention'"),
        ({"metadata_dtype": torch.float16}, "option 'metadata_dtype' is torch.float16 but the cache's KiviConfig has torch.float32"),
    ):
        for dynamic in (None, True):
            torch._dynamo.reset()
            model_compiled = torch.compile(model, backend="kivi", options={"compiler": "eager", **option}, dynamic=dynamic)
            with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=re.escape(message)):
                one_step(model_compiled, state)
    assert state.length == 0


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_options_that_repeat_the_caches_configuration_are_accepted(dynamic: bool | None) -> None:
    model = Model(sdpa_repeat_kv)
    same = {"key_bits": 2, "group_size": 4, "residual_length": 4, "rollback_margin": 0, "metadata_dtype": None, "strict": True}
    one_step(torch.compile(model, backend="kivi", options={"compiler": "eager", **same}, dynamic=dynamic), model.state())
    one_step(compiled(model, metadata_dtype=torch.float32), model.state())


def test_mode_beside_no_options_is_accepted() -> None:
    model = Model(sdpa_repeat_kv)
    expected = one_step(model, model.state())
    actual = one_step(torch.compile(model, backend="kivi", mode="reduce-overhead"), model.state())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ gradients, no cache


def test_a_cache_that_would_need_a_gradient_is_an_error_before_anything_is_written() -> None:
    model = Model(sdpa_repeat_kv)
    state = model.state()
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match=r"kivi::update has no backward.* run the model under torch.no_grad\(\)"
    ):
        compiled(model)(torch.randn(2, 1, WIDTH), causal_mask(0, 1), state)
    assert state.length == 0


@pytest.mark.parametrize("where", ["around", "inside", "inference_mode", "detached"])
def test_a_model_without_gradients_is_rewritten(where: str) -> None:
    class Inside(Model):
        def forward(self, x: Tensor, mask: Tensor, state: KiviState) -> Tensor:
            if where == "inside":
                with torch.no_grad():
                    return super().forward(x, mask, state)
            return super().forward(x, mask, state)

    model = Inside(sdpa_repeat_kv)
    if where == "detached":
        model.requires_grad_(False)
    context = {"around": torch.no_grad, "inference_mode": torch.inference_mode}.get(where, torch.enable_grad)
    x, mask = torch.randn(2, 1, WIDTH), causal_mask(0, 1)
    with context():
        actual = compiled(model, strict=True)(x, mask, model.state())
    with torch.no_grad():
        expected = model(x, mask, model.state())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_graph_without_a_cache_is_compiled_as_ever_and_trains() -> None:
    model = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    model(x).square().sum().backward()
    expected, model.weight.grad = model.weight.grad, None
    compiled(model, compiler="aot_eager")(x).square().sum().backward()
    torch.testing.assert_close(model.weight.grad, expected)
    assert last_report() == RewriteReport(note="no kivi::update in this graph")


# ---------------------------------------------------------------------------------------------------------------- report


def test_strict_raises_where_a_site_is_refused_or_none_is_there() -> None:
    model = Model(no_mask)
    one_step(compiled(model), model.state())
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="(?s)option 'strict' is True.*0 of 1 attention sites.*has no mask"):
        one_step(compiled(model, strict=True), model.state())
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="(?s)option 'strict' is True.*no kivi::update in this graph"):
        compiled(nn.Linear(2, 2), strict=True)(torch.ones(1, 2))


def test_what_happened_is_logged_once_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Model(sdpa_repeat_kv), Model(no_mask)
    with caplog.at_level(logging.INFO, logger="kivi_ops.passes"):
        run_steps(compiled(good), good.state(), torch.bool, [1, 1, 1])
        one_step(compiled(bad), bad.state())
    records = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "kivi_ops.passes"]
    assert records[0] == ("INFO", "1 of 1 attention sites rewritten")
    level, message = records[1]
    assert level == "WARNING" and message.startswith("0 of 1 attention sites rewritten\n") and "has no mask" in message
    assert len(records) == 2


def test_the_report_is_a_readable_table() -> None:
    report = RewriteReport(
        (SiteReport(True, "sdpa, bool mask", "layers.0.attention", "model.py:7 in forward"), SiteReport(False, "no mask"))
    )
    assert str(report).splitlines() == [
        "1 of 2 attention sites rewritten",
        "layer                          spelling or reason  source",
        "layers.0.attention  rewritten  sdpa, bool mask     model.py:7 in forward",
        "-                   refused    no mask             -",
    ]
    assert report.rewritten == report.sites[:1] and report.refused == report.sites[1:]


def test_a_graph_that_cannot_be_normalised_runs_as_it_came_and_is_reported() -> None:
    """Two inputs of symbolic size in one tensor: which of them a write reaches could not be told."""

    class Shared(Model):
        def forward(self, x: Tensor, mask: Tensor, state: KiviState, more: Tensor) -> Tensor:
            return super().forward(x, mask, state) + more.sum()

    model = Shared(sdpa_repeat_kv)
    base, mask = torch.randn(2, 6, WIDTH), causal_mask(0, 4)
    expected_state, state = model.state(), model.state()
    with torch.no_grad():
        expected = model(base[:, :4], mask, expected_state, base[:, 1:])
        actual = torch.compile(model, backend="kivi", options={"compiler": "aot_eager"}, dynamic=True)(
            base[:, :4], mask, state, base[:, 1:]
        )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert_same_state(state, expected_state)
    report = last_report()
    assert report is not None and "cannot be normalised: ValueError: inputs of symbolic size share memory" in report.note


def test_the_last_reports_are_kept() -> None:
    model = Model(sdpa_repeat_kv)
    before = reports()
    run_steps(compiled(model), model.state(), torch.bool, [3, 1])
    assert reports()[-2:] != before[-2:] and len(reports()) <= 64 and reports()[-1] is last_report()


# ------------------------------------------------------------------------------------------------------------- compilers


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor", lambda module, example_inputs: module.forward])
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_every_compiler_gives_the_eager_answer(compiler: Any, dynamic: bool | None) -> None:
    model = Model(sdpa_repeat_kv)
    expected_state, state = model.state(), model.state()
    steps = [5, 1, 2, 1, 7, 1]
    expected = run_steps(model, expected_state, torch.bool, steps)
    options = {"compiler": compiler, "strict": True}
    actual = run_steps(torch.compile(model, backend="kivi", options=options, dynamic=dynamic), state, torch.bool, steps)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert_same_state(state, expected_state)


@pytest.mark.parametrize("seal", SEAL_ORDERS)
def test_inductor_copies_no_state_and_makes_no_cache(seal: str) -> None:
    """Nor does it hand ``append`` its ``length`` as the position. A prefill of 3, and the decode step."""
    model = Model(sdpa_repeat_kv)
    state = model.state(seal, residual_length=8)
    smallest = min(tensor.numel() for tensor in (state.key_records, state.value_records, state.key_window, state.value_window))
    assert smallest < 2 * model.kv_heads * CAPACITY * model.key_dim
    step = torch.compile(model, backend="kivi", options={"strict": True})
    for new_tokens in (1, 3):
        torch._dynamo.reset()
        _, (code,) = run_and_get_code(one_step, step, state, new_tokens)
        body = compiled_body(code)
        sizes = buffer_sizes(body)
        assert sizes and max(sizes) < smallest, body
        (append,) = re.findall(r"torch\.ops\.kivi\.append\.default\((.*)\)", body)
        arguments = re.findall(r"(?:reinterpret_tensor\(.*?\), \d+\)|\w+)(?=, |$)", append.split(", count=")[0])
        length, position = arguments[-2:]
        assert length.startswith("arg") and position.startswith("buf"), append


def test_two_caches_in_turn_need_one_decode_graph() -> None:
    model, recorder = Model(sdpa_repeat_kv), Recorder(strict=True)
    step = torch.compile(model, backend=recorder, fullgraph=True)
    states = [model.state(), model.state()]
    expected_states = [model.state(), model.state()]
    for state, expected in zip(states, expected_states, strict=True):
        run_steps(model, state, torch.bool, [5])
        run_steps(model, expected, torch.bool, [5])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for token in range(5, 5 + 3 * CONFIG.residual_length + 5):
            for state, expected in zip(states, expected_states, strict=True):
                x, mask = torch.randn(2, 1, WIDTH, generator=generator), causal_mask(token, 1)
                torch.testing.assert_close(step(x, mask, state), model(x, mask, expected), rtol=1e-5, atol=1e-5)
            assert len(recorder.modules) == 1, "compiled again"
    for state, expected in zip(states, expected_states, strict=True):
        assert_same_state(state, expected)


def test_past_the_capacity_the_compiled_step_shows_nan_and_writes_nothing() -> None:
    model = Model(sdpa_repeat_kv)
    state = model.state()
    step = compiled(model, strict=True)
    run_steps(model, state, torch.bool, [CAPACITY])
    held = {name: tensor.clone() for name, tensor in state.tensors().items() if name != "length"}
    with torch.no_grad():
        output = step(torch.randn(2, 1, WIDTH), causal_mask(CAPACITY, 1), state)
    assert output.isnan().all() and state.length == CAPACITY + 1
    for name, tensor in held.items():
        assert torch.equal(state.tensors()[name], tensor), name


# ----------------------------------------------------------------------------------------------------------- compile cache


def test_the_tag_covers_version_and_source() -> None:
    assert re.fullmatch(rf"kivi_ops-{re.escape(kivi_ops.__version__)}-[0-9a-f]{{64}}", package_tag())


_CHILD = """
import sys, torch
from torch._dynamo.utils import counters
from chat_model import Decoder, call
from pass_models import Model, assert_same_state, run_steps, sdpa_repeat_kv
from kivi_ops.passes import inductor_options
route, key_bits, group_size, seal = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
config = dict(key_bits=key_bits, group_size=group_size, residual_length=4, seal=seal)
if route == "float cache":
    model, reference = Decoder(layers=1), Decoder(layers=1)
    step = torch.compile(model, backend="kivi", options={"strict": True, **config})
    for start in range(12):
        torch.testing.assert_close(call(step, start), call(reference, start), rtol=1e-5, atol=1e-5)
else:
    model = Model(sdpa_repeat_kv)
    expected_state, state = (model.state(**config) for _ in range(2))
    step = (
        torch.compile(model, backend="kivi", options={"strict": True})
        if route == "backend"
        else torch.compile(model, options=inductor_options(strict=True))
    )
    steps = [1] * 20
    expected = run_steps(model, expected_state, torch.bool, steps)
    torch.testing.assert_close(run_steps(step, state, torch.bool, steps), expected, rtol=1e-5, atol=1e-5)
    assert_same_state(state, expected_state)
print("hits", counters["inductor"]["fxgraph_cache_hit"], "misses", counters["inductor"]["fxgraph_cache_miss"])
"""


def other_source(folder: Path) -> Path:
    """A copy of the package in which one comment is another one; to be put on PYTHONPATH."""
    package = Path(kivi_ops.__file__).parent
    target = folder / "kivi_ops"
    parts = {"": package, **{name: Path(__import__(f"kivi_ops.{name}", fromlist=["_"]).__file__).parent for name in ("kernels", "passes")}}
    for name, source in parts.items():
        shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"), dirs_exist_ok=True)
    with (target / "kernels" / "append.py").open("a") as file:
        file.write("\n# other\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("route", ["backend", "float cache", "pass"], ids=["backend", "float-cache", "pass"])
def test_a_warm_compile_cache_is_used_and_never_for_another_configuration(tmp_path: Path, route: str) -> None:
    """Each run is a process of its own, over one cache on disk, and checks its own answers."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)
    here = str(Path(__file__).parent)

    def run(key_bits: int = 2, group_size: int = 4, seal: str = "after_attention", source: Path | None = None) -> str:
        environment["PYTHONPATH"] = os.pathsep.join([here, *([str(source)] if source else [])])
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, route, str(key_bits), str(group_size), seal],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert child.returncode == 0, child.stderr
        return child.stdout.splitlines()[-1]

    fresh, warm = "hits 0 misses 1", "hits 1 misses 0"
    assert run() == fresh
    assert run() == warm
    if route == "backend":  # all routes compile the same graphs, but come to the cache's key by ways of their own
        assert run(key_bits=4) == fresh
        assert run(group_size=2) == fresh
        assert run(seal="before_attention") == fresh
    assert run(source=other_source(tmp_path / "other")) == fresh
    assert run() == warm


def test_steps_of_the_tests_cross_two_seals() -> None:
    assert sum(PREFILL_AND_DECODE) > 3 * CONFIG.residual_length
