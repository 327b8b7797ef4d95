"""``freescale consolidate`` and ``freescale changes``: convert a checkpoint of the Trainer, or compare two of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

_CONSOLIDATE = """
Write what a checkpoint holds into one file, for the plain module, or into a folder. A checkpoint of strategy "freescale" is
that of the unsharded module, with whole tables, or a folder of as many parts as it had ranks. Weights alone leave out what
only training needs: optimizer states, loops and data.
"""
_CHANGES = "Write the rows of tables that differ in a later checkpoint, for a server that holds the earlier one."


def run(command: str, arguments: list[str]) -> None:
    """Run the command; exits with 2 and an error message if it cannot."""
    from lightning_freescale.checkpoint.conversion import read_checkpoint

    parser = _new_parser(command)
    options = parser.parse_args(arguments)
    sources = [options.checkpoint] if command == "consolidate" else [options.old, options.new]
    try:
        checkpoints = [read_checkpoint(path, weights_only=not options.trust) for path in sources]
        if options.target.exists() and not options.force:
            raise ValueError(f"{options.target} is there already: pass another one, or --force")
        first, last = checkpoints[0], checkpoints[-1]
        print(_consolidate(first, options) if command == "consolidate" else _changes(first, last, options.target))
    except (OSError, ValueError, RuntimeError) as error:
        parser.exit(2, f"{command}: {error}\n")


def _new_parser(command: str) -> argparse.ArgumentParser:
    consolidates = command == "consolidate"
    parser = argparse.ArgumentParser(f"freescale {command}", description=_CONSOLIDATE if consolidates else _CHANGES)
    add = parser.add_argument
    if consolidates:
        add("checkpoint", type=Path, help="a .ckpt of the Trainer, a file or a folder")
        add("target", type=Path, help="file, or folder, to write")
        add(
            "--to",
            choices=["weights", "single", "sharded"],
            default="weights",
            help="weights alone, for module.load_state_dict(torch.load(file)); or the whole checkpoint in a file or folder",
        )
    else:
        add("old", type=Path, help="the checkpoint that is served, a file or a folder")
        add("new", type=Path, help="a later one of the same module")
        add("target", type=Path, help="file to write: {name: {'ids': ..., 'rows': ...}}, for torch.load")
    add("--force", action="store_true", help="replace the target if it is there")
    add("--trust", action="store_true", help="run whatever code the checkpoint holds, as loading hyperparameters may need")
    return parser


def _consolidate(checkpoint: dict[str, Any], options: argparse.Namespace) -> str:
    from lightning_freescale.checkpoint.conversion import write_file, write_folder

    target: Path = options.target
    if options.to == "sharded":
        write_folder(checkpoint, target)
        return f"wrote the whole checkpoint to the folder {target}"
    if options.to == "single":
        write_file(checkpoint, target)
        return f"wrote the whole checkpoint to {target}, {_megabytes(target)}"
    weights = dict(checkpoint["state_dict"])
    write_file(weights, target)
    return f"wrote {len(weights)} tensors, {_megabytes(target)}, to {target}"


def _changes(old: dict[str, Any], new: dict[str, Any], target: Path) -> str:
    from lightning_freescale.checkpoint.conversion import changed_rows

    found = changed_rows(old, new)
    torch.save(found, target)
    rows = [f"{name}: {len(changed['ids'])} rows" for name, changed in found.items()]
    return "\n".join([*rows, f"wrote {target}, {_megabytes(target)}"])


def _megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"
