"""A transformers model over a :class:`KiviCache` through ``backend="kivi"``: the same tokens, few graphs, and no cache-sized buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_models import Model, Recorder, buffer_sizes, compiled_body, sdpa_repeat_kv
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from kivi_ops import KiviConfig, KiviState
from kivi_ops.config import SEAL_ORDERS
from kivi_ops.passes import last_report

transformers = pytest.importorskip("transformers")

CAPACITY = 96
R = 4
LAYERS = 2


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def llama(attention: str) -> Any:
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
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config).eval()


def new_cache(model: Any, seal: str = "after_attention") -> Any:
    from kivi_ops import KiviCache

    # 8 bits: a code that flips on a rounding edge (contract section 7) is then too small to change a token
    config = KiviConfig(key_bits=8, value_bits=8, group_size=4, residual_length=R, seal=seal)
    return KiviCache(model.config, CAPACITY, config, left_padding=[0, 3])


PROMPT = torch.arange(14).reshape(2, 7) * 5 % 64
MASK = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])


def decode(step: Any, cache: Any, token: Tensor, length: int) -> Tensor:
    """Logits of one more token a row; the padded row's pads stay hidden."""
    mask = torch.cat([MASK, torch.ones(2, length + 1 - MASK.shape[1], dtype=torch.long)], dim=1)
    positions = mask.sum(1, keepdim=True) - 1
    return step(token, attention_mask=_whole(mask), position_ids=positions, past_key_values=cache).logits


def _whole(mask: Tensor) -> Tensor:
    """As wide as the cache, as ``generate`` hands it to a compiled step: one shape for all steps."""
    return torch.cat([mask, torch.zeros(2, CAPACITY - mask.shape[1], dtype=mask.dtype)], dim=1)


def prefill(model: Any, cache: Any) -> Tensor:
    positions = (MASK.cumsum(1) - 1).clamp(min=0)
    return model(PROMPT, attention_mask=_whole(MASK), position_ids=positions, past_key_values=cache).logits[:, -1:].argmax(-1)


@pytest.mark.parametrize(
    ("attention", "seal"), [("sdpa", "after_attention"), ("sdpa", "before_attention"), ("eager", "after_attention")], ids=lambda x: x
)
def test_compiled_steps_give_the_eager_tokens_with_one_graph_for_two_caches(attention: str, seal: str) -> None:
    model = llama(attention)
    recorder = Recorder(strict=True)
    step = torch.compile(model, backend=recorder, fullgraph=True)
    steps = 3 * R + 5
    with torch.no_grad():
        reference = new_cache(model, seal)
        token, expected = prefill(model, reference), []
        for index in range(steps):
            token = decode(model, reference, token, PROMPT.shape[1] + index).argmax(-1)
            expected.append(token)
        caches = [new_cache(model, seal), new_cache(model, seal)]
        tokens = [prefill(model, cache) for cache in caches]
        for index in range(steps):
            for turn, cache in enumerate(caches):
                tokens[turn] = decode(step, cache, tokens[turn], PROMPT.shape[1] + index).argmax(-1)
                assert torch.equal(tokens[turn], expected[index]), f"step {index}, cache {turn}"
            assert len(recorder.modules) == 1, "compiled again"
    (before,), (after,) = recorder.before, recorder.after
    core = "aten.scaled_dot_product_attention" if attention == "sdpa" else "aten.softmax"
    assert (before["kivi.update"], before[core]) == (LAYERS, LAYERS)
    assert (after["kivi.update"], after[core], after["kivi.attention"], after["kivi.append"]) == (0, 0, LAYERS, LAYERS)
    report = last_report()
    assert report is not None
    assert [site.layer for site in report.rewritten] == [f"model.layers.{index}.self_attn" for index in range(LAYERS)]
    for layer, other in zip(caches[0].layers, caches[1].layers, strict=True):
        for name, tensor in layer.state.tensors().items():
            assert torch.equal(tensor, other.state.tensors()[name]), name


