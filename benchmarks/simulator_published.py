"""Predictions of the simulator for published runs on many GPUs. All figures of this package here are predicted.

``python benchmarks/simulator_published.py``

nvidia    recsys-examples (commit 43465ae: PERF_ANALYSIS.md, E2E_BENCHMARK.md and the plotted times of attention): HSTU of 8
          layers of width 1024 on 16 H100. A profile of histories of one length, with attention by CUTLASS, gives the compute of
          a token and of a squared length, and the host work. Throughput on jagged lengths is predicted.
nestpipe  arXiv 2604.06956, from notes on it: HSTU on 128 and 1,536 NPUs. Lookup's share of the step rises from 24.4 % to
          49.6 %. The popularity of the most popular item is chosen so that waiting for its owner explains the rise. The time of
          a row is chosen so that communication has the published 9.2 % of the step on 128. On 1,536, the share of communication
          is predicted; the published one is not an input. Speed-up and scaling efficiency follow from this share and from
          published figures by arithmetic.
freescale arXiv 2604.24073: see simulator_freescale.py.

Details of NVIDIA's benchmark that the prediction needs:

- A history of S items has 2 S + 3 tokens, because actions and three features of the user are tokens too.
- Lengths S are drawn from Zipf(1.2) without a limit and cut at 4,096, so that 17 % of them are 4,096. This follows from their
  code (``RandomDistribution.sample``) and leads to the published work of a step.
- The first two runs use attention by Triton, whose time is not in the profile. It is taken from the difference of two earlier
  runs (commit 49bfd3a), whose count of FLOPs left out the output projection.
- Nsight captures one of the nine intervals of 100 steps, and all intervals have the same batches. We infer that the best
  interval is a run without Nsight. Their fixed-length run is without Nsight, and its best interval is 1.4 % above the mean.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import simulator_freescale
from harness import finish, parser
from numpy.typing import NDArray

from lightning_freescale.balance.assign import AssignmentMode
from lightning_freescale.simulator import Catalogue, Network, Quantity, Techniques, TrainingLoad, simulate
from lightning_freescale.simulator.outlook import pairs_of_steps
from lightning_freescale.simulator.training_step import expected_traffic, step_times

Floats = NDArray[np.float64]
WIDTH, LAYERS, BATCH, RANKS, TOKENS = 1024, 8, 32, 16, 4099
PROFILE = {
    "step": 187.01, "attention": 79.900, "gemm": 43.919, "elementwise": 39.507, "embedding": 10.643, "others": 1.217,
    "nccl": 2.927,
}  # fmt: skip
"""Milliseconds of NVIDIA's step of histories of 4,099 tokens, and of its kernels; ``nccl`` is what nothing hides."""
ATTENTION = {4096: 9.55, 8192: 36.1}
"""Milliseconds of attention by CUTLASS: both passes of a layer, 32 sequences of a length (hstu_attn_h100_p10_heatmap.png)."""
EARLIER = {"triton": 1667e12, "cutlass": 3933e12}
"""FLOPS of all 16 GPUs with the balancer in the earlier runs."""
WORK = 391.5e12 * 93.7e-3
"""Published FLOPs of a GPU in a profiled step on jagged lengths."""
PUBLISHED = {
    "off": {"drawn": 77.5, "balanced": 120.8, "cutlass": 336.9},
    "mean_off": {"drawn": 75.6, "balanced": 115.8, "cutlass": 308.6},
}
"""TFLOPS of a GPU in the best interval and in all: Triton as drawn and with the balancer, and CUTLASS with the balancer and the
profile's tables (experiments 0, 1 and 4)."""
PLAIN = Techniques(dedup=True)
"""NVIDIA's baseline sends a row once."""


def main() -> None:
    """Predict all three."""
    options = parser(__doc__).parse_args()
    figures = _nvidia() | _nestpipe() | simulator_freescale.predict()
    finish(figures, options)


