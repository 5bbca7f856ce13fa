"""Make ``tests/`` importable as plain modules (``import helpers``); without a device skip GPU tests and interpret Triton's kernels."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton decides when it is imported and when a kernel is decorated


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
