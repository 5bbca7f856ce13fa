"""Run by the tests in a process of its own, without transformers: load each model named in a plan, feed it its tokens, keep logits and
state."""

import sys

import torch

sys.modules["transformers"] = None  # any import of it fails

from kivi_ops.export import ExportedModel  # noqa: E402


def main(plan_path: str, result_path: str) -> None:
    results = {}
    for name, (path, calls, left_padding) in torch.load(plan_path).items():
        model = ExportedModel.load(path)
        first, *rest = calls
        results[name] = [model(first, left_padding), *(model(ids) for ids in rest)]
        model.save_state(f"{path}.state")
    torch.save(results, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
