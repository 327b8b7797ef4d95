"""Sums over the steps that a report covers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lightning_freescale.profiling.analysis.rank_window import ExchangeSums, RankWindow
from lightning_freescale.profiling.reporting.facts import ExchangeFigures


class Totals:
    """What exchanges and the host took, of the last windows that hold at least ``keep_steps`` steps."""

    def __init__(self, keep_steps: int) -> None:
        self._keep = keep_steps
        self._windows: deque[tuple[int, list[dict[str, ExchangeSums]], list[dict[str, float]]]] = deque()

    def add(self, windows: Sequence[RankWindow]) -> None:
        """The same steps of every rank."""
        self._windows.append((len(windows[0].steps), [one.exchanges for one in windows], [one.host for one in windows]))
        while self._steps - self._windows[0][0] >= self._keep:
            self._windows.popleft()

    def host(self) -> dict[str, float]:
        """Seconds per step by section, mean over ranks."""
        seconds: dict[str, float] = {}
        for _, _, ranks in self._windows:
            for section, spent in (entry for rank in ranks for entry in rank.items()):
                seconds[section] = seconds.get(section, 0.0) + spent / len(ranks) / self._steps
        return seconds

    def exchanges(self) -> tuple[ExchangeFigures, ...]:
        """Figures by name."""
        ranks = self._by_rank()
        return tuple(self._figures(name, ranks) for name in dict.fromkeys(name for rank in ranks for name in rank))

    def last(self) -> tuple[int, ...]:
        """How often each rank was the last to arrive."""
        return tuple(sum(sums.last for sums in rank.values()) for rank in self._by_rank())

    @property
    def _steps(self) -> int:
        return sum(count for count, *_ in self._windows)

    def _by_rank(self) -> list[dict[str, ExchangeSums]]:
        ranks: list[dict[str, ExchangeSums]] = [{} for _ in self._windows[0][1]]
        for _, window, _ in self._windows:
            for mine, exchanges in zip(ranks, window):
                for name, sums in exchanges.items():
                    mine.setdefault(name, ExchangeSums()).add(sums)
        return ranks

    def _figures(self, name: str, ranks: Sequence[dict[str, ExchangeSums]]) -> ExchangeFigures:
        sums = [rank.get(name, ExchangeSums()) for rank in ranks]
        each = self._steps * len(sums)

        def mean(field: str) -> float:
            return sum(getattr(one, field) for one in sums) / each

        moved = None if any(one.unknown for one in sums) else int(mean("moved"))
        waits = mean("straggler_wait"), mean("transfer"), mean("hidden")
        return ExchangeFigures(name, mean("count"), *waits, moved, tuple(one.last for one in sums))
