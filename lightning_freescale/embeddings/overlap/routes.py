"""The direct route between a rank and the owners of its rows, and exchange B over one hop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_freescale.embeddings.overlap.batch_state import BatchRows, RequestedRows, SomeRows
from lightning_freescale.embeddings.overlap.hot_rows import HotList
from lightning_freescale.embeddings.overlap.id_exchange import IdExchange, PartLayout, put, ranges, take
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.row_requests import IncomingRows, RowRequest, RowSubset
from lightning_freescale.embeddings.overlap.transport import RowTransport


@dataclass(frozen=True)
class RowsToFlag:
    """The rows and flags that this rank sends in exchange B."""

    numbers: Tensor  # the number by which each row of the next batch is read, shape [rows]
    late: Tensor  # whether each of these rows is updated before it is read (bool)
    sizes: list[int]  # number of these rows per requesting rank
    needed: Tensor | None  # whether the next batch needs each row of the current one (bool); None if no update follows
    needed_sizes: list[int]  # number of rows of the current batch per requesting rank


@dataclass(frozen=True)
class FlaggedRows:
    """The result of exchange B over one hop."""

    rows: Tensor  # slots of received rows, shape [places, words], with space for the late rows
    places: Tensor  # index into rows for each requested row, present or late, int32
    late_places: Tensor  # indices into rows for the late rows
    late: Tensor  # whether each requested row is late (bool)
    waits: RowSubset  # the late rows that this rank requested
    waiting: RowSubset  # the late rows that this rank sends
    needed: Tensor | None  # whether the next batch needs each requested row of the current one (bool); None if not sent


def exchange_flagged(
    transport: RowTransport, read: Callable[[Tensor], Tensor], have: RowsToFlag, asks: list[int], needs: list[int]
) -> FlaggedRows:
    """Exchange ``[flags of the next batch, of the current | rows]``. Collective.

    ``read`` returns rows by their numbers. ``asks`` and ``needs`` are the numbers of rows of the next and of the current batch
    that this rank requested from each rank.
    """
    words, asked = transport.wire.rows.words, have.sizes
    none = [0] * transport.ranks
    here, mine = (none, none) if have.needed is None else (have.needed_sizes, needs)
    late, at_once = RowSubset.split(have.late, asked)
    flagged = [a + b for a, b in zip(asked, here)]
    parts = PartLayout(words, flagged, at_once.sizes)
    source = late.index.new_zeros(parts.length)
    put(source, parts.first_rows, at_once.sizes, have.numbers.index_select(0, at_once.index))
    message = read(source) if at_once.index.numel() else transport.rows(parts.length)
    flags, starts = message.view(torch.uint8).view(-1), [4 * word for word in parts.words()]
    put(flags, starts, asked, have.late.view(torch.uint8))
    if have.needed is not None:
        put(flags, [start + size for start, size in zip(starts, asked)], here, have.needed.view(torch.uint8))

    slots = PartLayout(words, [a + b for a, b in zip(asks, mine)], asks)
    rows = transport.rows(slots.length)
    transport.exchange(rows, message, parts.sizes, slots.sizes)
    transport.count("ids", 1, flagged)
    transport.count("non_colliding", 4 * words, at_once.sizes)

    flags, starts = rows.view(torch.uint8).view(-1), [4 * word for word in slots.words()]
    is_late = take(flags, starts, asks).view(torch.bool)
    waits, others = RowSubset.split(is_late, asks)
    # a slot has space for all rows of its sender: late rows follow the others
    ends = [first + count for first, count in zip(slots.first_rows, others.sizes)]
    late_places = ranges(ends, waits.sizes, transport.device)
    places = waits.index.new_empty(sum(asks), dtype=torch.int32)
    places[waits.index] = late_places.int()
    places[others.index] = ranges(slots.first_rows, others.sizes, transport.device).int()
    needed = None
    if have.needed is not None:
        needed = take(flags, [start + size for start, size in zip(starts, asks)], mine).view(torch.bool)
    return FlaggedRows(rows, places, late_places, is_late, waits, late, needed)


class DirectRoute:
    """Sends ids and gradients directly to the owners, and rows and flags back, in the form of :class:`.WireFormat`.

    :class:`.HotRoute` has the same methods. Methods that send anything are collective.
    """

    hot_list: HotList | None = None

    def __init__(self, transport: RowTransport, local: LocalRows, no_rows: RowRequest) -> None:
        self._transport, self._local, self.no_rows = transport, local, no_rows
        self.exchange_ids = IdExchange(transport, no_rows.slots.shape[1]).exchange
        # the incoming rows if no rank requests any, and an empty part of the rows of a batch
        self.no_incoming = IncomingRows(no_rows.rows.long(), no_rows.sizes, no_rows.slots)
        self.nothing_given = self.all_of(RequestedRows(no_rows, self.no_incoming))

    def give_rows(self, requested: RequestedRows) -> Tensor:
        """Send the values of all incoming rows to their requesting ranks; return those requested, shape ``[rows, words]``."""
        incoming = requested.incoming
        return self._transport.exchange_rows(self._local.read(incoming.rows), incoming.sizes, requested.request.sizes)

    def give_others(
        self, following: RequestedRows, current: RequestedRows, awaited: Tensor, urgent: Tensor | None
    ) -> tuple[BatchRows, tuple[SomeRows, SomeRows] | None]:
        """Do exchange B: send which rows are updated before they are read, and the values of all others.

        ``awaited`` marks the incoming rows of ``following`` that are updated before it. ``urgent`` marks the incoming rows of
        ``current`` that ``following`` needs, and is None if no update follows. Return the rows of ``following``, and the urgent
        and the patient rows of ``current``, or None if no update follows.
        """
        request, mine, here = following.request, current.request.sizes, current.incoming.sizes
        have = RowsToFlag(following.incoming.rows, awaited, following.incoming.sizes, urgent, here)
        came = exchange_flagged(self._transport, self._local.read, have, request.sizes, mine)
        places = came.places.index_select(0, request.inverse)
        rows = BatchRows(came.rows, places, SomeRows(came.waits, came.waiting), came.late_places)
        if came.needed is None or urgent is None:
            return rows, None
        first, others = RowSubset.split(came.needed, mine)
        first_here, others_here = RowSubset.split(urgent, here)
        return rows, (SomeRows(first, first_here), SomeRows(others, others_here))

    def give_last(self, incoming: IncomingRows, rows: BatchRows) -> None:
        """Do exchange D: send the values of the awaited rows after their update, and complete ``rows``."""
        awaited = rows.awaited
        assert awaited is not None
        values = self._local.read(incoming.rows.index_select(0, awaited.incoming.index))
        last = self._transport.exchange_rows(values, awaited.incoming.sizes, awaited.requested.sizes)
        rows.values[rows.late_places] = last

    def take_gradients(self, gradients: Tensor, requested: RequestedRows) -> Tensor:
        """Send the gradients of all requested rows to their owners; return those of the incoming rows."""
        return self._transport.exchange_rows(gradients, requested.request.sizes, requested.incoming.sizes)

    def all_of(self, requested: RequestedRows) -> SomeRows:
        request, incoming, device = requested.request, requested.incoming, self._transport.device
        return SomeRows(RowSubset.all_of(request.sizes, device), RowSubset.all_of(incoming.sizes, device))

    def withheld(self, given: SomeRows) -> SomeRows:
        """Return ``given`` for a message in which this rank sends a request in place of its gradients."""
        return replace(given, requested=self.nothing_given.requested)

    def count_gradients(self, kind: str, given: SomeRows) -> None:
        self._transport.count(kind, 4 * self._transport.wire.gradients.words, given.requested.sizes)
