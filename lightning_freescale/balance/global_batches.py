"""The samples of each step: drawn, divided into steps, and shared among the steps of an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from lightning_freescale.balance.assign import assign
from lightning_freescale.balance.budget import Budget, BudgetSteps
from lightning_freescale.balance.plan import PlanArguments
from lightning_freescale.balance.solver.bounds import Ints
from lightning_freescale.balance.validation import whole_number
from lightning_freescale.balance.window import DrawnWindow, share_window

Value = TypeVar("Value")

_KEPT_WINDOWS = 32
"""Number of windows that are kept, because loader workers read ahead of training, which needs its own window in each step."""


def draw_order(samples: int, seed: int, epoch: int) -> Ints:
    """Return the shuffled samples of an epoch, the same on every machine, shape ``[samples]``."""
    # the stream of RandomState is frozen; that of Generator may change between numpy versions
    return np.random.RandomState([seed, epoch]).permutation(samples)


@dataclass(frozen=True, eq=False)
class BlockShuffle:
    """A shuffle that reads ``window`` blocks of the data set at a time, such as row groups or chunks on disk.

    Each epoch shuffles the order of the blocks, and then the samples of ``window`` consecutive blocks together.

    Args:
        sizes: Number of samples of each block, in the order of the data set, shape ``[blocks]``.
        window: Number of blocks that are shuffled together.

    Raises:
        ValueError: An argument is invalid.

    Examples:
        >>> BlockShuffle([3, 3, 3], window=1).draw_order(seed=0, epoch=0)
        array([2, 0, 1, 7, 8, 6, 3, 5, 4])
    """

    sizes: ArrayLike | Sequence[int]
    window: int = 8

    def __post_init__(self) -> None:
        sizes = np.asarray(self.sizes)
        if sizes.ndim != 1 or not np.issubdtype(sizes.dtype, np.integer) or (sizes < 0).any():
            raise ValueError(f"BlockShuffle(sizes={self.sizes!r}): pass the number of samples of each block, shape [blocks]")
        if self.window < 1:
            raise ValueError(f"BlockShuffle(window={self.window!r}): pass a number of blocks of at least 1")

    @property
    def samples(self) -> int:
        """The number of samples of all blocks."""
        return int(np.sum(self.sizes))

    def draw_order(self, seed: int, epoch: int) -> Ints:
        """Return the shuffled samples of an epoch, the same on every machine, shape ``[samples]``."""
        draw = np.random.RandomState([seed, epoch])
        edges = np.append(0, np.cumsum(self.sizes))
        blocks = draw.permutation(len(edges) - 1)
        parts = [np.arange(edges[block], edges[block + 1]) for block in blocks]
        windows = [np.concatenate(parts[first : first + self.window]) for first in range(0, len(parts), self.window)]
        return np.concatenate([draw.permutation(window) for window in windows])


@dataclass(frozen=True)
class StepSettings:
    """The arguments of :class:`BalancedSampler` that decide how an epoch is drawn and divided into steps."""

    batch_size: int | Budget
    ranks: int
    seed: int = 0
    shuffle: bool | BlockShuffle = True
    drop_last: bool = False
    window: int = 1
    limit: int | float = 1.0

    def __post_init__(self) -> None:
        numbers = {"window": self.window, "num_replicas": self.ranks}
        if not isinstance(self.batch_size, Budget):
            numbers["batch_size"] = self.batch_size
        for name, value in numbers.items():
            whole_number(f"BalancedSampler({name}={{}})", value)
        if not isinstance(self.limit, Real) or self.limit < 0 or (self.limit > 1 and not isinstance(self.limit, Integral)):
            raise ValueError(
                f"BalancedSampler(limit={self.limit!r}): pass a number of steps, or a share of the steps from 0.0 to 1.0"
            )


class _Boundaries:
    """The boundaries of steps of ``batch_size * ranks`` samples, with the interface of :class:`BudgetSteps`.

    Unless ``drop_last``, the remaining samples are an incomplete last step. If they are fewer than the ranks, they join the
    step before, so that each rank always has a sample.
    """

    def __init__(self, samples: int, batch_size: int, ranks: int, drop_last: bool) -> None:
        if samples < ranks:
            raise ValueError(
                f"there {'is 1 sample' if samples == 1 else f'are {samples} samples'} for {ranks} ranks. Each rank needs at "
                f"least one sample per step. Use fewer ranks or more samples."
            )
        self._samples, self._per_step = samples, batch_size * ranks
        self._ranks, self._drop_last = ranks, drop_last
        self.full_epoch = self._cut(0)
        self._resumed = (0, self.full_epoch)
        if len(self.full_epoch) == 1:
            raise ValueError(
                f"drop_last=True leaves no step, because {samples} samples are fewer than batch_size={batch_size} x {ranks} "
                "ranks. Use drop_last=False or a smaller batch_size."
            )

    def for_epoch(self, epoch: int) -> list[int]:
        return self._resumed[1] if epoch == self._resumed[0] else self.full_epoch

    def resume(self, epoch: int, batches: int, samples: int | None) -> None:
        """Resume ``epoch`` after ``batches`` steps of ``samples`` samples in all."""
        if samples is None or self.full_epoch[: batches + 1][-1] == samples:
            self._resumed = (epoch, self.full_epoch)
            return
        left = self._samples - samples
        if 0 < left < self._ranks and not self._drop_last:
            raise ValueError(
                f"{left} samples are left of epoch {epoch}, fewer than the {self._ranks} ranks. Resume on at most {left} "
                "ranks, or from a checkpoint made at the end of an epoch."
            )
        self._resumed = (epoch, [samples] * batches + self._cut(samples))

    def _cut(self, start: int) -> list[int]:
        edges = list(range(start, self._samples + 1, self._per_step))
        rest = self._samples - edges[-1]
        if not rest or self._drop_last:
            return edges
        if rest < self._ranks and len(edges) > 1:
            edges.pop()  # they join the last step, because a rank without a sample would leave the others waiting
        return [*edges, self._samples]


class GlobalBatches:
    """The samples of each step of each epoch. A thread that plans ahead may use it at the same time.

    Raises:
        ValueError: There is no step, or ``shuffle`` belongs to another data set.
    """

    def __init__(self, arguments: PlanArguments, settings: StepSettings) -> None:
        samples, shuffle = len(arguments.costs), settings.shuffle
        self._arguments, self._settings, self._samples = arguments, settings, samples
        if isinstance(shuffle, BlockShuffle) and shuffle.samples != samples:
            raise ValueError(
                f"BlockShuffle(sizes=...) has {shuffle.samples} samples, but the data set has {samples}. Pass the number of "
                "samples of each block of this data set."
            )
        self._steps: _Boundaries | BudgetSteps
        if isinstance(settings.batch_size, Budget):
            self._steps = BudgetSteps(settings.batch_size, settings.ranks)
        else:
            self._steps = _Boundaries(samples, settings.batch_size, settings.ranks, settings.drop_last)
        self._resumed = (0, 0)  # epoch and its first step
        self._interrupted = (0, 0, 0)  # epoch, first step and number of steps of the window that an earlier run began
        self._drawn: tuple[int, Ints] | None = None  # an epoch and its samples, step by step
        self._windows: dict[tuple[int, int], list[Ints]] = {}
        self._drawn_windows: dict[tuple[int, int], DrawnWindow] = {}

    def use(self, arguments: PlanArguments) -> None:
        """Use other costs or limits from now on."""
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
        """Resume ``epoch`` after its first ``batches`` steps; see :meth:`BalancedSampler.resume`."""
        if isinstance(self._steps, BudgetSteps):
            self._steps.resume(epoch, batches, self._draw_order(epoch), cuts)
        else:
            self._steps.resume(epoch, batches, samples)
        self._resumed, self._interrupted = (epoch, batches), (0, 0, 0)
        begun, steps = self.begun_window(epoch, batches) if window is None else window
        self._interrupted = (epoch, begun, steps)
        self._forget()

    # -- an epoch

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of an epoch that is not resumed."""
        return len(self._steps.full_epoch) - 1

    def first_step(self, epoch: int) -> int:
        """Return the first step of an epoch: 0 unless it was resumed."""
        return self._resumed[1] if epoch == self._resumed[0] else 0

    def end(self, epoch: int) -> int:
        """Return the number of steps of an epoch, including those before a :meth:`resume`."""
        return len(self._steps.for_epoch(epoch)) - 1

    def consumed(self, epoch: int, batches: int) -> int:
        """Return the number of samples of the first ``batches`` steps of an epoch."""
        return self._steps.for_epoch(epoch)[batches]

    def cuts(self, epoch: int) -> list[tuple[int, ...]]:
        """Return the divisions of an epoch by the budget, for :meth:`resume`; an empty list without a budget."""
        return [tuple(cut) for cut in self._steps.cuts(epoch)] if isinstance(self._steps, BudgetSteps) else []

    @property
    def fill(self) -> float | None:
        """The share of the budget that an epoch uses; None without a budget."""
        return self._steps.fill if isinstance(self._steps, BudgetSteps) else None

    def order(self, epoch: int) -> Ints:
        """Return the samples of an epoch, step by step."""
        drawn = self._drawn  # read once, because the thread that plans ahead sets it too
        if drawn is None or drawn[0] != epoch:
            order = self._draw_order(epoch)
            if isinstance(self._steps, BudgetSteps):
                order = self._steps.deal(order, self._steps.cuts(epoch))
            drawn = self._drawn = (epoch, order)
        return drawn[1]

    # -- a step

    def samples(self, epoch: int, step: int) -> Ints:
        """Return the samples of a step in drawn order, shape ``[samples]``."""
        edges = self._steps.for_epoch(epoch)
        steps = self.sharing_steps(epoch, step)
        if len(steps) < 2:
            return self.order(epoch)[edges[step] : edges[step + 1]]
        shared = self._windows.get((epoch, steps.start))
        if shared is None:
            arguments, ranks = self._arguments, self._settings.ranks
            samples = self.order(epoch)[edges[steps.start] : edges[steps.stop]]
            batch_of_sample = share_window(arguments.costs[samples], len(steps), ranks)
            shared = [samples[batch_of_sample == batch] for batch in range(len(steps))]
            limited = arguments.options.get("max_tokens_per_rank") is not None
            if limited and not all(_fits(arguments, each, ranks) for each in shared):
                shared = np.split(samples, len(steps))  # as drawn
            self._windows = _kept(self._windows, (epoch, steps.start), shared)
        return shared[step - steps.start]

    def ranks_within_budget(self, epoch: int, step: int) -> Ints | None:
        """Return a rank for each sample of a step so that no rank is above the budget; None without a budget."""
        steps = self._steps
        return steps.ranks_within_budget(epoch, self.samples(epoch, step)) if isinstance(steps, BudgetSteps) else None

    def sharing_steps(self, epoch: int, step: int) -> range:
        """Return the steps that share samples with a step, including it: the full steps of its window."""
        resumed, begun, interrupted = self._interrupted
        if epoch == resumed and begun <= step < begun + interrupted:  # an earlier run began this window
            return range(begun, begun + interrupted)
        settings = self._settings
        if settings.window == 1 or isinstance(settings.batch_size, Budget):
            return range(step, step + 1)
        first = step - step % settings.window
        end = first + settings.window
        if epoch == resumed and step >= begun + interrupted:
            first = max(first, begun + interrupted)
        full, edges = settings.batch_size * settings.ranks, self._steps.for_epoch(epoch)
        steps = len(edges) - 1
        # steps beyond the limit do not share; otherwise, the trained steps of a window would get its most expensive samples
        last = min(settings.limit, steps) if isinstance(settings.limit, int) else int(settings.limit * steps)
        shared = [each for each in range(first, min(end, last)) if edges[each + 1] - edges[each] == full]
        return range(shared[0], shared[-1] + 1) if step in shared else range(step, step + 1)

    def begun_window(self, epoch: int, batches: int) -> tuple[int, int]:
        """Return the first step and the number of steps of the window that a run leaves unfinished after ``batches`` steps."""
        steps = self.sharing_steps(epoch, batches)
        return (steps.start, len(steps)) if steps.start < batches else (batches, 0)

    def as_drawn(self, epoch: int, step: int) -> DrawnWindow | None:
        """Return the steps that share samples with a step, as drawn; None if the step has the samples it was drawn with."""
        steps = self.sharing_steps(epoch, step)
        if len(steps) < 2:
            return None
        edges, order = self._steps.for_epoch(epoch), self.order(epoch)
        drawn = [order[edges[each] : edges[each + 1]] for each in steps]
        if all(np.array_equal(one, self.samples(epoch, each)) for one, each in zip(drawn, steps)):
            return None  # the token limit prevents sharing
        key = epoch, steps.start
        if key not in self._drawn_windows:
            costs, tokens = self._arguments.costs, self._arguments.tokens
            of_steps = None if tokens is None else [tokens[each] for each in drawn]
            found = DrawnWindow([costs[each] for each in drawn], of_steps, self._settings.ranks)
            self._drawn_windows = _kept(self._drawn_windows, key, found)
        return self._drawn_windows[key]

    def _draw_order(self, epoch: int) -> Ints:
        shuffle, seed = self._settings.shuffle, self._settings.seed
        if isinstance(shuffle, BlockShuffle):
            return shuffle.draw_order(seed, epoch)
        return draw_order(self._samples, seed, epoch) if shuffle else np.arange(self._samples)

    def _forget(self) -> None:
        self._drawn, self._windows, self._drawn_windows = None, {}, {}


def _fits(arguments: PlanArguments, samples: Ints, ranks: int) -> bool:
    """Return True if there is a plan for the samples of a step within the limit on tokens."""
    try:
        assign(arguments.costs[samples], ranks, **arguments.options_of(samples))
    except ValueError:
        return False
    return True


def _kept(before: dict[tuple[int, int], Value], key: tuple[int, int], value: Value) -> dict[tuple[int, int], Value]:
    """Return the newest entries and another one, as a new dict, because a thread may read the old one."""
    return {**dict(list(before.items())[1 - _KEPT_WINDOWS :]), key: value}
