"""When no assignment can help: say so, and what would."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_freescale.balance.prediction import report_steps
from lightning_freescale.balance.report import BalanceReport, idle_fraction
from lightning_freescale.balance.validation import Floats

ACCEPTABLE_IMBALANCE = 1.02
"""Up to this imbalance (2 % idle) there is nothing to advise."""
_OUTLIER_WINDOW, _PERCENTILE = 16, 99


def advise(
    costs: Floats,
    ranks: int,
    batch_size: int,
    report: BalanceReport | None = None,
    lengths: Floats | None = None,
    **options: Any,
) -> str | None:
    """Return a plain sentence if no assignment can keep the ranks from idling; None if there is nothing to say.

    Args:
        costs: predicted compute time of every sample, shape ``[samples]``.
        ranks: how many ranks share a step.
        batch_size: samples per rank and step.
        report: what the assignment in use reaches; predicted if not given.
        lengths: history length of every sample, to name the length at which to truncate.
        **options: of :func:`predict`, as in use.
    """
    predicted = report_steps(costs, ranks, batch_size, **options)
    report = report or predicted
    if report.lower_bound <= ACCEPTABLE_IMBALANCE:
        return None
    tried = _alternatives(costs, ranks, batch_size, lengths, options)
    now = min(report.balanced, predicted.balanced)
    better = [f"{value:.3f} {text}" for value, text in sorted(tried) if value < now - 0.005]
    reason = "the most expensive sample and those that equal counts put beside it cost more than a rank's fair share"
    if report.dominated:
        reason = f"in {report.dominated:.0%} of them one sample costs more than a rank's fair share"
    remedy = "Nothing that was tried would help either: the samples themselves would have to be split"
    if better:
        remedy = f"Predicted instead: {'; '.join(better)}"
    return (
        f"No assignment of these steps gets below {report.lower_bound:.3f} ({idle_fraction(report.lower_bound):.0%} idle): "
        f"{reason}. {remedy}"
    )


def _alternatives(
    costs: Floats, ranks: int, batch_size: int, lengths: Floats | None, options: dict[str, Any]
) -> list[tuple[float, str]]:
    """Return the imbalance and the description of what could be changed."""
    cap = float(np.percentile(costs, _PERCENTILE, method="lower"))
    at = "" if lengths is None else f" (L = {lengths[costs <= cap].max():g})"

    def imbalance(**changed: Any) -> float:
        return report_steps(**{"costs": costs, "ranks": ranks, "batch_size": batch_size, **options, **changed}).balanced

    choices = [
        (imbalance(costs=np.minimum(costs, cap)), f"with histories truncated at the {_PERCENTILE}th percentile{at}"),
        (imbalance(batch_size=2 * batch_size), f"with batch_size={2 * batch_size}"),
    ]
    if options.get("outlier_window", 1) < _OUTLIER_WINDOW:
        pooled = imbalance(steps=2 * _OUTLIER_WINDOW, outlier_window=_OUTLIER_WINDOW)
        choices.append((pooled, f"with outlier_window={_OUTLIER_WINDOW}"))
    if options.get("assignment_mode", "fixed") not in ("slack", "free"):
        choices.append((imbalance(assignment_mode="slack"), 'with assignment_mode="slack"'))
    if ranks > 2:
        choices.append((imbalance(ranks=ranks // 2), f"on {ranks // 2} ranks"))
    return choices
