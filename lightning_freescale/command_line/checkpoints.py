"""``freescale convert``, ``consolidate`` and ``changes``: convert a checkpoint, or compare two checkpoints."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from lightning_freescale.checkpoint.conversion import changed_rows, read_checkpoint, write_file, write_folder
from lightning_freescale.checkpoint.held_files import CONVERTED
from lightning_freescale.checkpoint.remote_files import Location, exists, located, replacing, size_of

_DESCRIPTIONS = {
    "convert": """
        Convert a checkpoint of another program into a file for ckpt_path=, and list what is left out. The checkpoint may be a
        folder of torch.distributed.checkpoint from a loop with TorchRec, or a file of torch.save with a state dict of a model.
    """,
    "consolidate": """
        Convert a checkpoint into a file or a folder. A checkpoint of strategy "freescale" is a file with whole tables, or a
        folder with one part for each rank. With --to weights, the file has only the weights for the plain module. It contains
        no optimizer states, loops and data.
    """,
    "changes": "Write the table rows that differ in a later checkpoint, for a server that has loaded the earlier one.",
}


def run(command: str, arguments: list[str]) -> None:
    parser = _new_parser(command)
    options = parser.parse_args(arguments)
    sources = [options.old, options.new] if command == "changes" else [options.checkpoint]
    try:
        checkpoints = [read_checkpoint(path, weights_only=not options.trust) for path in sources]
        if exists(options.target) and not options.force:
            advice = "" if command == "convert" else ", or --force to replace it"
            raise ValueError(f"{options.target} exists. Pass another target{advice}")
        first, last = checkpoints[0], checkpoints[-1]
        for name in first.get(CONVERTED, {}).get("left_out", ()):
            print(f"left out: {name}")
        print(_changes(first, last, options.target) if command == "changes" else _consolidate(first, options))
    except (OSError, ValueError, RuntimeError) as error:
        parser.exit(2, f"{command}: {error}\n")


def _new_parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"freescale {command}", description=_DESCRIPTIONS[command], allow_abbrev=False)
    add = parser.add_argument
    if command != "changes":
        add("checkpoint", type=_location, help="a file or folder")
        add("target", type=_location, help="file or folder to write")
    if command == "consolidate":
        add(
            "--to",
            choices=["weights", "single", "sharded"],
            default="weights",
            help="only weights, for module.load_state_dict(torch.load(file)), or the whole checkpoint as a file or a folder",
        )
    elif command == "changes":
        add("old", type=_location, help="the checkpoint that the server has loaded, a file or a folder")
        add("new", type=_location, help="a later checkpoint of the same module")
        add("target", type=_location, help="file to write: {name: {'ids': ..., 'rows': ...}}, for torch.load")
    if command == "convert":
        parser.set_defaults(to="single", force=False)
    else:
        add("--force", action="store_true", help="replace an existing target")
    add("--trust", action="store_true", help="allow the checkpoint to run code, which hyperparameters may require")
    return parser


def _location(text: str) -> Location:
    try:
        return located(text)
    except (ImportError, ValueError) as error:  # the file system is not installed, or it is not known
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def _consolidate(checkpoint: dict[str, Any], options: argparse.Namespace) -> str:
    target = options.target
    if options.to == "sharded":
        write_folder(checkpoint, target)
        return f"wrote the whole checkpoint to the folder {target}"
    if options.to == "single":
        write_file(checkpoint, target)
        return f"wrote the checkpoint to {target}, {_megabytes(target)}"
    weights = dict(checkpoint["state_dict"])
    write_file(weights, target)
    return f"wrote {len(weights)} tensors, {_megabytes(target)}, to {target}"


def _changes(old: dict[str, Any], new: dict[str, Any], target: Location) -> str:
    found = changed_rows(old, new)
    with replacing(target) as file:
        torch.save(found, file)
    rows = [f"{name}: {len(changed['ids'])} rows" for name, changed in found.items()]
    return "\n".join([*rows, f"wrote {target}, {_megabytes(target)}"])


def _megabytes(path: Location) -> str:
    return f"{size_of(path) / 1e6:.1f} MB"
