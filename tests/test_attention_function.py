"""The attention function ``"kivi"``: eager attention that meets the quantised state, equal to attention over ``kivi::update``'s floats."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import assert_close

pytest.importorskip("transformers")

from test_cache import CAPACITY, EIGHT_BITS, FLOAT, MODELS, TINY, compiled_on_cpu, generate, ids, logits, padded, snapshot, states
from test_cache import model as plain_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from kivi_ops import KiviCache, KiviConfig

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
SOFTCAP: tuple[str, str, dict[str, Any]] = ("Gemma2Config", "Gemma2ForCausalLM", {**TINY, **SLIDING, "attn_logit_softcapping": 5.0})
SINKS: tuple[str, str, dict[str, Any]] = (
    "GptOssConfig",
    "GptOssForCausalLM",
    {**TINY, **SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1},
)
CHUNKS = [21, *[1] * 8, 19]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def model(name: str, attention: str = "kivi") -> Any:
    """A model of its own, as its attention is set."""
    if name in ("softcap", "sinks"):
        MODELS[name] = SOFTCAP if name == "softcap" else SINKS
        try:
            net = plain_model.__wrapped__(name)
        finally:
            del MODELS[name]
    else:
        net = plain_model.__wrapped__(name)
    net.set_attn_implementation(attention)
    return net


class Operators(TorchDispatchMode):
    """Counts the operators of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "kivi":
            self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("seal", ["after_attention", "before_attention"])
@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "all-sliding", "sliding-and-full", "chunked-and-full", "conv-and-full", "shared-kv", "softcap"]
)
def test_equals_attention_over_the_float_view(name: str, seal: str) -> None:
    """The same Keys and Values sealed the same way, and no float copy of the cache."""
    config = KiviConfig(8, 8, group_size=8, residual_length=16, seal=seal)
    met, floats = model(name), model(name, "eager")
    caches = [KiviCache(met.config, CAPACITY, config), KiviCache(floats.config, CAPACITY, config)]
    # Layers that share Keys read them again after they were sealed.
    ratio = 5e-3 if name == "shared-kv" else 1e-5
    with Operators() as operators:
        for step, chunk in enumerate(ids(1, sum(CHUNKS)).split(CHUNKS, dim=1)):
            assert_close(f"step {step}", logits(met, chunk, caches[0]), logits(floats, chunk, caches[1]), ratio)
    layers = len(states(caches[0]))
    assert operators.calls["append"] == layers * len(CHUNKS) and operators.calls["update"] == layers * len(CHUNKS)  # one model each
    assert operators.calls["attention"] >= layers * len(CHUNKS)
    assert [state.sealed.tolist() for state in states(caches[0])] == [state.sealed.tolist() for state in states(caches[1])]


def test_a_padded_batch_equals_each_row_alone() -> None:
    net, (tokens, mask, rows) = model("sliding-and-full"), padded(5, 12, 9)
    answer = generate(net, tokens, KiviCache.for_model(net, CAPACITY, EIGHT_BITS), attention_mask=mask, new=40)
    for row, alone in enumerate(rows):
        own = generate(net, alone, KiviCache(net.config, CAPACITY, EIGHT_BITS), new=40)
        assert torch.equal(answer[row, 12:], own[0, alone.shape[1] :])


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 4}], ids=str)
def test_generate_equals_a_float_cache_while_nothing_is_sealed(mode: dict[str, int]) -> None:
    net, tokens = model("llama"), ids(1, 4).repeat(1, 3)
    cache = KiviCache(net.config, CAPACITY, FLOAT, left_padding=[0] * mode.get("num_beams", 1))
    assert torch.equal(generate(net, tokens, cache, **mode), generate(net, tokens, **mode))


@pytest.mark.parametrize("name", ["llama", "softcap", "sinks"])
def test_other_caches_and_none_get_transformers_own_attention(name: str) -> None:
    met, own = model(name), model(name, "eager")
    tokens = ids(1, 20)
    assert_close("no cache", met(tokens, use_cache=False).logits, own(tokens, use_cache=False).logits, 1e-5)
    caches = [DynamicCache(config=net.config) for net in (met, own)]
    for step, chunk in enumerate(tokens.split([11, 1, 1, 7], dim=1)):
        assert_close(f"step {step}", logits(met, chunk, caches[0]), logits(own, chunk, caches[1]), 1e-5)


def test_sinks_stay_float_and_say_so() -> None:
    met, own = model("sinks"), model("sinks", "eager")
    caches = [KiviCache(net.config, CAPACITY, EIGHT_BITS) for net in (met, own)]
    for step, chunk in enumerate(ids(1, sum(CHUNKS)).split(CHUNKS, dim=1)):
        with pytest.warns(UserWarning, match="GptOssAttention attends over a float copy of its KiviCache layer: attention sinks"):
            answer = logits(met, chunk, caches[0])
        assert_close(f"step {step}", answer, logits(own, chunk, caches[1]), 1e-5)


