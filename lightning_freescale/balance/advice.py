"""When no assignment can help: say so, and what would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.outliers import pool_outliers
from lightning_freescale.balance.plan import StepPlan
from lightning_freescale.balance.report import BalanceReport, idle

ENOUGH = 1.02
"""Up to this imbalance (2 % idle) there is nothing to advise."""
WINDOW, PERCENTILE = 16, 99


def predict(
    costs: NDArray[np.float64], ranks: int, batch_size: int, *, steps: int = 16, window: int = 1, seed: int = 0, **options: Any
) -> BalanceReport:
    """Imbalance of ``steps`` steps of samples resampled from ``costs``: predicted, not measured.

    Args:
        costs: predicted compute time of every sample, shape ``[samples]``.
        ranks: how many ranks share a step.
        batch_size: samples per rank and step.
        steps: how many steps to draw.
        window: steps that exchange outliers, see :func:`pool_outliers`.
        seed: seeds the draw.
        **options: as in :func:`assign`.
    """
    per_step = ranks * batch_size
    order, edges = _drawn(len(costs), steps * per_step, seed), range(0, steps * per_step + 1, per_step)
    if window > 1:
        order = pool_outliers(order, edges, costs, ranks, window)
    batches = [order[start:end] for start, end in zip(edges, edges[1:])]
    return BalanceReport.of_steps(StepPlan(batch, costs[batch], ranks, options=options).balance for batch in batches)


def _drawn(samples: int, count: int, seed: int) -> NDArray[np.int64]:
    draw = np.random.RandomState(seed)
    if 10 * count < samples:  # to shuffle a large data set takes seconds, and a sample hardly comes twice
        return draw.randint(samples, size=count)
    return np.concatenate([draw.permutation(samples) for _ in range(-(-count // samples))])[:count]


def advise(
    costs: NDArray[np.float64],
    ranks: int,
    batch_size: int,
    report: BalanceReport | None = None,
    lengths: NDArray[np.float64] | None = None,
    **options: Any,
) -> str | None:
    """A plain sentence if the assignment leaves ranks idle because it cannot do better; None if there is nothing to say.

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
    if report.lower_bound <= ENOUGH:
        return None
    tried = _alternatives(costs, ranks, batch_size, lengths, options)
    now = min(report.after, predicted.after)
    better = sorted((value, text) for value, text in tried if value < now - 0.005)
    return (
        f"No assignment of these steps gets below {report.lower_bound:.3f} ({idle(report.lower_bound):.0%} idle): "
        f"{_reason(report)}. {_sentence([f'{value:.3f} {text}' for value, text in better])}"
    )


def _reason(report: BalanceReport) -> str:
    if report.dominated:
        return f"in {report.dominated:.0%} of them one sample costs more than a rank's fair share"
    return "the dearest sample and those that equal counts put beside it cost more than a rank's fair share"


def _sentence(choices: Sequence[str]) -> str:
    if not choices:
        return "Nothing that was tried would help either: the samples themselves would have to be split"
    return f"Predicted instead: {'; '.join(choices)}"


def _alternatives(
    costs: NDArray[np.float64], ranks: int, batch_size: int, lengths: NDArray[np.float64] | None, options: dict[str, Any]
) -> list[tuple[float, str]]:
    """Imbalance and description of what could be changed."""
    cap = float(np.percentile(costs, PERCENTILE, method="lower"))
    at = "" if lengths is None else f" (L = {lengths[costs <= cap].max():g})"

    def imbalance(costs: NDArray[np.float64], ranks: int, batch_size: int, **changed: Any) -> float:
        return predict(costs, ranks, batch_size, **{**options, **changed}).after

    choices = [
        (
            imbalance(np.minimum(costs, cap), ranks, batch_size),
            f"with histories truncated at the {PERCENTILE}th percentile{at}",
        ),
        (imbalance(costs, ranks, 2 * batch_size), f"with batch_size={2 * batch_size}"),
    ]
    if options.get("window", 1) < WINDOW:
        choices.append((imbalance(costs, ranks, batch_size, steps=2 * WINDOW, window=WINDOW), f"with outlier_window={WINDOW}"))
    if options.get("mode", "fixed") not in ("slack", "free"):
        choices.append((imbalance(costs, ranks, batch_size, mode="slack"), 'with mode="slack"'))
    if ranks > 2:
        choices.append((imbalance(costs, ranks // 2, batch_size), f"on {ranks // 2} ranks"))
    return choices
