"""Exchange B over one hop: which rows come late, and the values of all others, from those who have them to those who asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_freescale.embeddings.overlap.messages import PartLayout, put, ranges, take
from lightning_freescale.embeddings.overlap.row_requests import RowSubset
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
