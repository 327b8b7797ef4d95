"""The sampler, which yields the samples of one rank in each step from a plan that every rank computes."""

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
from lightning_freescale.balance.solver.bounds import Ints
from lightning_freescale.balance.validation import Floats, non_negative, whole_number


class BalancedSampler(DistributedSampler["list[int] | MicroBatches"]):
    """A sampler that yields one rank's samples of each step, as a list of indices or as :class:`MicroBatches` of such lists.

    The plan is a pure function of (costs, seed, epoch, step, world size). Each rank computes the whole plan without
    communication and takes its own samples. Balancing changes the rank of a sample, never the samples of a step. During
    iteration, a thread plans the next steps.

    Args:
        costs: Predicted compute time of each sample, shape ``[samples]``.
        batch_size: Number of samples per rank and step; or a :class:`Budget`, with any counts.
        num_replicas: World size.
        rank: Rank whose samples are yielded.
        seed: Seed of the shuffle, together with the epoch.
        shuffle: True or a :class:`BlockShuffle` to draw a new order in each epoch; False for the order of the data set.
        balance: True to assign by cost; False for a contiguous split of the drawn order.
        drop_last: Drop the samples of an incomplete last step. By default, the counts of the last step differ by at most one.
            If the remaining samples are fewer than the ranks, they join the step before.
        loss_weights: Weight of each sample in the mean loss, shape ``[samples]``; 1 by default.
        loss_is_sum: True if a rank's loss is the sum over its samples instead of the mean.
        tokens: Tokens of each sample, shape ``[samples]``, for ``max_tokens_per_rank`` and the report.
        micro_batches: Number of micro-batches of each step; 1 by default. A step has fewer if a rank has fewer samples with a
            weight.
        window: Number of steps whose gradients are accumulated for one optimizer step. They share their samples, see
            :func:`share_window`, and are weighted as one batch. An incomplete last step keeps its own samples. All steps of a
            window keep theirs if a shared step would exceed ``max_tokens_per_rank``.
        limit: Number of steps of an epoch that are trained, or their share as a float, as in
            ``Trainer(limit_train_batches=...)``. Only these steps share samples.
        padded: Each rank pads its samples to the longest one, see :func:`assign`. Each micro-batch is padded to its own longest
            sample and has samples of similar cost. If ``tokens`` are given without a limit, they are limited to those of the
            largest rank as drawn, including padding.
        assignment_mode, max_tokens_per_rank: See :func:`assign`. A :class:`Budget` sets both.

    Attributes:
        batches: The samples of each step of each epoch.
        handed_out: The last (epoch, step) that the loader has read.
        may_pad: True if the ranks pad their samples, or if the strategy may detect later that they do.

    Raises:
        ValueError: An argument is invalid.

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
        micro_batches: MicroBatchSchedule | None = None,
        window: int = 1,
        limit: int | float = 1.0,
        padded: bool = False,
        assignment_mode: AssignmentMode | None = None,
        max_tokens_per_rank: float | None = None,
    ) -> None:
        # no call of DistributedSampler's constructor, which requires a data set; Lightning replaces other kinds of samplers
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
        self.step_plan(0, 0).balance  # noqa: B018 (raises for invalid arguments now instead of in the first step)

    @property
    def costs(self) -> Floats:
        """The predicted compute time of each sample, rounded to 24 bits, shape ``[samples]``."""
        return self._arguments.costs

    @property
    def options(self) -> dict[str, Any]:
        """The options of :func:`assign` for all steps."""
        return self._arguments.options

    @property
    def tokens(self) -> Floats | None:
        """The tokens of each sample, shape ``[samples]``; None if they were not given."""
        return self._arguments.tokens

    # -- iteration

    def set_epoch(self, epoch: int) -> None:
        """Plan ``epoch`` from now on. Lightning calls this at the start of each epoch."""
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
        """Start ``epoch`` after its first ``batches`` steps. All other epochs start at their beginning.

        Args:
            epoch: Epoch in which the run stopped.
            batches: Number of steps of that epoch that the run completed.
            samples: Number of samples of those steps, if the run had another number of ranks or batch size. The rest of the
                epoch is then divided into steps again, in the same order.
            window: Result of :meth:`.GlobalBatches.begun_window` in that run, if its window was different. The unfinished
                window keeps its division.
            cuts: Result of :meth:`.GlobalBatches.cuts` in that run; by default as in this run.

        Raises:
            ValueError: The remaining samples are fewer than the ranks.
        """
        self.batches.resume(epoch, batches, samples, window, cuts)
        self._plans.forget()

    def __len__(self) -> int:
        """Return the number of steps of the current epoch, including those before a :meth:`resume`."""
        return self.batches.end(self.epoch)

    @property
    def first_step(self) -> int:
        """The first step of the current epoch: 0 unless it was resumed."""
        return self.batches.first_step(self.epoch)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of an epoch that is not resumed."""
        return self.batches.steps_per_epoch

    def __iter__(self) -> Iterator[list[int] | MicroBatches]:
        epoch, end = self.epoch, len(self)
        with self._plans.running():
            for step in range(self.batches.first_step(epoch), end):
                self._plans.prepare(epoch, step, end)
                self.handed_out = (epoch, step)
                yield self.batch_of_rank(epoch, step)

    def batch_of_rank(self, epoch: int, step: int) -> list[int] | MicroBatches:
        """Return the indices of this rank's samples in a step, for each micro-batch if there are several."""
        of_ranks = self.step_plan(epoch, step).samples_of_ranks
        samples = of_ranks[self.rank]
        parts = self.micro_batches.count(epoch, step)
        if parts > 1:  # the same number on all ranks, because each micro-batch has collectives
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
        if made != (options or False):  # the plan was made before pad_from
            self._plans.forget()
            plan = self._plans.get(epoch, step)
        return plan

    def plan(self, epoch: int, step: int) -> list[Ints]:
        """Return the indices of each rank's samples in a step, an int array for each rank."""
        return self.step_plan(epoch, step).samples_of_ranks

    def global_batch(self, epoch: int, step: int) -> Ints:
        """Return the samples of a step in drawn order, shape ``[samples]``.

        They do not depend on balancing. With a window, this holds for the samples of its steps together.
        """
        return self.batches.samples(epoch, step)

    def counts(self, step: int) -> list[int]:
        """Return the number of samples of each rank in a step of the current epoch."""
        return np.bincount(self.step_plan(self.epoch, step).rank_of_sample, minlength=self.num_replicas).tolist()

    def loss_weight(self, step: int) -> float:
        """Return the factor for this rank's loss that makes the mean over ranks the mean (or sum) over the global batch."""
        if self.loss_is_sum:
            return float(self.num_replicas)
        plan = self.step_plan(self.epoch, step)
        weights = np.bincount(plan.rank_of_sample, self.loss_weights[plan.samples], self.num_replicas)
        steps = self.batches.sharing_steps(self.epoch, step)
        # the mean over the window, because the weight of a sample must not depend on its step
        total = sum(self.loss_weights[self.global_batch(self.epoch, each)].sum() for each in steps) / len(steps)
        return rank_loss_weight(weights.tolist(), self.rank, float(total))

    def balance(self, step: int) -> StepBalance:
        """Return the effect of balancing on a step of the current epoch."""
        return self.step_plan(self.epoch, step).balance

    def report(self, epoch: int | None = None) -> BalanceReport:
        """Return the effect of balancing over an epoch, by default the current one."""
        epoch = self.epoch if epoch is None else epoch
        steps = range(self.batches.first_step(epoch), self.batches.end(epoch))
        return BalanceReport.from_steps(self.step_plan(epoch, step).balance for step in steps)

    def replan(self, epoch: int, costs: Callable[[], ArrayLike]) -> None:
        """Use the result of ``costs()`` from the start of a later epoch on. Call this with the same arguments on each rank."""
        self._replans[epoch] = costs

    def pad_from(self, epoch: int, step: int, *, padded: bool = True, **options: Any) -> None:
        """Plan for padded samples or by other options from a step on. Call this with the same arguments on each rank.

        ``options`` replace options of :func:`assign` that were given.

        Raises:
            RuntimeError: The loader has read the step, so that the plans of the ranks could differ.
            ValueError: ``batch_size`` is a :class:`Budget`.
        """
        if self.handed_out >= (epoch, step):
            raise RuntimeError(
                f"pad_from({epoch}, {step}): the loader has already read up to {self.handed_out}. Pass a later step."
            )
        if padded and self.budget is not None:
            raise ValueError("BalancedSampler(padded=True) does not support a Budget. Pass a number of samples as batch_size.")
        self._changes.append(((epoch, step), {"padded": True, **options} if padded else options))

    def is_padded(self, epoch: int, step: int) -> bool:
        """Return True if a step is planned for ranks that pad their samples."""
        return bool(self._changed_options(epoch, step).get("padded"))

    def options_in(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the options of :func:`assign` for a step, without tokens."""
        return {**self.options, **self._changed_options(epoch, step)}

    def load(self, epoch: int, step: int, values_of: Callable[[Ints], NDArray[Any]]) -> NDArray[Any]:
        """Return the sum of the values of this rank's samples in a step, including padding, shape ``[values]``.

        ``values_of`` returns the values of some samples, shape ``[samples, values]``.
        """
        batch, padded = self.batch_of_rank(epoch, step), self.is_padded(epoch, step)
        parts = [values_of(np.array(part)) for part in (batch.batches if isinstance(batch, MicroBatches) else [batch])]
        return np.sum([len(part) * part.max(axis=0) if padded else part.sum(axis=0) for part in parts], axis=0)

    def _changed_options(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the options that :meth:`pad_from` has set for a step."""
        options: dict[str, Any] = next((options for start, options in reversed(self._changes) if start <= (epoch, step)), {})
        return {"parts": self.micro_batches.peek(epoch, step), **options} if options.get("padded") else options

    def digest(self) -> str:
        """Return a hash of the current epoch's costs, order, options and first step, to compare the plans of the ranks."""
        plan = self.step_plan(self.epoch, min(self.first_step, len(self) - 1))
        counts = (len(self), self.num_replicas, self.window)
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
        drawn = self.batches.as_drawn(epoch, step)
        return StepPlan(samples, arguments.costs[samples], self.num_replicas, self.balance_steps, options, drawn=drawn)

    def _complete_plan(self, plan: StepPlan) -> StepPlan:
        plan.samples_of_ranks  # noqa: B018 (computes it in the thread)
        if self.rank == 0:
            plan.balance  # noqa: B018 (rank 0 logs it)
        return plan


def _refuse_without_balance(balance: bool, limited: bool, window: int, budgeted: bool) -> None:
    if window > 1 and (budgeted or not balance):
        raise ValueError(
            f"BalancedSampler(window={window}) shares samples among steps by their costs. It supports neither "
            "balance=False nor a Budget. Leave them out, or pass window=1."
        )
    if limited and not balance:
        raise ValueError(
            "BalancedSampler(balance=False) leaves the samples as drawn and keeps no limit. Leave max_tokens_per_rank out, and "
            "pass a number of samples as batch_size."
        )


def _refuse_with_budget(given: dict[str, bool]) -> None:
    for name in (name for name, is_given in given.items() if is_given):
        raise ValueError(
            f"BalancedSampler({name}=...) cannot be combined with a Budget, which chooses the samples of each step, limits the "
            "tokens of each rank and allows any counts. Leave the argument out."
        )


def rank_loss_weight(weights: Sequence[float], rank: int, total: float | None = None) -> float:
    """Return ``weights[rank] * world_size / total``, 1 if the total is 0; by default, the total is the sum of the weights."""
    total = sum(weights) if total is None else total
    return float(weights[rank] * len(weights) / total) if total else 1.0


def _rounded(costs: ArrayLike) -> Floats:
    # to 24 bits, so that rounding errors of a cost function on another processor do not change the plan
    mantissa, exponent = np.frexp(non_negative("BalancedSampler(costs=...)", costs))
    return np.ldexp(np.rint(np.ldexp(mantissa, 24)), exponent - 24)
