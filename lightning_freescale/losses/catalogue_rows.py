"""The rows of a catalogue that this rank has, and the exchange with the ranks that have the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

ATTRIBUTE = "freescale_catalogue"
"""The attribute of a sharded table's weight: a function that returns the whole weight or a :class:`CatalogueRows`."""


class Positions(Protocol):
    """The positions of all ranks in one call of a loss."""

    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return what all ranks give for their positions, by rank: shape ``[positions, ...]`` as given. Collective."""

    def to_ranks(self, values: Tensor) -> Callable[[], Tensor]:
        """Begin to send each rank the values of its positions, shape ``[positions, ...]``. Collective.

        Returns:
            A function that waits, and returns what all shards have sent: shape ``[shards, positions of this rank, ...]``.
        """


class CatalogueRows(Protocol):
    """The rows of a catalogue that this rank has.

    Attributes:
        items: rows of the whole catalogue.
        weight: the rows on this rank, shape ``[rows, dim]``.
        trained: what autograd sees of the weight: the whole one, or an empty tensor that requires a gradient.
        excluded: which of ``weight`` are no items, int64; None if all are.
    """

    items: int
    weight: Tensor
    trained: Tensor
    excluded: Tensor | None

    def positions(self, count: int) -> Positions:
        """Return the positions of all ranks, of which this one has ``count``. Collective."""

    def places(self, items: Tensor) -> Tensor:
        """Return which of ``weight`` each item is, int64; negative for the items of other ranks."""

    def select(self, by_item: Tensor) -> Tensor:
        """Return what a tensor of shape ``[items]`` has for ``weight``: shape ``[rows]``."""

    def spread(self, by_row: Tensor) -> Tensor:
        """Return a tensor of shape ``[items]`` that has ``by_row`` for ``weight``, and zeros elsewhere."""

    def take_gradient(self, gradient: Tensor) -> Tensor | None:
        """Take the gradient of ``weight``; return that of ``trained``."""


def catalogue_rows(table: Tensor | nn.Module) -> CatalogueRows:
    """Return the rows of a table that a call of a loss uses.

    Raises:
        ValueError: the table is sharded, and cannot be used in this place.
    """
    weight = table.weight if isinstance(table, nn.Module) else table
    assert isinstance(weight, Tensor)
    find = getattr(weight, ATTRIBUTE, None)
    found = weight if find is None else find()
    if isinstance(found, Tensor):
        if found.dim() != 2 or not len(found):
            raise ValueError(f"catalogue_cross_entropy(table of shape {list(found.shape)}): pass [items, dim]")
        return WholeRows(found)
    rows: CatalogueRows = found
    return rows


class WholeRows:
    """All rows are on this rank; see :class:`CatalogueRows`."""

    excluded: Tensor | None = None

    def __init__(self, weight: Tensor) -> None:
        self.items, self.weight, self.trained = len(weight), weight, weight

    def positions(self, count: int) -> Positions:
        """Return this rank's positions."""
        return _OwnPositions()

    def places(self, items: Tensor) -> Tensor:
        """Return the items."""
        return items

    def select(self, by_item: Tensor) -> Tensor:
        """Return the tensor."""
        return by_item

    def spread(self, by_row: Tensor) -> Tensor:
        """Return the tensor."""
        return by_row

    def take_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient."""
        return gradient


class _OwnPositions:
    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    def to_ranks(self, values: Tensor) -> Callable[[], Tensor]:
        return lambda: values[None]
