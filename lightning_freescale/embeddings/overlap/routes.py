"""The route between a rank and the owners of its rows: the interface, the direct route, and exchange B over one hop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_freescale.embeddings.overlap.batch_state import PipelinedBatch, SomeRows
from lightning_freescale.embeddings.overlap.id_exchange import (
    Head,
    IdExchange,
    IdsToSend,
    LookedUp,
    PartLayout,
    put,
    ranges,
    take,
)
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.row_requests import IncomingRows, RowRequest, RowSubset
from lightning_freescale.embeddings.overlap.transport import Transport


@dataclass(frozen=True)
class RowsToFlag:
    """What one rank has for others of the next batch, and tells them of the current one.

    Attributes:
        numbers: what to read each row of the next batch by, shape ``[rows]``.
        late: which of them are updated before they are read (bool).
        sizes: how many each rank has asked for.
        needed: which rows of the current batch the next one needs, too (bool); None if no update follows the current one.
        needed_sizes: how many rows of the current batch each rank has asked for.
    """

    numbers: Tensor
    late: Tensor
    sizes: list[int]
    needed: Tensor | None
    needed_sizes: list[int]


@dataclass(frozen=True)
class FlaggedRows:
    """What has come, and what has been sent.

    Attributes:
        rows: the slots that the rows came in, shape ``[places, dim]``, with room for those that come late.
        places: where in ``rows`` each row asked for is or will be, int32.
        late_places: where those belong that come late.
        late: which of the rows asked for these are (bool).
        waits: the same, by sender.
        waiting: which of the rows that this rank has come late.
        needed: which rows that were asked for of the current batch the next one needs, too (bool); None as in what was sent.
    """

    rows: Tensor
    places: Tensor
    late_places: Tensor
    late: Tensor
    waits: RowSubset
    waiting: RowSubset
    needed: Tensor | None


def exchange_flagged(
    transport: Transport, read: Callable[[Tensor], Tensor], have: RowsToFlag, asks: list[int], needs: list[int]
) -> FlaggedRows:
    """Exchange ``[flags of the next batch, of the current | rows]``. Collective.

    Args:
        transport: of the hop.
        read: returns rows by their numbers.
        have: what this rank has for the others.
        asks: rows of the next batch that this rank has asked of each.
        needs: rows of the current batch that it had.
    """
    dim, asked = transport.dim, have.sizes
    none = [0] * transport.ranks
    here, mine = (none, none) if have.needed is None else (have.needed_sizes, needs)
    late, at_once = RowSubset.split(have.late, asked)
    flagged = [a + b for a, b in zip(asked, here)]
    parts = PartLayout(dim, flagged, at_once.sizes)
    source = late.index.new_zeros(parts.length)
    put(source, parts.first_rows, at_once.sizes, have.numbers.index_select(0, at_once.index))
    message = read(source) if at_once.index.numel() else transport.rows(parts.length)
    flags, starts = message.view(torch.uint8).view(-1), parts.octets()
    put(flags, starts, asked, have.late.view(torch.uint8))
    if have.needed is not None:
        put(flags, [start + size for start, size in zip(starts, asked)], here, have.needed.view(torch.uint8))

    slots = PartLayout(dim, [a + b for a, b in zip(asks, mine)], asks)
    rows = transport.rows(slots.length)
    transport.exchange(rows, message, parts.sizes, slots.sizes)
    transport.count("ids", 1, flagged)
    transport.count("non_colliding", 4 * dim, at_once.sizes)

    flags, starts = rows.view(torch.uint8).view(-1), slots.octets()
    is_late = take(flags, starts, asks).view(torch.bool)
    waits, others = RowSubset.split(is_late, asks)
    # a slot has room for all rows of its sender: those that come last go behind the others
    ends = [first + count for first, count in zip(slots.first_rows, others.sizes)]
    late_places = ranges(ends, waits.sizes, transport.device)
    places = waits.index.new_empty(sum(asks), dtype=torch.int32)
    places[waits.index] = late_places.int()
    places[others.index] = ranges(slots.first_rows, others.sizes, transport.device).int()
    needed = None
    if have.needed is not None:
        needed = take(flags, [start + size for start, size in zip(starts, asks)], mine).view(torch.bool)
    return FlaggedRows(rows, places, late_places, is_late, waits, late, needed)


class Route(Protocol):
    """Ids and gradients go to the owners by it, rows and flags come back. Every method is collective.

    Attributes:
        no_rows: a request for none.
        no_incoming: what comes in if nobody asks for any.
        nothing_given: none of a batch's rows.
    """

    no_rows: RowRequest
    no_incoming: IncomingRows
    nothing_given: SomeRows

    def exchange_ids(
        self,
        sent: IdsToSend,
        current: PipelinedBatch,
        lookup: LookedUp,
        given: SomeRows,
        gradients: Tensor,
        other_ids: Sequence[int] | None = None,
    ) -> tuple[list[Head], IncomingRows, Tensor]:
        """Do as :meth:`IdExchange.exchange`; return the heads of all ranks."""

    def serve_anew(
        self, current: PipelinedBatch, request: RowRequest, heads: Sequence[Head], asks: Sequence[bool]
    ) -> tuple[IncomingRows, Tensor]:
        """Serve the ranks marked in ``asks`` with other rows of the current batch; return what comes in, and this rank's rows.

        What comes in may hold rows that others have asked for before, where these share a proxy. ``heads`` are of the message
        in which the ranks said so.
        """

    def give_rows(self, incoming: IncomingRows, request: RowRequest) -> Tensor:
        """Give the values of all ``incoming`` rows to those who asked; return those of ``request``, shape ``[rows, dim]``."""

    def give_others(self, following: PipelinedBatch, current: PipelinedBatch, awaited: Tensor, urgent: Tensor) -> None:
        """Tell which rows are updated before they are read, and give the others: exchange B. Filled into the batches.

        ``awaited`` and ``urgent`` are what :meth:`Collisions.compare` returns.
        """

    def give_last(self, following: PipelinedBatch) -> None:
        """Give the rows of a batch that have just been updated: exchange D."""

    def take_gradients(self, gradients: Tensor, request: RowRequest, incoming: IncomingRows) -> Tensor:
        """Bring the gradients of all rows of ``request`` to their owners; return those of ``incoming``."""

    def all_of(self, request: RowRequest, incoming: IncomingRows) -> SomeRows:
        """Return all rows of a batch. Not collective."""

    def count_gradients(self, kind: str, given: SomeRows) -> None:
        """Count the bytes of gradients of some rows. Not collective."""


class DirectRoute:
    """Straight to the owners; see :class:`Route`.

    Args:
        transport: of the collection.
        local: this rank's rows.
        no_rows: a request for none.
    """

    def __init__(self, transport: Transport, local: LocalRows, no_rows: RowRequest) -> None:
        self._transport, self._local, self.no_rows = transport, local, no_rows
        self._ids = IdExchange(transport, no_rows.slots.shape[1])
        self.exchange_ids = self._ids.exchange
        self.no_incoming = IncomingRows(no_rows.rows.long(), no_rows.sizes, no_rows.slots)
        self.nothing_given = self.all_of(no_rows, self.no_incoming)

    def serve_anew(
        self, current: PipelinedBatch, request: RowRequest, heads: Sequence[Head], asks: Sequence[bool]
    ) -> tuple[IncomingRows, Tensor]:
        """Serve the ranks marked in ``asks`` alone."""
        new = self._ids.exchange_other(request, heads, asks)
        return new, self.give_rows(new, request)

    def give_rows(self, incoming: IncomingRows, request: RowRequest) -> Tensor:
        """Give values to those who asked."""
        return self._transport.exchange_rows(self._local.read(incoming.rows), incoming.sizes, request.sizes)

    def give_others(self, following: PipelinedBatch, current: PipelinedBatch, awaited: Tensor, urgent: Tensor) -> None:
        """Do exchange B."""
        rows, asked, mine, here = (
            following.incoming.rows,
            following.incoming.sizes,
            current.request.sizes,
            current.incoming.sizes,
        )
        have = RowsToFlag(rows, awaited, asked, urgent if current.updates else None, here)
        came = exchange_flagged(self._transport, self._local.read, have, following.request.sizes, mine)
        following.rows, following.late_places = came.rows, came.late_places
        following.places = came.places.index_select(0, following.request.inverse)
        following.awaited = SomeRows(came.waits, came.waiting)
        if came.needed is not None:
            first, others = RowSubset.split(came.needed, mine)
            first_here, others_here = RowSubset.split(urgent, here)
            current.urgent, current.patient = SomeRows(first, first_here), SomeRows(others, others_here)

    def give_last(self, following: PipelinedBatch) -> None:
        """Do exchange D."""
        awaited = following.awaited
        assert awaited is not None
        values = self._local.read(following.incoming.rows.index_select(0, awaited.incoming.index))
        last = self._transport.exchange_rows(values, awaited.incoming.sizes, awaited.requested.sizes)
        following.rows[following.late_places] = last

    def take_gradients(self, gradients: Tensor, request: RowRequest, incoming: IncomingRows) -> Tensor:
        """Bring gradients to their owners."""
        return self._transport.exchange_rows(gradients, request.sizes, incoming.sizes)

    def all_of(self, request: RowRequest, incoming: IncomingRows) -> SomeRows:
        """Return all rows of a batch."""
        device = self._transport.device
        return SomeRows(RowSubset.all_of(request.sizes, device), RowSubset.all_of(incoming.sizes, device))

    def count_gradients(self, kind: str, given: SomeRows) -> None:
        """Count the bytes of gradients of some rows."""
        self._transport.count(kind, 4 * self._transport.dim, given.requested.sizes)
