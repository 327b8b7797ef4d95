"""Predicted step times of each technique on a number of ranks, with intervals, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from operator import le

import numpy as np

from lightning_freescale.balance.assign import AssignmentMode
from lightning_freescale.balance.cost import sample_features
from lightning_freescale.balance.plan import StepPlan
from lightning_freescale.balance.validation import Floats
from lightning_freescale.simulator.network import Network
from lightning_freescale.simulator.quantity import Quantity, pinned, quantities
from lightning_freescale.simulator.training_step import LADDER, Techniques, TrainingLoad, bubble, expected_traffic, step_times

SHARE = 0.9
"""Share of the drawn values that an interval contains."""
LABELS = {
    "batch_size": "histories per rank and step",
    "rows": "rows of all tables",
    "row_bytes": "bytes of an item's rows",
    "linear": "compute per item",
    "quadratic": "compute per item squared",
    "constant": "compute per history",
    "base": "compute independent of histories",
    "exponent": "popularity exponent",
    "dense_bytes": "dense gradients",
    "last_bucket": "dense gradients of the last bucket",
    "host": "host work per step",
    "call": "time of a Python call",
    "contention": "contention for multiprocessors",
    "late_weights": "share of weights in a split backward",
    "split_cost": "cost of a split backward",
    "ranks_per_node": "ranks per node",
    "bandwidth": "bandwidth between nodes",
    "latency": "latency of an exchange",
    "peer_latency": "latency per other rank",
    "node_bandwidth": "bandwidth within a node",
}
"""Names of the quantities in tables and on the page."""
_EFFECT = 0.005
"""Relative difference of steps, or of an end of their intervals, from which a row is shown."""
_HEAD = ("ranks", "technique", "step ms", "bubble", "removed", "speed-up", "limit")
_ROW = "{:>5}  {:<18}{:>24}{:>24}{:>24}{:>22}{:>22}"


@dataclass(frozen=True)
class Outlook:
    """The predicted figures of some techniques on a number of ranks.

    Attributes:
        ranks: Number of ranks.
        name: Name of the techniques.
        techniques: Techniques in use.
        step: Wall time of a step in seconds.
        bubble: Share of the ranks' time in which they do not compute.
        speed_up: End-to-end speed-up over plain.
        removed: Removed share of plain's bubble time; -1 if the bubble is at least twice as long.
        limit: Maximum speed-up of any technique, 1 / (1 - b) for the bubble b of plain.
    """

    ranks: int
    name: str
    techniques: Techniques
    step: Quantity
    bubble: Quantity
    speed_up: Quantity
    removed: Quantity
    limit: Quantity


def simulate(
    lengths: Floats,
    ranks: int,
    load: TrainingLoad,
    network: Network,
    *,
    assignment_mode: AssignmentMode = "fixed",
    variants: Mapping[str, Techniques] | None = None,
    steps: int = 20,
    draws: int = 8,
    seed: int = 0,
) -> list[Outlook]:
    """Predict steps on a number of ranks, with the same samples for each variant.

    Histories are drawn with replacement, so that a step can have more samples than the data set. An interval contains 90 % of
    the results of pairs of steps. Each pair is drawn from lengths that are resampled from the given ones (bootstrap), and the
    assumptions are drawn independently from their ranges.

    Args:
        lengths: History length of each sample, shape ``[samples]``, >= 0 and not all 0.
        ranks: Number of ranks.
        load: Compute and exchanged bytes of a step.
        network: Network between the ranks.
        assignment_mode: Mode of :func:`~lightning_freescale.balance.assign` for variants that balance.
        variants: Techniques by name. ``"plain"``, with which all variants are compared, is added. :data:`LADDER` by default.
        steps: Number of steps to draw, at least 2.
        draws: Number of draws of the assumptions for each pair of steps; 0 to use their values only.
        seed: Seed of all draws.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    if lengths.ndim != 1 or not len(lengths) or not (lengths >= 0).all() or not lengths.any():
        raise ValueError(f"simulate(lengths of shape {lengths.shape}): pass one number >= 0 per history, not all of them 0")
    if ranks < 1 or steps < 2 or draws < 0:
        raise ValueError(f"simulate(ranks={ranks}, steps={steps}, draws={draws}): pass ranks >= 1, steps >= 2, draws >= 0")
    chosen = {"plain": Techniques(), **(LADDER if variants is None else variants)}
    rng = np.random.default_rng([seed, ranks, 1])
    ranges = {**quantities(load), **quantities(network)}
    figures: dict[str, list[Floats]] = {name: [] for name in chosen}
    mode = assignment_mode if any(each.balance for each in chosen.values()) else None
    for sums in pairs_of_steps(lengths, ranks, load, steps, seed, assignment_mode=mode):
        for draw in range(draws + 1):
            at = {name: known.at(rng.random()) if draw else known.value for name, known in ranges.items()}
            # round, so that the cache of popularities is used
            at["exponent"] = round(at["exponent"], 2)
            setting = pinned(load, at), pinned(network, at)
            for name, techniques in chosen.items():
                figures[name].append(_figures(sums[techniques.balance], *setting, techniques))
    drawn = {name: np.array(found).reshape(-1, draws + 1, 2) for name, found in figures.items()}
    return [_outlook(ranks, name, techniques, drawn["plain"], drawn[name]) for name, techniques in chosen.items()]


