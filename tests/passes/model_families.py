"""transformers' model families at small random sizes through ``backend="kivi"``, each against its reference, and the table of them.

``python tests/passes/model_families.py`` writes ``docs/models.md``, of which ``test_model_families.py`` checks every row.

The reference is the same model, eager, over transformers' own static cache, whose layers hand their attention what ``kivi::update``
restores: it knows nothing of graphs or spellings. Which layers it quantises is declared here, not read from a report.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache, StaticCache

from kivi_ops import KiviConfig, KiviState
from kivi_ops.demo import cache_argument
from kivi_ops.passes import RewriteReport, reports
from kivi_ops.passes.backend import kivi

TABLE = Path(__file__).parents[2] / "docs" / "models.md"

CAPACITY, R, LAYERS, PROMPT = 32, 4, 2, 5
OPTIONS: dict[str, Any] = {"group_size": 4, "residual_length": R}
STEPS = 2 * R + 3
TOLERANCE = 1e-4  # relative norm of a step's logits; float32, the same codes on both sides

_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HYBRID = ["sliding_attention", "full_attention"]
_WINDOW = 8  # full after the prompt and 3 steps


@dataclass(frozen=True)
class Family:
    """``name``: how transformers' classes begin. ``sizes``: further arguments of its config; None takes a usual one out. ``note``: what is
    special about it, for the table. ``float_layers``: by attention, those that are left float throughout. ``told_positions``: whether it is
    handed a padding mask and positions, as by ``generate``; what it makes of their absence is no one graph.
    """

    name: str
    sizes: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    config: str = ""
    attentions: tuple[str, ...] = ("sdpa", "eager")
    float_layers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    told_positions: bool = False

    @property
    def title(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name


@dataclass(frozen=True)
class Outcome:
    """What a case's compiled steps did: their reports, and how far their logits were from the reference's and from a float cache's."""

    reports: tuple[RewriteReport, ...]
    error: float
    float_error: float


