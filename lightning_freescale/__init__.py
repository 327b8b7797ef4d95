"""FreeScale for PyTorch Lightning: distributed training of sequence recommenders with minimal bubbles.

Importing the package registers the strategy ``"freescale"`` with Lightning and the backend ``"freescale"`` with
``torch.distributed``. It imports neither Lightning nor TorchRec. Subpackages that need them import them when they are used.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import wrapt

from lightning_freescale._version import __version__ as __version__

if TYPE_CHECKING:
    from lightning_freescale.callbacks import BubbleProfiler
    from lightning_freescale.data.options import BalanceOptions
    from lightning_freescale.datamodule import FreeScaleDataModule
    from lightning_freescale.fabric import FreeScaleFabricStrategy
    from lightning_freescale.strategy import FreeScaleStrategy

__all__ = [
    "BalanceOptions",
    "BubbleProfiler",
    "FreeScaleDataModule",
    "FreeScaleFabricStrategy",
    "FreeScaleStrategy",
]

_MODULE_OF = {
    "BalanceOptions": "lightning_freescale.data.options",
    "BubbleProfiler": "lightning_freescale.callbacks",
    "FreeScaleDataModule": "lightning_freescale.datamodule",
    "FreeScaleFabricStrategy": "lightning_freescale.fabric",
    "FreeScaleStrategy": "lightning_freescale.strategy",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def _new_strategy(class_name: str, **options: Any) -> Any:
    return __getattr__(class_name)(**options)


def _register(registry: Any, class_name: str) -> None:
    description = "DDP for the dense part, TorchRec for embedding tables, with their exchange overlapped with compute"
    for suffix, options in (("", {}), ("_find_unused_parameters_true", {"find_unused_parameters": True})):
        if (name := f"freescale{suffix}") not in registry:
            registry.register(name, partial(_new_strategy, class_name), description=description, **options)


# Lightning may be imported before or after this package, or never.
@wrapt.when_imported("lightning.pytorch.strategies")
def _register_strategy(strategies: Any) -> None:
    _register(strategies.StrategyRegistry, "FreeScaleStrategy")


@wrapt.when_imported("lightning.fabric.strategies")
def _register_in_fabric(strategies: Any) -> None:
    _register(strategies.STRATEGY_REGISTRY, "FreeScaleFabricStrategy")


def _refuse_strategy(**options: Any) -> Any:
    raise ValueError(
        "strategy='freescale' does not support pytorch_lightning and lightning_fabric, which have another Strategy class. Use "
        "import lightning as L with L.Trainer or L.Fabric"
    )


@wrapt.when_imported("pytorch_lightning.strategies")
def _refuse_in_trainer(strategies: Any) -> None:
    strategies.StrategyRegistry.register("freescale", _refuse_strategy)


@wrapt.when_imported("lightning_fabric.strategies")
def _refuse_in_fabric(strategies: Any) -> None:
    strategies.STRATEGY_REGISTRY.register("freescale", _refuse_strategy)


if find_spec("torch") is not None:
    import lightning_freescale.comm  # noqa: F401 (registers the backend)
    from lightning_freescale._torchrec import TorchRecFinder

    sys.meta_path.insert(0, TorchRecFinder())
