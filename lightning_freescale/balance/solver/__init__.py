"""The search for :func:`lightning_freescale.balance.assign`, with whole numbers, fixed numbers of rounds and no clock.

:func:`lower_bound` computes the load that no plan can beat, and the ranks that cause it. :func:`search` plans those ranks
separately. It makes a first plan (longest first), then swaps pairs of samples, then exchanges several samples at once. If few
samples miss the bound, it starts again from other first plans. :func:`padded_search` plans for ranks that pad their samples.
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
