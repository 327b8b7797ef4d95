"""The two-level exchange: a row that several ranks of a node need crosses the network once, and so does its gradient.

All nodes have the same number of ranks, numbered node by node. Rank ``l`` of a node is its proxy for the owners that are rank
``l`` of their nodes. There are two hops: near, among the ranks of a node, and far, among the ranks with one ``l``::

    ids, gradients    a rank  -- near -->  the proxy in its node: each row once, gradients summed  -- far -->  the owner
    rows, flags       a rank  <-- near --  the proxy, to all ranks with a request                  <-- far --  the owner

So an owner receives requests from the proxies of all nodes. Every rank sends its head to all proxies of its node. A proxy's
message contains the heads of its whole node, so after both hops all ranks have the heads of all ranks.
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
from lightning_freescale.embeddings.overlap.hot_rows import Nodes
from lightning_freescale.embeddings.overlap.id_exchange import Head, IdExchange, IdsToSend, LookedUp, NextIds
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.routes import RowsToFlag, exchange_flagged
from lightning_freescale.embeddings.overlap.row_requests import Forwarded, IncomingRows, RowRequest, RowSubset
from lightning_freescale.embeddings.overlap.transport import RowTransport, new_group


def nodes_with_proxies(exchange: str, nodes: Nodes | None, dedup: bool) -> Nodes | None:
    """Return the nodes for ``"two_level"`` and None for ``"flat"``. Raise a ValueError if the arguments do not fit together."""
    if exchange not in ("flat", "two_level"):
        raise ValueError(f"exchange={exchange!r} is unknown. Pass 'flat' or 'two_level'.")
    if exchange == "flat":
        return None
    if nodes is None:
        raise ValueError("exchange='two_level' does not work with ranks_per_node=None. Pass the number of ranks of every node.")
    if not dedup:
        raise ValueError(
            "exchange='two_level' sums gradients within a node first, so it cannot be bitwise equal to TorchRec as dedup=False "
            "promises. Leave out one of the two."
        )
    if nodes.count == 1 or nodes.each == 1:
        raise ValueError(
            f"exchange='two_level' with {nodes.ranks} ranks and ranks_per_node={nodes.each} saves nothing. It requires several "
            "nodes with several ranks each. Use exchange='flat'."
        )
    return nodes


@dataclass(frozen=True)
class ProxyGroups:
    """Process groups of one collection only."""

    near: Any  # the ranks of this node
    far: Any  # the ranks with the same index in their nodes

    @classmethod
    def connect(cls, nodes: Nodes, path: str, transport: str, timeout: timedelta | None, take_turns: bool) -> ProxyGroups:
        """Create the groups of all nodes in the same order on every rank, and connect this rank's. Collective."""
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
                    f"exchange='two_level' does not support several embedding collections, {path!r} among them, if NCCL "
                    "moves the rows. Collections cannot take turns within some of the ranks. Use exchange='flat' "
                    "or transport='host'."
                )
        return cls(*mine)


_WORDS = len(Head._fields)


