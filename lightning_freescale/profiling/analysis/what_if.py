"""What would the run have taken if ...? One cause of bubbles after the other is taken out of a replay of its steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.contention import Contention
from lightning_freescale.profiling.analysis.replay import Replay

Floats = NDArray[np.float64]
_WORTH_A_NOTE = 0.01
"""Share of the time that the reader should know of."""
_UNDIVIDED = "without aligned clocks nobody knows which waits were for stragglers"

_PREDICTED = "predicted: compute is taken to be proportional to the computed tokens; the limit counts padding as lost, too"


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

    Raises:
        ValueError: contention without ``hidden``.
    """
    steps = len(replay.schedule.steps) + replay.left_out
    if contention is not None and (hidden is None or hidden.shape[:1] != (steps,)):
        given = None if hidden is None else hidden.shape
        raise ValueError(f"what_if(contention, hidden={given}) of {steps} steps: pass hidden seconds [steps, ranks]")
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
    """Compute if all ranks had the mean of the samples' costs, each as slow at it as it was: slow ranks stay so."""
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
