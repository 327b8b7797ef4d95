"""Fit the cost model while training, and decide when the steps should be planned by the fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from lightning_freescale.balance.assign import assign
from lightning_freescale.balance.cost import CostFit, CostModel, fit_coefficients, huber_loss
from lightning_freescale.balance.solver import padded_loads
from lightning_freescale.balance.validation import Floats

PARTED = 0.03
"""Predicted and measured imbalance agree unless they differ by more than this."""
_MIN_STEPS, _MIN_TIMES = 45, 10
_PATIENCE = 75
"""Steps without a better fit until the last one is final."""
_PARTS, _SURE = 4, 2.0
"""Parts of the steps that are each predicted from the others, and standard errors by which a better prediction is one."""


class Calibration:
    """Collects windows of steps, fits after each, and stops when the fit no longer improves.

    A fit takes the place of the costs in use if it predicts times that it has not seen clearly better than they do.

    Args:
        in_use: the cost model that the steps are planned by; None for costs that come with the windows.
        keep: how many measured times the fit rests on at most, the last ones; rank 0 fits while the others wait.

    Attributes:
        fit: what the last window led to.
        improved: whether it has taken the place of the costs before.
        base: of each rank's step what its samples do not explain, in the units of the costs in use.
    """

    def __init__(self, in_use: CostModel | None = None, keep: int = 4_000) -> None:
        self.fit: CostFit | None = None
        self.improved, self.base = False, 0.0
        self._in_use, self._keep = in_use, keep
        self._steps: list[tuple[Floats, Floats, Floats]] = []
        self._steps_since_better = 0

    @property
    def frozen(self) -> bool:
        """Whether the fit is final."""
        return self._steps_since_better >= _PATIENCE

    def add_window(self, sums: Floats, seconds: Floats, costs: Floats | None = None) -> CostFit | None:
        """Fit again with a window of all ranks; return None until there are enough measured times.

        Args:
            sums: of :func:`sample_features` over each rank's samples, shape ``[steps, ranks, 4]``.
            seconds: compute times, shape ``[steps, ranks]``; 0 where a rank did not measure.
            costs: of each rank's samples as they were given, shape ``[steps, ranks]``; if not given, or zero, any fit in which
                samples cost something improves on them.
        """
        costs = np.zeros_like(seconds) if costs is None else costs
        measured = (seconds > 0).all(axis=1)  # a step that a rank did not measure is of no use
        ranks = seconds.shape[1]
        kept = max(_MIN_STEPS, self._keep // ranks)
        self._steps = [*self._steps, *zip(sums[measured], seconds[measured], costs[measured])][-kept:]
        self._steps_since_better += len(seconds)
        self.improved = False
        if len(self._steps) * ranks < _MIN_TIMES or len(self._steps) < 2:  # each is predicted from others
            return None
        all_sums, all_seconds, given = (np.concatenate(values) for values in zip(*self._steps))
        rank = np.tile(np.arange(ranks), len(self._steps))
        self.fit = CostModel.fit(all_sums, all_seconds, rank)
        in_use = given if self._in_use is None else all_sums @ np.array(astuple(self._in_use))
        equally_fast = all_seconds / self.fit.slowness[rank]
        explains = any(astuple(self.fit.model))  # else nothing beside the base, as costs of nothing do
        if _predicts_better(all_sums, in_use[:, None], equally_fast, ranks) if in_use.any() else explains:
            self.improved, self._in_use, self._steps_since_better = True, self.fit.model, 0
            self.base = self.fit.base
        else:
            self.base = _base_in_costs(in_use, equally_fast)
        return self.fit


def _predicts_better(sums: Floats, in_use: Floats, seconds: Floats, ranks: int) -> bool:
    """Whether a fit to ``sums`` predicts unseen times clearly better than one of a base and a factor to costs ``in_use``."""
    mine, theirs = (_unseen_errors(columns, seconds, ranks) for columns in (sums, in_use))
    gain = huber_loss(theirs, theirs) - huber_loss(mine, theirs)
    return bool(gain.mean() > _SURE * gain.std() / len(gain) ** 0.5)


def _base_in_costs(costs: Floats, seconds: Floats) -> float:
    """Return what a rank's step takes besides its samples, in the units of their costs."""
    base, (factor,) = fit_coefficients(costs[:, None], seconds)
    least = 1e-6 * seconds.mean() / max(costs.mean(), 1e-300)  # where costs explain nothing, they are nothing beside it
    return float(base / max(factor, least))


