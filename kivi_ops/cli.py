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
