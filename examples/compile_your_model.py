"""Compile a model of your own: a small decoder with a plain float cache in buffers, which knows nothing of KIVI.

    python examples/compile_your_model.py                      # the float cache stays and is always complete
    python examples/compile_your_model.py --free-float-cache   # nothing but compiled calls touch the cache: its memory goes

Prints which attentions were rewritten, how many greedy tokens are those of the float model, and the bytes of either cache.
"""

import argparse

import torch
from torch import Tensor, nn

import kivi_ops
from kivi_ops.passes import last_report
from kivi_ops.passes.states import held_states

CAPACITY, WIDTH, HEADS, KV_HEADS, LAYERS, VOCABULARY = 512, 256, 8, 2, 2, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dim = WIDTH // HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, heads * dim, bias=False) for heads in (HEADS, KV_HEADS, KV_HEADS))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("keys", torch.zeros(1, KV_HEADS, CAPACITY, dim))
        self.register_buffer("values", torch.zeros(1, KV_HEADS, CAPACITY, dim))

    def forward(self, x: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        query, key, value = (
            project(x).view(rows, tokens, heads, -1).transpose(1, 2)
            for project, heads in ((self.query, HEADS), (self.key, KV_HEADS), (self.value, KV_HEADS))
        )
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        attended = nn.functional.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        return x + self.out(attended.transpose(1, 2).reshape(rows, tokens, WIDTH))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        position = torch.arange(tokens.shape[1], device=tokens.device) + start
        mask = torch.arange(CAPACITY, device=tokens.device) <= position[:, None]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, position, mask[None, None])
        return self.head(nn.functional.layer_norm(x, (WIDTH,)))


@torch.no_grad()
def generate(forward, prompt: Tensor, steps: int) -> list[int]:
    tokens, start, answer = prompt, 0, []
    for _ in range(steps):
        logits = forward(tokens, torch.tensor([start], device=prompt.device))
        start += tokens.shape[1]
        tokens = logits[:, -1:].argmax(-1)
        answer.append(tokens.item())
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=4, choices=(2, 4, 8))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--free-float-cache", action="store_true")
    parser.add_argument("--compiler", default="inductor", help="what compiles the rewritten graph")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model().to(device).eval()
    prompt = torch.arange(40, device=device)[None] * 7 % VOCABULARY
    expected = generate(model, prompt, options.steps)
    for layer in model.layers:
        layer.keys.zero_(), layer.values.zero_()

    kivi_ops.explain(model, prompt[:, :1], torch.tensor([0], device=device))  # what would be rewritten, and why not the rest
    compiled = torch.compile(
        model,
        backend="kivi",
        options={
            "key_bits": options.bits,
            "value_bits": options.bits,
            "strict": True,  # an attention that is not rewritten is an error
            "free_float_cache": options.free_float_cache,
            "compiler": options.compiler,
        },
    )
    answer = generate(compiled, prompt, options.steps)

    print(last_report().summary)
    print(f"{sum(a == b for a, b in zip(answer, expected, strict=True))} of {options.steps} tokens as with the float cache")
    caches = [buffer for layer in model.layers for buffer in (layer.keys, layer.values)]
    held, size = sum(cache.untyped_storage().nbytes() for cache in caches), sum(cache.nbytes for cache in caches)
    print(f"float cache {held} bytes now, {size} before")
    print(f"KIVI states {sum(state.held_bytes() for state in held_states())} bytes")


if __name__ == "__main__":
    main()
