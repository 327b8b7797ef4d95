"""Which rank takes which samples of every step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data.distributed import DistributedSampler

from lightning_freescale.balance.budget import Budget
from lightning_freescale.balance.epoch_order import BlockShuffle
from lightning_freescale.balance.global_batches import GlobalBatches
from lightning_freescale.balance.micro_batches import MicroBatches, MicroBatchSchedule, cut, most_parts
from lightning_freescale.balance.plan import PlanArguments, PlanPrefetcher, StepPlan
from lightning_freescale.balance.report import BalanceReport, StepBalance
from lightning_freescale.balance.solver import Ints
from lightning_freescale.balance.validation import Floats, is_number, non_negative, number_groups, whole_number

EXPLORATION_STEPS = 50
"""Steps of epoch 0 among which some stay as drawn while costs are calibrated, see :class:`BalancedSampler`."""


class BalancedSampler(DistributedSampler["list[int] | MicroBatches"]):
    """Yields the index list of each step for one rank; of steps with micro-batches, :class:`MicroBatches` of index lists.

    The plan is a pure function of (costs, seed, epoch, step, world size): every rank computes the whole of it and takes its
    own column, without communication. Balancing changes which rank computes a sample, never which samples a step has.
    While it is iterated over, a thread plans the next steps.

    Args:
        costs: predicted compute time per sample, shape ``[samples]``.
        batch_size: samples per rank and step; or the :class:`Budget` that says how many there is room for, at any counts.
        num_replicas: world size.
        rank: the rank to yield for.
        seed: seeds the shuffle, together with the epoch.
        shuffle: draw a new order every epoch, of all samples or as :class:`BlockShuffle` says; else keep that of the data set.
        balance: assign by cost; else split the drawn order contiguously.
        drop_last: leave out the samples of an incomplete last step. Otherwise the last step is uneven (counts differ by
            at most one), and fewer left-over samples than ranks join the step before, so every rank always has a sample.
        loss_weights: weight of a sample in the mean loss, shape ``[samples]``; all one if not given.
        loss_is_sum: the loss of a rank is a sum over its samples, not a mean.
        outlier_window: exchange samples between this many consecutive steps so that those that dominate a step come together,
            see :func:`pool_outliers`. Not gradient-identical: it changes which samples share a step. 1 for no exchange.
        tokens: tokens per sample, shape ``[samples]``, for ``max_tokens_per_rank`` and the report.
        keep_together: group of each sample, shape ``[samples]``; samples of a group that share a step go to one rank.
        exploration_steps: leave every fifth of the first so many steps of epoch 0 as drawn, unless a limit forbids it.
            Balanced steps hardly differ in what a cost model is fitted to; a few that do tell its coefficients apart.
        micro_batches: how many each step has; one if not given. A step has fewer where a rank has fewer samples that weigh
            something.
        window: how many of these steps make one optimizer step, whose gradients are accumulated. Their samples are shared
            out among them, see :func:`share_window`, and weighed as one batch; those of an incomplete last step stay its own,
            and so do all where the samples of a step would not fit into ``max_tokens_per_rank`` then.
        limit: how many steps of an epoch are trained on, or as a float, which share of them, as
            ``Trainer(limit_train_batches=...)``. What is shared out is among these.
        padded: the ranks pad their samples to the longest one, see :func:`assign`. Micro-batches are padded by themselves, and
            have samples of about the same cost. If ``tokens`` are given without a limit, no rank of a step holds more of them,
            padding included, than the fullest one would as drawn.
        **options: ``assignment_mode``, ``count_slack``, ``max_tokens_per_rank`` and ``rank_speeds`` of :func:`assign`.

    Attributes:
        handed_out: the last (epoch, step) that the loader has read.
        may_pad: whether the ranks pad their samples, or may turn out to.

    Raises:
        ValueError: an argument does not fit; names it, its value and the fix.

    Examples:
        >>> costs = [900, 40, 30, 20, 400, 10, 350, 60]
        >>> for rank in range(2):
        ...     list(BalancedSampler(costs, batch_size=2, num_replicas=2, rank=rank, shuffle=False))
        [[0, 3], [4, 5]]
        [[1, 2], [6, 7]]
    """

    def __init__(
        self,
        costs: ArrayLike,
        batch_size: int | Budget,
        *,
        num_replicas: int,
        rank: int,
        seed: int = 0,
        shuffle: bool | BlockShuffle = True,
        balance: bool = True,
        drop_last: bool = False,
        loss_weights: ArrayLike | None = None,
        loss_is_sum: bool = False,
        outlier_window: int = 1,
        tokens: ArrayLike | None = None,
        keep_together: ArrayLike | None = None,
        exploration_steps: int = 0,
        micro_batches: MicroBatchSchedule | None = None,
        window: int = 1,
        limit: int | float = 1.0,
        padded: bool = False,
        **options: Any,
    ) -> None:
        # DistributedSampler's own constructor insists on a data set; being one is what makes Lightning leave us alone.
        _refuse_out_of_range(batch_size, num_replicas, rank, outlier_window, window, limit)
        self.budget = batch_size if isinstance(batch_size, Budget) else None
        if self.budget is not None:
            given = {"tokens": tokens is not None, "keep_together": keep_together is not None, "drop_last": drop_last}
            given |= {"outlier_window": outlier_window > 1, "shuffle": isinstance(shuffle, BlockShuffle)}
            _refuse_with_budget(given, options)
            tokens, most = self.budget.in_whole_numbers
            non_negative("Budget(sizes=...)", tokens, np.size(costs))
            options = {**options, "assignment_mode": "free", "max_tokens_per_rank": most}
        limited = keep_together is not None or options.get("max_tokens_per_rank") is not None
        placed = keep_together is not None or self.budget is not None or outlier_window > 1
        _refuse_limits(limited, placed, window, balance)
        rounded = _rounded(costs)
        samples = len(rounded)
        weights = np.ones(samples) if loss_weights is None else loss_weights
        self.loss_weights, self.loss_is_sum = non_negative("BalancedSampler(loss_weights=...)", weights, samples), loss_is_sum
        self.batch_size, self.num_replicas, self.rank, self.window = batch_size, num_replicas, rank, window
        self.seed, self.shuffle, self.drop_last = seed, bool(shuffle), drop_last
        self.blocks = shuffle if isinstance(shuffle, BlockShuffle) else None
        self.balance_steps, self.outlier_window, self.epoch = balance, outlier_window, 0
        self.exploration_steps = 0 if limited else exploration_steps  # a contiguous split keeps no limits
        self.micro_batches = micro_batches or MicroBatchSchedule(1, 1)
        self.handed_out, self.may_pad = (0, -1), padded
        self._changes: list[tuple[tuple[int, int], dict[str, Any]]] = []
        per_sample: dict[str, NDArray[Any]] = {}
        if tokens is not None:
            per_sample["tokens"] = non_negative("BalancedSampler(tokens=...)", tokens, samples)
        if keep_together is not None:
            per_sample["keep_together"] = number_groups(keep_together, samples)
        self._arguments = PlanArguments(rounded, per_sample, options)
        self._batches = GlobalBatches(
            self._arguments,
            batch_size,
            num_replicas,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            outlier_window=outlier_window,
            window=window,
            limit=limit,
        )
        self._replans: dict[int, tuple[Callable[[], ArrayLike] | None, dict[str, Any]]] = {}
        self._plans = PlanPrefetcher(self._make_plan, complete=self._complete_plan)
        if padded:
            self.pad_from(0, 0)
        self.step_plan(0, 0).balance  # noqa: B018 (what does not fit is refused now, not in the first step)

    @property
    def costs(self) -> Floats:
        """Predicted compute time per sample, shape ``[samples]``, rounded to 24 bits."""
        return self._arguments.costs

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of :func:`assign` for all steps."""
        return self._arguments.options

    @property
    def per_sample(self) -> dict[str, NDArray[Any]]:
        """``tokens`` and ``keep_together``, if they were given, shape ``[samples]`` each."""
        return dict(self._arguments.per_sample)

    @property
    def speed(self) -> float:
        """Of this rank, relative to the others, by ``rank_speeds``."""
        speeds = self.options.get("rank_speeds")
        return 1.0 if speeds is None else float(speeds[self.rank])

    # -- iteration

    def set_epoch(self, epoch: int) -> None:
        """Draw and plan ``epoch`` from now on; Lightning calls it at the start of every epoch."""
        self.epoch = epoch
        for start in sorted(e for e in self._replans if e <= epoch):
            costs, options = self._replans.pop(start)
            self._arguments = replace(
                self._arguments,
                costs=self.costs if costs is None else _rounded(costs()),
                options={**self.options, **options},
            )
            self._batches.use(self._arguments)
            self._plans.forget()

    def resume(
        self,
        epoch: int,
        batches: int,
        samples: int | None = None,
        window: Sequence[int] | None = None,
        cuts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Start ``epoch`` after its first ``batches`` steps; every other epoch starts at its beginning.

        Args:
            epoch: the epoch in which the run stopped.
            batches: steps that it had done.
            samples: samples that those had, if their number of ranks or batch size was another; the rest of the epoch is cut
                anew, in the same order.
            window: that of the run that stopped, see :meth:`begun_window`, if it was another; what it has begun is ended as it
                was shared out.
            cuts: how that run had cut the epoch by its budget, see :meth:`cuts`; as this one does if not given.

        Raises:
            ValueError: fewer samples are left than there are ranks.
        """
        self._batches.resume(epoch, batches, samples, window, cuts)
        self._plans.forget()

    def __len__(self) -> int:
        """Return the steps of the epoch, those before a :meth:`resume` included."""
        return self._batches.end(self.epoch)

    @property
    def first_step(self) -> int:
        """The step that the current epoch starts with: 0 unless it was resumed."""
        return self._batches.first_step(self.epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch that starts at its beginning."""
        return self._batches.steps_per_epoch

    def __iter__(self) -> Iterator[list[int] | MicroBatches]:
        epoch, end = self.epoch, len(self)
        with self._plans.running():
            for step in range(self._batches.first_step(epoch), end):
                self._plans.prepare(epoch, step, end)
                self.handed_out = (epoch, step)
                yield self.batch_of_rank(epoch, step)

    def batch_of_rank(self, epoch: int, step: int) -> list[int] | MicroBatches:
        """Return what this rank computes in a step: indices into the data set, of each micro-batch if there are several."""
        of_ranks = self.step_plan(epoch, step).samples_of_ranks
        samples = of_ranks[self.rank]
        parts = self.micro_batches.count(epoch, step)
        groups = self._arguments.per_sample.get("keep_together")
        if parts > 1:  # all ranks have as many: they meet in each
            together_of = (None if groups is None else groups[each] for each in of_ranks)
            parts = min(parts, *map(most_parts, (self.loss_weights[each] for each in of_ranks), together_of))
        if parts == 1:
            return samples.tolist()
        together = None if groups is None else groups[samples]
        costs, weights, padded = self.costs[samples], self.loss_weights[samples], self.is_padded(epoch, step)
        return cut(samples.tolist(), parts, costs, weights, loss_is_sum=self.loss_is_sum, groups=together, padded=padded)

    # -- the plan

    def step_plan(self, epoch: int, step: int) -> StepPlan:
        """Return the plan of all ranks for a step."""
        plan, options = self._plans.get(epoch, step), self._changed_options(epoch, step)
        made = {name: plan.options.get(name) for name in options} if options else plan.padded
        if made != (options or False):  # before that was known
            self._plans.forget()
            plan = self._plans.get(epoch, step)
        return plan

    def plan(self, epoch: int, step: int) -> list[Ints]:
        """Return the samples of every rank in a step: ``ranks`` int arrays of indices into the data set."""
        return self.step_plan(epoch, step).samples_of_ranks

    def global_batch(self, epoch: int, step: int) -> Ints:
        """Return the samples of a step in drawn order, the same with and without balancing; shape ``[samples]``.

        With a window, those of its steps together are the same.
        """
        return self._batches.samples(epoch, step)

    def begun_window(self, epoch: int, batches: int) -> tuple[int, int]:
        """Return the first of the steps that a run shares samples out among, and how many, if it stops inside of them.

        Args:
            epoch: where it stops.
            batches: steps that it has done; between two windows, it has begun none: ``(batches, 0)``.
        """
        return self._batches.begun_window(epoch, batches)

    def consumed(self, epoch: int, batches: int) -> int:
        """Return how many samples the first ``batches`` steps of an epoch have."""
        return self._batches.consumed(epoch, batches)

    def cuts(self, epoch: int) -> list[tuple[int, ...]]:
        """Return how an epoch is cut by the budget, for :meth:`resume`; nothing without one."""
        return self._batches.cuts(epoch)

    @property
    def fill(self) -> float | None:
        """The share of the budget that an epoch uses; None without one."""
        return self._batches.fill

    def counts(self, step: int) -> list[int]:
        """Return how many samples every rank has in a step of the current epoch."""
        return np.bincount(self.step_plan(self.epoch, step).rank_of_sample, minlength=self.num_replicas).tolist()

    def loss_weight(self, step: int) -> float:
        """Return the factor for this rank's loss that makes the average over ranks that over the global batch (or its sum)."""
        if self.loss_is_sum:
            return float(self.num_replicas)
        plan = self.step_plan(self.epoch, step)
        weights = np.bincount(plan.rank_of_sample, self.loss_weights[plan.samples], self.num_replicas)
        steps = self._batches.sharing_steps(self.epoch, step)
        # the mean over the window, not over each of its steps: which of them a sample is in must not matter
        total = sum(self.loss_weights[self.global_batch(self.epoch, each)].sum() for each in steps) / len(steps)
        return rank_loss_weight(weights.tolist(), self.rank, float(total))

    def balance(self, step: int) -> StepBalance:
        """Return what the assignment of a step of the current epoch is worth."""
        return self.step_plan(self.epoch, step).balance

    def report(self, epoch: int | None = None) -> BalanceReport:
        """Return what balancing brings over the steps of an epoch, the current one by default."""
        epoch = self.epoch if epoch is None else epoch
        steps = range(self._batches.first_step(epoch), self._batches.end(epoch))
        return BalanceReport.from_steps(self.step_plan(epoch, step).balance for step in steps)

    def replan(self, epoch: int, costs: Callable[[], ArrayLike] | None = None, **options: Any) -> None:
        """From ``epoch`` on use other costs or options of :func:`assign`; call it with the same arguments on every rank.

        Args:
            epoch: a later epoch than the current one.
            costs: gives the costs, shape ``[samples]``; called when the epoch starts.
            **options: those that change.
        """
        before = self._replans.get(epoch, (None, {}))
        self._replans[epoch] = (before[0] if costs is None else costs, {**before[1], **options})

    def pad_from(self, epoch: int, step: int, *, padded: bool = True, **options: Any) -> None:
        """Plan for ranks that pad their samples, or by other options, from a step on; call it alike on every rank.

        Args:
            epoch: of the first step.
            step: that step; the loader must not have read it.
            padded: whether the ranks pad their samples from that step on.
            **options: of :func:`assign` for these steps, instead of those given.

        Raises:
            RuntimeError: the step was handed out, so that the ranks might differ in it.
            ValueError: ``keep_together`` or a :class:`Budget` was given.
        """
        if self.handed_out >= (epoch, step):
            raise RuntimeError(f"pad_from({epoch}, {step}): the loader has already read up to {self.handed_out}")
        if padded and (self.budget is not None or "keep_together" in self._arguments.per_sample):
            raise ValueError(
                "BalancedSampler(padded=True) needs a number of samples as batch_size, and no keep_together: leave one of them "
                "out"
            )
        self._changes.append(((epoch, step), {"padded": True, **options} if padded else options))

    def is_padded(self, epoch: int, step: int) -> bool:
        """Return whether a step is planned for ranks that pad their samples."""
        return bool(self._changed_options(epoch, step).get("padded"))

    def options_in(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the arguments of :func:`assign` for a step, without those that have a value per sample."""
        return {**self.options, **self._changed_options(epoch, step)}

    def load(self, epoch: int, step: int, values_of: Callable[[Ints], NDArray[Any]]) -> NDArray[Any]:
        """Return what this rank computes for in a step: values of its samples added up, and of what they are padded to.

        Args:
            epoch: of the step.
            step: the step.
            values_of: returns the values of some samples, shape ``[samples, values]``.
        """
        batch, padded = self.batch_of_rank(epoch, step), self.is_padded(epoch, step)
        parts = [values_of(np.array(part)) for part in (batch.batches if isinstance(batch, MicroBatches) else [batch])]
        return np.sum([len(part) * part.max(axis=0) if padded else part.sum(axis=0) for part in parts], axis=0)

    def _changed_options(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the options of :func:`assign` that :meth:`pad_from` has given a step."""
        options: dict[str, Any] = next((options for start, options in reversed(self._changes) if start <= (epoch, step)), {})
        return {"parts": self.micro_batches.peek(epoch, step), **options} if options.get("padded") else options

    def digest(self) -> str:
        """Return a hash of the current epoch's costs, order, options and first step: equal on all ranks unless plans differ."""
        plan = self.step_plan(self.epoch, min(self.first_step, len(self) - 1))
        options = sorted(self.options.items())
        setting: tuple[Any, ...] = (
            len(self),
            self.num_replicas,
            self.balance_steps,
            self.loss_is_sum,
            self.exploration_steps,
            options,
        )
        setting += (self.micro_batches.candidates, self.micro_batches.chosen, self.window, self._changes)
        state = hashlib.sha256(repr(setting).encode())
        order, per_sample = self._batches.order(self.epoch), self._arguments.per_sample.values()
        for array in (self.costs, self.loss_weights, order, plan.rank_of_sample, *per_sample):
            state.update(np.ascontiguousarray(array).tobytes())
        return state.hexdigest()

    def _make_plan(self, epoch: int, step: int) -> StepPlan:
        samples, arguments = self.global_batch(epoch, step), self._arguments
        options, known = arguments.options_of(samples), self._batches.ranks_within_budget(epoch, step)
        if known is not None:
            options["fallback"] = known
        options |= self._changed_options(epoch, step)
        explores = epoch == 0 and step < self.exploration_steps and is_exploration_step(step)
        balanced, drawn = self.balance_steps and not explores, self._batches.as_drawn(epoch, step)
        return StepPlan(samples, arguments.costs[samples], self.num_replicas, balanced, options, drawn=drawn)

    def _complete_plan(self, plan: StepPlan) -> None:
        plan.samples_of_ranks  # noqa: B018 (computed here, in the thread)
        if self.rank == 0:
            plan.balance  # noqa: B018 (which rank 0 logs)


def _refuse_out_of_range(
    batch_size: int | Budget, ranks: int, rank: int, outlier_window: int, window: int, limit: int | float
) -> None:
    for name, value in {"outlier_window": outlier_window, "window": window, "num_replicas": ranks}.items():
        whole_number(f"BalancedSampler({name}={{}})", value)
    whole_number("BalancedSampler(rank={})", rank, 0)
    if not isinstance(batch_size, Budget):
        whole_number("BalancedSampler(batch_size={})", batch_size)
    if not is_number(limit) or limit < 0 or (limit > 1 and not isinstance(limit, Integral)):
        raise ValueError(f"BalancedSampler(limit={limit!r}): pass a number of steps, or a share of them from 0.0 to 1.0")
    if rank >= ranks:
        raise ValueError(f"BalancedSampler(num_replicas={ranks!r}, rank={rank!r}): pass a rank below num_replicas")


def _refuse_limits(limited: bool, placed: bool, window: int, balance: bool) -> None:
    """Refuse what leaves no say to who keeps a limit, or (``placed``) to a window."""
    if window > 1 and (placed or not balance):
        raise ValueError(
            f"BalancedSampler(window={window}) shares samples out among steps by their costs: leave keep_together, "
            "outlier_window and balance=False out, and pass a number of samples as batch_size, or use window=1"
        )
    if limited and not balance:
        raise ValueError(
            "BalancedSampler(balance=False) leaves the samples as drawn and keeps no limit: leave keep_together and "
            "max_tokens_per_rank out, and pass a number of samples as batch_size"
        )


def _refuse_with_budget(given: dict[str, bool], options: dict[str, Any]) -> None:
    """Refuse what has no meaning where a budget says which samples a step has, and how many a rank may take."""
    given = {**given, "max_tokens_per_rank": options.get("max_tokens_per_rank") is not None}
    given["assignment_mode"] = options.get("assignment_mode", "free") != "free"
    for name in (name for name, is_given in given.items() if is_given):
        raise ValueError(
            f"BalancedSampler({name}=...) has no meaning with a Budget, which takes the samples of a step from all over the "
            "order, limits the tokens of a rank and leaves its number of samples free: leave it out"
        )


def is_exploration_step(step: int) -> bool:
    """Return True for every fifth step; not for the first, by which the ranks compare their plans."""
    # balanced steps differ too little to tell a cost per token from a cost per step: without these, fits were up to twice as
    # far off
    return step % 5 == 4


def rank_loss_weight(weights: Sequence[float], rank: int, total: float | None = None) -> float:
    """Return ``local_weight * world_size / global_weight`` from the weights of all ranks; 1 if nothing weighs anything.

    Args:
        weights: of the ranks in a step.
        rank: whose factor it is.
        total: the global weight; the sum of ``weights`` if not given.
    """
    total = sum(weights) if total is None else total
    return float(weights[rank] * len(weights) / total) if total else 1.0


def _rounded(costs: ArrayLike) -> Floats:
    # to 24 bits, so that the last digits of a user's function on another kind of processor make no other plan
    mantissa, exponent = np.frexp(non_negative("BalancedSampler(costs=...)", costs))
    return np.ldexp(np.rint(np.ldexp(mantissa, 24)), exponent - 24)
