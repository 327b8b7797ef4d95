"""Rank 0's history of the steps of all ranks, and the report on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.breakdown import arrivals_of, bubble, column, intervals_of, last_arrivals, wall_of
from lightning_freescale.profiling.analysis.imbalance import PlannedStep, planned_balance, planned_padding, split_imbalance
from lightning_freescale.profiling.analysis.rank_window import ExchangeSums, RankSegments, RankWindow
from lightning_freescale.profiling.analysis.replay import Replay
from lightning_freescale.profiling.analysis.what_if import WhatIf, what_if
from lightning_freescale.profiling.recording.memory import MemoryReading, MemoryWindows
from lightning_freescale.profiling.recording.records import ResolvedStep
from lightning_freescale.profiling.reporting.document import ExchangeFigures, Overhead, RunInfo, Status, WaitAttribution
from lightning_freescale.profiling.reporting.report import BubbleReport, compute_imbalance_of, samples_per_s_of, shares_of
from lightning_freescale.profiling.reporting.verdict import Advise

Floats = NDArray[np.float64]
FitCosts = Callable[[Floats, Floats], "tuple[Floats, Floats] | None"]
"""Function from features, shape ``[steps, ranks, features]``, and seconds of compute, shape ``[steps, ranks]``, to the expected
seconds on a rank that is not slow, shape ``[steps, ranks]``, and the slowness of each rank, shape ``[ranks]``."""
_REPLAYED, _REPLAYED_OF_RANKS = 500, 50_000
"""Largest number of replayed steps, and of steps times ranks, which take half a second."""
_ENOUGH = 0.1
"""Share of the replayed steps with divided waits above which the other steps are not replayed."""
_PREFETCHED = 2
"""Batches that torch's loaders request from every worker in advance, by default."""
_INTERIM = 10_000
"""Steps times ranks of an interim report, which is written in the time of one or two steps."""


