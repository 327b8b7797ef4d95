"""Training data whose samples are all known: every step is planned."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from lightning_freescale.balance import BalancedSampler, CostModel
from lightning_freescale.balance.sampler import EXPLORATION_STEPS
from lightning_freescale.data.loader import BalancedDataLoader
from lightning_freescale.data.progress import Progress
from lightning_freescale.data.sample_costs import SampleCosts
from lightning_freescale.data.validation import LOADING, loss_weights, numbers, refuse_unused, size_of

_PLAN = ("balance", "drop_last", "keep_together", "max_tokens_per_rank", "count_slack", "rank_speeds")
"""Arguments of the data module that go to the sampler as they are."""


class MapStyleData:
    """A map-style data set, what its samples cost, and how its steps are planned.

    Args:
        dataset: map-style.
        sample_costs: lengths, unique ids and costs of its samples.
        batch_size: samples per rank and step.
        seed: seeds the order.
        shuffle: draw a new order every epoch.
        outlier_window: see :class:`BalancedSampler`.
        plan_options: further arguments of :class:`BalancedSampler`.
        loader_options: arguments of :class:`BalancedDataLoader`.

    Attributes:
        refits: from which epoch on a cost model fitted while training is in use, with the options that came with it.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sample_costs: SampleCosts,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        outlier_window: int,
        plan_options: dict[str, Any],
        loader_options: dict[str, Any],
    ) -> None:
        self.dataset, self.sample_costs, self.batch_size, self.seed = dataset, sample_costs, batch_size, seed
        self.shuffle, self.outlier_window = shuffle, outlier_window
        self._plan_options, self._loader_options, self._given_seed = plan_options, loader_options, seed
        self.forget()

    @classmethod
    def of(cls, dataset: Dataset[Any], given: Mapping[str, Any]) -> MapStyleData:
        """From the arguments of :class:`FreeScaleDataModule` by name.

        Raises:
            ValueError: one does not fit, or would have no effect.
        """
        what = "a map-style data set, whose steps are planned without a pool"
        refuse_unused(what, given, exchange="samples", pool_batches=8, max_age=32)
        if given["mode"] != "slack":
            refuse_unused(f"mode={given['mode']!r}", given, count_slack=0.25)
        if not given["calibrate"] and not callable(given["cost"]):
            refuse_unused(
                "costs that do not depend on it: pass a cost function of lengths and unique ids", given, unique_ids=None
            )
        if not given["balance"]:
            refuse_unused("balance=False", given, mode="fixed", max_tokens_per_rank=None, keep_together=None, rank_speeds=None)
        size, lengths, reduction = size_of(dataset), given["lengths"], given["loss_reduction"]
        costs = SampleCosts(dataset, lengths, given["unique_ids"], given["cost"], size)
        plan_options = {name: given[name] for name in _PLAN}
        plan_options |= {
            "assignment_mode": given["mode"],
            "loss_is_sum": reduction == "sum",
            "loss_weights": loss_weights(reduction, lengths, given["targets"], size),
            "tokens": lengths if given["tokens"] is None else numbers("tokens", given["tokens"], size),
            "exploration_steps": EXPLORATION_STEPS if given["calibrate"] else 0,
        }
        rest = {name: given[name] for name in ("batch_size", "seed", "shuffle", "outlier_window")}
        loader_options = {name: given[name] for name in LOADING}
        return cls(dataset, costs, **rest, plan_options=plan_options, loader_options=loader_options)

    def forget(self) -> None:
        """A new fit starts at the beginning."""
        self.seed = self._given_seed
        self._resume: tuple[int, int, int | None] = (0, 0, None)
        self.refits: dict[int, tuple[CostModel, dict[str, Any]]] = {}
        self._sampler: BalancedSampler | None = None

    def sampler(self, rank: int, world_size: int) -> BalancedSampler:
        """The plan of one of ``world_size`` ranks, from the first epoch on."""
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

    def loader(self, rank: int, world_size: int, epoch: int) -> BalancedDataLoader:
        """The loader of a rank, from where a checkpoint left it on."""
        sampler = self._sampler = self.sampler(rank, world_size)
        for start, (model, options) in sorted(self.refits.items()):
            sampler.replan(start, partial(self.sample_costs.by, model), **options)
        sampler.resume(*self._resume)
        sampler.set_epoch(max(epoch, self._resume[0]))  # the loader may be asked for before the Trainer knows its epoch
        return BalancedDataLoader.of(self.dataset, sampler, **self._loader_options)

    def replan(self, epoch: int, model: CostModel, **options: Any) -> None:
        """From ``epoch`` on plan by another cost model; call it with the same arguments on every rank."""
        self.refits[epoch] = (model, options)
        if self._sampler is not None:
            self._sampler.replan(epoch, partial(self.sample_costs.by, model), **options)

    @property
    def epoch_is_cut_anew(self) -> bool:
        """Whether the epoch at hand has other steps than the ones after it."""
        return self._sampler is not None and len(self._sampler) != self._sampler.steps_per_epoch

    def state_dict(self, epoch: int, batches: int, world_size: int) -> dict[str, Any]:
        """After ``batches`` steps of ``epoch``; the same on every rank."""
        refits = {start: (vars(model), options) for start, (model, options) in self.refits.items()}
        return {**self._progress(epoch, batches, world_size).state(), "refits": refits}

    def load_state_dict(self, state: dict[str, Any], rank: int, world_size: int) -> None:
        """Go on after the samples that the checkpoint's run has consumed.

        Raises:
            ValueError: inside an epoch, this run's order is another; or the checkpoint is of another kind of data.
        """
        if "samples" not in state:
            raise ValueError(
                "the checkpoint was made with an IterableDataset, this run has a map-style data set: its place in the one "
                "means nothing in the other. Load the weights alone, or use the same kind of data set"
            )
        if state["refits"] and self.sample_costs.lengths is None:
            raise ValueError(
                "the checkpoint's costs were fitted to lengths: pass lengths= to FreeScaleDataModule to go on with it"
            )
        then = Progress.resumed(state, self._progress(0, 0, world_size))
        self.seed, self._resume = then.seed, (then.epoch, then.batches, then.consumed)
        same_ranks = then.ranks == world_size  # else the speeds are those of others
        self.refits = {
            epoch: (CostModel(**model), options if same_ranks else {}) for epoch, (model, options) in state["refits"].items()
        }

    def _progress(self, epoch: int, batches: int, world_size: int) -> Progress:
        return Progress(
            seed=self.seed,
            epoch=epoch,
            batches=batches,
            consumed=0 if self._sampler is None else self._sampler.consumed(epoch, batches),
            samples=len(self.sample_costs.costs),
            shuffle=int(self.shuffle),
            outlier_window=self.outlier_window,
            batch_size=self.batch_size,
            ranks=world_size,
            drop_last=int(self._plan_options.get("drop_last", False)),
            costs=hashlib.sha256(self.sample_costs.costs.tobytes()).hexdigest() if self.outlier_window > 1 else "",
        )
