"""Training data whose samples are all known: what they cost, how every step is planned, and where a run stands in them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_freescale.balance import BalancedSampler, BlockShuffle, Budget, CostModel, MicroBatchSchedule
from lightning_freescale.balance.cost import sample_features
from lightning_freescale.balance.prediction import in_mode, report_plans
from lightning_freescale.balance.sampler import EXPLORATION_STEPS
from lightning_freescale.balance.validation import DEFAULT_SLACK, non_negative
from lightning_freescale.data.options import BalanceOptions
from lightning_freescale.data.random_access import numbers_of_samples, size_of
from lightning_freescale.data.validation import loss_weights, refuse_options, refuse_unused

_COMPARED_STEPS = 8
"""Steps whose bounds at equal and unequal counts are compared."""
_WORTH_UNEQUAL = 1.01
"""Times by which unequal counts must lower the bound: they cost some memory."""


@dataclass(frozen=True)
class Refit:
    """What a calibration has found, from some epoch on.

    Attributes:
        model: the cost model in use; None for the costs as they were given.
        base: what a rank's step takes besides its samples, in the units of ``model``, or of the costs given.
        options: of :func:`~lightning_freescale.balance.assign` that came with it.
    """

    model: CostModel | None
    base: float
    options: dict[str, Any] = field(default_factory=dict)


class MapStyleData:
    """A map-style data set, what its samples cost, and how its steps are planned.

    Args:
        dataset: map-style; no stream, see :func:`~lightning_freescale.data.random_access.is_stream`.
        batch_size: samples per rank and step, if there is no budget.
        balance: assign samples by cost, as ``options`` say; else each rank computes a run of the drawn order.
        **others: as in :class:`~lightning_freescale.FreeScaleDataModule`.

    Attributes:
        lengths, unique_ids: shape ``[samples]``, or None.
        costs: predicted compute time as it was given, shape ``[samples]``.
        calibrates: whether costs are to be fitted while training, where that can bring something.
        refits: what was found while training, by the epoch from which on it goes.
        padding: as in :class:`BalanceOptions`; ``"auto"`` until it is found out.
        padded_length: length that all batches are padded to; None unless it is found out.
        counts_are_settled: whether it was chosen if ranks hold equal numbers of samples.
        may_pad: whether steps may be planned for padded batches.
        costs_are_final: whether nothing more is to be measured.
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
        cost: Any,
        unique_ids: Any,
        balance: bool,
        options: BalanceOptions,
        loss_reduction: str,
        target_counts: Any,
        batch_tokens: float | None,
        batch_cost: float | None,
        drop_last: bool,
        shuffle: bool | BlockShuffle,
        seed: int,
        new_schedule: Callable[[], MicroBatchSchedule],
    ) -> None:
        self.calibrates = bool(options.calibrate) or (
            options.calibrate is None and balance and _is_auto(cost) and lengths is not None
        )
        if options.calibrate and lengths is None:
            raise ValueError(
                "FreeScaleDataModule(balance=BalanceOptions(calibrate=True)) fits the cost to the lengths and plans by it: "
                "pass lengths="
            )
        if not self.calibrates and not callable(cost):
            context = "costs that do not depend on it: pass a cost function of lengths and unique ids"
            refuse_unused(context, unique_ids=unique_ids is not None)
        if unique_ids is not None and lengths is None:
            raise ValueError("unique_ids= goes with lengths=: pass the history length of every sample, too")
        size = size_of(dataset, "train_dataset")
        of_sample = {"lengths": lengths, "target_counts": target_counts, "cost": cost if lengths is None else None}
        read = numbers_of_samples(dataset, size, **{name: value for name, value in of_sample.items() if callable(value)})
        lengths, target_counts = read.get("lengths", lengths), read.get("target_counts", target_counts)
        self.dataset = dataset
        self.lengths = None if lengths is None else non_negative("lengths", lengths, size)
        self.unique_ids = None if unique_ids is None else non_negative("unique_ids", unique_ids, size)
        self.costs = self._given_costs(read.get("cost", cost), size)
        self._cost_is_given = not _is_auto(cost)
        self._units: dict[CostModel | None, float] = {}
        tokens = lengths if options.tokens is None else non_negative("tokens", options.tokens, size)
        self.budget = self._budget(batch_tokens, batch_cost, tokens)
        if batch_cost is not None:
            refuse_options("batch_cost=, which cuts steps by their costs", options, "tokens")
        if self.budget is not None:
            _refuse_with_budget(options, balance, drop_last, shuffle)
        self._chooses = options.assignment_mode == "auto"
        self._mode = options.assignment_mode
        if self._chooses:
            self._mode = "fixed" if self.budget is None else "free"
        slack: dict[str, Any] = {"count_slack": options.count_slack} if self._mode == "slack" else {}
        self.may_pad = balance and self.budget is None and options.keep_together is None and self._mode != "zigzag"
        if options.padding == "batch" and not self.may_pad:
            raise ValueError(
                "BalanceOptions(padding='batch') gives each rank a run of samples sorted by length: leave out batch_tokens=, "
                "batch_cost=, keep_together=, balance=False and assignment_mode='zigzag'"
            )
        weighs = loss_reduction != "unweighted"
        self._padded_mode: dict[str, Any] = {"assignment_mode": "free"} if self._chooses and weighs else {}
        self._chooses_counts = self._chooses and weighs and balance and self.budget is None and options.keep_together is None
        self._new_sampler = partial(
            BalancedSampler,
            self.costs,
            self.budget or batch_size,
            shuffle=shuffle,
            balance=balance,
            drop_last=drop_last,
            loss_weights=loss_weights(loss_reduction, lengths, target_counts, size),
            loss_is_sum=loss_reduction == "sum",
            exploration_steps=EXPLORATION_STEPS if options.calibrate else 0,
            tokens=tokens if self.budget is None else None,
            keep_together=options.keep_together,
            outlier_window=options.outlier_window,
            assignment_mode=self._mode,
            max_tokens_per_rank=options.max_tokens_per_rank,
            rank_speeds=options.rank_speeds,
            **slack,
        )
        self._may_share = balance and self._mode != "zigzag" and options.outlier_window == 1 and self.budget is None
        self._may_share &= options.keep_together is None and options.padding != "batch"
        self._shares = {"auto": loss_reduction in ("sample_mean", "sum")}.get(str(options.window), options.window is True)
        # what the order of an epoch follows from, beside the seed; from the last three only with an outlier window, and between
        # two batches of an optimizer step
        self._order_facts = {
            "samples": size,
            "shuffle": _shuffle_fact(shuffle),
            "outlier_window": int(options.outlier_window),
            "batch_size": int(batch_size),  # a checkpoint is read without numpy's numbers
            "drop_last": int(drop_last),
            "budget of": "" if self.budget is None else hashlib.sha256(self.budget.in_whole_numbers[0].tobytes()).hexdigest(),
        }
        # by which samples find their batch of an optimizer step, too
        limits = (options.max_tokens_per_rank, self._mode, options.count_slack, options.rank_speeds)
        limited = tokens is not None and options.max_tokens_per_rank is not None
        told = np.asarray(tokens, dtype=np.float64).tobytes() + repr(limits).encode() if limited else b""
        self._order_facts["token limit"] = hashlib.sha256(told).hexdigest() if limited else ""
        self._given_seed = int(seed)
        self._new_schedule = new_schedule
        self._given_padding = options.padding
        self.reset_progress()

    def reset_progress(self) -> None:
        """Forget an earlier fit: a new one starts at the beginning."""
        self.seed = self._given_seed
        self._resume: tuple[int, int, int | None, list[int] | None, list[Any]] = (0, 0, None, None, [])
        self.refits: dict[int, Refit] = {}
        self.costs_are_final = False
        self.padding = self._given_padding
        self.padded_length: int | None = None
        self.counts_are_settled = False
        self._padded_steps: list[tuple[int, int, dict[str, Any]]] = []
        if self.padding == "batch":
            self._padded_steps.append((0, 0, self._padded_mode))
        self._sampler: BalancedSampler | None = None
        self.micro_batches = self._new_schedule()

    @property
    def assignment_mode(self) -> str:
        """Mode of :func:`~lightning_freescale.balance.assign` in the steps that no loader has read."""
        changed = self._padded_steps[-1][2] if self._padded_steps else {}
        return str(changed.get("assignment_mode", self._mode))

    @property
    def padding_is_known(self) -> bool:
        """Whether the first batches need not be observed: how they are padded is known, and to which length."""
        return self.padding in ("none", "batch") or self.padded_length is not None

    @property
    def plans_padding(self) -> bool:
        """Whether steps are planned for padded batches, at the latest those after the ones that loaders have read."""
        return self.padding == "batch" and bool(self._padded_steps)

    # -- what samples cost

    def _budget(self, batch_tokens: float | None, batch_cost: float | None, tokens: Any) -> Budget | None:
        """Return what a rank may hold in a step, None if that is a number of samples."""
        if batch_tokens is None and batch_cost is None:
            return None
        if batch_tokens is not None and batch_cost is not None:
            raise ValueError(f"FreeScaleDataModule(batch_tokens={batch_tokens!r}, batch_cost={batch_cost!r}): pass one of them")
        if batch_cost is not None:
            return Budget(batch_cost, self.costs)
        if tokens is None:
            raise ValueError(
                f"FreeScaleDataModule(batch_tokens={batch_tokens!r}) needs lengths=, or BalanceOptions(tokens=...): the tokens "
                "of every sample"
            )
        return Budget(cast(float, batch_tokens), tokens)

    def _given_costs(self, cost: Any, size: int) -> NDArray[np.float64]:
        if isinstance(cost, str) and not _is_auto(cost):
            raise ValueError(f"FreeScaleDataModule(cost={cost!r}): pass 'auto', a function, or the costs themselves")
        if not _is_auto(cost) and not callable(cost):
            return non_negative("cost", cost, size)
        if self.lengths is not None:
            return self.costs_by(CostModel() if _is_auto(cost) else cost)
        raise ValueError(
            "FreeScaleDataModule(lengths=None) cannot balance: pass lengths=, the history length of every sample, or "
            "cost=, a function of a sample or the costs themselves"
        )

    def costs_by(self, cost: Callable[..., Any], samples: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Return the costs by another function of the lengths and, if given, the unique ids; of ``samples`` or of all."""
        known = self._lengths_and_ids(samples)
        return non_negative("cost(lengths)", cost(*known), len(known[0]))

    def _refitted_costs(self, model: CostModel) -> NDArray[np.float64]:
        return self.costs_by(model) * self._units_of(model)

    def _units_of(self, model: CostModel | None) -> float:
        """Return by what a fitted model is multiplied to come in the units of the costs given, which others compare."""
        if model not in self._units:
            fitted = 0.0 if model is None else float(self.costs_by(model).sum())
            self._units[model] = float(self.costs.sum()) / fitted if fitted else 1.0
        return self._units[model]

    def base_in(self, epoch: int) -> float:
        """Return what a rank's step takes besides its samples, in the units of the costs in use; 0 if nobody knows."""
        refit = self._refit_in(epoch)
        return 0.0 if refit is None else refit.base * self._units_of(refit.model)

    def _refit_in(self, epoch: int) -> Refit | None:
        return self.refits.get(max((start for start in self.refits if start <= epoch), default=-1))

    def _costs_fact(self, epoch: int) -> str:
        """Say by which costs samples find their step: outliers by those given, those of an optimizer step by the plan's."""
        refit = self._refit_in(epoch)
        model = None if refit is None or self._order_facts["outlier_window"] != 1 else refit.model
        costs = self.costs if model is None else self._refitted_costs(model)
        return hashlib.sha256(costs.tobytes()).hexdigest()

    @property
    def newest_refit(self) -> Refit | None:
        """What was found last."""
        return self.refits[max(self.refits)] if self.refits else None

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

    def _sampler_with(self, schedule: MicroBatchSchedule, rank: int, world_size: int, **given: Any) -> BalancedSampler:
        given |= {"seed": self.seed, "micro_batches": schedule}
        sampler = self._new_sampler(num_replicas=world_size, rank=rank, **given)
        sampler.may_pad = self.may_pad and self.padding in ("auto", "batch") and self.lengths is not None
        for epoch, step, plan in self._padded_steps:
            sampler.pad_from(epoch, step, **plan)
        return sampler

    def window(self, accumulated: int) -> int:
        """Return how many steps share their samples out among them, if so many make one optimizer step."""
        return accumulated if self._may_share and self._shares else 1

    def resumed_sampler(
        self, rank: int, world_size: int, epoch: int, accumulated: int = 1, limit: int | float = 1.0
    ) -> BalancedSampler:
        """Return the plan of a rank from where a checkpoint left it on; :meth:`replan` changes it."""
        window = self.window(accumulated) if world_size > 1 else 1  # a rank alone waits for nobody
        given: dict[str, Any] = {"window": window, "limit": limit}
        sampler = self._sampler = self._sampler_with(self.micro_batches, rank, world_size, **given)
        for start, refit in sorted(self.refits.items()):
            self._replan_with(sampler, start, refit)
        sampler.resume(*self._resume)
        sampler.set_epoch(max(epoch, self._resume[0]))  # the loader may be asked for before the Trainer knows its epoch
        return sampler

    def replan(self, epoch: int, refit: Refit) -> None:
        """Go by what was found from ``epoch`` on; call it with the same arguments on every rank."""
        before = self.newest_refit or Refit(None, 0.0)
        self.refits[epoch] = refit
        if self._sampler is not None and (refit.model, refit.options) != (before.model, before.options):
            self._replan_with(self._sampler, epoch, refit)

    def pad_from(self, epoch: int, step: int, **plan: Any) -> None:
        """Plan for padded batches from a step on; call it with the same arguments on every rank.

        Args:
            epoch: of the first step.
            step: that step.
            **plan: of :meth:`BalancedSampler.pad_from`; if not given, what padded batches gain most by.
        """
        plan = plan or self._padded_mode
        self._padded_steps.append((epoch, step, plan))
        if self._sampler is not None:
            self._sampler.pad_from(epoch, step, **plan)

    def settle_counts(self, epoch: int, step: int) -> str | None:
        """Let ranks hold unequal numbers of samples from a step on, if that lowers the bound; call it on every rank.

        Batches must not be padded.

        Returns:
            The choice and the reason; None if there is no choice.
        """
        sampler = self._sampler
        self.counts_are_settled = True
        if sampler is None or not self._chooses_counts or sampler.num_replicas == 1 or sampler.window > 1:
            return None
        if max(self.micro_batches.candidates) > 1:  # a rank with few samples would leave all ranks few micro-batches
            return None
        steps = range(sampler.first_step, len(sampler))[:_COMPARED_STEPS]
        plans = [sampler.step_plan(sampler.epoch, each) for each in steps]
        equal, unequal = (report_plans(in_mode(mode, plans), planned=0).lower_bound for mode in ("fixed", "slack"))
        if equal <= unequal * _WORTH_UNEQUAL:
            return (
                f"ranks hold equal numbers of samples (assignment_mode='fixed'): the slowest rank computes {equal:.3f} times "
                f"the mean at least, with unequal numbers {unequal:.3f} times"
            )
        self.pad_from(epoch, step, padded=False, assignment_mode="slack", count_slack=DEFAULT_SLACK)
        return (
            f"from step {step} on ranks hold unequal numbers of samples (assignment_mode='slack'): the slowest rank computes "
            f"{unequal:.3f} times the mean at least, with equal numbers {equal:.3f} times"
        )

    def forget_choices(self) -> None:
        """Plan as before anything was found out, for a strategy that weighs no losses; what was given stays."""
        if self._chooses and self._given_padding != "batch":
            self.padding, self.padded_length, self.counts_are_settled = self._given_padding, None, False
            self._padded_steps.clear()

    def _replan_with(self, sampler: BalancedSampler, epoch: int, refit: Refit) -> None:
        costs = None if refit.model is None else partial(self._refitted_costs, refit.model)
        sampler.replan(epoch, costs, **refit.options)

    @property
    def epoch_is_cut_anew(self) -> bool:
        """Whether the epoch at hand has other steps than the ones after it."""
        return self._sampler is not None and len(self._sampler) != self._sampler.steps_per_epoch

    # -- resume

    def state_dict(self, epoch: int, batches: int, world_size: int) -> dict[str, Any]:
        """Return the progress after ``batches`` steps of ``epoch``, in plain values; the same on every rank."""
        consumed = 0 if self._sampler is None else self._sampler.consumed(epoch, batches)
        state: dict[str, Any] = {"seed": self.seed, "epoch": epoch, "batches": batches, "consumed": consumed}
        refits = {start: asdict(refit) for start, refit in self.refits.items()}
        state |= {"ranks": world_size, "refits": refits, "costs_are_final": self.costs_are_final}
        window = [batches, 0] if self._sampler is None else list(self._sampler.begun_window(epoch, batches))
        state |= {"padding": self.padding, "padded_length": self.padded_length, "counts_are_settled": self.counts_are_settled}
        state["padded_steps"] = list(self._padded_steps)
        state["cuts"] = [] if self._sampler is None else self._sampler.cuts(epoch)
        return {**state, **self._order_facts, "costs": self._costs_fact(epoch), "window": window}

    def load_state_dict(self, state: dict[str, Any], rank: int, world_size: int) -> None:
        """Go on after the samples that the checkpoint's run has consumed.

        Raises:
            ValueError: inside an epoch, this run's order is another: samples would be lost or repeated.
        """
        if state["refits"] and self.lengths is None:
            raise ValueError(
                "the checkpoint's costs were fitted to lengths: pass lengths= to FreeScaleDataModule to go on with it"
            )
        # a checkpoint of an earlier version has none
        state = {
            "window": [state["batches"], 0],
            "costs_are_final": False,
            "budget of": "",
            "token limit": "",
            "cuts": [],
            **state,
        }
        self._load_refits(state, state["ranks"] == world_size)
        self.know_padding(state)
        if state["batches"]:
            self._refuse_another_order(state, world_size)
        self.seed = state["seed"]
        self._resume = (state["epoch"], state["batches"], state["consumed"], state["window"], state["cuts"])

    def know_padding(self, state: dict[str, Any]) -> None:
        """Go by what a checkpoint's run has found out and chosen, unless ``padding`` or ``assignment_mode`` was given."""
        steps, padding = state.get("padded_steps", []), state.get("padding", "auto")
        if self.padding in ("auto", padding) and (self.may_pad or not steps):
            self.padding, self.padded_length = padding, state.get("padded_length")
            self.counts_are_settled = state.get("counts_are_settled", False)
            chosen = () if self._chooses else ("slack", "free")
            self._padded_steps = [
                (epoch, step, {"padded": plan.get("padded", True)} if plan.get("assignment_mode") in chosen else plan)
                for epoch, step, plan in steps
            ]

    def _load_refits(self, state: dict[str, Any], same_ranks: bool) -> None:
        self.refits = {}
        if self.refuses_refits(state):
            return
        for epoch, told in state["refits"].items():
            model = None if told["model"] is None else CostModel(**told["model"])
            # the speeds, too, are those of the ranks that measured
            self.refits[epoch] = Refit(model, told["base"], told["options"] if same_ranks else {})
        self.costs_are_final = state["costs_are_final"] and same_ranks

    def refuses_refits(self, state: dict[str, Any]) -> bool:
        """Whether the costs are those given, although a checkpoint's run has fitted others: this one depends on no clock."""
        return bool(state["refits"]) and self._cost_is_given and not self.calibrates

    def _refuse_another_order(self, state: dict[str, Any], world_size: int) -> None:
        now = {**self._order_facts, "ranks": world_size, "costs": self._costs_fact(state["epoch"])}
        inside = state["window"][1] > 0
        pooled = ["batch_size", "ranks", "drop_last", "costs"] if now["outlier_window"] != 1 or inside else []
        pooled += ["token limit"] if inside else []
        for name in ["samples", "shuffle", "outlier_window", "budget of", *pooled]:
            if state[name] != now[name]:
                where = "between two batches of an optimizer step" if inside else "inside an epoch"
                raise ValueError(
                    f"the checkpoint stopped {where} with {name}={state[name]}, this run has {name}={now[name]}: "
                    "samples would be lost or repeated. Keep it as it was, or resume from a checkpoint made at the end of an "
                    f"{'optimizer step' if inside and now['outlier_window'] == 1 else 'epoch'}."
                )


def map_style_data(trainer: Any) -> MapStyleData | None:
    """Return what the fit trains on, if a data module plans its steps by the index of every sample."""
    train = getattr(getattr(trainer, "datamodule", None), "train", None)
    return train if isinstance(train, MapStyleData) else None


def _refuse_with_budget(options: BalanceOptions, balance: bool, drop_last: bool, shuffle: bool | BlockShuffle) -> None:
    context = "batch_tokens= and batch_cost=, which say how many samples a step has and what a rank may hold"
    if not balance:
        raise ValueError("FreeScaleDataModule(balance=False) has no meaning for " + context + ": leave it out")
    refuse_unused(context, drop_last=drop_last)
    if isinstance(shuffle, BlockShuffle):
        raise ValueError(
            "FreeScaleDataModule(shuffle=BlockShuffle(...)) would read blocks again and again with batch_tokens= or "
            "batch_cost=, which take the samples of a step from all over the order: pass shuffle=True or False, or a number "
            "of samples as batch_size="
        )
    names = ["count_slack", "max_tokens_per_rank", "keep_together", "outlier_window"]
    names += ["assignment_mode"] * (options.assignment_mode != "free") + ["window"] * (options.window is True)
    refuse_options(context, options, *names)


def _is_auto(cost: Any) -> bool:
    return isinstance(cost, str) and cost == "auto"  # of an array == is one


def _shuffle_fact(shuffle: bool | BlockShuffle) -> int | str:
    """What two shuffles must have in common to draw the same order, in a plain value."""
    if not isinstance(shuffle, BlockShuffle):
        return int(shuffle)
    sizes = np.ascontiguousarray(shuffle.sizes, dtype=np.int64)
    return f"BlockShuffle(window={shuffle.window}) of blocks {hashlib.sha256(sizes.tobytes()).hexdigest()[:16]}"
