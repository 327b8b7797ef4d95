"""The way between a rank and the owners of the rows that it needs: what the protocol asks of it, and the straight one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lightning_freescale.embeddings.overlap.batch_state import PipelinedBatch, SomeRows
from lightning_freescale.embeddings.overlap.flagged_rows import RowsToFlag, exchange_flagged
from lightning_freescale.embeddings.overlap.handshake import Head, IdsToSend, LookedUp
from lightning_freescale.embeddings.overlap.id_exchange import IdExchange
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.row_requests import IncomingRows, RowRequest, RowSubset
from lightning_freescale.embeddings.overlap.transport import Transport


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
