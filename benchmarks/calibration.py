"""From a wrong cost model to the true one: predicted, with made-up times; and measured, in real steps of two ranks.

``--data``: a model whose time grows with the square of the length starts with a cost model that counts tokens, or with the
analytic one. Every step's compute times are drawn with noise and outliers, every fifth step stays as drawn, which separates the
coefficients, unless ``--all-planned``, as in training with ``cost="auto"``. The fit is made by the code that runs there,
and the plan that follows is scored by the true cost: its imbalance before and after calibration, predicted. Means and the worst
of several runs with other noise and samples.

``--measured``: the reference model trains on ml-latest-small, on short histories and on heavy-tailed ones: as drawn, planned by
the analytic model, by ``cost="auto"``, and with histories all of one length, which is the jitter of this machine. After the
first epoch: predicted and measured imbalance, and the straggler wait that is left of that as drawn: above the jitter's, and of
what comes from the data, by the cost model of each report, which takes jitter out where it is larger than that. With
``--clock wall`` the straggler wait is the one that ranks have waited; the machine's other load is in all of it. With ``--clock
cpu`` steps are timed by the processor time of the thread that computes, as if each rank had a core of its own, and the
straggler wait is what the ranks would have waited: the slowest rank's compute less their own.
"""

from __future__ import annotations

import argparse
from itertools import product

import harness
import numpy as np
from lengths import read_lengths

from lightning_freescale.balance import CostModel, assign
from lightning_freescale.balance.assign import contiguous_split
from lightning_freescale.balance.calibration import Calibration, imbalance_by_true_costs
from lightning_freescale.balance.cost import sample_features

BATCH, JUDGED = 32, 20
START = {"tokens": CostModel(linear=1.0, quadratic=0.0), "analytic": CostModel()}
TRUE = {"L^2": CostModel(linear=0.0, quadratic=1.0), "L^2 + 1280 L": CostModel(linear=1280.0, quadratic=1.0)}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data", action="append", default=[], metavar="PATH", help="lengths: .npz with offsets, or text")
    parser.add_argument("--ranks", default="8,64,256")
    parser.add_argument("--steps", type=int, default=50, help="measured steps (default: 50)")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--noise", type=float, default=0.05, help="standard deviation of the log of the times (default: 0.05)")
    parser.add_argument("--start", choices=list(START), default="tokens", help="cost model before the fit (default: tokens)")
    parser.add_argument("--all-planned", action="store_true", help="leave no step as drawn")
    parser.add_argument("--measured", metavar="FAMILIES", help="movielens, short, heavy-tail, or several of them")
    parser.add_argument("--rounds", type=int, default=5, help="fits of each variant (default: 5)")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of each fit; the first does not count (default: 5)")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    options = parser.parse_args()
    if not options.data and options.measured is None:
        parser.error("pass --data or --measured")
    harness.finish(_predict(options) | _measure(options), options)


def _measure(options: argparse.Namespace) -> dict[str, float]:
    if options.measured is None:
        return {}
    from calibration_steps import measure

    families = options.measured.split(",")
    figures = measure(families, options.rounds, options.epochs, options.clock)
    print(f"measured, by the {options.clock} clock: medians of {options.rounds} fits, without their first epoch")
    titles = f"{'predicted':>10}{'measured':>10}{'analytic':>10}{'as drawn':>10}{'jitter':>9}{'wait left':>11}{'of data':>10}"
    print(f"{'imbalance':<12}{titles}")
    for family in families:
        names = ("predicted", "auto_imbalance", "analytic_imbalance", "drawn_imbalance")
        row = "".join(f"{figures[f'{family}_{name}']:>10.3f}" for name in names) + f"{figures[f'{family}_jitter']:>9.3f}"
        left = f"{figures[f'{family}_auto_wait_left']:>11.1%}{figures[f'{family}_auto_data_wait_left']:>10.1%}"
        cost = (
            f"an exchange takes {figures[f'{family}_exchange_ms']:.1f} ms, {figures[f'{family}_exchange_share']:.1%} of compute"
        )
        print(f"{family:<12}{row}{left}   {cost}")
    for name in ("apart", "apart_beyond_jitter", "auto_wait_left", "auto_data_wait_left", "exchange_share"):
        figures[f"most_{name}"] = max(figures[f"{family}_{name}"] for family in families)
    return figures


def _predict(options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    if not options.data:
        return figures
    print(f"predicted: {options.steps} steps, noise {options.noise:.0%}, 5 % of the times three times too long")
    titles = f"{options.start:>13}{'calibrated':>12}{'true model':>12}{'/ true':>9}{'worst':>9}"
    print(f"{'data':<10}{'true cost':<14}{'ranks':>6}{titles}")
    for path in options.data:
        name, lengths = read_lengths(path)
        for (label, model), ranks in product(TRUE.items(), map(int, options.ranks.split(","))):
            runs = np.array([_run(lengths, ranks, model, options, seed) for seed in range(options.runs)])
            wrong, fitted, true = runs.mean(axis=0)
            worst = (runs[:, 1] / runs[:, 2]).max()
            row = f"{wrong:>13.4f}{fitted:>12.4f}{true:>12.4f}{fitted / true:>9.4f}{worst:>9.4f}"
            print(f"{name:<10}{label:<14}{ranks:>6}{row}", flush=True)
            key = f"{name}_{'mixed' if model.linear else 'quadratic'}_{ranks}"
            figures |= {f"{key}_before": wrong / true, f"{key}_calibrated": fitted / true, f"{key}_worst": worst}
    return figures


def _run(lengths: np.ndarray, ranks: int, model: CostModel, options: argparse.Namespace, seed: int) -> list[float]:
    """Imbalance by the true cost of plans by the model before, the fitted and the true one."""
    draw, features, true, steps = np.random.RandomState(seed), sample_features(lengths), model(lengths), options.steps
    sums, seconds = np.zeros((steps, ranks, 4)), np.zeros((steps, ranks))
    base = true.mean() * BATCH / 10
    for step in range(steps):
        samples = draw.choice(len(lengths), ranks * BATCH)
        rank = contiguous_split(len(samples), ranks)
        if options.all_planned or step % 5 != 4:
            rank = assign(START[options.start](lengths[samples]), ranks).rank_of_sample
        for column in range(4):
            sums[step, :, column] = np.bincount(rank, features[samples, column], ranks)
        times = base + np.bincount(rank, true[samples], ranks)
        seconds[step] = times * draw.lognormal(0, options.noise, ranks) * np.where(draw.rand(ranks) < 0.05, 3, 1)
    fit = Calibration().add_window(sums, seconds)
    assert fit is not None
    before = START[options.start]
    batches = [draw.choice(len(lengths), ranks * BATCH) for _ in range(JUDGED)]
    plans = [model(lengths) for model in (before, fit.model, model)]
    return [imbalance_by_true_costs([(plan[batch], true[batch]) for batch in batches], 0.0, ranks) for plan in plans]


if __name__ == "__main__":
    main()
