"""The samples of every step: drawn, cut into steps, and exchanged between the steps that may exchange them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import numpy as np

from lightning_freescale.balance.assign import assign
from lightning_freescale.balance.budget import Budget, BudgetSteps
from lightning_freescale.balance.epoch_order import BlockShuffle, StepBoundaries, draw_order, pool_outliers
from lightning_freescale.balance.plan import PlanArguments
from lightning_freescale.balance.solver import Ints
from lightning_freescale.balance.window import DrawnSteps, share_window

Value = TypeVar("Value")

_KEPT_WINDOWS = 32
"""Loader workers read ahead of training, which asks for its own window's samples in every step."""


class GlobalBatches:
    """Which samples every step of every epoch has, with and without balancing.

    A thread that plans ahead may ask, too.

    Args:
        arguments: what plans are made of.
        batch_size: samples per rank and step; or the :class:`Budget` that says how many there is room for.
        ranks: how many share a step.
        seed, shuffle, drop_last, outlier_window, window, limit: those of :class:`BalancedSampler`.

    Raises:
        ValueError: there is no step, or ``shuffle`` is of another data set.
    """

    def __init__(
        self,
        arguments: PlanArguments,
        batch_size: int | Budget,
        ranks: int,
        *,
        seed: int,
        shuffle: bool | BlockShuffle,
        drop_last: bool,
        outlier_window: int,
        window: int,
        limit: int | float,
    ) -> None:
        self._arguments = arguments
        self._costs_of_order = arguments.costs  # a new plan must not change which samples a step has
        samples = len(arguments.costs)
        self._batch_size, self._ranks, self._seed, self._shuffle = batch_size, ranks, seed, shuffle
        self._outlier_window, self._window, self._limit = outlier_window, window, limit
        if isinstance(shuffle, BlockShuffle) and shuffle.samples != samples:
            raise ValueError(
                f"BlockShuffle(sizes=...) has {shuffle.samples} samples in all, the data set {samples}: pass the "
                "samples of each block of this data set"
            )
        self._steps: StepBoundaries | BudgetSteps
        if isinstance(batch_size, Budget):
            self._steps = BudgetSteps(batch_size, ranks)
        else:
            self._steps = StepBoundaries(samples, batch_size, ranks, drop_last)
        self._interrupted = (0, 0, 0)  # the window that a run before has begun: its epoch, first step and steps
        self._drawn: tuple[int, Ints, Ints] | None = None  # an epoch's samples, in the order of its steps and as drawn
        self._windows: dict[tuple[int, int], list[Ints]] = {}
        self._drawn_steps: dict[tuple[int, int], DrawnSteps] = {}

    def use(self, arguments: PlanArguments) -> None:
        """Share windows out by other costs, or within other limits, from now on."""
        self._arguments = arguments
        self._forget()

    def resume(
        self,
        epoch: int,
        batches: int,
        samples: int | None = None,
        window: Sequence[int] | None = None,
        cuts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Start ``epoch`` after its first ``batches`` steps, see :meth:`BalancedSampler.resume`."""
        if isinstance(self._steps, BudgetSteps):
            self._steps.resume(epoch, batches, self._draw_order(epoch), cuts)
        else:
            self._steps.resume(epoch, batches, samples)
        self._interrupted = (0, 0, 0)
        begun, steps = self.begun_window(epoch, batches) if window is None else window
        self._interrupted = (epoch, begun, steps)
        self._forget()

    # -- an epoch

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch that starts at its beginning."""
        return len(self._steps.full_epoch) - 1

    def first_step(self, epoch: int) -> int:
        """Return the step that an epoch starts with."""
        return self._steps.first_step(epoch)

    def end(self, epoch: int) -> int:
        """Return the steps of an epoch, those before a :meth:`resume` included."""
        return len(self._steps.for_epoch(epoch)) - 1

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

    def order(self, epoch: int) -> Ints:
        """Return the samples of an epoch, step by step."""
        return self._orders(epoch)[1]

    # -- a step

    def samples(self, epoch: int, step: int) -> Ints:
        """Return the samples of a step in drawn order, shape ``[samples]``."""
        edges = self._steps.for_epoch(epoch)
        steps = self.sharing_steps(epoch, step)
        if len(steps) < 2:
            return self.order(epoch)[edges[step] : edges[step + 1]]
        shared = self._windows.get((epoch, steps.start))
        if shared is None:
            arguments = self._arguments
            samples = self.order(epoch)[edges[steps.start] : edges[steps.stop]]
            batch_of_sample = share_window(arguments.costs[samples], len(steps), self._ranks)
            shared = [samples[batch_of_sample == batch] for batch in range(len(steps))]
            limited = arguments.options.get("max_tokens_per_rank") is not None
            if limited and not all(_fits(arguments, each, self._ranks) for each in shared):
                shared = np.split(samples, len(steps))  # as drawn
            self._windows = _kept(self._windows, (epoch, steps.start), shared)
        return shared[step - steps.start]

    def ranks_within_budget(self, epoch: int, step: int) -> Ints | None:
        """Return a rank for every sample of a step so that none is above the budget; None without one."""
        steps = self._steps
        return steps.ranks_within_budget(epoch, self.samples(epoch, step)) if isinstance(steps, BudgetSteps) else None

    def sharing_steps(self, epoch: int, step: int) -> range:
        """Return the steps that share their samples out with one: the full ones of its window; or it alone."""
        resumed, begun, interrupted = self._interrupted
        if epoch == resumed and begun <= step < begun + interrupted:  # by the run before
            return range(begun, begun + interrupted)
        if self._window == 1 or isinstance(self._steps, BudgetSteps):
            return range(step, step + 1)
        first = step - step % self._window
        end = first + self._window
        if epoch == resumed and step >= begun + interrupted:
            first = max(first, begun + interrupted)
        full, edges = cast(int, self._batch_size) * self._ranks, self._steps.for_epoch(epoch)
        steps = len(edges) - 1
        # an optimizer step that the limit ends early has its own samples, not the dearest of more
        last = min(self._limit, steps) if isinstance(self._limit, int) else int(self._limit * steps)
        shared = [each for each in range(first, min(end, last)) if edges[each + 1] - edges[each] == full]
        return range(shared[0], shared[-1] + 1) if step in shared else range(step, step + 1)

    def begun_window(self, epoch: int, batches: int) -> tuple[int, int]:
        """Return the first of the steps that a run shares samples out among, and how many, if it stops inside of them."""
        steps = self.sharing_steps(epoch, batches)
        return (steps.start, len(steps)) if steps.start < batches else (batches, 0)

    def as_drawn(self, epoch: int, step: int) -> DrawnSteps | None:
        """Return the steps that exchange samples with one as they were drawn; None if it has those it was drawn with."""
        edges, order, window = self._steps.for_epoch(epoch), self.order(epoch), self._outlier_window == 1
        steps = self.sharing_steps(epoch, step)
        if not window:
            first = step - step % self._outlier_window
            steps, order = range(first, min(first + self._outlier_window, len(edges) - 1)), self._orders(epoch)[2]
        if len(steps) < 2:
            return None
        drawn = [order[edges[each] : edges[each + 1]] for each in steps]
        if window and all(np.array_equal(one, self.samples(epoch, each)) for one, each in zip(drawn, steps)):
            return None  # a limit keeps them apart
        key = epoch, steps.start
        if key not in self._drawn_steps:
            costs, tokens = self._arguments.costs, self._arguments.per_sample.get("tokens")
            of_steps = None if tokens is None else [tokens[each] for each in drawn]
            found = DrawnSteps([costs[each] for each in drawn], of_steps, self._ranks, window=window)
            self._drawn_steps = _kept(self._drawn_steps, key, found)
        return self._drawn_steps[key]

    # -- the order that steps are cut from

    def _orders(self, epoch: int) -> tuple[int, Ints, Ints]:
        drawn = self._drawn  # read once: the thread that plans ahead sets it, too
        if drawn is None or drawn[0] != epoch:
            as_drawn = order = self._draw_order(epoch)
            if isinstance(self._steps, BudgetSteps):
                order = self._steps.deal(order, self._steps.cuts(epoch))
            elif self._outlier_window > 1:
                costs, edges = self._costs_of_order, self._steps.full_epoch
                order = pool_outliers(order, edges, costs, self._ranks, self._outlier_window)
            drawn = self._drawn = (epoch, order, as_drawn)
        return drawn

    def _draw_order(self, epoch: int) -> Ints:
        if isinstance(self._shuffle, BlockShuffle):
            return self._shuffle.draw_order(self._seed, epoch)
        samples = len(self._costs_of_order)
        return draw_order(samples, self._seed, epoch) if self._shuffle else np.arange(samples)

    def _forget(self) -> None:
        self._drawn, self._windows, self._drawn_steps = None, {}, {}


def _fits(arguments: PlanArguments, samples: Ints, ranks: int) -> bool:
    """Return whether a plan is found for the samples of a step within the limit on tokens."""
    try:
        assign(arguments.costs[samples], ranks, **arguments.options_of(samples))
    except ValueError:
        return False
    return True


def _kept(before: dict[tuple[int, int], Value], key: tuple[int, int], value: Value) -> dict[tuple[int, int], Value]:
    """Return the last few entries, and another one; a new dict, since a thread may be reading."""
    return {**dict(list(before.items())[1 - _KEPT_WINDOWS :]), key: value}
