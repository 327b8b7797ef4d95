"""When no assignment can help: say so, and what would."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_freescale.balance.epoch_order import pool_outliers
from lightning_freescale.balance.plan import StepPlan
from lightning_freescale.balance.report import BalanceReport, idle_fraction
from lightning_freescale.balance.solver import Ints
from lightning_freescale.balance.validation import Floats

ACCEPTABLE_IMBALANCE = 1.02
"""Up to this imbalance (2 % idle) there is nothing to advise."""
_OUTLIER_WINDOW, _PERCENTILE = 16, 99


def predict(
    costs: Floats, ranks: int, batch_size: int, *, steps: int = 16, outlier_window: int = 1, seed: int = 0, **options: Any
) -> BalanceReport:
    """Return the imbalance of ``steps`` steps of samples resampled from ``costs``: predicted, not measured.

    Args:
        costs: predicted compute time of every sample, shape ``[samples]``.
        ranks: how many ranks share a step.
        batch_size: samples per rank and step.
        steps: how many steps to draw.
        outlier_window: steps that exchange outliers, see :func:`pool_outliers`.
        seed: seeds the draw.
        **options: as in :func:`assign`.

    Examples:
        >>> import numpy as np
        >>> report = predict(np.arange(1.0, 101.0) ** 2, ranks=4, batch_size=8)
        >>> round(report.unbalanced, 2), round(report.balanced, 2), round(report.lower_bound, 2)
        (1.38, 1.0, 1.0)
    """
    per_step = ranks * batch_size
    order, edges = _resampled(len(costs), steps * per_step, seed), range(0, steps * per_step + 1, per_step)
    if outlier_window > 1:
        order = pool_outliers(order, edges, costs, ranks, outlier_window)
    batches = [order[start:end] for start, end in zip(edges, edges[1:])]
    return BalanceReport.from_steps(StepPlan(batch, costs[batch], ranks, options=options).balance for batch in batches)


def _resampled(samples: int, count: int, seed: int) -> Ints:
    draw = np.random.RandomState(seed)
    if 10 * count < samples:  # to shuffle a large data set takes seconds, and a sample hardly comes twice
        return draw.randint(samples, size=count)
    return np.concatenate([draw.permutation(samples) for _ in range(-(-count // samples))])[:count]


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
    predicted = predict(costs, ranks, batch_size, **options)
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
        return predict(**{"costs": costs, "ranks": ranks, "batch_size": batch_size, **options, **changed}).balanced

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
