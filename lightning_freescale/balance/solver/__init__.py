"""The search behind :func:`lightning_freescale.balance.assign`: whole numbers, fixed numbers of rounds, no clock.

A :class:`Problem` goes through :func:`first_plan` (outlier groups with their fillers, then longest first), then
:func:`refine` (swaps and moves). With numba installed large problems run compiled, with the identical plan.
"""

from lightning_freescale.balance.solver.lpt import first_plan, zigzag
from lightning_freescale.balance.solver.problem import Ints, Problem, lower_bound, to_integers
from lightning_freescale.balance.solver.swaps import refine

__all__ = ["Ints", "Problem", "first_plan", "lower_bound", "refine", "to_integers", "zigzag"]
