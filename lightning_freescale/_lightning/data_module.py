"""Base class of data modules that need information about their Trainer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_freescale._lightning.ddp import process_group_timeout
from lightning_freescale._lightning.loops import ended_inside_epoch, reload_train_loader


class TrainerDataModule(LightningDataModule):
    """A data module that also works without a Trainer, like that of a single rank."""

    def __init__(self) -> None:
        super().__init__()
        self._reload_every: int | None = None  # the Trainer's own setting, while it is changed

    @property
    def trainer(self) -> Trainer | None:
        """The Trainer of the data module. The Trainer sets this attribute first."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        if type(trainer).__module__.startswith("pytorch_lightning."):
            raise TypeError(
                "FreeScaleDataModule works only with the Trainer of lightning.pytorch, not with that of pytorch_lightning. Use "
                "import lightning as L and L.Trainer"
            )
        self._trainer = trainer

    @property
    def _on_gpu(self) -> bool:
        """Whether batches are moved to a GPU."""
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    @property
    def _weighs_loss(self) -> bool:
        return self.trainer is not None and getattr(self.trainer.strategy, "weighs_loss", False)

    @property
    def _group_timeout(self) -> timedelta | None:
        return None if self.trainer is None else process_group_timeout(self.trainer.strategy)

    def _rank_and_world_size(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    @property
    def _batches_per_optimizer_step(self) -> int:
        """The number of batches per optimizer step; 1 if it changes between epochs."""
        if self.trainer is None:
            return 1
        callbacks = getattr(self.trainer, "callbacks", [])
        schedules = [each.scheduling for each in callbacks if isinstance(each, GradientAccumulationScheduler)]
        if not schedules:
            return self.trainer.accumulate_grad_batches
        # the Trainer reads them when its first epoch begins, after the training loader is created
        scheduled = {each for schedule in schedules for each in schedule.values()}
        return scheduled.pop() if len(scheduled) == 1 else 1

    def _training_position(self) -> tuple[int, int]:
        """Return the current epoch, and the number of its batches that are processed."""
        trainer = cast(Trainer, self.trainer)
        loop: Any = trainer.fit_loop
        epochs, cut = loop.epoch_progress.current, ended_inside_epoch(trainer)
        batches = loop.epoch_loop.batch_progress
        if batches.is_last_batch and batches.current.completed < batches.current.processed:  # its on_train_batch_end
            return epochs.processed + 1, 0
        inside = cut or epochs.ready > epochs.processed  # otherwise the counted batches belong to the previous epoch
        return epochs.processed - cut, batches.current.processed if inside else 0

    def _reload_now(self) -> None:
        """Make the Trainer read the training loader again if it has one."""
        if self.trainer is not None:
            reload_train_loader(self.trainer)

    def _reload_next_epoch(self, needed: bool) -> None:
        """Make the Trainer read the training loader again in the next epoch if ``needed``, or restore its own setting.

        Lightning reads loaders once per fit. An epoch whose remaining steps were planned again has a different length from the
        next one.
        """
        trainer: Any = self.trainer
        if needed and trainer is not None and self._reload_every is None:
            self._reload_every = trainer.reload_dataloaders_every_n_epochs
            trainer.reload_dataloaders_every_n_epochs = 1
        elif not needed and self._reload_every is not None:
            trainer.reload_dataloaders_every_n_epochs = self._reload_every
            self._reload_every = None
