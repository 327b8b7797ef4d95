"""``freescale simulate``: as ``python -m lightning_freescale.balance simulate``."""

from __future__ import annotations

from lightning_freescale.balance.__main__ import main


def run(command: str, arguments: list[str]) -> None:
    """Do it."""
    main([command, *arguments], "freescale")
