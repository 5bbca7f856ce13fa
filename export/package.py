"""AOTInductor packages: an exported model compiled ahead of time, to be run by torch alone, from Python or C++.

While a package is compiled, ``kivi::attention`` and ``kivi::append`` are taken apart into what Inductor compiles: on a CPU, and for calls
of any length, tensor expressions (:mod:`kivi_ops.export.plain`); for calls of a fixed, small length on a GPU the portable Triton kernels.
The package then needs neither this package nor Triton. Must not know of models.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.export import ExportedProgram
from torch.export.pt2_archive import _package as archive

import kivi_ops
from kivi_ops import ops
from kivi_ops.environment import cpp_compiler
from kivi_ops.export import plain
from kivi_ops.export.files import FORMAT, HEAD
from kivi_ops.export.program import ExportedModel
from kivi_ops.export.session import Session
from kivi_ops.kernels.layout import NAME, VERSION
from kivi_ops.passes.backend import cache_config, package_tag

_TAKING_APART = False


def compile_package(
    model: ExportedModel,
    path: str | os.PathLike[str],
    *,
    weights: bool = True,
    inductor_options: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Compile the programs of ``model`` for the device that they are on and write a package, a ``.pt2`` file.

    Run it by :meth:`CompiledModel.load`, or in a process that has torch but not this package, or in C++, by torch's own loader
    (``torch._inductor.aoti_load_package``). There a step is called as the program was; inputs must be contiguous, start 0 begins anew.

    Args:
        weights: whether each program carries them. False: :meth:`CompiledModel.load` is given them, and programs share them.
        inductor_options: further options of Inductor.
        progress: told what happens next.

    Raises:
        ValueError: ``path`` does not end in .pt2; a program in which ``kivi::update`` is left, or one that a package cannot hold.
        RuntimeError: there is no C++ compiler.
    """
    path = os.fspath(path)
    if not path.endswith(".pt2"):
        raise ValueError(f"path is {path!r}; allowed: a name that ends in .pt2")
    compiler, told = cpp_compiler()
    if compiler is None:
        raise RuntimeError(f"a package needs a C++ compiler: {told}; choose one by CXX=/path/to/g++")
    for name, program in model.programs.items():
        _check(name, program)
    # Reordering would move attention behind the `append` that overwrites what it reads, at the price of a copy of the whole state.
    options = {"reorder_for_locality": False, "aot_inductor.package_constants_in_so": weights, **(inductor_options or {})}
    options["aot_inductor.package"] = True
    tag = cache_config.cache_key_tag + package_tag()  # Inductor's own cache knows our kernels by name alone
    files: dict[str, Any] = {}
    for name, program in model.programs.items():
        progress(f"compiling the {name} program" if len(model.programs) > 1 else "compiling the program")
        args, kwargs = program.example_inputs  # type: ignore[misc]
        with torch.no_grad(), _taking_apart(), cache_config.patch(cache_key_tag=tag):
            files[name] = torch._inductor.aot_compile(_without_lengths(program, model.capacity), args, kwargs, options=options)
    first = next(iter(model.programs.values()))
    head = {
        "format": FORMAT,
        "layout": [NAME, VERSION],
        "kivi_ops": kivi_ops.__version__,
        "programs": list(model.programs),
        "padded": sorted(model._padded),
        "batch_size": model.batch_size,
        "capacity": model.capacity,
        "state_format": model.format,
        "device": model.device.type,
        "weights": [] if weights else sorted(first.state_dict.keys() - model._state.keys()),
        "state": {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in model._state.items()},
    }
    unfinished = f"{path[:-4]}.{os.getpid()}.part.pt2"
    try:
        archive.package_pt2(unfinished, aoti_files=files, extra_files={HEAD: json.dumps(head), **model.files})
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(unfinished)


