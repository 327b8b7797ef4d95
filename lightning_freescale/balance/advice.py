"""Advice for the case that no assignment can help, with the settings that would."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lightning_freescale.balance.assign import COUNT_SLACK
from lightning_freescale.balance.budget import Budget
from lightning_freescale.balance.forecast import PLANNED_STEPS, draw_steps, fewer_than_asked, in_mode, report_plans
from lightning_freescale.balance.plan import StepPlan
from lightning_freescale.balance.report import BalanceReport, idle_fraction
from lightning_freescale.balance.validation import Floats, non_negative

ACCEPTABLE_IMBALANCE = 1.02
"""Up to this imbalance (2 % idle) there is nothing to advise."""
_WORTH_TELLING = 0.005
"""Smaller differences in imbalance are not reported."""
_PERCENTILE = 99
_WORTH_PARTS, _SAMPLES_OF_PART = 1.1, 4
"""Micro-batches are advised if they are predicted to save more than this, and have so many samples: each takes time as well."""
_PLANNED = 2
"""Steps of an alternative that are planned, see :func:`report_plans`."""


def advise(
    costs: ArrayLike,
    ranks: int,
    batch_size: int | Budget,
    report: BalanceReport | None = None,
    lengths: ArrayLike | None = None,
    **options: Any,
) -> str | None:
    """Return plain sentences if no assignment can keep the ranks from idling; None if there is nothing to say.

    They say for which counts the lower bound holds, and what other settings are predicted to reach, the best first, each with
    what it drops and costs.

    Args:
        costs: predicted compute time of every sample, shape ``[samples]``.
        ranks: how many ranks share a step.
        batch_size: samples per rank and step, or a :class:`Budget`.
        report: what the assignment in use reaches; predicted if not given.
        lengths: history length of every sample, to name the length at which to truncate and the events that this drops.
        **options: of :func:`predict`, as in use, and ``base``, if the report knows of it: what every rank computes for besides
            its samples, in the units of the costs.
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
    """Return the same where the steps are drawn already.

    Args:
        report: what the assignment in use reaches.
        predicted: what it reaches in these steps.
        plans: the steps.
        setting: the arguments of :func:`draw_steps` that they were drawn with.
        lengths: as for :func:`advise`.
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
            "Splitting such a history over several ranks (context parallelism) drops nothing and keeps all steps, but is the "
            "model's work: its attention has to run over several ranks."
        )
    return sentences.strip()


def _with_parts(report: BalanceReport, plans: Sequence[StepPlan]) -> str | None:
    """Return what micro-batches would bring, each of which is padded by itself; None if they would bring nothing."""
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
        f"With micro_batches={parts}, each of which is padded by itself, {padding:.0%} of the computed tokens are predicted to "
        f"be padding, and the slowest rank to compute {report.balanced / balanced:.2f} times less. {parts} passes over the "
        'model take longer than one; micro_batches="auto" measures what pays'
    )


def counts_allowed(assignment_mode: str = "fixed") -> str:
    """Return how many samples the ranks may hold in a mode, in words."""
    if assignment_mode == "slack":
        return f"at counts up to {1 + COUNT_SLACK:g} times equal"
    return "at any counts" if assignment_mode == "free" else "at equal counts"


def _bounds(report: BalanceReport, plans: Sequence[StepPlan], setting: dict[str, Any]) -> str:
    """Return what no assignment gets below, at which counts, and why."""
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
        return "the samples are too few and too uneven to be shared out alike"
    return "the most expensive sample and those that equal counts put beside it cost more than a rank's fair share"


def _with_idle(imbalance: float) -> str:
    return f"{imbalance:.3f} ({idle_fraction(imbalance):.0%} idle)"


def _with_other_counts(plans: Sequence[StepPlan], setting: dict[str, Any]) -> list[tuple[float, str]]:
    """Return the imbalance of the same steps at freer counts, and the description of these."""
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
    """Return the imbalance and the description of what else could be changed, over about the same samples."""
    costs, ranks, batch_size = setting["costs"], setting["ranks"], setting["batch_size"]
    budgeted = isinstance(batch_size, Budget)
    steps = 1 if budgeted else len(plans)  # of a budget, whole epochs are drawn
    choices: list[tuple[dict[str, Any], str]] = []
    cap = float(np.percentile(costs, _PERCENTILE, method="lower"))
    if cap < costs.max():
        shorter = {"costs": np.minimum(costs, cap)}
        if isinstance(batch_size, Budget) and lengths is not None and np.array_equal(batch_size.sizes, lengths):
            shorter["batch_size"] = Budget(batch_size.per_rank, np.minimum(lengths, lengths[costs <= cap].max()))
        choices.append((shorter, _truncation(costs, cap, lengths)))
    larger = "half as many steps, of twice the samples and memory"
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
        with suppress(ValueError):  # limits that it cannot meet
            drawn = draw_steps(**{**setting, "steps": steps, **changed})
            balanced = report_plans(drawn, _planned(setting)).balanced
            if "ranks" in changed:
                longer = balanced * _mean_load(drawn) / (predicted.balanced * _mean_load(plans))
                text += f", which drops nothing, but an epoch computes {longer:.2f} times as long"
            tried.append((balanced, text))
    return tried


def _planned(setting: dict[str, Any]) -> int | None:
    """Return how many steps of an alternative to plan; all where a limit may forbid some."""
    return _PLANNED if setting.get("max_tokens_per_rank") is None else None


def _mean_load(plans: Sequence[StepPlan]) -> float:
    """Return what the mean rank computes for, per sample of the steps."""
    return float(sum(plan.costs.sum() / plan.ranks + plan.base for plan in plans) / sum(len(plan.samples) for plan in plans))


def _truncation(costs: Floats, cap: float, lengths: Floats | None) -> str:
    """Return what to truncate, and what that drops."""
    dropped = f"{1 - np.minimum(costs, cap).sum() / costs.sum():.1%} of the cost"
    if lengths is None:
        return f"with histories truncated at the {_PERCENTILE}th percentile, which drops {dropped}"
    longest = lengths[costs <= cap].max()
    events = 1 - np.minimum(lengths, longest).sum() / lengths.sum()
    at = f"the {_PERCENTILE}th percentile (L = {longest:g})"
    return f"with histories truncated at {at}, which drops {events:.1%} of the events and {dropped}"
