"""The search behind :func:`lightning_freescale.balance.assign`: whole numbers, fixed numbers of steps, no clock.

A :class:`Problem` goes through :func:`first_plan` (the most demanding units with their company, then longest first), then
:func:`refine` (swaps and moves). With numba installed large problems run compiled, with the identical plan.
"""

from lightning_freescale.balance.solver.bounds import lower_bound
from lightning_freescale.balance.solver.lpt import first_plan, zigzag
from lightning_freescale.balance.solver.problem import Ints, Problem, whole
from lightning_freescale.balance.solver.refine import refine

__all__ = ["Ints", "Problem", "first_plan", "lower_bound", "refine", "whole", "zigzag"]
