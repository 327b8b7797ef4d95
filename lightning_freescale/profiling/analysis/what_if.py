"""Estimate the duration of a run without each cause of bubbles, by replays of its steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.analysis.replay import Replay

Floats = NDArray[np.float64]
_WORTH_A_NOTE = 0.01
"""Share of the time above which a deviation gets a note."""
_UNDIVIDED = "the clocks are not aligned, so waits for stragglers are unknown"
_PREDICTED = "predicted for compute proportional to the computed tokens; the limit also counts padding as lost"


@dataclass(frozen=True)
class WhatIf:
    """An entry of ``what_if`` in the document: the speed-up without one cause of bubbles, see ``reporting/schema.json``."""

    name: str
    speed_up: float | None
    limit: float | None
    note: str | None = None


def what_if(
    replay: Replay, *, divided: bool = True, expected: Floats | None = None, padding: float | None = None
) -> tuple[WhatIf, ...]:
    """Return the speed-ups without each kind of bubble; nothing if no rank computes.

    Args:
        replay: replay of the steps.
        divided: True if all waits are divided into straggler wait and transfer; otherwise balance and overlap are left out.
        expected: expected seconds of each rank's samples, shape ``[steps, ranks]``, also of steps that the replay leaves out;
            without them, equal histories are left out.
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


def _case(replay: Replay, name: str, speed_up: float, note: str | None = None, compute: Floats | None = None) -> WhatIf:
    # outside of these bounds only by rounding, and below 1 if balance lengthens the run, see Replay
    if replay.unseen and name != "no data wait" and speed_up > 1 + _WORTH_A_NOTE:
        note = "; ".join(text for text in (note, "provided that the loader's workers keep up") if text)
    limit = replay.limit(replay.compute if compute is None else compute)
    off = f"the replay of the unaltered run deviates by {replay.error:.1%}" if replay.error > _WORTH_A_NOTE else None
    notes = "; ".join(text for text in (note, off) if text) or None
    return WhatIf(name, min(max(speed_up, 1.0), limit), limit, notes)