def _nvidia() -> dict[str, float]:
    cutlass = _load_of_profile()
    step = simulate(np.full(1000, float(TOKENS)), RANKS, cutlass, Network(), variants={"dedup": PLAIN})[-1]
    fixed = _flops(np.array([1.0, TOKENS, TOKENS**2]) * BATCH)
    # Karmarkar and Karp's differencing at equal counts treats long tails like a zig-zag (docs/benchmarks/balance.md)
    drawn, balanced, ours = (_steps(cutlass, mode) for mode in (None, "zigzag", "fixed"))
    triton = replace(cutlass, quadratic=_quadratic_of_triton(cutlass, balanced))
    runs = {"drawn": (triton, drawn), "balanced": (triton, balanced), "cutlass": (cutlass, balanced), "ours": (triton, ours)}
    through = {name: _throughput(load, sums) / 1e12 for name, (load, sums) in runs.items()}
    gain, off = through["balanced"] / through["drawn"], {}
    for key, published in PUBLISHED.items():
        off |= {f"nvidia_{name}_{key}": through[name] / value - 1 for name, value in published.items()}
        off[f"nvidia_balancer_gain_{key}"] = gain / (published["balanced"] / published["drawn"]) - 1
    work = _flops(drawn.mean(axis=(0, 1)))
    print(f"NVIDIA's step: {step.step}; published 187 ms. {fixed / 1e12:.1f} TFLOP; published 63.9. On jagged lengths "
          f"{work / 1e12:.1f} TFLOP; published {WORK / 1e12:.1f}")  # fmt: skip
    for name, value in PUBLISHED["off"].items():
        print(f"TFLOPS per GPU, {name}: predicted {through[name]:.1f}, published {value} (mean: {PUBLISHED['mean_off'][name]})")
    print(f"gain of their balancer: predicted {gain:.2f}, of ours {through['ours'] / through['drawn']:.2f}")
    return off | {f"nvidia_tflops_{name}": value for name, value in through.items()} | {
        "nvidia_tflop": fixed / 1e12,
        "nvidia_tflop_jagged": work / 1e12,
        "nvidia_tflop_jagged_off": work / WORK - 1,
        "nvidia_step_ms": 1e3 * step.step.value,
        "nvidia_step_off": 1e3 * step.step.value / PROFILE["step"] - 1,
        "nvidia_triton_times_cutlass": triton.quadratic.value / cutlass.quadratic.value,
        "nvidia_triton_share": 1 - through["balanced"] / through["cutlass"],
        "nvidia_balancer_gain": gain,
        "nvidia_our_gain": through["ours"] / through["drawn"],
    }  # fmt: skip


def _load_of_profile() -> TrainingLoad:
    """Return the compute of the profile. The rest of its step, less its exchanges, does not depend on lengths."""
    short, long = ATTENTION.values()
    squared = (long - 2 * short) / (2 * short)  # share of attention, as its time is linear and quadratic in a length
    kernels = {name: value / 1e3 for name, value in PROFILE.items()}
    quadratic = squared * kernels["attention"]
    linear = sum(kernels[name] for name in ("attention", "gemm", "elementwise", "embedding", "others")) - quadratic
    known = {name: Quantity(value, "measured", unit="s", source="PERF_ANALYSIS.md") for name, value in (
        ("linear", linear / BATCH / TOKENS), ("quadratic", quadratic / BATCH / TOKENS**2),
        ("host", kernels["step"] - linear - quadratic - kernels["nccl"]),
    )}  # fmt: skip
    dense = Quantity(81.15 * 2**20, "measured", unit="B", source="PERF_ANALYSIS.md")
    catalogue = Catalogue(50_000_000, Quantity(1.05, "measured"))
    return TrainingLoad(BATCH, **known, dense_bytes=dense, catalogue=catalogue, row_bytes=256)  # a row of 512 for two tokens


def _steps(load: TrainingLoad, mode: AssignmentMode | None) -> Floats:
    """Return sums of 1, L and L² over the samples of each rank in a hundred steps on jagged lengths."""
    lengths = 2.0 * np.minimum(np.random.default_rng(0).zipf(1.2, 200_000), 4096) + 3
    pairs = pairs_of_steps(lengths, RANKS, load, 100, 1, assignment_mode=mode)
    return np.concatenate([pair[mode is not None] for pair in pairs])


def _quadratic_of_triton(cutlass: TrainingLoad, sums: Floats) -> Quantity:
    """Return the seconds per squared length with Triton, from the longer step of the earlier runs."""
    work = _flops(sums.mean(axis=(0, 1)), projections=4)
    longer = work * RANKS * (1 / EARLIER["triton"] - 1 / EARLIER["cutlass"])
    squares = sums[:, :, 2].max(axis=1).mean()  # of the slowest rank
    return Quantity(cutlass.quadratic.value + longer / squares, "measured", unit="s", source="E2E_BENCHMARK.md of 49bfd3a")


def _flops(sums: Floats, projections: int = 5) -> float:
    """Return the FLOPs of both passes from sums of 1, L and L²: causal attention, whose backward recomputes its scores."""
    return float(sums @ np.array([0.0, LAYERS * 3 * 2 * projections * WIDTH**2, LAYERS * 3.5 * 2 * WIDTH]))


