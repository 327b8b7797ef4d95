"""FreeScale for PyTorch Lightning: distributed training of sequence recommenders with minimal bubbles.

Importing the package makes the strategy name ``"freescale"`` known to Lightning and the backend ``"freescale"`` to
``torch.distributed``. It imports neither Lightning nor TorchRec: rooms that need them do, once they are used.
"""

from __future__ import annotations

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

_ROOM_OF = {
    "BalanceOptions": "lightning_freescale.data.options",
    "BubbleProfiler": "lightning_freescale.callbacks",
    "FreeScaleDataModule": "lightning_freescale.datamodule",
    "FreeScaleFabricStrategy": "lightning_freescale.fabric",
    "FreeScaleStrategy": "lightning_freescale.strategy",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ROOM_OF[name]), name)


def _freescale_strategy(**options: Any) -> FreeScaleStrategy:
    from lightning_freescale.strategy import FreeScaleStrategy

    return FreeScaleStrategy(**options)


def _freescale_fabric_strategy(**options: Any) -> FreeScaleFabricStrategy:
    from lightning_freescale.fabric import FreeScaleFabricStrategy

    return FreeScaleFabricStrategy(**options)


def _register(registry: Any, strategy: Any) -> None:
    description = "DDP for the dense part, TorchRec for the embedding tables, their exchange overlapped with compute"
    names: dict[str, dict[str, Any]] = {
        "freescale": {},
        "freescale_find_unused_parameters_true": {"find_unused_parameters": True},
    }
    for name, options in names.items():
        if name not in registry:
            registry.register(name, strategy, description=description, **options)


# Lightning may be imported before or after this package, or never: then nothing here waits for its import.
@wrapt.when_imported("lightning.pytorch.strategies")
def _register_strategy(strategies: Any) -> None:
    _register(strategies.StrategyRegistry, _freescale_strategy)


@wrapt.when_imported("lightning.fabric.strategies")
def _register_in_fabric(strategies: Any) -> None:
    _register(strategies.STRATEGY_REGISTRY, _freescale_fabric_strategy)


def _refuse_strategy(**options: Any) -> Any:
    raise ValueError(
        "strategy='freescale' is for the Trainer of lightning.pytorch and for lightning.fabric: import lightning as L, and use "
        "L.Trainer or L.Fabric. Those of pytorch_lightning and lightning_fabric have another Strategy class"
    )


@wrapt.when_imported("pytorch_lightning.strategies")
def _refuse_in_trainer(strategies: Any) -> None:
    strategies.StrategyRegistry.register("freescale", _refuse_strategy)


@wrapt.when_imported("lightning_fabric.strategies")
def _refuse_in_fabric(strategies: Any) -> None:
    strategies.STRATEGY_REGISTRY.register("freescale", _refuse_strategy)


if find_spec("torch") is not None:
    import lightning_freescale.comm  # noqa: F401 (registers the backend)
    from lightning_freescale._torchrec import warn_of_fbgemm_for_cuda

    warn_of_fbgemm_for_cuda()
