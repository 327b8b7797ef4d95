"""``freescale changes``: the rows of tables that a later checkpoint has otherwise, for who serves the earlier one."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from lightning_freescale.command_line.consolidate import refuse_to_replace


def run(command: str, arguments: list[str]) -> None:
    """Do it; exits with 2 and says what is wrong if it cannot."""
    from lightning_freescale.checkpoint.conversion import changed_rows, read_checkpoint

    parser = new_parser(command)
    options = parser.parse_args(arguments)
    try:
        refuse_to_replace(options.target, options.force)
        old, new = (read_checkpoint(path, weights_only=not options.trust) for path in (options.old, options.new))
        found = changed_rows(old, new)
        torch.save(found, options.target)
    except (OSError, ValueError, RuntimeError) as error:
        parser.exit(2, f"{command}: {error}\n")
    for name, changed in found.items():
        print(f"{name}: {len(changed['ids'])} rows")
    print(f"wrote {options.target}, {options.target.stat().st_size / 1e6:.1f} MB")


def new_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of what follows the command."""
    parser = argparse.ArgumentParser(f"freescale {command}", description=__doc__)
    parser.add_argument("old", type=Path, help="the checkpoint that is served, a file or a folder")
    parser.add_argument("new", type=Path, help="a later one of the same module")
    parser.add_argument("target", type=Path, help="file to write: {name: {'ids': ..., 'rows': ...}}, for torch.load")
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")
    parser.add_argument("--trust", action="store_true", help="run whatever code the checkpoints hold")
    return parser
