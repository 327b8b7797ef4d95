"""The sampler: the samples of one rank in every step, from a plan that every rank computes by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data.distributed import DistributedSampler

from lightning_freescale.balance.assign import AssignmentMode
from lightning_freescale.balance.budget import Budget
from lightning_freescale.balance.global_batches import BlockShuffle, GlobalBatches, StepSettings
from lightning_freescale.balance.micro_batches import MicroBatches, MicroBatchSchedule, cut, most_parts
from lightning_freescale.balance.plan import PlanArguments, PlanPrefetcher, StepPlan
from lightning_freescale.balance.report import BalanceReport, StepBalance
from lightning_freescale.balance.solver import Ints
from lightning_freescale.balance.validation import Floats, non_negative, whole_number

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
        tokens: tokens per sample, shape ``[samples]``, for ``max_tokens_per_rank`` and the report.
        exploration_steps: leave every fifth of the first so many steps of epoch 0 as drawn, unless a limit forbids it.
            Balanced steps hardly differ in what a cost model is fitted to; a few that do separate its coefficients.
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
        assignment_mode, max_tokens_per_rank: as in :func:`assign`; a :class:`Budget` sets both.

    Attributes:
        batches: the samples of every step of every epoch.
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
        tokens: ArrayLike | None = None,
        exploration_steps: int = 0,
        micro_batches: MicroBatchSchedule | None = None,
        window: int = 1,
        limit: int | float = 1.0,
        padded: bool = False,
        assignment_mode: AssignmentMode | None = None,
        max_tokens_per_rank: float | None = None,
    ) -> None:
        # DistributedSampler's own constructor insists on a data set; being one is what makes Lightning leave us alone.
        whole_number("BalancedSampler(rank={})", rank, 0)
        settings = StepSettings(batch_size, num_replicas, seed, shuffle, drop_last, window, limit)
        if rank >= num_replicas:
            raise ValueError(f"BalancedSampler(num_replicas={num_replicas!r}, rank={rank!r}): pass a rank below num_replicas")
        self.budget = batch_size if isinstance(batch_size, Budget) else None
        mode: AssignmentMode = assignment_mode or ("fixed" if self.budget is None else "free")
        if self.budget is not None:
            given = {"assignment_mode": mode != "free", "max_tokens_per_rank": max_tokens_per_rank is not None}
            given |= {"tokens": tokens is not None, "drop_last": drop_last, "shuffle": isinstance(shuffle, BlockShuffle)}
            _refuse_with_budget(given)
            tokens, max_tokens_per_rank = self.budget.in_whole_numbers
            non_negative("Budget(sizes=...)", tokens, np.size(costs))
        _refuse_without_balance(balance, max_tokens_per_rank is not None, window, self.budget is not None)
        rounded = _rounded(costs)
        samples = len(rounded)
        weights = np.ones(samples) if loss_weights is None else loss_weights
        self.loss_weights, self.loss_is_sum = non_negative("BalancedSampler(loss_weights=...)", weights, samples), loss_is_sum
        self.batch_size, self.num_replicas, self.rank, self.window = batch_size, num_replicas, rank, window
        self.seed, self.shuffle, self.drop_last = seed, bool(shuffle), drop_last
        self.blocks = shuffle if isinstance(shuffle, BlockShuffle) else None
        self.balance_steps, self.epoch = balance, 0
        self.exploration_steps = exploration_steps if max_tokens_per_rank is None else 0  # a contiguous split keeps no limits
        self.micro_batches = micro_batches or MicroBatchSchedule(1, 1)
        self.handed_out, self.may_pad = (0, -1), padded
        self._changes: list[tuple[tuple[int, int], dict[str, Any]]] = []
        known = None if tokens is None else non_negative("BalancedSampler(tokens=...)", tokens, samples)
        options: dict[str, Any] = {"assignment_mode": mode}
        if max_tokens_per_rank is not None:
            options["max_tokens_per_rank"] = max_tokens_per_rank
        self._arguments = PlanArguments(rounded, known, options)
        self.batches = GlobalBatches(self._arguments, settings)
        self._replans: dict[int, Callable[[], ArrayLike]] = {}
        self._plans = PlanPrefetcher(self._make_plan, self._complete_plan)
        if padded:
            self.pad_from(0, 0)
        self.step_plan(0, 0).balance  # noqa: B018 (an argument that does not fit is refused now, not in the first step)

    @property
    def costs(self) -> Floats:
        """Predicted compute time per sample, shape ``[samples]``, rounded to 24 bits."""
        return self._arguments.costs

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of :func:`assign` for all steps."""
        return self._arguments.options

    @property
    def tokens(self) -> Floats | None:
        """Tokens per sample, if they were given, shape ``[samples]``."""
        return self._arguments.tokens

    # -- iteration

    def set_epoch(self, epoch: int) -> None:
        """Draw and plan ``epoch`` from now on; Lightning calls it at the start of every epoch."""
        self.epoch = epoch
        for start in sorted(e for e in self._replans if e <= epoch):
            self._arguments = replace(self._arguments, costs=_rounded(self._replans.pop(start)()))
            self.batches.use(self._arguments)
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
            window: that of the run that stopped, see :meth:`.GlobalBatches.begun_window`, if it was another; the window that it
                has begun is ended as it was shared out.
            cuts: how that run had cut the epoch by its budget, see :meth:`.GlobalBatches.cuts`; as this one does if not given.

        Raises:
            ValueError: fewer samples are left than there are ranks.
        """
        self.batches.resume(epoch, batches, samples, window, cuts)
        self._plans.forget()

    def __len__(self) -> int:
        """Return the steps of the epoch, those before a :meth:`resume` included."""
        return self.batches.end(self.epoch)

    @property
    def first_step(self) -> int:
        """The step that the current epoch starts with: 0 unless it was resumed."""
        return self.batches.first_step(self.epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch that starts at its beginning."""
        return self.batches.steps_per_epoch

    def __iter__(self) -> Iterator[list[int] | MicroBatches]:
        epoch, end = self.epoch, len(self)
        with self._plans.running():
            for step in range(self.batches.first_step(epoch), end):
                self._plans.prepare(epoch, step, end)
                self.handed_out = (epoch, step)
                yield self.batch_of_rank(epoch, step)

    def batch_of_rank(self, epoch: int, step: int) -> list[int] | MicroBatches:
        """Return what this rank computes in a step: indices into the data set, of each micro-batch if there are several."""
        of_ranks = self.step_plan(epoch, step).samples_of_ranks
        samples = of_ranks[self.rank]
        parts = self.micro_batches.count(epoch, step)
        if parts > 1:  # all ranks have as many: they meet in each
            parts = min(parts, *(most_parts(self.loss_weights[each]) for each in of_ranks))
        if parts == 1:
            return samples.tolist()
        costs, weights, padded = self.costs[samples], self.loss_weights[samples], self.is_padded(epoch, step)
        return cut(samples.tolist(), parts, costs, weights, loss_is_sum=self.loss_is_sum, padded=padded)

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
        return self.batches.samples(epoch, step)

    def counts(self, step: int) -> list[int]:
        """Return how many samples every rank has in a step of the current epoch."""
        return np.bincount(self.step_plan(self.epoch, step).rank_of_sample, minlength=self.num_replicas).tolist()

    def loss_weight(self, step: int) -> float:
        """Return the factor for this rank's loss that makes the average over ranks that over the global batch (or its sum)."""
        if self.loss_is_sum:
            return float(self.num_replicas)
        plan = self.step_plan(self.epoch, step)
        weights = np.bincount(plan.rank_of_sample, self.loss_weights[plan.samples], self.num_replicas)
        steps = self.batches.sharing_steps(self.epoch, step)
        # the mean over the window, not over each of its steps: which of them a sample is in must not matter
        total = sum(self.loss_weights[self.global_batch(self.epoch, each)].sum() for each in steps) / len(steps)
        return rank_loss_weight(weights.tolist(), self.rank, float(total))

    def balance(self, step: int) -> StepBalance:
        """Return what the assignment of a step of the current epoch is worth."""
        return self.step_plan(self.epoch, step).balance

    def report(self, epoch: int | None = None) -> BalanceReport:
        """Return what balancing brings over the steps of an epoch, the current one by default."""
        epoch = self.epoch if epoch is None else epoch
        steps = range(self.batches.first_step(epoch), self.batches.end(epoch))
        return BalanceReport.from_steps(self.step_plan(epoch, step).balance for step in steps)

    def replan(self, epoch: int, costs: Callable[[], ArrayLike]) -> None:
        """From ``epoch`` on use other costs; call it with the same arguments on every rank.

        Args:
            epoch: a later epoch than the current one.
            costs: gives the costs, shape ``[samples]``; called when the epoch starts.
        """
        self._replans[epoch] = costs

    def pad_from(self, epoch: int, step: int, *, padded: bool = True, **options: Any) -> None:
        """Plan for ranks that pad their samples, or by other options, from a step on; call it alike on every rank.

        Args:
            epoch: of the first step.
            step: that step; the loader must not have read it.
            padded: whether the ranks pad their samples from that step on.
            **options: of :func:`assign` for these steps, instead of those given.

        Raises:
            RuntimeError: the step was handed out, so that the ranks might differ in it.
            ValueError: a :class:`Budget` was given.
        """
        if self.handed_out >= (epoch, step):
            raise RuntimeError(f"pad_from({epoch}, {step}): the loader has already read up to {self.handed_out}")
        if padded and self.budget is not None:
            raise ValueError("BalancedSampler(padded=True) needs a number of samples as batch_size, not a Budget")
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
        counts = (len(self), self.num_replicas, self.exploration_steps, self.window)
        parts = (self.micro_batches.candidates, self.micro_batches.chosen)
        setting = (counts, parts, self.balance_steps, self.loss_is_sum, sorted(self.options.items()), self._changes)
        state = hashlib.sha256(repr(setting).encode())
        tokens = [] if self.tokens is None else [self.tokens]
        for array in (self.costs, self.loss_weights, self.batches.order(self.epoch), plan.rank_of_sample, *tokens):
            state.update(np.ascontiguousarray(array).tobytes())
        return state.hexdigest()

    def _make_plan(self, epoch: int, step: int) -> StepPlan:
        samples, arguments = self.global_batch(epoch, step), self._arguments
        options, known = arguments.options_of(samples), self.batches.ranks_within_budget(epoch, step)
        if known is not None:
            options = {**options, "fallback": known}
        options = {**options, **self._changed_options(epoch, step)}
        explores = epoch == 0 and step < self.exploration_steps and is_exploration_step(step)
        balanced, drawn = self.balance_steps and not explores, self.batches.as_drawn(epoch, step)
        return StepPlan(samples, arguments.costs[samples], self.num_replicas, balanced, options, drawn=drawn)

    def _complete_plan(self, plan: StepPlan) -> None:
        plan.samples_of_ranks  # noqa: B018 (computed here, in the thread)
        if self.rank == 0:
            plan.balance  # noqa: B018 (which rank 0 logs)


