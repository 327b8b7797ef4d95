"""The samples of every step, and which rank takes which of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data.distributed import DistributedSampler

from lightning_freescale.balance.outliers import pool_outliers
from lightning_freescale.balance.plan import StepPlan
from lightning_freescale.balance.prefetch import PlanPrefetcher
from lightning_freescale.balance.report import BalanceReport, StepBalance
from lightning_freescale.balance.step_boundaries import StepBoundaries
from lightning_freescale.balance.validation import per_sample, units


class BalancedSampler(DistributedSampler[list[int]]):
    """Yields the index list of each step for one rank.

    The plan is a pure function of (costs, seed, epoch, step, world size): every rank computes the whole of it and takes its
    own column, without communication. Balancing changes which rank computes a sample, never which samples a step has.
    While it is iterated over, a thread plans the next steps.

    Args:
        costs: predicted compute time per sample, shape ``[samples]``.
        batch_size: samples per rank and step.
        num_replicas: world size.
        rank: the rank to yield for.
        seed: seeds the shuffle, together with the epoch.
        shuffle: draw a new order every epoch; else keep the order of the data set.
        balance: assign by cost; else deal contiguous runs.
        drop_last: leave out the samples of an incomplete last step. Otherwise the last step is uneven (counts differ by
            at most one), and fewer left-over samples than ranks join the step before, so every rank always has a sample.
        weights: weight of a sample in the mean loss, shape ``[samples]``; all one if not given.
        summed: the loss of a rank is a sum over its samples, not a mean.
        outlier_window: exchange samples between this many consecutive steps so that those that dominate a step come together,
            see :func:`pool_outliers`. Not gradient-identical: it changes which samples share a step. 1 for no exchange.
        tokens: tokens per sample, shape ``[samples]``, for ``max_tokens_per_rank`` and the report.
        keep_together: group of each sample, shape ``[samples]``; samples of a group that share a step go to one rank.
        explore: deal every fifth of the first so many steps of epoch 0 as drawn, unless a limit forbids it. Balanced steps
            hardly differ in what a cost model is fitted to; a few that do tell its coefficients apart.
        **options: ``mode``, ``count_slack``, ``max_tokens_per_rank`` and ``rank_speeds`` of :func:`assign`.

    Raises:
        ValueError: an argument does not fit; names it, its value and the fix.
    """

    def __init__(
        self,
        costs: ArrayLike,
        batch_size: int,
        *,
        num_replicas: int,
        rank: int,
        seed: int = 0,
        shuffle: bool = True,
        balance: bool = True,
        drop_last: bool = False,
        weights: ArrayLike | None = None,
        summed: bool = False,
        outlier_window: int = 1,
        tokens: ArrayLike | None = None,
        keep_together: ArrayLike | None = None,
        explore: int = 0,
        **options: Any,
    ) -> None:
        # DistributedSampler's own constructor insists on a data set; being one is what makes Lightning leave us alone.
        if outlier_window < 1:
            raise ValueError(f"BalancedSampler(outlier_window={outlier_window!r}): pass a number of steps, 1 for no exchange")
        if batch_size < 1 or num_replicas < 1 or not 0 <= rank < num_replicas:
            raise ValueError(
                f"BalancedSampler(batch_size={batch_size!r}, num_replicas={num_replicas!r}, rank={rank!r}): pass at least one "
                "sample and one rank, and a rank below num_replicas"
            )
        limited = keep_together is not None or options.get("max_tokens_per_rank") is not None
        if limited and not balance:
            raise ValueError(
                "BalancedSampler(balance=False) deals the samples as drawn and keeps no limit: leave keep_together and "
                "max_tokens_per_rank out"
            )
        self.costs = _rounded(costs)
        samples = len(self.costs)
        self.weights = np.ones(samples) if weights is None else per_sample("BalancedSampler", "weights", weights, samples)
        self.batch_size, self.num_replicas, self.rank = batch_size, num_replicas, rank
        self.seed, self.shuffle, self.balance_steps, self.drop_last = seed, shuffle, balance, drop_last
        self.summed, self.outlier_window, self.epoch = summed, outlier_window, 0
        self.explore = 0 if limited else explore  # a deal keeps no limits
        self.options = options
        self._per_sample: dict[str, NDArray[Any]] = {}
        if tokens is not None:
            self._per_sample["tokens"] = per_sample("BalancedSampler", "tokens", tokens, samples)
        if keep_together is not None:
            self._per_sample["keep_together"] = units(keep_together, samples)
        self._steps = StepBoundaries(len(self.costs), batch_size, num_replicas, drop_last)
        self._later: dict[int, tuple[Callable[[], ArrayLike] | None, dict[str, Any]]] = {}
        self._drawn: tuple[int, NDArray[np.int64]] | None = None
        self._plans = PlanPrefetcher(self._plan)
        self.step_plan(0, 0).balance  # noqa: B018 (what does not fit is refused now, not in the first step)

    # -- iteration

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning at the start of every epoch."""
        self.epoch = epoch
        for start in sorted(e for e in self._later if e <= epoch):
            costs, options = self._later.pop(start)
            if costs is not None:
                self.costs = _rounded(costs())
            self.options = {**self.options, **options}
            self._drawn = None
            self._plans.forget()

    def resume(self, epoch: int, batches: int, samples: int | None = None) -> None:
        """Start ``epoch`` after its first ``batches`` steps; every other epoch starts at its beginning.

        Args:
            epoch: the epoch in which the run stopped.
            batches: steps that it had done.
            samples: samples that those had, if their number of ranks or batch size was another; the rest of the epoch is cut
                anew, in the same order.

        Raises:
            ValueError: fewer samples are left than there are ranks.
        """
        self._steps.resume(epoch, batches, samples)
        self._plans.forget()

    def __len__(self) -> int:
        """Steps of the epoch, those before a :meth:`resume` included."""
        return len(self._steps.of(self.epoch)) - 1

    @property
    def first_step(self) -> int:
        """The step that the current epoch starts with: 0 unless it was resumed."""
        return self._steps.first(self.epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch that starts at its beginning."""
        return len(self._steps.whole) - 1

    def __iter__(self) -> Iterator[list[int]]:
        epoch, end = self.epoch, len(self)
        with self._plans.running():
            for step in range(self._steps.first(epoch), end):
                self._plans.prepare(epoch, step, end)
                yield self.step_plan(epoch, step).parts[self.rank].tolist()

    # -- the plan

    def step_plan(self, epoch: int, step: int) -> StepPlan:
        """The plan of all ranks for a step."""
        return self._plans.get(epoch, step)

    def plan(self, epoch: int, step: int) -> list[NDArray[np.int64]]:
        """Samples of every rank in a step: ``ranks`` int arrays."""
        return self.step_plan(epoch, step).parts

    def global_batch(self, epoch: int, step: int) -> NDArray[np.int64]:
        """The samples of a step in drawn order, the same with and without balancing."""
        edges = self._steps.of(epoch)
        return self._order(epoch)[edges[step] : edges[step + 1]]

    def consumed(self, epoch: int, batches: int) -> int:
        """Samples in the first ``batches`` steps of an epoch."""
        return self._steps.of(epoch)[batches]

    def counts(self, step: int) -> list[int]:
        """Samples of every rank in a step of the current epoch."""
        return np.bincount(self.step_plan(self.epoch, step).rank_of_sample, minlength=self.num_replicas).tolist()

    def loss_weight(self, step: int) -> float:
        """Factor for this rank's loss that makes the average over ranks the mean (or sum) over the step's global batch."""
        if self.summed:
            return float(self.num_replicas)
        plan = self.step_plan(self.epoch, step)
        weights = np.bincount(plan.rank_of_sample, self.weights[plan.samples], self.num_replicas)
        return share_of_loss(weights.tolist(), self.rank)

    def balance(self, step: int) -> StepBalance:
        """What the assignment of a step of the current epoch is worth."""
        return self.step_plan(self.epoch, step).balance

    def report(self, epoch: int | None = None) -> BalanceReport:
        """What balancing brings for every step of an epoch, the current one by default."""
        epoch = self.epoch if epoch is None else epoch
        steps = range(self._steps.first(epoch), len(self._steps.of(epoch)) - 1)
        return BalanceReport.of_steps(self.step_plan(epoch, step).balance for step in steps)

    def replan(self, epoch: int, costs: Callable[[], ArrayLike] | None = None, **options: Any) -> None:
        """From ``epoch`` on use other costs or options of :func:`assign`; call it with the same arguments on every rank.

        Args:
            epoch: a later epoch than the current one.
            costs: gives the costs, shape ``[samples]``; called when the epoch starts.
            **options: those that change.
        """
        before = self._later.get(epoch, (None, {}))
        self._later[epoch] = (before[0] if costs is None else costs, {**before[1], **options})

    def digest(self) -> str:
        """Hash of what the current epoch's plan follows from and of its first step: equal on all ranks unless plans differ."""
        first = self._steps.first(self.epoch)
        plan = self.step_plan(self.epoch, min(first, len(self) - 1))
        state = hashlib.sha256(
            repr(
                (len(self), self.num_replicas, self.balance_steps, self.summed, self.explore, sorted(self.options.items()))
            ).encode()
        )
        for array in (self.costs, self.weights, self._order(self.epoch), plan.rank_of_sample, *self._per_sample.values()):
            state.update(np.ascontiguousarray(array).tobytes())
        return state.hexdigest()

    def _plan(self, epoch: int, step: int) -> StepPlan:
        samples = self.global_batch(epoch, step)
        options = {**self.options, **{name: values[samples] for name, values in self._per_sample.items()}}
        explores = epoch == 0 and step < self.explore and is_explored(step)
        plan = StepPlan(samples, self.costs[samples], self.num_replicas, self.balance_steps and not explores, options)
        plan.parts  # noqa: B018 (computed here, in the thread)
        return plan

    def _order(self, epoch: int) -> NDArray[np.int64]:
        drawn = self._drawn
        if drawn is None or drawn[0] != epoch:
            drawn = self._drawn = (epoch, self._draw(epoch))
        return drawn[1]

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            order = np.arange(len(self.costs))
        else:  # RandomState's stream is frozen for good; Generator's may change between numpy versions
            order = np.random.RandomState([self.seed, epoch]).permutation(len(self.costs))
        if self.outlier_window == 1:
            return order
        return pool_outliers(order, self._steps.whole, self.costs, self.num_replicas, self.outlier_window)


def is_explored(step: int) -> bool:
    """Every fifth step; not the first, by which the ranks compare their plans."""
    return step % 5 == 4


def share_of_loss(weights: Sequence[float], rank: int) -> float:
    """``local_weight * world_size / global_weight``; 1 if nothing weighs anything."""
    total = sum(weights)
    return float(weights[rank] * len(weights) / total) if total else 1.0


def _rounded(costs: ArrayLike) -> NDArray[np.float64]:
    """To 24 bits, so that the last digits of a user's function on another kind of processor make no other plan."""
    mantissa, exponent = np.frexp(per_sample("BalancedSampler", "costs", costs))
    return np.ldexp(np.rint(np.ldexp(mantissa, 24)), exponent - 24)
