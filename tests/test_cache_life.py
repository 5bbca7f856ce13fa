"""What a cache lives through, one thing at a time: other capacities and margins, splits, files, devices, interruptions, kinds of models."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same_rows, random_tokens, valid_rows
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from test_cache import CAPACITY, FLOAT, SEALING, addresses, assert_unchanged, generate, ids, logits, model, snapshot, states
from transformers import DynamicCache, EncoderDecoderCache

from kivi_ops import KiviCache, KiviConfig, KiviState

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def state_of(config: KiviConfig, capacity: int, tokens: int, padding: tuple[int, ...] = (0, 3)) -> KiviState:
    state = KiviState.allocate(config, len(padding), 2, capacity, 16, 12, torch.float32)
    state.left_padding.copy_(torch.tensor(padding))
    key, value = random_tokens(len(padding), 2, tokens, 16, seed=1), random_tokens(len(padding), 2, tokens, 12, seed=2)
    state.append(key, value, torch.tensor(0))
    return state


def seen(state: KiviState) -> tuple[Tensor, Tensor]:
    """Every token held, in float."""
    nothing = torch.zeros(*state.key_window.shape[:2], 0, 16)
    key, value = state.update(nothing, nothing[..., :12], state.length.clone())
    return key[:, :, : int(state.length)], value[:, :, : int(state.length)]


# ------------------------------------------------------------------------------------------------- capacities and margins


@pytest.mark.parametrize(
    "before, after, tokens",
    [(b, a, t) for b, a in ((64, 128), (128, 64), (10, 64), (64, 21), (10, 12)) for t in (0, 5, 16, 21, 60) if t <= min(a, b)],
)
def test_another_capacity_gives_the_state_that_it_would_have_had(before: int, after: int, tokens: int) -> None:
    config = KiviConfig(group_size=8, residual_length=16)
    resized, expected = state_of(config, before, tokens).with_room(after), state_of(config, after, tokens)
    held = [max(0, tokens - padding) for padding in (0, 3)]
    assert_same_rows(valid_rows(resized, held), valid_rows(expected, held))
    assert {n: t.shape for n, t in resized.tensors().items()} == {n: t.shape for n, t in expected.tensors().items()}


@pytest.mark.parametrize("tokens", [5, 16, 21, 40, 59])
def test_another_margin_keeps_every_token(tokens: int) -> None:
    narrow = KiviConfig(group_size=8, residual_length=16, rollback_margin=3)
    wide = KiviConfig(group_size=8, residual_length=16, rollback_margin=20)
    state = state_of(narrow, 96, tokens)
    widened = state.with_room(96, wide)
    for actual, expected in zip(seen(widened), seen(state), strict=True):
        assert torch.equal(actual, expected)
    assert widened.key_window.shape[2] == 36


def test_a_capacity_below_what_is_held_is_refused() -> None:
    config = KiviConfig(group_size=8, residual_length=16)
    state = state_of(config, 64, 40, (0,))
    with pytest.raises(ValueError, match="capacity is 39; allowed: 40 or more, for 40 tokens of which 24 Values are sealed"):
        state.with_room(39)
    state.length.fill_(30)  # rolled back; its sealed Values still need their records
    with pytest.raises(ValueError, match="capacity is 30; allowed: 40 or more"):
        state.with_room(30)
    with pytest.raises(ValueError, match="another rollback_margin"):
        state.with_room(64, KiviConfig(group_size=8, residual_length=24))


def test_resize_goes_on_where_it_was_full() -> None:
    net, tokens = model(), ids(1, 80)
    small, large = (KiviCache(net.config, capacity, SEALING) for capacity in (40, 96))
    for cache in (small, large):
        logits(net, tokens[:, :40], cache)
    with pytest.raises(ValueError, match="resize"):
        logits(net, tokens[:, 40:41], small)
    small.resize(96)
    assert small.max_cache_len == 96 and small.get_max_length() == 96
    for token in tokens[:, 40:].split(1, dim=1):
        assert torch.equal(logits(net, token, small), logits(net, token, large))
    before = snapshot(small)
    with pytest.raises(ValueError, match="capacity is 64; allowed: 80 or more"):
        small.resize(64)
    assert_unchanged(small, before)
    assert small.max_cache_len == 96


def test_resize_before_there_is_a_state() -> None:
    cache = KiviCache(model().config, 8, SEALING, left_padding=[6])
    with pytest.raises(ValueError, match="allowed: 6 or more, the left padding"):
        cache.resize(5)
    cache.resize(40)
    logits(model(), ids(1, 30), cache)
    with pytest.raises(ValueError, match="max_cache_len is 0"):
        cache.resize(0)


# ---------------------------------------------------------------------------------------------------------- rollback margin


def test_generate_with_an_assistant_sets_the_margin() -> None:
    """A cache gives the same tokens as one without drafts, though nobody asked for a margin."""
    net, tokens = model(), ids(1, 4).repeat(1, 5)
    drafted = KiviCache(net.config, 256, KiviConfig(8, 8, group_size=8, residual_length=16))
    plain = KiviCache(net.config, 256, KiviConfig(8, 8, group_size=8, residual_length=16, rollback_margin=32))
    assert not drafted.is_croppable
    assert torch.equal(generate(net, tokens, drafted, new=90, prompt_lookup_num_tokens=4), generate(net, tokens, plain, new=90))
    assert drafted.is_croppable and drafted.config.rollback_margin == 32 and drafted.tokens_held() == plain.tokens_held()


def test_a_margin_set_late_keeps_what_is_held_and_covers_what_can_still_come() -> None:
    net = model()
    cache = KiviCache(net.config, 64, SEALING)
    logits(net, ids(1, 50), cache)
    before = states(cache)[0]
    cache.activate_past_recording()
    assert cache.config.rollback_margin == 64 - 16 - 34  # 34 Values are sealed already
    for actual, expected in zip(seen_of(states(cache)[0]), seen_of(before), strict=True):
        assert torch.equal(actual, expected)
    drafted = ids(1, 14, seed=1)
    logits(net, drafted, cache)
    cache.crop(-14)
    assert [state.sealed.tolist() for state in states(cache)] == [[[48, 34]]] * 2  # no token above 50 was sealed


def seen_of(state: KiviState) -> tuple[Tensor, ...]:
    nothing = torch.zeros(*state.key_window.shape[:2], 0, state.key_window.shape[3])
    return tuple(view[:, :, : int(state.length)] for view in state.update(nothing, nothing, state.length.clone()))


def test_longer_drafts_widen_the_margin_and_too_long_ones_are_warned_about() -> None:
    net = model()
    cache = KiviCache(net.config, 512, SEALING)
    logits(net, ids(1, 20), cache)
    cache.activate_past_recording()
    logits(net, ids(1, 40), cache)
    assert cache.config.rollback_margin == 64
    cache.crop(-39)
    logits(net, ids(1, 200), cache)  # a prompt, by its length
    assert cache.config.rollback_margin == 64
    with pytest.warns(UserWarning, match=r"80 drafted tokens.*rollback_margin=64 does not cover.*KiviConfig\(rollback_margin=80\)"):
        cache.crop(-80)


# ---------------------------------------------------------------------------------------------------------------- batches


def test_split_gives_caches_of_their_own() -> None:
    net, tokens = model(), ids(5, 30)
    whole = KiviCache(net.config, CAPACITY, SEALING, left_padding=[0, 1, 2, 3, 4])
    logits(net, tokens, whole)
    before = snapshot(whole)
    parts = whole.batch_split(5, 2)
    assert [part.batch_size for part in parts] == [2, 2, 1]
    assert [states(part)[0].left_padding.tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    token = ids(5, 1, seed=3)
    answers = torch.cat([logits(net, rows, part) for rows, part in zip(token.split(2), parts, strict=True)])
    assert_unchanged(whole, before)
    torch.testing.assert_close(answers, logits(net, token, whole), rtol=1e-4, atol=1e-5)
    assert [part.tokens_held() for part in parts] == [31, 31, 31]
    with pytest.raises(ValueError, match="batch_split was given 4 rows and splits of 2; allowed: 5 rows"):
        whole.batch_split(4, 2)


def test_a_smaller_batch_goes_on_after_select() -> None:
    net, tokens = model(), ids(3, 30)
    cache, alone = KiviCache(net.config, CAPACITY, SEALING, left_padding=[0] * 3), KiviCache(net.config, CAPACITY, SEALING)
    logits(net, tokens, cache)
    logits(net, tokens[1:2], alone)
    cache.batch_select_indices([1])
    token = ids(1, 1, seed=5)
    torch.testing.assert_close(logits(net, token, cache), logits(net, token, alone), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- files and devices


@pytest.mark.parametrize("name", ["llama", "conv-and-full", "key-24-value-12", "shared-kv"])
@pytest.mark.parametrize("into", ["a new cache", "a used one"])
def test_a_saved_cache_goes_on(name: str, into: str) -> None:
    net, tokens = model(name), ids(1, 50)
    cache, loaded = (KiviCache(net.config, CAPACITY, SEALING) for _ in range(2))
    logits(net, tokens[:, :40], cache)
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    if into == "a used one":
        logits(net, ids(1, 9, seed=1), loaded)
    held = addresses(loaded) if into == "a used one" else None
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert held in (None, addresses(loaded))
    for token in tokens[:, 40:].split([1, 9], dim=1):
        assert torch.equal(logits(net, token, loaded), logits(net, token, cache))


def test_an_empty_cache_is_saved_with_its_padding() -> None:
    net = model()
    cache, loaded = KiviCache(net.config, CAPACITY, SEALING, left_padding=[2, 0]), KiviCache(net.config, 8, SEALING)
    logits(net, ids(1, 8), loaded)
    loaded.load_state_dict(cache.state_dict())
    assert (loaded.max_cache_len, loaded.batch_size, loaded.is_initialized) == (CAPACITY, -1, False)
    logits(net, ids(2, 8), loaded)
    assert states(loaded)[0].left_padding.tolist() == [2, 0]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": 7}, "has version 7; allowed: 1"),
        ({"layout": "bytes"}, "has layout 'bytes'; allowed: 'kivi-records'"),
        ({"config": {"key_bits": 4}}, r"KiviConfig\(key_bits=4.*allowed: KiviConfig\(key_bits=2"),
        ({"layers": [{}]}, "has 1 layers; allowed: 2"),
        ({"max_cache_len": 4000}, r"as key_records of layer 0; allowed: torch.int16 \[1, 2"),
        ({"layers": [{"sealed": torch.zeros(1, 2)}, {}]}, "lacks parts of layer 0"),
    ],
    ids=["version", "layout", "config", "layers", "capacity", "parts"],
)
def test_what_does_not_fit_is_not_loaded(change: dict[str, Any], message: str) -> None:
    cache = KiviCache(model().config, CAPACITY, SEALING)
    logits(model(), ids(1, 9), cache)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=message):
        cache.load_state_dict(cache.state_dict() | change)
    assert_unchanged(cache, before)


def test_offloading_to_where_it_is_changes_nothing() -> None:
    net, cache = model(), KiviCache(model().config, CAPACITY, SEALING)
    logits(net, ids(1, 20), cache)
    before, held = snapshot(cache), addresses(cache)
    for step in (lambda: cache.offload(0), lambda: cache.prefetch(0), lambda: cache.to("cpu")):
        step()
        assert_unchanged(cache, before)
        assert addresses(cache) == held


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "conv-and-full"])
def test_a_cache_moves_between_devices(name: str) -> None:
    net = model.__wrapped__(name).cuda()
    cache, stays = (KiviCache(net.config, CAPACITY, SEALING) for _ in range(2))
    for one in (cache, stays):
        logits(net, ids(1, 40).cuda(), one)
    cache.to("cpu")
    assert all(state.length.device.type == "cpu" for state in states(cache))
    cache.to("cuda")
    full = [index for index, layer in enumerate(cache.layers) if hasattr(layer, "state")]
    cache.offload(full[0])
    assert states(cache)[0].length.device.type == "cpu"
    cache.prefetch(full[0])
    for token in ids(1, 10).cuda().split(1, dim=1):
        assert torch.equal(logits(net, token, cache), logits(net, token, stays))


# ------------------------------------------------------------------------------------------------------------ interruptions


class Interrupted(Exception):
    pass


def interrupt(net: Any, layer: int) -> Any:
    """Raise in the middle of a forward, after layer ``layer - 1`` has been given its tokens. Returns the hook's handle."""

    def stop(*args: Any) -> None:
        raise Interrupted

    return net.model.layers[layer].register_forward_pre_hook(stop)


