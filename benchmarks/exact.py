"""Best plan of a small global batch by OR-tools CP-SAT (``pip install -r benchmarks/exact_requirements.txt``)."""

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
    """The bounds of the smallest imbalance: that of the best plan found, and the proved lower bound."""

    found: float
    proved: float


def best_imbalance(
    costs: Floats, plan: Ints, ranks: int, limits: tuple[int, int], seconds: float, enough: float = 0.001
) -> Best:
    """Search for the plan with the smallest imbalance until it is proved or the time is over.

    The search first decides whether any plan is better by ``enough``, which is the fastest question. It then searches for the
    best plan, once with interchangeable ranks and once with ranks in the order of their loads. Each form solves cases that the
    other does not.

    Args:
        costs: shape ``[samples]``.
        plan: the plan to compare with: the rank of each sample, shape ``[samples]``.
        ranks: number of ranks that share the samples.
        limits: least and most samples that a rank may hold.
        seconds: time limit of the search, which uses eight threads.
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
    """One variable per rank for all samples of the same cost: the number of them that the rank holds."""

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
        """Search for the best plan with an imbalance of at most ``at_most``."""
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
        """Return the imbalance of the original costs, before rounding."""
        load = np.zeros(self.ranks)
        for samples, numbers in zip(self.alike.values(), held):
            for rank, part in enumerate(np.split(np.array(samples), np.cumsum(numbers)[:-1])):
                load[rank] += self.costs[part].sum()
        return float(load.max() / self.mean)
