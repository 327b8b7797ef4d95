"""The samples of every step, and which rank takes which of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data.distributed import DistributedSampler

from lightning_freescale.balance.assign import assign
from lightning_freescale.balance.budget import Budget, BudgetSteps
from lightning_freescale.balance.epoch_order import BlockShuffle, StepBoundaries, draw_order, pool_outliers
from lightning_freescale.balance.micro_batches import MicroBatches, MicroBatchSchedule, cut, most_parts
from lightning_freescale.balance.plan import PlanPrefetcher, StepPlan
from lightning_freescale.balance.report import BalanceReport, StepBalance
from lightning_freescale.balance.solver import Ints
from lightning_freescale.balance.validation import Floats, is_number, non_negative, number_groups, whole_number
from lightning_freescale.balance.window import DrawnSteps, share_window

Value = TypeVar("Value")

EXPLORATION_STEPS = 50
"""Steps of epoch 0 among which some stay as drawn while costs are calibrated, see :class:`BalancedSampler`."""

_KEPT_WINDOWS = 32
"""Loader workers read ahead of training, which asks for its own window's samples in every step."""


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
        **options: ``assignment_mode``, ``count_slack``, ``max_tokens_per_rank`` and ``rank_speeds`` of :func:`assign`.

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
        self.costs = self._costs_of_order = _rounded(costs)  # a new plan must not change which samples a step has
        samples = len(self.costs)
        weights = np.ones(samples) if loss_weights is None else loss_weights
        self.loss_weights, self.loss_is_sum = non_negative("BalancedSampler(loss_weights=...)", weights, samples), loss_is_sum
        self.batch_size, self.num_replicas, self.rank = batch_size, num_replicas, rank
        self.seed, self.shuffle, self.drop_last = seed, bool(shuffle), drop_last
        self.blocks = shuffle if isinstance(shuffle, BlockShuffle) else None
        self.balance_steps, self.outlier_window = balance, outlier_window
        self.exploration_steps = 0 if limited else exploration_steps  # a contiguous split keeps no limits
        self.epoch, self.options = 0, options
        self.micro_batches = micro_batches or MicroBatchSchedule(1, 1)
        self.window, self._limit, self._interrupted = window, limit, (0, 0, 0)
        self._per_sample: dict[str, NDArray[Any]] = {}
        if tokens is not None:
            self._per_sample["tokens"] = non_negative("BalancedSampler(tokens=...)", tokens, samples)
        if keep_together is not None:
            self._per_sample["keep_together"] = number_groups(keep_together, samples)
        if self.blocks is not None and self.blocks.samples != samples:
            raise ValueError(
                f"BlockShuffle(sizes=...) has {self.blocks.samples} samples in all, the data set {samples}: pass the "
                "samples of each block of this data set"
            )
        self._steps: StepBoundaries | BudgetSteps
        if isinstance(batch_size, Budget):
            self._steps = BudgetSteps(batch_size, num_replicas)
        else:
            self._steps = StepBoundaries(samples, batch_size, num_replicas, drop_last)
        self._replans: dict[int, tuple[Callable[[], ArrayLike] | None, dict[str, Any]]] = {}
        self._drawn: tuple[int, Ints, Ints] | None = None  # an epoch's samples, in the order of its steps and as drawn
        self._windows: dict[tuple[int, int], list[Ints]] = {}
        self._drawn_steps: dict[tuple[int, int], DrawnSteps] = {}
        self._plans = PlanPrefetcher(self._make_plan, complete=self._complete_plan)
        self.step_plan(0, 0).balance  # noqa: B018 (what does not fit is refused now, not in the first step)

    @property
    def per_sample(self) -> dict[str, NDArray[Any]]:
        """``tokens`` and ``keep_together``, if they were given, shape ``[samples]`` each."""
        return dict(self._per_sample)

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
            if costs is not None:
                self.costs = _rounded(costs())
            self.options = {**self.options, **options}
            self._drawn = None
            self._forget()

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
        if isinstance(self._steps, BudgetSteps):
            self._steps.resume(epoch, batches, self._draw_order(epoch), cuts)
            self._drawn = None
        else:
            self._steps.resume(epoch, batches, samples)
        self._interrupted = (0, 0, 0)
        begun, steps = self.begun_window(epoch, batches) if window is None else window
        self._interrupted = (epoch, begun, steps)
        self._forget()

    def __len__(self) -> int:
        """Return the steps of the epoch, those before a :meth:`resume` included."""
        return len(self._steps.for_epoch(self.epoch)) - 1

    @property
    def first_step(self) -> int:
        """The step that the current epoch starts with: 0 unless it was resumed."""
        return self._steps.first_step(self.epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch that starts at its beginning."""
        return len(self._steps.full_epoch) - 1

    def __iter__(self) -> Iterator[list[int] | MicroBatches]:
        epoch, end = self.epoch, len(self)
        with self._plans.running():
            for step in range(self._steps.first_step(epoch), end):
                self._plans.prepare(epoch, step, end)
                yield self._batch_of_rank(epoch, step)

    def _batch_of_rank(self, epoch: int, step: int) -> list[int] | MicroBatches:
        of_ranks = self.step_plan(epoch, step).samples_of_ranks
        samples = of_ranks[self.rank]
        parts = self.micro_batches.count(epoch, step)
        groups = self._per_sample.get("keep_together")
        if parts > 1:  # all ranks have as many: they meet in each
            together_of = (None if groups is None else groups[each] for each in of_ranks)
            parts = min(parts, *map(most_parts, (self.loss_weights[each] for each in of_ranks), together_of))
        if parts == 1:
            return samples.tolist()
        together = None if groups is None else groups[samples]
        costs, weights = self.costs[samples], self.loss_weights[samples]
        return cut(samples.tolist(), parts, costs, weights, loss_is_sum=self.loss_is_sum, groups=together)

    # -- the plan

    def step_plan(self, epoch: int, step: int) -> StepPlan:
        """Return the plan of all ranks for a step."""
        return self._plans.get(epoch, step)

    def plan(self, epoch: int, step: int) -> list[Ints]:
        """Return the samples of every rank in a step: ``ranks`` int arrays of indices into the data set."""
        return self.step_plan(epoch, step).samples_of_ranks

    def global_batch(self, epoch: int, step: int) -> Ints:
        """Return the samples of a step in drawn order, the same with and without balancing; shape ``[samples]``.

        With a window, those of its steps together are the same.
        """
        edges = self._steps.for_epoch(epoch)
        steps = self._sharing_steps(epoch, step)
        if len(steps) < 2:
            return self._order(epoch)[edges[step] : edges[step + 1]]
        shared = self._windows.get((epoch, steps.start))
        if shared is None:
            samples = self._order(epoch)[edges[steps.start] : edges[steps.stop]]
            batch_of_sample = share_window(self.costs[samples], len(steps), self.num_replicas)
            shared = [samples[batch_of_sample == batch] for batch in range(len(steps))]
            if self.options.get("max_tokens_per_rank") is not None and not all(map(self._fits, shared)):
                shared = np.split(samples, len(steps))  # as drawn
            self._windows = _kept(self._windows, (epoch, steps.start), shared)
        return shared[step - steps.start]

    def _exchanging_steps(self, epoch: int, step: int) -> DrawnSteps | None:
        """Return the steps that exchange samples with one as they were drawn; None if it has those it was drawn with."""
        edges, order, window = self._steps.for_epoch(epoch), self._order(epoch), self.outlier_window == 1
        steps = self._sharing_steps(epoch, step)
        if not window:
            first = step - step % self.outlier_window
            steps, order = range(first, min(first + self.outlier_window, len(edges) - 1)), self._as_drawn(epoch)
        if len(steps) < 2:
            return None
        drawn = [order[edges[each] : edges[each + 1]] for each in steps]
        if window and all(np.array_equal(one, self.global_batch(epoch, each)) for one, each in zip(drawn, steps)):
            return None  # a limit keeps them apart
        key = epoch, steps.start
        if key not in self._drawn_steps:
            tokens = self._per_sample.get("tokens")
            of_steps = None if tokens is None else [tokens[each] for each in drawn]
            found = DrawnSteps([self.costs[each] for each in drawn], of_steps, self.num_replicas, window=window)
            self._drawn_steps = _kept(self._drawn_steps, key, found)
        return self._drawn_steps[key]

    def _fits(self, samples: Ints) -> bool:
        """Return whether a plan is found for the samples of a step within the limit on tokens."""
        try:
            assign(self.costs[samples], self.num_replicas, **self._options_of(samples))
        except ValueError:
            return False
        return True

    def begun_window(self, epoch: int, batches: int) -> tuple[int, int]:
        """Return the first of the steps that a run shares samples out among, and how many, if it stops inside of them.

        Args:
            epoch: where it stops.
            batches: steps that it has done; between two windows, it has begun none: ``(batches, 0)``.
        """
        steps = self._sharing_steps(epoch, batches)
        return (steps.start, len(steps)) if steps.start < batches else (batches, 0)

    def _sharing_steps(self, epoch: int, step: int) -> range:
        """Return the steps that share their samples out with one: the full ones of its window; or it alone."""
        resumed, begun, interrupted = self._interrupted
        if epoch == resumed and begun <= step < begun + interrupted:  # by the run before
            return range(begun, begun + interrupted)
        if self.window == 1 or self.budget is not None:
            return range(step, step + 1)
        first = step - step % self.window
        end = first + self.window
        if epoch == resumed and step >= begun + interrupted:
            first = max(first, begun + interrupted)
        full, edges = cast(int, self.batch_size) * self.num_replicas, self._steps.for_epoch(epoch)
        steps = len(edges) - 1
        # an optimizer step that the limit ends early has its own samples, not the dearest of more
        last = min(self._limit, steps) if isinstance(self._limit, int) else int(self._limit * steps)
        shared = [each for each in range(first, min(end, last)) if edges[each + 1] - edges[each] == full]
        return range(shared[0], shared[-1] + 1) if step in shared else range(step, step + 1)

    def consumed(self, epoch: int, batches: int) -> int:
        """Return how many samples the first ``batches`` steps of an epoch have."""
        return self._steps.for_epoch(epoch)[batches]

    def cuts(self, epoch: int) -> list[tuple[int, ...]]:
        """Return how an epoch is cut by the budget, for :meth:`resume`; nothing without one."""
        return [tuple(cut) for cut in self._steps.cuts(epoch)] if isinstance(self._steps, BudgetSteps) else []

    @property
    def fill(self) -> float | None:
        """The share of the budget that an epoch uses; None without one."""
        return self._steps.fill if isinstance(self._steps, BudgetSteps) else None

    def counts(self, step: int) -> list[int]:
        """Return how many samples every rank has in a step of the current epoch."""
        return np.bincount(self.step_plan(self.epoch, step).rank_of_sample, minlength=self.num_replicas).tolist()

    def loss_weight(self, step: int) -> float:
        """Return the factor for this rank's loss that makes the average over ranks that over the global batch (or its sum)."""
        if self.loss_is_sum:
            return float(self.num_replicas)
        plan = self.step_plan(self.epoch, step)
        weights = np.bincount(plan.rank_of_sample, self.loss_weights[plan.samples], self.num_replicas)
        steps = self._sharing_steps(self.epoch, step)
        # the mean over the window, not over each of its steps: which of them a sample is in must not matter
        total = sum(self.loss_weights[self.global_batch(self.epoch, each)].sum() for each in steps) / len(steps)
        return rank_loss_weight(weights.tolist(), self.rank, float(total))

    def balance(self, step: int) -> StepBalance:
        """Return what the assignment of a step of the current epoch is worth."""
        return self.step_plan(self.epoch, step).balance

    def report(self, epoch: int | None = None) -> BalanceReport:
        """Return what balancing brings over the steps of an epoch, the current one by default."""
        epoch = self.epoch if epoch is None else epoch
        steps = range(self._steps.first_step(epoch), len(self._steps.for_epoch(epoch)) - 1)
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

    def digest(self) -> str:
        """Return a hash of the current epoch's costs, order, options and first step: equal on all ranks unless plans differ."""
        first = self._steps.first_step(self.epoch)
        plan = self.step_plan(self.epoch, min(first, len(self) - 1))
        options = sorted(self.options.items())
        setting: tuple[Any, ...] = (
            len(self),
            self.num_replicas,
            self.balance_steps,
            self.loss_is_sum,
            self.exploration_steps,
            options,
        )
        setting += (self.micro_batches.candidates, self.micro_batches.chosen, self.window)
        state = hashlib.sha256(repr(setting).encode())
        for array in (self.costs, self.loss_weights, self._order(self.epoch), plan.rank_of_sample, *self._per_sample.values()):
            state.update(np.ascontiguousarray(array).tobytes())
        return state.hexdigest()

    def _make_plan(self, epoch: int, step: int) -> StepPlan:
        samples = self.global_batch(epoch, step)
        options = self._options_of(samples)
        if isinstance(self._steps, BudgetSteps):
            options["fallback"] = self._steps.ranks_within_budget(epoch, samples)
        explores = epoch == 0 and step < self.exploration_steps and is_exploration_step(step)
        balanced, drawn = self.balance_steps and not explores, self._exchanging_steps(epoch, step)
        return StepPlan(samples, self.costs[samples], self.num_replicas, balanced, options, drawn=drawn)

    def _options_of(self, samples: Ints) -> dict[str, Any]:
        return {**self.options, **{name: values[samples] for name, values in self._per_sample.items()}}

    def _complete_plan(self, plan: StepPlan) -> None:
        plan.samples_of_ranks  # noqa: B018 (computed here, in the thread)
        if self.rank == 0:
            plan.balance  # noqa: B018 (which rank 0 logs)

    def _forget(self) -> None:
        self._windows, self._drawn_steps = {}, {}
        self._plans.forget()

    def _order(self, epoch: int) -> Ints:
        """Return the samples of an epoch, step by step."""
        return self._orders(epoch)[1]

    def _as_drawn(self, epoch: int) -> Ints:
        """Return the samples of an epoch before steps exchanged any."""
        return self._orders(epoch)[2]

    def _orders(self, epoch: int) -> tuple[int, Ints, Ints]:
        drawn = self._drawn  # read once: the thread that plans ahead sets it, too
        if drawn is None or drawn[0] != epoch:
            as_drawn = order = self._draw_order(epoch)
            if isinstance(self._steps, BudgetSteps):
                order = self._steps.deal(order, self._steps.cuts(epoch))
            elif self.outlier_window > 1:
                costs, edges = self._costs_of_order, self._steps.full_epoch
                order = pool_outliers(order, edges, costs, self.num_replicas, self.outlier_window)
            drawn = self._drawn = (epoch, order, as_drawn)
        return drawn

    def _draw_order(self, epoch: int) -> Ints:
        if self.blocks is not None:
            return self.blocks.draw_order(self.seed, epoch)
        return draw_order(len(self.costs), self.seed, epoch) if self.shuffle else np.arange(len(self.costs))


def _kept(before: dict[tuple[int, int], Value], key: tuple[int, int], value: Value) -> dict[tuple[int, int], Value]:
    """Return the last few entries, and another one; a new dict, since a thread may be reading."""
    return {**dict(list(before.items())[1 - _KEPT_WINDOWS :]), key: value}


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
