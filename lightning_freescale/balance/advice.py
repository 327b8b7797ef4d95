"""When no assignment can help: say so, and what would."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from lightning_freescale.balance.prediction import fewer_than_asked, report_steps
from lightning_freescale.balance.report import BalanceReport, idle_fraction
from lightning_freescale.balance.validation import Floats

ACCEPTABLE_IMBALANCE = 1.02
"""Up to this imbalance (2 % idle) there is nothing to advise."""
_WORTH_TELLING = 0.005
"""Differences in imbalance below this are not told."""
_OUTLIER_WINDOW, _PERCENTILE = 16, 99
_STEPS, _MOST_STEPS = 16, 32
"""Steps that alternatives are predicted for, and those that keep the steps of a longer report at most."""
_PLANNED = 2
"""Steps of an alternative that are assigned; the others' bounds alone are computed."""
_COUNTS = ("assignment_mode", "count_slack")
_LIMITS = ("keep_together", "max_tokens_per_rank", "tokens")
"""Options that can only raise the bound."""


def advise(
    costs: Floats,
    ranks: int,
    batch_size: int,
    report: BalanceReport | None = None,
    lengths: Floats | None = None,
    **options: Any,
) -> str | None:
    """Return plain sentences if no assignment can keep the ranks from idling; None if there is nothing to say.

    They say for which counts the lower bound holds, and what other settings are predicted to reach, the best first.

    Args:
        costs: predicted compute time of every sample, shape ``[samples]``.
        ranks: how many ranks share a step.
        batch_size: samples per rank and step.
        report: what the assignment in use reaches; predicted if not given.
        lengths: history length of every sample, to name the length at which to truncate and the events that this drops.
        **options: of :func:`predict`, as in use.
    """
    if report is not None and report.lower_bound <= ACCEPTABLE_IMBALANCE:
        return None
    setting = {"costs": costs, "ranks": ranks, "batch_size": batch_size, **options}
    predicted = report_steps(**setting)
    return advise_on(report or predicted, predicted, setting, lengths)


def advise_on(
    report: BalanceReport, predicted: BalanceReport, setting: dict[str, Any], lengths: Floats | None = None
) -> str | None:
    """Return the same of a ``report``, where it is known what is ``predicted`` for the ``setting``, the arguments of it."""
    if report.lower_bound <= ACCEPTABLE_IMBALANCE:
        return None
    fewer = fewer_than_asked(len(setting["costs"]), setting["ranks"], setting["batch_size"])
    told = "" if fewer is None else f"{fewer} "
    same_steps = min(report.steps, _MOST_STEPS)
    told += _bounds(report, {**setting, "steps": same_steps})
    now = min(report.balanced, predicted.balanced)
    tried = sorted(_alternatives(setting, lengths, same_steps))
    better = "".join(f"\n  {value:.3f} {text}" for value, text in tried if value < now - _WORTH_TELLING)
    told += f" Predicted instead:{better}\n" if better else " Nothing that was tried would help. "
    if report.dominated:
        told += "Splitting such a history over several ranks (context parallelism, in the model) keeps all data and all steps."
    return told.strip()


def counts_allowed(assignment_mode: str = "fixed", count_slack: float = 0.25) -> str:
    """Return how many samples the ranks may hold in a mode, in words."""
    if assignment_mode == "slack":
        return f"at counts up to {1 + count_slack:g} times equal"
    return "at any counts" if assignment_mode == "free" else "at equal counts"


def _bounds(report: BalanceReport, setting: dict[str, Any]) -> str:
    """Return what no assignment gets below, at which counts, and why."""
    mode = setting.get("assignment_mode", "fixed")
    counts = counts_allowed(**{name: setting[name] for name in _COUNTS if name in setting})
    told = f"No assignment of these steps {counts} gets below {_with_idle(report.lower_bound)}: {_reason(report, mode)}."
    if mode == "free":
        return told
    # a bound needs no search, so nothing is assigned
    unlimited = {name: value for name, value in setting.items() if name not in _LIMITS}
    free = report_steps(**{**unlimited, "assignment_mode": "free", "balance": False}).lower_bound
    return f"{told} At any counts the bound is {_with_idle(free)}." if free < report.lower_bound - _WORTH_TELLING else told


def _reason(report: BalanceReport, mode: str) -> str:
    if report.dominated:
        return f"in {report.dominated:.0%} of them one sample costs more than a rank's fair share"
    if mode in ("slack", "free"):
        return "the samples are too few and too uneven to be shared out alike"
    return "the most expensive sample and those that equal counts put beside it cost more than a rank's fair share"


def _with_idle(imbalance: float) -> str:
    return f"{imbalance:.3f} ({idle_fraction(imbalance):.0%} idle)"


def _alternatives(setting: dict[str, Any], lengths: Floats | None, same_steps: int) -> list[tuple[float, str]]:
    """Return the imbalance and the description of what could be changed.

    What keeps the steps is predicted for ``same_steps`` of them, as their bound is: of fewer it might seem to beat that.
    """
    costs, ranks, batch_size = setting["costs"], setting["ranks"], setting["batch_size"]
    choices: list[tuple[dict[str, Any], str]] = []
    cap = float(np.percentile(costs, _PERCENTILE, method="lower"))
    if cap < costs.max():
        choices.append(({"costs": np.minimum(costs, cap)}, _truncation(costs, cap, lengths)))
    if ranks * batch_size < len(costs):
        choices.append(({"batch_size": 2 * batch_size, "steps": _STEPS // 2}, f"with batch_size={2 * batch_size}"))
        if setting.get("outlier_window", 1) < _OUTLIER_WINDOW:
            choices.append(({"outlier_window": _OUTLIER_WINDOW}, f"with outlier_window={_OUTLIER_WINDOW}"))
    looser = {"slack": "free", "free": None}.get(setting.get("assignment_mode", "fixed"), "slack")
    if looser is not None:
        in_same_steps = {"assignment_mode": looser, "steps": same_steps}
        choices.append((in_same_steps, f'with assignment_mode="{looser}", in the same steps'))
    if ranks > 2:
        choices.append(({"ranks": ranks // 2}, f"on {ranks // 2} ranks"))
    tried = []
    for changed, text in choices:
        with suppress(ValueError):  # of speeds for so many ranks, or limits that it cannot meet
            tried.append((report_steps(**{**setting, "steps": _STEPS, **changed}, planned=_PLANNED).balanced, text))
    return tried


def _truncation(costs: Floats, cap: float, lengths: Floats | None) -> str:
    """Return what to truncate, and what that drops."""
    dropped = f"{1 - np.minimum(costs, cap).sum() / costs.sum():.1%} of the cost"
    if lengths is None:
        return f"with histories truncated at the {_PERCENTILE}th percentile, which drops {dropped}"
    longest = lengths[costs <= cap].max()
    events = 1 - np.minimum(lengths, longest).sum() / lengths.sum()
    at = f"the {_PERCENTILE}th percentile (L = {longest:g})"
    return f"with histories truncated at {at}, which drops {events:.1%} of the events and {dropped}"