def test_an_interrupted_step_is_noticed_and_crop_makes_the_cache_whole() -> None:
    net, tokens = model(), ids(1, 60)
    cache, expected = (KiviCache(net.config, CAPACITY, FLOAT) for _ in range(2))
    for one in (cache, expected):
        logits(net, tokens[:, :40], one)
    handle = interrupt(net, 1)
    with pytest.raises(Interrupted):
        logits(net, ids(1, 3, seed=9), cache)
    handle.remove()
    before = snapshot(cache)
    with pytest.raises(RuntimeError, match=r"layers hold 43, 40 tokens, so a forward did not reach all of them.*crop\(0\).*reset"):
        logits(net, tokens[:, 40:41], cache)
    assert_unchanged(cache, before)
    cache.crop(0)
    for token in tokens[:, 40:].split(5, dim=1):
        assert torch.equal(logits(net, token, cache), logits(net, token, expected))


def test_an_interrupted_first_prefill_is_noticed() -> None:
    net, cache = model(), KiviCache(model().config, CAPACITY, SEALING)
    handle = interrupt(net, 1)
    with pytest.raises(Interrupted):
        logits(net, ids(1, 20), cache)
    handle.remove()
    with pytest.raises(RuntimeError, match="layer 1 has no state yet, but others hold 25 tokens and this call brings 5"):
        logits(net, ids(1, 5), cache)
    cache.reset()
    logits(net, ids(1, 20), cache)
    assert cache.tokens_held() == 20


