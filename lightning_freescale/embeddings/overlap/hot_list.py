"""The list of hot rows of one collection: the owners count accesses, and publish the rows that several ranks of a node need."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_freescale.embeddings.overlap.hot_rows import AccessCounts, HotRowsRule
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.report import Heat
from lightning_freescale.embeddings.overlap.row_requests import IncomingRows, RowRequest, keys_of
from lightning_freescale.embeddings.overlap.transport import RowTransport


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
