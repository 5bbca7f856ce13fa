"""The options of ``torch.compile(model, backend="kivi", options={...})``: read once, checked, then plain data.

Must not know of graphs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from kivi_ops.config import KiviConfig

COMPILERS = ("inductor", "aot_eager", "eager", "torch_tensorrt")
CONFIG_FIELDS = tuple(f.name for f in fields(KiviConfig))
OPTIONS = ("compiler", "mode", "strict", "free_float_cache", *CONFIG_FIELDS)


@dataclass(frozen=True)
class Options:
    """What the user asked of the backend.

    ``compiler``: what compiles the rewritten graph, a name of ``COMPILERS`` or a callable ``(module, example_inputs) -> callable``.
    ``mode``: a mode of ``torch.compile``, for Inductor; the other compilers have none and ignore it. ``strict``: anything but
    "every site was rewritten" is an error. ``free_float_cache``: a model's own float caches go (:mod:`kivi_ops.passes.states` says what the
    caller promises). ``config``: the :class:`KiviConfig` fields that were given.
    """

    compiler: str | Callable[..., Any] = "inductor"
    mode: str = "default"
    strict: bool = False
    free_float_cache: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, mode: str | None, options: Mapping[str, Any] | None) -> Options:
        """Check ``torch.compile``'s ``mode=`` and ``options=``.

        Raises:
            ValueError, TypeError: an unknown option or an impossible choice; the message says which, and what is allowed.
        """
        given = dict(options or {})
        unknown = sorted(str(name) for name in given if name not in OPTIONS)
        if unknown:
            raise ValueError(f"unknown option {', '.join(map(repr, unknown))} of backend='kivi'; allowed: {', '.join(OPTIONS)}")
        config = {name: given[name] for name in CONFIG_FIELDS if name in given}
        KiviConfig(**config)
        flags = {name: given.get(name, False) for name in ("strict", "free_float_cache")}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise TypeError(f"option {name!r} is {flag!r}; allowed: True, False")
        inner_mode = given.get("mode")
        if mode is not None and inner_mode is not None and mode != inner_mode:
            raise ValueError(f"mode is {mode!r} and option 'mode' is {inner_mode!r}; allowed: one of the two")
        return cls(_compiler(given.get("compiler", "inductor")), _mode(inner_mode or mode or "default"), **flags, config=config)


def _compiler(compiler: Any) -> str | Callable[..., Any]:
    if callable(compiler):
        return compiler
    if compiler not in COMPILERS:
        raise ValueError(f"option 'compiler' is {compiler!r}; allowed: {', '.join(COMPILERS)}, or a callable backend")
    if compiler == "torch_tensorrt" and importlib.util.find_spec("torch_tensorrt") is None:
        raise ValueError("option 'compiler' is 'torch_tensorrt', which is not installed: pip install kivi-ops[tensorrt]")
    return compiler


def _mode(mode: Any) -> str:
    allowed = torch._inductor.list_mode_options()
    if mode not in allowed:
        raise ValueError(f"mode is {mode!r}; allowed: {', '.join(allowed)}")
    return mode
