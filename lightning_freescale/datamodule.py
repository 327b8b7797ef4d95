"""The data module, which loads balanced batches from map-style data sets and streams."""

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
from lightning_freescale.balance.forecast import fewer_than_asked
from lightning_freescale.data.balanced_loader import BalancedDataLoader, EvaluationSampler
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
        train_dataset: map-style data set, or an ``IterableDataset`` with the stream of this rank. The ``StreamingDataset`` of
            litdata and of MosaicML's streaming is used as a map-style data set.
        lengths: history length of every training sample, shape ``[samples]``, or a function of a sample. With a function, each
            rank reads a map-style data set once at the start. A stream needs a function.
        batch_size: samples per rank and step. With ``batch_tokens``, it only applies to validation, test and predict.
        cost: predicted compute time of a sample: a function of the array of lengths, the costs, shape ``[samples]``, or without
            ``lengths`` a function of a sample. ``"auto"`` starts with ``CostModel()`` of the lengths. On several ranks with
            strategy ``"freescale"``, it then fits the costs of a map-style data set to measured compute times. An epoch uses
            the fit if it predicts times clearly better. The rank of a sample then depends on these times, but not the samples
            of a step: **two runs are equal up to rounding, not bitwise**. With any other cost, such as ``CostModel()``, runs
            are **bitwise equal**.
        collate_fn: function from the list of samples of a step to a batch. Default: torch's ``default_collate``.
        val_dataset, test_dataset, predict_dataset: map-style data sets. Every sample is loaded once, in order. If batches are
            padded to their longest sample, and the data set has an attribute ``lengths`` of shape ``[samples]``, samples of
            similar length share a batch in validation and test. The number and sizes of batches stay the same, so means over
            samples change only by rounding. Log means over targets with ``batch_size=`` the number of targets.
        balance: whether to assign samples by cost, or :class:`~lightning_freescale.data.BalanceOptions`. With ``False``, the
            samples stay on the ranks as drawn. The samples of a step are the same in both cases.
        loss_reduction: reduction of the loss that ``training_step`` returns: the mean over the samples or the targets of the
            rank, or the sum. The strategy scales the loss so that the gradient is that of the mean or sum over the global
            batch, also with unequal numbers of samples. ``"unweighted"`` disables the scaling.
        target_counts: number of targets of every sample for ``"target_mean"``, shape ``[samples]``, or a function of a sample
            as in ``lengths``. Default: ``lengths``.
        batch_tokens: largest number of tokens (``lengths``, or ``BalanceOptions(tokens=...)``) of a rank in a training step,
            instead of ``batch_size``; see :class:`~lightning_freescale.balance.Budget`. The numbers of samples of two steps
            differ by at most one, and all ranks and epochs have the same number of steps. ``BalanceOptions(tokens=costs)``
            limits the cost instead. Needs a map-style data set.
        micro_batches: number of parts of about equal cost into which each rank's batch is divided. The parts are computed one
            after the other, with one update of the tables, which hides more of the exchange and needs less memory. The gradient
            equals that of the undivided step up to rounding if the loss is a mean or sum over samples or targets. Keep 1 for
            **losses that compare the samples of a batch**, such as in-batch negatives, and for batch normalization. ``"auto"``
            measures the divisors of ``batch_size`` up to 8 and keeps the fastest. Needs strategy ``"freescale"``. Log sums on
            steps with ``reduce_fx="sum"``.
        drop_last: whether to drop an incomplete last step.
        shuffle: whether to draw a new order of all samples in every epoch, or a
            :class:`~lightning_freescale.balance.BlockShuffle`. A stream keeps its own order.
        seed: seed of the order.
        **loader_options: further options of ``torch.utils.data.DataLoader``, such as ``num_workers`` and ``pin_memory`` (by
            default True for a GPU). An ``IterableDataset`` only supports ``num_workers``.

    Attributes:
        train: the training data, their plan, and the progress of a run.
        histories: the histories of :meth:`from_interactions`, which map dense ids to ids of the source.

    Raises:
        ValueError: an argument is invalid.
        TypeError: an argument is unknown.
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
        self._arguments = arguments.without_data()
        self.feature_rows: dict[str, int] = {}
        self.histories: Any = None
        self._loader_options = loader_options
        self.train: IterableData | MapStyleData
        if is_stream(train_dataset):
            self.train = IterableData(train_dataset, arguments, collate_fn, loader_options.get("num_workers", 0))
            if reason := unusable_state(train_dataset):
                rank_zero_warn(
                    f"{reason}, so it is not called. To resume inside an epoch, the loader reads the previous samples "
                    "again and discards them. Implement state_dict() without arguments to avoid this"
                )
            return
        self.train = MapStyleData(train_dataset, arguments)
        if isinstance(train_dataset, IterableDataset):
            rank_zero_info(
                f"{type(train_dataset).__name__} is used as a map-style data set of {len(self.train.costs)} samples. The "
                "plan of the steps replaces its own order, shards and state"
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

        Each user's last item is for test, the one before for validation, and the rest for training. Batches are those of
        :func:`lightning_freescale.data.collate_histories`. ``max_length`` keeps the last items of longer histories, which
        changes the gradient, because it drops targets.

        ``source`` to ``ties`` are the arguments of :func:`lightning_freescale.data.read_interactions`. All others are those of
        :class:`FreeScaleDataModule`.
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
        """Read histories larger than memory from Parquet files with one row per user, and split them leave-one-out.

        Splits, batches and ``max_length`` are as in :meth:`from_interactions`. Item ids are used unchanged. Groups of
        ``row_group_window`` row groups are shuffled together, see :class:`~lightning_freescale.balance.BlockShuffle`. Each
        loading process holds at most this number in memory, and reads nearly every row group once per epoch.

        ``source`` to ``time`` are the arguments of :class:`lightning_freescale.data.ParquetHistories`. All others are those of
        :class:`FreeScaleDataModule`.
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
            rank_zero_info(f"{short} users have fewer than {train.min_interactions} interactions and are omitted")
        # explicit names, from which jsonargparse infers the options that a config may omit
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
        """Reset the progress of a previous fit, and warn if the data set is smaller than a step."""
        if stage == "fit":
            self.train.reset_progress()
            self._reload_every = None  # set by a failed fit
            if isinstance(self.train, MapStyleData) and not self.train.drop_last:  # which is an error
                asked, samples = self.train.budget or self.batch_size, len(self.train.costs)
                if (fewer := fewer_than_asked(samples, self._rank_and_world_size()[1], asked)) is not None:
                    rank_zero_warn(f"FreeScaleDataModule(batch_size={asked}): {fewer} Pass a smaller batch_size")

    def teardown(self, stage: str) -> None:
        """Destroy the process group of a stream, and restore the Trainer's settings."""
        if isinstance(self.train, IterableData):
            self.train.destroy_group()
        self._reload_next_epoch(False)

    def on_exception(self, exception: BaseException) -> None:
        """Release what a failed run holds, because Lightning does not call :meth:`teardown` then."""
        self.teardown("fit")

    def train_dataloader(self) -> BalancedDataLoader | BalancedStreamLoader:
        """Return the balanced loader of this rank."""
        trainer, train = self.trainer, self.train
        epoch, limit = 0, 1.0
        if trainer is not None:
            if isinstance(train, MapStyleData) and not self._weighs_loss:
                train.forget_choices()  # those of a checkpoint
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
        if overfit := getattr(trainer, "overfit_batches", 0):
            raise ValueError(
                f"Trainer(overfit_batches={overfit}) replaces the sampler, and with it the plan of the steps. Use "
                "limit_train_batches= with FreeScaleDataModule(shuffle=False) instead"
            )
        if not self._weighs_loss:
            self._arguments.check_plain_strategy(trainer.world_size, train.assignment_mode)

    def val_dataloader(self) -> BalancedDataLoader | list[Any]:
        """Return the loader of this rank's validation samples, in order or grouped by length."""
        return self._evaluation_loader("val_dataset", "limit_val_batches")

    def test_dataloader(self) -> BalancedDataLoader | list[Any]:
        """Return the loader of this rank's test samples, in order or grouped by length."""
        return self._evaluation_loader("test_dataset", "limit_test_batches")

    def predict_dataloader(self) -> PredictionLoader | list[Any]:
        """Return the loader of this rank's samples to predict, in order."""
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
            raise ValueError("an IterableDataset has no plan before its samples arrive. Use a map-style data set")
        return self.train.sampler(rank, world_size)

    # -- resume

    def state_dict(self) -> dict[str, Any]:
        """Return the progress in the training data, which is the same on every rank. Collective for streams."""
        epoch, batches = self._training_position()
        state = self.train.state_dict(epoch, batches, self._rank_and_world_size()[1])
        return {**state, "micro_batches": self.train.micro_batches.measured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the samples that the checkpoint's run has consumed.

        Raises:
            ValueError: the checkpoint belongs to another kind of data set, or is inside an epoch with another order.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            if isinstance(self.train, MapStyleData):
                self.train.know_padding(state)
            return  # validation and test do not use the progress
        kinds = ["a map-style data set", "an IterableDataset"]
        streamed = isinstance(self.train, IterableData)
        if streamed != ("streams" in state):
            raise ValueError(
                f"the checkpoint was written with {kinds[not streamed]}, but this run has {kinds[streamed]}, so it cannot "
                "resume. Load only the weights, or use the same kind of data set"
            )
        self.train.load_state_dict(state, *self._rank_and_world_size())
        if isinstance(self.train, MapStyleData) and self.train.refuses_refits(state):
            rank_zero_warn(
                "FreeScaleDataModule(cost=...) replaces the costs of the checkpoint, which were fitted to compute "
                "times. Remove cost= to use those of the checkpoint"
            )
        schedule = self.train.micro_batches
        if schedule.auto and state.get("micro_batches") in schedule.candidates:
            schedule.measured = state["micro_batches"]
            schedule.settle(state["micro_batches"])
        self._reload_now()  # the loader may have been created before the checkpoint was read
