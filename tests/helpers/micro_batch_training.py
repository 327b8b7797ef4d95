"""Fits in micro-batches: the data and the model, and what there is to compare of a fit."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_freescale import FreeScaleDataModule
from tests.helpers.overlap_training import CountingModel
from tests.helpers.recommender import OPTIMIZERS, REPEATS, Samples, collate, trainer

SIZE = 90


def data(micro_batches: Any = 1, **options: Any) -> FreeScaleDataModule:
    """Histories of very different lengths; the last step is short."""
    samples = Samples(SIZE)
    given = {"batch_size": 8, "collate_fn": collate, "val_dataset": Samples(9, seed=1), **options}
    return FreeScaleDataModule(samples, samples.lengths, micro_batches=micro_batches, **{**REPEATS, **given})


class Model(CountingModel):
    """Logs in every way, and follows a learning rate that changes with every step."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.seen: list[Any] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        self.seen.append((self.trainer.global_step, batch_idx, len(batch["label"])))
        predicted = self.net(batch["features"])
        loss = nn.functional.mse_loss(predicted, batch["label"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", predicted.abs().max(), on_step=True, on_epoch=False, reduce_fx="max")
        return {"loss": loss, "error": (predicted - batch["label"]).abs().mean().detach()}

    def on_after_backward(self) -> None:
        self.log("total", torch.ones(()), on_step=False, on_epoch=True, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watching(Callback):
    def __init__(self) -> None:
        self.ended: list[Any] = []
        self.calls: Counter[str] = Counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        shown = {name: float(value) for name, value in trainer.callback_metrics.items() if not name.startswith("val")}
        loss, error = (float(outputs.get(name, 0)) for name in ("loss", "error"))
        self.ended.append((trainer.global_step, batch_idx, loss, error, shown))

    def on_before_zero_grad(self, *args: Any) -> None:
        self.calls["zero_grad"] += 1

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.calls["step"] += 1


def run(micro_batches: Any, strategy: Any, make: Any = Model, data_options: Any = None, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    module, watching = make(), Watching()
    callbacks = [watching, *options.pop("callbacks", [])]
    fitting = trainer(
        devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, callbacks=callbacks, **{"max_epochs": 2, **options}
    )
    fitting.fit(module, datamodule=data(micro_batches, **(data_options or {})))
    state = fitting._checkpoint_connector.dump_checkpoint(weights_only=False)
    return {
        "weights": state["state_dict"],
        "optimizer": state["optimizer_states"],
        "schedule": state["lr_schedulers"],
        "loops": state["loops"],
        "ended": watching.ended,
        "calls": watching.calls,
        "epoch": {name: float(value) for name, value in fitting.callback_metrics.items()},
        "seen": module.seen if isinstance(module, Model) else None,
        "statistics": module.statistics,
        "overlap": getattr(fitting.strategy, "overlap_report", None),
    }