class ProxyRoute:
    """Implements the methods of :class:`.DirectRoute` with the hops ``near`` and ``far``."""

    def __init__(self, near: RowTransport, far: RowTransport, local: LocalRows, no_rows: RowRequest) -> None:
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
        """Do :meth:`IdExchange.exchange` over both hops.

        If only some ranks of a node request other rows, the proxies repeat the requests of the other ranks: an owner knows the
        rows of a node, not of its ranks.
        """
        assert given.forwarded is not None
        near_given = SomeRows(given.requested, given.forwarded.asked)
        heads, new, came = self._near_ids.exchange(sent, updates, lookup, near_given, gradients)
        words = torch.from_numpy(np.array(heads, np.int64).reshape(-1))
        forwarded = self._forwarded(self._asked(heads, new, sent.before), words)
        requested, sums = self._nothing_requested, self._far.rows(0)
        if [head.gradients for head in heads] == near_given.incoming.sizes:  # otherwise a rank sends a request in their place
            requested, sums = given.forwarded.request_rows, self._sum(given.forwarded, came)
        far_given = SomeRows(requested, given.incoming)
        request = IdsToSend(NextIds.ANNOUNCED, forwarded.request)
        _, incoming, came = self._far_ids.exchange(request, updates, LookedUp.PREDICTED, far_given, sums)
        every = [Head(*each) for each in incoming.slots.view(-1, _WORDS).tolist()]
        return every, replace(incoming, slots=self._no_slots, forwarded=forwarded), came

    def serve_anew(
        self, current: RequestedRows, request: RowRequest, updates: bool, heads: Sequence[Head], asks: Sequence[bool]
    ) -> tuple[IncomingRows, Tensor]:
        """Serve the nodes of the ranks marked in ``asks``. Their other ranks receive their former rows again."""
        lookup = LookedUp.OTHERS if asks[self._rank] else LookedUp.PREDICTED
        sent, none = IdsToSend(NextIds.ANNOUNCED, request, before=current.incoming), self._near.rows(0)
        _, new, _ = self.exchange_ids(sent, updates, lookup, self.nothing_given, none)
        first = self._rank - self._near.rank
        if not asks[self._rank] and any(asks[first : first + self._near.ranks]):
            request = current.request
        return new, self.give_rows(RequestedRows(request, new))

    def give_rows(self, requested: RequestedRows) -> Tensor:
        request, incoming = requested.request, requested.incoming
        passing = incoming.forwarded
        assert passing is not None
        rows = self._far.exchange_rows(self._local.read(incoming.rows), incoming.sizes, passing.request.sizes)
        return self._near.exchange_rows(rows.index_select(0, passing.request.inverse), passing.asked.sizes, request.sizes)

    def give_others(
        self, following: RequestedRows, current: RequestedRows, awaited: Tensor, urgent: Tensor | None
    ) -> tuple[BatchRows, tuple[SomeRows, SomeRows] | None]:
        """Do exchange B: first from the owners to the proxies, then from the proxies to the requesting ranks."""
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
        through = requested.incoming.forwarded
        assert through is not None
        came = self._near.exchange_rows(gradients, requested.request.sizes, through.asked.sizes)
        sums = through.request.sum_per_row(came)
        return self._far.exchange_rows(sums, through.request.sizes, requested.incoming.sizes)

    def all_of(self, requested: RequestedRows) -> SomeRows:
        through = requested.incoming.forwarded
        assert through is not None
        mine, came, asked, forwarded = (
            RowSubset.all_of(each.sizes, self._near.device)
            for each in (requested.request, requested.incoming, through.asked, through.request)
        )
        return SomeRows(mine, came, ForwardedRows(asked, forwarded, through.request))

    def count_gradients(self, kind: str, given: SomeRows) -> None:
        assert given.forwarded is not None
        self._near.count(kind, 4 * self._near.dim, given.requested.sizes)
        self._far.count(kind, 4 * self._far.dim, given.forwarded.request_rows.sizes)

    def _asked(self, heads: Sequence[Head], new: IncomingRows, before: IncomingRows | None) -> IncomingRows:
        """Return the rows that this rank requests as a proxy: for each rank those of this message, or those before."""
        more = [head.lookup == LookedUp.MORE for head in heads]
        if any(more):  # they are served at once, and the message is repeated
            return self._none_asked.replaced(new, more)
        anew = [head.state != NextIds.ANNOUNCED or head.lookup == LookedUp.OTHERS for head in heads]
        if not any(anew):
            return self._none_asked
        earlier = None if before is None else before.forwarded
        return (self._none_asked if earlier is None else earlier.asked).replaced(new, anew)

    def _forwarded(self, asked: IncomingRows, heads: Tensor) -> Forwarded:
        return Forwarded(self._far.rank, asked, RowRequest.of_proxy(asked, self._starts, self._key_bits, heads))

    def _sum(self, given: ForwardedRows, gradients: Tensor) -> Tensor:
        """Sum the gradients of the node's ranks in their order; return one per row of the whole request."""
        sums = torch.zeros(len(given.request.rows), self._far.dim, device=self._far.device)
        places = given.request.inverse.index_select(0, given.asked.index)
        for place, part in zip(places.split(given.asked.sizes), gradients.split(given.asked.sizes)):
            sums[place] += part  # a rank has each row once
        return sums