class CompiledModel(Session):
    """A package of :func:`compile_package`, called as the model it was made of. Its state lies in tensors of this process, which the
    programs share, so that conversations can be saved and taken up again."""

    def __init__(
        self,
        runners: dict[str, Any],
        head: dict[str, Any],
        files: dict[str, str] | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        given = {name: (weights or {}).get(name) for name in head["weights"]}
        if missing := [name for name, tensor in given.items() if tensor is None]:
            raise ValueError(
                f"the package holds no weights, and {missing[0]!r} is not given; allowed: weights=, by their names in the program"
            )
        device = torch.device("cuda", torch.cuda.current_device()) if head["device"] == "cuda" else torch.device("cpu")
        state = {name: torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for name, (dtype, shape) in head["state"].items()}
        for runner in runners.values():
            wanted = set(runner.get_constant_fqns())
            held = {name: tensor for name, tensor in {**state, **given}.items() if name in wanted}
            runner.load_constants(held, check_full_update=False, user_managed=True)
        self.files = dict(files or {})
        self._weights = given  # the runners hold their addresses alone
        super().__init__(runners, frozenset(head["padded"]), state, head["batch_size"], head["capacity"], head["state_format"])

    @classmethod
    def load(cls, path: str | os.PathLike[str], weights: Mapping[str, Tensor] | None = None) -> CompiledModel:
        """The package at ``path``.

        Args:
            weights: of a package that was compiled without them: ``state_dict`` of the program, on the package's device.

        Raises:
            ValueError: another kind of file, or one of another layout; weights are missing.
        """
        path = os.fspath(path)
        with archive.PT2ArchiveReader(path) as reader:
            texts = archive._load_extra_files(reader, reader.get_file_names())
        head = json.loads(texts.pop(HEAD, "{}"))
        if "state" not in head:
            raise ValueError(f"{path} is no package of kivi_ops; allowed: a file of compile_package()")
        if head["layout"] != [NAME, VERSION]:  # of saved conversations; the programs themselves carry theirs in code
            raise ValueError(
                f"{path} has layout {head['layout']!r} (kivi_ops {head['kivi_ops']}); allowed: {[NAME, VERSION]!r}: compile again"
            )
        if head["device"] == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"{path} was compiled for cuda, and this torch finds no such device; allowed: a machine that has one")
        runners = archive.load_pt2(path).aoti_runners
        return cls({name: runners[name] for name in head["programs"]}, head, texts, weights)


def _without_lengths(program: ExportedProgram, capacity: int) -> Any:
    """The program as a module in which no position is checked by the states' lengths: the callers of a package count.

    AOTInductor takes the value of a 0-d buffer for a constant, though the program changes it (seen in torch 2.11 to 2.14): every call but
    the first would seem to begin beyond what is held.
    """
    module: Any = program.module(check_guards=False)
    for node in list(module.graph.find_nodes(op="call_function", target=torch.ops.aten.amin.default)):
        stack = node.args[0]
        lengths = stack.args[0] if stack.target == torch.ops.aten.stack.default else ()
        if lengths and all(length.op == "get_attr" and str(length.target).endswith(".length") for length in lengths):
            with module.graph.inserting_before(node):
                held = module.graph.call_function(
                    torch.ops.aten.full.default, ([], capacity), {"dtype": torch.int64, "device": node.meta["val"].device}
                )
            held.meta = dict(node.meta)
            node.replace_all_uses_with(held)
            module.graph.erase_node(node)
            module.graph.erase_node(stack)
    module.recompile()
    return module


def _check(name: str, program: ExportedProgram) -> None:
    for node in program.graph.nodes:
        if node.target == torch.ops.kivi.update.default:
            raise ValueError(
                f"program {name!r} holds kivi::update, which a package cannot: attention that the pass did not rewrite; "
                "rewrite(..., strict=True) says why"
            )


# --------------------------------------------------------------------------------------------- operators, taken apart


@contextlib.contextmanager
def _taking_apart() -> Iterator[None]:
    global _TAKING_APART
    _TAKING_APART = True
    try:
        yield
    finally:
        _TAKING_APART = False


def _attention(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _implementation(query, key, kwargs).attention(query, key, *args, **kwargs)


def _append(key: Tensor, *args: Any, **kwargs: Any) -> None:
    _implementation(key, key, kwargs).append(key, *args, **kwargs)


def _implementation(query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> Any:
    if query.device.type != "cuda" or not all(isinstance(size, int) for size in (*query.shape, *key.shape)):
        return plain
    from kivi_ops.kernels import packaged

    return packaged if packaged.takes(query, kwargs["metadata_dtype"]) else plain


def _read_length(length: Tensor) -> Tensor:
    return length.clone()


def _register(name: str, body: Callable[..., Any]) -> None:
    """Let a compiler see ``body`` instead of the operator while a package is made, before mutations are taken out of the graph."""

    def rule(mode: Any, operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if not _TAKING_APART:
            return mode.__torch_dispatch__(operator, types, args, kwargs or {})
        with mode:
            return body(*args, **(kwargs or {}))

    torch.library.register_torch_dispatch(f"kivi::{name}", FunctionalTensorMode, rule, lib=ops._LIBRARY)


for _name, _body in (
    ("attention", _attention),
    ("append", _append),
    ("read_length", _read_length),
    ("observe_padding", ops.observe_padding),
):
    _register(_name, _body)
