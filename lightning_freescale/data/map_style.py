"""Map-style training data, the costs of its samples, the plan of its steps, and the progress of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_freescale.balance import BalancedSampler, BlockShuffle, Budget, CostModel, MicroBatchSchedule
from lightning_freescale.balance.assign import AssignmentMode
from lightning_freescale.balance.cost import sample_features
from lightning_freescale.balance.forecast import in_mode, report_plans
from lightning_freescale.balance.validation import non_negative
from lightning_freescale.data.options import DataArguments
from lightning_freescale.data.validation import loss_weights, numbers_of_samples, refuse_options, refuse_unused, size_of

_COMPARED_STEPS = 8
"""The number of steps whose lower bounds are compared."""
_WORTH_UNEQUAL = 1.01
"""The factor by which unequal counts must lower the bound, because they need more memory."""


@dataclass(frozen=True)
class Refit:
    """The result of a calibration."""

    model: CostModel = field(default_factory=CostModel)  # for the plan: of cost="auto" before the first calibration
    base: float = 0.0  # time of a rank's step besides its samples, in the units of the model


class MapStyleData:
    """A map-style data set, the costs of its samples, and the plan of its steps."""

    def __init__(self, dataset: Dataset[Any], given: DataArguments) -> None:
        options, reduction = given.options, given.loss_reduction
        size = size_of(dataset, "train_dataset")
        cost = given.cost if given.lengths is None else None
        read: dict[str, Any] = numbers_of_samples(
            dataset, size, lengths=given.lengths, target_counts=given.target_counts, cost=cost
        )
        lengths, target_counts = read.get("lengths", given.lengths), read.get("target_counts", given.target_counts)
        self.lengths = lengths = None if lengths is None else non_negative("lengths", lengths, size)
        self._given = given.without_data()
        self.costs = self._given_costs(read.get("cost", given.cost), size)  # shape [samples]
        self.calibrates = given.balances and given.has_auto_cost and lengths is not None  # whether costs are fitted
        self._units: dict[CostModel, float] = {}
        self.dataset = dataset
        tokens = lengths if options.tokens is None else non_negative("tokens", options.tokens, size)
        self.budget = _budget(given, tokens)
        self._chooses = options.assignment_mode == "auto"
        default: AssignmentMode = "fixed" if self.budget is None else "free"
        self._mode = default if options.assignment_mode == "auto" else options.assignment_mode
        counted = given.balances and self.budget is None
        self.may_pad = counted and self._mode != "zigzag"  # whether steps may be planned for padded batches
        if options.padding == "batch" and not self.may_pad:
            raise ValueError(
                "BalanceOptions(padding='batch') assigns samples by length. It cannot be combined with batch_tokens=, "
                "balance=False or assignment_mode='zigzag'. Remove them"
            )
        weighs = reduction != "unweighted"
        self._padded_mode: dict[str, Any] = {"assignment_mode": "free"} if self._chooses and weighs else {}
        self._chooses_counts = self._chooses and weighs and counted
        self.drop_last = given.drop_last
        self._new_sampler = partial(
            BalancedSampler,
            self.costs,
            self.budget or given.batch_size,
            shuffle=given.shuffle,
            balance=given.balances,
            drop_last=given.drop_last,
            loss_weights=loss_weights(reduction, lengths, target_counts, size),
            loss_is_sum=reduction == "sum",
            tokens=tokens if self.budget is None else None,
            assignment_mode=self._mode,
            max_tokens_per_rank=options.max_tokens_per_rank,
        )
        # steps share their samples only if this changes the gradient by no more than rounding
        self._shares_windows = self.may_pad and options.padding != "batch" and reduction in ("sample_mean", "sum")
        self._order_facts = self._facts_of_order(size, tokens)
        self.reset_progress()

    def reset_progress(self) -> None:
        """Forget an earlier fit."""
        self.seed = int(self._given.seed)  # checkpoints contain no numpy numbers
        self._resume: tuple[int, int, int | None, list[int] | None, list[Any]] = (0, 0, None, None, [])
        self.refits: dict[int, Refit] = {}  # by the first epoch that uses them
        self.costs_are_final = False  # whether calibration has ended
        self.padding = self._given.options.padding  # "auto" until it is detected
        self.padded_length: int | None = None  # detected common length of all batches
        self.counts_are_settled = False  # whether the ranks have chosen between equal and unequal numbers of samples
        self._padded_steps: list[tuple[int, int, dict[str, Any]]] = []
        if self.padding == "batch":
            self._padded_steps.append((0, 0, self._padded_mode))
        self._sampler: BalancedSampler | None = None
        self.micro_batches = self._given.new_schedule()  # numbers of micro-batches in the steps of this fit

    @property
    def assignment_mode(self) -> str:
        """The mode of :func:`~lightning_freescale.balance.assign` in future steps."""
        changed = self._padded_steps[-1][2] if self._padded_steps else {}
        return str(changed.get("assignment_mode", self._mode))

    @property
    def keeps_equal_counts(self) -> bool:
        """Whether ``assignment_mode="auto"`` has chosen equal numbers of samples, because unequal ones do not help."""
        return self.counts_are_settled and self._chooses_counts and self.assignment_mode == "fixed"

    @property
    def plans_padding(self) -> bool:
        """Whether future steps are planned for padded batches."""
        return self.padding == "batch" and bool(self._padded_steps)

    # -- the plan

    def sampler(self, rank: int, world_size: int) -> BalancedSampler:
        """Return the plan of one of ``world_size`` ranks, starting with epoch 0."""
        return self._sampler_with(self._given.new_schedule(), rank, world_size)

    def _sampler_with(self, schedule: MicroBatchSchedule, rank: int, world_size: int, **given: Any) -> BalancedSampler:
        sampler = self._new_sampler(num_replicas=world_size, rank=rank, seed=self.seed, micro_batches=schedule, **given)
        sampler.may_pad = self.may_pad and self.padding in ("auto", "batch") and self.lengths is not None
        for epoch, step, plan in self._padded_steps:
            sampler.pad_from(epoch, step, **plan)
        return sampler

    def resumed_sampler(
        self, rank: int, world_size: int, epoch: int, accumulated: int = 1, limit: int | float = 1.0
    ) -> BalancedSampler:
        """Return the plan of a rank, which resumes from a loaded checkpoint.

        The ``accumulated`` batches of an optimizer step share their samples if this does not change the gradient.
        """
        window = accumulated if self._shares_windows and world_size > 1 else 1  # a single rank needs no balancing
        sampler = self._sampler = self._sampler_with(self.micro_batches, rank, world_size, window=window, limit=limit)
        for start, refit in sorted(self.refits.items()):
            sampler.replan(start, partial(self.refitted_costs, refit.model))
        sampler.resume(*self._resume)
        sampler.set_epoch(max(epoch, self._resume[0]))  # the Trainer may not know its epoch yet
        return sampler

    def replan(self, epoch: int, refit: Refit) -> None:
        """Use the result of a calibration from ``epoch`` on. Call this with the same arguments on every rank."""
        before, self.refits[epoch] = self.newest_refit, refit
        if self._sampler is not None and refit.model != before.model:
            self._sampler.replan(epoch, partial(self.refitted_costs, refit.model))

    def pad_from(self, epoch: int, step: int, **plan: Any) -> None:
        """Plan for padded batches from a step on, with options of :meth:`BalancedSampler.pad_from`, on every rank."""
        plan = plan or self._padded_mode
        self._padded_steps.append((epoch, step, plan))
        if self._sampler is not None:
            self._sampler.pad_from(epoch, step, **plan)

    def settle_counts(self, epoch: int, step: int) -> str | None:
        """Plan unequal counts of unpadded samples on all ranks from a step on if this lowers the bound; return the reason."""
        sampler = self._sampler
        self.counts_are_settled = True
        if sampler is None or not self._chooses_counts or sampler.num_replicas == 1 or sampler.window > 1:
            return None
        if max(self.micro_batches.candidates) > 1:  # a rank with few samples would limit the micro-batches of all ranks
            return None
        steps = range(sampler.first_step, len(sampler))[:_COMPARED_STEPS]
        plans = [sampler.step_plan(sampler.epoch, each) for each in steps]
        equal, unequal = (report_plans(in_mode(mode, plans), planned=0).lower_bound for mode in ("fixed", "slack"))
        chosen = "the ranks get equal numbers of samples (assignment_mode='fixed')"
        if equal > unequal * _WORTH_UNEQUAL:
            self.pad_from(epoch, step, padded=False, assignment_mode="slack")
            chosen = f"from step {step} on, the ranks get unequal numbers of samples (assignment_mode='slack')"
        bounds = f"{equal:.3f} times the mean with equal numbers, and {unequal:.3f} times with unequal numbers"
        return f"{chosen}. The slowest rank computes at least {bounds}"

    def forget_choices(self) -> None:
        """Forget detected padding and chosen counts, for a strategy that does not weigh losses."""
        if self._chooses and self._given.options.padding != "batch":
            self.padding, self.padded_length, self.counts_are_settled = self._given.options.padding, None, False
            self._padded_steps.clear()

    @property
    def epoch_is_cut_anew(self) -> bool:
        """Whether the current epoch has a different number of steps than the next ones."""
        return self._sampler is not None and len(self._sampler) != self._sampler.steps_per_epoch

    # -- costs

    def costs_by(self, cost: Callable[..., Any], samples: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Return the costs of ``samples``, or of all samples, by another function of the lengths."""
        known = self._lengths_of(samples)
        return non_negative("cost(lengths)", cost(known), len(known))

    def features(self, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return :func:`sample_features` of ``samples``."""
        return sample_features(self._lengths_of(samples))

    def base_in(self, epoch: int) -> float:
        """Return the time of a rank's step besides its samples, in the units of the given costs; 0 if unknown."""
        refit = self._refit_in(epoch)
        return 0.0 if refit is None else refit.base * self._units_of(refit.model)

    @property
    def newest_refit(self) -> Refit:
        """The result of the last calibration."""
        return self.refits[max(self.refits)] if self.refits else Refit()

    def costs_fact(self, epoch: int) -> str:
        """Return a hash of the costs in the plan of an epoch."""
        refit = self._refit_in(epoch)
        costs = self.costs if refit is None else self.refitted_costs(refit.model)
        return hashlib.sha256(costs.tobytes()).hexdigest()

    def refitted_costs(self, model: CostModel) -> NDArray[np.float64]:
        """Return the costs by a fitted model, in the units of the given costs."""
        return self.costs_by(model) * self._units_of(model)

    def refuses_refits(self, state: dict[str, Any]) -> bool:
        """Return whether the given costs take precedence over those that the checkpoint's run has fitted."""
        return bool(state["refits"]) and not self._given.has_auto_cost

    def _given_costs(self, cost: Any, size: int) -> NDArray[np.float64]:
        if isinstance(cost, str) and not self._given.has_auto_cost:
            raise ValueError(f"FreeScaleDataModule(cost={cost!r}): pass 'auto', a function, or the costs")
        if not isinstance(cost, str) and not callable(cost):
            return non_negative("cost", cost, size)
        if self.lengths is not None:
            return self.costs_by(CostModel() if isinstance(cost, str) else cost)
        raise ValueError(
            "FreeScaleDataModule(lengths=None) cannot balance. Pass lengths=, the history length of every sample, or cost=, a "
            "function of a sample or the costs"
        )

    def _units_of(self, model: CostModel) -> float:
        """Return the factor from the units of a fitted model to those of the given costs."""
        if model not in self._units:
            fitted = float(self.costs_by(model).sum())
            self._units[model] = float(self.costs.sum()) / fitted if fitted else 1.0
        return self._units[model]

    def _refit_in(self, epoch: int) -> Refit | None:
        return self.refits.get(max((start for start in self.refits if start <= epoch), default=-1))

    def _lengths_of(self, samples: NDArray[np.int64] | None) -> NDArray[np.float64]:
        assert self.lengths is not None
        return self.lengths if samples is None else self.lengths[samples]

    # -- resume

    def state_dict(self, epoch: int, batches: int, world_size: int) -> dict[str, Any]:
        """Return the progress after ``batches`` steps of ``epoch`` in plain values, equal on every rank."""
        consumed = 0 if self._sampler is None else self._sampler.batches.consumed(epoch, batches)
        state: dict[str, Any] = {"seed": self.seed, "epoch": epoch, "batches": batches, "consumed": consumed}
        refits = {epoch: asdict(refit) for epoch, refit in self.refits.items()}
        state |= {"ranks": world_size, "refits": refits, "costs_are_final": self.costs_are_final}
        window = [batches, 0] if self._sampler is None else list(self._sampler.batches.begun_window(epoch, batches))
        state |= {"padding": self.padding, "padded_length": self.padded_length, "counts_are_settled": self.counts_are_settled}
        state["padded_steps"] = list(self._padded_steps)
        state["cuts"] = [] if self._sampler is None else self._sampler.batches.cuts(epoch)
        return {**state, **self._order_facts, "costs": self.costs_fact(epoch), "window": window}

    def load_state_dict(self, state: dict[str, Any], rank: int, world_size: int) -> None:
        """Resume after the samples that the checkpoint's run has consumed. Raise a ValueError if the order differs."""
        if state["refits"] and self.lengths is None:
            raise ValueError("the checkpoint's costs were fitted to lengths. Pass lengths= to FreeScaleDataModule to resume it")
        self.refits = {}
        if not self.refuses_refits(state):
            for epoch, values in state["refits"].items():
                self.refits[epoch] = Refit(CostModel(**values["model"]), values["base"])
            self.costs_are_final = state["costs_are_final"] and state["ranks"] == world_size
        self.know_padding(state)
        if state["batches"]:
            self._refuse_another_order(state, world_size)
        self.seed = state["seed"]
        self._resume = (state["epoch"], state["batches"], state["consumed"], state["window"], state["cuts"])

    def know_padding(self, state: dict[str, Any]) -> None:
        """Load the padding and counts of a checkpoint's run, unless ``padding`` or ``assignment_mode`` was given."""
        steps, padding = state.get("padded_steps", []), state.get("padding", "auto")
        if self.padding in ("auto", padding) and (self.may_pad or not steps):
            self.padding, self.padded_length = padding, state.get("padded_length")
            self.counts_are_settled = state.get("counts_are_settled", False)
            chosen = () if self._chooses else ("slack", "free")
            self._padded_steps = [
                (epoch, step, {"padded": plan.get("padded", True)} if plan.get("assignment_mode") in chosen else plan)
                for epoch, step, plan in steps
            ]

    def _facts_of_order(self, size: int, tokens: Any) -> dict[str, Any]:
        """Return the values besides seed and costs that determine the order of an epoch.

        Batch size, ``drop_last`` and the token limit matter between two batches of an optimizer step.
        """
        given, options = self._given, self._given.options
        facts = {
            "samples": size,
            "shuffle": _shuffle_fact(given.shuffle),
            "batch_size": int(given.batch_size),
            "drop_last": int(given.drop_last),
            "budget of": "" if self.budget is None else hashlib.sha256(self.budget.in_whole_numbers[0].tobytes()).hexdigest(),
            "token limit": "",
        }
        if tokens is not None and options.max_tokens_per_rank is not None:
            limits = (options.max_tokens_per_rank, self._mode)
            values = np.asarray(tokens, dtype=np.float64).tobytes() + repr(limits).encode()
            facts["token limit"] = hashlib.sha256(values).hexdigest()
        return facts

    def _refuse_another_order(self, state: dict[str, Any], world_size: int) -> None:
        now = {**self._order_facts, "ranks": world_size, "costs": self.costs_fact(state["epoch"])}
        inside = state["window"][1] > 0
        shared = ["batch_size", "ranks", "drop_last", "costs", "token limit"] if inside else []
        for name in ["samples", "shuffle", "budget of", *shared]:
            if state[name] != now[name]:
                where = "between two batches of an optimizer step" if inside else "inside an epoch"
                raise ValueError(
                    f"the checkpoint stopped {where} with {name}={state[name]}, but this run has {name}={now[name]}. Samples "
                    "would be lost or repeated. Use the previous value, or resume from a checkpoint of the end of an "
                    f"{'optimizer step' if inside else 'epoch'}"
                )


def map_style_data(trainer: Any) -> MapStyleData | None:
    """Return the training data of the Trainer's data module; None unless it is map-style."""
    train = getattr(getattr(trainer, "datamodule", None), "train", None)
    return train if isinstance(train, MapStyleData) else None


def describe_budget(sampler: BalancedSampler) -> str | None:
    """Return the number of samples of the steps as text; None without a budget."""
    if sampler.batches.fill is None:
        return None
    counts = sorted({len(sampler.global_batch(sampler.epoch, step)) for step in (sampler.first_step, len(sampler) - 1)})
    return (
        f"{len(sampler)} steps an epoch of {' or '.join(map(str, counts))} samples on {sampler.num_replicas} ranks, which use "
        f"{sampler.batches.fill:.1%} of the budget"
    )


def _budget(given: DataArguments, tokens: Any) -> Budget | None:
    if given.batch_tokens is None:
        return None
    if tokens is None:
        raise ValueError(
            f"FreeScaleDataModule(batch_tokens={given.batch_tokens!r}) needs the tokens of every sample. Pass lengths= or "
            "BalanceOptions(tokens=...)"
        )
    context = "batch_tokens=, which determines the samples of a step"
    refuse_unused(context, drop_last=given.drop_last)
    if not given.balances:
        raise ValueError(f"FreeScaleDataModule(balance=False) has no effect with {context}. Remove it")
    if isinstance(given.shuffle, BlockShuffle):
        raise ValueError(
            "FreeScaleDataModule(shuffle=BlockShuffle(...)) would read blocks repeatedly with batch_tokens=, which selects the "
            "samples of a step from the whole order. Pass shuffle=True or False, or batch_size= instead of batch_tokens="
        )
    options = given.options
    names = ["max_tokens_per_rank"] + ["assignment_mode"] * (options.assignment_mode != "free")
    refuse_options(context, options, *names)
    return Budget(given.batch_tokens, tokens)


def _shuffle_fact(shuffle: bool | BlockShuffle) -> int | str:
    """Return a plain value that is equal for shuffles with the same order."""
    if not isinstance(shuffle, BlockShuffle):
        return int(shuffle)
    sizes = np.ascontiguousarray(shuffle.sizes, dtype=np.int64)
    return f"BlockShuffle(window={shuffle.window}) of blocks {hashlib.sha256(sizes.tobytes()).hexdigest()[:16]}"