def _refuse_without_balance(balance: bool, limited: bool, window: int, budgeted: bool) -> None:
    """Refuse limits that a contiguous split does not keep, and a window whose samples something else places."""
    if window > 1 and (budgeted or not balance):
        raise ValueError(
            f"BalancedSampler(window={window}) shares samples among steps by their costs: leave balance=False out and pass a "
            "number of samples as batch_size, or use window=1"
        )
    if limited and not balance:
        raise ValueError(
            "BalancedSampler(balance=False) leaves the samples as drawn and keeps no limit: leave max_tokens_per_rank out, and "
            "pass a number of samples as batch_size"
        )


def _refuse_with_budget(given: dict[str, bool]) -> None:
    """Refuse arguments that a budget replaces: it sets which samples a step has, and how many a rank may take."""
    for name in (name for name, is_given in given.items() if is_given):
        raise ValueError(
            f"BalancedSampler({name}=...) has no meaning with a Budget, which takes the samples of a step from all over the "
            "order, limits the tokens of a rank and leaves its number of samples free: leave it out"
        )


def is_exploration_step(step: int) -> bool:
    """Return True for every fifth step; not for the first, by which the ranks compare their plans."""
    # balanced steps differ too little to separate a cost per token from a cost per step: without these, the error of fits was
    # up to twice as large
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
