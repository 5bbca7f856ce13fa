"""The command ``kivi-ops``: reads the command line, calls what it names, and turns errors into one line and an exit code.

Exit codes: 0 done, 1 could not be done, 2 the command line is wrong, 130 interrupted. Must not know how anything is measured
(:mod:`kivi_ops.demo`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

_DESCRIPTION = "KIVI: a key-value cache in 2, 4 or 8 bits for PyTorch and transformers."
_DEMO = """\
Generate from one prompt with the float cache and with KIVI caches, measure the
perplexity of a text under each, and print one table. The first start converts
the bundled model and takes about 15 seconds longer. Progress goes to stderr,
results to stdout.
"""
_EXAMPLES = """\
examples:
  kivi-ops demo                    the bundled model at 4 and 2 bits
  kivi-ops demo --bits 8 4 k4v2 2  more caches; k4v2: Keys in 4 bits, Values in 2
  kivi-ops demo --model ./my-model --device cuda --dtype bfloat16
  kivi-ops demo --no-compile --perplexity-tokens 512    a quick look
"""
_EXPORT = """\
Write a causal language model of transformers to one .pt2 file, with an empty quantised cache of a fixed size
inside. The file runs without transformers: kivi-ops run FILE, or kivi_ops.export.ExportedModel.load(FILE).
"""
_RUN = """\
Answer a prompt with an exported model. Text goes to stdout as it is made, progress and speed to stderr. A model
that was exported with a batch size of B takes B prompts.
"""


def bits(text: str) -> tuple[int, int]:
    """``"2"`` -> (2, 2); ``"k4v2"`` -> (4, 2), Key and Value bits."""
    key, separator, value = text.lower().removeprefix("k").partition("v")
    pair = (key, value) if separator and text.lower().startswith("k") else (text, text)
    if not all(part in ("2", "4", "8") for part in pair):
        raise argparse.ArgumentTypeError(f"{text!r} is not 2, 4, 8 or a mix such as k4v2")
    return int(pair[0]), int(pair[1])


def _at_least(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return count


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="kivi-ops",
        description=_DESCRIPTION,
        epilog="kivi-ops COMMAND --help tells more. With KIVI_OPS_TRACEBACK=1 an error shows where it was raised.",
    )
    root.add_argument("--version", action="store_true", help="print the version and exit")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    commands.add_parser(
        "env",
        help="print versions, devices and which implementations are active",
        description="Print versions, devices, compilers, and which implementation of the operators is active on each device.",
    )
    bench = commands.add_parser(
        "bench",
        help="measure speed and memory on a GPU against the best float alternative",
        description="Measure one thing and print a table. kivi-ops bench NAME --help tells what is measured and how.",
        usage="kivi-ops bench [-h] [--list] NAME [options]",
    )
    bench.add_argument("--list", action="store_true", help="name the benchmarks and exit")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, metavar="NAME [options]", help="a benchmark, and what it takes")
    _add_export(commands)
    _add_run(commands)
    demo = commands.add_parser(
        "demo",
        help="a real language model over a float cache and over KIVI caches, side by side",
        description=_DEMO,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = demo.add_argument
    add("--model", metavar="NAME", help="a local folder or a hub name (default: the bundled SmolLM2-135M-Instruct)")
    add("--prompt", help="what to generate from (default: a question about a few hundred words of text)")
    add("--new-tokens", type=_at_least(2), default=64, metavar="N", help="tokens to generate (default: %(default)s)")
    add(
        "--perplexity-tokens",
        type=_at_least(0),
        default=2048,
        metavar="N",
        help="length of the text whose perplexity is measured; 0 leaves it out (default: %(default)s)",
    )
    add(
        "--bits",
        type=bits,
        nargs="+",
        default=[(4, 4), (2, 2)],
        metavar="BITS",
        help="2, 4, 8 or a mix such as k4v2, one cache each (default: 4 2)",
    )
    add("--group-size", type=int, default=32, metavar="G", help="elements that share one scale (default: %(default)s)")
    add("--residual-length", type=int, default=128, metavar="R", help="recent tokens kept in float (default: %(default)s)")
    add("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of model and cache (default: float32 on a CPU, else bfloat16)")
    add("--no-compile", action="store_true", help="run the decode steps without torch.compile")
    return root


def _add_export(commands: argparse._SubParsersAction) -> None:
    export = commands.add_parser(
        "export",
        help="write a language model with its quantised cache to one file",
        description=_EXPORT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = export.add_argument
    add("model", metavar="MODEL", help="a local folder, a hub name, or SmolLM2-135M-Instruct for the bundled one")
    add("file", metavar="FILE", help="where it goes, ending in .pt2")
    add("--bits", type=bits, default=(2, 2), metavar="BITS", help="2, 4, 8 or a mix such as k4v2 (default: 2)")
    add("--group-size", type=int, default=32, metavar="G", help="elements that share one scale (default: %(default)s)")
    add("--residual-length", type=int, default=128, metavar="R", help="recent tokens kept in float (default: %(default)s)")
    add(
        "--seal",
        choices=("after_attention", "before_attention"),
        default="after_attention",
        help="order inside a step (default: %(default)s)",
    )
    add("--batch-size", type=_at_least(1), default=1, metavar="B", help="rows of every call (default: %(default)s)")
    add("--max-cache-len", type=_at_least(1), default=2048, metavar="C", help="tokens that the cache holds (default: %(default)s)")
    add("--separate-decode", action="store_true", help="a second program for single tokens, which compilers make more of")
    add("--device", help="cpu, cuda, cuda:1, ...: where the file will run (default: cuda where there is one)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of model and cache (default: float32 on a CPU, else bfloat16)")


def _add_run(commands: argparse._SubParsersAction) -> None:
    run = commands.add_parser(
        "run",
        help="generate text with an exported model",
        description=_RUN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = run.add_argument
    add("file", metavar="FILE", help="what kivi-ops export wrote")
    add("--prompt", nargs="+", required=True, help="what to answer; in the model's chat format if it has one")
    add("--raw", action="store_true", help="go on with the prompt as it stands, without the chat format")
    add("--new-tokens", type=_at_least(1), default=128, metavar="N", help="tokens to generate at most (default: %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the draws at other temperatures (default: %(default)s)")
    add("--state", metavar="FILE", help="go on with the conversation in this file if it exists, and save it there")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; ``arguments`` as in ``sys.argv[1:]``. Returns the exit code."""
    root = parser()
    options = root.parse_args(arguments)
    if options.command is None and not options.version:
        root.print_help()
        return 2
    try:
        if options.version:
            from kivi_ops import __version__

            print(f"kivi-ops {__version__}")
        elif options.command == "env":
            from kivi_ops.environment import report

            print(report())
        elif options.command == "bench":
            from kivi_ops import benchmarks

            if not options.list and options.arguments:
                return benchmarks.main(options.arguments)
            print(benchmarks.listing())
            return 0 if options.list else 2
        elif options.command in ("export", "run"):
            from kivi_ops.export import commands

            {"export": commands.export, "run": commands.run}[options.command](options)
        else:
            from kivi_ops import demo

            demo.run(options)
    except KeyboardInterrupt:
        print("\nkivi-ops: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `kivi-ops env | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("KIVI_OPS_TRACEBACK"):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"kivi-ops: error: {text[:500]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
