"""The transformers cache: equal to a float cache where nothing is sealed, one graph when compiled, clear errors, nothing half changed."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import cache as once
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same_rows, bits_of, random_tokens, valid_rows
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from transformers import CompileConfig, DynamicCache

from kivi_ops import KiviCache, KiviConfig, KiviState
from kivi_ops.cache import _CROP_TAKES_A_SIZE, KiviLayer

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

FLOAT = KiviConfig(group_size=8, residual_length=96)  # seals nothing in these tests
SEALING = KiviConfig(group_size=8, residual_length=16)
EIGHT_BITS = KiviConfig(8, 8, group_size=8, residual_length=16)
CAPACITY = 96

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large enough for attention to matter
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MLA = {name: value for name, value in TINY.items() if name != "head_dim"} | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 2,
}
SHARING = TINY | {
    "num_hidden_layers": 4,
    "intermediate_size": [32] * 4,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4,
    "laurel_rank": 4,
}
SLIDING = TINY | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", TINY),
    "llama-eager": ("LlamaConfig", "LlamaForCausalLM", TINY | {"attn_implementation": "eager"}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", TINY),
    "all-sliding": ("MistralConfig", "MistralForCausalLM", TINY | {"sliding_window": 8}),
    "sliding-and-full": ("Gemma3TextConfig", "Gemma3ForCausalLM", SLIDING),
    "sliding-and-full-eager": ("Gemma3TextConfig", "Gemma3ForCausalLM", SLIDING | {"attn_implementation": "eager"}),
    "chunked-and-full": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        TINY
        | {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 32}
        | {"layer_types": ["chunked_attention", "full_attention"]},
    ),
    "conv-and-full": ("Lfm2Config", "Lfm2ForCausalLM", TINY | {"layer_types": ["conv", "full_attention"]}),
    "shared-kv": ("Gemma3nTextConfig", "Gemma3nForCausalLM", SHARING),
    "key-24-value-12": ("DeepseekV3Config", "DeepseekV3ForCausalLM", MLA),
}


@once
def model(name: str = "llama") -> Any:
    config, model_class, arguments = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model_class)(getattr(transformers, config)(**arguments)).eval()


CACHE_NAMES = [n for n in ("past_key_values", "cache") if n == "past_key_values" or n in inspect.signature(model().forward).parameters]
CACHE_NAME = CACHE_NAMES[-1]


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(seed))


def logits(net: Any, tokens: Tensor, cache: Any, **kwargs: Any) -> Tensor:
    return net(tokens, **{CACHE_NAME: cache}, **kwargs).logits


def generate(net: Any, tokens: Tensor, cache: Any = None, new: int = 24, name: str = CACHE_NAME, **kwargs: Any) -> Tensor:
    if cache is not None:
        kwargs[name] = cache
    return net.generate(tokens, max_new_tokens=new, do_sample=False, **kwargs)


def padded(*lengths: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A left-padded batch: tokens [B, T], mask [B, T], and each row alone [1, length]."""
    rows = [ids(1, length, seed=length) for length in lengths]
    width = max(lengths)
    tokens = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    return tokens, mask, rows


def states(cache: KiviCache) -> list[KiviState]:
    found = [layer.state for layer in cache.layers if isinstance(layer, KiviLayer) and layer.state is not None]
    assert found
    return found


def snapshot(cache: KiviCache) -> list[dict[str, Tensor]]:
    return [{name: bits_of(tensor).clone() for name, tensor in state.tensors().items()} for state in states(cache)]


def addresses(cache: KiviCache) -> list[int]:
    return [tensor.data_ptr() for state in states(cache) for tensor in state.tensors().values()]


