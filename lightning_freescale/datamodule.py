"""FreeScaleDataModule: balanced batches from any map-style data set or stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset, IterableDataset

from lightning_freescale._lightning.data_module import TrainerDataModule
from lightning_freescale._lightning.loops import PredictionLoader, Trainer, TrainerFn, rank_zero_info, rank_zero_warn
from lightning_freescale.balance import BalancedSampler, BlockShuffle
from lightning_freescale.data.balanced_loader import BalancedDataLoader
from lightning_freescale.data.evaluation_order import EvaluationSampler
from lightning_freescale.data.interactions import (
    HistoryDataset,
    Split,
    collate_histories,
    leave_one_out,
    read_interactions,
)
from lightning_freescale.data.iterable import IterableData
from lightning_freescale.data.map_style import MapStyleData, describe_budget
from lightning_freescale.data.options import BalanceOptions, DataArguments
from lightning_freescale.data.parquet import ParquetHistories, ParquetHistoryDataset
from lightning_freescale.data.streaming import BalancedStreamLoader
from lightning_freescale.data.streaming.reader import unusable_state
from lightning_freescale.data.validation import LossReduction, check_loader_options, is_stream


class FreeScaleDataModule(TrainerDataModule):
    """Loads training batches whose samples are assigned to the ranks so that all ranks finish together.

    Args:
        train_dataset: map-style, or an ``IterableDataset`` that yields this rank's own stream. The ``StreamingDataset`` of
            litdata and of MosaicML's streaming is read by the numbers of its samples, as a map-style data set.
        lengths: history length of every training sample, shape ``[samples]``, or a function of one sample. A stream needs a
            function; a map-style data set is read once for it, on every rank.
        batch_size: samples per rank and step; with ``batch_tokens`` only in validation, test and predict.
        cost: predicted compute time of a sample: a function of the array of lengths, the costs themselves, shape ``[samples]``,
            or without ``lengths`` a function of one sample. ``"auto"`` begins with ``CostModel()`` of the lengths. On several
            ranks under strategy ``"freescale"`` the costs are then fitted to measured compute times. From epoch 1 on the plan
            depends on the clock, and **two runs agree to rounding, not to the bit**. Runs **repeat to the bit** with
            ``balance=BalanceOptions(calibrate=False)`` or another cost. Streams are not measured.
        collate_fn: turns the list of samples of a step into a batch; torch's default if not given.
        val_dataset, test_dataset, predict_dataset: map-style; every sample is loaded once, in order. Where batches are padded
            to their longest sample, and the data set has an attribute ``lengths`` of shape ``[samples]``, samples of similar
            length share a batch in validation and test. Batches keep their number and sizes, so means over samples change by
            rounding alone. Log a mean over targets with ``batch_size=`` the number of targets.
        balance: whether samples are assigned by cost; :class:`~lightning_freescale.data.BalanceOptions` say how. ``False``
            leaves them on the ranks as drawn. The samples of a step are the same either way.
        loss_reduction: what the loss that ``training_step`` returns averages over: the rank's samples, or its targets. The
            strategy scales it so that the gradient is that of the mean over the global batch, also when ranks hold unequal
            numbers. ``"sum"`` gives the gradient of the sum over the global batch. ``"unweighted"`` leaves the losses as
            they are, for strategies that weigh nothing.
        target_counts: prediction targets per sample for ``"target_mean"``, shape ``[samples]``, or a function of one sample
            as ``lengths``; ``lengths`` if not given.
        batch_tokens: the most tokens (``lengths``, or ``BalanceOptions(tokens=...)``) that a rank may hold in a training
            step, instead of ``batch_size``; see :class:`~lightning_freescale.balance.Budget`. All steps have the same number of
            samples, to one, and all ranks and epochs the same number of steps. ``BalanceOptions(tokens=costs)`` limits the
            cost of a step instead. Needs a map-style data set.
        micro_batches: the number of parts of about equal cost into which each rank's batch of a step is cut. The parts are
            computed one after the other with one update of the tables, which hides more of the exchange and takes less memory.
            The gradient is that of the undivided step, to rounding, for losses that are a mean (or sum) over samples or
            targets. **Losses that look across the samples of a batch**, such as in-batch negatives, and batch normalization
            see a part only: leave it at 1 for those. ``"auto"`` measures the divisors of ``batch_size`` up to 8 and keeps the
            quickest. Needs strategy ``"freescale"``. Log sums on steps with ``reduce_fx="sum"``.
        drop_last: leave out an incomplete last step.
        shuffle: draw a new order every epoch, of all samples or as :class:`~lightning_freescale.balance.BlockShuffle` says; a
            stream keeps its own order.
        seed: seeds the order.
        **loader_options: further options of ``torch.utils.data.DataLoader``, such as ``num_workers`` and ``pin_memory`` (by
            default where the Trainer's device is a GPU); for an ``IterableDataset`` only ``num_workers``.

    Attributes:
        train: the training data: how it is planned, and where a run stands in it.
        histories: from :meth:`from_interactions`, the maps from dense ids to the file's.

    Raises:
        ValueError: an argument does not fit; names it, its value and the fix.
        TypeError: there is no such argument.
    """

    def __init__(
        self,
        train_dataset: Dataset[Any],
        lengths: ArrayLike | Callable[[Any], float] | None = None,
        batch_size: int = 32,
        *,
        cost: Callable[..., Any] | Sequence[float] | NDArray[Any] | Literal["auto"] = "auto",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
        test_dataset: Dataset[Any] | None = None,
        predict_dataset: Dataset[Any] | None = None,
        balance: bool | BalanceOptions = True,
        loss_reduction: LossReduction = "sample_mean",
        target_counts: ArrayLike | Callable[[Any], float] | None = None,
        batch_tokens: float | None = None,
        micro_batches: int | Literal["auto"] = 1,
        drop_last: bool = False,
        shuffle: bool | BlockShuffle = True,
        seed: int = 0,
        **loader_options: Any,
    ) -> None:
        super().__init__()
        arguments = DataArguments(
            lengths=lengths,
            batch_size=batch_size,
            cost=cost,
            balance=balance,
            loss_reduction=loss_reduction,
            target_counts=target_counts,
            batch_tokens=batch_tokens,
            micro_batches=micro_batches,
            drop_last=drop_last,
            shuffle=shuffle,
            seed=seed,
        )
        check_loader_options(loader_options, is_stream(train_dataset))
        self.val_dataset, self.test_dataset, self.predict_dataset = val_dataset, test_dataset, predict_dataset
        self.batch_size = batch_size
        self.collate_fn = collate_fn
        self.balance_options = arguments.options
        self._arguments = arguments.without_data()
        self.feature_rows: dict[str, int] = {}
        self.histories: Any = None
        self._loader_options = loader_options
        self.train: IterableData | MapStyleData
        if is_stream(train_dataset):
            self.train = IterableData(train_dataset, arguments, collate_fn, loader_options.get("num_workers", 0))
            if warning := unusable_state(train_dataset):
                rank_zero_warn(warning)
            return
        self.train = MapStyleData(train_dataset, arguments)
        if isinstance(train_dataset, IterableDataset):
            rank_zero_info(
                f"{type(train_dataset).__name__} is read by the numbers of its {len(self.train.costs)} samples, as a map-style "
                "data set: the plan of the steps takes the place of its own order, shards and state"
            )

    @classmethod
    def from_interactions(
        cls,
        source: str | Path | Any,
        *,
        user: int | str = "user",
        item: int | str = "item",
        time: int | str | None = "time",
        delimiter: str | None = None,
        header: bool | None = None,
        line: Literal["interaction", "user"] | None = None,
        order: Literal["given", "sort"] = "given",
        ties: Literal["error", "keep"] = "error",
        max_length: int | None = None,
        batch_size: int = 32,
        loss_reduction: LossReduction = "target_mean",
        **options: Any,
    ) -> FreeScaleDataModule:
        """Read histories from a text or Parquet file, a data frame or an Arrow table, and split them leave-one-out.

        Each user's last item is for test, the one before for validation, the rest for training. Batches are those of
        :func:`lightning_freescale.data.collate_histories`.

        ``source`` to ``ties`` are the arguments of :func:`lightning_freescale.data.read_interactions`, the others those of
        :class:`FreeScaleDataModule`. ``max_length`` keeps the last so many items of a history; it is not gradient-identical,
        as it drops targets.
        """
        columns: dict[str, Any] = {"user": user, "item": item, "time": time}
        file_format: dict[str, Any] = {"delimiter": delimiter, "header": header, "line": line}
        histories = read_interactions(source, **columns, **file_format, order=order, ties=ties)
        splits = leave_one_out(HistoryDataset, histories, source, max_length)
        module = cls._from_splits(splits, batch_size=batch_size, loss_reduction=loss_reduction, **options)
        module.histories = histories
        module.feature_rows = {"item": histories.num_items}
        return module

    @classmethod
    def from_parquet(
        cls,
        source: str | Path | Sequence[str | Path],
        *,
        user: str = "user",
        item: str = "item",
        time: str = "time",
        max_length: int | None = None,
        row_group_window: int = 8,
        batch_size: int = 32,
        loss_reduction: LossReduction = "target_mean",
        shuffle: bool = True,
        **options: Any,
    ) -> FreeScaleDataModule:
        """Read histories that need not fit into memory from Parquet files with one row a user, and split them leave-one-out.

        Splits and batches are those of :meth:`from_interactions`; item ids are taken as they are. ``source`` to ``time`` are
        the arguments of :class:`lightning_freescale.data.ParquetHistories`, the others those of :class:`FreeScaleDataModule`.
        ``max_length`` keeps the last so many items of a history; it is not gradient-identical, as it drops targets.

        ``row_group_window`` row groups are shuffled together, see :class:`~lightning_freescale.balance.BlockShuffle`, and as
        many at most are held by every process that loads. Each of these reads nearly every row group, once an epoch.
        """
        histories: Any = ParquetHistories(source, user=user, item=item, time=time, held_row_groups=row_group_window)
        splits = leave_one_out(ParquetHistoryDataset, histories, source, max_length)
        row_groups = histories.row_groups_of(splits["train"].users)
        sizes = np.bincount(row_groups, minlength=len(histories.first_users) - 1)
        blocks = BlockShuffle(sizes, row_group_window) if shuffle else False
        return cls._from_splits(splits, batch_size=batch_size, loss_reduction=loss_reduction, shuffle=blocks, **options)

    @classmethod
    def _from_splits(cls, splits: dict[Split, HistoryDataset], **options: Any) -> FreeScaleDataModule:
        train = splits["train"]
        if short := len(train.histories.lengths) - len(train.users):
            rank_zero_info(f"{short} users have fewer than {train.min_interactions} interactions and are left out")
        # jsonargparse reads from these names which options a config need not have
        return cls(
            train,
            train.lengths,
            collate_fn=collate_histories,
            val_dataset=splits["validate"],
            test_dataset=splits["test"],
            predict_dataset=splits["predict"],
            **options,
        )

    # -- loaders

    def setup(self, stage: str) -> None:
        """Forget the previous fit's progress; a checkpoint brings its own afterwards."""
        if stage == "fit":
            self.train.reset_progress()
            self._reload_every = None  # of a Trainer whose fit failed

    def teardown(self, stage: str) -> None:
        """Leave nothing behind: no process group, no setting of the Trainer."""
        if isinstance(self.train, IterableData):
            self.train.destroy_group()
        self._reload_next_epoch(False)

    def train_dataloader(self) -> BalancedDataLoader | BalancedStreamLoader:
        """Return the balanced loader of this rank."""
        trainer, train = self.trainer, self.train
        epoch, limit = 0, 1.0
        if trainer is not None:
            if isinstance(train, MapStyleData) and not self._weighs_loss:
                train.forget_choices()  # of a checkpoint
            self._check_trainer(trainer, train)
            epoch, limit = trainer.current_epoch, trainer.limit_train_batches
        if isinstance(train, IterableData):
            return train.loader(*self._rank_and_world_size(), epoch, self._group_timeout)
        sampler = train.resumed_sampler(*self._rank_and_world_size(), epoch, self._batches_per_optimizer_step, limit)
        jagged = train.padding == "none" or train.lengths is None
        settles = self._weighs_loss and jagged and not train.counts_are_settled
        if settles and (choice := train.settle_counts(sampler.epoch, sampler.first_step)) is not None:
            rank_zero_info(f"FreeScaleDataModule: {choice}")
        self._reload_next_epoch(train.epoch_is_cut_anew)
        if (budget := describe_budget(sampler)) is not None:
            rank_zero_info(budget)
        return BalancedDataLoader.from_sampler(train.dataset, sampler, self.collate_fn, self._on_gpu, **self._loader_options)

    def _check_trainer(self, trainer: Trainer, train: IterableData | MapStyleData) -> None:
        """Refuse a Trainer that replaces the sampler, or whose strategy neither weighs losses nor measures times."""
        if overfit := getattr(trainer, "overfit_batches", 0):
            raise ValueError(
                f"Trainer(overfit_batches={overfit}) replaces the sampler and with it the plan of the steps. Use "
                "limit_train_batches= with FreeScaleDataModule(shuffle=False)"
            )
        if not self._weighs_loss:
            self._arguments.check_plain_strategy(trainer.world_size, train.assignment_mode)
        elif self.balance_options.calibrate and trainer.world_size == 1:
            rank_zero_warn(
                "BalanceOptions(calibrate=True) measures nothing on a single rank, which has no other rank to share samples "
                "with: use Trainer(devices=2) or more, or leave it out"
            )

    def val_dataloader(self) -> BalancedDataLoader | list[Any]:
        """Return a loader of this rank's part of the validation samples, each once, in order or grouped by length."""
        return self._evaluation_loader("val_dataset", "limit_val_batches")

    def test_dataloader(self) -> BalancedDataLoader | list[Any]:
        """Return a loader of this rank's part of the test samples, each once, in order or grouped by length."""
        return self._evaluation_loader("test_dataset", "limit_test_batches")

    def predict_dataloader(self) -> PredictionLoader | list[Any]:
        """Return a loader of this rank's part of the samples to predict, each once, in order."""
        loader = self._evaluation_loader("predict_dataset")
        return loader if isinstance(loader, list) else PredictionLoader(loader)

    def _evaluation_loader(self, name: str, limit: str | None = None) -> BalancedDataLoader | list[Any]:
        dataset = getattr(self, name)
        if dataset is None:
            return []
        groups = limit is not None and self._arguments.balances
        sampler = EvaluationSampler(
            name,
            dataset,
            self.batch_size,
            *self._rank_and_world_size(),
            is_padded=lambda: groups and getattr(self.train, "padding", "none") == "batch",
            limit=1.0 if limit is None else getattr(self.trainer, limit, 1.0),
        )
        return BalancedDataLoader.from_sampler(dataset, sampler, self.collate_fn, self._on_gpu, **self._loader_options)

    def sampler(self, rank: int, world_size: int) -> BalancedSampler:
        """Return the training plan of one of ``world_size`` ranks.

        Raises:
            ValueError: the training data is a stream.
        """
        if isinstance(self.train, IterableData):
            raise ValueError("the steps of a stream cannot be planned before its samples have arrived")
        return self.train.sampler(rank, world_size)

    # -- resume

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands in its data; the same on every rank. Collective for streams."""
        epoch, batches = self._training_position()
        state = self.train.state_dict(epoch, batches, self._rank_and_world_size()[1])
        return {**state, "micro_batches": self.train.micro_batches.measured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the samples that the checkpoint's run has consumed.

        Raises:
            ValueError: the checkpoint was made with another kind of data set, or inside an epoch of another order.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            if isinstance(self.train, MapStyleData):
                self.train.know_padding(state)
            return  # validation and test load the weights of a checkpoint, not its place in the training data
        kinds = ["a map-style data set", "an IterableDataset"]
        streamed = isinstance(self.train, IterableData)
        if streamed != ("streams" in state):
            raise ValueError(
                f"the checkpoint was made with {kinds[not streamed]}, this run has {kinds[streamed]}: its place in the one "
                "means nothing in the other. Load the weights alone, or use the same kind of data set"
            )
        self.train.load_state_dict(state, *self._rank_and_world_size())
        if isinstance(self.train, MapStyleData) and self.train.refuses_refits(state):
            rank_zero_warn(
                "the checkpoint's costs were fitted to compute times; FreeScaleDataModule(cost=...) says others, which go from "
                "here on. To go on with those of the checkpoint, leave cost= out"
            )
        schedule = self.train.micro_batches
        if schedule.auto and state.get("micro_batches") in schedule.candidates:
            schedule.measured = state["micro_batches"]
            schedule.settle(state["micro_batches"])
        self._reload_now()  # a user may have asked for the loader before the checkpoint was read
