"""Exported programs that run: state, call convention and files in one object. Must not know of models or transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from kivi_ops.export.files import load_programs, save_programs
from kivi_ops.export.rewrite import STATE_PREFIX
from kivi_ops.export.session import Session
from kivi_ops.passes.nodes import arguments

_FORMAT = ("key_bits", "value_bits", "group_size", "residual_length", "rollback_margin", "metadata_dtype")
_WRITES = (torch.ops.kivi.append.default, torch.ops.kivi.update.default)


class ExportedModel(Session):
    """One or more programs over one quantised cache, to be called, saved and loaded. Running needs torch and this package alone.

    Of :func:`export_model`, or made of a rewritten program of any model that is called as ``program(input_ids int64 [B, S], start int64
    [])``, or with ``left_padding`` (int32 [B]) besides.

    Args:
        programs: one, or several by name that hold the same states: ``"decode"`` serves calls of one token, the other all calls.
        files: texts that go with them into a file: a tokenizer, say.

    Raises:
        ValueError: a program without quantised states, or called otherwise.
    """

    def __init__(self, programs: ExportedProgram | Mapping[str, ExportedProgram], files: Mapping[str, str] | None = None) -> None:
        self.programs = {"model": programs} if isinstance(programs, ExportedProgram) else dict(programs)
        self.files = dict(files or {})
        first = next(iter(self.programs.values()))
        state = {name: tensor for name, tensor in first.state_dict.items() if name.startswith(f"{STATE_PREFIX}.")}
        formats = [found for node in first.graph.nodes if (found := _format(node)) is not None]
        if not formats:
            raise ValueError("the program has no quantised cache; allowed: what rewrite() or export_model() returned")
        padded = set()
        for name, program in self.programs.items():
            inputs = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
            if len(inputs) not in (2, 3):
                raise ValueError(f"program {name!r} takes {inputs}; allowed: input_ids, start, and left_padding or not")
            padded.update([name] if len(inputs) == 3 else [])
            for tensor_name in state:
                program.state_dict[tensor_name] = state[tensor_name]
        super().__init__(
            steps={name: program.module(check_guards=False) for name, program in self.programs.items()},
            padded=frozenset(padded),
            state=state,
            batch_size=next(tensor.shape[0] for name, tensor in state.items() if name.endswith(".sealed")),
            capacity=min(capacity for capacity, _ in formats),
            format={"layers": [format for _, format in formats]},
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the programs and texts to a ``.pt2`` file, without the conversation (:meth:`save_state` writes that)."""
        save_programs(self.programs, path, self.files)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ExportedModel:
        """What :meth:`save` wrote.

        Raises:
            ValueError: another kind of file, or one of another layout.
        """
        return cls(*load_programs(path))


def _format(node: Node) -> tuple[int, dict[str, Any]] | None:
    """Capacity and configuration of a layer, from where its state is written; None for any other node."""
    if isinstance(node.target, torch._ops.HigherOrderOperator) and node.args and node.args[0] in _WRITES:  # after run_decompositions
        given: Mapping[str, Any] = node.kwargs
    elif node.target in _WRITES:
        given = arguments(node)
    else:
        return None
    return given["capacity"], {name: given[name] if isinstance(given[name], int) else str(given[name]) for name in _FORMAT}
