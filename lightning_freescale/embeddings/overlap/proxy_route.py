"""The two-level exchange: a row that several ranks of a node need crosses the network once, and so does its gradient.

All nodes have equally many ranks, one node's after the other's. Rank ``l`` of a node is its proxy for the owners that are rank
``l`` of their nodes. There are two hops: near, among the ranks of a node, and far, among the ranks with one ``l``::

    ids, gradients    a rank  -- near -->  the proxy in its node: each row once, gradients added up  -- far -->  the owner
    rows, flags       a rank  <-- near --  the proxy, to all that asked                              <-- far --  the owner

So to an owner the requesting ranks are the proxies of all nodes. Every rank sends its head to all proxies of its node, and a
proxy's message contains the heads of its whole node: after both hops all ranks have the heads of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.embeddings.overlap.batch_state import BatchRows, ForwardedRows, PassingRows, RequestedRows, SomeRows
from lightning_freescale.embeddings.overlap.id_exchange import Head, IdExchange, IdsToSend, LookedUp, NextIds
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.routes import RowsToFlag, exchange_flagged
from lightning_freescale.embeddings.overlap.row_requests import Forwarded, IncomingRows, RowRequest, RowSubset
from lightning_freescale.embeddings.overlap.transport import Transport, new_group


@dataclass(frozen=True)
class Nodes:
    """Nodes of equally many ranks, one node's after the other's.

    Attributes:
        ranks: of all nodes.
        each: ranks of a node.
    """

    ranks: int
    each: int

    def __post_init__(self) -> None:
        if self.each < 1 or self.ranks % self.each:
            raise ValueError(
                f"ranks_per_node={self.each!r} does not divide {self.ranks} ranks: pass how many ranks every node has"
            )

    @property
    def count(self) -> int:
        """Number of nodes."""
        return self.ranks // self.each

    def others(self, rank: int) -> list[bool]:
        """Return which ranks are on another node than ``rank``; nothing if there is one node."""
        return [] if self.count == 1 else [other // self.each != rank // self.each for other in range(self.ranks)]


def nodes_with_proxies(exchange: str, nodes: Nodes | None, dedup: bool) -> Nodes | None:
    """Return the nodes if ``exchange`` is ``"two_level"``, or None if it is ``"flat"``.

    Raises:
        ValueError: the arguments of the engine do not fit each other, or there is nothing to gain by proxies.
    """
    if exchange not in ("flat", "two_level"):
        raise ValueError(f"exchange={exchange!r}: pass 'flat' or 'two_level'")
    if exchange == "flat":
        return None
    if nodes is None:
        raise ValueError("exchange='two_level', ranks_per_node=None: pass how many ranks every node has")
    if not dedup:
        raise ValueError(
            "exchange='two_level', dedup=False: gradients are added up within a node first, so no sum is bitwise that of plain "
            "TorchRec. Leave one of the two out"
        )
    if nodes.count == 1 or nodes.each == 1:
        raise ValueError(
            f"exchange='two_level' with {nodes.ranks} ranks and ranks_per_node={nodes.each}: it needs several nodes with "
            "several ranks each. Use exchange='flat'"
        )
    return nodes


@dataclass(frozen=True)
class ProxyGroups:
    """Process groups of one collection alone.

    Attributes:
        near: of the ranks of this node.
        far: of the ranks with this one's place in their nodes.
    """

    near: Any
    far: Any

    @classmethod
    def connect(cls, nodes: Nodes, path: str, transport: str, timeout: timedelta | None, take_turns: bool) -> ProxyGroups:
        """Make the groups of all nodes, on every rank in the same order, and connect this rank's. Collective.

        Raises:
            ValueError: several collections ``take_turns``, which they cannot do among some of the ranks.
        """
        ranks, mine = range(nodes.ranks), []
        near = [list(ranks[node * nodes.each : (node + 1) * nodes.each]) for node in range(nodes.count)]
        far = [list(ranks[place :: nodes.each]) for place in range(nodes.each)]
        for kind, sets in (("near", near), ("far", far)):
            for each in sets:
                group = new_group(f"{path} ({kind})", transport, timeout, each)
                if dist.get_rank() in each:
                    mine.append(group)
        for group in mine:
            group.connect()
            if group.moves_by_nccl and take_turns:
                raise ValueError(
                    f"exchange='two_level' with several embedding collections, {path!r} among them, whose rows NCCL moves: its "
                    "exchanges cannot take turns among some of the ranks. Use exchange='flat', or transport='host'"
                )
        return cls(*mine)


_WORDS = len(Head._fields)


class ProxyRoute:
    """Has the methods of :class:`.DirectRoute`, over the hops ``near`` and ``far``."""

    def __init__(self, near: Transport, far: Transport, local: LocalRows, no_rows: RowRequest) -> None:
        self._near, self._far, self._local, self.no_rows = near, far, local, no_rows
        self._near_ids, self._far_ids = IdExchange(near, far.ranks), IdExchange(far, near.ranks * _WORDS)
        layout, first = local.layout, near.rank * far.ranks
        self._rank = far.rank * near.ranks + near.rank
        self._starts = layout.starts[first : first + far.ranks + 1] - layout.starts[first]
        self._key_bits = layout.key_bits
        self._no_slots = torch.zeros(far.ranks, 0, dtype=torch.int64)
        rows = no_rows.rows.long()
        self._none_asked = IncomingRows(rows, no_rows.sizes, no_rows.slots)
        nothing = self._forwarded(self._none_asked, torch.zeros(near.ranks * _WORDS, dtype=torch.int64))
        self.no_incoming = IncomingRows(rows, nothing.request.sizes, self._no_slots, nothing)
        self.nothing_given = self.all_of(RequestedRows(no_rows, self.no_incoming))
        self._nothing_requested = RowSubset.all_of(nothing.request.sizes, near.device)

    def exchange_ids(
        self,
        sent: IdsToSend,
        updates: bool,
        lookup: LookedUp,
        given: SomeRows,
        gradients: Tensor,
        other_ids: Sequence[int] | None = None,
    ) -> tuple[list[Head], IncomingRows, Tensor]:
        """Do as :meth:`IdExchange.exchange`, over both hops.

        Where only some ranks of a node ask anew, its proxies ask again for what its others had asked for, too: an owner knows
        the rows of a node, not of its ranks.
        """
        assert given.forwarded is not None
        near_given = SomeRows(given.requested, given.forwarded.asked)
        told, new, came = self._near_ids.exchange(sent, updates, lookup, near_given, gradients)
        forwarded = self._forwarded(self._asked(told, new, sent.before), torch.from_numpy(np.array(told, np.int64).reshape(-1)))
        requested, sums = self._nothing_requested, self._far.rows(0)
        if [head.gradients for head in told] == near_given.incoming.sizes:  # else a rank asks for something instead
            requested, sums = given.forwarded.request_rows, self._sum(given.forwarded, came)
        far_given = SomeRows(requested, given.incoming)
        request = IdsToSend(NextIds.ANNOUNCED, forwarded.request)
        _, incoming, came = self._far_ids.exchange(request, updates, LookedUp.PREDICTED, far_given, sums)
        words = incoming.slots.view(-1, _WORDS).tolist()
        return [Head(*each) for each in words], replace(incoming, slots=self._no_slots, forwarded=forwarded), came

    def serve_anew(
        self, current: RequestedRows, request: RowRequest, updates: bool, heads: Sequence[Head], asks: Sequence[bool]
    ) -> tuple[IncomingRows, Tensor]:
        """Serve the nodes of the ranks marked in ``asks``; the others of these nodes get what they have asked for before."""
        lookup = LookedUp.OTHERS if asks[self._rank] else LookedUp.PREDICTED
        sent, none = IdsToSend(NextIds.ANNOUNCED, request, before=current.incoming), self._near.rows(0)
        _, new, _ = self.exchange_ids(sent, updates, lookup, self.nothing_given, none)
        first = self._rank - self._near.rank
        if not asks[self._rank] and any(asks[first : first + self._near.ranks]):
            request = current.request
        return new, self.give_rows(RequestedRows(request, new))

    def give_rows(self, requested: RequestedRows) -> Tensor:
        """Give values to the ranks that asked."""
        request, incoming = requested.request, requested.incoming
        passing = incoming.forwarded
        assert passing is not None
        rows = self._far.exchange_rows(self._local.read(incoming.rows), incoming.sizes, passing.request.sizes)
        return self._near.exchange_rows(rows.index_select(0, passing.request.inverse), passing.asked.sizes, request.sizes)

    def give_others(
        self, following: RequestedRows, current: RequestedRows, awaited: Tensor, urgent: Tensor | None
    ) -> tuple[BatchRows, tuple[SomeRows, SomeRows] | None]:
        """Do exchange B: first from the owners to the proxies, then from these to the ranks that asked."""
        next_ones, these = following.incoming.forwarded, current.incoming.forwarded
        assert next_ones is not None
        assert these is not None
        here = current.incoming.sizes
        have = RowsToFlag(following.incoming.rows, awaited, following.incoming.sizes, urgent, here)
        far = exchange_flagged(self._far, self._local.read, have, next_ones.request.sizes, these.request.sizes)
        places = far.places.index_select(0, next_ones.request.inverse)
        late = far.late.index_select(0, next_ones.request.inverse)
        needed = None if far.needed is None else far.needed.index_select(0, these.request.inverse)
        have = RowsToFlag(places, late, next_ones.asked.sizes, needed, these.asked.sizes)
        read = lambda numbers: far.rows.index_select(0, numbers)  # noqa: E731
        near = exchange_flagged(self._near, read, have, following.request.sizes, current.request.sizes)

        through = SomeRows(near.waits, far.waiting, ForwardedRows(near.waiting, far.waits, next_ones.request))
        passing = PassingRows(far.rows, places, far.late_places)
        mine = near.places.index_select(0, following.request.inverse)
        rows = BatchRows(near.rows, mine, through, near.late_places, passing)
        if far.needed is None or near.needed is None or needed is None or urgent is None:
            return rows, None
        masks = (
            (near.needed, current.request.sizes),
            (urgent, here),
            (needed, these.asked.sizes),
            (far.needed, these.request.sizes),
        )
        first, others = (
            SomeRows(requested, incoming, ForwardedRows(asked, request_rows, these.request))
            for requested, incoming, asked, request_rows in zip(*(RowSubset.split(*each) for each in masks))
        )
        return rows, (first, others)

    def give_last(self, incoming: IncomingRows, rows: BatchRows) -> None:
        """Do exchange D."""
        awaited, passing = rows.awaited, rows.passing
        assert awaited is not None
        assert awaited.forwarded is not None
        assert passing is not None
        through = awaited.forwarded
        values = self._local.read(incoming.rows.index_select(0, awaited.incoming.index))
        last = self._far.exchange_rows(values, awaited.incoming.sizes, through.request_rows.sizes)
        passing.rows[passing.late_places] = last
        values = passing.rows.index_select(0, passing.places.index_select(0, through.asked.index))
        rows.values[rows.late_places] = self._near.exchange_rows(values, through.asked.sizes, awaited.requested.sizes)

    def take_gradients(self, gradients: Tensor, requested: RequestedRows) -> Tensor:
        """Bring gradients to their owners."""
        through = requested.incoming.forwarded
        assert through is not None
        came = self._near.exchange_rows(gradients, requested.request.sizes, through.asked.sizes)
        sums = through.request.sum_per_row(came)
        return self._far.exchange_rows(sums, through.request.sizes, requested.incoming.sizes)

    def all_of(self, requested: RequestedRows) -> SomeRows:
        """Return all rows of a batch."""
        through = requested.incoming.forwarded
        assert through is not None
        mine, came, asked, forwarded = (
            RowSubset.all_of(each.sizes, self._near.device)
            for each in (requested.request, requested.incoming, through.asked, through.request)
        )
        return SomeRows(mine, came, ForwardedRows(asked, forwarded, through.request))

    def count_gradients(self, kind: str, given: SomeRows) -> None:
        """Count the bytes of gradients of some rows."""
        assert given.forwarded is not None
        self._near.count(kind, 4 * self._near.dim, given.requested.sizes)
        self._far.count(kind, 4 * self._far.dim, given.forwarded.request_rows.sizes)

    def _asked(self, told: Sequence[Head], new: IncomingRows, before: IncomingRows | None) -> IncomingRows:
        """Return the rows that this rank, as a proxy, asks for: of a rank those of this message, or else those before."""
        more = [head.lookup == LookedUp.MORE for head in told]
        if any(more):  # they are served at once, and the message comes again
            return self._none_asked.replaced(new, more)
        anew = [head.state != NextIds.ANNOUNCED or head.lookup == LookedUp.OTHERS for head in told]
        if not any(anew):
            return self._none_asked
        earlier = None if before is None else before.forwarded
        return (self._none_asked if earlier is None else earlier.asked).replaced(new, anew)

    def _forwarded(self, asked: IncomingRows, told: Tensor) -> Forwarded:
        return Forwarded(self._far.rank, asked, RowRequest.of_proxy(asked, self._starts, self._key_bits, told))

    def _sum(self, given: ForwardedRows, gradients: Tensor) -> Tensor:
        """Add up what the node's ranks have sent, in their order; return rows as of the whole request."""
        sums = torch.zeros(len(given.request.rows), self._far.dim, device=self._far.device)
        places = given.request.inverse.index_select(0, given.asked.index)
        for place, part in zip(places.split(given.asked.sizes), gradients.split(given.asked.sizes)):
            sums[place] += part  # a rank has each row once
        return sums
