"""Where the kernels run in these tests: on the GPU if there is one, else in Triton's interpreter, which tests/conftest.py asks for."""

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from packaging.version import Version  # pytest depends on it

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]  # there are platforms without it, where the package works on the CPU alone
elif not torch.cuda.is_available():
    import triton

    if Version(triton.__version__) < Version("3.8") and Version(np.__version__) >= Version("2.4"):
        # It takes loop bounds from arrays of one element, which numpy no longer turns into integers.
        raise pytest.UsageError(f"the interpreter of Triton {triton.__version__} cannot run with numpy {np.__version__}; install numpy<2.4")


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def quiet_interpreter() -> Iterator[None]:
    """Lanes that nothing reads overflow in numpy as they would, silently, on a GPU."""
    with np.errstate(all="ignore"):
        yield