FAMILIES = (
    Family("Llama"),
    Family("Qwen2"),
    Family("Qwen3", note="normalised Queries and Keys"),
    Family("Mistral", {"sliding_window": 4096}, note="sliding window of 4096"),
    Family("Mistral", {"sliding_window": _WINDOW}, note=f"sliding window of {_WINDOW}, full during the run", attentions=("sdpa",)),
    Family("Phi3", note="one projection for Query, Key and Value"),
    Family("Gemma2", {"attn_logit_softcapping": 50.0, "layer_types": _HYBRID}, note="softcap", attentions=("eager",)),
    Family("Gemma3", {"layer_types": _HYBRID}, note="sliding and full layers", config="Gemma3TextConfig"),
    Family(
        "Gemma3",
        {"layer_types": _HYBRID, "sliding_window": _WINDOW},
        note=f"sliding window of {_WINDOW}, full during the run",
        config="Gemma3TextConfig",
        attentions=("eager",),
    ),
    Family("GPTNeoX", note="a part of each head is rotated"),
    Family("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 64}, note="the Query is scaled", told_positions=True),
    Family("Falcon", {"multi_query": True, "head_dim": None}, note="one KV head for all"),
    Family(
        "Falcon", {"head_dim": None, "multi_query": False, "new_decoder_architecture": True, "num_kv_heads": 2}, note="grouped KV heads"
    ),
    Family(
        "Falcon", {"head_dim": None, "multi_query": True, "alibi": True}, note="alibi", told_positions=True, float_layers={"eager": (0, 1)}
    ),
    Family("Cohere2", {"layer_types": _HYBRID}, note="sliding and full layers"),
    Family("Olmo"),
    Family("Starcoder2"),
    Family("SmolLM3", {"no_rope_layers": [1, 0]}, note="layers without rotation"),
    Family(
        "GptOss",
        {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": _HYBRID},
        note="attention sinks",
        attentions=("eager",),
        float_layers={"eager": (0, 1)},
    ),
    Family("T5", {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_heads": 4, "num_layers": LAYERS}, note="decoder; position bias"),
)


def cases() -> list[tuple[Family, str]]:
    return [(family, attention) for family in FAMILIES for attention in family.attentions]


def case_id(case: Any) -> str:
    family, attention = case
    variants = [other for other in FAMILIES if other.name == family.name]
    return f"{family.name}-{attention}" + (f"-{variants.index(family)}" if len(variants) > 1 else "")


def build(family: Family, attention: str) -> Any:
    config_class = getattr(transformers, family.config or f"{family.name}Config")
    sizes = {name: size for name, size in {**_SMALL, **family.sizes}.items() if size is not None}
    config = config_class(**sizes, attn_implementation=attention)
    torch.manual_seed(0)
    name = f"{family.name}ForConditionalGeneration" if config.is_encoder_decoder else f"{family.name}ForCausalLM"
    return getattr(transformers, name)(config).eval()


# ------------------------------------------------------------------------------------------------------------ running one


def run(family: Family, attention: str) -> Outcome:
    """An eager prompt and compiled steps over a plain static cache, beside the same tokens over the reference and over a float cache."""
    model = build(family, attention)
    found: list[RewriteReport] = []

    def backend(module: Any, example_inputs: Any) -> Any:
        compiled = kivi(module, example_inputs, options={"compiler": "eager", **OPTIONS})
        found.append(reports()[-1])
        return compiled

    torch._dynamo.reset()
    step = torch.compile(model, backend=backend, fullgraph=True)
    cache, floats, reference = (new_cache(model) for _ in range(3))
    for index, layer in enumerate(self_attention(reference).layers):
        if index not in family.float_layers.get(attention, ()):
            quantise(layer, OPTIONS)
    errors, float_errors = [], []
    for index, tokens in enumerate(TOKENS.split([PROMPT, *[1] * STEPS], dim=1)):
        start = PROMPT + index - 1 if index else 0
        positions = positions_of(start, tokens.shape[1]) if family.told_positions else {}
        actual = logits(step if index else model, tokens, cache, **positions)
        for other, into in ((reference, errors), (floats, float_errors)):
            expected = logits(model, tokens, other, **positions)
            into.append(((actual - expected).norm() / expected.norm()).item())
    return Outcome(tuple(found), max(errors), max(float_errors))


TOKENS = torch.randint(3, 64, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(0))
SOURCE = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(1))  # what an encoder reads


def new_cache(model: Any) -> Any:
    cache: Any = StaticCache(config=model.config, max_cache_len=CAPACITY)
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, StaticCache(config=model.config, max_cache_len=SOURCE.shape[1]))
        cache.encoder_outputs = model.get_encoder()(SOURCE)
    return cache


def self_attention(cache: Any) -> StaticCache:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def positions_of(start: int, tokens: int) -> dict[str, Tensor]:
    columns = torch.arange(CAPACITY)
    return {
        "attention_mask": (columns < start + tokens).long().expand(TOKENS.shape[0], -1),
        "position_ids": columns[start : start + tokens].expand(TOKENS.shape[0], -1),
    }


def logits(forward: Any, tokens: Tensor, cache: Any, **given: Any) -> Tensor:
    """[B, 1, vocabulary] after the last of ``tokens``."""
    with torch.no_grad():
        if isinstance(cache, EncoderDecoderCache):
            given = {**given, "decoder_input_ids": tokens, "encoder_outputs": cache.encoder_outputs}
        else:
            given = {**given, "input_ids": tokens}
        return forward(**given, **{CACHE: cache}).logits[:, -1:]


CACHE = cache_argument(transformers.LlamaForCausalLM)


def quantise(layer: Any, options: Mapping[str, Any], exact_prompts: bool = False) -> None:
    """Let a static ``layer`` of transformers return what a KIVI state holds, for as long as each token has a column of its own.

    It still keeps its float cache. A sliding layer that shifts its columns returns that; so does any, with ``exact_prompts``, where several
    tokens come at once.
    """
    own, state, held = layer.update, None, 0

    def update(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        nonlocal state, held
        floats = own(keys, values, *args, **kwargs)
        start, held = held, held + keys.shape[2]
        if held > layer.max_cache_len:
            return floats
        if state is None:
            state = KiviState.allocate(KiviConfig(**options), *layer.keys.shape, values.shape[3], keys.dtype)
        seen = state.update(keys, values, torch.tensor(start))
        return floats if exact_prompts and keys.shape[2] > 1 else seen

    layer.update = update


# -------------------------------------------------------------------------------------------------------------- the table


def row(family: Family, attention: str, outcome: Outcome) -> str:
    """A case's line of the table: nothing in it depends on versions, so reasons lose their source lines."""

    def cell(texts: list[str]) -> str:
        return "; ".join(dict.fromkeys(re.sub(r" \(\w+\.py:\d+ in \w+\)", "", text) for text in texts)) or "-"

    sites = [f"{len(report.rewritten)} of {len(report.sites)}" for report in outcome.reports]
    rewritten = [site.how for report in outcome.reports for site in report.rewritten]
    refused = [site.how for report in outcome.reports for site in report.refused]
    return f"| {family.title} | {attention} | {', then '.join(dict.fromkeys(sites))} | {cell(rewritten)} | {cell(refused)} |"


HEAD = f"""\
# Model families

transformers' own models, unmodified, over its own `StaticCache`, compiled with `torch.compile(model, backend="kivi")`. Each row is a
small model of random weights ({LAYERS} layers, float32): a prompt of {PROMPT} tokens for 2 sequences, eager, then {STEPS} compiled steps
at 2 bits, R = {R}. Its logits are those of the same model over a cache that hands its attention what `kivi::update` restores, within
{TOLERANCE:g} of their norm at every step, where a float cache's are more than {10 * TOLERANCE:g} away; layers left float are so in both.

"Rewritten" counts attention sites of a compiled step, then those of the graphs that follow it where a sliding window fills up. What is
left float is right, and as large and as slow as without this package. transformers has no SDPA for Gemma2 and GptOss. OPT and Falcon
with alibi are handed `position_ids` and an `attention_mask` as wide as the cache, as `generate` does: what they make of their absence
changes size at every step. `python tests/passes/model_families.py` writes this file; a test checks each row.

| family | attention | rewritten | spelling | left float because |
|---|---|---|---|---|
"""


def main() -> None:
    logging.disable(logging.WARNING)  # a refused site is one; it is in the table
    rows = []
    for family, attention in cases():
        outcome = run(family, attention)
        rows.append(row(family, attention, outcome))
        print(f"{outcome.error:.1e} {outcome.float_error:.1e} {rows[-1]}")
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