def test_an_exception_in_the_middle_of_generate() -> None:
    net, tokens = model(), ids(1, 9)
    expected = generate(net, tokens)
    cache = KiviCache(net.config, CAPACITY, FLOAT)

    class Streamer:
        def __init__(self) -> None:
            self.steps = 0

        def put(self, value: Tensor) -> None:
            self.steps += 1
            if self.steps == 12:
                raise KeyboardInterrupt

        def end(self) -> None:
            pass

    with pytest.raises(KeyboardInterrupt):
        generate(net, tokens, cache, streamer=Streamer())
    held = cache.tokens_held()
    assert held is not None and 9 < held < 9 + 24
    assert torch.equal(generate(net, expected[:, : held + 1], cache, new=expected.shape[1] - held - 1), expected)


def test_what_fails_half_way_marks_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    cache = KiviCache(net.config, CAPACITY, SEALING, left_padding=[0, 0])
    logits(net, ids(2, 9), cache)

    def fails(beam_idx: Tensor) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(cache.layers[1], "reorder_cache", fails)
    with pytest.raises(torch.OutOfMemoryError):
        cache.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(
        RuntimeError, match=r"cannot be used, since reorder_cache failed half way \(OutOfMemoryError: no memory left\): reset"
    ):
        logits(net, ids(2, 1), cache)
    cache.reset()
    logits(net, ids(2, 1), cache)