class History:
    """The last ``max_steps`` steps of all ranks on rank 0. Without ``fit_costs``, the causes of imbalance are divided by rank.

    Attributes:
        added: number of steps added so far.
    """

    def __init__(self, run: RunInfo, max_steps: int, fit_costs: FitCosts | None, advise: Advise | None = None) -> None:
        self._run, self._max_steps, self._fit_costs, self._advise = run, max_steps, fit_costs, advise
        # number, breakdown, samples, features, predicted load (all but the number for every rank) and plan of each step
        self._steps: deque[tuple[int, Floats, tuple[int, ...], tuple[Any, ...], tuple[Any, ...], PlannedStep | None]]
        self._steps = deque(maxlen=max_steps)
        self._segments: deque[tuple[RankSegments, ...]] = deque(maxlen=min(max_steps, _REPLAYED))
        # number of steps, exchanges and host sections of every rank, for the last windows with max_steps steps
        self._sums: deque[tuple[int, list[dict[str, ExchangeSums]], list[dict[str, float]]]] = deque()
        # number of the last step and every rank's memory, for the same windows
        self._memory: deque[tuple[int, list[MemoryReading | None]]] = deque()
        self._parts: dict[str, Any] = {}
        self.added = 0

    def note_outcome(self, settings: Mapping[str, Any], **parts: Any) -> None:
        """Record the fields of :class:`RunInfo` that training may have changed, and ``heat`` and ``workload`` of the report."""
        self._run, self._parts = replace(self._run, **settings), parts

    def add_windows(self, windows: Sequence[RankWindow], plans: Sequence[PlannedStep | None] | None = None) -> None:
        """Add the same steps of every rank and their plans, None if unknown."""
        known = [None] * len(windows[0].steps) if plans is None else plans
        breakdown = np.stack([window.breakdown for window in windows], axis=1)
        lists = ((window.samples, window.features, window.predicted, window.segments) for window in windows)
        samples, features, predicted, segments = zip(*lists)
        self._steps.extend(zip(windows[0].steps, breakdown, zip(*samples), zip(*features), zip(*predicted), known))
        self._segments.extend(zip(*segments))
        self._sums.append((len(breakdown), [window.exchanges for window in windows], [window.host for window in windows]))
        self._memory.append((windows[0].steps[-1], [window.memory for window in windows]))
        while self._summed_steps() - self._sums[0][0] >= self._max_steps:
            self._sums.popleft()
            self._memory.popleft()
        self.added += len(breakdown)

    def newest_scalars(self) -> dict[str, float]:
        """Return scalars for loggers from the steps of the last :meth:`add_windows`."""
        _, breakdown, samples, *_ = zip(*list(self._steps)[-self._sums[-1][0] :])
        return window_scalars(np.stack(breakdown), np.array(samples), _memory_of(list(self._memory)[-1:]))

    def build_report(
        self,
        status: Status,
        wait_attribution: WaitAttribution,
        overhead: Overhead,
        traced: Sequence[Sequence[ResolvedStep]] | None = None,
        device_idle: dict[str, Any] | None = None,
    ) -> BubbleReport:
        """Return the report on all added steps; ``traced`` has the last steps of every rank with all their stamps.

        Without ``traced``, it is an interim report on the newest steps without replays, which would take time.
        """
        ranks = len(self._steps[-1][1])
        newest = slice(None) if traced is not None else slice(-max(1, _INTERIM // ranks), None)
        steps, breakdowns, samples, features, predicted, plans = zip(*list(self._steps)[newest])
        breakdown = np.stack(breakdowns)
        compute = column(breakdown, "compute")
        worked_on = _known(features)
        fit = None if self._fit_costs is None or worked_on is None else self._fit_costs(worked_on, compute)
        expected, slowness = fit or (None, None)
        exchanges = self._exchange_sums()
        balance = planned_balance(plans, compute)
        padded = None if balance is None else planned_padding(plans, compute)
        padding = None if padded is None else padded["tokens"]
        cases, replayed = self._what_if(breakdown, expected, padding) if traced is not None else ((), None)
        return BubbleReport(
            breakdown=breakdown,
            samples=np.array(samples),
            features=worked_on,
            predicted=_known(predicted),
            balance=balance,
            padded=padded,
            steps=np.array(steps),
            run=self._run,
            wait_attribution=wait_attribution,
            overhead=overhead,
            status=status,
            imbalance=split_imbalance(compute, expected, slowness) if ranks > 1 else None,
            what_if=cases,
            replayed=replayed,
            exchanges=[self._figures(name, exchanges) for name in dict.fromkeys(name for rank in exchanges for name in rank)],
            host=self._host_sections(),
            device_idle=device_idle,
            median_step=_median_step(traced, wait_attribution.aligned) if traced and len(traced[0]) == ranks else None,
            memory=_memory_of(list(self._memory)),
            **self._parts,
            advise=self._advise,
        )

    def _what_if(
        self, breakdown: Floats, expected: Floats | None, padding: float | None
    ) -> tuple[tuple[WhatIf, ...], NDArray[np.intp] | None]:
        """Return what-ifs and the replayed steps: the last ones, without undivided waits if enough remain."""
        segments = list(self._segments)[-max(1, _REPLAYED_OF_RANKS // breakdown.shape[1]) :]
        last = np.arange(len(breakdown))[-len(segments) :]
        divided = ~column(breakdown[last], "wait").any(axis=1)
        enough = divided.mean() >= _ENOUGH  # a few windows with uncertain clocks do not prevent the division
        chosen = np.flatnonzero(divided) if enough else np.arange(len(last))
        replay = Replay([segments[k] for k in chosen], _PREFETCHED * (self._run.num_workers or 0))
        costs = None if expected is None else expected[last[chosen]]
        cases = what_if(replay, divided=bool(enough), expected=costs, padding=padding)
        return cases, last[chosen][replay.schedule.steps] if cases else None

    # -- sums over windows

    def _summed_steps(self) -> int:
        return sum(steps for steps, *_ in self._sums)

    def _host_sections(self) -> dict[str, float]:
        """Return seconds per step by section of the host, as a mean over ranks."""
        seconds: dict[str, float] = {}
        steps = self._summed_steps()
        for _, _, ranks in self._sums:
            for section, spent in (entry for rank in ranks for entry in rank.items()):
                seconds[section] = seconds.get(section, 0.0) + spent / len(ranks) / steps
        return seconds

    def _exchange_sums(self) -> list[dict[str, ExchangeSums]]:
        """Return the sums of every rank by name of exchange."""
        ranks: list[dict[str, ExchangeSums]] = [{} for _ in self._sums[0][1]]
        for _, window, _ in self._sums:
            for mine, exchanges in zip(ranks, window):
                for name, sums in exchanges.items():
                    mine.setdefault(name, ExchangeSums()).include(sums)
        return ranks

    def _figures(self, name: str, ranks: Sequence[dict[str, ExchangeSums]]) -> ExchangeFigures:
        sums = [rank.get(name, ExchangeSums()) for rank in ranks]
        rank_steps = self._summed_steps() * len(sums)

        def mean(field: str) -> float:
            return sum(getattr(one, field) for one in sums) / rank_steps

        return ExchangeFigures(
            name=name,
            per_step=mean("count"),
            **{f"{part}_s": mean(part) for part in ("straggler_wait", "transfer", "wait", "hidden")},
            moved_bytes=None if any(one.unknown for one in sums) else int(mean("moved")),
            last=tuple(one.last for one in sums),
        )


def window_scalars(breakdown: Floats, samples: NDArray[np.int64], memory: MemoryWindows | None = None) -> dict[str, float]:
    """Return scalars for loggers, with keys that begin with ``freescale/bubble/``.

    Args:
        breakdown: seconds, shape ``[steps, ranks, len(PART_NAMES)]``.
        samples: number of samples, shape ``[steps, ranks]``; zeros if unknown, which omits ``samples_per_s``.
        memory: memory of the ranks in these steps; None omits it.
    """
    values = {"fraction": bubble(breakdown), **shares_of(breakdown), "compute_imbalance": compute_imbalance_of(breakdown)}
    rates = {"step_s": float(breakdown[:, :, 0].mean()), "samples_per_s": samples_per_s_of(breakdown, samples)}
    if breakdown.shape[1] > 1:  # the slowest rank waits least in exchanges, because the others wait for it
        waits = sum(column(breakdown, name) for name in ("straggler_wait", "transfer", "wait"))
        rates["slowest_rank"] = float(np.argmax((column(breakdown, "wall") - waits).sum(axis=0)))
    if memory is not None:
        rates |= {"memory_bytes": float(memory.current[-1].max()), "memory_peak_bytes": float(memory.peak[-1].max())}
        rates["memory_imbalance"] = memory.imbalance
    return {f"freescale/bubble/{name}": value for name, value in {**values, **rates}.items() if value is not None}


def _known(values: Sequence[Sequence[Any]]) -> Floats | None:
    """Return the values by step and rank as an array; None if one is unknown."""
    return None if any(one is None for row in values for one in row) else np.array(values, dtype=np.float64)


def _memory_of(windows: Sequence[tuple[int, Sequence[MemoryReading | None]]]) -> MemoryWindows | None:
    """Return the windows with known memory of every rank; None without any."""
    known = [(step, readings) for step, readings in windows if None not in readings]
    if not known:
        return None
    steps, readings = zip(*known)
    current, peak, reserved = np.moveaxis(np.array(readings, float), -1, 0)  # an unknown number becomes NaN
    return MemoryWindows(steps, current, peak, None if np.isnan(reserved).any() else reserved)


def _median_step(traced: Sequence[Sequence[ResolvedStep]], aligned: bool) -> dict[str, Any]:
    """Return the traced step of median length with the intervals of every rank, in seconds from its start."""
    chosen = sorted(traced, key=lambda row: max(wall_of(step) for step in row))[(len(traced) - 1) // 2]
    arrivals = last_arrivals(map(arrivals_of, chosen))
    origin = min(step.start for step in chosen)

    def shown(step: ResolvedStep) -> list[list[Any]]:
        last = [arrivals[collective.key].seconds for collective in step.collectives] if aligned else None
        return [[i.kind, i.name, round(i.start - origin, 6), round(i.end - origin, 6)] for i in intervals_of(step, last)]

    return {"step": chosen[0].index, "ranks": [shown(step) for step in chosen]}
