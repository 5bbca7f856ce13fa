"""What this machine offers: versions, devices, compilers, and which implementation of the operators runs where.

Only looks, changes nothing, and works whichever optional packages are absent. Must not know of models or caches.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sysconfig

import torch

import kivi_ops

OPTIONAL_PACKAGES = ("triton", "transformers", "gguf")


def package_version(name: str) -> str:
    """The version of an installed package, or ``"not installed"``. Imports nothing."""
    if importlib.util.find_spec(name) is None:
        return "not installed"
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "installed, version unknown"


def cpp_compiler() -> tuple[str | None, str]:
    """The C++ compiler that ``torch.compile`` needs for the CPU: its path or ``None``, and a sentence for a person."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        name = get_cpp_compiler()
    except Exception:  # torch's own search says no, in words that differ between versions
        return None, f"not found ({os.environ.get('CXX') or 'g++'}); torch.compile cannot build code for the CPU"
    path = shutil.which(name)
    if path is None:
        return None, f"{name} does not exist; torch.compile cannot build code for the CPU"
    headers = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(headers, "Python.h")):
        return None, f"{path}, but Python.h is not in {headers}; torch.compile cannot build code for the CPU"
    return path, path


def operators(device_type: str) -> str:
    """Which implementation ``torch.ops.kivi`` uses on a kind of device (``"cpu"`` or ``"cuda"``), or why there is none."""
    if device_type == "cpu":
        return "torch"
    try:
        import triton

        importlib.import_module("kivi_ops.kernels.launch")
    except ImportError as error:
        return f"none, Triton cannot be imported: {error}"
    return f"Triton {triton.__version__}"


def compile_backend() -> str:
    """Whether ``torch.compile(..., backend="kivi")`` will be found."""
    for entry in importlib.metadata.entry_points(group="torch_dynamo_backends", name="kivi"):
        try:
            entry.load()
        except Exception as error:  # whatever the import raises is what the user needs to know
            return f'"kivi" is registered but cannot be loaded: {type(error).__name__}: {error}'
        return '"kivi" is registered'
    return '"kivi" is not registered: kivi-ops is not installed as a package (pip install -e .)'


def devices() -> list[tuple[str, str]]:
    """Name and description of every device that the operators know of."""
    threads = torch.get_num_threads()
    found = [("cpu", f"{os.cpu_count()} cores, {threads} threads; operators: {operators('cpu')}")]
    if not torch.cuda.is_available():
        reason = "this torch is a CPU build" if torch.version.cuda is None else "no device found"
        return [*found, ("cuda", f"none: {reason}; operators there: {operators('cuda')}")]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = device.total_memory / 2**30
        text = f"{device.name}, capability {device.major}.{device.minor}, {memory:.0f} GiB; operators: {operators('cuda')}"
        found.append((f"cuda:{index}", text))
    return found


def report() -> str:
    """The whole report, as ``kivi-ops env`` prints it."""
    cuda = f" (built for CUDA {torch.version.cuda})" if torch.version.cuda else " (built for the CPU)"
    sections = {
        "versions": [
            ("kivi-ops", kivi_ops.__version__),
            ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
            ("torch", torch.__version__ + cuda),
            *((name, package_version(name)) for name in OPTIONAL_PACKAGES),
        ],
        "devices": devices(),
        "torch.compile": [("backend", compile_backend()), ("C++ compiler", cpp_compiler()[1])],
    }
    lines = []
    for title, rows in sections.items():
        lines += [title, *(f"  {name:<13} {text}" for name, text in rows)]
    return "\n".join(lines)