def test_running_out_of_memory_leaves_the_model_and_the_cache_usable() -> None:
    net, tokens = model(), ids(1, 9)
    expected = generate(net, tokens)
    huge = KiviCache(net.config, 2**46, FLOAT)
    with pytest.raises(RuntimeError, match="memory|allocate"):
        generate(net, tokens, huge)
    assert not huge.is_initialized and huge.held_bytes() == 0
    huge.resize(CAPACITY)
    assert torch.equal(generate(net, tokens, huge), expected)
    with pytest.raises(RuntimeError, match="memory|allocate"):
        huge.resize(2**46)
    before = snapshot(huge)
    assert huge.max_cache_len == CAPACITY
    assert_unchanged(huge, before)
    huge.reset()
    assert torch.equal(generate(net, tokens, huge), expected)


@pytest.mark.gpu
def test_running_out_of_device_memory_leaves_the_model_and_the_cache_usable() -> None:
    net, tokens = model.__wrapped__().cuda(), ids(1, 9).cuda()
    expected = generate(net, tokens)
    huge = KiviCache(net.config, 2**36, FLOAT)
    with pytest.raises(torch.OutOfMemoryError):
        generate(net, tokens, huge)
    huge.resize(CAPACITY)
    assert torch.equal(generate(net, tokens, huge), expected)