def _throughput(load: TrainingLoad, sums: Floats) -> float:
    """Return the FLOPS of a GPU."""
    network = Network()
    traffic = expected_traffic(load.seconds(sums), sums[:, :, 1], load, network, PLAIN)
    return _flops(sums.mean(axis=1).sum(axis=0)) / float(step_times(traffic, load, network, PLAIN).sum())


def _nestpipe() -> dict[str, float]:
    """Fit the popularity to lookup and the time of a row to communication at 128, and predict 1,536."""
    share = 0.0  # of communication on 1,536; lookup's seconds and share give the rest of the step only with it
    for _ in range(20):
        rest = LOOKUP * ((1 - share) / NESTPIPE[1536] - 1)
        lookup, moved = (rest * NESTPIPE[name] / (1 - NESTPIPE[128] - NESTPIPE["moved"]) for name in (128, "moved"))
        growth = LOOKUP / lookup
        top = (growth - 1) / (1535 - 127 * growth)  # the share of the most popular item in all lookups
        low, high, moved_1536 = (_moved(moved, factor * top) for factor in (0.8, 1.25, 1))
        share = moved_1536 / (rest + LOOKUP + moved_1536)
    ends = {"seconds": moved_1536, "seconds_low": low, "seconds_high": high}
    low, high = (end / (rest + LOOKUP + end) for end in (low, high))
    ends |= {"share_1536_low": low, "share_1536_high": high}
    theirs_128 = rest + LOOKUP_LEFT * lookup / LOOKUP + (1 - SAVED) * moved
    theirs_1536 = rest + LOOKUP_LEFT + (1 - SAVED) * moved_1536
    speed_up, efficiency = (rest + LOOKUP + moved_1536) / theirs_1536, theirs_128 / theirs_1536
    print(
        f"NestPipe: the most popular item has {top:.2%} of all lookups; communication is 9.2 % of the step on 128 ranks and on "
        f"1,536 predicted {share:.1%} ({low:.1%} - {high:.1%}, by a fifth less and a quarter more of these), published 20.5 %; "
        f"in seconds {moved_1536:.2f}, published 1.19; "
        f"speed-up {speed_up:.2f}, published 3.06; efficiency {efficiency:.1%}, published 94.07 %"
    )
    predicted = {"share_1536": share, "speed_up": speed_up, "efficiency": efficiency}
    off = {f"{name}_off": predicted[name] / value - 1 for name, value in NESTPIPE_FIGURES.items()}
    return {f"nestpipe_{name}": value for name, value in (predicted | off | ends).items()}


NESTPIPE = {128: 0.244, 1536: 0.496, "moved": 0.092}
"""Shares of the step: lookup by ranks, and communication on 128."""
LOOKUP, LOOKUP_LEFT, SAVED = 2.871, 0.030, 0.87
"""Seconds of lookup on 1,536 NPUs without and with NestPipe, and the share by which it reduces exposed communication."""
NESTPIPE_FIGURES = {"share_1536": 0.205, "speed_up": 3.06, "efficiency": 0.9407}
"""Published figures that are predicted."""


def _moved(seconds: float, top: float) -> float:
    """Return the seconds of communication on 1,536 ranks whose row bytes lead to ``seconds`` on 128."""
    catalogue = Catalogue(100_000_000, Quantity(_exponent(top), "assumed"))
    costs = {each: Quantity(0.0, "assumed", unit="s") for each in ("linear", "quadratic", "host")}
    load = TrainingLoad(32, **costs, catalogue=catalogue, dense_bytes=Quantity(0.0, "assumed", unit="B"))
    return _communication(load, _smallest(partial(_reaches, load, seconds)), 1536)


def _exponent(top: float) -> float:
    low, high = 0.0, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        share = Catalogue(100_000_000, Quantity(middle, "assumed")).hot_owner(2) - 1
        low, high = (middle, high) if share < top else (low, middle)
    return low


def _reaches(load: TrainingLoad, seconds: float, row_bytes: int) -> bool:
    return _communication(load, row_bytes, 128) >= seconds


def _communication(load: TrainingLoad, row_bytes: int, ranks: int) -> float:
    """Return the seconds that send rows and gradients; all ranks look up the same number of items."""
    load = replace(load, row_bytes=row_bytes)
    traffic = expected_traffic(np.zeros((2, ranks)), np.full((2, ranks), 20_000.0), load, Network(), Techniques())
    return float(step_times(traffic, load, Network(), Techniques())[0])


def _smallest(enough: Callable[[int], bool]) -> int:
    """Return the smallest number, up to a million, that is enough."""
    low, high = 0, 1_000_000
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


if __name__ == "__main__":
    main()
