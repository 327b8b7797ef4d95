"""The fit of the cost model to the compute times of a training run, and the decision to plan by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from lightning_freescale.balance.assign import assign
from lightning_freescale.balance.cost import CostFit, CostModel, fit_coefficients, huber_loss
from lightning_freescale.balance.solver.padded import padded_loads
from lightning_freescale.balance.validation import Floats

_MIN_STEPS, _MIN_TIMES = 45, 10
_MOST_TIMES = 4_000
"""Number of the newest times to fit. All ranks wait for the fit of rank 0."""
_PATIENCE = 75
"""Number of steps without a better fit after which the last fit is final."""
_PARTS, _SURE = 4, 2.0
"""Number of folds of the cross-validation, and the standard errors by which a fit must predict better."""


class Calibration:
    """A fit that is repeated after each window of steps until it no longer improves.

    A fit replaces the costs in use if it predicts unseen times clearly better.

    Attributes:
        in_use: The cost model that the steps are planned by.
        improved: True if the fit after the last window has replaced the costs in use.
        base: The part of a rank's step that its samples do not explain, in the units of the costs in use.
    """

    def __init__(self, in_use: CostModel | None = None) -> None:
        self.improved, self.base = False, 0.0
        self.in_use = in_use or CostModel()
        self._steps: list[tuple[Floats, Floats]] = []
        self._steps_since_better = 0

    @property
    def frozen(self) -> bool:
        """True if the fit is final."""
        return self._steps_since_better >= _PATIENCE

    def add_window(self, sums: Floats, seconds: Floats) -> CostFit | None:
        """Fit again with a window of all ranks; return None until there are enough measured times.

        ``sums`` has those of :func:`sample_features` over each rank's samples, shape ``[steps, ranks, 4]``, and ``seconds`` the
        compute times, shape ``[steps, ranks]``; 0 where a rank did not measure.
        """
        measured = (seconds > 0).all(axis=1)  # by all ranks
        ranks = seconds.shape[1]
        kept = max(_MIN_STEPS, _MOST_TIMES // ranks)
        self._steps = [*self._steps, *zip(sums[measured], seconds[measured])][-kept:]
        self._steps_since_better += len(seconds)
        self.improved = False
        if len(self._steps) * ranks < _MIN_TIMES or len(self._steps) < 2:  # each step is predicted from other steps
            return None
        all_sums, all_seconds = (np.concatenate(values) for values in zip(*self._steps))
        rank = np.tile(np.arange(ranks), len(self._steps))
        fit = CostModel.fit(all_sums, all_seconds, rank)
        in_use = all_sums @ np.array(astuple(self.in_use))
        equally_fast = all_seconds / fit.slowness[rank]
        explains = any(astuple(fit.model))  # False if only the base explains times, which zero costs do as well
        if _predicts_better(all_sums, in_use[:, None], equally_fast, ranks) if in_use.any() else explains:
            self.improved, self.in_use, self._steps_since_better = True, fit.model, 0
            self.base = fit.base
        else:
            self.base = _base_in_costs(in_use, equally_fast)
        return fit


def _predicts_better(sums: Floats, in_use: Floats, seconds: Floats, ranks: int) -> bool:
    """Return True if a fit to ``sums`` predicts unseen times clearly better than a base and a factor of the costs in use."""
    mine, theirs = (_unseen_errors(columns, seconds, ranks) for columns in (sums, in_use))
    gain = huber_loss(theirs, theirs) - huber_loss(mine, theirs)
    return bool(gain.mean() > _SURE * gain.std() / len(gain) ** 0.5)


def _base_in_costs(costs: Floats, seconds: Floats) -> float:
    """Return the part of a rank's step that its samples do not explain, in the units of ``costs``."""
    base, (factor,) = fit_coefficients(costs[:, None], seconds)
    least = 1e-6 * seconds.mean() / max(costs.mean(), 1e-300)  # a factor of 0 means that costs are negligible
    return float(base / max(factor, least))


def _unseen_errors(columns: Floats, seconds: Floats, ranks: int) -> Floats:
    """Return the relative error of each time, predicted from the other parts' steps, shape ``[observations]``."""
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
    """Return the imbalance, by true costs, of steps planned by other costs.

    ``batches`` holds, for each step, the costs to assign by and the true costs in seconds, shape ``[samples]`` each. ``base``
    and ``slowness`` are those of :class:`CostFit`, ``options`` those of :func:`assign`.
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
    """A cost model fitted to a profiler's report, and the imbalance of compute."""

    fit: CostFit
    steps: int
    ranks: int
    predicted: float | None  # by the costs that the run was planned by; None if unknown
    by_fit: float
    measured: float


def sums_of_lengths(document: Mapping[str, Any]) -> Floats | None:
    """Return the sums of :func:`sample_features` of a report.json, shape ``[steps, ranks, 4]``; None without lengths."""
    sums = np.array(document["series"].get("features") or [], dtype=np.float64)
    return None if not sums.size or (sums[..., 1].any() and not sums[..., 2].any()) else sums


def fit_report(document: Mapping[str, Any]) -> ReportFit:
    """Fit a cost model to the valid contents of a report.json of a :class:`~lightning_freescale.BubbleProfiler`.

    Raises:
        ValueError: The report holds no history lengths, has too few steps, or its times do not follow the lengths.
    """
    series = document["series"]
    sums = sums_of_lengths(document)
    if sums is None:
        raise ValueError(
            "the report holds no history lengths. Profile a run with FreeScaleDataModule(lengths=...), or with "
            "BubbleProfiler(lengths_fn=...)."
        )
    parts = [series["columns"].index(name) for name in ("forward", "backward", "optimizer")]
    seconds = np.array(series["breakdown_s"], dtype=np.float64)[..., parts].sum(axis=-1)
    computed = (seconds > 0).all(axis=1)
    sums, seconds = sums[computed], seconds[computed]
    steps, ranks = seconds.shape
    if steps * ranks < _MIN_TIMES:
        raise ValueError(f"the report has only {steps} steps of {ranks} ranks with compute times. Profile more steps.")
    fit = CostModel.fit(sums.reshape(-1, 4), seconds.ravel(), np.tile(np.arange(ranks), steps))
    if fit.residual >= 1:
        raise ValueError(
            f"the compute times of {steps} steps do not follow the lengths: the median error of the fit is {fit.residual:.0%}, "
            "because other work disturbed the steps. Profile more steps on an idle machine, or longer steps."
        )
    explained = fit.slowness * (fit.base + sums @ np.array(astuple(fit.model)))
    by_fit, measured = (float(each.max(axis=1).sum() / each.mean(axis=1).sum()) for each in (explained, seconds))
    return ReportFit(fit, steps, ranks, document["summary"].get("predicted_imbalance"), by_fit, measured)
