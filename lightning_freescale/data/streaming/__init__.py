"""Balanced batches from streams, made in a thread ahead of the training step.

On every rank a :class:`~lightning_freescale.data.streaming.reader.StreamReader` reads the user's data set. ``AssignedSteps``
picks the samples of a step together with the other ranks of the ``StreamGroup``, and a ``PrefetchThread`` runs all that for
the :class:`BalancedStreamLoader`.
"""

from lightning_freescale.data.streaming.stream_loader import BalancedStreamLoader

__all__ = ["BalancedStreamLoader"]
