"""``python -m lightning_freescale``: the command ``freescale``."""

from __future__ import annotations

from lightning_freescale.command_line.main import main

if __name__ == "__main__":
    main()
