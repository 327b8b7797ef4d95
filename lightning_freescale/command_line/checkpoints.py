"""``freescale convert``, ``consolidate`` and ``changes``: convert a checkpoint, or compare two checkpoints."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from lightning_freescale.checkpoint.conversion import changed_rows, read_checkpoint, write_file, write_folder
from lightning_freescale.checkpoint.other_programs import CONVERTED
from lightning_freescale.checkpoint.remote_files import Location, exists, located, replacing, size_of

_CONSOLIDATE = """
Convert a checkpoint into a file or a folder. A checkpoint of strategy "freescale" is a file with whole tables, or a folder with
one part for each rank. With --to weights, the file has only the weights for the plain module. It contains no optimizer states,
loops and data.
"""
_CONVERT = """
Convert a checkpoint of another program into a checkpoint of the Trainer in one file, and list what is left out. It may be a
folder of torch.distributed.checkpoint from a loop with TorchRec, or a file of torch.save with a state dict of the model.
"""
_CHANGES = "Write the table rows that differ in a later checkpoint, for a server that has loaded the earlier one."


def run(command: str, arguments: list[str]) -> None:
    """Run the command; exit with status 2 and a message on errors."""
    parser = _new_parser(command)
    options = parser.parse_args(arguments)
    sources = [options.old, options.new] if command == "changes" else [options.checkpoint]
    try:
        checkpoints = [read_checkpoint(path, weights_only=not options.trust) for path in sources]
        if exists(options.target) and (command == "convert" or not options.force):
            replacing = "" if command == "convert" else ", or --force to replace it"
            raise ValueError(f"{options.target} exists. Pass another target{replacing}")
        print(_WRITE[command](checkpoints, options))
    except (OSError, ValueError, RuntimeError) as error:
        parser.exit(2, f"{command}: {error}\n")


def _new_parser(command: str) -> argparse.ArgumentParser:
    descriptions = {"convert": _CONVERT, "consolidate": _CONSOLIDATE, "changes": _CHANGES}
    parser = argparse.ArgumentParser(f"freescale {command}", description=descriptions[command])
    add = parser.add_argument
    if command == "convert":
        add("checkpoint", type=_location, help="a file or folder")
        add("target", type=_location, help="file to write")
    elif command == "consolidate":
        add("checkpoint", type=_location, help="a .ckpt file or folder of the Trainer")
        add("target", type=_location, help="file or folder to write")
        add(
            "--to",
            choices=["weights", "single", "sharded"],
            default="weights",
            help="only weights, for module.load_state_dict(torch.load(file)), or the whole checkpoint as a file or a folder",
        )
    else:
        add("old", type=_location, help="the checkpoint that the server has loaded, a file or a folder")
        add("new", type=_location, help="a later checkpoint of the same module")
        add("target", type=_location, help="file to write: {name: {'ids': ..., 'rows': ...}}, for torch.load")
    if command != "convert":
        add("--force", action="store_true", help="replace an existing target")
    add("--trust", action="store_true", help="allow the checkpoint to run code, which hyperparameters may require")
    return parser


def _location(text: str) -> Location:
    try:
        return located(text)
    except (ImportError, ValueError) as error:  # the file system is not installed, or it is not known
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def _convert(checkpoints: list[dict[str, Any]], options: argparse.Namespace) -> str:
    (checkpoint,) = checkpoints
    write_file(checkpoint, options.target)
    converted = checkpoint.get(CONVERTED, {"left_out": [], "optimizer_states": {}})
    states = (
        f"the optimizer states of {len(converted['optimizer_states'])} parameters" if CONVERTED in checkpoint else "the rest"
    )
    wrote = f"wrote {len(checkpoint['state_dict'])} tensors and {states}, {_megabytes(options.target)}, to {options.target}"
    return "\n".join([*(f"left out: {name}" for name in converted["left_out"]), wrote])


def _consolidate(checkpoints: list[dict[str, Any]], options: argparse.Namespace) -> str:
    (checkpoint,), target = checkpoints, options.target
    if options.to == "sharded":
        write_folder(checkpoint, target)
        return f"wrote the whole checkpoint to the folder {target}"
    if options.to == "single":
        write_file(checkpoint, target)
        return f"wrote the whole checkpoint to {target}, {_megabytes(target)}"
    weights = dict(checkpoint["state_dict"])
    write_file(weights, target)
    return f"wrote {len(weights)} tensors, {_megabytes(target)}, to {target}"


def _changes(checkpoints: list[dict[str, Any]], options: argparse.Namespace) -> str:
    found, target = changed_rows(*checkpoints), options.target
    with replacing(target) as file:
        torch.save(found, file)
    rows = [f"{name}: {len(changed['ids'])} rows" for name, changed in found.items()]
    return "\n".join([*rows, f"wrote {target}, {_megabytes(target)}"])


_WRITE = {"convert": _convert, "consolidate": _consolidate, "changes": _changes}
"""The function of each command, which writes the target and returns the text to print."""


def _megabytes(path: Location) -> str:
    return f"{size_of(path) / 1e6:.1f} MB"
