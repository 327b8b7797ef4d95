"""What ``fabric.setup_dataloaders`` returns iterates over this: it says which batch the loop has, and which comes next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning_freescale._lightning.loader_wrapper import LoaderWrapper
from lightning_freescale.strategy.lookahead_loader import UNKNOWN, LookaheadLoader


@dataclass
class CurrentBatch:
    """The batch that the loop has.

    Attributes:
        loader: of which it is.
        batch: as the loop got it.
        loss_weight: factor for this rank's loss, see :meth:`.BalancedSampler.loss_weight`.
    """

    loader: Any
    batch: Any
    loss_weight: float

    @property
    def next_batch(self) -> Any:
        """The batch that the loop gets next, or ENDED, or UNKNOWN."""
        return self.loader.next_batch if isinstance(self.loader, LookaheadLoader) else UNKNOWN


class HandingLoader(LoaderWrapper):
    """Any iterable of batches, each given to ``take`` on its way to the loop.

    Args:
        loader: the loader; one that looks ahead, or not.
        take: of the batch; returns what the loop gets.
    """

    def __init__(self, loader: Any, take: Callable[[CurrentBatch], Any]) -> None:
        inner = loader
        while isinstance(inner, LoaderWrapper):
            inner = vars(inner)["_loader"]
        self.__dict__.update(vars(inner))  # Fabric copies the attributes of the loader, the user's way to them
        super().__init__(loader, _take=take)

    def __iter__(self) -> Iterator[Any]:
        # a generator: Fabric sets the epoch before it asks for the first batch
        sampler = getattr(self._loader, "sampler", None)
        weight = getattr(sampler, "loss_weight", None)
        for step, batch in enumerate(self._loader, getattr(sampler, "first_step", 0)):
            yield self._take(CurrentBatch(self._loader, batch, 1.0 if weight is None else float(weight(step))))