def pairs_of_steps(
    lengths: Floats,
    ranks: int,
    load: TrainingLoad,
    steps: int,
    seed: int,
    *,
    assignment_mode: AssignmentMode | None = "fixed",
    resample: bool = True,
) -> Iterator[dict[bool, Floats]]:
    """Yield pairs of steps, as drawn (False) and balanced (True).

    A pair is the sums of 1, L and L² over each rank's samples, shape ``[2, ranks, 3]``. See :func:`simulate` for the arguments.
    With ``assignment_mode=None``, no balanced steps are yielded. With ``resample``, each pair has lengths of its own.
    """
    rng, size = np.random.default_rng([seed, ranks]), ranks * load.batch_size
    for _ in range(steps // 2):
        source = rng.choice(lengths, len(lengths)) if resample else lengths
        sums: dict[bool, list[Floats]] = {False: [], True: []}
        for _ in range(2):
            drawn = rng.choice(source, size)
            features = sample_features(drawn)[:, :3]
            options = {} if assignment_mode is None else {"assignment_mode": assignment_mode}
            for balanced in (False,) if assignment_mode is None else (False, True):
                plan = StepPlan(np.arange(size), load.seconds(features), ranks, balanced, options)
                sums[balanced].append(np.stack([np.bincount(plan.rank_of_sample, column, ranks) for column in features.T], -1))
        yield {balanced: np.array(found) for balanced, found in sums.items() if found}


def _figures(sums: Floats, load: TrainingLoad, network: Network, techniques: Techniques) -> Floats:
    """Return the mean wall time and compute of a step."""
    compute = load.seconds(sums) + load.base.value
    traffic = expected_traffic(load.seconds(sums), sums[:, :, 1], load, network, techniques)
    walls = step_times(traffic, load, network, techniques)
    return np.array([walls.mean(), walls.mean() * (1 - bubble(walls, compute))])


def _outlook(ranks: int, name: str, techniques: Techniques, plain: Floats, this: Floats) -> Outlook:
    """Return the outlook from wall time and compute of plain and of these techniques.

    The shapes are ``[pairs, draws + 1, 2]``. The first draw of a pair has the values of the assumptions.
    """
    values = _derived(*(found[:, 0].mean(axis=0, keepdims=True) for found in (plain, this)))
    spread = _derived(plain.reshape(-1, 2), this.reshape(-1, 2))
    known = {}
    for figure, unit in (("step", "s"), ("bubble", ""), ("speed_up", ""), ("removed", ""), ("limit", "")):
        value = float(values[figure][0])
        low, high = np.quantile(spread[figure], [(1 - SHARE) / 2, (1 + SHARE) / 2])
        known[figure] = Quantity(value, "predicted", min(float(low), value), max(float(high), value), unit, "simulated")
    return Outlook(ranks, name, techniques, **known)


def _derived(plain: Floats, this: Floats) -> dict[str, Floats]:
    lost, left = (np.maximum(found[:, 0] - found[:, 1], 0.0) for found in (plain, this))  # below 0 by rounding only
    return {
        "step": this[:, 0],
        "bubble": left / this[:, 0],
        "speed_up": plain[:, 0] / this[:, 0],
        "removed": np.clip((lost - left) / np.maximum(lost, 1e-300), -1.0, 1.0),
        "limit": plain[:, 0] / plain[:, 1],
    }


# -- as a table


def format_outlooks(outlooks: Sequence[Outlook]) -> str:
    """Return a table of the predicted figures with their intervals. It names techniques without effect in a line."""
    lines = [_ROW.format(*_HEAD)]
    for ranks in dict.fromkeys(each.ranks for each in outlooks):
        lines += [""] * (len(lines) > 1)
        shown: list[Outlook] = []
        rows = [each for each in outlooks if each.ranks == ranks]
        for each in rows:
            if not _has_effect(each, shown):
                continue
            gains = ("", "", _ratio(each.limit)) if each.name == "plain" else (_share(each.removed), _ratio(each.speed_up), "")
            first, step = "" if shown else ranks, _interval(each.step, "{:.1f}", 1e3)
            shown.append(each)
            lines.append(_ROW.format(first, each.name, step, _share(each.bubble), *gains).rstrip())
        if omitted := ", ".join(each.name for each in rows if each not in shown):
            lines.append(f"{'':7}no effect: {omitted}")
    return "\n".join(lines)


def _has_effect(row: Outlook, shown: Sequence[Outlook]) -> bool:
    """Return False if a part of the row's techniques leads to the same step."""
    parts = [each.step for each in shown if all(map(le, astuple(each.techniques), astuple(row.techniques)))]
    mine = row.step
    return not any(np.allclose([mine.low, mine.value, mine.high], [s.low, s.value, s.high], rtol=_EFFECT) for s in parts)


def format_known(known: Mapping[str, Quantity]) -> str:
    """Return a line for each quantity with its value, range, origin and source."""
    width = max((len(LABELS[name]) for name in known), default=0)
    return "\n".join(f"  {LABELS[name]:<{width}}  {each}" for name, each in known.items())


EXPLANATION = (
    f"All figures are predicted. Brackets contain {SHARE:.0%} of the results for resampled lengths and for assumptions drawn\n"
    "from their ranges. Bubble: 1 - compute / wall time. Removed: share of plain's bubble time. Limit: maximum speed-up of\n"
    "any technique, 1 / (1 - b) for the bubble b of plain. No effect: the step changes by less than 0.5 %."
)
"""Explanation of the columns."""


def _interval(of: Quantity, spec: str, factor: float = 1.0) -> str:
    # -0.0 % is 0.0 %
    value, low, high = (spec.format(round(factor * number, 3) + 0.0) for number in (of.value, of.low, of.high))
    return value if low == high else f"{value} ({low} - {high})"


_share, _ratio = partial(_interval, spec="{:.1%}"), partial(_interval, spec="{:.2f}")
