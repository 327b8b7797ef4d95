"""Lightning's callbacks that average weights, over a module of whose tables this rank holds some rows only."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_freescale.profiling.recording.observed_work import replaced

_KIND: Any = getattr(callbacks, "WeightAveraging", ())  # not in every version


def averaging_callbacks(trainer: Trainer) -> list[Any]:
    """Return the callbacks of a Trainer that average weights after steps or epochs."""
    return [callback for callback in trainer.callbacks if isinstance(callback, _KIND)]  # type: ignore[attr-defined]


def postpone_copies(trainer: Trainer) -> None:
    """Have these callbacks copy no module that is going to be sharded: they do so in ``setup``, before it is.

    A copy would have whole tables, also those that have no memory yet.
    """
    for callback in averaging_callbacks(trainer):
        vars(callback)["setup"] = partial(_set_up, callback)


def _set_up(callback: Any, trainer: Trainer, module: LightningModule, stage: str) -> None:
    def copied(memo: dict[int, Any]) -> nn.Module:
        del vars(module)["__deepcopy__"]
        # asked here: configure_model, which the callback calls before, may make the tables
        return nn.Module() if trainer.strategy.restore_checkpoint_after_setup else deepcopy(module, memo)

    del vars(callback)["setup"]
    with replaced(module, {"__deepcopy__": copied}):
        callback.setup(trainer, module, stage)


def average_shards(callback: Any, averages: Callable[[torch.device], Any]) -> None:
    """Have a callback, whose copy was postponed, average what this rank holds, in this fit and after it.

    Args:
        callback: one of :func:`averaging_callbacks`.
        averages: makes a :class:`lightning_freescale.strategy.weight_averaging.ShardAverages` on a device.
    """
    average = callback._average_model
    own = averages(average.n_averaged.device)
    average.module = own.module

    def update(module: nn.Module) -> None:
        own.drain()
        AveragedModel.update_parameters(average, module)

    def write(method: Callable[..., None], module: LightningModule) -> None:
        with own.writing_tables():
            method(module)

    def save(method: Callable[..., None], trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        method(trainer, module, checkpoint)
        checkpoint["state_dict"] = own.unsharded(checkpoint["state_dict"])

    def load(method: Callable[..., None], trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        with own.writing_tables():
            method(trainer, module, own.load(checkpoint))

    vars(average)["update_parameters"] = update
    changed: dict[str, Callable[..., None]] = {
        "_swap_models": write,
        "_copy_average_to_current": write,
        "on_save_checkpoint": save,
        "on_load_checkpoint": load,
    }
    for name, change in changed.items():
        vars(callback)[name] = partial(_while_averaging, callback, average, getattr(type(callback), name), change)


def _while_averaging(
    callback: Any, average: AveragedModel, method: Callable[..., None], change: Callable[..., None], *args: Any
) -> None:
    # a later fit, maybe under another strategy, makes another average
    if callback._average_model is average:
        change(partial(method, callback), *args)
    else:
        method(callback, *args)
