"""Balanced batches from streams, which a thread prepares ahead of the training step.

On every rank, a :class:`~lightning_freescale.data.streaming.reader.StreamReader` reads the user's data set. ``AssignedSteps``
assigns the samples of a step together with the other ranks of the ``StreamGroup``. A thread of the
:class:`BalancedStreamLoader` runs both.
"""

from lightning_freescale.data.streaming.stream_loader import BalancedStreamLoader

__all__ = ["BalancedStreamLoader"]
