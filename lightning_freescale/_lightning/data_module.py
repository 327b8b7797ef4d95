"""A LightningDataModule with what the package asks of the Trainer that it belongs to."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_freescale._lightning.ddp import process_group_timeout
from lightning_freescale._lightning.loops import ended_inside_epoch, reload_train_loader


class TrainerDataModule(LightningDataModule):
    """A data module that also works without a Trainer, as that of a single rank."""

    def __init__(self) -> None:
        super().__init__()
        self._reload_every: int | None = None  # the Trainer's own setting, while it is changed

    @property
    def trainer(self) -> Trainer | None:
        """The Trainer that the data module is given to; it sets this before it does anything else with it."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        if type(trainer).__module__.startswith("pytorch_lightning."):
            raise TypeError(
                "FreeScaleDataModule is for the Trainer of lightning.pytorch, not for that of pytorch_lightning, which takes "
                "other classes for its own: import lightning as L and use L.Trainer"
            )
        self._trainer = trainer

    @property
    def _on_gpu(self) -> bool:
        """Whether batches go to a GPU."""
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    @property
    def _weighs_loss(self) -> bool:
        """Whether the strategy weighs the losses of the ranks."""
        return self.trainer is not None and getattr(self.trainer.strategy, "weighs_loss", False)

    @property
    def _group_timeout(self) -> timedelta | None:
        """The timeout of the strategy's process groups."""
        return None if self.trainer is None else process_group_timeout(self.trainer.strategy)

    def _rank_and_world_size(self) -> tuple[int, int]:
        """Return the own rank, and the number of ranks."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    @property
    def _batches_per_optimizer_step(self) -> int:
        """How many batches make an optimizer step in all epochs; 1 where that changes."""
        if self.trainer is None:
            return 1
        callbacks = getattr(self.trainer, "callbacks", [])
        schedules = [each.scheduling for each in callbacks if isinstance(each, GradientAccumulationScheduler)]
        if not schedules:
            return self.trainer.accumulate_grad_batches
        # the Trainer knows these only when its first epoch begins, after the training loader is made
        scheduled = {each for schedule in schedules for each in schedule.values()}
        return scheduled.pop() if len(scheduled) == 1 else 1

    def _training_position(self) -> tuple[int, int]:
        """Return the epoch in which training is, and how many of its batches are processed."""
        trainer = cast(Trainer, self.trainer)
        loop: Any = trainer.fit_loop
        epochs, cut = loop.epoch_progress.current, ended_inside_epoch(trainer)
        inside = cut or epochs.ready > epochs.processed  # otherwise the batches counted are those of the epoch before
        return epochs.processed - cut, loop.epoch_loop.batch_progress.current.processed if inside else 0

    def _reload_now(self) -> None:
        """Have the Trainer ask for the training loader again if it has one."""
        if self.trainer is not None:
            reload_train_loader(self.trainer)

    def _reload_next_epoch(self, needed: bool) -> None:
        """Have the Trainer ask for the training loader again in the next epoch, or go back to its own setting.

        Lightning asks for loaders once per fit. An epoch that was cut anew has another number of steps than the next one.
        """
        trainer: Any = self.trainer
        if needed and trainer is not None and self._reload_every is None:
            self._reload_every = trainer.reload_dataloaders_every_n_epochs
            trainer.reload_dataloaders_every_n_epochs = 1
        elif not needed and self._reload_every is not None:
            trainer.reload_dataloaders_every_n_epochs = self._reload_every
            self._reload_every = None
