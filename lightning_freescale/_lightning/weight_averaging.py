"""Lightning's callbacks that average weights, for a module with sharded tables."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_freescale._runtime.attributes import replaced

_KIND: Any = getattr(callbacks, "WeightAveraging", ())  # some versions do not have it


def averaging_callbacks(trainer: Trainer) -> list[Any]:
    """Return the callbacks of a Trainer that average weights after steps or epochs."""
    return [callback for callback in trainer.callbacks if isinstance(callback, _KIND)]  # type: ignore[attr-defined]


def postpone_copies(trainer: Trainer) -> None:
    """Prevent these callbacks from copying a module in their ``setup`` that is sharded later.

    The copy would contain whole tables, including tables on the meta device.
    """
    for callback in averaging_callbacks(trainer):
        vars(callback)["setup"] = partial(_set_up, callback)


def _set_up(callback: Any, trainer: Trainer, module: LightningModule, stage: str) -> None:
    def copied(memo: dict[int, Any]) -> nn.Module:
        del vars(module)["__deepcopy__"]
        # evaluated here, because the callback first calls configure_model, which may create the tables
        return nn.Module() if trainer.strategy.restore_checkpoint_after_setup else deepcopy(module, memo)

    del vars(callback)["setup"]
    with replaced(module, {"__deepcopy__": copied}):
        callback.setup(trainer, module, stage)


def average_shards(callback: Any, averages: Callable[[torch.device], Any]) -> None:
    """Make a callback with a postponed copy average the dense parameters and shards of this rank, in and after this fit.

    ``averages`` creates a :class:`lightning_freescale.strategy.weight_averaging.ShardAverages` on a device.
    """
    average = callback._average_model
    own = averages(average.n_averaged.device)
    average.module = own.module

    def update(module: nn.Module) -> None:
        own.strategy.drain()
        AveragedModel.update_parameters(average, module)

    def write(method: Callable[..., None], module: LightningModule) -> None:
        with own.strategy.writing_tables():
            method(module)

    def save(method: Callable[..., None], trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        method(trainer, module, checkpoint)
        checkpoint["state_dict"] = own.unsharded(checkpoint["state_dict"])

    def load(method: Callable[..., None], trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        with own.strategy.writing_tables():
            method(trainer, module, own.load(checkpoint))

    def while_averaging(method: Callable[..., None], change: Callable[..., None], *args: Any) -> None:
        # a later fit, perhaps with another strategy, creates another average
        if callback._average_model is average:
            change(partial(method, callback), *args)
        else:
            method(callback, *args)

    vars(average)["update_parameters"] = update
    changed: dict[str, Callable[..., None]] = {
        "_swap_models": write,
        "_copy_average_to_current": write,
        "on_save_checkpoint": save,
        "on_load_checkpoint": load,
    }
    for name, change in changed.items():
        vars(callback)[name] = partial(while_averaging, getattr(type(callback), name), change)
