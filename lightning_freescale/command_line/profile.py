"""``freescale profile``: as ``python -m lightning_freescale.profiling``."""

from __future__ import annotations

import argparse

from lightning_freescale.profiling.__main__ import main
from lightning_freescale.profiling.__main__ import new_parser as profiling_parser


def run(command: str, arguments: list[str]) -> None:
    """Do it."""
    main(arguments, f"freescale {command}")


def new_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of what follows the command."""
    return profiling_parser(f"freescale {command}")