def assert_unchanged(cache: KiviCache, before: list[dict[str, Tensor]]) -> None:
    for layer, (now, then) in enumerate(zip(snapshot(cache), before, strict=True)):
        for name in then:
            assert torch.equal(now[name], then[name]), f"layer {layer}: {name} changed"


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Recorder:
    """A compile backend that runs the graph as it came and keeps it."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Any], **kwargs: Any) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        return self  # CompileConfig copies what it holds

    def calls(self, op: Any) -> list[list[torch.fx.Node]]:
        """Per graph, its nodes that call ``op``."""
        return [[n for n in graph.graph.nodes if n.target in (op, op.default)] for graph in self.graphs]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    torch._dynamo.reset()
    yield Recorder()
    torch._dynamo.reset()


def compiled_on_cpu(backend: Any) -> CompileConfig:
    config = CompileConfig(backend=backend, mode=None)
    config._compile_all_devices = True
    return config


# ------------------------------------------------------------------------------------------------- against a float cache


@pytest.mark.parametrize("name", MODELS)
def test_equals_a_float_cache_while_nothing_is_sealed(name: str) -> None:
    net, tokens = model(name), ids(1, 40)
    kivi, dense = KiviCache(net.config, CAPACITY, FLOAT), DynamicCache(config=net.config)
    for step, chunk in enumerate(tokens.split([13, 1, 1, 5, 1, 6, 1, 1, 1, 10], dim=1)):
        assert_close(f"step {step}", logits(net, chunk, kivi), logits(net, chunk, dense), 2e-5)


@pytest.mark.parametrize("name", ["llama", "qwen2", "all-sliding", "sliding-and-full", "key-24-value-12"])
def test_is_close_to_a_float_cache_at_8_bits(name: str) -> None:
    net, tokens = model(name), ids(2, 60)
    kivi = KiviCache(net.config, CAPACITY, EIGHT_BITS, left_padding=[0, 0])
    dense = DynamicCache(config=net.config)
    for step, chunk in enumerate(tokens.split([21] + [1] * 30 + [9], dim=1)):
        assert_close(f"step {step}", logits(net, chunk, kivi), logits(net, chunk, dense), 0.05)
    assert states(kivi)[0].sealed.tolist() == [[48, 44]] * 2


@pytest.mark.parametrize("argument", CACHE_NAMES)
def test_generate_equals_a_float_cache_and_again_after_reset(argument: str) -> None:
    net, tokens = model(), ids(1, 9)
    expected = generate(net, tokens)
    cache = KiviCache(net.config, CAPACITY, FLOAT)
    assert torch.equal(generate(net, tokens, cache, name=argument), expected)
    held = addresses(cache)
    cache.reset()
    assert cache.tokens_held() == 0
    assert torch.equal(generate(net, tokens, cache, name=argument), expected)
    assert addresses(cache) == held


def test_reset_forgets_what_was_sealed() -> None:
    net, tokens = model(), ids(1, 40)
    fresh, used = (KiviCache(net.config, CAPACITY, SEALING) for _ in range(2))
    logits(net, ids(1, 70, seed=1), used)
    used.reset()
    for chunk in tokens.split([25, 1, 14], dim=1):
        assert torch.equal(logits(net, chunk, used), logits(net, chunk, fresh))


def test_a_second_turn_continues_the_first() -> None:
    net, first = model(), ids(1, 9)
    cache, dense = KiviCache(net.config, CAPACITY, FLOAT), DynamicCache(config=net.config)
    for turn in range(2):
        tokens = first if turn == 0 else torch.cat([answer, ids(1, 5, seed=7)], dim=1)  # noqa: F821 (of the turn before)
        answer = generate(net, tokens, cache)
        assert torch.equal(answer, generate(net, tokens, dense))


def test_beam_search_equals_a_float_cache() -> None:
    net, tokens = model(), ids(1, 9)
    cache = KiviCache(net.config, CAPACITY, FLOAT, left_padding=[0] * 3)
    assert torch.equal(generate(net, tokens, cache, num_beams=3), generate(net, tokens, num_beams=3))


def test_a_cache_allocated_in_inference_mode_works_outside_of_it() -> None:
    net, tokens = model(), ids(1, 30)
    cache, expected = (KiviCache(net.config, CAPACITY, SEALING) for _ in range(2))
    with torch.inference_mode():
        logits(net, tokens[:, :20], cache)
    logits(net, tokens[:, :20], expected)
    assert torch.equal(logits(net, tokens[:, 20:], cache), logits(net, tokens[:, 20:], expected))


def test_state_tensors_are_static_addresses_each_in_a_storage_of_its_own() -> None:
    cache = KiviCache(model().config, CAPACITY, SEALING, left_padding=[0, 0])
    logits(model(), ids(2, 5), cache)
    for change in (lambda: None, lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices([1, 0])):
        change()
        tensors = [tensor for state in states(cache) for tensor in state.tensors().values()]
        assert all(tensor._dynamo_static_input_type == "unguarded" for tensor in tensors)
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_a_deep_copy_is_independent() -> None:
    net, prompt, tokens = model(), ids(1, 20), ids(1, 9, seed=3)
    cache = KiviCache.for_model(net, CAPACITY, SEALING)
    logits(net, prompt, cache)
    copied = copy.deepcopy(cache)
    before = snapshot(cache)
    answer = logits(net, tokens, copied)
    assert_unchanged(cache, before)
    assert torch.equal(logits(net, tokens, cache), answer)


# ------------------------------------------------------------------------------------------------------------ left padding


@pytest.mark.parametrize("knows", ["counts", "mask", "hook", "set-after-reset"])
@pytest.mark.parametrize("name", ["llama", "llama-eager", "sliding-and-full"])
def test_a_padded_batch_equals_each_row_alone(name: str, knows: str) -> None:
    net, (tokens, mask, rows) = model(name), padded(5, 12, 9)
    given = {"counts": [7, 0, 3], "mask": mask}
    cache = (
        KiviCache.for_model(net, CAPACITY, FLOAT)
        if knows == "hook"
        else KiviCache(net.config, CAPACITY, FLOAT, left_padding=given.get(knows, [0, 1, 2]))
    )
    if knows == "set-after-reset":
        generate(net, tokens, cache, new=2)
        cache.reset()
        cache.set_left_padding(given["counts"])
    answer = generate(net, tokens, cache, attention_mask=mask, new=20)
    assert states(cache)[-1].left_padding.tolist() == [7, 0, 3]
    for row, alone in enumerate(rows):
        own = KiviCache(net.config, CAPACITY, FLOAT)
        assert torch.equal(answer[row, 12:], generate(net, alone, own, new=20)[0, alone.shape[1] :])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache.reset()
    cache.set_left_padding(given["counts"])
    whole = logits(net, tokens, cache, attention_mask=mask, position_ids=positions)
    for row, alone in enumerate(rows):
        own = logits(net, alone, KiviCache(net.config, CAPACITY, FLOAT))
        assert_close(f"row {row}", whole[row, -alone.shape[1] :], own[0], 1e-5)


@pytest.mark.parametrize("chunks", [[40], [7, 1, 20, 1, 1, 10]], ids=["at-once", "chunked"])
def test_a_padded_rows_state_equals_its_own_byte_for_byte(chunks: list[int]) -> None:
    lengths, width = [40, 23, 31], 40
    key, value = random_tokens(3, 2, width, 16, seed=1), random_tokens(3, 2, width, 16, seed=2)
    batch = KiviCache(model().config, CAPACITY, SEALING, left_padding=[width - length for length in lengths])
    for k, v in zip(key.split(chunks, dim=2), value.split(chunks, dim=2), strict=True):
        keys, values = batch.update(k, v, 1)
    for row, length in enumerate(lengths):
        alone = KiviCache(model().config, CAPACITY, SEALING)
        alone.update(key[row : row + 1, :, width - length :], value[row : row + 1, :, width - length :], 1)
        state = batch.layers[1].state
        assert state is not None and alone.layers[1].state is not None
        assert_same_rows([valid_rows(state, lengths)[row]], valid_rows(alone.layers[1].state, [length]))
        assert not keys[row, :, : width - length].any() and not values[row, :, : width - length].any()
    assert torch.equal(keys[:, :, width - 1], key[:, :, -1]) and not keys[:, :, width:].any()


@pytest.mark.parametrize("chunk", [None, 4, 5])
def test_the_hook_learns_padding_from_a_chunked_prefill(chunk: int | None) -> None:
    net, (tokens, mask, rows) = model(), padded(3, 13)
    cache = KiviCache.for_model(net, CAPACITY, FLOAT)
    answer = generate(net, tokens, cache, attention_mask=mask, prefill_chunk_size=chunk)
    assert [state.left_padding.tolist() for state in states(cache)] == [[10, 0]] * 2
    assert torch.equal(answer[0, 13:], generate(net, rows[0])[0, 3:])
    cache.reset()
    other, mask, _ = padded(13, 6)
    generate(net, other, cache, attention_mask=mask, new=2, prefill_chunk_size=chunk)
    assert [state.left_padding.tolist() for state in states(cache)] == [[0, 7]] * 2


@pytest.mark.parametrize("form", ["2-D", "4-D bool", "4-D float", "dict", "positional"])
def test_the_hook_reads_every_form_of_mask(form: str) -> None:
    net, (tokens, mask, _) = model(), padded(5, 9)
    width = 9
    visible = torch.ones(width, CAPACITY).tril().bool() & torch.nn.functional.pad(mask, (0, CAPACITY - width)).bool()[:, None, None]
    cache = KiviCache.for_model(net, CAPACITY, SEALING)
    if form == "positional":
        net(tokens, mask, None, cache)
    elif form == "dict":  # what generate makes for models with several kinds of layer
        sliding = model("sliding-and-full")
        cache = KiviCache.for_model(sliding, CAPACITY, SEALING)
        near = visible & ~torch.ones(width, CAPACITY).tril(-8).bool()
        logits(sliding, tokens, cache, attention_mask={"sliding_attention": near, "full_attention": visible})
    else:
        low = torch.finfo(torch.float32).min
        masks = {"2-D": mask, "4-D bool": visible, "4-D float": torch.zeros(visible.shape).masked_fill(~visible, low)}
        logits(net, tokens, cache, attention_mask=masks[form])
    assert [state.left_padding.tolist() for state in states(cache)] == [[4, 0]] * 2


def test_padding_is_frozen_once_a_row_holds_a_token() -> None:
    net, (tokens, mask, _) = model(), padded(5, 9)
    cache = KiviCache.for_model(net, CAPACITY, SEALING)
    logits(net, tokens, cache, attention_mask=mask)
    later = torch.cat([mask, torch.tensor([[0, 1, 1], [1, 1, 1]])], dim=1)
    later[:, :6] = 0  # a mask that hides what both rows hold
    logits(net, ids(2, 3), cache, attention_mask=later)
    assert states(cache)[0].left_padding.tolist() == [4, 0]


def test_explicit_padding_wins_over_the_mask_until_reset() -> None:
    net, (tokens, mask, _) = model(), padded(5, 9)
    cache = KiviCache.for_model(net, CAPACITY, SEALING)
    cache.set_left_padding([2, 1])
    logits(net, tokens, cache, attention_mask=mask)
    assert states(cache)[0].left_padding.tolist() == [2, 1]
    cache.reset()
    assert states(cache)[0].left_padding.tolist() == [0, 0]
    logits(net, tokens, cache, attention_mask=mask)
    assert states(cache)[0].left_padding.tolist() == [4, 0]


def test_the_hook_acts_for_its_own_cache_and_model_alone() -> None:
    net, (tokens, mask, _) = model(), padded(5, 9)
    plain, other = KiviCache(net.config, CAPACITY, SEALING, left_padding=[0, 0]), KiviCache.for_model(model("qwen2"), CAPACITY, SEALING)
    attached = KiviCache.for_model(net, CAPACITY, SEALING)
    with pytest.warns(UserWarning, match="takes its 2 rows as unpadded"):
        logits(net, tokens, other, attention_mask=mask)
    logits(net, tokens, plain, attention_mask=mask)
    assert not attached.is_initialized
    assert states(plain)[0].left_padding.tolist() == states(other)[0].left_padding.tolist() == [0, 0]


def test_the_hook_goes_with_detach_and_with_the_last_cache() -> None:
    net = model.__wrapped__()  # one that no other test has attached to
    first, second = (KiviCache.for_model(net, CAPACITY) for _ in range(2))
    assert len(net._forward_pre_hooks) == 1  # a hook per cache would compile again for each new cache
    first.detach()
    assert len(net._forward_pre_hooks) == 1
    del second
    gc.collect()
    assert not net._forward_pre_hooks
    first.detach()


def test_learnt_padding_survives_detach() -> None:
    net, (tokens, mask, _) = model(), padded(5, 9)
    cache = KiviCache.for_model(net, CAPACITY, FLOAT)
    logits(net, tokens, cache, attention_mask=mask)
    cache.detach()
    assert states(cache)[0].left_padding.tolist() == [4, 0]


def test_a_batch_of_unknown_padding_is_warned_about_once() -> None:
    net, (tokens, mask, _) = model(), padded(5, 9)
    cache = KiviCache(net.config, CAPACITY)
    with pytest.warns(UserWarning, match="for_model") as seen:
        logits(net, tokens, cache, attention_mask=mask)
    assert len([w for w in seen if w.category is UserWarning]) == 1  # not once per layer
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        logits(net, tokens, cache, attention_mask=torch.cat([mask, mask], 1))


@pytest.mark.parametrize("case", ["one row", "counts given", "attached", "attached, allocated early"])
def test_no_warning_where_padding_is_known(case: str) -> None:
    net, (tokens, mask, _) = model(), padded(5, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        if case == "one row":
            logits(net, tokens[1:], KiviCache(net.config, CAPACITY))
        elif case == "counts given":
            logits(net, tokens, KiviCache(net.config, CAPACITY, left_padding=torch.tensor([0, 0])))
        else:
            cache = KiviCache.for_model(net, CAPACITY)
            if case != "attached":
                cache.early_initialization(2, 2, 16, torch.float32, "cpu")
            logits(net, tokens, cache, attention_mask=mask)
            assert states(cache)[0].left_padding.tolist() == [4, 0]


def test_a_mask_that_cannot_be_read_is_warned_about_once() -> None:
    cache = KiviCache.for_model(model(), CAPACITY)
    with pytest.warns(UserWarning, match="cannot learn left padding"):
        cache._observe(object(), 2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        cache._observe(object(), 2, 3)


# ------------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("attached", [False, True], ids=["plain", "for_model"])
def test_going_past_the_capacity_raises_and_changes_nothing(attached: bool) -> None:
    net = model()
    cache = KiviCache.for_model(net, 32, SEALING) if attached else KiviCache(net.config, 32, SEALING, left_padding=[0, 0])
    with pytest.raises(ValueError, match=r"holds 0 tokens and this call brings 33 more; allowed: 32"):
        logits(net, ids(2, 33), cache)
    assert not cache.is_initialized
    logits(net, ids(2, 30), cache)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"holds 30 tokens and this call brings 3 more; allowed: 32 \(max_cache_len\)"):
        logits(net, ids(2, 3), cache)
    assert_unchanged(cache, before)
    logits(net, ids(2, 2), cache)
    with pytest.raises(ValueError, match="holds 32 tokens"):
        generate(net, ids(2, 40), cache)


def test_a_refused_call_teaches_no_padding() -> None:
    net, cache = model(), KiviCache.for_model(model(), 16, SEALING)
    seen = torch.tensor([[0] * 14, [1] * 14])
    logits(net, ids(2, 14), cache, attention_mask=seen)
    before = snapshot(cache)
    assert states(cache)[0].left_padding.tolist() == [14, 0]  # row 0 is still empty: its padding may still be learnt
    longer = torch.nn.functional.pad(seen, (0, 3))
    longer[:, -1] = 1
    with pytest.raises(ValueError, match="this call brings 3 more; allowed: 16"):
        logits(net, ids(2, 3), cache, attention_mask=longer)
    assert_unchanged(cache, before)


@pytest.mark.parametrize("rows, advice", [(1, "select its rows first"), (5, "repeat its rows")])
@pytest.mark.parametrize("attached", [False, True], ids=["plain", "for_model"])
def test_another_number_of_rows_raises_and_changes_nothing(rows: int, advice: str, attached: bool) -> None:
    net = model()
    cache = KiviCache.for_model(net, 64, SEALING) if attached else KiviCache(net.config, 64, SEALING, left_padding=[0, 0, 0])
    logits(net, ids(3, 20), cache)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=f"holds 3 rows but this call has {rows}.*{advice}"):
        logits(net, ids(rows, 1), cache)
    assert_unchanged(cache, before)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_first_update_inside_a_graph_raises(recorder: Recorder, fullgraph: bool) -> None:
    net = model()
    cache = KiviCache(net.config, CAPACITY)
    forward = torch.compile(net.forward, backend=recorder, fullgraph=fullgraph)
    with pytest.raises(RuntimeError, match="no state yet and a graph is being traced.*early_initialization"):
        logits(forward, ids(1, 5), cache)
    assert not cache.is_initialized


def test_another_number_of_rows_raises_out_of_a_compiled_call(recorder: Recorder) -> None:
    net = model()
    cache = KiviCache(net.config, CAPACITY, SEALING, left_padding=[0, 0])
    logits(net, ids(2, 20), cache)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="holds 2 rows but this call has 1"):
        logits(torch.compile(net.forward, backend=recorder), ids(1, 1), cache)
    assert_unchanged(cache, before)


def test_an_update_that_needs_grad_raises() -> None:
    cache = KiviCache(model().config, CAPACITY)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="no backward"):
        logits(model(), ids(1, 5), cache)


def test_a_wrong_dtype_raises() -> None:
    cache = KiviCache(model().config, CAPACITY)
    logits(model(), ids(1, 5), cache)
    before = snapshot(cache)
    half = torch.zeros(1, 2, 1, 16, dtype=torch.float16)
    with pytest.raises(TypeError, match="allowed: torch.float32"):
        cache.update(half, half, 0)
    assert_unchanged(cache, before)


BAD_ARGUMENTS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "model config as config": (lambda c: KiviCache(c, 8, config=c), TypeError, "config is a LlamaConfig"),
    "capacity 0": (lambda c: KiviCache(c, 0), ValueError, "max_cache_len is 0"),
    "capacity of a float": (lambda c: KiviCache(c, 8.0), ValueError, "max_cache_len is 8.0"),  # type: ignore[arg-type]
    "padding of floats": (lambda c: KiviCache(c, 8, left_padding=[0.5]), ValueError, "left_padding is torch.float32"),
    "padding of bools": (lambda c: KiviCache(c, 8, left_padding=[True]), ValueError, "left_padding is torch.bool"),
    "padding below 0": (lambda c: KiviCache(c, 8, left_padding=[-1, 0]), ValueError, r"left_padding is \[-1, 0\]"),
    "padding past the capacity": (lambda c: KiviCache(c, 8, left_padding=[9]), ValueError, "allowed: 0 to 8"),
    "mask of other numbers": (lambda c: KiviCache(c, 8, left_padding=torch.full((1, 3), 2)), ValueError, "0 and 1"),
    "flash attention": (
        lambda c: KiviCache(transformers.LlamaConfig(**TINY, attn_implementation="flash_attention_2"), 8),
        ValueError,
        "unwritten columns must be hidden",
    ),
    "encoder and decoder": (lambda c: KiviCache(transformers.T5Config(), 8), ValueError, "'t5' is an encoder-decoder.*for_encoder_decoder"),
    "hybrid layers": (
        lambda c: KiviCache(transformers.LlamaConfig(**TINY, layer_types=["full_attention", "hybrid"]), 8),
        ValueError,
        "layer 1 of 'llama' is 'hybrid'",
    ),
    "head size 264": (
        lambda c: KiviCache(c, 8).update(torch.zeros(1, 1, 1, 264), torch.zeros(1, 1, 1, 264), 0),
        ValueError,
        "key_dim is 264",
    ),
    "padding for other rows": (
        lambda c: KiviCache(c, 8, left_padding=[0, 0]).update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0),
        ValueError,
        "left_padding is for 2 rows but the batch has 1",
    ),
    "early lists too short": (
        lambda c: KiviCache(c, 8).early_initialization(1, 2, [16], torch.float32, "cpu"),
        ValueError,
        "head_dim has 1 entries",
    ),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_raise(case: str) -> None:
    call, error, message = BAD_ARGUMENTS[case]
    with pytest.raises(error, match=message):
        call(model().config)


def test_padding_cannot_be_set_once_tokens_are_held() -> None:
    cache = KiviCache(model().config, CAPACITY)
    logits(model(), ids(1, 5), cache)
    with pytest.raises(ValueError, match="while the cache holds 5 tokens"):
        cache.set_left_padding([1])
    cache.reset()
    with pytest.raises(ValueError, match="left_padding is for 2 rows but the cache has 1"):
        cache.set_left_padding([1, 0])


# ---------------------------------------------------------------------------------------------------- memory and printing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        KiviConfig(),
        KiviConfig(4, 4, group_size=32, residual_length=128),
        KiviConfig(8, 2, group_size=16, residual_length=64, rollback_margin=64),
        KiviConfig(metadata_dtype=torch.float32),
    ],
    ids=["2-bit", "4-bit", "8-2-bit-margin", "float32-metadata"],
)
def test_held_bytes_are_those_of_the_contract(config: KiviConfig, dtype: torch.dtype) -> None:
    rows, heads, key_dim, value_dim, capacity = 3, 2, 64, 32, 1000
    cache = KiviCache(model().config, capacity, config, left_padding=[0] * rows)
    assert cache.held_bytes() == 0
    cache.early_initialization(rows, heads, key_dim, dtype, "cpu", value_head_dim=value_dim)
    element, metadata, group = dtype.itemsize, (config.metadata_dtype or dtype).itemsize, config.group_size
    state = states(cache)[0]
    expected = 0.0
    for dim, bits, tokens, record in (
        (key_dim, config.key_bits, capacity, state.key_layout.tokens),
        (value_dim, config.value_bits, capacity - config.residual_length - config.rollback_margin, state.value_layout.tokens),
    ):
        sealed = -(-tokens // record) * record
        window = config.residual_length + config.rollback_margin
        expected += dim * (sealed * (bits / 8 + 2 * metadata / group) + window * element)
    expected *= 2 * rows * heads  # layers
    assert expected <= cache.held_bytes() <= expected + 2 * rows * 64


def test_held_bytes_count_layers_of_other_kinds() -> None:
    net = model("conv-and-full")
    cache = KiviCache(net.config, CAPACITY)
    logits(net, ids(1, 5), cache)
    assert cache.held_bytes() > states(cache)[0].held_bytes()


def test_repr() -> None:
    cache = KiviCache(model().config, 1024, KiviConfig(key_bits=4))
    text = "KiviCache(key_bits=4, value_bits=2, group_size=32, residual_length=128, layers=2, max_cache_len=1024, "
    assert repr(cache) == text + "batch_size=unset, tokens=0, held=0 bytes (0.0 MiB))"
    logits(model(), ids(1, 7), cache)
    assert repr(cache) == text + f"batch_size=1, tokens=7, held={cache.held_bytes():,} bytes (0.2 MiB))"
    hybrid = KiviCache(model("conv-and-full").config, 8)
    assert "layers=1 of 2" in repr(hybrid)


def test_attributes() -> None:
    cache = KiviCache(model().config, 40, SEALING)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (cache.max_cache_len, cache.get_max_length(), cache.get_max_length(1)) == (40, 40, 40)
        assert (cache.max_batch_size, cache.batch_size, cache.get_seq_length(), cache.is_initialized) == (-1, -1, 0, False)
        assert cache.is_compileable and cache.is_sliding == [False, False] and not cache.is_croppable
        assert cache.get_mask_sizes(3, 0) == (40, 0)
        logits(model(), ids(1, 7), cache)
        assert (cache.max_batch_size, cache.batch_size, cache.is_initialized) == (1, 1, True)
        assert cache.get_seq_length() is states(cache)[0].length and cache.tokens_held() == 7
        assert KiviCache(model().config, 40, KiviConfig(rollback_margin=2)).is_croppable


# ------------------------------------------------------------------------------------------------------------- life cycle


def test_crop_then_continue_equals_a_run_without_the_cropped_tokens() -> None:
    net, tokens = model(), ids(1, 60)
    straight, cropped = (KiviCache(net.config, CAPACITY, FLOAT) for _ in range(2))
    for start in range(0, 60, 6):
        chunk = tokens[:, start : start + 6]
        logits(net, torch.cat([chunk[:, :2], ids(1, 6, seed=start + 1)], dim=1), cropped)
        held = addresses(cropped)
        cropped.crop(-6)
        assert cropped.tokens_held() == start + 2
        assert_close(f"from {start}", logits(net, chunk[:, 2:], cropped), logits(net, chunk, straight)[:, 2:], 1e-5)
        assert addresses(cropped) == held


def test_crops_within_the_rollback_margin_leave_no_trace() -> None:
    config = KiviConfig(group_size=8, residual_length=16, rollback_margin=8)
    key, value = random_tokens(1, 2, 84, 16, seed=1), random_tokens(1, 2, 84, 16, seed=2)
    straight, cropped = (KiviCache(model().config, CAPACITY, config) for _ in range(2))
    straight.update(key, value, 0)
    for start in range(0, 80, 5):
        drafted = random_tokens(1, 2, 8, 16, seed=start)
        cropped.update(drafted, drafted, 0)
        cropped.crop(-8)
        cropped.update(key[:, :, start : start + 5], value[:, :, start : start + 5], 0)
    cropped.update(key[:, :, 80:], value[:, :, 80:], 0)  # past the longest length held so far, 83
    assert_same_rows(valid_rows(states(cropped)[0], [84]), valid_rows(states(straight)[0], [84]))


def test_crop_takes_what_transformers_takes() -> None:
    cache = KiviCache(model().config, CAPACITY, SEALING)
    cache.crop(-3)
    logits(model(), ids(1, 9), cache)
    cache.crop(0)
    assert cache.tokens_held() == 9
    if _CROP_TAKES_A_SIZE:
        cache.crop(20)
        assert cache.tokens_held() == 9
        cache.crop(4)
        assert cache.tokens_held() == 4
    else:
        with pytest.raises(ValueError, match="crop was given 4; allowed: 0 or less"):
            cache.crop(4)
    cache.crop(-30)
    assert [int(state.length) for state in states(cache)] == [0, 0]


def test_crop_is_whole_or_not_at_all() -> None:
    net = model("conv-and-full")
    cache = KiviCache(net.config, CAPACITY)
    logits(net, ids(1, 9), cache)
    with pytest.raises(RuntimeError, match="does not track past states"):
        cache.crop(-1)
    assert cache.tokens_held() == 9


def test_assisted_decoding_with_a_rollback_margin_equals_greedy() -> None:
    net, tokens = model(), ids(1, 4).repeat(1, 5)  # repeats, so that the prompt offers drafts
    cache = KiviCache(net.config, CAPACITY, KiviConfig(8, 8, group_size=8, residual_length=16, rollback_margin=8))
    expected = KiviCache(net.config, CAPACITY, KiviConfig(8, 8, group_size=8, residual_length=16, rollback_margin=8))
    answer = generate(net, tokens, cache, prompt_lookup_num_tokens=4)
    assert torch.equal(answer, generate(net, tokens, expected))


def filled(config: KiviConfig = SEALING) -> KiviCache:
    """Three rows, padded by 0, 4 and 9, past several seals."""
    net = model()
    tokens, mask, _ = padded(40, 36, 31)
    cache = KiviCache(net.config, CAPACITY, config, left_padding=mask)
    logits(net, tokens, cache, attention_mask=mask)
    return cache


def row_tensors(cache: KiviCache) -> list[dict[str, Tensor]]:
    return [{name: tensor for name, tensor in layer.items() if name != "length"} for layer in snapshot(cache)]


def test_reorder_moves_every_tensor_of_a_row_in_place() -> None:
    cache = filled()
    before, held = row_tensors(cache), addresses(cache)
    cache.reorder_cache(torch.tensor([2, 0, 2]))
    assert addresses(cache) == held and cache.tokens_held() == 40
    for now, then in zip(row_tensors(cache), before, strict=True):
        for name in then:
            assert torch.equal(now[name], then[name][[2, 0, 2]]), name
    with pytest.raises(ValueError, match=r"beam_idx of shape \[2\]; allowed: \[3\]"):
        cache.reorder_cache(torch.tensor([0, 1]))


@pytest.mark.parametrize("indices", [[1], torch.tensor([2, -3]), torch.tensor([True, False, True])], ids=["one", "two", "bool"])
def test_select_keeps_rows_whole(indices: Any) -> None:
    cache = filled()
    before = row_tensors(cache)
    cache.batch_select_indices(indices)
    chosen = torch.arange(3)[torch.as_tensor(indices)]
    assert cache.batch_size == len(chosen)
    for now, then in zip(row_tensors(cache), before, strict=True):
        for name in then:
            assert torch.equal(now[name], then[name][chosen]), name
    logits(model(), ids(len(chosen), 3), cache)


def test_repeat_keeps_rows_whole() -> None:
    cache = filled()
    before = row_tensors(cache)
    cache.batch_repeat_interleave(2)
    for now, then in zip(row_tensors(cache), before, strict=True):
        for name in then:
            assert torch.equal(now[name], then[name].repeat_interleave(2, 0)), name
    logits(model(), ids(6, 3), cache)


def test_rows_move_before_there_is_a_state() -> None:
    cache = KiviCache(model().config, CAPACITY, left_padding=[1, 2])
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    cache.batch_select_indices([0, 3])
    logits(model(), ids(2, 5), cache)
    assert states(cache)[0].left_padding.tolist() == [2, 1]


def test_what_a_layer_of_another_kind_cannot_do_changes_nothing() -> None:
    net = model("conv-and-full")
    cache = KiviCache(net.config, CAPACITY, left_padding=[0, 0])
    logits(net, ids(2, 5), cache)
    before = snapshot(cache)
    with pytest.raises(NotImplementedError, match="layer 0 is a LinearAttentionLayer"):
        cache.batch_select_indices([0])
    assert_unchanged(cache, before)
    with pytest.raises(ValueError, match="indices are"):
        cache.batch_select_indices(torch.zeros(1, 1, dtype=torch.int64))


# ----------------------------------------------------------------------------------------------------------------- compiled


def assert_decode_graph(graph: torch.fx.GraphModule, updates: list[torch.fx.Node], layers: int) -> None:
    """One update a layer, told a copy of the length; every state tensor an input marked static, each one once."""
    assert len(updates) == layers
    seen = set()
    for node in updates:
        *state, position = node.args[2:]
        for tensor in state:
            assert tensor.op == "placeholder" and tensor.meta["tensor_dict"]["_dynamo_static_input_type"] == "unguarded"
            assert all(isinstance(size, int) for size in tensor.meta["example_value"].shape)
        assert position.target == "clone" and position.args[0] is state[-1]
        seen.update(state)
    assert len(seen) == 7 * layers
    assert not any(isinstance(n.meta.get("example_value"), (int, torch.SymInt)) for n in graph.graph.nodes if n.op == "placeholder")


@pytest.mark.parametrize("seal", ["after_attention", "before_attention"])
def test_one_graph_for_two_caches_in_turn(recorder: Recorder, seal: str) -> None:
    net, config = model(), KiviConfig(group_size=8, residual_length=16, seal=seal)
    steps = 3 * config.residual_length + 5
    forward = torch.compile(net.forward, backend=recorder, fullgraph=True)
    compiled, eager = ([KiviCache(net.config, CAPACITY, config) for _ in range(2)] for _ in range(2))
    for which, prompt in enumerate((ids(1, 9), ids(1, 21))):
        for cache in (compiled[which], eager[which]):
            logits(net, prompt, cache)
    for step in range(steps):
        for which in range(2):
            token = ids(1, 1, seed=2 * step + which)
            with torch._dynamo.config.patch(error_on_recompile=True):
                answer = logits(forward, token, compiled[which])
            assert_close(f"step {step}", answer, logits(net, token, eager[which]), 1e-5)
    assert len(recorder.graphs) == 1
    assert_decode_graph(recorder.graphs[0], recorder.calls(torch.ops.kivi.update)[0], layers=2)
    assert [cache.tokens_held() for cache in compiled] == [9 + steps, 21 + steps]


def test_caches_that_differ_get_a_graph_each_without_symbols(recorder: Recorder) -> None:
    net = model()
    forward = torch.compile(net.forward, backend=recorder, fullgraph=True)
    kinds = [(1, 64, SEALING), (1, 96, SEALING), (2, 96, SEALING), (3, 96, SEALING), (1, 96, EIGHT_BITS), (1, 96, FLOAT)]
    for graphs, (rows, capacity, config) in enumerate(kinds, start=1):
        compiled, eager = (KiviCache(net.config, capacity, config, left_padding=[0] * rows) for _ in range(2))
        for cache in (compiled, eager):
            logits(net, ids(rows, 9), cache)
        for step in range(3):
            token = ids(rows, 1, seed=step)
            assert_close(f"step {step}", logits(forward, token, compiled), logits(net, token, eager), 1e-5)
        assert len(recorder.graphs) == graphs
        updates = recorder.calls(torch.ops.kivi.update)[-1]
        assert_decode_graph(recorder.graphs[-1], updates, layers=2)
        expected = config.op_kwargs(capacity, torch.float32) | {"seal": config.seal}
        assert [node.kwargs for node in updates] == [expected, expected]


@pytest.mark.parametrize("name", ["llama", "sliding-and-full"])
@pytest.mark.parametrize("attached", [False, True], ids=["plain", "for_model"])
def test_generate_compiles_one_graph_for_two_caches(recorder: Recorder, name: str, attached: bool) -> None:
    net, (tokens, mask, _) = model(name), padded(9, 14)
    make: Callable[[], KiviCache] = (
        (lambda: KiviCache.for_model(net, CAPACITY, SEALING))
        if attached
        else (lambda: KiviCache(net.config, CAPACITY, SEALING, left_padding=mask))
    )
    new = 3 * SEALING.residual_length + 5
    expected = generate(net, tokens, make(), attention_mask=mask, new=new)
    first, second = make(), make()
    for cache in (first, second, first):
        cache.reset()
        if not attached:
            cache.set_left_padding(mask)
        with torch._dynamo.config.patch(error_on_recompile=True):
            answer = generate(net, tokens, cache, attention_mask=mask, new=new, compile_config=compiled_on_cpu(recorder))
        assert torch.equal(answer, expected)
        assert states(cache)[1].left_padding.tolist() == [5, 0]
    assert len(recorder.graphs) == 1
    assert_decode_graph(recorder.graphs[0], recorder.calls(torch.ops.kivi.update)[0], layers=2)
    assert recorder.calls(torch.ops.kivi.observe_padding) == [[]]  # decode steps learn nothing of padding
    del net._compiled_call


def test_a_compiled_prefill_learns_padding_in_its_graph(recorder: Recorder) -> None:
    net, (tokens, mask, _) = model(), padded(9, 14)
    eager, early = (KiviCache.for_model(net, CAPACITY, SEALING) for _ in range(2))
    early.early_initialization(2, 2, 16, torch.float32, "cpu")
    call = torch.compile(net.__call__, backend=recorder, fullgraph=True)
    for chunk, seen in ((tokens, mask), (ids(2, 14), torch.cat([mask, torch.ones_like(mask)], 1))):
        expected = logits(net, chunk, eager, attention_mask=seen)
        assert_close("logits", logits(call, chunk, early, attention_mask=seen), expected, 1e-5)
    assert [state.left_padding.tolist() for state in states(early)] == [[5, 0]] * 2
    counts = [len(nodes) for nodes in recorder.calls(torch.ops.kivi.observe_padding)]
    assert [count for count in counts if count] == [2, 2]  # a layer each, in either call's graph (Dynamo gives the hook one of its own)


def test_past_the_capacity_a_graph_gives_nan_and_a_rollback_mends_it(recorder: Recorder) -> None:
    net = model()
    cache, expected = (KiviCache(net.config, 24, SEALING) for _ in range(2))
    forward = torch.compile(net.forward, backend=recorder, fullgraph=True)
    for held in (cache, expected):
        logits(net, ids(1, 23), held)
    assert_close("the last token", logits(forward, ids(1, 1), cache), logits(net, ids(1, 1), expected), 1e-5)
    for _ in range(2):
        assert logits(forward, ids(1, 1), cache).isnan().all()
    cache.crop(-3)
    expected.crop(-1)
    assert_close("after the rollback", logits(forward, ids(1, 1, seed=1), cache), logits(net, ids(1, 1, seed=1), expected), 1e-5)
