"""FreeScaleDataModule: balanced batches from any map-style data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset

from lightning_freescale._lightning import LightningDataModule, TrainerFn, rank_zero_info, rank_zero_warn
from lightning_freescale.balance import BalancedSampler
from lightning_freescale.data.arguments import costs_of, loss_weights, size_of
from lightning_freescale.data.loader import PlannedLoader

LossReduction = Literal["sample_mean", "target_mean", "sum"]


class FreeScaleDataModule(LightningDataModule):
    """Loads training batches whose samples are assigned to the ranks so that all finish together.

    Args:
        dataset: map-style training data set.
        lengths: history length of every training sample, shape ``[samples]``.
        batch_size: samples per rank and step.
        cost: predicted compute time: a function of the array of lengths; or instead of ``lengths`` a function of one sample
            (reads the data set once) or the costs themselves, shape ``[samples]``. ``CostModel()`` of the lengths by default.
        collate_fn: turns the list of samples of a step into a batch; torch's default if not given.
        validate, test, predict: data sets for the other stages, loaded in order, every sample once.
        balance: assign samples by cost; ``False`` deals them as drawn. The samples of a step are the same either way.
        loss_reduction: what the loss that ``training_step`` returns averages over: the rank's samples, or its targets. The
            strategy scales it so that the gradient is that of the mean over the global batch, also when ranks hold unequal
            numbers. ``"sum"`` gives the gradient of the sum over the global batch.
        targets: prediction targets per sample for ``"target_mean"``, shape ``[samples]``; ``lengths`` if not given.
        drop_last: leave out an incomplete last step.
        shuffle: draw a new order every epoch.
        seed: seeds the order.
        num_workers, pin_memory, persistent_workers: as in ``torch.utils.data.DataLoader``.

    Raises:
        ValueError: an argument does not fit; names it, its value and the fix.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        lengths: ArrayLike | None = None,
        batch_size: int = 32,
        *,
        cost: Callable[[Any], Any] | Sequence[float] | NDArray[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        validate: Dataset[Any] | None = None,
        test: Dataset[Any] | None = None,
        predict: Dataset[Any] | None = None,
        balance: bool = True,
        loss_reduction: LossReduction = "sample_mean",
        targets: ArrayLike | None = None,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"FreeScaleDataModule(batch_size={batch_size!r}): pass the samples per rank, at least 1")
        if loss_reduction not in ("sample_mean", "target_mean", "sum"):
            raise ValueError(f"loss_reduction={loss_reduction!r}: choose 'sample_mean', 'target_mean' or 'sum'")
        size = size_of(dataset)
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.costs = costs_of(dataset, lengths, cost, size)
        self.stages = {"validate": validate, "test": test, "predict": predict}
        self.balance, self.drop_last, self.shuffle = balance, drop_last, shuffle
        self.loss_reduction = loss_reduction
        self.weights = loss_weights(loss_reduction, lengths, targets, size)
        self.feature_rows: dict[str, int] = {}
        self.histories: Any = None
        self._options: dict[str, Any] = {
            "collate_fn": collate_fn,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "persistent_workers": persistent_workers,
        }
        self._resume = (0, 0)
        self._sampler: BalancedSampler | None = None

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
        batch_size: int = 32,
        cost: Callable[[NDArray[Any]], ArrayLike] | None = None,
        balance: bool = True,
        loss_reduction: LossReduction = "target_mean",
        drop_last: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
    ) -> FreeScaleDataModule:
        """Histories from a CSV or Parquet file (or a pyarrow table), split leave-one-out.

        Each user's last item is for test, the one before for validation, the rest for training. Batches are those of
        :func:`lightning_freescale.data.collate_histories`. ``histories`` keeps the maps from dense ids to the file's.
        ``source`` to ``ties`` are the arguments of :func:`lightning_freescale.data.read_interactions`.
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
        train = HistoryDataset(histories, users, "train")
        module = cls(
            train,
            train.lengths,
            batch_size,
            cost=cost,
            collate_fn=collate_histories,
            validate=HistoryDataset(histories, users, "validate"),
            test=HistoryDataset(histories, users, "test"),
            predict=HistoryDataset(histories, users, "predict"),
            balance=balance,
            loss_reduction=loss_reduction,
            drop_last=drop_last,
            seed=seed,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
        )
        module.histories = histories
        module.feature_rows = {"item": histories.num_items}
        return module

    # -- loaders

    def setup(self, stage: str) -> None:
        """Forget the previous fit's progress; a checkpoint brings its own afterwards."""
        self._resume, self._sampler = (0, 0), None

    def train_dataloader(self) -> PlannedLoader:
        """The balanced loader of this rank."""
        overfit = getattr(self.trainer, "overfit_batches", 0)
        if overfit:
            raise ValueError(
                f"Trainer(overfit_batches={overfit}) replaces the sampler and with it the plan of the "
                "steps. Use limit_train_batches= with FreeScaleDataModule(shuffle=False)."
            )
        self._check_strategy()
        self._sampler = self.sampler(*self._world())
        self._sampler.resume(*self._resume)
        return PlannedLoader.of(self.dataset, self._sampler, **self._options)

    def val_dataloader(self) -> PlannedLoader | list[Any]:
        """Every validation sample once, in order."""
        return self._stage_loader("validate")

    def test_dataloader(self) -> PlannedLoader | list[Any]:
        """Every test sample once, in order."""
        return self._stage_loader("test")

    def predict_dataloader(self) -> PlannedLoader | list[Any]:
        """Every sample to predict once, in order; each rank returns its own part."""
        return self._stage_loader("predict")

    def sampler(self, rank: int, world_size: int) -> BalancedSampler:
        """The training sampler of one of ``world_size`` ranks."""
        return BalancedSampler(
            self.costs,
            self.batch_size,
            num_replicas=world_size,
            rank=rank,
            seed=self.seed,
            shuffle=self.shuffle,
            balance=self.balance,
            drop_last=self.drop_last,
            weights=self.weights,
            summed=self.loss_reduction == "sum",
        )

    # -- resume

    def state_dict(self) -> dict[str, int]:
        """Seed, epoch and batches consumed, with what the count refers to; the same on every rank."""
        loop: Any = cast(Any, self.trainer).fit_loop
        epochs = loop.epoch_progress.current
        inside = epochs.ready > epochs.processed  # else the batches counted are those of the epoch before
        return {
            "seed": self.seed,
            "epoch": epochs.processed,
            "batches": loop.epoch_loop.batch_progress.current.processed if inside else 0,
            **self._plan_size(),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the batches that the checkpoint's run has consumed."""
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return  # validation and test load the weights of a checkpoint, not its place in the training data
        for name, value in self._plan_size().items():
            if state["batches"] and value != state[name]:
                raise ValueError(
                    f"the checkpoint stopped inside an epoch with {name}={state[name]}, this run has {name}={value} "
                    f"(batch_size={self.batch_size} on {self._world()[1]} ranks): samples would be lost or repeated. Keep it "
                    "as it was, or resume from a checkpoint made at the end of an epoch."
                )
        self.seed, self._resume = state["seed"], (state["epoch"], state["batches"])
        if self._sampler is not None:  # Lightning may have asked for the loader already
            self._sampler.seed = self.seed
            self._sampler.resume(*self._resume)

    def _plan_size(self) -> dict[str, int]:
        """What the steps of an epoch depend on, beside the seed."""
        return {
            "global_batch_size": self.batch_size * self._world()[1],
            "samples": len(self.costs),
            "shuffle": int(self.shuffle),
            "drop_last": int(self.drop_last),
        }

    def _world(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _check_strategy(self) -> None:
        alone = self._world()[1] == 1
        if alone or getattr(cast(Any, self.trainer).strategy, "weighs_loss", False) or self.loss_reduction == "sample_mean":
            return
        rank_zero_warn(
            f"loss_reduction={self.loss_reduction!r} needs Trainer(strategy='freescale') to weigh each rank's loss; this "
            "strategy averages the ranks' losses as they are"
        )

    def _stage_loader(self, stage: str) -> PlannedLoader | list[Any]:
        dataset = self.stages[stage]
        if dataset is None:
            return []
        rank, world_size = self._world()
        costs = np.zeros(size_of(dataset, f"{stage}="))
        sampler = BalancedSampler(costs, self.batch_size, num_replicas=world_size, rank=rank, shuffle=False, balance=False)
        return PlannedLoader.of(dataset, sampler, **self._options)
