"""The search behind :func:`lightning_freescale.balance.assign`: whole numbers, fixed numbers of rounds, no clock.

:func:`lower_bound` states what a :class:`Problem` allows and which ranks are the reason. :func:`search` plans those ranks by
themselves. It goes from the first plan (longest first) over swaps of two samples to exchanges of several, and once more from
other first plans if few samples fall short. :func:`padded_search` is for ranks that pad, whose best plans are of another kind.
"""

from lightning_freescale.balance.solver.bounds import Ints, Mask, Problem, dearest_first, lower_bound, to_integers
from lightning_freescale.balance.solver.lpt import zigzag
from lightning_freescale.balance.solver.padded import padded_loads, padded_search
from lightning_freescale.balance.solver.search import CLOSE_ENOUGH, level_tokens, search

__all__ = [
    "CLOSE_ENOUGH",
    "Ints",
    "Mask",
    "Problem",
    "dearest_first",
    "level_tokens",
    "lower_bound",
    "padded_loads",
    "padded_search",
    "search",
    "to_integers",
    "zigzag",
]
