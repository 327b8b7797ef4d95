"""``freescale simulate``: as ``python -m lightning_freescale.balance simulate``."""

from __future__ import annotations

import argparse

from lightning_freescale.balance.__main__ import main
from lightning_freescale.balance.__main__ import new_parser as balance_parser


def run(command: str, arguments: list[str]) -> None:
    """Do it."""
    main([command, *arguments], "freescale")


def new_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of what follows the command."""
    commands = next(action.choices for action in balance_parser("freescale")._actions if action.dest == "command")
    parser: argparse.ArgumentParser = dict(commands or {})[command]
    return parser
