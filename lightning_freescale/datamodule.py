"""FreeScaleDataModule: balanced batches from any map-style data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset

from lightning_freescale._lightning import LightningDataModule, TrainerFn, rank_zero_info, reload_train_loader
from lightning_freescale.balance import BalancedSampler, CostModel
from lightning_freescale.data.arguments import LossReduction, loss_weights, size_of
from lightning_freescale.data.costs import SampleCosts
from lightning_freescale.data.loader import PlannedLoader
from lightning_freescale.data.progress import Progress


class FreeScaleDataModule(LightningDataModule):
    """Loads training batches whose samples are assigned to the ranks so that all finish together.

    Args:
        dataset: map-style training data set.
        lengths: history length of every training sample, shape ``[samples]``.
        batch_size: samples per rank and step.
        cost: predicted compute time: a function of the array of lengths (and of ``unique_ids``, if given); or instead of
            ``lengths`` a function of one sample (reads the data set once) or the costs themselves, shape ``[samples]``.
            ``CostModel()`` of the lengths by default.
        unique_ids: number of unique ids in every training sample, shape ``[samples]``, if they cost time.
        calibrate: fit a :class:`CostModel` to the compute times that the strategy measures, and plan by it from the next
            epoch on if that lowers the imbalance by more than 5 %. The plan, not the gradient, then depends on the clock.
        slow_ranks: what to do, while calibrating, about ranks that are slow for reasons the costs do not explain:
            ``"report"`` them, or ``"rebalance"``: give them less work from the next epoch on.
        collate_fn: turns the list of samples of a step into a batch; torch's default if not given.
        validate, test, predict: data sets for the other stages, loaded in order, every sample once.
        balance: assign samples by cost; ``False`` deals them as drawn. The samples of a step are the same either way.
        mode, count_slack, max_tokens_per_rank, rank_speeds: as in :func:`lightning_freescale.balance.assign`.
        tokens: tokens of every sample, shape ``[samples]``; ``lengths`` if not given.
        keep_together: group of every sample, shape ``[samples]``; samples of a group that share a step go to one rank.
        outlier_window: exchange samples between this many consecutive steps so that those that dominate a step come together.
            Not gradient-identical: it changes which samples share a step. 1 for no exchange.
        loss_reduction: what the loss that ``training_step`` returns averages over: the rank's samples, or its targets. The
            strategy scales it so that the gradient is that of the mean over the global batch, also when ranks hold unequal
            numbers. ``"sum"`` gives the gradient of the sum over the global batch. ``"unweighted"`` leaves the losses as
            they are, for strategies that weigh nothing.
        targets: prediction targets per sample for ``"target_mean"``, shape ``[samples]``; ``lengths`` if not given.
        drop_last: leave out an incomplete last step.
        shuffle: draw a new order every epoch.
        seed: seeds the order.
        num_workers, pin_memory, persistent_workers: as in ``torch.utils.data.DataLoader``.

    Attributes:
        sample_costs: lengths, unique ids and costs of the training samples.
        refits: from which epoch on a cost model fitted while training is in use, with the options that came with it.
        histories: from :meth:`from_interactions`, the maps from dense ids to the file's.

    Raises:
        ValueError: an argument does not fit; names it, its value and the fix.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        lengths: ArrayLike | None = None,
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
        if slow_ranks not in ("report", "rebalance"):
            raise ValueError(f"FreeScaleDataModule(slow_ranks={slow_ranks!r}): choose 'report' or 'rebalance'")
        if calibrate and lengths is None:
            raise ValueError("FreeScaleDataModule(calibrate=True) fits the cost to the lengths: pass lengths=")
        size = size_of(dataset)
        self.dataset, self.batch_size, self.seed, self.shuffle = dataset, batch_size, seed, shuffle
        self.sample_costs = SampleCosts(dataset, lengths, unique_ids, cost, size)
        self.stages = {"validate": validate, "test": test, "predict": predict}
        self.calibrate, self.slow_ranks = calibrate, slow_ranks
        self.loss_reduction, self.outlier_window = loss_reduction, outlier_window
        self._plan_options: dict[str, Any] = {
            "balance": balance,
            "drop_last": drop_last,
            "weights": loss_weights(loss_reduction, lengths, targets, size),
            "summed": loss_reduction == "sum",
            "tokens": lengths if tokens is None else tokens,
            "keep_together": keep_together,
            "mode": mode,
            "count_slack": count_slack,
            "max_tokens_per_rank": max_tokens_per_rank,
            "rank_speeds": rank_speeds,
        }
        self._loader_options: dict[str, Any] = {
            "collate_fn": collate_fn,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "persistent_workers": persistent_workers,
        }
        self.feature_rows: dict[str, int] = {}
        self.histories: Any = None
        self._reload_every: int | None = None
        self._resume: tuple[int, int, int | None] = (0, 0, None)
        self.refits: dict[int, tuple[CostModel, dict[str, Any]]] = {}
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
        self._resume, self.refits, self._sampler = (0, 0, None), {}, None

    def train_dataloader(self) -> PlannedLoader:
        """The balanced loader of this rank."""
        self._check_trainer()
        sampler = self._sampler = self.sampler(*self._world())
        for epoch, (model, speeds) in self.refits.items():
            sampler.replan(epoch, self.sample_costs.by(model), **speeds)
        sampler.resume(*self._resume)
        sampler.set_epoch(self.trainer.current_epoch if self.trainer is not None else 0)
        self._reload_after(sampler)
        return PlannedLoader.of(self.dataset, sampler, **self._loader_options)

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
            self.sample_costs.costs,
            self.batch_size,
            num_replicas=world_size,
            rank=rank,
            seed=self.seed,
            shuffle=self.shuffle,
            outlier_window=self.outlier_window,
            **self._plan_options,
        )

    def replan(self, epoch: int, model: CostModel, **options: Any) -> None:
        """From ``epoch`` on plan by another cost model; call it with the same arguments on every rank.

        Args:
            epoch: a later epoch than the current one.
            model: a function of the lengths and, if they were given, the unique ids.
            **options: ``rank_speeds``, if they change.
        """
        self.refits[epoch] = (model, options)
        if self._sampler is not None:
            self._sampler.replan(epoch, self.sample_costs.by(model), **options)

    # -- resume

    def state_dict(self) -> dict[str, Any]:
        """Seed, epoch, batches and samples consumed, with what they refer to; the same on every rank."""
        loop: Any = cast(Any, self.trainer).fit_loop
        epochs = loop.epoch_progress.current
        inside = epochs.ready > epochs.processed  # else the batches counted are those of the epoch before
        batches = loop.epoch_loop.batch_progress.current.processed if inside else 0
        refits = {epoch: (vars(model), options) for epoch, (model, options) in self.refits.items()}
        return {**self._progress(epochs.processed, batches).state(), "refits": refits}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the samples that the checkpoint's run has consumed."""
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return  # validation and test load the weights of a checkpoint, not its place in the training data
        then = Progress.resumed(state, self._progress(0, 0))
        self.seed, self._resume = then.seed, (then.epoch, then.batches, then.consumed)
        same_ranks = then.ranks == self._world()[1]  # else the speeds are those of others
        self.refits = {
            epoch: (CostModel(**model), options if same_ranks else {}) for epoch, (model, options) in state["refits"].items()
        }
        if self._sampler is not None and self.trainer is not None:
            reload_train_loader(self.trainer)  # it was asked for before the checkpoint was read

    def _progress(self, epoch: int, batches: int) -> Progress:
        consumed = self._sampler.consumed(epoch, batches) if self._sampler is not None else 0
        ranks, samples = self._world()[1], len(self.sample_costs.costs)
        return Progress(
            self.seed, epoch, batches, consumed, samples, int(self.shuffle), self.outlier_window, self.batch_size, ranks
        )

    def _reload_after(self, sampler: BalancedSampler) -> None:
        """An epoch resumed with other steps has another length than the next one: Lightning has to ask for the loader again."""
        trainer: Any = self.trainer
        if self._reload_every is not None:
            trainer.reload_dataloaders_every_n_epochs, self._reload_every = self._reload_every, None
        elif trainer is not None and len(sampler) != sampler.steps_per_epoch:
            self._reload_every, trainer.reload_dataloaders_every_n_epochs = trainer.reload_dataloaders_every_n_epochs, 1

    def _world(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _check_trainer(self) -> None:
        overfit = getattr(self.trainer, "overfit_batches", 0)
        if overfit:
            raise ValueError(
                f"Trainer(overfit_batches={overfit}) replaces the sampler and with it the plan of the "
                "steps. Use limit_train_batches= with FreeScaleDataModule(shuffle=False)."
            )
        if self.trainer is None or getattr(self.trainer.strategy, "weighs_loss", False):
            return
        if self.calibrate:
            raise ValueError(
                "FreeScaleDataModule(calibrate=True) needs Trainer(strategy='freescale'), which measures the times"
            )
        if self._world()[1] == 1 or self.loss_reduction == "unweighted":
            return
        mode = self._plan_options["mode"]
        if self.loss_reduction != "sample_mean" or mode in ("slack", "free"):
            raise ValueError(
                f"FreeScaleDataModule(loss_reduction={self.loss_reduction!r}, mode={mode!r}) needs "
                "Trainer(strategy='freescale') to weigh each rank's loss; this strategy averages the ranks' losses as they "
                "are. Use loss_reduction='unweighted' if that is what you want"
            )

    def _stage_loader(self, stage: str) -> PlannedLoader | list[Any]:
        dataset = self.stages[stage]
        if dataset is None:
            return []
        rank, world_size = self._world()
        costs = np.zeros(size_of(dataset, f"{stage}="))
        sampler = BalancedSampler(costs, self.batch_size, num_replicas=world_size, rank=rank, shuffle=False, balance=False)
        return PlannedLoader.of(dataset, sampler, **self._loader_options)
