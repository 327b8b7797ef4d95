"""Compare the documents of runs: the removed bubble and the speed-up."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SAME = ("model", "parameters", "world_size", "accumulate_grad_batches")
_COUNTS_APART = 0.01
"""Largest relative difference of samples per step for equal work; the last batch of an epoch may be shorter."""
_SAME_COMPUTE = 5e-4
"""A smaller change would be printed as 0.0%."""


class DifferentWorkError(ValueError):
    """The runs did different work. The message has every difference."""


@dataclass(frozen=True)
class Comparison:
    """A run compared with the base.

    ``t`` is the wall time per sample. Its parts are the bubble ``b * t`` and the compute ``c = (1 - b) * t``; values of the run
    have a prime. The removed share of the bubble is ``r = 1 - (b' * t') / (b * t)``, so ``t' = c' + (1 - r) * b * t``. With
    unchanged compute per sample, ``c' = c``, the speed-up ``t / t'`` is ``1 / (1 - r * b)``. In general it is
    ``1 / (1 - r * b + (1 - b) * (c' / c - 1))``.

    Attributes:
        label: label of the run.
        per: unit of work: ``"sample"``, or ``"step"`` if the samples of a run are unknown.
        base_rate: 1 / t, units of work per second.
        rate: 1 / t'.
        base_bubble: b.
        bubble: b'.
        removed: r; negative if the bubble grew, None if the base has none.
        speed_up: t / t'.
        from_bubbles: 1 / (1 - r * b), the speed-up by r and b alone; None if it is infinite.
        limit: 1 / (1 - b), the largest speed-up of the base; None if no compute was recorded.
        compute_change: c' / c - 1; None if no compute was recorded.
    """

    label: str
    per: str
    base_rate: float
    rate: float
    base_bubble: float
    bubble: float
    removed: float | None
    speed_up: float
    from_bubbles: float | None
    limit: float | None
    compute_change: float | None


def compare(documents: Sequence[Mapping[str, Any]], force: bool = False) -> list[Comparison]:
    """Compare each document with the first.

    Args:
        documents: at least two documents.
        force: also compare runs of different work.

    Raises:
        DifferentWorkError: the runs did different work, and ``force`` is False.
        ValueError: there are fewer than two documents, or one has no wall time.
    """
    base, *others = documents
    if not others:
        raise ValueError(f"compare needs at least two reports, but got {len(documents)}")
    apart = [line for other in others for line in differences(base, other)]
    if apart and not force:
        raise DifferentWorkError("the runs did different work:\n  " + "\n  ".join(apart))
    per = "sample" if all(document["summary"]["samples_per_s"] for document in documents) else "step"
    return [_comparison(base, other, per) for other in others]


def differences(base: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return a line for each difference in the work of two runs."""
    found = _unequal(base, other, [(name, base["run"][name], other["run"][name]) for name in _SAME])
    one, two = (document["summary"]["samples"] / document["status"]["steps"] for document in (base, other))
    if one and two and abs(two - one) > _COUNTS_APART * one:
        found.append(f"samples per step of {_labels(base, other)}: {one:.6g} and {two:.6g}")
    return found


def remarks(base: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return a line for each other difference between two runs, and for each restriction of the comparison."""
    one, two = base["run"], other["run"]
    packages = sorted({*one["versions"], *two["versions"]})
    versions = [(f"version of {name}", one["versions"].get(name), two["versions"].get(name)) for name in packages]
    found = _unequal(base, other, [("device", one["device"], two["device"]), *versions])
    for document in (base, other):
        label, status = document["run"]["label"], document["status"]
        if not status["complete"]:
            found.append(f"{label} ended early: {status['reason']}")
        if not (waits := document["wait_attribution"])["aligned"]:
            found.append(f"waits of {label} are not divided into straggler wait and transfer: {waits['reason']}")
        if not document["summary"]["samples"]:
            found.append(f"the samples of {label} are unknown, so the runs are compared per step")
    return found


def _unequal(base: Mapping[str, Any], other: Mapping[str, Any], pairs: Sequence[tuple[str, Any, Any]]) -> list[str]:
    return [f"{name} of {_labels(base, other)}: {one!r} and {two!r}" for name, one, two in pairs if one != two]


def _labels(base: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return f"{base['run']['label']} and {other['run']['label']}"


def table(base: Mapping[str, Any], comparisons: Sequence[Comparison]) -> str:
    """Return a table with a line per run, and a sentence on each run."""
    first = comparisons[0]
    heads = ("run", f"{first.per}s/s", "bubble b", "r (removed)", "speed-up", "1/(1 - r*b)", f"compute/{first.per}")
    rows = [heads, (base["run"]["label"], f"{first.base_rate:.1f}", f"{first.base_bubble:.1%}", *"----")]
    rows += [_row(one) for one in comparisons]
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    lines = [f"{name:{widths[0]}}" + "".join(f"  {c:>{w}}" for c, w in zip(rest, widths[1:])) for name, *rest in rows]
    return "\n".join([*lines, *(line for one in comparisons for line in _sentences(one))])


def _row(one: Comparison) -> tuple[str, ...]:
    gain = (_or_dash("{:.1%}", one.removed), f"{one.speed_up:.2f}x", _or_dash("{:.2f}x", one.from_bubbles))
    return (one.label, f"{one.rate:.1f}", f"{one.bubble:.1%}", *gain, _or_dash("{:+.1%}", one.compute_change))


def _sentences(one: Comparison) -> list[str]:
    removed = f"r = {_or_dash('{:.1%}', one.removed)} of the base's b = {one.base_bubble:.1%} removed"
    alone, limit = (_or_dash("{:.2f}x", value) for value in (one.from_bubbles, one.limit))
    gain = f"{removed}, speed-up {one.speed_up:.2f}x ({alone} by r and b alone, limit {limit})"
    lines = textwrap.wrap(f"{one.label}: {gain}", 120, subsequent_indent="  ")
    if one.compute_change is not None:
        changed = f"changed by {one.compute_change:+.1%}, which is the difference between the two speed-ups"
        lines.append(f"  compute per {one.per} {'is the same' if abs(one.compute_change) < _SAME_COMPUTE else changed}")
    return lines


def _or_dash(form: str, value: float | None) -> str:
    return "-" if value is None else form.format(value)


def _comparison(base: Mapping[str, Any], other: Mapping[str, Any], per: str) -> Comparison:
    b, bubble = (document["summary"]["bubble"] for document in (base, other))
    before, after = (_seconds(document, per) for document in (base, other))
    shorter = (b * before - bubble * after) / before  # r * b, which is also defined for b = 0
    return Comparison(
        label=other["run"]["label"],
        per=per,
        base_rate=1 / before,
        rate=1 / after,
        base_bubble=b,
        bubble=bubble,
        removed=shorter / b if b else None,
        speed_up=before / after,
        from_bubbles=1 / (1 - shorter) if shorter < 1 else None,
        limit=1 / (1 - b) if b < 1 else None,
        compute_change=(1 - bubble) * after / ((1 - b) * before) - 1 if b < 1 else None,
    )


def _seconds(document: Mapping[str, Any], per: str) -> float:
    """Return the wall time per unit of work in seconds."""
    figures = document["summary"]
    seconds = 1 / figures["samples_per_s"] if per == "sample" else figures["step_s"]
    if not seconds > 0:
        raise ValueError(f"{document['run']['label']} cannot be compared, because its step_s is {figures['step_s']}")
    return float(seconds)
