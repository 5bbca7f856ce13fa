"""transformers with its plain StaticCache through ``backend="kivi"``: eager prefills, compiled steps, the logits of the KiviCache route."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers import assert_same_rows, valid_rows
from pass_models import Recorder, buffer_sizes, compiled_body
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from kivi_ops import KiviConfig, KiviState, explain
from kivi_ops.config import SEAL_ORDERS
from kivi_ops.passes.states import held_states, owned_state

transformers = pytest.importorskip("transformers")

CAPACITY = 96
R = 4
LAYERS = 2
OPTIONS: dict[str, Any] = {"key_bits": 8, "value_bits": 8, "group_size": 4, "residual_length": R}
CONFIG = KiviConfig(**OPTIONS)
PROMPT = torch.arange(18).reshape(2, 9) * 5 % 64


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def llama(attention: str = "sdpa", lossless: bool = True) -> Any:
    """``lossless``: Keys and Values of two levels (no rotation then), which 8 bits restore exactly, so that all routes agree."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.2,
        attn_implementation=attention,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    if lossless:
        model.model.rotary_emb.inv_freq.zero_()
        for layer in model.model.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.register_forward_hook(lambda module, args, output: output.sign())
    return model


def static_cache(model: Any) -> Any:
    return transformers.StaticCache(model.config, max_cache_len=CAPACITY)


def kivi_cache(model: Any, **config: Any) -> Any:
    from kivi_ops import KiviCache

    return KiviCache(model.config, CAPACITY, KiviConfig(**{**OPTIONS, **config}), left_padding=[0, 0])


def logits(forward: Any, tokens: Tensor, cache: Any) -> Tensor:
    with torch.no_grad():
        return forward(tokens, past_key_values=cache).logits[:, -1:]


def token(index: int) -> Tensor:
    return torch.tensor([[index * 7 % 64], [(index * 11 + 3) % 64]])


def assert_states_follow(cache: Any, tokens: int) -> None:
    for layer in cache.layers:
        state = owned_state(layer.keys, layer.values, CONFIG).state
        fresh = KiviState.allocate(CONFIG, *layer.keys.shape, layer.values.shape[-1], layer.keys.dtype)
        fresh.append(layer.keys[:, :, :tokens], layer.values[:, :, :tokens], torch.tensor(0))
        assert_same_rows(valid_rows(state, [tokens] * 2), valid_rows(fresh, [tokens] * 2))


def assert_close(actual: Tensor, expected: Tensor, where: str, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}")


@pytest.mark.parametrize(
    ("attention", "lossless", "seal"),
    [("sdpa", True, SEAL_ORDERS[0]), ("eager", True, SEAL_ORDERS[0]), ("sdpa", False, SEAL_ORDERS[0]), ("sdpa", False, SEAL_ORDERS[1])],
    ids=["sdpa-lossless", "eager-lossless", "sdpa", "sdpa-before"],
)
def test_compiled_steps_give_the_logits_of_a_kivi_cache(attention: str, lossless: bool, seal: str) -> None:
    model = llama(attention, lossless)
    recorder = Recorder(strict=True, **OPTIONS, seal=seal)
    step = torch.compile(model, backend=recorder, fullgraph=True)
    cache, reference = static_cache(model), kivi_cache(model, seal=seal)
    assert_close(logits(model, PROMPT, cache), logits(model, PROMPT, reference), "prefill")
    for index in range(2 * R + 3):
        assert_close(logits(step, token(index), cache), logits(model, token(index), reference), f"step {index}", 1e-4 if lossless else 1e-3)
    (before,), (after,) = recorder.before, recorder.after
    core = "aten.scaled_dot_product_attention" if attention == "sdpa" else "aten.softmax"
    assert (before["aten.index_copy_"], before[core]) == (after["aten.index_copy_"], LAYERS) == (2 * LAYERS, LAYERS)
    assert (after[core], after["kivi.attention"], after["kivi.append"]) == (0, LAYERS, LAYERS)
    recorder.modules[0].graph.lint()
    assert all("val" in node.meta for node in recorder.modules[0].graph.nodes if node.op in ("placeholder", "call_function"))


