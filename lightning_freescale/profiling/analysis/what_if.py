"""Estimate the duration of a run without each cause of bubbles, by replays of its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.replay import Replay

Floats = NDArray[np.float64]
_LEAST_STEPS = 10
_COVERED, _WHOLLY_COVERED = 0.75, 0.98
"""Largest shares of the expected and the measured compute with exchanges: above, hidden seconds equal compute."""
_HUBER, _REWEIGHTINGS = 1.345, 20
_VARIES = 0.01
_WORTH = 0.01
"""Share of the compute below which exchanges beside it are ignored."""
_WORTH_A_NOTE = 0.01
"""Share of the time above which a deviation gets a note."""
_UNDIVIDED = "the clocks are not aligned, so waits for stragglers are unknown"
_PREDICTED = "predicted for compute proportional to the computed tokens; the limit also counts padding as lost"


@dataclass(frozen=True)
class Contention:
    """Seconds of compute that each hidden second of an exchange adds (``share``), and its standard error.

    Without an estimate, ``share`` is 0 for the given ``reason`` and ``error`` may be infinite.
    """

    share: float
    error: float
    reason: str | None = None


def contention(compute: Floats, hidden: Floats, expected: Floats | None) -> Contention:
    """Estimate the contention by a robust regression (Huber 1964) of compute on expected compute and hidden seconds.

    Every rank has its own speed. Steps of a rank whose compute is covered by exchanges are excluded, because their hidden time
    depends on the compute. A cost model is required, because longer histories cause both more compute and longer exchanges.
    Contention in proportion to the work is already in ``expected``, so the estimate is rather low.

    Args:
        compute: seconds, shape ``[steps, ranks]``.
        hidden: seconds of compute during which an exchange ran, same shape.
        expected: expected seconds of compute, same shape; None without a cost model.
    """
    if hidden.sum() <= _WORTH * compute.sum():
        return Contention(0.0, math.inf, "hardly any exchange ran beside compute")
    if expected is None:
        return Contention(0.0, math.inf, "longer exchanges cannot be distinguished from more work without a cost model")
    usable = (expected > 0) & (compute > 0)
    ratio = np.where(usable, compute / np.where(usable, expected, 1.0), np.nan)
    speeds = np.nanmedian(np.where(usable.any(axis=0), ratio, 1.0), axis=0)  # of each rank; 1 where nothing is known
    usable &= (hidden < _COVERED * expected * speeds) & (hidden < _WHOLLY_COVERED * compute)
    if usable.any(axis=1).sum() < _LEAST_STEPS:
        return Contention(0.0, math.inf, f"exchanges cover the compute in all but {usable.any(axis=1).sum()} steps")
    step, rank = np.nonzero(usable)
    # relative to the expected compute; the last column is a constant cost per step that the cost model lacks
    columns = np.column_stack([hidden[usable], np.full(len(rank), np.median(expected[usable]))]) / expected[usable][:, None]
    share, error = _regress(compute[usable] / expected[usable], columns, step, rank)
    if math.isinf(error):
        return Contention(0.0, error, "all exchanges beside compute take the same time")
    if share >= 1:
        return Contention(0.0, error, f"compute grows by more than the time of the exchanges ({share:.2f} times)")
    if share < -2 * error:
        return Contention(0.0, error, "compute with exchanges took no longer than without")
    if share < 2 * error:
        return Contention(0.0, error, f"within the noise: {share:.3f} with a standard error of {error:.3f}")
    return Contention(share, error)


def _regress(y: Floats, columns: Floats, step: NDArray[np.intp], rank: NDArray[np.intp]) -> tuple[float, float]:
    """Return the coefficient of the first column and its standard error, with noise that the ranks of a step share."""
    weight = np.ones(len(y))
    for _ in range(_REWEIGHTINGS):
        x, centred = _within(columns, weight, rank), _within(y[:, None], weight, rank)[:, 0]
        found = np.linalg.lstsq(x * np.sqrt(weight)[:, None], centred * np.sqrt(weight), rcond=1e-9)[0]
        rest = centred - x @ found
        spread = max(1.4826 * float(np.median(np.abs(rest))), 1e-12)
        weight = np.minimum(1.0, _HUBER * spread / np.maximum(np.abs(rest), 1e-300))
    alone = x[:, 0] - x[:, 1:] @ np.linalg.lstsq(x[:, 1:], x[:, 0], rcond=1e-9)[0]
    if float(np.sqrt(np.mean(alone**2))) < _VARIES * float(columns[:, 0].mean()):
        return 0.0, math.inf
    heard = (weight >= 1.0).astype(float)
    slope = np.linalg.pinv(x.T @ (x * heard[:, None]), rcond=1e-9)
    scores = np.zeros((int(step.max()) + 1, x.shape[1]))
    np.add.at(scores, step, x * (weight * rest)[:, None])
    return float(found[0]), float(np.sqrt((slope @ (scores.T @ scores) @ slope)[0, 0]))


def _within(values: Floats, weight: Floats, rank: NDArray[np.intp]) -> Floats:
    """Return the values minus the weighted mean of their rank."""
    total = np.bincount(rank, weight)
    means = [np.bincount(rank, weight * column) / np.where(total > 0, total, 1.0) for column in values.T]
    return values - np.stack([mean[rank] for mean in means], axis=1)


@dataclass(frozen=True)
class WhatIf:
    """An entry of ``what_if`` in the document: the speed-up without one cause of bubbles, see ``reporting/schema.json``."""

    name: str
    speed_up: float | None
    limit: float | None
    note: str | None = None


def what_if(
    replay: Replay,
    contention: Contention | None = None,
    hidden: Floats | None = None,
    *,
    divided: bool = True,
    expected: Floats | None = None,
    padding: float | None = None,
) -> tuple[WhatIf, ...]:
    """Return the speed-ups without each kind of bubble; nothing if no rank computes.

    Args:
        replay: replay of the steps.
        contention: effect of pending exchanges on compute; without it, the case is left out.
        hidden: seconds of compute during which an exchange ran, shape ``[steps, ranks]``, also of steps that the replay leaves
            out; required with ``contention``.
        divided: True if all waits are divided into straggler wait and transfer; otherwise balance and overlap are left out.
        expected: expected seconds of each rank's samples, like ``hidden``; without them, equal histories are left out.
        padding: share of the computed tokens that is padding; without it, the case is left out.
    """
    if not len(replay.schedule.steps) or not replay.compute.sum():
        return ()
    if divided:
        cases = _balance_and_overlap(replay)
        if expected is not None:
            cases.append(_case(replay, "equal histories", replay.speed_up(_of_equal_histories(replay, expected))))
    else:
        cases = [WhatIf(name, None, None, _UNDIVIDED) for name in ("perfect balance", "full overlap", "balance + overlap")]
    cases.append(_case(replay, "no data wait", replay.speed_up(data=False)))
    cases.append(_case(replay, "no host overhead", replay.speed_up(host=False)))
    if padding:
        compute = (1 - padding) * replay.compute
        cases.append(_case(replay, "no padding", replay.speed_up(compute), _PREDICTED, compute))
    if contention is not None and hidden is not None:
        cases.append(_without(contention, replay, hidden[replay.schedule.steps]))
    return tuple(cases)


def _balance_and_overlap(replay: Replay) -> list[WhatIf]:
    even = np.broadcast_to(replay.compute.mean(axis=1, keepdims=True), replay.compute.shape)
    balance, overlap, both = replay.speed_up(even), replay.speed_up(overlap=True), replay.speed_up(even, overlap=True)
    longer = 1 / balance - 1
    worse = f"equal compute would take {longer:.1%} longer, because ranks that compute less lose time elsewhere"
    return [
        _case(replay, "perfect balance", balance, worse if longer > _WORTH_A_NOTE else None),
        _case(replay, "full overlap", overlap),
        _case(replay, "balance + overlap", max(both, overlap)),
    ]


def _of_equal_histories(replay: Replay, expected: Floats) -> Floats:
    """Return the compute if every rank had the mean cost of the samples. Slow ranks stay slow."""
    costs = expected[replay.schedule.steps]
    return replay.compute * np.where(costs > 0, costs.mean(axis=1, keepdims=True) / np.where(costs > 0, costs, 1.0), 1.0)


def _without(contention: Contention, replay: Replay, hidden: Floats) -> WhatIf:
    if not contention.share:
        return WhatIf("no contention", None, None, contention.reason)
    compute = replay.compute - contention.share * hidden
    note = f"pending exchanges take {contention.share:.0%} of the compute beside them, which the limit also counts as lost"
    return _case(replay, "no contention", replay.speed_up(compute), note, compute)


def _case(replay: Replay, name: str, speed_up: float, note: str | None = None, compute: Floats | None = None) -> WhatIf:
    # outside of these bounds only by rounding, and below 1 if balance lengthens the run, see Replay
    if replay.unseen and name != "no data wait" and speed_up > 1 + _WORTH_A_NOTE:
        note = "; ".join(text for text in (note, "provided that the loader's workers keep up") if text)
    limit = replay.limit(replay.compute if compute is None else compute)
    off = f"the replay of the unaltered run deviates by {replay.error:.1%}" if replay.error > _WORTH_A_NOTE else None
    notes = "; ".join(text for text in (note, off) if text) or None
    return WhatIf(name, min(max(speed_up, 1.0), limit), limit, notes)
