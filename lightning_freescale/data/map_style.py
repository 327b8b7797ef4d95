"""Training data whose samples are all known: what they cost, how every step is planned, and where a run stands in them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_freescale.balance import BalancedSampler, BlockShuffle, CostModel, MicroBatchSchedule
from lightning_freescale.balance.cost import sample_features
from lightning_freescale.balance.sampler import EXPLORATION_STEPS
from lightning_freescale.balance.validation import non_negative
from lightning_freescale.data.options import BalanceOptions
from lightning_freescale.data.random_access import numbers_of_samples, size_of
from lightning_freescale.data.validation import loss_weights, refuse_unused


class MapStyleData:
    """A map-style data set, what its samples cost, and how its steps are planned.

    Args:
        dataset: map-style; no stream, see :func:`~lightning_freescale.data.random_access.is_stream`.
        balance: assign samples by cost, as ``options`` say; else each rank computes a run of the drawn order.
        **others: as in :class:`~lightning_freescale.FreeScaleDataModule`.

    Attributes:
        lengths, unique_ids: shape ``[samples]``, or None.
        costs: predicted compute time, shape ``[samples]``.
        refits: from which epoch on a cost model fitted while training is in use, with the options that came with it.
        micro_batches: how many the steps of this fit have.

    Raises:
        ValueError: an argument does not fit, or would have no effect.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        lengths: Any,
        batch_size: int,
        *,
        cost_fn: Any,
        unique_ids: Any,
        balance: bool,
        options: BalanceOptions,
        loss_reduction: str,
        target_counts: Any,
        drop_last: bool,
        shuffle: bool | BlockShuffle,
        seed: int,
        new_schedule: Callable[[], MicroBatchSchedule],
    ) -> None:
        if options.calibrate and lengths is None:
            raise ValueError(
                "FreeScaleDataModule(balance=BalanceOptions(calibrate=True)) fits the cost to the lengths and plans by it: "
                "pass lengths="
            )
        if not options.calibrate and not callable(cost_fn):
            context = "costs that do not depend on it: pass a cost function of lengths and unique ids"
            refuse_unused(context, unique_ids=unique_ids is not None)
        if unique_ids is not None and lengths is None:
            raise ValueError("unique_ids= goes with lengths=: pass the history length of every sample, too")
        size = size_of(dataset, "train_dataset")
        of_sample = {"lengths": lengths, "target_counts": target_counts, "cost_fn": cost_fn if lengths is None else None}
        read = numbers_of_samples(dataset, size, **{name: value for name, value in of_sample.items() if callable(value)})
        lengths, target_counts = read.get("lengths", lengths), read.get("target_counts", target_counts)
        self.dataset = dataset
        self.lengths = None if lengths is None else non_negative("lengths", lengths, size)
        self.unique_ids = None if unique_ids is None else non_negative("unique_ids", unique_ids, size)
        self.costs = self._given_costs(read.get("cost_fn", cost_fn), size)
        self._new_sampler = partial(
            BalancedSampler,
            self.costs,
            batch_size,
            shuffle=shuffle,
            balance=balance,
            drop_last=drop_last,
            loss_weights=loss_weights(loss_reduction, lengths, target_counts, size),
            loss_is_sum=loss_reduction == "sum",
            exploration_steps=EXPLORATION_STEPS if options.calibrate else 0,
            tokens=lengths if options.tokens is None else non_negative("tokens", options.tokens, size),
            keep_together=options.keep_together,
            outlier_window=options.outlier_window,
            assignment_mode=options.assignment_mode,
            count_slack=options.count_slack,
            max_tokens_per_rank=options.max_tokens_per_rank,
            rank_speeds=options.rank_speeds,
        )
        self._may_share = balance and options.assignment_mode != "zigzag" and options.outlier_window == 1
        self._may_share &= options.keep_together is None and options.max_tokens_per_rank is None
        self._shares = {"auto": loss_reduction in ("sample_mean", "sum")}.get(str(options.window), options.window is True)
        # what the order of an epoch follows from, beside the seed; from the last three only with an outlier window, and between
        # two batches of an optimizer step
        self._order_facts = {
            "samples": size,
            "shuffle": _shuffle_fact(shuffle),
            "outlier_window": options.outlier_window,
            "batch_size": batch_size,
            "drop_last": int(drop_last),
            "costs": hashlib.sha256(self.costs.tobytes()).hexdigest(),
        }
        self._given_seed = seed
        self._new_schedule = new_schedule
        self.reset_progress()

    def reset_progress(self) -> None:
        """Forget an earlier fit: a new one starts at the beginning."""
        self.seed = self._given_seed
        self._resume: tuple[int, int, int | None, int | None] = (0, 0, None, None)
        self.refits: dict[int, tuple[CostModel, dict[str, Any]]] = {}
        self._sampler: BalancedSampler | None = None
        self.micro_batches = self._new_schedule()

    # -- what samples cost

    def _given_costs(self, cost_fn: Any, size: int) -> NDArray[np.float64]:
        if cost_fn is not None and not callable(cost_fn):
            return non_negative("cost_fn", cost_fn, size)
        if self.lengths is not None:
            return self.costs_by(cost_fn or CostModel())
        raise ValueError(
            "FreeScaleDataModule(lengths=None) cannot balance: pass lengths=, the history length of every sample, or "
            "cost_fn=, a function of a sample or the costs themselves"
        )

    def costs_by(self, cost_fn: Callable[..., Any], samples: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Return the costs by another function of the lengths and, if given, the unique ids; of ``samples`` or of all."""
        known = self._lengths_and_ids(samples)
        return non_negative("cost_fn(lengths)", cost_fn(*known), len(known[0]))

    def features(self, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return :func:`sample_features` of ``samples``, shape ``[samples, 4]``."""
        return sample_features(*self._lengths_and_ids(samples))

    def _lengths_and_ids(self, samples: NDArray[np.int64] | None) -> list[NDArray[np.float64]]:
        assert self.lengths is not None
        known = [self.lengths] if self.unique_ids is None else [self.lengths, self.unique_ids]
        return known if samples is None else [values[samples] for values in known]

    # -- the plan

    def sampler(self, rank: int, world_size: int) -> BalancedSampler:
        """Return the plan of one of ``world_size`` ranks, from the first epoch on."""
        return self._sampler_with(self._new_schedule(), rank, world_size)

    def _sampler_with(self, micro_batches: MicroBatchSchedule, rank: int, world_size: int, window: int = 1) -> BalancedSampler:
        given: dict[str, Any] = {"seed": self.seed, "micro_batches": micro_batches, "window": window}
        return self._new_sampler(num_replicas=world_size, rank=rank, **given)

    def window(self, accumulated: int) -> int:
        """Return how many steps share their samples out among them, if so many make one optimizer step."""
        return accumulated if self._may_share and self._shares else 1

    def resumed_sampler(self, rank: int, world_size: int, epoch: int, accumulated: int = 1) -> BalancedSampler:
        """Return the plan of a rank from where a checkpoint left it on; :meth:`replan` changes it."""
        window = self.window(accumulated)
        sampler = self._sampler = self._sampler_with(self.micro_batches, rank, world_size, window)
        for start, (model, options) in sorted(self.refits.items()):
            sampler.replan(start, partial(self.costs_by, model), **options)
        sampler.resume(*self._resume)
        sampler.set_epoch(max(epoch, self._resume[0]))  # the loader may be asked for before the Trainer knows its epoch
        return sampler

    def replan(self, epoch: int, model: CostModel, **options: Any) -> None:
        """Plan by another cost model from ``epoch`` on; call it with the same arguments on every rank."""
        self.refits[epoch] = (model, options)
        if self._sampler is not None:
            self._sampler.replan(epoch, partial(self.costs_by, model), **options)

    @property
    def epoch_is_cut_anew(self) -> bool:
        """Whether the epoch at hand has other steps than the ones after it."""
        return self._sampler is not None and len(self._sampler) != self._sampler.steps_per_epoch

    # -- resume

    def state_dict(self, epoch: int, batches: int, world_size: int) -> dict[str, Any]:
        """Return the progress after ``batches`` steps of ``epoch``, in plain values; the same on every rank."""
        consumed = 0 if self._sampler is None else self._sampler.consumed(epoch, batches)
        state = {"seed": self.seed, "epoch": epoch, "batches": batches, "consumed": consumed, "ranks": world_size}
        refits = {start: (vars(model), options) for start, (model, options) in self.refits.items()}
        window = 1 if self._sampler is None else self._sampler.window
        return {**state, **self._order_facts, "window": window, "refits": refits}

    def load_state_dict(self, state: dict[str, Any], rank: int, world_size: int, accumulated: int = 1) -> None:
        """Go on after the samples that the checkpoint's run has consumed.

        Raises:
            ValueError: inside an epoch, this run's order is another: samples would be lost or repeated.
        """
        if state["refits"] and self.lengths is None:
            raise ValueError(
                "the checkpoint's costs were fitted to lengths: pass lengths= to FreeScaleDataModule to go on with it"
            )
        state = {"window": 1, **state}  # a checkpoint of an earlier version has none
        if state["batches"]:
            self._refuse_another_order(state, world_size, accumulated)
        self.seed = state["seed"]
        self._resume = (state["epoch"], state["batches"], state["consumed"], state["window"])
        same_ranks = state["ranks"] == world_size  # else the speeds are those of others
        self.refits = {
            epoch: (CostModel(**model), options if same_ranks else {}) for epoch, (model, options) in state["refits"].items()
        }

    def _refuse_another_order(self, state: dict[str, Any], world_size: int, accumulated: int) -> None:
        now = {**self._order_facts, "ranks": world_size, "window": self.window(accumulated)}
        inside = state["batches"] % state["window"] != 0
        pooled = ["batch_size", "ranks", "drop_last", "costs"] if now["outlier_window"] != 1 or inside else []
        for name in ["samples", "shuffle", "outlier_window", *pooled, *(["window"] if inside else [])]:
            if state[name] != now[name]:
                where = "between two batches of an optimizer step" if inside else "inside an epoch"
                raise ValueError(
                    f"the checkpoint stopped {where} with {name}={state[name]}, this run has {name}={now[name]}: "
                    "samples would be lost or repeated. Keep it as it was, or resume from a checkpoint made at the end of an "
                    f"{'optimizer step' if inside and now['outlier_window'] == 1 else 'epoch'}."
                )


def _shuffle_fact(shuffle: bool | BlockShuffle) -> int | str:
    """What two shuffles must have in common to draw the same order, in a plain value."""
    if not isinstance(shuffle, BlockShuffle):
        return int(shuffle)
    sizes = np.ascontiguousarray(shuffle.sizes, dtype=np.int64)
    return f"BlockShuffle(window={shuffle.window}) of blocks {hashlib.sha256(sizes.tobytes()).hexdigest()[:16]}"
