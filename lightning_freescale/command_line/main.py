"""``freescale COMMAND``: run a command with the rest of the line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

COMMANDS = {  # name: (module in this package, help)
    "fit": ("train", "train a model from a config"),
    "validate": ("train", "validate a model"),
    "test": ("train", "test a model"),
    "predict": ("train", "predict with a model"),
    "simulate": ("simulate", "predict the gain of balancing, or of each technique, on more ranks than you have"),
    "balance": ("balance", "assign the samples of every step to ranks, for other loops; fit costs to a report"),
    "profile": ("profile", "profile a Lightning script; show and compare bubble reports, and write them as a page"),
    "convert": ("checkpoints", "convert a checkpoint of a TorchRec loop for ckpt_path="),
    "consolidate": ("checkpoints", "extract the weights of a checkpoint for the plain module; convert a folder to a file"),
    "explain": ("explain", "print what the documentation says about an error or a warning"),
    "changes": ("checkpoints", "extract the rows that differ in a later checkpoint"),
}
_PACKAGES = ("lightning-freescale", "lightning", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")
_EXAMPLE = "example: freescale simulate --lengths lengths.txt --ranks 8,64,256 --batch-size 32"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exit with status 2 and a message on errors."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given or given[0] in ("-h", "--help"):
        commands = "\n".join(f"  {name:<12} {text}" for name, (_, text) in COMMANDS.items())
        print(
            f"usage: freescale COMMAND ... | --version\n\n{commands}\n\nfreescale COMMAND --help prints its options\n{_EXAMPLE}"
        )
    elif given[0] == "--version":
        print("\n".join(f"{name} {installed}" for name in _PACKAGES if (installed := _version(name))))
    elif given[0] in COMMANDS:
        module, _ = COMMANDS[given[0]]
        run: Callable[[str, list[str]], None] = import_module(f"lightning_freescale.command_line.{module}").run
        run(given[0], given[1:])
    else:
        near = get_close_matches(given[0], COMMANDS, n=1)
        hint = f". Did you mean {near[0]!r}?" if near else f". Choose from {', '.join(COMMANDS)}"
        print(f"freescale: unknown command {given[0]!r}{hint}", file=sys.stderr)
        raise SystemExit(2)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
