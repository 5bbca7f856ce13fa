"""What only a GPU can show: real CUDA graphs around the operators, memory that stays where it is, generate end to end."""

import pytest
import torch
from torch._dynamo.utils import counters

transformers = pytest.importorskip("transformers")

from kivi_ops import KiviCache, KiviConfig  # noqa: E402
from kivi_ops.demo import cache_argument, generate  # noqa: E402
from kivi_ops.passes import last_report  # noqa: E402

pytestmark = pytest.mark.gpu

CONFIG = KiviConfig(residual_length=32)
STEPS = 3 * 32 + 5


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def small_llama(dtype, head_dim=64, attention="sdpa"):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=4096,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config).to("cuda", dtype).eval()


def prompt(rows=1, tokens=50):
    return torch.randint(0, 512, (rows, tokens), generator=torch.Generator().manual_seed(1)).cuda()


@torch.no_grad()
def forced_logits(model, forward, cache, ids, feed):
    """Logits of each decode step when the tokens ``feed`` are handed in whatever the model says."""
    name = cache_argument(model)
    model(input_ids=ids, **{name: cache})
    steps = []
    for token in feed:
        torch.compiler.cudagraph_mark_step_begin()
        steps.append(forward(input_ids=token.view(1, 1), **{name: cache}).logits.clone())
    return torch.cat(steps, 1).double()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seal", ["after_attention", "before_attention"])
def test_cuda_graphs_are_recorded_and_none_is_skipped(dtype, seal, attention):
    model = small_llama(dtype, attention=attention)
    config = KiviConfig(8, 8, residual_length=32, seal=seal)
    caches = [KiviCache(model.config, 256, config) for _ in range(3)]
    feed = prompt(1, STEPS)[0]
    expected = forced_logits(model, model, caches[0], prompt(), feed)
    compiled = torch.compile(model.forward, backend="kivi", fullgraph=True, options={"mode": "reduce-overhead", "strict": True})
    for cache in caches[1:]:  # two cache objects, one graph
        actual = forced_logits(model, compiled, cache, prompt(), feed)
        error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
        # 8 bits: a code on a rounding edge may flip between the two routes, but it moves a logit little
        assert error.max() < (0.01 if dtype == torch.float16 else 0.08), error.max()
    assert len(last_report().rewritten) == 3
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = torch._inductor.cudagraph_trees.get_manager(0, create_if_none_exists=False)
    assert manager is not None and sum(len(roots) for roots in manager.roots.values()) >= 1


def test_decode_allocates_nothing():
    """Between two recorded steps neither allocated nor reserved memory moves, and the step's peak holds no copy of the cache."""
    model = small_llama(torch.float16)
    cache = KiviCache(model.config, 65536, KiviConfig())
    name, ids = cache_argument(model), prompt()
    compiled = torch.compile(model.forward, backend="kivi", fullgraph=True)
    with torch.no_grad():
        model(input_ids=ids, **{name: cache})
        for _ in range(3):
            compiled(input_ids=ids[:, :1], **{name: cache})
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(40):
            compiled(input_ids=ids[:, :1], **{name: cache})
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    float_layer = 2 * 65536 * 2 * 64 * 2  # Keys and Values of one layer in float16
    assert torch.cuda.max_memory_allocated() - before < float_layer / 4


def test_generate_compiles_with_the_backend():
    model = small_llama(torch.float16)
    from transformers import CompileConfig

    config = KiviConfig(8, 8, residual_length=32)
    options = {"max_new_tokens": 70, "do_sample": False, "past_key_values": None}
    outputs = []
    for compile_config in (None, CompileConfig(backend="kivi", fullgraph=True, mode="reduce-overhead")):
        options["past_key_values"] = KiviCache.for_model(model, 256, config)
        extra = {"disable_compile": True} if compile_config is None else {"compile_config": compile_config}
        outputs.append(model.generate(prompt(), **options, **extra))
    assert torch.equal(*outputs)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_long_greedy_run_agrees_with_the_cpu():
    """The same weights and prompt in float32 on both machines, at 8 bits: the Triton kernels against the CPU implementation."""
    model = small_llama(torch.float32)
    gpu = generate(model, prompt(), KiviCache(model.config, 256, KiviConfig(8, 8, residual_length=32)), 64).tokens
    cpu = generate(model.cpu(), prompt().cpu(), KiviCache(model.config, 256, KiviConfig(8, 8, residual_length=32)), 64).tokens
    assert sum(a == b for a, b in zip(gpu, cpu, strict=True)) >= 63
