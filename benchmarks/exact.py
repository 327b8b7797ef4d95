"""How good the best plan of a small global batch is: OR-tools' CP-SAT, ``pip install -r benchmarks/exact_requirements.txt``."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

Floats, Ints = NDArray[np.float64], NDArray[np.int64]
_FINE = 1e-7
"""Costs are rounded down to this share of the mean load: small numbers, and the proof stays one."""
_DONE = 1e-5
"""How near to the best that is possible a plan counts as the best."""


class Best(NamedTuple):
    """What is known of the smallest imbalance: that of the best plan found, and the one that none is below."""

    found: float
    proved: float


def best_imbalance(
    costs: Floats, plan: Ints, ranks: int, limits: tuple[int, int], seconds: float, enough: float = 0.001
) -> Best:
    """Look for the plan with the smallest imbalance until it is proved or the time is over.

    First whether there is a plan that is better by ``enough`` at all, which is the quickest to answer; then for the best
    one, with ranks that may change places and with ranks in the order of their load: each wins where the other is lost.

    Args:
        costs: shape ``[samples]``.
        plan: ours, the rank of every sample, shape ``[samples]``.
        ranks: how many share the samples.
        limits: least and most samples that a rank may hold.
        seconds: how long to search, with eight threads.
        enough: share by which a plan has to be better.
    """
    problem = _Problem(costs, plan, ranks, limits)
    ours = float(np.bincount(plan, costs, ranks).max() / problem.mean)
    best = Best(ours, 0.0)
    for ordered, at_most in ((False, ours / (1 + enough)), (False, ours), (True, ours)):
        new = problem.solve(ordered, at_most, seconds / 3)
        best = Best(min(best.found, new.found), max(best.proved, new.proved))
        if best.proved >= best.found * (1 - _DONE):
            break
    return best


class _Problem:
    """Samples that cost the same are one variable per rank: how many of them it holds."""

    def __init__(self, costs: Floats, plan: Ints, ranks: int, limits: tuple[int, int]) -> None:
        self.costs, self.plan, self.ranks, self.limits = costs, plan, ranks, limits
        self.mean = costs.sum() / ranks
        self.unit = self.mean * _FINE
        if (costs == np.floor(costs)).all():
            self.unit = max(1.0, self.unit)
        self.whole = np.floor(costs / self.unit).astype(np.int64)
        self.alike = defaultdict(list)
        for sample in np.argsort(-self.whole, kind="stable"):
            self.alike[int(self.whole[sample])].append(int(sample))

    def solve(self, ordered: bool, at_most: float, seconds: float) -> Best:
        """Look for the best plan with an imbalance of ``at_most``."""
        model, most = cp_model.CpModel(), int(at_most * self.mean / self.unit)
        held = [[model.new_int_var(0, len(samples), "") for _ in range(self.ranks)] for samples in self.alike.values()]
        for samples, row in zip(self.alike.values(), held):
            model.add(sum(row) == len(samples))
        load = [model.new_int_var(0, most, "") for _ in range(self.ranks)]
        for rank, loaded in enumerate(load):
            model.add(loaded == sum(cost * row[rank] for cost, row in zip(self.alike, held)))
            model.add_linear_constraint(sum(row[rank] for row in held), *self.limits)
        for more, less in zip(load, load[1:] if ordered else []):
            model.add(more >= less)
        ours = int(np.bincount(self.plan, self.whole, self.ranks).max())
        if ours <= most:
            slowest = load[0] if ordered else model.new_int_var(0, most, "")
            if not ordered:
                model.add_max_equality(slowest, load)
            model.minimize(slowest)
            self._hint(model, held)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds, solver.parameters.num_workers = seconds, 8
        solver.parameters.relative_gap_limit = _DONE
        status = solver.solve(model)
        if status == cp_model.INFEASIBLE:
            return Best(np.inf, (most + 1) * self.unit / self.mean)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Best(np.inf, 0.0)
        proved = solver.best_objective_bound * self.unit / self.mean if ours <= most else 0.0
        return Best(self._imbalance([[solver.value(variable) for variable in row] for row in held]), proved)

    def _hint(self, model: cp_model.CpModel, held: list[list[cp_model.IntVar]]) -> None:
        by_load = np.argsort(-np.bincount(self.plan, self.whole, self.ranks), kind="stable")
        for samples, row in zip(self.alike.values(), held):
            for variable, number in zip(row, np.bincount(self.plan[samples], minlength=self.ranks)[by_load]):
                model.add_hint(variable, int(number))

    def _imbalance(self, held: list[list[int]]) -> float:
        """Of the costs as they are, not rounded."""
        load = np.zeros(self.ranks)
        for samples, numbers in zip(self.alike.values(), held):
            for rank, part in enumerate(np.split(np.array(samples), np.cumsum(numbers)[:-1])):
                load[rank] += self.costs[part].sum()
        return float(load.max() / self.mean)
