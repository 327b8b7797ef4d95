"""Estimate by replays of its steps how long a run would have taken without each cause of bubbles."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.replay import Replay

Floats = NDArray[np.float64]
_LEAST_STEPS = 10
_COVERED, _WHOLLY_COVERED = 0.75, 0.98
"""Shares of the compute, expected and measured, that exchanges may be beside: beside all, hidden seconds are compute."""
_HUBER, _REWEIGHTINGS = 1.345, 20
_VARIES = 0.01
_WORTH = 0.01
"""Share of the compute below which exchanges beside it are not worth a figure."""
_WORTH_A_NOTE = 0.01
"""Share of the time that the reader should know of."""
_UNDIVIDED = "without aligned clocks nobody knows which waits were for stragglers"
_PREDICTED = "predicted: compute is taken to be proportional to the computed tokens; the limit counts padding as lost, too"


@dataclass(frozen=True)
class Contention:
    """The effect of exchanges under way on compute.

    Attributes:
        share: seconds of compute that each hidden second of an exchange adds, between 0 and 1; 0 if that is unknown.
        error: its standard error; infinite without an estimate.
        reason: why it is 0.
    """

    share: float
    error: float
    reason: str | None = None


def contention(compute: Floats, hidden: Floats, expected: Floats | None) -> Contention:
    """Regression of compute on what it should take and on the hidden seconds, deaf to outliers (Huber 1964).

    Every rank has its own speed. Rank-steps whose compute exchanges cover are left out: how long they are hidden depends on
    how long they compute. Without a cost model there is no telling: longer histories mean more compute and longer exchanges.
    Inflation in proportion to the work is in ``expected`` already and not found, so the estimate is on the low side.

    Args:
        compute: seconds of each step on each rank, shape ``[steps, ranks]``.
        hidden: seconds of it behind which an exchange was under way.
        expected: seconds the work should take; None if no cost model says so.
    """
    if hidden.sum() <= _WORTH * compute.sum():
        return Contention(0.0, math.inf, "hardly any exchange was under way beside compute")
    if expected is None:
        return Contention(0.0, math.inf, "without a cost model, longer exchanges cannot be told from more work")
    usable = (expected > 0) & (compute > 0)
    ratio = np.where(usable, compute / np.where(usable, expected, 1.0), np.nan)
    speeds = np.nanmedian(np.where(usable.any(axis=0), ratio, 1.0), axis=0)  # of each rank; 1 where nothing is known
    usable &= (hidden < _COVERED * expected * speeds) & (hidden < _WHOLLY_COVERED * compute)
    if usable.any(axis=1).sum() < _LEAST_STEPS:
        return Contention(0.0, math.inf, f"exchanges cover the compute in all but {usable.any(axis=1).sum()} steps")
    step, rank = np.nonzero(usable)
    # relative to what is expected; the last column is a cost per step that the cost model missed
    columns = np.column_stack([hidden[usable], np.full(len(rank), np.median(expected[usable]))]) / expected[usable][:, None]
    share, error = _regress(compute[usable] / expected[usable], columns, step, rank)
    if math.isinf(error):
        return Contention(0.0, error, "the exchanges beside compute are all alike")
    if share >= 1:
        return Contention(0.0, error, f"compute grows by more than the exchanges take ({share:.2f} times that)")
    if share < -2 * error:
        return Contention(0.0, error, "compute beside exchanges took no longer than without them")
    if share < 2 * error:
        return Contention(0.0, error, f"within the noise: {share:.3f} with a standard error of {error:.3f}")
    return Contention(share, error)


def _regress(y: Floats, columns: Floats, step: NDArray[np.intp], rank: NDArray[np.intp]) -> tuple[float, float]:
    """Return the coefficient of the first column and its standard error, allowing for noise that a step's ranks share."""
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
    """Return the values less the weighted mean of their rank."""
    total = np.bincount(rank, weight)
    means = [np.bincount(rank, weight * column) / np.where(total > 0, total, 1.0) for column in values.T]
    return values - np.stack([mean[rank] for mean in means], axis=1)


@dataclass(frozen=True)
class WhatIf:
    """How much faster the run would be.

    Attributes:
        name: without what.
        speed_up: time of the run / time of the run without it, at least 1; None if it is left out, ``note`` says why.
        limit: what no change of this kind can exceed, 1 / (1 - bubble); without contention or padding, the compute of
            these counts as lost, too; None if it is left out.
        note: what the reader should know of the figure.
    """

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
    """Return how much faster the steps would be without each kind of bubble; nothing if no rank computes in them.

    Args:
        replay: of the steps.
        contention: what exchanges under way do to compute; left out if not given.
        hidden: seconds of compute behind which an exchange was under way, shape ``[steps, ranks]``, of the steps that are left
            out of the replay, too; needed with contention.
        expected: seconds that each rank's samples should take, as ``hidden``; without them, or a divided wait, what equal
            histories alone would bring is left out.
        padding: share of the computed tokens that is padding; left out if not given.
        divided: whether all waits could be divided into straggler wait and transfer; if not, balance and overlap are left out.
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
    worse = f"equal compute would take {longer:.1%} longer: ranks that compute less lose time elsewhere"
    return [
        _case(replay, "perfect balance", balance, worse if longer > _WORTH_A_NOTE else None),
        _case(replay, "full overlap", overlap),
        _case(replay, "balance + overlap", max(both, overlap)),
    ]


def _of_equal_histories(replay: Replay, expected: Floats) -> Floats:
    """Return compute if all ranks had the mean of the samples' costs, each as slow at it as it was: slow ranks stay so."""
    costs = expected[replay.schedule.steps]
    return replay.compute * np.where(costs > 0, costs.mean(axis=1, keepdims=True) / np.where(costs > 0, costs, 1.0), 1.0)


def _without(contention: Contention, replay: Replay, hidden: Floats) -> WhatIf:
    if not contention.share:
        return WhatIf("no contention", None, None, contention.reason)
    # contention lies inside compute, so its limit counts it as lost
    compute = replay.compute - contention.share * hidden
    note = f"exchanges under way take {contention.share:.0%} of the compute beside them, which the limit counts as lost, too"
    return _case(replay, "no contention", replay.speed_up(compute), note, compute)


def _case(replay: Replay, name: str, speed_up: float, note: str | None = None, compute: Floats | None = None) -> WhatIf:
    """Rounding and harm apart, every speed-up is between 1 and its limit; see :class:`Replay`."""
    if replay.unseen and name != "no data wait" and speed_up > 1 + _WORTH_A_NOTE:
        note = "; ".join(text for text in (note, "if the loader's workers keep up") if text)
    limit = replay.limit(replay.compute if compute is None else compute)
    off = f"the replay of the run as it was is {replay.error:.1%} off" if replay.error > _WORTH_A_NOTE else None
    notes = "; ".join(text for text in (note, off) if text) or None
    return WhatIf(name, min(max(speed_up, 1.0), limit), limit, notes)
