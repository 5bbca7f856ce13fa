"""``kivi-ops export`` and ``kivi-ops run``: a model to a file, and text out of a file. ``run`` needs no transformers.

Must not know how programs are made or run (:func:`export_model`, :class:`ExportedModel`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kivi_ops.config import KiviConfig
from kivi_ops.export.program import ExportedModel

BUNDLED = "SmolLM2-135M-Instruct"
TOKENIZER, PROMPTS = "tokenizer.json", "prompts.json"
_BLANK = "KIVI-OPS-PROMPT"  # where a prompt goes in what a chat template makes of a turn


def export(options: Namespace) -> None:
    """Write a model to a file: the options are those of :func:`kivi_ops.cli.parser`.

    Raises:
        ValueError, ImportError, OSError: what cannot be done, in words for the user.
    """
    from kivi_ops.demo import Progress, _device, load_model, load_smollm2
    from kivi_ops.export.models import export_model

    if not options.file.endswith(".pt2"):
        raise ValueError(f"{options.file} is where the program goes; allowed: a name that ends in .pt2")
    device = _device(options.device)
    dtype = getattr(torch, options.dtype) if options.dtype else torch.float32 if device.type == "cpu" else torch.bfloat16
    key_bits, value_bits = options.bits
    config = KiviConfig(
        key_bits=key_bits, value_bits=value_bits, group_size=options.group_size, residual_length=options.residual_length, seal=options.seal
    )
    programs = 2 if options.separate_decode else 1
    progress = Progress(2 + 2 * programs)
    with progress.step(f"loading {options.model}"):
        bundled = options.model == BUNDLED and not Path(options.model).exists()
        model, tokenizer = load_smollm2(dtype) if bundled else load_model(options.model, dtype)
        model = model.to(device)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and options.max_cache_len > limit:
        raise ValueError(f"--max-cache-len is {options.max_cache_len}; allowed: up to {limit}, the positions that {options.model} has")
    with _Steps(progress) as steps:
        exported = export_model(
            model, config, options.batch_size, options.max_cache_len, separate_decode=options.separate_decode, progress=steps.begin
        )
    exported.files.update(_texts(tokenizer))
    with progress.step(f"writing {options.file}"):
        exported.save(options.file)
    size, held = os.path.getsize(options.file), exported.held_bytes()
    print(
        f"{options.file}: {size / 2**20:.1f} MiB, of which {held / 2**20:.1f} MiB are the empty cache of {options.batch_size} x "
        f"{options.max_cache_len} tokens ({key_bits} bits for Keys, {value_bits} for Values)"
    )
    print(f'kivi-ops run {options.file} --prompt "..."')


class _Steps:
    """``export_model``'s progress as steps of a :class:`Progress`: the next begins where one is announced."""

    def __init__(self, progress: Any) -> None:
        self.progress: Any = progress
        self.open: Any = None

    def __enter__(self) -> _Steps:
        return self

    def begin(self, text: str) -> None:
        if self.open is not None:
            self.open.__exit__(None, None, None)
        self.open = self.progress.step(text)
        self.open.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.open is not None:
            self.open.__exit__(*error)


