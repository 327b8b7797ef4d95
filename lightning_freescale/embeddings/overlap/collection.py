"""A sharded collection whose exchange runs behind the model's compute: what the training thread does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor

from lightning_freescale.embeddings.collections import Collection
from lightning_freescale.embeddings.lookahead.probe import KJTSnapshot
from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.overlap import errors as refusals
from lightning_freescale.embeddings.overlap.batch_state import PipelinedBatch
from lightning_freescale.embeddings.overlap.inject import inject
from lightning_freescale.embeddings.overlap.lane import Lane
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.row_exchange import RowExchange
from lightning_freescale.embeddings.overlap.row_layout import RowLayout
from lightning_freescale.embeddings.overlap.row_requests import as_output
from lightning_freescale.embeddings.overlap.statistics import ExchangeStatistics


class Observer(Protocol):
    """What it needs of a timeline."""

    def stamp(self) -> Any:
        """Now."""

    def awaited(self, name: str, arrived: Any) -> AbstractContextManager[None]:
        """Around a wait for rows, of this rank which had done its part at ``arrived``."""


class OverlappedCollection:
    """Stands in for the forward of TorchRec's module while it trains; everything else of the module stays.

    Args:
        collection: what is sharded.
        module: TorchRec's sharded module.
        layout: where its rows live.
        local: this rank's rows.
        group: for this collection alone.
        optimizers: of its tables.
        dedup: ask for each row once per rank and batch.

    Attributes:
        group: process group of this collection alone.
        statistics: totals since it was made.
        plain: whether it has fallen back to plain TorchRec.
        mode: how this rank comes to know the next ids, as a number; the highest of all ranks is ``agreed_mode``.
        observer: told when training waits for rows.
        asked: called with the ids that the model asks for, and whether they were announced; None if none were.
    """

    def __init__(
        self,
        collection: Collection,
        module: Any,
        layout: RowLayout,
        local: LocalRows,
        group: dist.ProcessGroup,
        optimizers: Sequence[TableOptimizer],
        dedup: bool,
    ) -> None:
        self.path, self.module, self.layout, self.statistics = collection.path, module, layout, ExchangeStatistics()
        self._lane = Lane(collection.path, layout.first.device)
        self._exchanges = RowExchange(collection.path, layout, local, group, dedup, self.statistics)
        self._by_row = any(optimizer.sparse_adam for optimizer in optimizers)
        self._moves_anyway = any(optimizer.moves_without_gradient for optimizer in optimizers)
        self.group, self._local = group, local
        self._late: Tensor | None = None
        self._upcoming: tuple[KeyedJaggedTensor | None, bool] | None = None
        self.observer: Observer | None = None
        self._arrived: Any = None
        self._written: list[int] | None = None
        self.asked: Callable[[KeyedJaggedTensor, bool | None], None] | None = None
        self._need_ids = collection.need_indices
        self._now, self._next = self._exchanges.flight(), self._exchanges.flight()
        self._rates: list[float | None] = []
        self._step = 0
        self._updated: Future[Any] | None = None
        self._announcement: Future[Any] | None = None
        self.mode: Callable[[], int] = lambda: 0
        self._in_step = self._announced = self._window = self.plain = False
        self._plain_forward = module.forward
        module.forward = self.forward
        self._reading = module.register_state_dict_pre_hook(lambda *_: self.drain())
        module.freescale_sharding.checks.ids = False  # wrong ids are an error on every rank, which the ranks tell each other

    # -- a step

    def begin_step(self, updates: bool, rates: Sequence[float | None], step: int, restart: bool = False) -> None:
        """Before the forward of a batch; see :meth:`OverlapEngine.begin_step`."""
        self.finish_step()
        self.module.freescale_sharding.checks.reset_count()
        self._rates, self._step = list(rates), step
        if self.plain:
            return
        self._refuse_writes()
        self._refuse_uneven_end(step)
        kept = not self._now.updates
        if kept and restart:
            self._lane.submit(self._exchanges.discard)
        self._window = kept and not restart
        self._now, self._next = self._next, self._exchanges.flight()
        self._now.updates, self._now.rates, self._now.step = updates, self._rates, step
        self._in_step, self._announced, self._upcoming = True, False, None
        self.statistics.count("steps")

    def announce(self, upcoming: KeyedJaggedTensor | None, ended: bool = False) -> None:
        """The ids of the batch after the current one, once per step; None if there is none (``ended``) or nobody knows."""
        if not self._in_step or self._announced or self._upcoming is not None:
            return
        self._upcoming = (upcoming, ended)
        if self._now.looked_up:
            self._send_announcement()

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The rows of a batch, as the unsharded collection would return them."""
        if not self._in_step or not torch.is_grad_enabled():
            return self._plain_lookup(features)
        if self._now.looked_up:
            self._give_up()
            return self._plain_lookup(features)
        flight, same = self._now, self._is_announced(features)
        verified = self._verify(features, same)
        if self._upcoming is not None:
            self._send_announcement()
        with self.statistics.exposed(), self._observed():
            if flight.ready is not None:
                self._lane.wait(flight.ready)
            if not same or not flight.sound:  # where ids came from every rank, none has to wait for their confirmation
                self._lane.wait(verified)
        self._lane.hand_over(flight.rows, flight.request.place)
        rows = flight.rows.index_select(0, flight.request.place)
        flight.rows = flight.rows.new_empty(0)  # memory: the next batch's rows come while this one computes
        rows = inject(rows, partial(self._take_gradient, flight))
        return as_output(features, rows, self.layout, self._need_ids)

    def finish_step(self) -> None:
        """After backward: hand over what backward has not, so that no rank waits for this one."""
        if not self._in_step:
            return
        if not self._now.looked_up:
            self._verify(None, same=False)
        elif self._moves_anyway and not self._now.sent and self._late is None and len(self._now.request.rows):
            refusals.no_gradient(self.path)
        if self.plain:
            self._finish_last_step()
        elif not self._now.sent:
            self._send_gradient(self._now, None, self._next)
        self._in_step, self._late = False, None

    @property
    def agreed_mode(self) -> int:
        """The highest ``mode`` of any rank, as of the last step."""
        return self._now.mode

    # -- between steps

    def drain(self) -> None:
        """Wait until every update of the steps before is in the tables. No rank need call it for another."""
        if self._updated is not None:
            self._lane.wait(self._updated)

    @property
    def error(self) -> Exception | None:
        """What has gone wrong in the background, on this rank or another."""
        return self._lane.error

    def forget(self) -> None:
        """The tables have been written: rows that were fetched ahead are void. To be called on every rank, after a drain."""
        self._next, self._written = self._exchanges.flight(), None

    def close(self) -> None:
        """Give TorchRec's forward back; without waiting for ranks that may be gone."""
        del self.module.forward
        self._reading.remove()
        self.module.freescale_sharding.checks.ids = True
        if self._lane.close():
            dist.destroy_process_group(self.group)
        else:  # its exchange waits for a rank that may be gone
            self.group.abort()

    # -- parts of a step

    def _is_announced(self, features: KeyedJaggedTensor) -> bool:
        captured = self._now.captured
        same = captured is not None and captured.matches(features)
        self.statistics.count("announced" if same else "unknown" if captured is None else "misses")
        if self.asked is not None:
            self.asked(features, None if captured is None else same)
        return same

    def _verify(self, features: KeyedJaggedTensor | None, same: bool) -> Future[Any]:
        self._now.looked_up = True
        return self._lane.submit(self._exchanges.verify, self._now, features, same)

    def _send_announcement(self) -> None:
        upcoming, ended = self._upcoming or (None, False)
        self._announced, self._upcoming = True, None
        self._next.captured = None if upcoming is None else KJTSnapshot(upcoming)
        self._announcement = self._lane.submit(self._exchanges.announce, self._next, self._now, upcoming, ended, self.mode())
        self._lane.submit(self._exchanges.prefetch, self._next, self._now)

    def _send_gradient(self, flight: PipelinedBatch, gradient: Tensor | None, following: PipelinedBatch) -> None:
        if not self._announced:
            self._send_announcement()
        flight.sent = True
        self._arrived = None if self.observer is None else self.observer.stamp()
        following.ready = self._lane.submit(self._exchanges.colliding, flight, following, gradient)
        self._updated = self._lane.submit(self._exchanges.non_colliding, flight)

    def _take_gradient(self, flight: PipelinedBatch, gradient: Tensor) -> None:
        if flight.sent or self._late is not None:
            refusals.second_backward(self.path)
        if self.plain:
            self._late = gradient
        else:
            self._send_gradient(flight, gradient, self._next)

    def _observed(self) -> AbstractContextManager[None]:
        arrived, self._arrived = self._arrived, None
        return nullcontext() if self.observer is None else self.observer.awaited("embedding rows", arrived)

    # -- leaving the path

    def _plain_lookup(self, features: KeyedJaggedTensor) -> Any:
        self.drain()
        self.module.freescale_sharding.checks.check_ids(features)
        if torch.is_grad_enabled():
            self._prepare_plain_update()
        return self._plain_forward(features)

    def _prepare_plain_update(self) -> None:
        """TorchRec will update the tables in this lookup's backward."""
        if self._by_row:
            refusals.second_update(self.path)
        self._local.prepare(self._rates, self._step)
        if not self._in_step:  # what was fetched ahead was so before that update
            self._next = self._exchanges.flight()

    def _give_up(self) -> None:
        """A second lookup in a step is a second update in plain TorchRec: from here on, this collection is plain."""
        if self._window or not self._now.updates:
            refusals.second_lookup_in_window(self.path)
        warnings.warn(
            f"embedding collection {self.path!r} is looked up several times in one step: its exchange is not overlapped from "
            "here on. Look all features up in one call",
            stacklevel=2,
        )
        self.plain = True

    def _finish_last_step(self) -> None:
        """The second lookup's backward has updated the tables: what was sorted and fetched ahead is void."""
        if not self._announced:
            self._send_announcement()
        self._lane.drain()
        self._now.after = None
        self._send_gradient(self._now, self._late, self._exchanges.flight())
        self._lane.drain()

    def _refuse_uneven_end(self, step: int) -> None:
        if self._announcement is not None:  # long done: the backward that the ranks ended together came after it
            with self.statistics.exposed():
                self._lane.wait(self._announcement)
        if self._next.ended and self._next.announced:
            refusals.uneven_ends(self._next.ended, step)

    def _refuse_writes(self) -> None:
        written = self._local.written()
        if self._written is not None and written != self._written:
            refusals.unannounced_write(self.path)
        self._written = written
