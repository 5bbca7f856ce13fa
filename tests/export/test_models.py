"""``export_model``: a model's programs in a file give what the model gives over a KiviCache, and carry no float cache."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import GptFast
from helpers import valid_rows
from torch import Tensor
from torch.export import Dim

from kivi_ops import KiviCache, KiviConfig, KiviState
from kivi_ops.demo import cache_argument
from kivi_ops.export import ExportedModel, export_model, rewrite
from kivi_ops.passes.match import STATE_NAMES

transformers = pytest.importorskip("transformers")

R, CAPACITY, VOCABULARY, LAYERS = 8, 64, 64, 2
STEPS = 2 * R + 3
# 8 bits: a code that flips on a rounding edge (contract section 7) is then too small to be seen
CONFIG = KiviConfig(key_bits=8, value_bits=8, group_size=4, residual_length=R)
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
PROMPT = torch.arange(14).reshape(2, 7) * 5 % VOCABULARY
MASK = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
PADDING = torch.tensor([0, 3])
MODELS = ["llama", "qwen2", "gemma3-eager", "gpt-fast"]


@pytest.fixture(autouse=True, scope="module")
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def transformer(name: str, **other: Any) -> Any:
    torch.manual_seed(0)
    name, _, attention = name.partition("-")
    given = {**SHAPE, "attn_implementation": attention or "sdpa", **other}
    if name == "gemma3":
        given |= {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    kind = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "gemma3": transformers.Gemma3TextConfig}[name]
    return transformers.AutoModelForCausalLM.from_config(kind(**given)).eval()


def gpt_fast() -> ExportedModel:
    """A model of another style, which writes float buffers of its own: through ``rewrite``."""
    size = Dim("tokens", min=1, max=CAPACITY)
    program = torch.export.export(GptFast(capacity=CAPACITY), (PROMPT[:1], torch.tensor(0)), dynamic_shapes=({1: size}, None))
    return ExportedModel(rewrite(program, CONFIG, strict=True))


def tokens_to_feed(rows: int) -> list[Tensor]:
    """A prompt and single tokens past it."""
    steps = torch.randint(VOCABULARY, (STEPS, rows, 1), generator=torch.Generator().manual_seed(1))
    return [PROMPT[:rows], *steps]


def eager(name: str, calls: list[Tensor]) -> list[Tensor]:
    """Logits of the last token of each call, of the model itself over KIVI."""
    if name == "gpt-fast":
        model, start, outputs = GptFast(capacity=CAPACITY).over_states(CONFIG), 0, []
        for ids in calls:
            outputs.append(model(ids, torch.tensor(start))[:, -1:])
            start += ids.shape[1]
        return outputs
    model = transformer(name)
    return eager_transformer(model, KiviCache.for_model(model, CAPACITY, CONFIG), calls, MASK)


def eager_transformer(model: Any, cache: Any, calls: list[Tensor], mask: Tensor) -> list[Tensor]:
    outputs = []
    for index, ids in enumerate(calls):
        if index:
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        outputs.append(model(ids, attention_mask=mask, position_ids=positions, **{cache_argument(model): cache}).logits[:, -1:])
    return outputs


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for step, pair in enumerate(zip(actual, expected, strict=True)):
        logits = (tensor[:, -1:] for tensor in pair)
        torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4, msg=lambda text, step=step: f"call {step}: {text}")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ExportedModel, Path]]:
    """Each model as exported, with its file."""
    folder, made = tmp_path_factory.mktemp("exported"), {}
    for name in MODELS:
        model = gpt_fast() if name == "gpt-fast" else export_model(transformer(name), CONFIG, 2, CAPACITY, separate_decode=name == "qwen2")
        made[name] = model, folder / f"{name}.pt2"
        model.save(made[name][1])
    return made


@pytest.fixture(scope="module")
def elsewhere(exported: dict[str, tuple[ExportedModel, Path]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensor]]:
    """What each file gives in a fresh process that cannot import transformers."""
    folder = tmp_path_factory.mktemp("fresh")
    plan = {}
    for name, (model, path) in exported.items():
        plan[name] = str(path), tokens_to_feed(model.batch_size), PADDING if model.batch_size == 2 else None
    torch.save(plan, folder / "plan.pt")
    script = Path(__file__).with_name("fresh_process.py")
    subprocess.run([sys.executable, str(script), str(folder / "plan.pt"), str(folder / "results.pt")], check=True, timeout=300)
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_what_the_eager_model_gives(name: str, exported: Any, elsewhere: Any) -> None:
    assert_same(elsewhere[name], eager(name, tokens_to_feed(exported[name][0].batch_size)))


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_same_whether_the_programs_ran_or_not(name: str, exported: Any, tmp_path: Path) -> None:
    model, path = exported[name]
    model.generate(PROMPT[: model.batch_size], 3)
    model.save(tmp_path / "again.pt2")
    assert (tmp_path / "again.pt2").read_bytes() == path.read_bytes()
    assert model.tokens_held == 10  # and the conversation goes on
    model.reset()


@pytest.mark.parametrize("name", MODELS)
def test_programs_change_the_state_and_hold_no_float_cache(name: str, exported: Any) -> None:
    model, _ = exported[name]
    for program in model.programs.values():
        program.validate()
        again = program.run_decompositions()
        again.validate()
        changed = set(again.graph_signature.buffers_to_mutate.values())
        assert changed == {f"kivi_state.{layer}.{state}" for layer in range(LAYERS) for state in STATE_NAMES if state != "left_padding"}
        # A float cache has a row for each of C columns.
        assert all(
            tensor.dim() < 4 or CAPACITY not in tensor.shape for tensor in (*program.state_dict.values(), *program.constants.values())
        )
        targets = [str(node.target) for node in program.graph.nodes]
        assert targets.count("kivi.attention.default") == targets.count("kivi.append.default") == LAYERS
        assert not any("kivi.update" in target or "scaled_dot_product" in target for target in targets)


def test_a_file_holds_weights_and_state_and_little_more(tmp_path: Path) -> None:
    capacity = 4096
    model = transformer("llama", max_position_embeddings=capacity)
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    float_cache = 2 * LAYERS * 2 * 2 * capacity * 32 * 4
    exported = export_model(model, KiviConfig(group_size=32, residual_length=32), 2, capacity)
    exported.save(tmp_path / "model.pt2")
    size, graph = os.path.getsize(tmp_path / "model.pt2"), 700_000  # nodes with their source lines
    assert weights + exported.held_bytes() < size < weights + exported.held_bytes() + graph < weights + float_cache


def test_a_file_of_two_programs_holds_weights_and_state_once(exported: Any) -> None:
    model, path = exported["qwen2"]
    storages = {tensor.untyped_storage().data_ptr() for tensor in model.programs["prefill"].state_dict.values()}
    with zipfile.ZipFile(path) as file:
        records = [name for name in file.namelist() if "/data/weights/weight_" in name]
        assert len(records) == len(set(records)) == len(storages)
    loaded = ExportedModel.load(path).programs
    for name, tensor in loaded["prefill"].state_dict.items():
        assert loaded["decode"].state_dict[name] is tensor


def test_decompositions_and_export_again_give_the_same(exported: Any) -> None:
    model, _ = exported["llama"]
    program = model.programs["model"].run_decompositions()
    size = Dim("tokens", min=1, max=CAPACITY)
    again = torch.export.export(program.module(), program.example_inputs[0], dynamic_shapes=({1: size}, None, None))
    calls = tokens_to_feed(2)
    model.reset()
    expected = [model(calls[0], PADDING), *map(model, calls[1:])]
    for other in (ExportedModel(program), ExportedModel(again)):
        other.reset()
        assert_same([other(calls[0], PADDING), *map(other, calls[1:])], expected)
    model.reset()


def test_a_conversation_that_is_reset_is_a_fresh_one(exported: Any) -> None:
    path = exported["llama"][1]
    model, calls = ExportedModel.load(path), tokens_to_feed(2)
    other = [calls[1].expand(2, 1), *calls[3:]]
    first = [model(calls[0], PADDING), *map(model, calls[1:])]
    model.reset()
    second = [model(ids) for ids in other]
    fresh = [ExportedModel.load(path) for _ in range(2)]
    assert all(map(torch.equal, first, [fresh[0](calls[0], PADDING), *map(fresh[0], calls[1:])]))
    assert all(map(torch.equal, second, [fresh[1](ids) for ids in other]))


def test_every_length_runs_in_one_program(exported: Any) -> None:
    """Chunks of any length: rows are a token's own index, so the state is the same; the outputs are, but for rounding."""
    model, _ = exported["llama"]
    ids = torch.randint(VOCABULARY, (2, CAPACITY), generator=torch.Generator().manual_seed(2))
    model.reset()
    singly = [model(token) for token in ids.split(1, 1)]
    for length in (2, 3, R, R + 1, CAPACITY - 1, CAPACITY):
        model.reset()
        last = [model(chunk) for chunk in ids.split(length, 1)][-1]
        assert last.shape == (2, 1, VOCABULARY) and last.isfinite().all()
        # The first layer's attention over a chunk sees what single tokens see, except that a first prefill sees floats: close, not equal.
        torch.testing.assert_close(last, singly[-1], rtol=0.05, atol=0.02)
    model.reset()


