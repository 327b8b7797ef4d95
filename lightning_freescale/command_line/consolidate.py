"""``freescale consolidate``: what a checkpoint holds in one file, for the plain module, or in a folder.

A checkpoint of strategy ``"freescale"`` is that of the unsharded module, tables whole, or a folder of as many parts as it had
ranks. Weights alone leave out what only training needs: optimizer states, loops and data.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def run(command: str, arguments: list[str]) -> None:
    """Do it; exits with 2 and says what is wrong if it cannot."""
    from lightning_freescale.checkpoint.conversion import read_checkpoint

    parser = new_parser(command)
    options = parser.parse_args(arguments)
    try:
        checkpoint = read_checkpoint(options.checkpoint, weights_only=not options.trust)
        refuse_to_replace(options.target, options.force)
        print(_convert(checkpoint, options.target, options.to))
    except (OSError, ValueError, RuntimeError) as error:
        parser.exit(2, f"{command}: {error}\n")


def new_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of what follows the command."""
    parser = argparse.ArgumentParser(f"freescale {command}", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a .ckpt of the Trainer, a file or a folder")
    parser.add_argument("target", type=Path, help="file, or folder, to write")
    parser.add_argument(
        "--to",
        choices=["weights", "single", "sharded"],
        default="weights",
        help="weights alone, for module.load_state_dict(torch.load(file)); or the whole checkpoint in one file, or in a folder",
    )
    parser.add_argument("--force", action="store_true", help="replace the target if it is there")
    parser.add_argument(
        "--trust", action="store_true", help="run whatever code the checkpoint holds, as loading hyperparameters may need"
    )
    return parser


def refuse_to_replace(target: Path, force: bool) -> None:
    """Refuse a target that is there, by a ValueError, unless it may be replaced."""
    if target.exists() and not force:
        raise ValueError(f"{target} is there already: pass another one, or --force")


def _convert(checkpoint: dict[str, Any], target: Path, to: str) -> str:
    from lightning_freescale.checkpoint.conversion import write_file, write_folder

    if to == "sharded":
        write_folder(checkpoint, target)
        return f"wrote the whole checkpoint to the folder {target}"
    if to == "single":
        write_file(checkpoint, target)
        return f"wrote the whole checkpoint to {target}, {target.stat().st_size / 1e6:.1f} MB"
    weights = dict(checkpoint["state_dict"])
    write_file(weights, target)
    return f"wrote {len(weights)} tensors, {target.stat().st_size / 1e6:.1f} MB, to {target}"
