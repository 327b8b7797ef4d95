"""The forecast of a run: its first steps, drawn and assigned as the sampler does. Every prediction of the package uses it."""

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
"""Data sets of more samples are not shuffled for a forecast if a tenth of the samples is enough for it."""
PLANNED_STEPS = 5
"""Steps that are planned if a few stand for all, see :func:`report_plans`."""


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
    """Return the imbalance of the first steps of a :class:`BalancedSampler` with these arguments: predicted, not measured.

    No step has a sample twice. A data set with fewer than ``ranks * batch_size`` samples makes one step of all of them, and
    that is warned of.

    Args:
        costs: predicted compute time of every sample, shape ``[samples]``.
        ranks: how many ranks share a step.
        batch_size: samples per rank and step, or a :class:`Budget`.
        steps: how many steps to draw at least: whole windows, and whole epochs where these are shorter.
        drop_last: leave out the samples of an incomplete last step.
        seed: seeds the draw.
        **options: as in :func:`assign`, ``tokens`` of all samples, shape ``[samples]``; and ``window`` of
            :class:`BalancedSampler`.

    Raises:
        ValueError: an argument does not fit; names it, its value and the fix.

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
    """Return what a step has if the data set cannot fill it; None if it can."""
    if isinstance(batch_size, Budget) or samples >= ranks * batch_size:
        return None
    per_rank = f"{samples // ranks} or {samples // ranks + 1}" if samples % ranks else f"{samples // ranks}"
    return (
        f"A step of {ranks} x {batch_size} has {ranks * batch_size} samples, the data set only has {samples}: every step has "
        f"all {samples}, {per_rank} per rank."
    )


def report_plans(plans: Iterable[StepPlan], planned: int | None = None) -> BalanceReport:
    """Return what these steps come to.

    Bounds need no search. So a few steps can stand for all: what their plans are above their bounds, the plans of all are
    taken to be above theirs.

    Args:
        plans: the steps.
        planned: how many to search plans for, evenly spread; all if not given.
    """
    if planned is None:
        return BalanceReport.from_steps(plan.balance for plan in plans)
    drawn = list(plans)
    some = BalanceReport.from_steps(plan.balance for plan in evenly_spread(drawn, planned))
    if planned >= len(drawn):
        return some
    unplanned = [replace(plan, balanced=False) for plan in drawn]
    bounds = BalanceReport.from_steps(plan.balance for plan in unplanned)
    # of each step by itself: a window's bound says nothing of single ones
    own = BalanceReport.from_steps(plan.own_balance for plan in unplanned)
    own_of_some = BalanceReport.from_steps(plan.own_balance for plan in evenly_spread(drawn, planned))
    balanced = own.lower_bound * own_of_some.balanced / own_of_some.lower_bound
    planned_alone = {name: getattr(some, name) for name in ("tokens_imbalance", "tokens_fullest", "padding")}
    return replace(bounds, balanced=balanced, **planned_alone)


def in_mode(assignment_mode: str, plans: Sequence[StepPlan]) -> list[StepPlan]:
    """Return the same steps, to be planned in another mode."""
    return [replace(plan, options={**plan.options, "assignment_mode": assignment_mode}) for plan in plans]


def evenly_spread(plans: Sequence[StepPlan], count: int) -> list[StepPlan]:
    """Return ``count`` of the plans, the first among them; all if these are no more."""
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
    """Return the steps of a forecast, with the ``base`` of :class:`StepPlan`.

    ``options`` are all others of :class:`BalancedSampler`.
    """
    steps, ranks = whole_number("predict(steps={})", steps), whole_number("predict(ranks={})", ranks)
    of_sampler: dict[str, Any] = {"num_replicas": ranks, "rank": 0, "seed": seed, "window": window, **options}
    # which samples a budget's steps have follows from all of them
    per_step = 0 if isinstance(batch_size, Budget) else ranks * batch_size
    whole = steps + -steps % max(1, window)
    if 0 < (whole + 1) * per_step <= len(costs):  # all of these steps are full, so their samples are enough
        drawn = draw_samples(len(costs), whole * per_step, seed)
        if (tokens := options.get("tokens")) is not None:
            of_sampler["tokens"] = non_negative("predict(tokens=...)", tokens, len(costs))[drawn]
        costs, of_sampler["shuffle"] = costs[drawn], False
    sampler = BalancedSampler(costs, batch_size, **of_sampler)
    epochs = range(-(-steps // sampler.steps_per_epoch))
    plans = [sampler.step_plan(epoch, step) for epoch in epochs for step in range(sampler.steps_per_epoch)]
    return [replace(plan, base=base) for plan in plans] if base else plans


def draw_samples(samples: int, count: int, seed: int) -> Ints:
    """Return the first ``count`` samples of epoch 0 in drawn order; of a large data set others, each once as well."""
    if samples <= SHUFFLED or 10 * count > samples:
        return draw_order(samples, seed, 0)[:count]
    # to shuffle them all takes seconds. Of twice as many draws from ten times as many samples, nine in ten are different
    drawn = np.random.RandomState([seed, 0]).randint(samples, size=2 * count)
    return drawn[np.sort(np.unique(drawn, return_index=True)[1])[:count]]
