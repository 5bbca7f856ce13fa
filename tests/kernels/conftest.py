"""Where the kernels run in these tests: on the GPU if there is one, else on CPU tensors in Triton's interpreter.

Triton decides when it is imported and when a kernel is decorated, so this must come before anything imports it; pytest collects this
folder first.
"""

import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("triton was imported before tests/kernels could ask for its interpreter: run tests/kernels first or alone")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def quiet_interpreter() -> Iterator[None]:
    """Lanes that nothing reads overflow in numpy as they would, silently, on a GPU."""
    with np.errstate(all="ignore"):
        yield