def _texts(tokenizer: Any) -> dict[str, str]:
    """What ``run`` needs of a tokenizer of transformers: its rules, and how a turn is written. Nothing for one without such a file."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {}
    prompts = {"first": _BLANK, "later": _BLANK, "end": tokenizer.eos_token_id}
    if tokenizer.chat_template:
        turn, answer = {"role": "user", "content": _BLANK}, {"role": "assistant", "content": "KIVI-OPS-ANSWER"}
        first = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
        both = tokenizer.apply_chat_template([turn, answer, turn], tokenize=False, add_generation_prompt=True)
        later = both.partition("KIVI-OPS-ANSWER")[2].removeprefix(tokenizer.eos_token or "")
        prompts |= {"first": first, "later": later}
    return {TOKENIZER: backend.to_str(), PROMPTS: json.dumps(prompts)}


# ------------------------------------------------------------------------------------------------------------------- run


def run(options: Namespace) -> None:
    """Answer a prompt with an exported model: text to stdout as it is made, progress and speed to stderr.

    Raises:
        ValueError, ImportError, OSError: what cannot be done, in words for the user.
    """
    from kivi_ops.demo import Progress

    progress = Progress(2)
    with progress.step(f"loading {options.file}"):
        model = ExportedModel.load(options.file)
    if len(options.prompt) != model.batch_size:
        raise ValueError(
            f"{len(options.prompt)} prompts were given; allowed: {model.batch_size}, the rows that {options.file} was exported with"
        )
    tokenizer, prompts = _tokenizer(model, options.file)
    resumed = options.state is not None and os.path.exists(options.state)
    if resumed:
        model.load_state(options.state)
    blank = _BLANK if options.raw else prompts["later" if model.tokens_held else "first"]
    special = blank == _BLANK and not model.tokens_held  # a chat format writes them itself
    ids, mask = _encode(tokenizer, [blank.replace(_BLANK, prompt) for prompt in options.prompt], special)
    new_tokens = min(options.new_tokens, model.capacity - model.tokens_held - ids.shape[1])
    if new_tokens < 1:
        raise ValueError(
            f"the prompt has {ids.shape[1]} tokens and {model.tokens_held} are held; allowed: fewer than {model.capacity} in all, the "
            "capacity of the cache"
        )
    generator = torch.Generator(model.device).manual_seed(options.seed)
    stream = model.stream(
        ids, new_tokens, attention_mask=mask, eos_token_id=prompts["end"], temperature=options.temperature, generator=generator
    )
    with progress.step(f"reading {ids.shape[1]} tokens of prompt" + (f" after {model.tokens_held} held" if resumed else "")):
        tokens = [next(stream)]
    began = time.perf_counter()
    shown = _show(tokenizer, tokens, "", model.batch_size)
    for token in stream:
        tokens.append(token)
        shown = _show(tokenizer, tokens, shown, model.batch_size)
    seconds = time.perf_counter() - began
    if model.batch_size == 1:
        print(_text(tokenizer, tokens)[len(shown) :])
    else:
        for prompt, row in zip(options.prompt, torch.stack(tokens, 1).tolist(), strict=True):
            print(f"> {prompt}\n{tokenizer.decode(row)}")
    if options.state is not None:
        if (
            prompts["end"] is not None
            and model.batch_size == 1
            and int(tokens[-1]) != prompts["end"]
            and model.tokens_held < model.capacity
        ):
            model(torch.full((1, 1), prompts["end"]))  # an answer that was cut off ends here
        model.save_state(options.state)
    speed = f", {len(tokens) / seconds:.1f} tokens/s" if len(tokens) > 1 else ""
    print(
        f"{len(tokens)} tokens{speed}; {model.tokens_held} of {model.capacity} held in {model.held_bytes() / 2**20:.1f} MiB",
        file=sys.stderr,
    )


def _tokenizer(model: ExportedModel, file: str) -> tuple[Any, dict[str, Any]]:
    if TOKENIZER not in model.files:
        raise ValueError(f"{file} holds no tokenizer; allowed: a file of kivi-ops export, for a model with a tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError("kivi-ops run needs the package tokenizers: pip install tokenizers") from error
    return Tokenizer.from_str(model.files[TOKENIZER]), json.loads(model.files[PROMPTS])


def _encode(tokenizer: Any, texts: list[str], special: bool) -> tuple[Tensor, Tensor | None]:
    """Token ids int64 [B, S], left-padded, and their mask if there is padding."""
    rows = [tokenizer.encode(text, add_special_tokens=special).ids for text in texts]
    longest = max(map(len, rows))
    if not min(map(len, rows)):
        raise ValueError("--prompt is empty; allowed: at least one token")
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, None if bool(mask.all()) else mask


def _show(tokenizer: Any, tokens: list[Tensor], shown: str, rows: int) -> str:
    """Print what the last token adds to the text of a single row."""
    if rows > 1:
        return shown
    text = _text(tokenizer, tokens)
    if text.endswith("\N{REPLACEMENT CHARACTER}"):  # half a character, perhaps
        return shown
    print(text[len(shown) :], end="", flush=True)
    return text


def _text(tokenizer: Any, tokens: list[Tensor]) -> str:
    return tokenizer.decode([int(token) for token in tokens])