def _unseen_errors(columns: Floats, seconds: Floats, ranks: int) -> Floats:
    """Return the relative error of each time as predicted from the other parts' steps; shape ``[observations]``."""
    part = np.arange(len(seconds)) // ranks % _PARTS
    errors = np.empty(len(seconds))
    for each in range(_PARTS):
        seen, unseen = part != each, part == each
        base, coefficients = fit_coefficients(columns[seen], seconds[seen])
        errors[unseen] = 1 - (base + columns[unseen] @ coefficients) / seconds[unseen]
    return errors


def imbalance_by_true_costs(
    batches: Iterable[tuple[Floats, Floats]],
    base: float,
    ranks: int,
    options: dict[str, Any] | None = None,
    slowness: Floats | float = 1.0,
) -> float:
    """Return the imbalance by true costs of plans made with others, over the samples of several steps.

    Args:
        batches: for every step the costs to assign by and the true ones in seconds, each of shape ``[samples]``.
        base: seconds that every rank's step takes besides.
        ranks: how many ranks share a step.
        options: of :func:`assign`.
        slowness: time of each rank / time that its samples explain, shape ``[ranks]``; all 1 if not given.
    """
    longest = total = 0.0
    for planned, true in batches:
        plan = assign(planned, ranks, **(options or {}))
        if plan.part_of_sample is None:
            loads = np.bincount(plan.rank_of_sample, true, ranks)
        else:
            loads = padded_loads(true, plan.rank_of_sample, plan.part_of_sample, ranks)
        times = slowness * (loads + base)
        longest, total = longest + times.max(), total + times.mean()
    return float(longest / total) if total else 1.0


@dataclass(frozen=True)
class ReportFit:
    """A cost model from a profiler's report.

    Attributes:
        fit: to the compute of every rank and step.
        steps, ranks: how many.
        predicted: imbalance of compute by the costs that the run was planned by; None if there were none.
        by_fit: by the fit.
        measured: as it was.
    """

    fit: CostFit
    steps: int
    ranks: int
    predicted: float | None
    by_fit: float
    measured: float


def fit_report(document: Mapping[str, Any]) -> ReportFit:
    """Fit a cost model to what the report.json of a :class:`~lightning_freescale.BubbleProfiler` has measured.

    Raises:
        ValueError: it is no such report, holds no lengths, or not enough of them.
    """
    found = document.get("format") if isinstance(document, Mapping) else None
    if found != "lightning_freescale.bubble_report":
        raise ValueError(f"no bubble report: its format is {found!r}")
    series = document.get("series") or {}
    sums = np.array(series.get("features") or [], dtype=np.float64)
    if not sums.size or (sums[..., 1].any() and not sums[..., 2].any()):
        raise ValueError(
            "the report holds no history lengths: profile a run with FreeScaleDataModule(lengths=...), or with "
            "BubbleProfiler(lengths_fn=...)"
        )
    parts = [series["columns"].index(name) for name in ("forward", "backward", "optimizer")]
    seconds = np.array(series["breakdown_s"], dtype=np.float64)[..., parts].sum(axis=-1)
    computed = (seconds > 0).all(axis=1)
    sums, seconds = sums[computed], seconds[computed]
    steps, ranks = seconds.shape
    if steps * ranks < _MIN_TIMES:
        raise ValueError(f"the report has {steps} steps of {ranks} ranks with compute: profile more of them")
    fit = CostModel.fit(sums.reshape(-1, 4), seconds.ravel(), np.tile(np.arange(ranks), steps))
    explained = fit.slowness * (fit.base + sums @ np.array(astuple(fit.model)))
    by_fit, measured = (float(each.max(axis=1).sum() / each.mean(axis=1).sum()) for each in (explained, seconds))
    return ReportFit(fit, steps, ranks, document["summary"].get("predicted_imbalance"), by_fit, measured)
