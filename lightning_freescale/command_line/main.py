"""``freescale COMMAND``: find the command, and pass it the rest of the line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

COMMANDS = {  # name: module in this package, what it does
    "fit": ("train", "train a model from a config"),
    "validate": ("train", "validate one"),
    "test": ("train", "test one"),
    "predict": ("train", "predict with one"),
    "simulate": ("simulate", "predict what each technique brings on more ranks than there are"),
    "balance": ("balance", "assign the samples of every step to ranks, for other loops; predict what that brings"),
    "profile": ("profile", "profile a Lightning script; show bubble reports, compare them, make a page of them"),
    "consolidate": ("checkpoints", "take the weights out of a checkpoint, for the plain module; or make one file of a folder"),
    "explain": ("explain", "print what the documentation says about an error or a warning"),
    "changes": ("checkpoints", "take out the rows that a later checkpoint has otherwise"),
}
_PACKAGES = ("lightning-freescale", "lightning", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")
_EXAMPLE = "example: freescale balance simulate --lengths lengths.txt --ranks 8,64,256 --batch-size 32"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 2 and an error message if it cannot."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_help())
    elif given[0] == "--version":
        print("\n".join(f"{name} {installed}" for name in _PACKAGES if (installed := _version(name))))
    elif given[0] in COMMANDS:
        module, _ = COMMANDS[given[0]]
        run: Callable[[str, list[str]], None] = import_module(f"lightning_freescale.command_line.{module}").run
        run(given[0], given[1:])
    else:
        near = get_close_matches(given[0], COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f": choose from {', '.join(COMMANDS)}"
        print(f"freescale: there is no command {given[0]!r}{hint}", file=sys.stderr)
        raise SystemExit(2)


def _help() -> str:
    commands = "\n".join(f"  {name:<12} {text}" for name, (_, text) in COMMANDS.items())
    return f"usage: freescale COMMAND ... | --version\n\n{commands}\n\nfreescale COMMAND --help prints its options\n{_EXAMPLE}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
