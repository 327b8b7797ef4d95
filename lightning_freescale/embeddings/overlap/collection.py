"""A sharded collection whose exchange runs behind the model's compute: what the training thread does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor

from lightning_freescale.embeddings.collections import Collection
from lightning_freescale.embeddings.lookahead.kjt_snapshot import KJTSnapshot
from lightning_freescale.embeddings.lookahead.probe import ModeProposal
from lightning_freescale.embeddings.optimizer import TableOptimizer, UpdateSettings
from lightning_freescale.embeddings.overlap import errors
from lightning_freescale.embeddings.overlap.batch_state import Lookup, PipelinedBatch
from lightning_freescale.embeddings.overlap.exchange_worker import ExchangeWorker
from lightning_freescale.embeddings.overlap.handshake import NextIds
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics
from lightning_freescale.embeddings.overlap.row_exchange import RowExchange
from lightning_freescale.embeddings.overlap.row_requests import as_output
from lightning_freescale.embeddings.overlap.transport import ExchangeObserver


class OverlappedCollection:
    """Stands in for the forward of TorchRec's module while it trains; everything else of the module stays.

    Shards, kernels, fused updates and state dicts are TorchRec's; the exchange of ids and rows and the routing of gradients
    are ours. TorchRec's own pipeline for this is made for CUDA and fx-traceable models and gives other numbers; its exchange
    of ids needs feature-wise bucketing.

    Args:
        collection: what is sharded.
        module: TorchRec's sharded module.
        local: this rank's rows.
        group: for this collection alone.
        optimizers: of its tables.
        dedup: request each row once per rank and batch.

    Attributes:
        group: process group of this collection alone.
        statistics: totals since it was made.
        plain: whether it has fallen back to plain TorchRec.
        lookup: what the model has looked up in this step; None before and after it.
    """

    def __init__(
        self,
        collection: Collection,
        module: Any,
        local: LocalRows,
        group: dist.ProcessGroup,
        optimizers: Sequence[TableOptimizer],
        dedup: bool,
    ) -> None:
        self.path, self.module, self.group = collection.path, module, group
        self.statistics = ExchangeStatistics()
        self.plain = False
        self.lookup: Lookup | None = None
        # a thread and a group per collection: all that happens to its rows happens there
        self._worker = ExchangeWorker(collection.path, local.layout.device)
        self._exchange = RowExchange(collection.path, local, group, dedup, self.statistics)
        self._local = local
        self._optimizers = optimizers
        self._need_ids = collection.need_indices
        # this step, and what it has submitted of the next one
        self._current, self._following = self._exchange.new_batch(), self._exchange.new_batch()
        self._in_step = self._accumulating = False
        self._settings: Sequence[UpdateSettings] = [UpdateSettings(0)] * len(collection.tables)
        self._step = 0
        self._next_ids: KeyedJaggedTensor | None = None
        self._ended = self._prefetched = False
        self._announce_job: Future[Any] | None = None
        self._mode = ModeProposal()
        self._late_gradient: Tensor | None = None
        # what outlives a step
        self._previous: PipelinedBatch | None = None  # its last gradients have not been sent yet
        self._prefetch_job: Future[Any] | None = None
        self._update_job: Future[Any] | None = None
        self._arrived: Any = None
        self._observer: ExchangeObserver | None = None
        self._write_counts: list[int] | None = None
        self._torchrec_forward = module.forward
        module.forward = self.forward
        self._state_dict_hook = module.register_state_dict_pre_hook(lambda *_: self.drain())
        module.freescale_sharding.checks.ids = False  # wrong ids are an error on every rank, which the ranks tell each other

    def observe(self, observer: ExchangeObserver) -> None:
        """Tell ``observer`` of every exchange, and when training waits for rows."""
        self._observer = self._exchange.transport.observer = observer

    # -- a step

    def begin_step(
        self, updates: bool, settings: Sequence[UpdateSettings], step: int, restart: bool, mode: ModeProposal
    ) -> int:
        """Begin the step of a batch, before its forward; see :meth:`OverlapEngine.begin_step`. Return the agreed mode."""
        self.end_step()
        self.module.freescale_sharding.checks.reset_count()
        self._settings, self._step = settings, step
        if self.plain:
            return self._current.mode
        self._refuse_writes()
        self._refuse_uneven_end(step)
        accumulated = not self._current.updates
        self._accumulating = accumulated and not restart
        self._current, self._following = self._following, self._exchange.new_batch()
        if accumulated and restart:
            self._worker.submit(self._exchange.discard_accumulated, self._current, self._previous)
        self._current.updates, self._current.settings = updates, settings
        self._next_ids, self._ended, self._announce_job, self._prefetched = None, False, None, False
        self._mode, self._in_step = mode, True
        self.statistics.count(steps=1)
        return self._current.mode

    def submit_next_ids(self, features: KeyedJaggedTensor) -> None:
        """Submit the ids of the batch after the current one, before backward; the first ones of a step count."""
        if not self._in_step or self._prefetched or self._ended or self._next_ids is not None:
            return
        self._next_ids = features
        if self._current.looked_up:
            self._prefetch()

    def submit_end(self) -> None:
        """Submit that there is no batch after the current one."""
        self._ended = self._in_step and not self._prefetched

    def propose_mode(self, mode: int) -> None:
        """Set the mode that goes to the other ranks with the next ids, if it is known after the forward only."""
        self._mode = ModeProposal(mode, mode)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the rows of a batch, as the unsharded collection would."""
        if not self._in_step or not torch.is_grad_enabled():
            return self._torchrec_lookup(features)
        batch = self._current
        if batch.looked_up:
            self._fall_back()
            return self._torchrec_lookup(features)
        self.lookup = lookup = self._compare(features)
        batch.looked_up = True
        # if these ids are others, or some rank had submitted none, rows come with this announcement, and an error of one rank
        # has to be an error of all; else it can wait for the next ids
        alone = not lookup.predicted or not batch.all_submitted
        if self._next_ids is not None or self._ended:
            self._prefetch()
        announced = self._announce(final=False) if alone else None
        with self.statistics.timed("exposed_s"), self._observed_wait():
            if batch.ready is not None:
                self._worker.wait(batch.ready)
            if announced is not None:
                self._worker.wait(announced)
        self._worker.hand_over(batch.rows, batch.places)
        rows = batch.rows.index_select(0, batch.places)
        batch.rows = batch.rows.new_empty(0)  # memory: the next batch's rows come while this one computes
        rows = _join_graph(rows, partial(self._take_gradient, batch))
        return as_output(features, rows, self._local.layout, self._need_ids)

    def end_step(self) -> None:
        """Hand over, after backward, what backward has not, so that no rank waits for this one."""
        if not self._in_step:
            return
        rows = sum(self._current.request.sizes) if self._current.looked_up else 0  # its job was waited for in the lookup
        lost = rows and not self._current.gradient_sent and self._late_gradient is None
        if lost and any(optimizer.moves_without_gradient for optimizer in self._trained()):
            errors.no_gradient(self.path)
        self._in_step = False
        if self.plain:
            self._end_last_step()
        elif not self._current.gradient_sent:
            self._send_gradient(self._current, None, self._following)
        self._late_gradient, self.lookup = None, None

    # -- between steps

    def drain(self) -> None:
        """Wait until every update of the steps before is in the tables. Collective between two steps."""
        if self._in_step and self._current.looked_up:
            self._announce(final=False)  # takes the gradients of the step before along
        elif self._previous is not None:
            self._refuse_uneven_end(self._step + 1)  # a rank that has another batch is not here
            previous, self._previous = self._previous, None
            self._update_job = self._worker.submit(self._exchange.drain, previous)
        if self._update_job is not None:
            self._worker.wait(self._update_job)

    @property
    def error(self) -> Exception | None:
        """What has gone wrong in the background, on this rank or another."""
        return self._worker.error

    def discard_prefetched(self) -> None:
        """Throw away rows fetched ahead, because the tables have been written. Call it on every rank, after a drain."""
        self._following, self._write_counts = self._exchange.new_batch(), None

    def close(self) -> None:
        """Give TorchRec's forward back; without waiting for ranks that may be gone."""
        del self.module.forward
        self._state_dict_hook.remove()
        self.module.freescale_sharding.checks.ids = True
        if self._worker.stop(timeout=1.0):
            dist.destroy_process_group(self.group)
        else:  # its exchange waits for a rank that may be gone
            self.group.abort()

    # -- parts of a step

    def _compare(self, features: KeyedJaggedTensor) -> Lookup:
        snapshot = self._current.snapshot
        predicted = None if snapshot is None else snapshot.matches(features)
        kind = {None: "unpredicted_lookups", True: "predicted_lookups", False: "mispredicted_lookups"}[predicted]
        self.statistics.count(**{kind: 1})
        return Lookup(features, predicted)

    def _announce(self, final: bool) -> Future[Any]:
        """Submit what this rank has looked up, and the next ids unless they may be known later (``final``: they will not)."""
        if self._announce_job is None:
            state = self._state_of_next_ids(final)
            looked_up = None if self.lookup is None else self.lookup.features
            predicted = self.lookup is not None and bool(self.lookup.predicted)
            previous, self._previous = self._previous, None
            given = (
                self._following,
                self._current,
                previous,
                looked_up,
                predicted,
                state,
                self._next_ids,
                self._mode_to_tell(),
            )
            self._announce_job = self._update_job = self._worker.submit(self._exchange.announce, *given)
        return self._announce_job

    def _prefetch(self) -> None:
        """Submit all that this rank will know of the next batch before backward."""
        if self._prefetched:
            return
        self._announce(final=True)
        features, state, self._prefetched = self._next_ids, self._state_of_next_ids(final=True), True
        self._following.snapshot = None if features is None else KJTSnapshot(features)
        job = (self._exchange.prefetch, self._following, self._current, state, features, self._mode_to_tell())
        self._prefetch_job, self._next_ids = self._worker.submit(*job), None

    def _state_of_next_ids(self, final: bool) -> NextIds:
        if self._ended:
            return NextIds.ENDED
        if self._next_ids is not None:
            return NextIds.REQUESTED
        return NextIds.UNKNOWN if final else NextIds.LATER

    def _mode_to_tell(self) -> int:
        mispredicted = self.lookup is not None and self.lookup.predicted is False
        return self._mode.if_mispredicted if mispredicted else self._mode.mode

    def _send_gradient(self, batch: PipelinedBatch, gradient: Tensor | None, following: PipelinedBatch) -> None:
        self._prefetch()
        batch.gradient_sent = True
        self._arrived = None if self._observer is None else self._observer.stamp()
        following.ready = self._worker.submit(self._exchange.exchange_colliding, batch, following, gradient)
        self._previous = batch

    def _take_gradient(self, batch: PipelinedBatch, gradient: Tensor) -> None:
        if batch.gradient_sent or self._late_gradient is not None:
            errors.second_backward(self.path)
        if self.plain:
            self._late_gradient = gradient
        else:
            self._send_gradient(batch, gradient, self._following)

    def _observed_wait(self) -> AbstractContextManager[None]:
        arrived, self._arrived = self._arrived, None
        return nullcontext() if self._observer is None else self._observer.awaited("embedding rows", arrived)

    # -- falling back to TorchRec

    def _torchrec_lookup(self, features: KeyedJaggedTensor) -> Any:
        self.drain()
        self.module.freescale_sharding.checks.check_ids(features)
        if torch.is_grad_enabled():  # TorchRec will update the tables in this lookup's backward
            if any(optimizer.sparse_adam for optimizer in self._trained()):
                errors.second_update(self.path)
            self._local.prepare_update(self._settings)
            if not self._in_step:  # what was fetched ahead was so before that update
                self._following = self._exchange.new_batch()
        return self._torchrec_forward(features)

    def _fall_back(self) -> None:
        """Leave the collection to plain TorchRec, for which a second lookup in a step is a second update: told, not refused."""
        if self._accumulating or not self._current.updates:
            errors.second_lookup_in_window(self.path)
        warnings.warn(
            f"embedding collection {self.path!r} is looked up several times in one step: its exchange is not overlapped from "
            "here on. Look all features up in one call",
            stacklevel=2,
        )
        self.plain = True

    def _end_last_step(self) -> None:
        """End the step in which it fell back: TorchRec has updated the tables, what was sorted and fetched ahead is void."""
        self._prefetch()
        self._worker.drain()
        self._current.urgent = self._current.patient = None
        self._send_gradient(self._current, self._late_gradient, self._exchange.new_batch())
        self.drain()

    def _trained(self) -> list[TableOptimizer]:
        """Return the optimizers of the tables that are not frozen in this step."""
        return [optimizer for optimizer, given in zip(self._optimizers, self._settings) if not given.frozen]

    def _refuse_uneven_end(self, step: int) -> None:
        if self._prefetch_job is not None:  # done long ago, unless compute is shorter than the exchange
            with self.statistics.timed("exposed_s"):
                self._worker.wait(self._prefetch_job)
        if self._following.ended_ranks and self._following.any_submitted:
            errors.uneven_ends(self._following.ended_ranks, step)

    def _refuse_writes(self) -> None:
        # noticed, not followed: what was fetched ahead sits on other ranks
        counts = self._local.write_counts()
        if self._write_counts is not None and counts != self._write_counts:
            errors.unannounced_write(self.path)
        self._write_counts = counts


def _join_graph(rows: Tensor, take: Callable[[Tensor], None]) -> Tensor:
    """Return ``rows`` as part of the autograd graph; backward calls ``take`` with their gradient."""
    return _GraphEntry.apply(rows, torch.empty(0, device=rows.device, requires_grad=True), take)


class _GraphEntry(torch.autograd.Function):
    # Its backward hands the gradient to the worker, so the colliding rows travel while DDP still waits for its last bucket
    # and the dense optimizer steps.

    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, take: Callable[[Tensor], None]) -> Tensor:
        ctx.take = take
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.take(gradient.contiguous())
        return None, None, None
