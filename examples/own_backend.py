"""The pass in a backend of your own, in both ways that there are.

    python examples/own_backend.py

1. ``my_backend``: the graph from Dynamo is normalised and rewritten, what is left goes to any compiler, and the states of the model's own
   float caches are found again when it runs. Between the steps there is room for passes of your own; here one that counts operators.
2. ``inductor_options()``: the pass as Inductor's own custom pass. No state can be added to the graph then, so this is for a KiviState or a
   KiviCache, which are in the graph already.
"""

import argparse
from collections import Counter

import torch
from torch import Tensor, nn

from kivi_ops import KiviConfig, KiviState
from kivi_ops.passes import inductor_options, inputs_of, last_report, normalise, rewrite, with_states

CAPACITY, HEADS, DIM = 256, 4, 32
CONFIG = KiviConfig(key_bits=8, value_bits=8)


def count_operators(graph: torch.fx.Graph) -> Counter:
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_function")


def my_backend(module: torch.fx.GraphModule, example_inputs: list):
    graph = normalise(module, example_inputs)  # pre-dispatch ATen, mutations kept
    before = count_operators(graph.graph)
    report = rewrite(graph, CONFIG)
    after = count_operators(graph.graph)
    print(report)
    print("operators gone:", sorted(before - after), "new:", sorted(after - before))
    compiled = torch._dynamo.lookup_backend("inductor")(graph, inputs_of(graph, example_inputs, report))
    return with_states(compiled, report.bindings)


class Attention(nn.Module):
    """One attention over a float cache of its own, or over a KiviState that it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.register_buffer("keys", torch.zeros(1, HEADS, CAPACITY, DIM))
        self.register_buffer("values", torch.zeros(1, HEADS, CAPACITY, DIM))

    def forward(self, x: Tensor, position: Tensor, state: KiviState | None = None) -> Tensor:
        query, key, value = self.qkv(x).view(1, 1, 3, HEADS, DIM).permute(2, 0, 3, 1, 4)
        if state is None:
            self.keys.index_copy_(2, position, key)
            self.values.index_copy_(2, position, value)
            keys, values = self.keys, self.values
        else:
            keys, values = state.update(key, value, position)
        mask = torch.arange(CAPACITY, device=x.device)[None, None, None] <= position
        return nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, reference = Attention().to(device), Attention().to(device)

    by_backend = torch.compile(model, backend=my_backend, fullgraph=True)
    by_inductor = torch.compile(model, options=inductor_options(strict=True), fullgraph=True)
    state = KiviState.allocate(CONFIG, 1, HEADS, CAPACITY, DIM, DIM, torch.float32, device)
    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    for step in range(options.steps):
        x, position = torch.randn(1, 1, HEADS * DIM, generator=generator).to(device), torch.tensor([step], device=device)
        expected = reference(x, position)
        for actual in (by_backend(x, position), by_inductor(x, position, state)):
            worst = max(worst, ((actual - expected).norm() / expected.norm()).item())
        if step == 0:
            report = last_report()  # of the pass; what `rewrite` returned above is nobody's to keep
            print("as an Inductor pass:", report.summary if report else "already in Inductor's compile cache")
    print(f"largest relative difference from the float cache in {options.steps} steps: {worst:.4f}")


if __name__ == "__main__":
    main()
