"""The rows that pass through proxies, chosen by how often the ranks of a node request them, and the list of these rows.

A row has *reads*, the number of ranks that requested it, and *visits*, the number of nodes with a rank that did, both summed
over batches. So a node that requests the row at all has ``reads / visits`` ranks that do. Without proxies the row crosses the
network once per read, and with proxies once per visit, plus a near transfer per read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.report import Heat
from lightning_freescale.embeddings.overlap.row_requests import IncomingRows, RowRequest, keys_of
from lightning_freescale.embeddings.overlap.transport import RowTransport

HotRowsOption: TypeAlias = int | float | Literal["auto"]
"""See :class:`.OverlapEngine`."""

_FEWEST_READERS = 1.125  # per node: with fewer, many rows take two hops for the last few percent of the saving
_FEWEST_EXTRA = 2  # reads beyond the visits: fewer tell too little of a row
_WORTH = 8  # near latencies that a list has to save in a step, because the near hop adds messages
_BINS, _PER_OCTAVE, _FIRST_OCTAVE = 44, 2, -2  # of the histogram of reads


@dataclass(frozen=True)
class Nodes:
    """Nodes with the same number of ranks, numbered node by node."""

    ranks: int  # ranks of all nodes
    each: int  # ranks per node

    def __post_init__(self) -> None:
        if self.each < 1 or self.ranks % self.each:
            raise ValueError(
                f"ranks_per_node={self.each!r} does not divide {self.ranks} ranks. Pass the number of ranks of every node."
            )

    @property
    def count(self) -> int:
        return self.ranks // self.each

    def others(self, rank: int) -> list[bool]:
        """Return which ranks are on another node than ``rank``; an empty list if there is one node."""
        return [] if self.count == 1 else [other // self.each != rank // self.each for other in range(self.ranks)]

    def alike(self, rank: int) -> list[bool]:
        """Return which ranks have the index of ``rank`` on another node: it is the proxy of its node for these owners."""
        return [other % self.each == rank % self.each and other != rank for other in range(self.ranks)]


class AccessCounts:
    """The requests for the rows of one owner, each weighted by half per :meth:`decay` since. One thread calls the methods."""

    def __init__(self, rows: int, nodes: Nodes, device: torch.device) -> None:
        # the numbers of ranks that requested each row, and of nodes with such a rank: float32 of shape [rows]
        self.reads, self.visits = torch.zeros(2, rows, device=device)
        self.batches, self._nodes = 0.0, nodes

    def count(self, rows: Tensor, sizes: Sequence[int]) -> None:
        """Count the requests of a batch: ``sizes[rank]`` rows of each rank in order, each row once per rank."""
        self.batches += 1
        self.add_reads(rows, torch.ones_like(rows, dtype=torch.float32))
        each = self._nodes.each
        for of_node in rows.split([sum(sizes[first : first + each]) for first in range(0, self._nodes.ranks, each)]):
            if len(of_node):
                self.visits[of_node] = self.visits[of_node] + 1  # if several ranks request a row, all write the same number

    def add_reads(self, rows: Tensor, extra: Tensor) -> None:
        """Add the ``extra`` ranks (float32) for which proxies requested rows that :meth:`count` saw as one rank's."""
        self.reads.index_put_((rows,), extra, accumulate=True)  # index_add_ is not deterministic on CUDA

    def decay(self) -> None:
        self.batches /= 2
        self.reads *= 0.5
        self.visits *= 0.5


@dataclass(frozen=True)
class LinkCosts:
    """The seconds that a rank needs to send while all ranks send."""

    near_s_per_byte: float  # within the node
    far_s_per_byte: float  # to other nodes
    near_latency_s: float  # of an exchange of nearly nothing within the node

    @property
    def fewest_readers(self) -> float:
        """The number of readers per node above which the proxy pays off for a row; infinite if it never does.

        With m readers, the proxy saves m - 1 far transfers and adds m near ones.
        """
        far, near = self.far_s_per_byte, self.near_s_per_byte
        return max(_FEWEST_READERS, far / (far - near)) if far > near else math.inf


