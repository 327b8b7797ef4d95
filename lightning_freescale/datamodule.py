"""FreeScaleDataModule: balanced batches from any map-style data set or stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset, IterableDataset

from lightning_freescale._lightning.loops import LightningDataModule, TrainerFn, rank_zero_info, reload_train_loader
from lightning_freescale.balance import BalancedSampler
from lightning_freescale.data.iterable import IterableData
from lightning_freescale.data.loader import BalancedDataLoader
from lightning_freescale.data.map_style import MapStyleData
from lightning_freescale.data.streaming import BalancedStreamLoader
from lightning_freescale.data.validation import LOADING, LossReduction, size_of
from lightning_freescale.strategy.validation import refuse_trainer


class FreeScaleDataModule(LightningDataModule):
    """Loads training batches whose samples are assigned to the ranks so that all finish together.

    Args:
        dataset: training data set: map-style, or an ``IterableDataset`` that yields this rank's own stream.
        lengths: history length of every training sample, shape ``[samples]``; for a stream a function of one sample.
        batch_size: samples per rank and step.
        cost: predicted compute time: a function of the array of lengths (and of ``unique_ids``, if given); or instead of
            ``lengths`` a function of one sample (reads a map-style data set once) or the costs themselves, shape
            ``[samples]``. ``CostModel()`` of the lengths by default.
        unique_ids: number of unique ids in every training sample, shape ``[samples]``, if they cost time.
        calibrate: fit a :class:`~lightning_freescale.balance.CostModel` to the compute times that the strategy measures, and
            plan by it from the next epoch on if that lowers the imbalance by more than 5 %. The plan, not the gradient, then
            depends on the clock. Every fifth of the first 50 steps is dealt as drawn, to tell the coefficients apart.
        slow_ranks: what to do, while calibrating, about ranks that are slow for reasons the costs do not explain:
            ``"report"`` them, or ``"rebalance"``: give them less work from the next epoch on.
        collate_fn: turns the list of samples of a step into a batch; torch's default if not given.
        validate, test, predict: map-style data sets for the other stages, loaded in order, every sample once.
        balance: assign samples by cost; ``False`` deals them as drawn. The samples of a step are the same either way.
        mode, count_slack, max_tokens_per_rank, rank_speeds: as in :func:`lightning_freescale.balance.assign`.
        tokens: tokens of every sample, shape ``[samples]``; ``lengths`` if not given.
        keep_together: group of every sample, shape ``[samples]``; samples of a group that share a step go to one rank.
        outlier_window: exchange samples between this many consecutive steps so that those that dominate a step come together.
            Not gradient-identical: it changes which samples share a step. 1 for no exchange.
        exchange, pool_batches, max_age: for a stream, as in :class:`lightning_freescale.data.BalancedStreamLoader`.
        loss_reduction: what the loss that ``training_step`` returns averages over: the rank's samples, or its targets. The
            strategy scales it so that the gradient is that of the mean over the global batch, also when ranks hold unequal
            numbers. ``"sum"`` gives the gradient of the sum over the global batch. ``"unweighted"`` leaves the losses as
            they are, for strategies that weigh nothing.
        targets: prediction targets per sample for ``"target_mean"``, shape ``[samples]``, for a stream a function of one
            sample; ``lengths`` if not given.
        drop_last: leave out an incomplete last step.
        shuffle: draw a new order every epoch; a stream comes in its own.
        seed: seeds the order.
        num_workers, pin_memory, persistent_workers: as in ``torch.utils.data.DataLoader``.

    Attributes:
        train: the training data: how it is planned, and where a run stands in it.
        histories: from :meth:`from_interactions`, the maps from dense ids to the file's.

    Raises:
        ValueError: an argument does not fit; names it, its value and the fix.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        lengths: ArrayLike | Callable[[Any], float] | None = None,
        batch_size: int = 32,
        *,
        cost: Callable[..., Any] | Sequence[float] | NDArray[Any] | None = None,
        unique_ids: ArrayLike | None = None,
        calibrate: bool = False,
        slow_ranks: Literal["report", "rebalance"] = "report",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        validate: Dataset[Any] | None = None,
        test: Dataset[Any] | None = None,
        predict: Dataset[Any] | None = None,
        balance: bool = True,
        mode: Literal["fixed", "slack", "free", "zigzag"] = "fixed",
        count_slack: float = 0.25,
        max_tokens_per_rank: float | None = None,
        rank_speeds: Sequence[float] | None = None,
        tokens: ArrayLike | None = None,
        keep_together: ArrayLike | None = None,
        outlier_window: int = 1,
        loss_reduction: LossReduction = "sample_mean",
        targets: ArrayLike | Callable[[Any], float] | None = None,
        exchange: Literal["none", "samples"] = "samples",
        pool_batches: int = 8,
        max_age: int | None = 32,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"FreeScaleDataModule(batch_size={batch_size!r}): pass the samples per rank, at least 1")
        if slow_ranks not in ("report", "rebalance"):
            raise ValueError(f"FreeScaleDataModule(slow_ranks={slow_ranks!r}): choose 'report' or 'rebalance'")
        if slow_ranks == "rebalance" and not calibrate:
            raise ValueError("FreeScaleDataModule(slow_ranks='rebalance') needs calibrate=True, which finds the slow ranks")
        if calibrate and (lengths is None or not balance):
            raise ValueError(
                f"FreeScaleDataModule(calibrate=True, balance={balance!r}) fits the cost to the lengths and plans by it: pass "
                "lengths= and leave balance as it is"
            )
        self.batch_size, self.mode, self.loss_reduction = batch_size, mode, loss_reduction
        self.calibrate, self.slow_ranks = calibrate, slow_ranks
        self.stages = {"validate": validate, "test": test, "predict": predict}
        self.feature_rows: dict[str, int] = {}
        self.histories: Any = None
        self._loader_options = {name: given[name] for name in LOADING}
        self._reload_every: int | None = None
        self.train = (
            IterableData.of(dataset, given) if isinstance(dataset, IterableDataset) else MapStyleData.of(dataset, given)
        )

    @classmethod
    def from_interactions(
        cls,
        source: str | Path | Any,
        *,
        user: str = "user",
        item: str = "item",
        time: str = "time",
        order: Literal["given", "sort"] = "given",
        ties: Literal["error", "keep"] = "error",
        max_length: int | None = None,
        batch_size: int = 32,
        loss_reduction: LossReduction = "target_mean",
        **options: Any,
    ) -> FreeScaleDataModule:
        """Histories from a CSV or Parquet file (or a pyarrow table), split leave-one-out.

        Each user's last item is for test, the one before for validation, the rest for training. Batches are those of
        :func:`lightning_freescale.data.collate_histories`.

        ``source`` to ``ties`` are the arguments of :func:`lightning_freescale.data.read_interactions`, the others those of
        :class:`FreeScaleDataModule`. ``max_length`` keeps the last so many items of a history; it is not gradient-identical,
        as it drops targets.
        """
        from lightning_freescale.data import HistoryDataset, collate_histories, read_interactions

        histories = read_interactions(source, user=user, item=item, time=time, order=order, ties=ties)
        users = np.flatnonzero(histories.lengths >= HistoryDataset.min_interactions)
        short = len(histories.lengths) - len(users)
        if short:
            rank_zero_info(f"{short} users have fewer than {HistoryDataset.min_interactions} interactions and are left out")
        if not len(users):
            name = source if isinstance(source, (str, Path)) else "the table"
            raise ValueError(f"no user of {name} has {HistoryDataset.min_interactions} interactions or more")
        train = HistoryDataset(histories, users, "train", max_length)
        module = cls(
            train,
            train.lengths,
            batch_size,
            collate_fn=collate_histories,
            validate=HistoryDataset(histories, users, "validate", max_length),
            test=HistoryDataset(histories, users, "test", max_length),
            predict=HistoryDataset(histories, users, "predict", max_length),
            loss_reduction=loss_reduction,
            **options,
        )
        module.histories = histories
        module.feature_rows = {"item": histories.num_items}
        return module

    # -- loaders

    def setup(self, stage: str) -> None:
        """Forget the previous fit's progress; a checkpoint brings its own afterwards."""
        if stage == "fit":
            self.train.forget()
            self._reload_every = None  # of a Trainer whose fit failed

    def teardown(self, stage: str) -> None:
        """Leave nothing behind: no process group, no setting of the Trainer."""
        if isinstance(self.train, IterableData):
            self.train.close()
        self._reload_next_epoch(False)

    def train_dataloader(self) -> BalancedDataLoader | BalancedStreamLoader:
        """The balanced loader of this rank."""
        if self.trainer is not None:
            refuse_trainer(self.trainer, self.calibrate, self.loss_reduction, self.mode)
        epoch = 0 if self.trainer is None else self.trainer.current_epoch
        if isinstance(self.train, IterableData):
            timeout = None if self.trainer is None else getattr(self.trainer.strategy, "_timeout", None)
            return self.train.loader(*self._world(), epoch, timeout)
        loader = self.train.loader(*self._world(), epoch)
        self._reload_next_epoch(self.train.epoch_is_cut_anew)
        return loader

    def val_dataloader(self) -> BalancedDataLoader | list[Any]:
        """Every validation sample once, in order."""
        return self._stage_loader("validate")

    def test_dataloader(self) -> BalancedDataLoader | list[Any]:
        """Every test sample once, in order."""
        return self._stage_loader("test")

    def predict_dataloader(self) -> BalancedDataLoader | list[Any]:
        """Every sample to predict once, in order; each rank returns its own part."""
        return self._stage_loader("predict")

    def sampler(self, rank: int, world_size: int) -> BalancedSampler:
        """The training plan of one of ``world_size`` ranks, for a map-style data set."""
        if isinstance(self.train, IterableData):
            raise ValueError("the steps of a stream cannot be planned before its samples have arrived")
        return self.train.sampler(rank, world_size)

    # -- resume

    def state_dict(self) -> dict[str, Any]:
        """Where training stands in its data; the same on every rank. Collective for streams."""
        loop: Any = cast(Any, self.trainer).fit_loop
        epochs = loop.epoch_progress.current
        inside = epochs.ready > epochs.processed  # else the batches counted are those of the epoch before
        batches = loop.epoch_loop.batch_progress.current.processed if inside else 0
        return self.train.state_dict(epochs.processed, batches, self._world()[1])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the samples that the checkpoint's run has consumed."""
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return  # validation and test load the weights of a checkpoint, not its place in the training data
        self.train.load_state_dict(state, *self._world())
        if self.trainer is not None:
            reload_train_loader(self.trainer)  # somebody may have asked for it before the checkpoint was read

    def _reload_next_epoch(self, needed: bool) -> None:
        """An epoch that was cut anew has another length than the next one: Lightning has to ask for the loader again."""
        trainer: Any = self.trainer
        if needed and trainer is not None and self._reload_every is None:
            self._reload_every, trainer.reload_dataloaders_every_n_epochs = trainer.reload_dataloaders_every_n_epochs, 1
        elif not needed and self._reload_every is not None:
            trainer.reload_dataloaders_every_n_epochs, self._reload_every = self._reload_every, None

    def _world(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _stage_loader(self, stage: str) -> BalancedDataLoader | list[Any]:
        dataset = self.stages[stage]
        if dataset is None:
            return []
        rank, world_size = self._world()
        costs = np.zeros(size_of(dataset, f"{stage}="))
        sampler = BalancedSampler(costs, self.batch_size, num_replicas=world_size, rank=rank, shuffle=False, balance=False)
        return BalancedDataLoader.of(dataset, sampler, **self._loader_options)
