"""Each script in ``examples/`` runs and says what it promises."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    torch._dynamo.reset()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with torch._inductor.config.patch(force_disable_caches=True):  # a pass that is not run reports nothing
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_every_script_is_run_here() -> None:
    text = Path(__file__).read_text()
    assert all(f'"{script.name}"' in text for script in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("free", [False, True], ids=["kept", "freed"])
def test_compile_your_model(free: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--bits", "8", "--steps", "60", "--compiler", "eager", *(("--free-float-cache",) if free else ()))
    text = run("compile_your_model.py", *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert text.count("2 of 2 attention sites rewritten") == 2  # explain's, and the backend's
    same = re.search(r"(\d+) of 60 tokens", text)
    assert same is not None and int(same.group(1)) >= 50
    assert f"float cache {0 if free else 524288} bytes now, 524288 before" in text


def test_own_backend(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = run("own_backend.py", "--steps", "10", monkeypatch=monkeypatch, capsys=capsys)
    assert "operators gone: ['aten.scaled_dot_product_attention.default']" in text and "'kivi.append.default'" in text
    assert "as an Inductor pass: 1 of 1 attention sites rewritten" in text
    worst = re.search(r"difference from the float cache in 10 steps: ([\d.]+)", text)
    assert worst is not None and float(worst.group(1)) < 0.02


def test_transformers_generate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    arguments = ("--bits", "8", "--new-tokens", "12", "--compiler", "eager")
    text = run("transformers_generate.py", *arguments, monkeypatch=monkeypatch, capsys=capsys)
    floats, kivi, static = (re.search(rf"{name} +(\[.*\])", text) for name in ("float cache", "KiviCache", "StaticCache"))
    assert floats is not None and kivi is not None and static is not None
    assert floats.group(1) == kivi.group(1) == static.group(1)
    assert text.count("2 of 2 attention sites rewritten") == 2
