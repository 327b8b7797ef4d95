"""Balanced batches from streams: a source per rank, a thread that works ahead, and two ways to share the samples.

A :class:`~lightning_freescale.data.streaming.source.Source` reads the user's data set in chunks, a ``Reader`` numbers and holds
its samples, ``PooledSteps`` or ``ExchangedSteps`` pick those of a step together with the other ``Ranks``, and a ``Producer``
runs all that ahead of the training step for the :class:`BalancedStreamLoader`.
"""

from lightning_freescale.data.streaming.loader import BalancedStreamLoader

__all__ = ["BalancedStreamLoader"]
