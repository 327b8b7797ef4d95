"""The forecast of a run from its first steps, drawn and assigned like those of the sampler, and advice from it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lightning_freescale.balance.assign import COUNT_SLACK
from lightning_freescale.balance.budget import Budget
from lightning_freescale.balance.global_batches import draw_order
from lightning_freescale.balance.plan import StepPlan
from lightning_freescale.balance.report import BalanceReport, idle_fraction
from lightning_freescale.balance.sampler import BalancedSampler
from lightning_freescale.balance.solver.bounds import Ints
from lightning_freescale.balance.validation import Floats, non_negative, whole_number

SHUFFLED = 1_000_000
"""Number of samples above which a data set is not shuffled if a tenth of it is enough for the forecast."""
PLANNED_STEPS = 5
"""Number of steps that are planned to estimate the balance of more steps, see :func:`report_plans`."""
ACCEPTABLE_IMBALANCE = 1.02
"""Imbalance (2 % idle) up to which there is no advice."""
_WORTH_TELLING = 0.005
"""Difference in imbalance up to which an alternative is not reported."""
_PERCENTILE = 99
_WORTH_PARTS, _SAMPLES_OF_PART = 1.1, 4
"""Minimum predicted speed-up and number of samples of micro-batches, because each micro-batch takes time of its own."""
_PLANNED = 2
"""Number of steps of an alternative that are planned, see :func:`report_plans`."""


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


# -- advice on other settings where no assignment can balance the ranks


def advise(
    costs: ArrayLike,
    ranks: int,
    batch_size: int | Budget,
    report: BalanceReport | None = None,
    lengths: ArrayLike | None = None,
    **options: Any,
) -> str | None:
    """Return advice if no assignment can keep the ranks from waiting; None if no advice is needed.

    The text states the counts for which the lower bound holds, and the predicted imbalance of other settings, the best first,
    with their costs.

    Args:
        costs: Predicted compute time of each sample, shape ``[samples]``.
        ranks: Number of ranks.
        batch_size: Number of samples per rank and step, or a :class:`Budget`.
        report: Report of the assignment in use, for the same ``options``; predicted by default.
        lengths: History length of each sample, to state the length of a truncation and the events that it drops.
        **options: Options of :func:`predict`, and ``base``, if the report includes it: the time of a rank besides its samples,
            in the unit of the costs.
    """
    if report is not None and report.lower_bound <= ACCEPTABLE_IMBALANCE:
        return None
    costs = non_negative("advise(costs=...)", costs)
    lengths = None if lengths is None else non_negative("advise(lengths=...)", lengths, len(costs))
    setting: dict[str, Any] = {"costs": costs, "ranks": ranks, "batch_size": batch_size}
    setting |= {name: value for name, value in options.items() if value is not None}
    plans = draw_steps(**setting)
    predicted = report_plans(plans, PLANNED_STEPS)
    return advise_on(report or predicted, predicted, plans, setting, lengths)


def advise_on(
    report: BalanceReport,
    predicted: BalanceReport,
    plans: Sequence[StepPlan],
    setting: dict[str, Any],
    lengths: Floats | None = None,
) -> str | None:
    """Return the text of :func:`advise` for steps that are already drawn, with ``setting`` as arguments of :func:`draw_steps`.

    ``predicted`` is the report of these steps.
    """
    if report.lower_bound <= ACCEPTABLE_IMBALANCE:
        return None
    if report.padding is not None:
        return _with_parts(report, plans)
    fewer = fewer_than_asked(len(setting["costs"]), setting["ranks"], setting["batch_size"])
    sentences = "" if fewer is None else f"{fewer} "
    sentences += _bounds(report, plans, setting)
    now = min(report.balanced, predicted.balanced)
    tried = sorted([*_with_other_counts(plans, setting), *_with_other_steps(plans, setting, lengths, predicted)])
    better = "".join(f"\n  {value:.3f} {text}" for value, text in tried if value < now - _WORTH_TELLING)
    sentences += f" Predicted instead:{better}\n" if better else " Nothing that was tried would help. "
    if report.dominated:
        sentences += (
            "Splitting such a history over several ranks (context parallelism) drops nothing and keeps all steps. The "
            "attention of the model then has to run over several ranks."
        )
    return sentences.strip()


def _with_parts(report: BalanceReport, plans: Sequence[StepPlan]) -> str | None:
    """Return the effect of micro-batches on padded batches; None if it is too small."""
    tried = []
    for parts in (2, 4, 8):
        if parts * plans[0].ranks * _SAMPLES_OF_PART > len(plans[0].samples):
            break
        parted = report_plans([replace(plan, options={**plan.options, "parts": parts}) for plan in plans], _PLANNED)
        tried.append((parted.balanced, parts, parted.padding))
    balanced, parts, padding = min(tried, default=(report.balanced, 1, 0.0))
    if balanced * _WORTH_PARTS > report.balanced:
        return None
    return (
        f"With micro_batches={parts}, each micro-batch is padded separately. Predicted: {padding:.0%} of the computed tokens "
        f"are padding, and the slowest rank computes {report.balanced / balanced:.2f} times less. {parts} passes over the "
        'model have a cost of their own. micro_batches="auto" measures the fastest number.'
    )


def counts_allowed(assignment_mode: str = "fixed") -> str:
    """Return the allowed numbers of samples of a mode in words."""
    if assignment_mode == "slack":
        return f"at counts up to {1 + COUNT_SLACK:g} times equal"
    return "at any counts" if assignment_mode == "free" else "at equal counts"


def _bounds(report: BalanceReport, plans: Sequence[StepPlan], setting: dict[str, Any]) -> str:
    """Return the sentences about the lower bound, its counts and its reason."""
    mode = setting.get("assignment_mode", "fixed")
    bound = _with_idle(report.lower_bound)
    text = f"No assignment of these steps {counts_allowed(mode)} gets below {bound}: {_reason(report, mode)}."
    if mode == "free":
        return text
    free = report_plans(in_mode("free", plans), planned=0).lower_bound
    return f"{text} At any counts the bound is {_with_idle(free)}." if free < report.lower_bound - _WORTH_TELLING else text


def _reason(report: BalanceReport, mode: str) -> str:
    if report.dominated:
        return f"in {report.dominated:.0%} of them one sample costs more than a rank's fair share"
    if mode in ("slack", "free"):
        return "the samples are too few and too uneven"
    return "the most expensive sample and the samples that equal counts put beside it cost more than a rank's fair share"


def _with_idle(imbalance: float) -> str:
    return f"{imbalance:.3f} ({idle_fraction(imbalance):.0%} idle)"


def _with_other_counts(plans: Sequence[StepPlan], setting: dict[str, Any]) -> list[tuple[float, str]]:
    """Return the imbalance of the steps with fewer limits on the counts, and a description."""
    freer = {"slack": "free", "free": None}.get(setting.get("assignment_mode", "fixed"), "slack")
    if freer is not None:
        with suppress(ValueError):  # tokens may not fit
            balanced = report_plans(in_mode(freer, plans), _planned(setting)).balanced
            share = f"up to {1 + COUNT_SLACK:g} times its share" if freer == "slack" else "any number"
            price = f"which drops nothing, but lets a rank hold {share} of the samples"
            return [(balanced, f'with assignment_mode="{freer}", in the same steps, {price}')]
    return []


def _with_other_steps(
    plans: Sequence[StepPlan], setting: dict[str, Any], lengths: Floats | None, predicted: BalanceReport
) -> list[tuple[float, str]]:
    """Return the imbalance and a description of each other setting, over about the same samples."""
    costs, ranks, batch_size = setting["costs"], setting["ranks"], setting["batch_size"]
    budgeted = isinstance(batch_size, Budget)
    steps = 1 if budgeted else len(plans)  # with a budget, whole epochs are drawn
    choices: list[tuple[dict[str, Any], str]] = []
    cap = float(np.percentile(costs, _PERCENTILE, method="lower"))
    if cap < costs.max():
        shorter = {"costs": np.minimum(costs, cap)}
        if isinstance(batch_size, Budget) and lengths is not None and np.array_equal(batch_size.sizes, lengths):
            shorter["batch_size"] = Budget(batch_size.per_rank, np.minimum(lengths, lengths[costs <= cap].max()))
        choices.append((shorter, _truncation(costs, cap, lengths)))
    larger = "half as many steps, with twice the samples and memory"
    if isinstance(batch_size, Budget):
        twice = Budget(2 * batch_size.per_rank, batch_size.sizes)
        choices.append(({"batch_size": twice}, f"with twice the budget, which drops nothing, but makes about {larger}"))
    elif ranks * batch_size < len(costs):
        text = f"with batch_size={2 * batch_size}, which drops nothing, but makes {larger}"
        choices.append(({"batch_size": 2 * batch_size, "steps": -(-steps // 2)}, text))
    if ranks > 2:
        choices.append(({"ranks": ranks // 2, "steps": steps if budgeted else 2 * steps}, f"on {ranks // 2} ranks"))
    tried = []
    for changed, text in choices:
        with suppress(ValueError):  # the setting may not meet the limits
            drawn = draw_steps(**{**setting, "steps": steps, **changed})
            balanced = report_plans(drawn, _planned(setting)).balanced
            if "ranks" in changed:
                longer = balanced * _mean_load(drawn) / (predicted.balanced * _mean_load(plans))
                text += f", which drops nothing, but an epoch computes {longer:.2f} times as long"
            tried.append((balanced, text))
    return tried


def _planned(setting: dict[str, Any]) -> int | None:
    """Return the number of steps of an alternative to plan; None for all, because a limit may forbid some."""
    return _PLANNED if setting.get("max_tokens_per_rank") is None else None


def _mean_load(plans: Sequence[StepPlan]) -> float:
    """Return the load of the mean rank per sample of the steps."""
    return float(sum(plan.costs.sum() / plan.ranks + plan.base for plan in plans) / sum(len(plan.samples) for plan in plans))


def _truncation(costs: Floats, cap: float, lengths: Floats | None) -> str:
    dropped = f"{1 - np.minimum(costs, cap).sum() / costs.sum():.1%} of the cost"
    if lengths is None:
        return f"with histories truncated at the {_PERCENTILE}th percentile, which drops {dropped}"
    longest = lengths[costs <= cap].max()
    events = 1 - np.minimum(lengths, longest).sum() / lengths.sum()
    at = f"the {_PERCENTILE}th percentile (L = {longest:g})"
    return f"with histories truncated at {at}, which drops {events:.1%} of the events and {dropped}"
