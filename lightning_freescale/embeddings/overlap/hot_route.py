"""The route of hot rows: a row that several ranks of a node need crosses the network once, and so does its gradient.

All nodes have the same number of ranks, numbered node by node. Rank ``l`` of a node is its proxy for the owners that are rank
``l`` of other nodes. A row is *hot* for a rank if it is in the published list and its owner is on another node. All other rows
are *cold*. Hot rows take two hops, near and direct, and cold rows take the direct hop only::

    ids, gradients    a rank  -- near, hot rows -->  the proxy in its node  -- direct: its own cold rows, and the hot rows
                                                                               of its node once, gradients summed -->  the owner
    rows, flags       a rank  <-- near, hot rows --  the proxy              <-- direct --                              the owner

Both kinds of rows share the message of the direct hop, so it is the message of :class:`.DirectRoute` with a merged request. An
id reaches its owner on either route. Results are therefore the same for every list, also if ranks have different lists, up to
the order of summation. With 16-bit gradients on the wire, a proxy also rounds the sum of its node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale._runtime.object_gather import gather_objects
from lightning_freescale.embeddings.overlap.batch_state import BatchRows, ForwardedRows, RequestedRows, SomeRows
from lightning_freescale.embeddings.overlap.hot_rows import (
    HotList,
    HotRowsOption,
    HotRowsRule,
    LinkCosts,
    Nodes,
    check_hot_rows,
    measure_links,
)
from lightning_freescale.embeddings.overlap.id_exchange import Head, IdExchange, IdsToSend, LookedUp, NextIds
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.routes import DirectRoute, RowsToFlag, exchange_flagged
from lightning_freescale.embeddings.overlap.row_requests import Forwarded, IncomingRows, RowRequest, RowSubset, keys_of
from lightning_freescale.embeddings.overlap.transport import RowTransport, new_group


@dataclass
class HotRouting:
    """The options of the route of hot rows, and the costs of transfers, for all collections of a module."""

    hot_rows: HotRowsOption
    every_n_steps: int
    nodes: Nodes
    links: LinkCosts | None = None  # measured by the first collection
    nccl_moves_several: bool = False  # whether NCCL moves the rows of several collections, so that "auto" uses no hot rows

    @classmethod
    def of(cls, hot_rows: HotRowsOption, every_n_steps: int, nodes: Nodes | None, dedup: bool) -> HotRouting | None:
        """Return the routing, or None if all rows are cold. Raise a ValueError if the arguments do not fit together."""
        check_hot_rows(hot_rows, every_n_steps, dedup)
        if hot_rows == 0:
            return None
        if hot_rows != "auto" and nodes is None:
            raise ValueError(f"hot_rows={hot_rows!r} requires ranks_per_node. Pass the number of ranks of every node.")
        if nodes is None or not dedup or nodes.count == 1 or nodes.each == 1:
            return None
        return cls(hot_rows, every_n_steps, nodes)

    @property
    def choice(self) -> str:
        """The choice of ``"auto"`` in a sentence; empty for other values, and before links were measured."""
        if self.nccl_moves_several:
            return (
                "hot_rows='auto': no row is hot, because NCCL moves the rows of several collections. For hot rows, pass "
                "transport='host'"
            )
        if self.links is None:
            return ""
        dearer, readers = self.links.far_s_per_byte / self.links.near_s_per_byte, self.links.fewest_readers
        chosen = "no row is hot" if readers == math.inf else f"rows with more than {readers:.3g} reading ranks per node are hot"
        return f"hot_rows='auto': a byte to another node takes {dearer:.3g} times as long as within a node, so {chosen}"

    def near_group(self, path: str, transport: str, timeout: timedelta | None, main: Any, take_turns: bool) -> Any:
        """Create and connect the group of every node. Return that of this rank, or None if it cannot be used. Collective.

        ``main`` is the group of all ranks, and ``take_turns`` tells whether there are several collections.
        """
        each, rank = self.nodes.each, dist.get_rank()
        sets = [list(range(first, first + each)) for first in range(0, self.nodes.ranks, each)]
        groups = [new_group(f"{path} (near)", transport, timeout, ranks) for ranks in sets]
        group = groups[rank // each]
        group.connect()
        # each group chooses its transport, so the ranks have to agree
        if not take_turns or not any(gather_objects(group.moves_by_nccl or main.moves_by_nccl, main)):
            return group
        dist.destroy_process_group(group)
        if self.hot_rows == "auto":
            self.nccl_moves_several = True
            return None
        raise ValueError(
            f"hot_rows={self.hot_rows!r} does not support several embedding collections, {path!r} among them, if NCCL moves "
            "the rows. Collections cannot take turns within some of the ranks. Use hot_rows=0 or transport='host'."
        )

    def route(
        self, near: RowTransport, transport: RowTransport, local: LocalRows, no_rows: RowRequest
    ) -> DirectRoute | HotRoute:
        """Return the route of a collection. Collective."""
        if self.hot_rows == "auto":
            with transport.statistics.suspended():
                self.links = self.links or measure_links(near, transport, self.nodes)
            if self.links.fewest_readers == math.inf:
                return DirectRoute(transport, local, no_rows)
        rule = HotRowsRule(self.hot_rows, self.nodes, 8 + 4 * (local.wire.rows.words + local.wire.gradients.words), self.links)
        return HotRoute(near, transport, local, no_rows, HotList(transport, local, rule, self.every_n_steps))


class HotRoute:
    """Implements the methods of :class:`.DirectRoute` with the additional hop ``near``, from the first list of hot rows on."""

    def __init__(
        self, near: RowTransport, transport: RowTransport, local: LocalRows, no_rows: RowRequest, hot_list: HotList
    ) -> None:
        self._direct = DirectRoute(transport, local, no_rows)
        self.no_rows, self.no_incoming = no_rows, self._direct.no_incoming
        self.nothing_given = self._direct.nothing_given
        self._transport, self._near, self._local, self.hot_list = transport, near, local, hot_list
        self._nodes, self._node = transport.ranks // near.ranks, transport.rank // near.ranks
        self._near_ids = IdExchange(near, self._nodes)
        none = torch.empty(0, dtype=torch.int64, device=near.device)
        self._no_near_rows = RowSubset(none, [0] * near.ranks)
        self._none_asked = IncomingRows(none, self._no_near_rows.sizes, torch.zeros(near.ranks, self._nodes, dtype=torch.int64))
        self._nothing = self._all_cold(no_rows)

    def exchange_ids(
        self,
        sent: IdsToSend,
        updates: bool,
        lookup: LookedUp,
        given: SomeRows,
        gradients: Tensor,
    ) -> tuple[list[Head], IncomingRows, Tensor]:
        through = None
        if self.hot_list.begun:
            hot, cold, slots = self._split(sent.request)
            hop = given.forwarded
            near_given = SomeRows(self._no_near_rows, self._no_near_rows) if hop is None else SomeRows(hop.hot, hop.asked)
            request = replace(self.no_rows, rows=sent.request.rows[hot.index], sizes=hot.sizes, slots=slots)
            to_proxies = replace(sent, request=request)
            heads, new, came = self._near_ids.exchange(to_proxies, updates, lookup, near_given, gradients)
            through = self._forwarded(sent, heads, new, hot, cold)
            if hop is not None and [head.gradients for head in heads] != hop.asked.sizes:
                given = self.withheld(given)  # a rank of the node sends a request in place of its gradients
            elif hop is not None and given.requested.index.numel():
                gradients = self._sum(hop.through, hop.asked, gradients, came)
            sent = replace(sent, request=through.request)
        heads, incoming, came = self._direct.exchange_ids(sent, updates, lookup, given, gradients)
        return heads, replace(incoming, forwarded=through), came

    def give_rows(self, requested: RequestedRows) -> Tensor:
        if not self.hot_list.begun:
            return self._direct.give_rows(requested)
        through = self._through(requested)
        own, asked = through.places
        came = self._direct.give_rows(RequestedRows(through.request, requested.incoming))
        rows = came.new_empty(len(through.cold) + len(through.hot.index), came.shape[1])
        rows[through.cold] = came.index_select(0, own)
        passed = came.index_select(0, asked)
        rows[through.hot.index] = self._near.exchange_rows(passed, through.asked.sizes, through.hot.sizes)
        return rows

    def give_others(
        self, following: RequestedRows, current: RequestedRows, awaited: Tensor, urgent: Tensor | None
    ) -> tuple[BatchRows, tuple[SomeRows, SomeRows] | None]:
        """Do exchange B: first from the owners, then from the proxies to the ranks of their node."""
        if not self.hot_list.begun:
            return self._direct.give_others(following, current, awaited, urgent)
        next_ones, these = self._through(following), self._through(current)
        here = current.incoming.sizes
        have = RowsToFlag(following.incoming.rows, awaited, following.incoming.sizes, urgent, here)
        far = exchange_flagged(self._transport, self._local.read, have, next_ones.request.sizes, these.request.sizes)
        own, asked = next_ones.places
        passing = far.places.index_select(0, asked)
        needed = None if far.needed is None else far.needed.index_select(0, these.places[1])
        have = RowsToFlag(passing, far.late.index_select(0, asked), next_ones.asked.sizes, needed, these.asked.sizes)
        near = exchange_flagged(self._near, partial(far.rows.index_select, 0), have, next_ones.hot.sizes, these.hot.sizes)
        first_here, last_here = self._own_node(following.request)
        elsewhere = (next_ones.cold < first_here) | (next_ones.cold >= last_here)
        hot = sum(near.waits.sizes)
        all_colliding = hot + int((far.late.index_select(0, own) & elsewhere).sum())  # on CUDA the host waits here
        self._near.statistics.count(hot_colliding_rows=hot, far_colliding_rows=all_colliding)

        of_rows = far.places.new_empty(len(following.request.rows))
        of_rows[next_ones.cold] = far.places.index_select(0, own)
        of_rows[next_ones.hot.index] = near.places + len(far.rows)
        rows = BatchRows(
            torch.cat([far.rows, near.rows]),
            of_rows.index_select(0, following.request.inverse),
            SomeRows(far.waits, far.waiting, ForwardedRows(near.waits, near.waiting, next_ones)),
            far.late_places,
            (passing, near.late_places + len(far.rows)),
        )
        if far.needed is None or near.needed is None or needed is None or urgent is None:
            return rows, None
        masks = (
            (far.needed, these.request.sizes),
            (urgent, here),
            (near.needed, these.hot.sizes),
            (needed, these.asked.sizes),
        )
        of_hot = these.hot.index
        first, others = (
            SomeRows(requested, incoming, ForwardedRows(RowSubset(of_hot[hot.index], hot.sizes), asked, these))
            for requested, incoming, hot, asked in zip(*(RowSubset.split(*each) for each in masks))
        )
        return rows, (first, others)

    def give_last(self, incoming: IncomingRows, rows: BatchRows) -> None:
        self._direct.give_last(incoming, rows)
        awaited, passing = rows.awaited, rows.passing
        if passing is not None and awaited is not None and awaited.forwarded is not None:
            hop, (places, late_places) = awaited.forwarded, passing
            values = rows.values.index_select(0, places.index_select(0, hop.asked.index))
            rows.values[late_places] = self._near.exchange_rows(values, hop.asked.sizes, hop.hot.sizes)

    def take_gradients(self, gradients: Tensor, requested: RequestedRows) -> Tensor:
        if not self.hot_list.begun:
            return self._direct.take_gradients(gradients, requested)
        through = self._through(requested)
        asked = RowSubset.all_of(through.asked.sizes, self._near.device)
        sent = gradients.index_select(0, through.hot.index)
        came = self._near.exchange_rows(sent, through.hot.sizes, through.asked.sizes)
        sums = self._sum(through, asked, gradients, came)
        return self._direct.take_gradients(sums, RequestedRows(through.request, requested.incoming))

    def all_of(self, requested: RequestedRows) -> SomeRows:
        through = requested.incoming.forwarded
        if through is None:
            return self._direct.all_of(requested)
        every = self._direct.all_of(RequestedRows(through.request, requested.incoming))
        asked = RowSubset.all_of(through.asked.sizes, self._near.device)
        return replace(every, forwarded=ForwardedRows(through.hot, asked, through))

    def withheld(self, given: SomeRows) -> SomeRows:
        nothing, hop = self._direct.withheld(given), given.forwarded
        return nothing if hop is None else replace(nothing, forwarded=replace(hop, hot=self._no_near_rows))

    def count_gradients(self, kind: str, given: SomeRows) -> None:
        self._direct.count_gradients(kind, given)
        if given.forwarded is not None:
            self._near.count(kind, 4 * self._near.wire.gradients.words, given.forwarded.hot.sizes)

    def _own_node(self, request: RowRequest) -> tuple[int, int]:
        """Return the index of the first row whose owner is on this node, and the one behind the last."""
        first = self._node * self._near.ranks
        before = sum(request.sizes[:first])
        return before, before + sum(request.sizes[first : first + self._near.ranks])

    def _through(self, requested: RequestedRows) -> Forwarded:
        # a batch from before the first list has no hot rows
        return requested.incoming.forwarded or self._all_cold(requested.request)

    def _all_cold(self, request: RowRequest) -> Forwarded:
        every = torch.arange(len(request.rows), device=request.rows.device)
        return Forwarded(self._node, self._no_near_rows, every, self._none_asked, replace(request, inverse=every.int()))

    def _split(self, request: RowRequest) -> tuple[RowSubset, Tensor, Tensor]:
        """Return the hot rows by proxy, the indices of the cold rows, and the number of hot rows by proxy and node."""
        each, layout = self._near.ranks, self._local.layout
        is_hot = self.hot_list.contain(keys_of(request.rows, request.sizes, layout))
        first, last = self._own_node(request)
        is_hot[first:last] = False
        hot, cold = RowSubset.split(is_hot, request.sizes)
        by_owner, sizes = hot.index.split(hot.sizes), torch.tensor(hot.sizes).view(-1, each).T
        by_proxy = torch.cat([by_owner[owner] for proxy in range(each) for owner in range(proxy, layout.ranks, each)])
        return RowSubset(by_proxy, sizes.sum(dim=1).tolist()), cold.index, sizes

    def _forwarded(self, sent: IdsToSend, heads: Sequence[Head], new: IncomingRows, hot: RowSubset, cold: Tensor) -> Forwarded:
        """Return the rows that this rank requests from the owners: for each rank those of this message, or those before."""
        anew, before, request = [head.lookup == LookedUp.MORE for head in heads], self._nothing, self.no_rows
        if not any(anew):  # otherwise they are served at once, and the message is repeated
            anew = [head.state != NextIds.ANNOUNCED or head.lookup == LookedUp.OTHERS for head in heads]
            if not any(anew):
                return before
            if sent.before is not None:
                before, request = self._through(sent.before), sent.before.request
        if anew[self._near.rank]:
            request = sent.request
        else:
            hot, cold = before.hot, before.cold
        asked, layout = before.asked.replaced(new, anew), self._local.layout
        first_keys = layout.starts[self._near.rank : -1 : self._near.ranks].repeat(self._near.ranks)
        counts = asked.slots.flatten().to(layout.device)
        asked_keys = asked.rows + torch.repeat_interleave(first_keys, counts, output_size=asked.rows.numel())
        own_keys = keys_of(request.rows, request.sizes, layout)[cold]
        merged = RowRequest.of_keys(torch.cat([own_keys, asked_keys]), layout)
        return Forwarded(self._node, hot, cold, asked, merged)

    def _sum(self, through: Forwarded, asked: RowSubset, gradients: Tensor, came: Tensor) -> Tensor:
        """Sum the gradients of this rank and those of the node's ranks in their order; return one per requested row."""
        codec, (own, of_asked) = self._near.wire.gradients, through.places
        sums = torch.zeros(len(through.request.rows), codec.dim, device=self._near.device)
        sums[own] = codec.decode(gradients.index_select(0, through.cold))
        places = of_asked.index_select(0, asked.index)
        for place, part in zip(places.split(asked.sizes), codec.decode(came).split(asked.sizes)):
            sums[place] += part  # a rank has each row once
        return codec.encode(sums)