def test_latent_keys_stay_float() -> None:
    met, own = model("key-24-value-12"), model("key-24-value-12", "eager")
    caches = [KiviCache(net.config, CAPACITY, EIGHT_BITS) for net in (met, own)]
    for step, chunk in enumerate(ids(1, sum(CHUNKS)).split(CHUNKS, dim=1)):
        assert_close(f"step {step}", logits(met, chunk, caches[0]), logits(own, chunk, caches[1]), 1e-5)


def test_it_may_be_set_and_unset_between_steps() -> None:
    net, own = model("llama"), model("llama", "eager")
    caches = [KiviCache(net.config, CAPACITY, EIGHT_BITS), KiviCache(own.config, CAPACITY, EIGHT_BITS)]
    for step, chunk in enumerate(ids(1, 60).split(6, dim=1)):
        net.set_attn_implementation(("kivi", "sdpa", "eager")[step % 3])
        assert_close(f"step {step}", logits(net, chunk, caches[0]), logits(own, chunk, caches[1]), 1e-5)


def test_under_autocast_it_equals_a_float_cache() -> None:
    net = model("llama")
    cache, dense = KiviCache(net.config, CAPACITY, FLOAT), DynamicCache(config=net.config)
    with torch.autocast("cpu", torch.bfloat16):
        for step, chunk in enumerate(ids(1, 30).split([20, 1, 9], dim=1)):
            assert_close(f"step {step}", logits(net, chunk, cache), logits(net, chunk, dense), 0.02)
    assert states(cache)[0].dtype == torch.bfloat16


def test_a_compiled_step_keeps_update_for_the_backend() -> None:
    torch._dynamo.reset()
    net, eager = model("llama"), model("llama", "eager")
    caches = [KiviCache(net.config, CAPACITY, EIGHT_BITS), KiviCache(eager.config, CAPACITY, EIGHT_BITS)]
    graphs = []

    def keep(graph: torch.fx.GraphModule, example_inputs: list[Any], **kwargs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    forward = torch.compile(net.forward, backend=keep, fullgraph=True)
    logits(net, ids(1, 20), caches[0])
    logits(eager, ids(1, 20), caches[1])
    for step in range(20):
        token = ids(1, 1, seed=step)
        assert_close(f"step {step}", logits(forward, token, caches[0]), logits(eager, token, caches[1]), 1e-5)
    assert len(graphs) == 1
    assert sum(node.target in (torch.ops.kivi.update, torch.ops.kivi.update.default) for node in graphs[0].graph.nodes) == 2
    torch._dynamo.reset()


def test_generate_stays_eager() -> None:
    """On a GPU it would compile by itself, by another backend, which knows only the float copy."""
    net = model("llama")
    cache = KiviCache(net.config, CAPACITY, EIGHT_BITS)
    assert not cache.is_compileable

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("compiled")

    with Operators() as operators:
        generate(net, ids(1, 9), cache, new=30, compile_config=compiled_on_cpu(never))
    assert operators.calls["attention"] == 2 * 30 and not operators.calls["update"]
    net.set_attn_implementation("sdpa")
    assert cache.is_compileable


def test_keys_that_are_changed_on_their_way_are_an_error() -> None:
    net = model("llama")
    cache = KiviCache(net.config, CAPACITY, EIGHT_BITS)
    logits(net, ids(1, 5), cache)
    before, update = snapshot(cache), cache.update
    cache.update = lambda *args, **kwargs: tuple(x * 1 for x in update(*args, **kwargs))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="Keys that KiviCache returned for layer 0 did not reach the attention function 'kivi'"):
        logits(net, ids(1, 1), cache)
    del cache.update
    for now, then in zip(snapshot(cache), before, strict=True):
        assert all(torch.equal(now[name], then[name]) for name in then)
    logits(net, ids(1, 1), cache)
    assert cache.tokens_held() == 6


def test_an_interruption_before_attention_is_an_error_once() -> None:
    net = model("llama")
    cache = KiviCache(net.config, CAPACITY, EIGHT_BITS)
    logits(net, ids(1, 5), cache)
    cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)  # and no attention after it
    with pytest.raises(RuntimeError, match="it was interrupted"):
        logits(net, ids(1, 1), cache)
    logits(net, ids(1, 1), cache)
    assert cache.tokens_held() == 6


def test_it_is_quiet() -> None:
    net = model("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        generate(net, ids(1, 9), KiviCache(net.config, CAPACITY, EIGHT_BITS))


@pytest.mark.gpu
def test_no_float_copy_of_the_cache_is_allocated() -> None:
    """A step's peak over a cache of 128 K tokens stays far below one layer's Keys and Values in float."""
    net = model("llama").to("cuda", torch.float16)
    cache = KiviCache(net.config, 2**17, KiviConfig())
    logits(net, ids(1, 300).cuda(), cache)
    logits(net, ids(1, 1).cuda(), cache)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        logits(net, ids(1, 1).cuda(), cache)
    torch.cuda.synchronize()
    one_layer = 2 * 2**17 * 2 * 16 * 2
    assert torch.cuda.max_memory_allocated() - before < one_layer / 4