def test_padded_rows_give_what_they_give_alone(exported: Any) -> None:
    both, _ = exported["llama"]
    alone = export_model(transformer("llama"), CONFIG, 1, CAPACITY)
    calls = tokens_to_feed(2)
    both.reset()
    together = [both(calls[0], PADDING), *map(both, calls[1:])]
    assert_same([logits[1:] for logits in together], [alone(calls[0][1:, 3:]), *(alone(ids[1:]) for ids in calls[1:])])
    both.reset()
    assert torch.equal(both.generate(calls[0], 5, attention_mask=MASK)[1:], _after_reset(alone).generate(calls[0][1:, 3:], 5))
    both.reset()


def _after_reset(model: ExportedModel) -> ExportedModel:
    model.reset()
    return model


def test_generate_gives_the_likeliest_tokens_and_holds_them(exported: Any) -> None:
    model, _ = exported["qwen2"]
    model.reset()
    new = model.generate(PROMPT, STEPS, attention_mask=MASK)
    assert new.shape == (2, STEPS) and model.tokens_held == 7 + STEPS
    model.reset()
    logits = [model(PROMPT, PADDING), *(model(token) for token in new.split(1, 1))]
    assert torch.equal(torch.cat([step.argmax(-1) for step in logits[:-1]], 1), new)
    model.reset()
    ended = model.generate(PROMPT, STEPS, attention_mask=MASK, eos_token_id=int(new[0, 1]))
    stop = [int((row == new[0, 1]).nonzero()[0]) if (row == new[0, 1]).any() else STEPS - 1 for row in new]
    assert ended.shape[1] == max(stop) + 1 and (ended[0, stop[0] :] == new[0, 1]).all()
    model.reset()
    drawn = [_after_reset(model).generate(PROMPT, 6, temperature=5.0, generator=torch.Generator().manual_seed(i)) for i in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    model.reset()


def test_a_saved_conversation_goes_on_in_another_model(exported: Any, tmp_path: Path) -> None:
    model, path = exported["llama"]
    model.reset()
    model.generate(PROMPT, 5, attention_mask=MASK)
    model.save_state(tmp_path / "state.pt")
    other = ExportedModel.load(path)
    other.load_state(tmp_path / "state.pt")
    assert other.tokens_held == model.tokens_held == 12
    turn = PROMPT.flip(1)
    assert torch.equal(other.generate(turn, STEPS), model.generate(turn, STEPS))
    model.reset()


def test_a_rewound_conversation_goes_on_from_there(exported: Any) -> None:
    model, _ = exported["llama"]
    model.reset()
    model(PROMPT[:, :5])
    expected = model(PROMPT[:, 5:6])
    model.rewind(5)
    model(PROMPT[:, 1:3])  # nothing is sealed yet
    model.rewind(5)
    assert torch.equal(model(PROMPT[:, 5:6]), expected)
    with pytest.raises(ValueError, match="length is 7; allowed: 0 to 6"):
        model.rewind(7)
    model.reset()


# ---------------------------------------------------------------------------------------------------------------- errors


def test_calls_that_are_refused_change_nothing(exported: Any) -> None:
    model, _ = exported["llama"]
    model.reset()
    model(PROMPT)
    before = {name: tensor.clone() for name, tensor in model.programs["model"].state_dict.items()}
    for call, error, message in (
        (lambda: model(torch.zeros(2, CAPACITY - 6, dtype=torch.int64)), ValueError, "7 tokens are held and 58 more.*allowed: 64 in all"),
        (lambda: model.generate(PROMPT, 51), ValueError, "7 tokens are held and 58 more are wanted"),
        (lambda: model(PROMPT[:1]), ValueError, "1 rows; allowed: 2"),
        (lambda: model(PROMPT.int()), TypeError, "torch.int32; allowed: a torch.int64 tensor"),
        (lambda: model(PROMPT.float()), TypeError, "torch.float32; allowed"),
        (lambda: model(PROMPT[0]), ValueError, r"shape \[7\]; allowed: \[2, S\]"),
        (lambda: model(PROMPT[:, :0]), ValueError, "S of 1 or more"),
        (lambda: model(PROMPT, PADDING), ValueError, "left_padding was given while 7 tokens are held"),
        (lambda: model.generate(PROMPT, 1, attention_mask=MASK), ValueError, "while 7 tokens are held"),
        (lambda: model.generate(PROMPT, 1, attention_mask=MASK.flip(1)), ValueError, "hides a token after a row's first one"),
        (lambda: model.generate(PROMPT, 1, attention_mask=MASK[:, 1:]), ValueError, "attention_mask has shape"),
        (lambda: model.generate(PROMPT, -1), ValueError, "allowed: 0 or more"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert model.tokens_held == 7
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.programs["model"].state_dict.items())
    model.reset()


def test_a_program_past_its_capacity_gives_nan_until_it_starts_anew(exported: Any) -> None:
    """Where nobody counts on the host."""
    step, none = exported["llama"][0].programs["model"].module(), torch.zeros(2, dtype=torch.int32)
    assert step(PROMPT[:, :1], torch.tensor(CAPACITY), none).isnan().all()
    assert step(PROMPT, torch.tensor(0), none).isfinite().all()
    exported["llama"][0].reset()


def test_what_cannot_be_exported_is_refused() -> None:
    model = transformer("llama")
    for arguments, message in (
        ({"batch_size": 0}, "batch_size is 0; allowed: an int of 1 or more"),
        ({"max_cache_len": True}, "max_cache_len is True"),
    ):
        with pytest.raises(ValueError, match=message):
            export_model(model, CONFIG, **arguments)
    with pytest.raises(ValueError, match=r"training mode; allowed: model.eval\(\)"):
        export_model(transformer("llama").train(), CONFIG)
    with pytest.raises(ValueError, match="no quantised cache"):
        ExportedModel(torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),)))
    assert model.config._attn_implementation == "sdpa"


