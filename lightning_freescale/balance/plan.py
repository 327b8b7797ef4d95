"""The plan of one step of all ranks, and a thread that makes the next plans ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale._runtime.worker import WorkerThread
from lightning_freescale.balance.assign import Assignment, assign, assignment_bound, contiguous_split, imbalance, load_imbalance
from lightning_freescale.balance.report import StepBalance
from lightning_freescale.balance.solver.bounds import Ints
from lightning_freescale.balance.solver.padded import padded_loads
from lightning_freescale.balance.validation import Floats
from lightning_freescale.balance.window import DrawnWindow

_PLANS_AHEAD = 4
"""Number of steps that are planned ahead of the current one."""
_KEPT_PLANS = 64
"""Number of plans that are kept. Plans of older steps are made again."""


@dataclass(frozen=True)
class PlanArguments:
    """The arguments of :func:`assign` for the plans of all steps."""

    costs: Floats  # of all samples of the data set, shape [samples]
    tokens: Floats | None  # of all samples of the data set, shape [samples]; None if unknown
    options: dict[str, Any]  # the other arguments

    def options_of(self, samples: Ints) -> dict[str, Any]:
        """Return the options of :func:`assign` for some samples."""
        return self.options if self.tokens is None else {**self.options, "tokens": self.tokens[samples]}


@dataclass(frozen=True)
class StepPlan:
    """The assignment of a step's samples to the ranks, and its effect."""

    samples: Ints  # indices into the data set in drawn order, shape [samples]
    costs: Floats  # of these samples, shape [samples]
    ranks: int
    balanced: bool = True  # False for a contiguous split of the drawn order
    options: dict[str, Any] = field(default_factory=dict)  # of assign, for these samples
    base: float = 0.0  # time of a rank besides its samples, in the unit of the costs; only ``balance`` includes it
    drawn: DrawnWindow | None = None  # the steps that share samples with this one, as drawn; None if it shares none

    @property
    def padded(self) -> bool:
        """True if each rank pads its samples to the longest one."""
        return bool(self.options.get("padded", False))

    @cached_property
    def assignment(self) -> Assignment:
        """The assignment by cost, computed on first use."""
        return assign(self.costs, self.ranks, **self._limited)

    @cached_property
    def _limited(self) -> dict[str, Any]:
        """The options; padded samples without a limit on tokens are limited to the largest rank of the contiguous split."""
        tokens = self.options.get("tokens")
        if not self.padded or tokens is None or self.options.get("max_tokens_per_rank") is not None:
            return self.options
        drawn = contiguous_split(len(self.samples), self.ranks)
        return {**self.options, "max_tokens_per_rank": float(padded_loads(tokens, drawn, None, self.ranks).max())}

    @cached_property
    def rank_of_sample(self) -> Ints:
        """The rank of each sample, shape ``[samples]``."""
        return self.assignment.rank_of_sample if self.balanced else contiguous_split(len(self.samples), self.ranks)

    @cached_property
    def samples_of_ranks(self) -> list[Ints]:
        """The indices into the data set for each rank, in drawn order."""
        ends = np.bincount(self.rank_of_sample, minlength=self.ranks).cumsum()
        return np.split(self.samples[np.argsort(self.rank_of_sample, kind="stable")], ends[:-1])

    @cached_property
    def balance(self) -> StepBalance:
        """The effect of the assignment. The figures as drawn and the bound are those of all steps that share samples."""
        if self.drawn is None or self.padded:
            return self.own_balance
        own = self._of_samples
        of_samples = replace(
            own,
            unbalanced=self.drawn.unbalanced,
            lower_bound=self.drawn.lower_bound(self.options.get("assignment_mode", "fixed")),
            tokens_unbalanced=None if own.tokens_unbalanced is None else self.drawn.tokens_unbalanced,
        )
        return of_samples.with_base(self.base, self.ranks) if self.base else of_samples

    @property
    def own_balance(self) -> StepBalance:
        """The effect of the assignment compared with this step's own samples."""
        return self._of_samples.with_base(self.base, self.ranks) if self.base else self._of_samples

    @cached_property
    def _of_samples(self) -> StepBalance:
        tokens = self.options.get("tokens")
        if self.balanced:
            bound, dominated = self.assignment.lower_bound, self.assignment.dominated
        else:
            bound, dominated = assignment_bound(self.costs, self.ranks, **self._limited)
        drawn, limit = contiguous_split(len(self.samples), self.ranks), self.options.get("max_tokens_per_rank")
        now, padded, parted = self.rank_of_sample, self.padded, self.padded and self.balanced
        held = None if tokens is None else self._held(tokens, now)
        return StepBalance(
            unbalanced=imbalance(self.costs, drawn, self.ranks, padded),
            balanced=self.assignment.imbalance if parted else imbalance(self.costs, now, self.ranks, padded),
            lower_bound=bound,
            dominated=dominated,
            tokens_imbalance=None if held is None else load_imbalance(held),
            cost=float(self.costs.sum()),
            tokens_unbalanced=None if tokens is None else load_imbalance(self._held(tokens, drawn)),
            tokens_fullest=None if held is None or limit is None else float(held.max()) / limit,
            padding_unbalanced=self._padding(drawn) if padded else None,
            padding=self._padding(now) if padded else None,
        )

    def _held(self, values: NDArray[Any], rank_of_sample: Ints) -> NDArray[Any]:
        """Return the sum of the samples' values on each rank, including padding, shape ``[ranks]``."""
        if not self.padded:
            return np.bincount(rank_of_sample, values, self.ranks)
        parts = self.assignment.part_of_sample if self.balanced and rank_of_sample is self.rank_of_sample else None
        return padded_loads(values, rank_of_sample, parts, self.ranks)

    def _padding(self, rank_of_sample: Ints) -> float:
        """Return the share of padding in the computed tokens, or in the computed costs if tokens are unknown."""
        values = self.options.get("tokens", self.costs)
        computed = float(self._held(values, rank_of_sample).sum())
        return 1 - float(values.sum()) / computed if computed else 0.0