def test_a_shorter_second_prompt_in_the_same_cache_is_right() -> None:
    model = llama()
    step = torch.compile(model, backend="kivi", fullgraph=True, options={"compiler": "aot_eager", "strict": True, **OPTIONS})
    cache = static_cache(model)
    for length, steps in ((9, 2 * R + 3), (3, R + 2)):
        cache.reset()
        reference = kivi_cache(model)
        assert_close(logits(model, PROMPT[:, :length], cache), logits(model, PROMPT[:, :length], reference), f"prompt of {length}")
        for index in range(steps):
            assert_close(logits(step, token(index), cache), logits(model, token(index), reference), f"prompt of {length}, step {index}")
        assert_states_follow(cache, length + steps)


def test_a_chat_of_three_turns_over_two_caches_in_turn_needs_one_graph() -> None:
    model = llama()
    recorder = Recorder(strict=True, **OPTIONS)
    step = torch.compile(model, backend=recorder, fullgraph=True)
    gc.collect()
    held = len(held_states())
    caches, references = [static_cache(model) for _ in range(2)], [kivi_cache(model) for _ in range(2)]
    total = 0
    for turn in range(3):
        prompts = [(PROMPT[:, : 5 + turn] + 13 * which) % 64 for which in range(2)]
        for prompt, cache, reference in zip(prompts, caches, references, strict=True):
            assert_close(logits(model, prompt, cache), logits(model, prompt, reference), f"turn {turn}, prefill")
        for index in range(5):
            for which, (cache, reference) in enumerate(zip(caches, references, strict=True)):
                new = (token(index) + which) % 64
                assert_close(logits(step, new, cache), logits(model, new, reference), f"turn {turn}, step {index}, cache {which}")
        total += 5 + turn + 5
        for cache in caches:
            assert_states_follow(cache, total)
    assert len(recorder.modules) == 1 and len(held_states()) == held + 2 * LAYERS
    del cache, caches
    gc.collect()
    assert len(held_states()) == held


def test_explain_lists_every_layer_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model, cache = llama(), static_cache(llama())
    logits(model, PROMPT, cache)
    before = cache.layers[0].keys.clone()
    report = explain(model, token(0), past_key_values=cache)
    assert [(site.layer, site.rewritten) for site in report.sites] == [(f"model.layers.{i}.self_attn", True) for i in range(LAYERS)]
    assert torch.equal(cache.layers[0].keys, before) and cache.get_seq_length() == PROMPT.shape[1]
    assert capsys.readouterr().out.startswith("2 of 2 attention sites rewritten\n")


def test_inductor_gives_the_same_logits_and_makes_no_buffer_of_cache_size() -> None:
    model = llama(lossless=False)
    step = torch.compile(model, backend="kivi", fullgraph=True, options={"strict": True, **OPTIONS})
    cache, reference = static_cache(model), kivi_cache(model)
    assert_close(logits(model, PROMPT, cache), logits(model, PROMPT, reference), "prefill")
    actual, (code,) = run_and_get_code(logits, step, token(0), cache)
    assert_close(actual, logits(model, token(0), reference), "step 0", 1e-3)
    for index in range(1, 2 * R + 3):
        assert_close(logits(step, token(index), cache), logits(model, token(index), reference), f"step {index}", 1e-3)
    assert_states_follow(cache, PROMPT.shape[1] + 2 * R + 3)
    body = compiled_body(code)
    assert max(buffer_sizes(body)) < cache.layers[0].keys.numel() // 4
    assert body.count("torch.ops.kivi.attention.default(") == body.count("torch.ops.kivi.append.default(") == LAYERS
