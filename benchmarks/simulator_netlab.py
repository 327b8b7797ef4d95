"""Accuracy of the simulator for the steps that the ladder has measured on netlab at 2, 4 and 8 ranks.

``python benchmarks/simulator_netlab.py benchmarks/results/ladder_2.json ... --data ml-1m.seqs.npz``

The samples of each step are those of the ladder, drawn and assigned again. Compute follows from their cost model, the
popularity of rows from their distribution, and the rate of a link from netlab, less 0.7 % of headers. Host work is calibrated
with the floor, and the latency of an exchange with plain's step, both at the smallest number of ranks only. All else is
predicted: ``..._off`` is predicted over measured, less 1, and ``..._bubble_points`` the difference of the bubble in points.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
import ladder
import ladder_fits
import numpy as np
import overlap_workload
from numpy.typing import NDArray

from lightning_freescale.balance import BalancedSampler
from lightning_freescale.simulator import Catalogue, Network, Quantity, Techniques, TrainingLoad, step_times
from lightning_freescale.simulator.training_step import bubble, expected_traffic

Floats = NDArray[np.float64]
RUNGS = {
    "plain": Techniques(),
    "balance": Techniques(balance=True),
    "dedup": Techniques(balance=True, overlap=True, dedup=True),
    "split": Techniques(balance=True, overlap=True, dedup=True, split_backward=True),
}
"""The settings that are predicted, as the ladder calls them."""
_RATES = {"gbit": 1e9 / 8, "mbit": 1e6 / 8, "kbit": 1e3 / 8}
_HEADERS = 0.993


def main() -> None:
    """Predict the runs of all files, the fewest ranks first."""
    arguments = harness.parser(__doc__)
    arguments.add_argument("results", type=Path, nargs="+", help="result files of benchmarks/ladder.py")
    arguments.add_argument("--data", type=Path, help="the ladder's lengths (default: those of ml-latest-small)")
    options = arguments.parse_args()
    runs = sorted((_Run(path, options.data) for path in options.results), key=lambda run: run.ranks)
    host, latency = runs[0].calibrated()
    print(
        f"calibrated at {runs[0].ranks} ranks: host work {1e3 * host:.1f} ms, an exchange {1e3 * latency:.1f} ms plus its bytes"
    )
    figures: dict[str, float] = {}
    for run in runs:
        for rung in RUNGS:
            predicted, predicted_bubble = run.predict(rung, host, latency)
            measured, measured_bubble = run.measured[f"{rung}_step_ms"] / 1e3, run.measured[f"{rung}_bubble"]
            off, points = predicted / measured - 1, 100 * (predicted_bubble - measured_bubble)
            figures |= {f"{run.ranks}_{rung}_off": off, f"{run.ranks}_{rung}_bubble_points": points}
            print(f"{run.ranks} ranks, {rung:<8} step: measured {1e3 * measured:7.1f} ms, predicted {1e3 * predicted:7.1f} "
                  f"({off:+.1%}); bubble: {measured_bubble:.1%}, {predicted_bubble:.1%} ({points:+.1f} points)")  # fmt: skip
    figures["most_off"] = max(abs(value) for name, value in figures.items() if name.endswith("_off"))
    figures["most_bubble_points"] = max(abs(value) for name, value in figures.items() if name.endswith("_points"))
    harness.finish(figures, options)


class _Run:
    """A run of the ladder: its figures, and its samples drawn again."""

    def __init__(self, path: Path, data: Path | None) -> None:
        result = json.loads(path.read_text())
        self.measured: dict[str, float] = result["figures"]
        words = shlex.split(result["measured_on"]["command"])
        self.ranks, self._rate = int(_after(words, "--hosts")), _after(words, "--rate")
        os.environ["WORLD_SIZE"] = str(self.ranks)
        words = words[words.index("benchmarks/ladder.py") + 1 :]
        if "--plot" in words:  # a flag of earlier versions, with a file
            place = words.index("--plot")
            del words[place : place + 2]
        self._options = ladder.read_options(words)
        self._options.data = data if self._options.data is not None else None
        self._kind = ladder_fits.ARCHETYPES[self._options.archetype]
        self._lengths, self._cost = ladder_fits.drawn_lengths(self._kind, self._options)

    def calibrated(self) -> tuple[float, float]:
        """Return host work and latency in seconds."""
        host = self.measured["floor_lost_ms"] / 1e3
        low, high = 0.0, 0.1
        for _ in range(30):
            latency = (low + high) / 2
            short = self.predict("plain", host, latency)[0] < self.measured["plain_step_ms"] / 1e3
            low, high = (latency, high) if short else (low, latency)
        return host, latency

    def predict(self, rung: str, host: float, latency: float) -> tuple[float, float]:
        """Return the seconds of a step, and the bubble."""
        techniques, load = RUNGS[rung], self._load(host)
        speed = next(factor for unit, factor in _RATES.items() if self._rate.endswith(unit))
        bandwidth = _HEADERS * float(self._rate.removesuffix("mbit").removesuffix("gbit").removesuffix("kbit")) * speed
        network = Network(_exactly(bandwidth), _exactly(latency), _exactly(0.0), 1, _exactly(bandwidth))
        walls, compute = [], []
        for sums in self._steps(techniques.balance):
            seconds = load.seconds(sums)
            traffic = expected_traffic(seconds, sums[:, :, 1] * self._kind.tables, load, network, techniques)
            walls.append(step_times(traffic, load, network, techniques)), compute.append(seconds)
        wall, useful = np.concatenate(walls), np.concatenate(compute)
        return float(wall.mean()), bubble(wall, useful)

    def _steps(self, balanced: bool) -> Iterator[Floats]:
        """Return sums of 1, L and L² over each rank's samples in each round, shape ``[steps, ranks, 3]``."""
        for number in range(self._options.rounds):
            sampler = BalancedSampler(
                self._cost(self._lengths), self._kind.batch, num_replicas=self.ranks, rank=0, seed=number, balance=balanced,
                tokens=self._lengths, **({"assignment_mode": "slack"} if balanced else {}),
            )  # fmt: skip
            first = ladder_fits.end_to_end.SKIPPED
            plans = [sampler.plan(0, step) for step in range(first, len(sampler) - 1)]
            yield np.array([[self._sums(self._lengths[np.asarray(samples)]) for samples in plan] for plan in plans])

    @staticmethod
    def _sums(lengths: NDArray[np.int64]) -> list[float]:
        return [len(lengths), float(lengths.sum()), float((lengths.astype(np.float64) ** 2).sum())]

    def _load(self, host: float) -> TrainingLoad:
        cost = self._cost
        nothing = _exactly(0.0)
        return TrainingLoad(
            self._kind.batch, linear=_exactly(cost.linear), quadratic=_exactly(cost.quadratic), constant=nothing, base=nothing,
            catalogue=Catalogue(self._options.rows, _exactly(overlap_workload.EXPONENT)), row_bytes=4 * self._kind.dim,
            dense_bytes=nothing, host=_exactly(host), call=nothing, contention=nothing, split_cost=nothing,
            late_weights=_exactly(self._options.weights_share),
        )  # fmt: skip


def _exactly(value: float) -> Quantity:
    return Quantity(value, "measured")


def _after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


if __name__ == "__main__":
    main()
