"""Compare the documents of runs: the bubble that was removed, and the speed-up."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SAME = ("model", "parameters", "world_size", "accumulate_grad_batches")
_COUNTS_APART = 0.01
"""Samples per step of the same work may differ by this share: the last batch of an epoch is shorter."""
_SAME_COMPUTE = 5e-4
"""A change smaller than this would be printed as none."""


class DifferentWorkError(ValueError):
    """The runs did not do the same work; the message names every difference."""


@dataclass(frozen=True)
class Comparison:
    """A run against the base.

    Time is counted per unit of work, a sample: ``t`` is the wall time of all the steps / samples, of which ``b * t`` is bubble
    and ``c = (1 - b) * t`` compute. What is removed is bubble time per sample, not a share of a wall time that itself gets
    shorter: ``r = 1 - (b' * t') / (b * t)``. Then ``t' = c' + b' * t' = c' + (1 - r) * b * t``, and if compute per sample stays
    what it was, ``c' = c``, the speed-up ``t / t'`` is ``1 / (1 - r * b)``. What the two differ by is what compute changed:
    ``t / t' = 1 / (1 - r * b + (1 - b) * (c' / c - 1))``.

    Attributes:
        label: of the run.
        per: the unit of work: ``"sample"``, or ``"step"`` if a run does not know its samples.
        base_rate: 1 / t, units of work per second.
        rate: 1 / t'.
        base_bubble: b.
        bubble: b'.
        removed: r; negative if the bubble grew, None if the base had none.
        speed_up: t / t'.
        from_bubbles: 1/(1 - r*b), what r and b alone give; None if that has no end.
        limit: 1/(1 - b), what the base can gain at most; None if no compute was seen.
        compute_change: c' / c - 1; None if no compute was seen.
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
        documents: two or more.
        force: compare runs of different work, too.

    Raises:
        DifferentWorkError: without ``force``.
        ValueError: fewer than two documents, or one without wall time.
    """
    base, *others = documents
    if not others:
        raise ValueError(f"compare needs two reports or more, not {len(documents)}")
    apart = [line for other in others for line in differences(base, other)]
    if apart and not force:
        raise DifferentWorkError("the runs did different work:\n  " + "\n  ".join(apart))
    per = "sample" if all(document["summary"]["samples_per_s"] for document in documents) else "step"
    return [_comparison(base, other, per) for other in others]


def differences(base: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return a line for everything that makes the work of two runs different."""
    found = _unequal(base, other, [(name, base["run"][name], other["run"][name]) for name in _SAME])
    one, two = (document["summary"]["samples"] / document["status"]["steps"] for document in (base, other))
    if one and two and abs(two - one) > _COUNTS_APART * one:
        found.append(f"samples per step of {_labels(base, other)}: {one:.6g} and {two:.6g}")
    return found


def remarks(base: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return a line for everything that a reader should know about two runs that can be compared all the same."""
    one, two = base["run"], other["run"]
    packages = sorted({*one["versions"], *two["versions"]})
    versions = [(f"version of {name}", one["versions"].get(name), two["versions"].get(name)) for name in packages]
    found = _unequal(base, other, [("device", one["device"], two["device"]), *versions])
    for document in (base, other):
        label, status = document["run"]["label"], document["status"]
        if not status["complete"]:
            found.append(f"{label} did not come to its end: {status['reason']}")
        if not (waits := document["wait_attribution"])["aligned"]:
            found.append(f"waits of {label} are not divided into straggler wait and transfer: {waits['reason']}")
        if not document["summary"]["samples"]:
            found.append(f"the samples of {label} are unknown: compared per step")
    return found


def _unequal(base: Mapping[str, Any], other: Mapping[str, Any], pairs: Sequence[tuple[str, Any, Any]]) -> list[str]:
    return [f"{name} of {_labels(base, other)}: {one!r} and {two!r}" for name, one, two in pairs if one != two]


def _labels(base: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return f"{base['run']['label']} and {other['run']['label']}"


def table(base: Mapping[str, Any], comparisons: Sequence[Comparison]) -> str:
    """Return the text of a table with a line per run, and a sentence on each below it."""
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
    gain = f"{removed}, speed-up {one.speed_up:.2f}x (r and b alone give {alone}, the limit is {limit})"
    lines = textwrap.wrap(f"{one.label}: {gain}", 120, subsequent_indent="  ")
    if one.compute_change is not None:
        changed = f"changed by {one.compute_change:+.1%}: by this the two speed-ups differ"
        lines.append(f"  compute per {one.per} {'is the same' if abs(one.compute_change) < _SAME_COMPUTE else changed}")
    return lines


def _or_dash(form: str, value: float | None) -> str:
    return "-" if value is None else form.format(value)


def _comparison(base: Mapping[str, Any], other: Mapping[str, Any], per: str) -> Comparison:
    b, bubble = (document["summary"]["bubble"] for document in (base, other))
    before, after = (_seconds(document, per) for document in (base, other))
    shorter = (b * before - bubble * after) / before  # r * b, which exists without a bubble to remove, too
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
        raise ValueError(f"{document['run']['label']} has no wall time: step_s is {figures['step_s']}")
    return float(seconds)
