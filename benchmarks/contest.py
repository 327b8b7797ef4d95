"""All assignment methods on the same global batches, in turns."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from peers import Peer, rank_of_sample

from lightning_freescale.balance import Assignment, CostModel, assign
from lightning_freescale.balance.assign import contiguous_split, imbalance

Floats, Ints = NDArray[np.float64], NDArray[np.int64]
COST, PER_RANK = CostModel(linear=5.0 * 256, quadratic=1.0), 32
OURS = ("fixed", "slack", "free")


class Contest:
    """Plans batch after batch with each method and sums up the results.

    Args:
        ranks: number of ranks that share a batch.
        peers: methods of other packages, by name.
    """

    def __init__(self, ranks: int, peers: Mapping[str, Peer] | None = None) -> None:
        self.ranks, self.peers = ranks, peers or {}
        self.worst: dict[str, tuple[Assignment, Floats]] = {}
        """Per mode, ours with the largest gap, and what its samples cost."""
        self._loads: dict[str, list[tuple[float, float]]] = defaultdict(list)  # of the slowest rank, and the mean
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._dominated: list[bool] = []

    def play(self, lengths: Floats) -> None:
        """Plan one global batch with costs of shape ``[samples]``."""
        cost = COST(lengths)
        self._note("random", cost, contiguous_split(len(cost), self.ranks))  # equivalent to torch's DistributedSampler
        self._note("zigzag", cost, self._timed("zigzag", assign, cost, self.ranks, assignment_mode="zigzag").rank_of_sample)
        whole = [[int(number) for number in numbers] for numbers in (lengths, cost)]  # in the format of the other packages
        for name, peer in self.peers.items():
            self._note(name, cost, rank_of_sample(self._timed(name, peer, *whole, self.ranks), len(cost)))
        for mode in OURS:
            plan = self._timed(mode, assign, cost, self.ranks, assignment_mode=mode)
            self._note(mode, cost, plan.rank_of_sample)
            self._loads[f"{mode}_bound"].append((plan.lower_bound * cost.mean(), cost.mean()))
            if mode not in self.worst or plan.gap > self.worst[mode][0].gap:
                self.worst[mode] = plan, cost
        self._dominated.append(plan.dominated)

    def figures(self) -> dict[str, float]:
        """Return all figures by name."""
        result = {}
        for name, loads in self._loads.items():
            slowest, mean = np.sum(loads, axis=0)
            result[name] = float(slowest / mean)
        result |= {f"{mode}_gap": result[mode] / result[f"{mode}_bound"] for mode in OURS}
        result |= {f"{name}_ms": float(np.median(taken) * 1e3) for name, taken in self._seconds.items()}
        for mode in (name for name in self._seconds if name.startswith(OURS) and "verl" in self._seconds):
            result[f"{mode}_over_verl"] = float(np.median(np.array(self._seconds[mode]) / self._seconds["verl"]))
        return result | {"dominated": float(np.mean(self._dominated))}

    def _timed(self, name: str, algorithm: Callable, *arguments: object, **options: object) -> Any:
        start = time.perf_counter()
        result = algorithm(*arguments, **options)
        self._seconds[name].append(time.perf_counter() - start)
        return result

    def _note(self, name: str, cost: Floats, plan: Ints) -> None:
        self._loads[name].append((imbalance(cost, plan, self.ranks) * cost.mean(), cost.mean()))
