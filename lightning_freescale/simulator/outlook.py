"""What each technique would bring on so many ranks, with intervals: lengths are drawn anew, and so is what is assumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.simulator.network import Network
from lightning_freescale.simulator.quantity import Quantity, pinned, quantities
from lightning_freescale.simulator.training_load import TrainingLoad
from lightning_freescale.simulator.training_step import LADDER, Techniques, bubble, expected_traffic, step_times

Floats = NDArray[np.float64]
Assign = Callable[[Floats, int], NDArray[np.int64]]
"""Returns the rank of every sample, shape ``[samples]``, from their costs and the number of ranks."""
SHARE = 0.9
"""Of what was drawn, an interval leaves out as much on either side as makes this."""


@dataclass(frozen=True)
class Outlook:
    """A technique, or several, on so many ranks; all figures are predicted.

    Attributes:
        ranks: how many.
        name: of the techniques.
        techniques: which are on.
        step: wall time of a step in seconds.
        bubble: share of the ranks' time in which they do not compute.
        speed_up: over plain, end to end.
        removed: of plain's bubble, as time, the share that is gone.
        limit: what no technique can exceed, 1 / (1 - b) by plain's bubble b.
    """

    ranks: int
    name: str
    techniques: Techniques
    step: Quantity
    bubble: Quantity
    speed_up: Quantity
    removed: Quantity
    limit: Quantity

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        figures = {name: getattr(self, name).as_dict() for name in ("step", "bubble", "speed_up", "removed", "limit")}
        return {"ranks": self.ranks, "name": self.name, "techniques": str(self.techniques), **figures}


def simulate(
    lengths: Floats,
    ranks: int,
    load: TrainingLoad,
    network: Network,
    *,
    assign: Assign,
    variants: Mapping[str, Techniques] | None = None,
    steps: int = 20,
    draws: int = 8,
    seed: int = 0,
) -> list[Outlook]:
    """Predict steps of so many ranks, every variant on the same samples.

    Histories are drawn with replacement: where ranks x batch size are more than there are, it is as if there were more of the
    kind. An interval holds 90 % of what pairs of steps come to, each pair drawn from lengths that are themselves drawn from the
    given ones (bootstrap), and with the assumptions anywhere in their ranges, independently of each other.

    Args:
        lengths: history length of every sample, shape ``[samples]``, > 0.
        ranks: how many share a step.
        load: what a step has to compute and to move.
        network: what connects the ranks.
        assign: see :data:`Assign`; asked where a variant balances.
        variants: by name; plain, which all are compared with, is the first, or added. By default :data:`LADDER`.
        steps: how many to draw, at least two.
        draws: of the assumptions, for each pair of steps; 0 leaves them at their values.
        seed: of all that is drawn.

    Raises:
        ValueError: there is no length, or not that many ranks or steps; names it.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    if lengths.ndim != 1 or not len(lengths) or not (lengths >= 0).all() or not lengths.any():
        raise ValueError(f"simulate(lengths of shape {lengths.shape}): pass one number >= 0 per history, not all of them 0")
    if ranks < 1 or steps < 2 or draws < 0:
        raise ValueError(f"simulate(ranks={ranks}, steps={steps}, draws={draws}): pass at least 1 rank, 2 steps, 0 draws")
    chosen = {"plain": Techniques(), **(LADDER if variants is None else variants)}
    rng = np.random.default_rng([seed, ranks, 1])
    ranges = {**quantities(load), **quantities(network)}
    figures: dict[str, list[Floats]] = {name: [] for name in chosen}
    nominal: dict[str, list[Floats]] = {name: [] for name in chosen}
    balances = any(each.balance for each in chosen.values())
    for sums in pairs_of_steps(lengths, ranks, load, assign if balances else None, steps, seed):
        for draw in range(draws + 1):
            at = {name: known.at(rng.random()) if draw else known.value for name, known in ranges.items()}
            # that of the exponent's range is fine enough in steps: its popularities are kept
            at["exponent"] = round(at["exponent"], 2)
            setting = pinned(load, at), pinned(network, at)
            for name, techniques in chosen.items():
                found = _figures(sums[techniques.balance], *setting, techniques)
                figures[name].append(found)
                nominal[name] += [] if draw else [found]
    return [
        _outlook(ranks, name, techniques, *([np.array(kept[each]) for each in ("plain", name)] for kept in (nominal, figures)))
        for name, techniques in chosen.items()
    ]


def pairs_of_steps(
    lengths: Floats, ranks: int, load: TrainingLoad, assign: Assign | None, steps: int, seed: int, *, resample: bool = True
) -> Iterator[dict[bool, Floats]]:
    """Yield pairs of steps: sums of 1, L and L² of the ranks' samples, shape ``[2, ranks, 3]``, by whether they are balanced.

    Args:
        lengths: of the histories, shape ``[samples]``.
        ranks: how many share a step.
        load: its costs are assigned by.
        assign: see :data:`Assign`; None leaves samples as drawn.
        steps: how many to draw, half as many pairs.
        seed: of the draw.
        resample: draw each pair from lengths that are themselves drawn from the given ones.
    """
    rng, size = np.random.default_rng([seed, ranks]), ranks * load.batch_size
    for _ in range(steps // 2):
        source = rng.choice(lengths, len(lengths)) if resample else lengths
        sums: dict[bool, list[Floats]] = {False: [], True: []}
        for _ in range(2):
            drawn = rng.choice(source, size)
            features = np.stack([np.ones(size), drawn, drawn * drawn], axis=-1)
            sums[False].append(features.reshape(ranks, load.batch_size, 3).sum(axis=1))
            if assign is not None:
                rank_of_sample = assign(load.seconds(features), ranks)
                sums[True].append(np.stack([np.bincount(rank_of_sample, column, ranks) for column in features.T], axis=-1))
        yield {balanced: np.array(found) for balanced, found in sums.items() if found}


def _figures(sums: Floats, load: TrainingLoad, network: Network, techniques: Techniques) -> Floats:
    """Wall time and useful compute of a step, means."""
    compute = load.seconds(sums) + load.base.value
    traffic = expected_traffic(load.seconds(sums), sums[:, :, 1], load, network, techniques)
    walls = step_times(traffic, load, network, techniques)
    return np.array([walls.mean(), walls.mean() * (1 - bubble(walls, compute))])


def _outlook(ranks: int, name: str, techniques: Techniques, nominal: list[Floats], drawn: list[Floats]) -> Outlook:
    """Of plain and of this one, each of shape ``[draws, 2]``: wall and compute."""
    values = _derived(*(found.mean(axis=0, keepdims=True) for found in nominal))
    spread = _derived(*drawn)
    known = {}
    for figure, unit in (("step", "s"), ("bubble", ""), ("speed_up", ""), ("removed", ""), ("limit", "")):
        value = float(values[figure][0])
        low, high = np.quantile(spread[figure], [(1 - SHARE) / 2, (1 + SHARE) / 2])
        known[figure] = Quantity(value, "predicted", min(float(low), value), max(float(high), value), unit, "simulated")
    return Outlook(ranks, name, techniques, **known)


def _derived(plain: Floats, this: Floats) -> dict[str, Floats]:
    lost, left = plain[:, 0] - plain[:, 1], this[:, 0] - this[:, 1]
    return {
        "step": this[:, 0],
        "bubble": left / this[:, 0],
        "speed_up": plain[:, 0] / this[:, 0],
        "removed": 1 - left / np.maximum(lost, 1e-300),
        "limit": plain[:, 0] / plain[:, 1],
    }
