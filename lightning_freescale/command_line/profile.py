"""``freescale profile``: as ``python -m lightning_freescale.profiling``."""

from __future__ import annotations

from lightning_freescale.profiling.__main__ import main


def run(command: str, arguments: list[str]) -> None:
    """Do it."""
    main(arguments, f"freescale {command}")
