"""Comparison of the results of two runs.

``largest`` is the largest difference of a tensor over its largest number, and ``mean`` the mean difference over the mean
number. Tolerances apply to ``mean``: Adam and Adagrad divide a gradient by its own size. If a sum nearly cancels, its rounding
becomes a step of full length, in a few numbers among millions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hour_report import Report
    from one_rank_recommender import Run


def judge(report: Report, what: str, reference: str, run: Run, expected: Run, tolerance: float) -> None:
    """Add a row, and a failure if the two differ by more than the tolerance or if nothing has been trained."""
    losses = relative({"loss": torch.tensor(run.losses)}, {"loss": torch.tensor(expected.losses)})[0]
    kept, known = run.weights | run.states, expected.weights | expected.states
    largest, mean = relative(kept, known)
    same = run.losses == expected.losses and bitwise(kept, known)
    moved = len(set(run.losses)) > 1
    ok = moved and (same if tolerance == 0 else max(losses, mean) <= tolerance)
    report.row(
        what=what,
        against=reference,
        steps=len(run.losses),
        losses=_finite(losses),
        largest=_finite(largest),
        mean=_finite(mean),
        bitwise=same,
        expected="bitwise" if tolerance == 0 else f"<= {tolerance:g}",
        ok=ok,
    )
    if not moved:
        report.fail(what, "the loss does not change, so equality proves nothing")
    elif not ok:
        tensors = f"weights and states by up to {largest:.3g}, {mean:.3g} in the mean"
        report.fail(what, f"from {reference} losses differ by {losses:.3g}, {tensors}")


def _finite(off: float) -> float | None:
    """Return None for an infinite number, because JSON has no infinity; the failure names it."""
    return off if math.isfinite(off) else None


def relative(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return the differences of the tensor that differs most: over the largest number, and in the mean; infinite for NaN."""
    if one.keys() != other.keys():
        raise ValueError(f"one has {sorted(one.keys() - other.keys())} and the other {sorted(other.keys() - one.keys())}")
    largest = mean = 0.0
    for name, tensor in one.items():
        expected = other[name].double()
        off, size = (tensor.double() - expected).abs(), expected.abs()
        largest = max(largest, _ratio(off.max().item(), size.max().item()))
        mean = max(mean, _ratio(off.mean().item(), size.mean().item()))
    return largest, mean


def _ratio(off: float, size: float) -> float:
    if off == 0:
        return 0.0
    return off / size if off == off and 0 < size < float("inf") else float("inf")


def bitwise(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return True if all tensors have the same names, kinds, shapes and bits."""

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and tensor.shape == other[name].shape and torch.equal(bits(tensor), bits(other[name]))
        for name, tensor in one.items()
    )