def test_a_file_or_state_of_another_kind_is_refused(exported: Any, tmp_path: Path) -> None:
    model, path = exported["llama"]
    with pytest.raises(ValueError, match="allowed: a name that ends in .pt2"):
        model.save(tmp_path / "model.bin")
    with pytest.raises(FileNotFoundError, match="no such file"):
        ExportedModel.load(tmp_path / "missing.pt2")
    (tmp_path / "junk.pt2").write_bytes(b"junk")
    with pytest.raises(ValueError, match="cannot be read as a .pt2 file"):
        ExportedModel.load(tmp_path / "junk.pt2")
    torch.export.save(model.programs["model"], tmp_path / "bare.pt2")
    with pytest.raises(ValueError, match="was not written by kivi_ops"):
        ExportedModel.load(tmp_path / "bare.pt2")
    newer = path.read_bytes().replace(b'"layout": ["kivi-records", 1]', b'"layout": ["kivi-records", 2]')
    (tmp_path / "newer.pt2").write_bytes(newer)
    with pytest.raises(ValueError, match=r"layout \['kivi-records', 2\].*allowed: \['kivi-records', 1\]: export it again"):
        ExportedModel.load(tmp_path / "newer.pt2")

    exported["gemma3-eager"][0].save_state(tmp_path / "state.pt")
    model.load_state(tmp_path / "state.pt")  # the same shape and configuration: one state is like the other
    exported["gpt-fast"][0].save_state(tmp_path / "state.pt")
    with pytest.raises(ValueError, match="has batch_size 1; allowed: 2, as this model"):
        model.load_state(tmp_path / "state.pt")
    torch.save([1], tmp_path / "state.pt")
    with pytest.raises(ValueError, match="holds no saved state"):
        model.load_state(tmp_path / "state.pt")


