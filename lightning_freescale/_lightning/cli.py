"""Lightning's command line; importing it needs ``jsonargparse``."""

from __future__ import annotations

from lightning.pytorch.cli import LightningArgumentParser as LightningArgumentParser
from lightning.pytorch.cli import LightningCLI as LightningCLI
