"""The forecast of a run from its first steps, drawn and assigned like those of the sampler."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lightning_freescale.balance.budget import Budget
from lightning_freescale.balance.global_batches import draw_order
from lightning_freescale.balance.plan import StepPlan
from lightning_freescale.balance.report import BalanceReport
from lightning_freescale.balance.sampler import BalancedSampler
from lightning_freescale.balance.solver import Ints
from lightning_freescale.balance.validation import Floats, non_negative, whole_number

SHUFFLED = 1_000_000
"""Number of samples above which a data set is not shuffled if a tenth of it is enough for the forecast."""
PLANNED_STEPS = 5
"""Number of steps that are planned to estimate the balance of more steps, see :func:`report_plans`."""


def predict(
    costs: ArrayLike,
    ranks: int,
    batch_size: int | Budget,
    *,
    steps: int = 16,
    drop_last: bool = False,
    seed: int = 0,
    **options: Any,
) -> BalanceReport:
    """Predict the imbalance of the first steps of a :class:`BalancedSampler` with these arguments.

    No step contains a sample twice. If the data set has fewer than ``ranks * batch_size`` samples, each step contains all of
    them, and a warning is issued.

    Args:
        costs: Predicted compute time of each sample, shape ``[samples]``.
        ranks: Number of ranks.
        batch_size: Number of samples per rank and step, or a :class:`Budget`.
        steps: Minimum number of steps to draw. Windows, and epochs with fewer steps, are drawn completely.
        drop_last: Drop the samples of an incomplete last step.
        seed: Seed of the draw.
        **options: Options of :func:`assign`, with ``tokens`` of all samples, shape ``[samples]``; and ``window`` of
            :class:`BalancedSampler`.

    Raises:
        ValueError: An argument is invalid.

    Examples:
        >>> import numpy as np
        >>> report = predict(np.arange(1.0, 129.0) ** 2, ranks=4, batch_size=8)
        >>> round(report.unbalanced, 2), round(report.balanced, 2), round(report.lower_bound, 2)
        (1.38, 1.0, 1.0)
    """
    cost = non_negative("predict(costs=...)", costs)
    report = report_plans(draw_steps(cost, ranks, batch_size, steps=steps, drop_last=drop_last, seed=seed, **options))
    if (fewer := fewer_than_asked(len(cost), ranks, batch_size)) is not None:
        warnings.warn(f"predict(ranks={ranks}, batch_size={batch_size}): {fewer}", stacklevel=2)
    return report


def fewer_than_asked(samples: int, ranks: int, batch_size: int | Budget) -> str | None:
    """Return a sentence about the size of a step if the data set cannot fill one; None if it can."""
    if isinstance(batch_size, Budget) or samples >= ranks * batch_size:
        return None
    per_rank = f"{samples // ranks} or {samples // ranks + 1}" if samples % ranks else f"{samples // ranks}"
    return (
        f"A step of {ranks} x {batch_size} needs {ranks * batch_size} samples, but the data set has only {samples}. Each step "
        f"has all {samples}, {per_rank} per rank."
    )


def report_plans(plans: Iterable[StepPlan], planned: int | None = None) -> BalanceReport:
    """Return the balance of some steps.

    If only ``planned`` of the steps, evenly spread, are planned, the balance of all steps is estimated from their lower bounds,
    which need no search: the gap of the planned steps is taken to be the gap of all.
    """
    if planned is None:
        return BalanceReport.from_steps(plan.balance for plan in plans)
    drawn = list(plans)
    some = BalanceReport.from_steps(plan.balance for plan in evenly_spread(drawn, planned))
    if planned >= len(drawn):
        return some
    unplanned = [replace(plan, balanced=False) for plan in drawn]
    bounds = BalanceReport.from_steps(plan.balance for plan in unplanned)
    # compare each step with its own bound, because the bound of a window does not hold for its steps
    own = BalanceReport.from_steps(plan.own_balance for plan in unplanned)
    own_of_some = BalanceReport.from_steps(plan.own_balance for plan in evenly_spread(drawn, planned))
    balanced = own.lower_bound * own_of_some.balanced / own_of_some.lower_bound
    planned_alone = {name: getattr(some, name) for name in ("tokens_imbalance", "tokens_fullest", "padding")}
    return replace(bounds, balanced=balanced, **planned_alone)


def in_mode(assignment_mode: str, plans: Sequence[StepPlan]) -> list[StepPlan]:
    """Return the steps with another assignment mode."""
    return [replace(plan, options={**plan.options, "assignment_mode": assignment_mode}) for plan in plans]


def evenly_spread(plans: Sequence[StepPlan], count: int) -> list[StepPlan]:
    """Return at most ``count`` of the plans, including the first one."""
    return [plans[place] for place in np.linspace(0, len(plans) - 1, min(count, len(plans))).astype(int)]


def draw_steps(
    costs: Floats,
    ranks: int,
    batch_size: int | Budget,
    *,
    steps: int = 16,
    window: int = 1,
    seed: int = 0,
    base: float = 0.0,
    **options: Any,
) -> list[StepPlan]:
    """Return the steps of a forecast, see :func:`predict`, with ``base`` of :class:`StepPlan`.

    ``options`` are the other options of :class:`BalancedSampler`.
    """
    steps, ranks = whole_number("predict(steps={})", steps), whole_number("predict(ranks={})", ranks)
    of_sampler: dict[str, Any] = {"num_replicas": ranks, "rank": 0, "seed": seed, "window": window, **options}
    per_step = 0 if isinstance(batch_size, Budget) else ranks * batch_size  # a budget's steps depend on all samples
    whole = steps + -steps % max(1, window)
    if 0 < (whole + 1) * per_step <= len(costs):  # all these steps are full, so no other samples are needed
        drawn = draw_samples(len(costs), whole * per_step, seed)
        if (tokens := options.get("tokens")) is not None:
            of_sampler["tokens"] = non_negative("predict(tokens=...)", tokens, len(costs))[drawn]
        costs, of_sampler["shuffle"] = costs[drawn], False
    sampler = BalancedSampler(costs, batch_size, **of_sampler)
    epochs = range(-(-steps // sampler.steps_per_epoch))
    plans = [sampler.step_plan(epoch, step) for epoch in epochs for step in range(sampler.steps_per_epoch)]
    return [replace(plan, base=base) for plan in plans] if base else plans


def draw_samples(samples: int, count: int, seed: int) -> Ints:
    """Return the first ``count`` samples of epoch 0 in drawn order; for a large data set, other different samples."""
    if samples <= SHUFFLED or 10 * count > samples:
        return draw_order(samples, seed, 0)[:count]
    # a shuffle of all samples takes seconds; nine in ten of twice as many draws from ten times as many samples are different
    drawn = np.random.RandomState([seed, 0]).randint(samples, size=2 * count)
    return drawn[np.sort(np.unique(drawn, return_index=True)[1])[:count]]
