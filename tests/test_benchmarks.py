"""The benchmarks run as they are, with a few tokens and on the CPU: registry, rows, JSON, byte arithmetic. Not speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ATTENTION_TOLERANCE, assert_close

from kivi_ops import KiviConfig, KiviState, benchmarks
from kivi_ops.benchmarks import common, decode_attention, plot, states
from kivi_ops.cli import main

MACHINE_KEYS = {"device", "runtime", "python", "torch", "triton", "transformers", "kivi_ops", "date"}


@pytest.fixture(autouse=True)
def a_fault_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIVI_OPS_TRACEBACK", "1")


def results(name: str, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, Any], list[str]]:
    """What ``--tiny`` wrote, and the lines it printed."""
    path = folder / "results.json"
    assert main(["bench", name, "--tiny", "--json", str(path), *options]) == 0
    return json.loads(path.read_text()), capsys.readouterr().out.splitlines()


# ----------------------------------------------------------------------------------------------------------- registry


def test_list_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*benchmarks.BENCHMARKS, "plot"]


def test_bench_alone_lists_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "decode_attention" in capsys.readouterr().out


@pytest.mark.parametrize("name", benchmarks.BENCHMARKS)
def test_help_says_the_question(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", name, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: kivi-ops bench {name}")
    assert "?" in text and "--json FILE" in text and "--tiny" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nope"], "the benchmark is 'nope'; allowed: decode_attention, append"),
        (["append", "--tiny", "--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["decode_attention", "--tiny", "--heads", "9"], "--heads is 9; allowed: multiples of 8"),
        (["plot", "/nowhere.json", "out.png"], "No such file"),
    ],
    ids=["unknown", "folder", "heads", "plot"],
)
def test_what_cannot_be_run_is_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KIVI_OPS_TRACEBACK")
    assert main(["bench", *arguments]) == 1
    error = capsys.readouterr().err
    assert expected in error and len(error.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
@pytest.mark.parametrize("name", [name for name in benchmarks.BENCHMARKS if name not in benchmarks.WITHOUT_A_GPU])
def test_without_a_gpu(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KIVI_OPS_TRACEBACK")
    assert main(["bench", name]) == 1
    assert "need a CUDA device" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- the benchmarks


@pytest.mark.parametrize("name", ["decode_attention", "append", "prefill"])
def test_operators(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_report(name, *results(name, tmp_path, capsys))


@pytest.mark.parametrize("name", ["decode_step", "serving"])
def test_models(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    written, lines = results(name, tmp_path, capsys, "--caches", "static", "kivi-2")
    check_report(name, written, lines)
    assert {row["cache"] for row in written["rows"]} == {"static", "kivi-2"}
    for row in written["rows"]:
        assert row["tokens_per_second"] > 0


def test_compile_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    written, lines = results("compile_time", tmp_path, capsys)
    check_report("compile_time", written, lines)
    assert [row["cache"] for row in written["rows"]] == ["static", "kivi-2"]
    for row in written["rows"]:
        assert row["nodes"] > 0 and row["pass_s"] == pytest.approx(row["normalise_s"] + row["rewrite_s"])


def check_report(name: str, written: dict[str, Any], lines: list[str]) -> None:
    """Every row measured, every table line as wide as the heading, versions and date kept."""
    assert written["benchmark"] == name and written["tiny"] is True
    assert set(written["machine"]) == MACHINE_KEYS
    assert written["rows"] and not any("failed" in row for row in written["rows"])
    table = lines[: len(written["rows"]) + 1]
    assert {len(line) for line in table} == {len(table[0])}, "\n".join(table)
    assert len(table[0]) <= 160
    assert any("reduced sizes" in line for line in lines)


def test_quantized_cache_without_its_package_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from kivi_ops.benchmarks.models import quantized_backend

    if quantized_backend() is not None:
        pytest.skip("optimum-quanto or hqq is installed")
    written, lines = results("decode_step", tmp_path, capsys, "--caches", "quantized-2")
    assert [row["failed"] for row in written["rows"]] == ["not run: optimum-quanto or hqq is not installed"]
    assert any("optimum-quanto or hqq is not installed" in line for line in lines)


def test_budget_names_what_was_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    written, _ = results("decode_step", tmp_path, capsys, "--caches", "kivi-2", "--budget", "0")
    assert written["rows"] and all(row["failed"] == "not run: --budget of 0 s is used up" for row in written["rows"])


# ---------------------------------------------------------------------------------------------------- report and rows


def report_of(*columns: common.Column) -> common.Report:
    return common.Report("name", "question", common.Machine.find(tiny=True), columns, {})


def test_out_of_memory_is_a_row_and_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(common.Column("batch", "batch"), common.Column("us", "time", ".1f", " us"))

    def too_much() -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    assert report.attempt({"batch": 7}, too_much) == {"batch": 7, "failed": "out of memory"}
    assert report.exit_code == 0
    assert capsys.readouterr().out.splitlines()[1].split(maxsplit=1) == ["7", "out of memory"]


def test_numbers_far_beyond_what_was_expected_keep_the_columns() -> None:
    column = common.Column("us", "time", ".1f", " us", width=10)
    assert [column.cell({"us": us}) for us in (12.34, 99999.9, 267544.1, 1e12)] == [
        "   12.3 us",
        "99999.9 us",
        "2.7e+05 us",
        "1.0e+12 us",
    ]


def test_a_fault_is_a_row_and_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KIVI_OPS_TRACEBACK")
    report = report_of(common.Column("batch", "batch"))
    assert report.attempt({"batch": 7}, lambda: {"us": 1 / 0})["failed"] == "ZeroDivisionError: division by zero"
    assert report.exit_code == 1


def test_a_wrong_kernel_is_a_fault() -> None:
    from kivi_ops.benchmarks.kernels import check

    exact = torch.randn(4, 8, dtype=torch.float64)
    assert check("good", exact.half(), exact) < 1e-3
    with pytest.raises(ArithmeticError, match="bad is wrong: relative error"):
        check("bad", (1.01 * exact).half(), exact)
    with pytest.raises(ArithmeticError, match="nan"):
        check("bad", torch.full((4, 8), float("nan")).half(), exact)


def test_must_show_has_every_size_of_the_targets() -> None:
    cases = decode_attention.PRESETS["must-show"]
    for heads, tokens in ((64, 131072), (64, 32768), (256, 8192), (8, 131072), (8, 32768), (64, 8192)):
        for repeats in (4, 8):
            assert decode_attention.Case(heads, tokens, repeats=repeats) in cases
    assert {case.repeats for case in cases} == {1, 4, 8, 16}
    assert {case.dtype for case in cases} == {"float16", "bfloat16"}
    assert {case.bits for case in cases} == {2, 4} and {case.dim for case in cases} == {64, 128}
    for case in cases:
        assert all(length % 2 for length in case.lengths()), "a length is a multiple of something"
    ragged, equal = cases[-2:]
    assert abs(sum(ragged.lengths()) - sum(equal.lengths())) < 0.001 * sum(equal.lengths())


# ------------------------------------------------------------------------------------------------------- random states

CONFIGS = [KiviConfig(), KiviConfig(4, 2, residual_length=64, metadata_dtype=torch.float32), KiviConfig(8, 8, 64)]


@pytest.mark.parametrize("config", CONFIGS, ids=["2bits", "k4v2-R64-float32-metadata", "8bits-G64"])
@pytest.mark.parametrize("dim", [64, 128], ids=["D64", "D128"])
def test_random_states_are_what_attention_reads(config: KiviConfig, dim: int) -> None:
    """A filled state is a state: attention over it agrees with float64 over its restored tokens, and is spread like random tokens."""
    torch.manual_seed(0)
    state = states.random_state(config, 2, [301, 70], dim, torch.float16, torch.device("cpu"))
    assert state.length.item() == 301 and state.left_padding.tolist() == [0, 231]
    size = config.residual_length
    assert state.sealed.tolist() == [[n // size * size, max(0, n - size)] for n in (301, 70)]
    query = torch.randn(2, 4, 3, dim).half()
    key, value = torch.randn(2, 2, 2, 3, dim).half()
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    for row in range(2):
        expected = states.exact_attention(state, row, 1, query, key, value, state.length)
        actual = state.attention(query, key, value, state.length, is_causal=True)[row, 2:]
        assert_close(f"row {row}", actual, expected, ATTENTION_TOLERANCE[torch.float16])
        assert 0.02 < expected.std() < 2
    assert all(torch.equal(before[name], tensor) for name, tensor in state.tensors().items()), "the check changed the state"


@pytest.mark.parametrize("bits", [2, 4])
def test_needed_bytes_are_the_contracts_formula(bits: int) -> None:
    """Section 5: D * [(2T - rK - rV) * (b/8 + 2e/G) + (rK + rV) * f] a KV head and row."""
    tokens = 131137
    key_float, value_float = tokens % 128, 128
    sealed = (2 * tokens - key_float - value_float) * (bits / 8 + 2 * 2 / 32)
    expected = 8 * 128 * (sealed + (key_float + value_float) * 2)
    assert states.needed_bytes(KiviConfig(bits, bits), 8, [tokens], 128, torch.float16) == expected
    assert states.needed_bytes(KiviConfig(bits, bits), 8, [tokens] * 3, 128, torch.float16) == 3 * expected


def test_cache_bytes_are_what_a_cache_holds() -> None:
    pytest.importorskip("transformers")
    from kivi_ops.benchmarks import models

    sizes = (3, models.TINY_GQA.kv_heads, 700, 32, 32)
    held = KiviState.allocate(KiviConfig(4, 4), *sizes, torch.bfloat16).held_bytes()
    assert models.cache_bytes("kivi-4", models.TINY_GQA, 3, 700) == models.TINY_GQA.layers * held
    assert models.cache_bytes("static", models.LLAMA_3_8B, 1, 32768) == 4 * 2**30


# ---------------------------------------------------------------------------------------------------------------- plots


def swept() -> dict[str, Any]:
    labels = {"kv_heads": 8, "repeats": 4, "dim": 128, "dtype": "float16", "batch_kind": "equal"}
    rows: list[dict[str, Any]] = [
        {**labels, "bits": bits, "tokens": n, "float_us": n / 100, "kivi_us": n / 400, "float_bytes": 4096.0 * n, "bytes": 400.0 * bits * n}
        for bits in (2, 4)
        for n in (1024, 8192, 131137)
    ]
    rows.append({**labels, "bits": 8, "tokens": 262144, "failed": "out of memory"})
    machine = {"device": "none", "torch": "2", "triton": "3", "date": "2026-01-01"}
    return {"benchmark": "decode_attention", "machine": machine, "rows": rows}


def test_panels_hold_time_and_bytes_against_length() -> None:
    (title, (times, sizes)), *others = plot.panels(swept()).items()
    assert not others and title == "8 KV heads of 128, 4 query heads each, float16"
    assert set(times) == set(sizes) == {"float", "KIVI 2 bits", "KIVI 4 bits"}
    assert sizes["KIVI 2 bits"] == {1024: 819200.0, 8192: 6553600.0, 131137: 104909600.0}


def test_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "results.json").write_text(json.dumps(swept()))
    assert main(["bench", "plot", str(tmp_path / "results.json"), str(tmp_path / "out.png")]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_plot_is_an_error() -> None:
    one_length = swept()
    one_length["rows"] = one_length["rows"][:1]
    with pytest.raises(ValueError, match="more than one context length"):
        plot.panels(one_length)
    with pytest.raises(ValueError, match="the results are of 'append'"):
        plot.panels({**one_length, "benchmark": "append"})


@pytest.mark.parametrize(("text", "tokens"), [("32K", 32768), ("500", 500), ("1k", 1024)])
def test_sizes_are_read(text: str, tokens: int) -> None:
    assert common.size_of(text) == tokens