def test_a_compiled_prefill_is_rewritten_too() -> None:
    model = llama("sdpa")
    cache, reference = new_cache(model), new_cache(model)
    cache.early_initialization(2, 2, 32, torch.float32, "cpu")
    with torch.no_grad():
        token = prefill(torch.compile(model, backend=Recorder(strict=True), fullgraph=True), cache)
        assert torch.equal(token, prefill(model, reference))
    for layer, other in zip(cache.layers, reference.layers, strict=True):
        assert torch.equal(layer.state.length, other.state.length) and torch.equal(layer.state.sealed, other.state.sealed)
    for name, tensor in reference.layers[0].state.tensors().items():  # the first layer's K and V have seen no attention
        torch.testing.assert_close(cache.layers[0].state.tensors()[name], tensor, rtol=1e-5, atol=1e-5)


def test_generate_compiles_its_steps_through_the_backend() -> None:
    model = llama("sdpa")
    model.generation_config.pad_token_id = 0
    kwargs: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 2 * R + 3, "min_new_tokens": 2 * R + 3, "do_sample": False}
    expected = model.generate(PROMPT, past_key_values=new_cache(model), disable_compile=True, **kwargs)
    compile_config = transformers.CompileConfig(
        backend="kivi", mode=None, fullgraph=True, dynamic=False, options={"compiler": "eager", "strict": True, "key_bits": 8}
    )
    compile_config._compile_all_devices = True
    actual = model.generate(PROMPT, past_key_values=new_cache(model), compile_config=compile_config, **kwargs)
    assert torch.equal(actual, expected)
    report = last_report()
    assert report is not None and len(report.rewritten) == LAYERS and not report.refused


@pytest.mark.parametrize("seal", SEAL_ORDERS)
def test_inductor_code_of_a_decode_step_holds_no_buffer_of_cache_size(seal: str) -> None:
    model = llama("sdpa")
    cache, reference = new_cache(model, seal), new_cache(model, seal)
    step = torch.compile(model, backend="kivi", fullgraph=True, options={"strict": True})
    with torch.no_grad():
        token = prefill(model, cache)
        assert torch.equal(token, prefill(model, reference))
        logits, (code,) = run_and_get_code(decode, step, cache, token, PROMPT.shape[1])
        torch.testing.assert_close(logits, decode(model, reference, token, PROMPT.shape[1]), rtol=1e-3, atol=1e-3)
    body = compiled_body(code)
    window = cache.layers[0].state.key_window.numel()
    assert max(buffer_sizes(body)) < window < 2 * 2 * CAPACITY * 32
    assert body.count("torch.ops.kivi.attention.default(") == body.count("torch.ops.kivi.append.default(") == LAYERS


class TwoLayers(nn.Module):
    """Rotary-like angles of the second layer depend on the first layer's length, as positions do in real models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Model(sdpa_repeat_kv), Model(sdpa_repeat_kv)])

    def forward(self, x: Tensor, mask: Tensor, states: list[KiviState]) -> Tensor:
        position = torch.arange(x.shape[1]) + states[0].length
        for layer, state in zip(self.layers, states, strict=True):
            x = layer(x + torch.cos(0.7 * position)[None, :, None], mask, state)
        return x


@pytest.mark.parametrize("seal", ["after_attention", "before_attention"])
def test_what_depends_on_the_length_is_not_evaluated_after_it_was_written(seal: str) -> None:
    model = TwoLayers()
    compiled = torch.compile(model, backend="kivi", fullgraph=True)
    eager_states, states = ([layer.state(seal, key_bits=8, value_bits=8) for layer in model.layers] for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for step in range(6):
            x = torch.randn(2, 1, 32, generator=generator)
            mask = (torch.arange(48) <= step).view(1, 1, 1, 48).expand(2, 1, 1, 48)
            torch.testing.assert_close(compiled(x, mask, states), model(x, mask, eager_states), rtol=1e-4, atol=1e-4)
