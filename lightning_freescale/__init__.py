"""FreeScale for PyTorch Lightning: distributed training of sequence recommenders with minimal bubbles.

Importing the package registers the strategy ``"freescale"``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_freescale.callbacks import BubbleProfiler
    from lightning_freescale.datamodule import FreeScaleDataModule
    from lightning_freescale.strategy.freescale import FreeScaleStrategy

__version__ = "0.1.0"
__all__ = ["BubbleProfiler", "FreeScaleDataModule", "FreeScaleStrategy"]

_HOMES = {
    "BubbleProfiler": "lightning_freescale.callbacks",
    "FreeScaleDataModule": "lightning_freescale.datamodule",
    "FreeScaleStrategy": "lightning_freescale.strategy.freescale",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


if find_spec("lightning") is not None:  # balance, comm and profiling serve plain PyTorch as well
    from lightning_freescale._lightning.loops import StrategyRegistry
    from lightning_freescale.strategy.freescale import FreeScaleStrategy as _Strategy

    _Strategy.register_strategies(StrategyRegistry)

if find_spec("torch") is not None:
    import lightning_freescale.comm  # noqa: F401 (registers the backend "freescale")
