"""Runs whose truth is known: ranks that work, wait for each other and stamp what they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_freescale.profiling.analysis.breakdown import intervals_of
from lightning_freescale.profiling.analysis.rank_window import RankSegments, segments_of
from lightning_freescale.profiling.recording.records import Interval, ResolvedCollective, ResolvedStep


@dataclass
class Rank:
    """Its clock, which may be wrong by ``offset``."""

    now: float = 0.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.start, self.spans, self.collectives = self.now, [], []

    def work(self, kind: str, seconds: float) -> None:
        """``"gap"`` leaves no span."""
        if kind != "gap":
            self.spans.append(Interval(kind, kind, self.now + self.offset, self.now + seconds + self.offset))
        self.now += seconds

    def step(self) -> ResolvedStep:
        step = ResolvedStep(self.start + self.offset, self.now + self.offset, 0, 1, tuple(self.spans), tuple(self.collectives))
        self.begin()
        return step


def meet(
    ranks: Sequence[Rank],
    key: str,
    transfers: Sequence[float],
    arrivals: Sequence[float] | None = None,
    notice: float | None = None,
) -> None:
    """The ranks wait for a collective at which they arrived now, or at ``arrivals``.

    They see when it is over, apart from the wait, and go on ``notice`` seconds later; None: they do not see it.
    """
    arrived = [rank.now for rank in ranks] if arrivals is None else arrivals
    for rank, transfer, at in zip(ranks, transfers, arrived):
        done = max(arrived) + transfer
        end = max(rank.now, done) + (notice or 0.0)
        times = (t + rank.offset for t in (at, rank.now, end, end if notice is None else done))
        rank.collectives.append(ResolvedCollective(key, key, *times, 1000))
        rank.now = end


def run_segments(steps: Sequence[Sequence[ResolvedStep]]) -> list[list[RankSegments]]:
    """As the profiler makes them: the last arrival is the latest by the ranks' clocks."""
    made = []
    for ranks in steps:
        last: dict[str, float] = {}
        for collective in (c for step in ranks for c in step.collectives):
            last[collective.key] = max(last.get(collective.key, -np.inf), collective.arrive)
        made.append([])
        for step in ranks:
            arrived = [last[c.key] for c in step.collectives]
            made[-1].append(segments_of(step, arrived, intervals_of(step, arrived)))
    return made


def random_run(seed: int, ranks: int, steps: int) -> list[list[ResolvedStep]]:
    """Ranks of different speed, late data, subgroups, pauses, exchanges issued steps ahead, clocks that disagree."""
    rng = np.random.default_rng(seed)
    crew = [Rank(rng.uniform(0, 2), rng.uniform(-0.1, 0.1)) for _ in range(ranks)]
    run, ahead = [], [rank.now for rank in crew]
    for step in range(steps):
        pause = rng.random() < 0.2
        for rank in crew:
            if pause:
                rank.work("pause", rng.uniform(0, 3))
            rank.work("data", rng.exponential(0.3))
            rank.work("forward", rng.lognormal())
            rank.work("gap", rng.exponential(0.05))
        _exchanges(rng, crew, step, ahead)
        ahead = [rank.now - rng.uniform(0, 1) * (rank.now - rank.start) for rank in crew]
        for rank in crew:
            rank.work("optimizer", rng.exponential(0.1))
        run.append([rank.step() for rank in crew])
    return run


def _exchanges(rng: np.random.Generator, crew: list[Rank], step: int, ahead: list[float]) -> None:
    half = len(crew) // 2
    if half:
        meet(crew[:half], f"a {step}", rng.exponential(0.3, half), notice=rng.choice([None, 0.01]))
        meet(crew[half:], f"b {step}", rng.exponential(0.3, len(crew)))
    for rank in crew:
        rank.work("backward", rng.exponential(1.0))
    if step:
        meet(crew, f"issued ahead {step}", rng.exponential(1.0, len(crew)), ahead, notice=rng.choice([None, 0.01]))
    bucket = []
    for rank in crew:
        bucket.append(rank.now)
        rank.work("backward", rng.exponential(0.5))
    meet(crew, f"gradients {step}", rng.exponential(0.3, len(crew)), bucket)


def planned_run(compute: np.ndarray, data: np.ndarray, transfer: np.ndarray) -> list[list[ResolvedStep]]:
    """A run without chance; all shapes ``[steps, ranks]``.

    In every step the even and the odd ranks meet among themselves, all meet at an exchange that each rank joined in the middle
    of its forward, at one that it joined in the middle of the backward before, and at one that nothing hides.
    """
    crew = [Rank() for _ in range(compute.shape[1])]
    run: list[list[ResolvedStep]] = []
    ahead: list[float] = []
    for step, (seconds, late, lasting) in enumerate(zip(compute, data, transfer)):
        for rank, wait in zip(crew, late):
            rank.work("data", wait)
        for name, part in (("even", slice(0, None, 2)), ("odd", slice(1, None, 2))):
            meet(crew[part], f"{name} {step}", lasting[part], notice=0.0)
        middle = [rank.now + c / 4 for rank, c in zip(crew, seconds)]
        for rank, c in zip(crew, seconds):
            rank.work("forward", c / 2)
        meet(crew, f"rows {step}", lasting, middle, notice=0.0)
        if ahead:
            meet(crew, f"ahead {step}", 6 * lasting, ahead, notice=0.0)
        ahead = [rank.now + c / 4 for rank, c in zip(crew, seconds)]
        for rank, c in zip(crew, seconds):
            rank.work("backward", c / 2)
        meet(crew, f"gradients {step}", lasting, notice=0.0)
        run.append([rank.step() for rank in crew])
    return run


def run_behind_workers(compute: np.ndarray, making: Sequence[float], host: float = 0.1) -> list[list[ResolvedStep]]:
    """Ranks, each with a loader worker that makes two batches ahead; ``making`` is how long each takes, of every rank.

    Compute is of shape ``[steps, ranks]``.
    """
    crew = [Rank() for _ in range(compute.shape[1])]
    run: list[list[ResolvedStep]] = []
    taken, made = [[0.0, 0.0] for _ in crew], [0.0 for _ in crew]
    for step, seconds in enumerate(compute):
        for k, rank in enumerate(crew):
            made[k] = max(made[k], taken[k][-2]) + making[step]
            rank.work("data", max(0.0, made[k] - rank.now) + 1e-3)
            taken[k].append(rank.now)
            rank.work("gap", host)
            rank.work("forward", seconds[k] / 4)
        meet(crew, f"rows {step}", [0.01] * len(crew))
        for rank, c in zip(crew, seconds):
            rank.work("backward", 3 * c / 4)
        meet(crew, f"gradients {step}", [0.02] * len(crew))
        run.append([rank.step() for rank in crew])
    return run


def wall(run: Sequence[Sequence[ResolvedStep]]) -> float:
    """Of all steps and ranks, without pauses."""
    spans = (span for ranks in run for step in ranks for span in step.spans if span.kind == "pause")
    return sum(step.end - step.start for ranks in run for step in ranks) - sum(span.end - span.start for span in spans)