# --------------------------------------------------------------------------------------------------- kinds of models and modes


ENCODER_DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {
            "vocab_size": 64,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 3,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 4,
            "max_position_embeddings": 128,
            "init_std": 0.2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "forced_eos_token_id": None,
            "decoder_start_token_id": 1,
        },
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 32,
            "num_layers": 1,
            "num_decoder_layers": 3,
            "num_heads": 2,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
            "initializer_factor": 3.0,
        },
    ),
}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_an_encoder_decoder_equals_its_float_cache(name: str, beams: int) -> None:
    config_class, model_class, arguments = ENCODER_DECODERS[name]
    torch.manual_seed(0)
    net = getattr(transformers, model_class)(getattr(transformers, config_class)(**arguments)).eval()
    cache = KiviCache.for_encoder_decoder(net.config, CAPACITY, FLOAT)
    source, mask = ids(2, 11), torch.ones(2, 11, dtype=torch.int64)
    mask[1, 7:] = 0
    settings = {"new": 20, "min_new_tokens": 20, "num_beams": beams, "attention_mask": mask}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        dense = EncoderDecoderCache(DynamicCache(), DynamicCache())
        assert torch.equal(generate(net, source, cache, **settings), generate(net, source, dense, **settings))
    assert len(states(cache.self_attention_cache)) == 3 and cache.self_attention_cache.tokens_held() == 20


@pytest.mark.parametrize("name", ["llama", "llama-eager", "sliding-and-full", "key-24-value-12", "conv-and-full", "shared-kv"])
def test_under_autocast_it_equals_a_float_cache(name: str) -> None:
    net = model(name)
    cache, dense = KiviCache(net.config, CAPACITY, FLOAT), DynamicCache(config=net.config)
    with torch.autocast("cpu", torch.bfloat16):
        for step, chunk in enumerate(ids(1, 30).split([20, 1, 9], dim=1)):
            assert_close(f"step {step}", logits(net, chunk, cache), logits(net, chunk, dense), 0.01)
    assert states(cache)[0].dtype == torch.bfloat16
    logits(net.to(torch.float32), ids(1, 2), KiviCache(net.config, CAPACITY, FLOAT))


def test_a_float32_cache_stays_float32_under_autocast() -> None:
    net, cache = model(), KiviCache(model().config, CAPACITY, SEALING)
    logits(net, ids(1, 20), cache)
    with torch.autocast("cpu", torch.bfloat16):
        logits(net, ids(1, 20), cache)
    assert states(cache)[0].dtype == torch.float32 and cache.tokens_held() == 40


def test_attention_under_autocast_computes_in_float32() -> None:
    state = state_of(KiviConfig(group_size=8, residual_length=16), 64, 40)
    query, key, value = random_tokens(2, 4, 3, 16), random_tokens(2, 2, 3, 16), random_tokens(2, 2, 3, 12)
    expected = state.attention(query, key, value, state.length.clone())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(state.attention(query, key, value, state.length.clone()), expected)


def test_rows_that_move_in_inference_mode_can_be_written_outside_of_it() -> None:
    net, cache = model(), KiviCache(model().config, CAPACITY, SEALING, left_padding=[0, 0])
    with torch.inference_mode():
        logits(net, ids(2, 20), cache)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
        cache.batch_select_indices([0, 3])
        cache.resize(200)
        cache.load_state_dict(cache.state_dict())
        cache.activate_past_recording()
    logits(net, ids(2, 20), cache)
    cache.crop(-3)
    assert cache.tokens_held() == 37 and not any(tensor.is_inference() for tensor in states(cache)[0].tensors().values())


