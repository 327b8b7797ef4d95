"""``freescale profile``: as ``python -m lightning_freescale.profiling``, and ``run`` as ``lightning_freescale.profile``."""

from __future__ import annotations

import argparse

from lightning_freescale.profile.__main__ import DESCRIPTION, add_options
from lightning_freescale.profile.__main__ import run as run_script
from lightning_freescale.profiling.__main__ import new_parser as profiling_parser
from lightning_freescale.profiling.__main__ import run as run_command


def run(command: str, arguments: list[str]) -> None:
    """Do it."""
    run_command(new_parser(command), arguments)


def new_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of what follows the command."""
    parser = profiling_parser(f"freescale {command}")
    parser.description = "Profile a Lightning script; show bubble reports, compare them, make a page of them."
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    example = f"example: freescale {command} run --dirpath bubbles train.py --lr 0.1"
    script = commands.add_parser("run", help="run a Lightning script and profile it", description=DESCRIPTION, epilog=example)
    add_options(script)
    script.set_defaults(run=run_script)
    return parser