def test_without_this_package_torch_names_the_operators_that_it_lacks(exported: Any) -> None:
    code = f"import torch; torch.export.load({str(exported['llama'][1])!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode != 0 and "torch.ops.kivi.attention" in result.stderr and "import the custom op" in result.stderr


# ------------------------------------------------------------------------------------------------------------ a real model


@pytest.mark.slow
def test_smollm2(tmp_path: Path) -> None:
    """Exported, saved and loaded elsewhere: 2 R + 3 steps at 2 bits, teacher-forced. Most are tight, and few codes differ (contract
    section 7: between two correct routes a code on a rounding edge may flip, and moves what follows)."""
    pytest.importorskip("gguf")
    from kivi_ops.demo import load_smollm2, sample_text

    model, tokenizer = load_smollm2(torch.float32)
    config, residual, prompt = KiviConfig(residual_length=32), 32, 70
    ids = tokenizer(sample_text(), return_tensors="pt").input_ids[:, : prompt + 2 * residual + 3]
    calls = [ids[:, :prompt], *ids[:, prompt:].split(1, 1)]
    path = tmp_path / "smollm2.pt2"
    exported = export_model(model, config, 1, 256)
    exported.save(path)
    weights = sum({tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}.values())
    assert path.stat().st_size < weights + exported.held_bytes() + 12_000_000
    torch.save({"smollm2": (str(path), calls, None)}, tmp_path / "plan.pt")
    script = str(Path(__file__).with_name("fresh_process.py"))
    subprocess.run([sys.executable, script, str(tmp_path / "plan.pt"), str(tmp_path / "results.pt")], check=True, timeout=600)
    actual = torch.cat(torch.load(tmp_path / "results.pt")["smollm2"], 1)[0]
    cache = KiviCache(model.config, 256, config)
    expected = torch.cat(eager_transformer(model, cache, calls, torch.ones_like(calls[0])), 1)[0]
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 0.02 and (error < 1e-3).float().mean() > 0.85, error
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
    exported.load_state(f"{path}.state")
    codes = {"differ": 0, "in all": 0}
    for index, layer in enumerate(cache.layers):
        state = {name: exported._state.get(f"kivi_state.{index}.{name}", torch.zeros(1, dtype=torch.int32)) for name in STATE_NAMES}
        actual_row, expected_row = (valid_rows(held, [ids.shape[1]])[0] for held in (KiviState(config, 256, **state), layer.state))
        for name in ("key_codes", "value_codes"):
            codes["differ"] += int((actual_row[name] != expected_row[name]).sum())
            codes["in all"] += expected_row[name].numel()
    assert codes["differ"] < 1e-3 * codes["in all"], codes