def test_threads_with_a_cache_each_share_a_model() -> None:
    net = model.__wrapped__()
    prompts = [ids(1, 9 + n, seed=n) for n in range(6)]
    expected = [generate(net, prompt, KiviCache(net.config, CAPACITY, SEALING)) for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda prompt: generate(net, prompt, KiviCache.for_model(net, CAPACITY, SEALING)), prompts))
    for answer, alone in zip(found, expected, strict=True):
        assert torch.equal(answer, alone)


def test_caches_of_two_models_in_turn() -> None:
    nets = [model("llama"), model("sliding-and-full")]
    alone = [generate(net, ids(1, 9), KiviCache(net.config, CAPACITY, SEALING)) for net in nets]
    caches = [KiviCache.for_model(net, CAPACITY, SEALING) for net in nets]
    answers = [ids(1, 9), ids(1, 9)]
    for _ in range(24):
        answers = [generate(net, answer, cache, new=1) for net, answer, cache in zip(nets, answers, caches, strict=True)]
    for answer, expected in zip(answers, alone, strict=True):
        assert torch.equal(answer, expected)


@pytest.mark.parametrize("bits", [2, 4])
def test_huge_key_biases_cost_nothing(bits: int) -> None:
    """Qwen2's trait: several hundred in two channels of the first and last layer. Grids per channel with minima of their own bear it."""

    def loss(bias: float) -> float:
        net = model.__wrapped__("qwen2")
        for layer in (net.model.layers[0], net.model.layers[-1]):
            layer.self_attn.k_proj.bias[7] += bias  # channels that rotary embeddings turn slowest, or the bias would be no constant
            layer.self_attn.k_proj.bias[16 + 15] -= bias
        errors = []
        for seed in range(4):
            caches = [KiviCache(net.config, CAPACITY, KiviConfig(bits, bits, 8, 16)), DynamicCache(config=net.config)]
            chunks = ids(1, 70, seed=seed).split([40] + [1] * 30, dim=1)
            actual, expected = (torch.cat([logits(net, chunk, cache) for chunk in chunks], 1) for cache in caches)
            errors.append(float((actual - expected).norm() / expected.norm()))
        return sum(errors) / len(errors)

    assert loss(600.0) < 1.15 * loss(0.0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_records_of_more_than_2_to_the_31_elements(device: str) -> None:
    """Tokens at the end of a huge row go where those of a small one go. Nothing but what is written is ever touched, so no memory is."""
    config, padding = KiviConfig(8, 8, group_size=8, residual_length=16, metadata_dtype=torch.float16), torch.tensor([0])
    capacity = 2**31 // 6 + 4096
    start = (capacity - 64) // 16 * 16
    far, near = KiviState.allocate(config, 1, 1, capacity, 8, 8, torch.float32, "meta"), 64
    huge = KiviState(config, capacity, **{name: torch.empty_like(tensor, device=device) for name, tensor in far.tensors().items()})
    small = KiviState.allocate(config, 1, 1, 128, 8, 8, torch.float32, device)
    assert huge.key_records.numel() > 2**31
    key, value = random_tokens(1, 1, 40, 8, seed=1, device=device), random_tokens(1, 1, 40, 8, seed=2, device=device)
    for state, position in ((huge, start), (small, near)):
        state.left_padding.copy_(padding)
        state.sealed.copy_(torch.tensor([[position, position - 16]]))
        state.key_window.zero_()
        state.value_window.zero_()
        state.append(key, value, torch.tensor(position, device=device))
    assert huge.sealed.tolist() == [[start + 32, start + 24]] and small.sealed.tolist() == [[near + 32, near + 24]]
    for name, first, records in (("key_records", 0, 2), ("value_records", -1, 2)):  # whole ones
        found, expected = (
            getattr(state, name)[:, :, position // 16 + first :][:, :, :records] for state, position in ((huge, start), (small, near))
        )
        assert torch.equal(found, expected) and expected.any()
    assert torch.equal(huge.key_window, small.key_window) and int(huge.length) == start + 40
