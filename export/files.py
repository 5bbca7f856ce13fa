"""Programs with quantised caches as one ``.pt2`` file: weights once, states zero, the layout named. Must not know how they are run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.pt2_archive import _package as archive

import kivi_ops
from kivi_ops.export.rewrite import STATE_PREFIX
from kivi_ops.kernels.layout import NAME, VERSION

HEAD = "kivi_ops.json"
FORMAT = 1  # of the head, and of how programs are called


def save_programs(
    programs: ExportedProgram | Mapping[str, ExportedProgram], path: str | os.PathLike[str], files: Mapping[str, str] | None = None
) -> None:
    """Write rewritten programs to ``path``, a ``.pt2`` file: the same bytes whether they ran or not, for states are written as zeros.

    A single program is also loaded by ``torch.export.load``, after ``import kivi_ops``. Weights that several programs share are written
    once.

    Args:
        files: further texts by name, kept in the file.

    Raises:
        ValueError: ``path`` does not end in .pt2.
    """
    path = os.fspath(path)
    if not path.endswith(".pt2"):
        raise ValueError(f"path is {path!r}; allowed: a name that ends in .pt2")
    programs = {"model": programs} if isinstance(programs, ExportedProgram) else dict(programs)
    head = {"format": FORMAT, "layout": [NAME, VERSION], "kivi_ops": kivi_ops.__version__, "programs": list(programs)}
    unfinished = f"{path[:-4]}.{os.getpid()}.part.pt2"
    try:
        with contextlib.ExitStack() as stack:
            for program in programs.values():
                stack.enter_context(_states_as_allocated(program))
            # The archive names its root folder after the file, so a path would change the bytes.
            with open(unfinished, "wb") as file, _SharingWriter(file) as writer:
                archive._package_exported_programs(writer, programs)
                archive._package_extra_files(writer, {HEAD: json.dumps(head), **(files or {})})
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(unfinished)


def load_programs(path: str | os.PathLike[str]) -> tuple[dict[str, ExportedProgram], dict[str, str]]:
    """The programs of a file of :func:`save_programs`, which share their tensors by name, and its further texts.

    Raises:
        ValueError: another kind of file, or one of another layout or format.
    """
    path = os.fspath(path)
    try:
        with archive.PT2ArchiveReader(path) as reader:
            texts = archive._load_extra_files(reader, reader.get_file_names())
    except RuntimeError as error:
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path}: no such file") from error
        raise ValueError(f"{path} cannot be read as a .pt2 file; allowed: a file of save_programs() or ExportedModel.save()") from error
    if HEAD not in texts:
        raise ValueError(f"{path} was not written by kivi_ops; allowed: a file of save_programs() or ExportedModel.save()")
    head = json.loads(texts.pop(HEAD))
    for name, wanted in (("format", FORMAT), ("layout", [NAME, VERSION])):
        if head[name] != wanted:
            raise ValueError(f"{path} has {name} {head[name]!r} (kivi_ops {head['kivi_ops']}); allowed: {wanted!r}: export it again")
    if "state" in head:
        raise ValueError(
            f"{path} is a compiled package; allowed: a file of save_programs() or ExportedModel.save(), or CompiledModel.load()"
        )
    programs = archive.load_pt2(path).exported_programs
    ordered = {name: programs[name] for name in head["programs"]}
    tensors: dict[str, Tensor] = {}
    for program in ordered.values():
        for name, tensor in program.state_dict.items():
            if name not in tensors:  # torch 2.11 leaves tensors in memory that may not be written
                tensors[name] = tensor.clone() if name.startswith(f"{STATE_PREFIX}.") else tensor
            program.state_dict[name] = tensors[name]
    return ordered, texts


@contextlib.contextmanager
def _states_as_allocated(program: ExportedProgram) -> Iterator[None]:
    """``program`` with zeros for what it changes, which it did not hold before it ran either."""
    held = {name: tensor for name, tensor in program.state_dict.items() if name.startswith(f"{STATE_PREFIX}.")}
    program.state_dict.update({name: torch.zeros_like(tensor) for name, tensor in held.items()})
    try:
        yield
    finally:
        program.state_dict.update(held)


class _SharingWriter(archive.PT2ArchiveWriter):
    """Writes weights that an earlier program has too once. Within a program nothing is shared: states of two layers are equal zeros."""

    _RECORD = archive.WEIGHTS_DIR + archive.WEIGHT_FILENAME_PREFIX

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._records: list[bytes] = []  # digests of what is written, by number
        self._free: dict[bytes, list[int]] = {}  # of earlier programs, not yet used by this one
        self._names: dict[str, str] = {}  # what torch calls a record of this program, and what it is called here

    def write_bytes(self, name: str, data: bytes) -> None:
        if not name.startswith(self._RECORD):
            super().write_bytes(name, data)
            return
        digest = hashlib.sha256(data).digest()
        if free := self._free.get(digest):
            number = free.pop(0)
        else:
            number = len(self._records)
            self._records.append(digest)
            super().write_bytes(f"{self._RECORD}{number}", data)
        self._names[name.removeprefix(archive.WEIGHTS_DIR)] = f"{archive.WEIGHT_FILENAME_PREFIX}{number}"

    def write_string(self, name: str, data: str) -> None:
        if name.startswith(archive.WEIGHTS_DIR):  # which record holds which tensor: the last that is written of a program's weights
            config = json.loads(data)
            for entry in config["config"].values():
                entry["path_name"] = self._names[entry["path_name"]]
            data = json.dumps(config)
            self._names, self._free = {}, {}
            for number, digest in enumerate(self._records):
                self._free.setdefault(digest, []).append(number)
        super().write_string(name, data)
