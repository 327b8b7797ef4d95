"""``freescale consolidate``: the weights of a checkpoint in a file that the plain module loads.

A checkpoint of strategy ``"freescale"`` is that of the unsharded module, tables whole. What is left out here is what only
training needs: optimizer states, loops and data.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor


def run(command: str, arguments: list[str]) -> None:
    """Do it; exits with 2 and says what is wrong if it cannot."""
    parser = argparse.ArgumentParser(f"freescale {command}", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a .ckpt of the Trainer")
    parser.add_argument("weights", type=Path, help="file to write, for module.load_state_dict(torch.load(file))")
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")
    parser.add_argument(
        "--trust", action="store_true", help="run whatever code the checkpoint holds, as loading hyperparameters may need"
    )
    options = parser.parse_args(arguments)
    try:
        weights = _weights(options.checkpoint, options.trust)
        if options.weights.exists() and not options.force:
            raise ValueError(f"{options.weights} is there already: pass another file, or --force")
        torch.save(weights, options.weights)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{command}: {error}\n")
    print(f"wrote {len(weights)} tensors, {sum(each.nbytes for each in weights.values()) / 1e6:.1f} MB, to {options.weights}")


def _weights(path: Path, trust: bool) -> dict[str, Tensor]:
    if path.is_dir():
        raise ValueError(f"{path} is a folder: pass a .ckpt file")
    try:
        # mapped: what is left out need not be read
        found: Any = torch.load(path, map_location="cpu", weights_only=not trust, mmap=True)
    except UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} holds more than tensors and numbers ({reason}): if you trust who wrote it, pass --trust"
        ) from error
    except RuntimeError as error:
        raise ValueError(f"{path} cannot be read ({error}): is it truncated, or no checkpoint?") from error
    if not isinstance(found, dict) or "state_dict" not in found:
        raise ValueError(f"{path} has no state_dict: pass a checkpoint that the Trainer has saved")
    return dict(found["state_dict"])