class PlanPrefetcher:
    """The plans of recent steps, and of the next steps while :meth:`running`.

    ``make`` returns the plan of a step, a pure function of (epoch, step). The thread then computes parts of it by ``complete``.
    """

    def __init__(self, make: Callable[[int, int], StepPlan], complete: Callable[[StepPlan], StepPlan]) -> None:
        self._make, self._complete = make, complete
        self._plans: dict[tuple[int, int], Future[StepPlan]] = {}
        self._worker: WorkerThread | None = None

    def get(self, epoch: int, step: int) -> StepPlan:
        """Return the plan of a step; wait if the thread is making it."""
        plan = self._started(epoch, step)
        while len(self._plans) > _KEPT_PLANS:
            self._plans.pop(next(iter(self._plans)))
        return plan.result()

    def prepare(self, epoch: int, step: int, end: int) -> None:
        """Start to plan the steps from ``step`` to before ``end``."""
        for later in range(step, min(step + _PLANS_AHEAD, end)):
            self._started(epoch, later)

    def forget(self) -> None:
        """Drop all plans, because their arguments have changed."""
        self._plans.clear()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the thread that plans the next steps within the block."""
        mine = self._worker = WorkerThread("freescale-plan")
        try:
            yield
        finally:
            if self._worker is mine:  # False if another iteration has begun
                self._worker = None
            mine.stop()

    def __getstate__(self) -> dict[str, Any]:
        """Omit plans and thread, which cannot be copied."""
        return {**self.__dict__, "_plans": {}, "_worker": None}

    def _started(self, epoch: int, step: int) -> Future[StepPlan]:
        key = (epoch, step)
        if key not in self._plans and self._worker is not None:
            self._plans[key] = self._worker.submit(lambda: self._complete(self._make(*key)))
        elif key not in self._plans:
            done: Future[StepPlan] = Future()
            done.set_result(self._make(*key))
            self._plans[key] = done
        return self._plans[key]