def check_hot_rows(hot_rows: Any, every_n_steps: Any = 1, dedup: bool = True) -> None:
    """Raise a ValueError for values that the options do not allow."""
    number = isinstance(hot_rows, (int, float)) and not isinstance(hot_rows, bool)
    if hot_rows != "auto" and not (number and (hot_rows >= 0 if isinstance(hot_rows, int) else 0 < hot_rows <= 1)):
        raise ValueError(
            f"hot_rows={hot_rows!r} is not allowed. Pass 'auto'; an int >= 0, the number of hot rows; or a float > 0 and <= 1, "
            "the share of a node's ranks that request a hot row. Pass 0 to send all rows directly."
        )
    if not isinstance(every_n_steps, int) or every_n_steps < 1:
        raise ValueError(f"rerank_every_n_steps={every_n_steps!r} is not allowed. Pass an int >= 1.")
    if hot_rows not in ("auto", 0) and not dedup:
        raise ValueError(
            f"hot_rows={hot_rows!r} sums gradients within a node first, so results cannot be bitwise those of TorchRec as "
            "dedup=False promises. Pass hot_rows=0 or dedup=True."
        )


@dataclass(frozen=True)
class HotRowsRule:
    """The choice of hot rows. The option has a value that :func:`check_hot_rows` allows, but not 0."""

    hot_rows: str | int | float
    nodes: Nodes
    row_bytes: int  # sent per request of a row: its number, its values, and the gradient back
    costs: LinkCosts | None = None  # required for "auto"

    def candidates(self, counts: AccessCounts) -> Tensor:
        """Return the rows of this owner that are hot: sorted, int64. Several ranks of a node have to request them."""
        reads, visits = counts.reads, counts.visits
        if isinstance(self.hot_rows, int):
            gains = reads - visits
            best = gains.topk(min(-(-self.hot_rows // self.nodes.ranks), len(gains)))
            return best.indices[best.values > 0].sort().values
        if isinstance(self.hot_rows, float):
            # a row that is not requested any more keeps its share, but not its visits
            return ((reads >= self.hot_rows * self.nodes.each * visits) & (visits >= 1)).nonzero().squeeze(1)
        assert self.costs is not None
        return ((reads > self.costs.fewest_readers * visits) & (reads - visits >= _FEWEST_EXTRA)).nonzero().squeeze(1)

    def numbers(self, counts: AccessCounts, rows: Tensor) -> np.ndarray:
        """Return what :meth:`choose` needs of every owner, for :meth:`.RowTransport.exchange_numbers`.

        The numbers are the length of the list ``rows``, and as bits of float32: its saving, and a histogram of all accesses.
        """
        read = counts.reads[counts.reads >= 2.0**_FIRST_OCTAVE]  # others are nearly forgotten
        bins = (torch.log2(read) * _PER_OCTAVE).floor().long().sub_(_FIRST_OCTAVE * _PER_OCTAVE).clamp_(max=_BINS - 1)
        histogram = torch.zeros(2, _BINS, dtype=torch.float64, device=read.device)
        for row, values in zip(histogram, (torch.ones_like(read), read)):
            row.index_put_((bins,), values.double(), accumulate=True)
        sums = torch.stack([counts.reads[rows].sum(), counts.visits[rows].sum()]).double()
        reads, visits, *found = torch.cat([sums, histogram.flatten()]).tolist()  # on CUDA the host waits here
        saved = 0.0
        if self.costs is not None and counts.batches:
            far, near = self.costs.far_s_per_byte * (reads - visits), self.costs.near_s_per_byte * reads
            between = (self.nodes.count - 1) / self.nodes.count  # requests within the node are sent directly
            saved = (far - near) * self.row_bytes * between / counts.batches / self.nodes.ranks
        mine = np.array([0.0, saved, *found], np.float32).view(np.int32)
        mine[0] = len(rows)
        return np.tile(mine, (self.nodes.ranks, 1))

    def choose(self, numbers: Sequence[Sequence[int]]) -> Heat:
        """Return which lists are published, and the heat of all rows, from the numbers of all ranks."""
        gathered = np.array(numbers, np.int32)
        values = gathered[:, 1:].copy().view(np.float32).astype(np.float64)
        sizes, saved, loads = gathered[:, 0].tolist(), float(values[:, 0].sum()), values[:, 1 + _BINS :].sum(axis=1)
        histogram = values[:, 1:].sum(axis=0).reshape(2, _BINS)
        histogram = histogram[:, histogram[0] > 0][:, ::-1]  # from the most requested rows
        rows, accesses = np.cumsum(np.pad(histogram, ((0, 0), (1, 0))), axis=1)
        half, most = (int(np.ceil(np.interp(share * accesses[-1], accesses, rows) - 1e-6)) for share in (0.5, 0.9))
        if self.hot_rows == "auto" and (self.costs is None or saved <= _WORTH * self.costs.near_latency_s):
            sizes = [0] * len(sizes)
        return Heat(sizes, saved, half, most, float(loads.max() / loads.mean()) if loads.any() else 1.0)


_FIRST_WORDS, _MOST_WORDS = 1 << 14, 1 << 22  # of a timed message to all peers together
_LONG_S = 2e-3  # of an exchange, so that noise is small beside it
_ROUNDS = 5


def measure_links(near: RowTransport, direct: RowTransport, nodes: Nodes) -> LinkCosts:
    """Time messages to the ranks of this node over ``near``, then to the ranks with this index on other nodes over ``direct``.

    Collective. All ranks send at once, and get the same result. The transports count what they send. With 50 Mbit/s between
    nodes of 4 ranks it takes 0.3 s. CUDA tensors are not tested on GPU.
    """
    latency, near_cost = _measure(near, [rank != near.rank for rank in range(near.ranks)], direct)
    _, far_cost = _measure(direct, nodes.alike(direct.rank), direct)
    return LinkCosts(near_cost, far_cost, latency)


def _measure(transport: RowTransport, peers: Sequence[bool], all_ranks: RowTransport) -> tuple[float, float]:
    """Return the seconds of an exchange of one word per peer, and the seconds per byte of longer ones."""
    latency, words = _seconds(transport, peers, 1, all_ranks), _FIRST_WORDS // sum(peers)
    while True:
        seconds, sent = _seconds(transport, peers, words, all_ranks), words * sum(peers)
        if seconds >= _LONG_S or sent >= _MOST_WORDS:
            return latency, max(seconds - latency, 1e-2 * seconds) / (4 * sent)
        words *= 4


def _seconds(transport: RowTransport, peers: Sequence[bool], words: int, all_ranks: RowTransport) -> float:
    """Return the median time of an exchange of ``words`` with each of the ``peers``; the mean over ranks, equal on all."""
    sizes = [words * peer for peer in peers]
    message, times = torch.zeros(sum(sizes), device=transport.device), []
    received = torch.empty_like(message)
    for _ in range(1 + _ROUNDS):
        began = perf_counter()
        transport.exchange(received, message, sizes, sizes, exact=True)
        if transport.device.type == "cuda":
            torch.cuda.synchronize(transport.device)
        times.append(perf_counter() - began)
    mine = np.full((all_ranks.ranks, 1), median(times[1:]), np.float32).view(np.int32)  # the first waits for late ranks
    return float(np.array(all_ranks.exchange_numbers(mine), np.int32).view(np.float32).mean(dtype=np.float64))


class HotList:
    """The current list, equal on all ranks. The worker of the collection changes it when the ids of a step have arrived.

    The owners publish the first list after an eighth of ``every_n_steps`` steps. The distance to the next list is the number of
    steps so far, but at most ``every_n_steps``. Micro-batches count as steps. A checkpoint does not contain the list, because
    results do not depend on it, up to rounding.
    """

    begun = False  # whether any list had rows: the ranks of a node exchange messages from then on

    def __init__(self, transport: RowTransport, local: LocalRows, rule: HotRowsRule, every_n_steps: int) -> None:
        self._transport, self._layout, self._rule = transport, local.layout, rule
        self._every = every_n_steps
        self.heat: Heat | None = None  # the result of the last publication
        self._counts = AccessCounts(local.count, rule.nodes, local.layout.device)
        self._keys = torch.empty(0, dtype=torch.int64, device=local.layout.device)
        # the keys of the rows in the list, see RowLayout.keys, and their decayed numbers of reads; on the host
        self.rows = torch.empty(0, dtype=torch.int64), torch.empty(0)
        self.changed = False  # whether rows is new; the training thread resets it
        self._sizes = [0] * transport.ranks  # rows of the list by owner
        self._readers = torch.empty(0, device=local.layout.device)  # see _count_readers
        self._steps, self._next = 0, max(1, every_n_steps // 8)

    def contain(self, keys: Tensor) -> Tensor:
        """Return whether each row is in the list (bool)."""
        return self._find(keys)[1]

    def count(self, incoming: IncomingRows) -> None:
        """Count the accesses of a step. Publish a list if it is time. Collective."""
        self._counts.count(incoming.rows, incoming.sizes)
        if incoming.forwarded is not None:
            self._count_readers(incoming.forwarded.request)
        self._steps += 1
        if self._steps == self._next:
            self._next += min(self._steps, self._every)
            self._publish()

    def _find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        if not len(self._keys):
            return torch.zeros_like(keys), torch.zeros_like(keys, dtype=torch.bool)
        places = torch.searchsorted(self._keys, keys).clamp_(max=len(self._keys) - 1)
        return places, self._keys[places] == keys

    def _count_readers(self, request: RowRequest) -> None:
        """Add, for each row of the list, the ranks of the node that request it through this rank, beyond the first."""
        readers = torch.diff(F.pad(request.first, (0, 1), value=request.order.numel())) - 1
        places, found = self._find(keys_of(request.rows, request.sizes, self._layout))
        self._readers.index_put_((places[found],), readers[found].float(), accumulate=True)

    def _publish(self) -> None:
        self._report_readers()
        rows, transport = self._rule.candidates(self._counts), self._transport
        self.heat = self._rule.choose(transport.exchange_numbers(self._rule.numbers(self._counts, rows)))
        sizes = self.heat.sizes
        rows = rows[: sizes[transport.rank]]
        words = torch.stack([rows.int(), self._counts.reads[rows].view(torch.int32)], dim=1).view(-1)
        gets = [2 * size for size in sizes]
        received = transport.exchange_words(words.repeat(transport.ranks), [len(words)] * transport.ranks, gets)
        came, reads = received.view(-1, 2).T.contiguous()
        self._keys, self._sizes = keys_of(came, sizes, self._layout), sizes
        self._readers = torch.zeros(len(came), device=came.device)
        self.changed = self.changed or any(sizes) or len(self.rows[0]) > 0
        self.rows = self._keys.cpu(), reads.view(torch.float32).cpu()
        self._counts.decay()
        self.begun = self.begun or any(sizes)

    def _report_readers(self) -> None:
        """Send the additional readers of each row to its owner, from the proxies that served it."""
        rank = self._transport.rank
        shares = self._rule.nodes.alike(rank)
        gives = [size * share for size, share in zip(self._sizes, shares)]
        gets = [self._sizes[rank] * share for share in shares]
        parts = self._readers.split(self._sizes)
        words = torch.cat([part for part, share in zip(parts, shares) if share] or [self._readers[:0]])
        came = self._transport.exchange_words(words.view(torch.int32), gives, gets).view(torch.float32)
        if self._sizes[rank]:
            mine = self._keys.split(self._sizes)[rank] - self._layout.starts[rank]
            self._counts.add_reads(mine, came.view(-1, self._sizes[rank]).sum(dim=0))
