"""A sharded collection whose exchange runs behind the model's compute: what the training thread does."""

from __future__ import annotations

from collections.abc import Sequence
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
from lightning_freescale.embeddings.overlap.batch_state import FurtherLookup, Lookup, PipelinedBatch
from lightning_freescale.embeddings.overlap.exchange_worker import ExchangeWorker
from lightning_freescale.embeddings.overlap.handshake import NextIds
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics
from lightning_freescale.embeddings.overlap.row_exchange import RowExchange
from lightning_freescale.embeddings.overlap.row_requests import as_output
from lightning_freescale.embeddings.overlap.step_lookups import StepLookups
from lightning_freescale.embeddings.overlap.transport import FAREWELL, ExchangeObserver


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
        hold_gradients: keep the gradients of a step until :meth:`apply_gradients`, so that they can be clipped.

    Attributes:
        group: process group of this collection alone.
        others: the module's other collections. Whoever waits in one of them for other ranks answers them in all, because one of
            them may wait in another collection for this rank.
        statistics: totals since it was made.
    """

    def __init__(
        self,
        collection: Collection,
        module: Any,
        local: LocalRows,
        group: dist.ProcessGroup,
        optimizers: Sequence[TableOptimizer],
        dedup: bool,
        hold_gradients: bool = False,
    ) -> None:
        self.path, self.module, self.group = collection.path, module, group
        self.others: list[OverlappedCollection] = []
        self.statistics = ExchangeStatistics()
        # a thread and a group per collection: all that happens to its rows happens there
        self._worker = ExchangeWorker(collection.path, local.layout.device)
        self._exchange = RowExchange(collection.path, local, group, dedup, self.statistics)
        self._local = local
        self._optimizers = optimizers
        self._need_ids = collection.need_indices
        self._hold_gradients = hold_gradients
        self._held: PipelinedBatch | None = None  # its gradients are kept until they are clipped
        # this step, and what it has submitted of the next one
        self._current, self._following = self._exchange.new_batch(), self._exchange.new_batch()
        self._lookups = StepLookups()
        self._in_step = False
        self._settings: Sequence[UpdateSettings] = [UpdateSettings(0)] * len(collection.tables)
        self._step = 0
        self._next_ids: list[KeyedJaggedTensor] | None = None
        self._ended = self._prefetched = False
        self._announce_job: Future[Any] | None = None
        self._told_as_submitted = False  # in that job
        self._mode = ModeProposal()
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
        # wrong ids are an error on every rank, which the ranks tell each other; several lookups are one update
        module.freescale_sharding.checks.enabled = False

    def observe(self, observer: ExchangeObserver) -> None:
        """Tell ``observer`` of every exchange, and when training waits for rows."""
        self._observer = self._exchange.transport.observer = observer

    # -- a step

    def begin_step(
        self, updates: bool, settings: Sequence[UpdateSettings], step: int, restart: bool, mode: ModeProposal
    ) -> int:
        """Begin the step of a batch, before its forward; see :meth:`OverlapEngine.begin_step`. Return the agreed mode."""
        self.end_step()
        self.apply_gradients()
        self._settings, self._step = settings, step
        self._refuse_writes()
        self._refuse_uneven_end(step)
        accumulated = not self._current.updates
        self._current, self._following = self._following, self._exchange.new_batch()
        if self._current.submitted_ids and not self._current.submitted:
            self._current.submitted_ids = []  # they were wrong, or the ranks' features differ: all are asked again
        if accumulated and restart:
            self._worker.submit(self._exchange.discard_accumulated, self._current, self._previous)
        self._current.updates, self._current.settings = updates, settings
        self._current.held = updates and self._hold_gradients
        self._next_ids, self._ended, self._announce_job, self._prefetched = None, False, None, False
        self._told_as_submitted = False
        self._lookups = StepLookups(self._current.submitted_ids, partial(self._take_gradient, self._current))
        self._mode, self._in_step = mode, True
        self.statistics.count(steps=1)
        return self._current.mode

    def submit_next_ids(self, lookups: Sequence[KeyedJaggedTensor]) -> None:
        """Submit the ids of the batch after the current one, by lookup, before backward; the first ones of a step count."""
        if not self._in_step or self._prefetched or self._ended or self._next_ids is not None:
            return
        self._next_ids = list(lookups)
        if self._current.looked_up:
            self._prefetch()

    def submit_end(self) -> None:
        """Submit that there is no batch after the current one."""
        self._ended = self._in_step and not self._prefetched

    def propose_mode(self, mode: int) -> None:
        """Set the mode that goes to the other ranks with the next ids, if it is known after the forward only."""
        self._mode = ModeProposal(mode, mode)

    @property
    def lookups(self) -> list[Lookup]:
        """What the model has looked up in this step, in its order; empty before and after it."""
        return self._lookups.made

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the rows of a lookup, as the unsharded collection would."""
        if not self._in_step or not torch.is_grad_enabled():
            return self._torchrec_lookup(features)
        if torch._C._current_graph_task_id() != -1:  # in a backward: activation checkpointing computes something again
            rows = self._lookups.made_before(features)
            if rows is None:
                errors.lookup_in_backward(self.path)
        else:
            rows = self._look_up(features)
        return as_output(features, rows, self._local.layout, self._need_ids)

    def announce_in_time(self) -> None:
        """Submit what is known, because this rank waits in another collection."""
        if self._in_step and self._announce_job is None:
            if self._next_ids is not None or self._ended:
                self._prefetch(early=True)
            else:
                self._announce(final=False, early=True)

    def serve_in_time(self) -> None:
        """Serve a rank that may need more rows, because this one waits in another collection."""
        if self._in_step and not self._current.gradient_sent:
            self.announce_in_time()
            self._worker.submit(self._exchange.fetch_more, self._current)

    def end_forward(self) -> None:
        """Submit what is known once the model has looked everything up: other ranks may wait for it before their backward."""
        if self._in_step:
            self._prefetch()
            if not self._current.looked_up:
                self._send_gradient()

    def end_step(self) -> None:
        """Hand over, after backward, what backward has not, so that no rank waits for this one."""
        if not self._in_step:
            return
        if not self._current.gradient_sent:
            self._send_gradient()
        self._in_step = False
        self._lookups = StepLookups()

    # -- clipping, between backward and the optimizer step

    @property
    def updates(self) -> bool:
        """Whether an optimizer step follows the current batch."""
        return self._current.updates

    def submit_square_sum(self) -> Future[Any] | None:
        """Have the square sum of the step's whole gradient found, as :attr:`square_sum`; None if it is not held. Collective."""
        return None if self._held is None else self._worker.submit(self._exchange.held.sum_squares, self._held.settings)

    def square_sum(self, job: Future[Any]) -> Tensor:
        """Wait for the sum that was submitted, and return it: float64, without dimensions, the same on every rank."""
        with self.statistics.timed("exposed_s"), self._observed_wait():
            self._worker.wait(job)
        square_sum = self._exchange.held.square_sum
        self._worker.hand_over(square_sum)
        return square_sum

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients that are held."""
        if self._held is not None:
            self._worker.submit(self._exchange.held.scale, factor, self._held.settings)

    def clamp_gradients(self, limit: float) -> None:
        """Limit every element of the gradients that are held."""
        if self._held is not None:
            self._worker.submit(self._exchange.held.clamp, limit, self._held.settings)

    def apply_gradients(self) -> None:
        """Update the rows by the gradients that are held, if there are any. Collective."""
        held, self._held = self._held, None
        if held is not None:
            self._arrived = None if self._observer is None else self._observer.stamp()
            job = self._worker.submit(self._exchange.apply_held, held, self._following)
            self._following.ready = self._update_job = job

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

    def take_idle_steps(self) -> list[int]:
        """Return, by table, how many optimizer steps since the last call had no gradient on any rank. Drain first."""
        counts = self._exchange.idle_steps
        self._exchange.idle_steps = [0] * len(counts)
        return counts

    @property
    def error(self) -> Exception | None:
        """What has gone wrong in the background, on this rank or another."""
        return self._worker.error

    def discard_prefetched(self) -> None:
        """Throw away rows fetched ahead, because the tables have been written. Call it on every rank, after a drain."""
        self._following, self._write_counts = self._exchange.new_batch(), None

    def close(self, farewell: bool) -> None:
        """Give TorchRec's forward back; without waiting for ranks that may be gone.

        After a drain, ranks say farewell if asked to: one that closed its connections at once could cut off another that still
        reads.
        """
        del self.module.forward
        self._state_dict_hook.remove()
        self.module.freescale_sharding.checks.enabled = True
        if farewell and self.error is None and self._previous is None and not self._in_step:
            self._worker.submit(self._exchange.transport.say_farewell)
        if self._worker.stop(timeout=1.0 + FAREWELL.total_seconds()):
            dist.destroy_process_group(self.group)
        else:  # its exchange waits for a rank that may be gone
            self.group.abort()

    # -- parts of a step

    def _look_up(self, features: KeyedJaggedTensor) -> Tensor:
        batch = self._current
        if batch.gradient_sent:
            errors.late_lookup(self.path)
        index = self._lookups.note(features)
        predicted = self._lookups.made[-1].predicted
        kind = {None: "unpredicted_lookups", True: "predicted_lookups", False: "mispredicted_lookups"}[predicted]
        self.statistics.count(**{kind: 1})
        first, batch.looked_up = not batch.looked_up, True
        told = self._announce_job is not None  # before this lookup, because this rank waits or has waited elsewhere
        comes = index is not None or (first and not told)
        if first and (comes or self._told_as_submitted):
            self._receive(alone=not batch.all_submitted or (index is None and not told))
        if not comes:
            self._fetch_more(features)
        return self._lookups.give_out(index, features)

    def _receive(self, alone: bool) -> None:
        """Wait for the rows submitted ahead, or, if the first lookup is none of those, for its own.

        If these are others, or some rank had submitted none, rows come with this announcement, and an error of one rank has to
        be an error of all (``alone``); else it can wait for the next ids.
        """
        batch = self._current
        if self._next_ids is not None or self._ended:
            self._prefetch()
        announced = self._announce(final=False) if alone else None
        if announced is not None:
            for other in self.others:
                other.announce_in_time()
        with self.statistics.timed("exposed_s"), self._observed_wait():
            if batch.ready is not None:
                self._worker.wait(batch.ready)
            if announced is not None:
                self._worker.wait(announced)
        self._worker.hand_over(batch.rows, batch.places)
        self._lookups.receive(batch.rows, batch.places, batch.request.of_lookup, asked_for=True)
        batch.rows = batch.rows.new_empty(0)  # memory: the next batch's rows come while this one computes

    def _fetch_more(self, features: KeyedJaggedTensor) -> None:
        """Fetch the rows of a lookup that was not submitted, when all other ranks have come as far as to serve it."""
        self._announce(final=False)
        lookup = FurtherLookup(features)
        job = self._worker.submit(self._exchange.fetch_more, self._current, lookup)
        for other in self.others:
            other.serve_in_time()
        with self.statistics.timed("exposed_s"), self._observed_wait():
            self._worker.wait(job)
        self._worker.hand_over(lookup.rows, lookup.places)
        self._lookups.receive(lookup.rows, lookup.places, [lookup.places.numel()], asked_for=False)

    def _announce(self, final: bool, early: bool = False) -> Future[Any]:
        """Submit what this rank has looked up, and the next ids unless they may be known later (``final``: they will not).

        Where nothing has been looked up, that is all there will be, or, if it is ``early``, what was submitted will be.
        """
        if self._announce_job is None:
            state = self._state_of_next_ids(final)
            looked_up = [lookup.features for lookup in self.lookups[:1]]
            predicted = bool(self.lookups[0].predicted) if self.lookups else early and bool(self._current.submitted_ids)
            self._told_as_submitted = predicted
            previous, self._previous = self._previous, None
            given = (self._following, self._current, previous, looked_up, predicted, state)
            job = (self._exchange.announce, *given, self._next_ids or [], self._mode_to_tell())
            self._announce_job = self._update_job = self._worker.submit(*job)
        return self._announce_job

    def _prefetch(self, early: bool = False) -> None:
        """Submit all that this rank will know of the next batch before backward, after what :meth:`_announce` does."""
        if self._prefetched:
            return
        if self._next_ids is not None:
            self._following.submitted_ids = snapshots = [KJTSnapshot(features) for features in self._next_ids]
            self._next_ids = [each.features for each in snapshots]  # the worker reads what later lookups are compared with
        self._announce(final=True, early=early)
        lookups, state, self._prefetched = self._next_ids or [], self._state_of_next_ids(final=True), True
        job = (self._exchange.prefetch, self._following, self._current, state, lookups, self._mode_to_tell())
        self._prefetch_job, self._next_ids = self._worker.submit(*job), None

    def _state_of_next_ids(self, final: bool) -> NextIds:
        if self._ended:
            return NextIds.ENDED
        if self._next_ids is not None:
            return NextIds.REQUESTED
        return NextIds.UNKNOWN if final else NextIds.LATER

    def _mode_to_tell(self) -> int:
        mispredicted = any(lookup.predicted is False for lookup in self.lookups)
        return self._mode.if_mispredicted if mispredicted else self._mode.mode

    def _take_gradient(self, batch: PipelinedBatch, again: bool) -> None:
        if again or batch.gradient_sent:
            errors.second_backward(self.path)
        if self._lookups.all_gradients_came:
            self._send_gradient()

    def _send_gradient(self) -> None:
        """Hand over the gradients that have come; there are no others."""
        self._prefetch()
        batch, following = self._current, self._following
        batch.gradient_sent = True
        self._arrived = None if self._observer is None else self._observer.stamp()
        moves = any(optimizer.moves_without_gradient for optimizer in self._trained())
        gradient, anew = self._lookups.gradient(self._local.dim, none_is_not_zero=moves)
        if moves and self._told_as_submitted and not self.lookups:
            anew = []
        following.ready = self._worker.submit(self._exchange.exchange_colliding, batch, following, gradient, anew)
        self._previous, self._held = (None, batch) if batch.held else (batch, None)

    def _observed_wait(self) -> AbstractContextManager[None]:
        arrived, self._arrived = self._arrived, None
        return nullcontext() if self._observer is None else self._observer.awaited("embedding rows", arrived)

    def _torchrec_lookup(self, features: KeyedJaggedTensor) -> Any:
        self.drain()
        self.module.freescale_sharding.checks.check_ids(features)
        if torch.is_grad_enabled():  # TorchRec will update the tables in this lookup's backward
            if self._hold_gradients or self._local.clip_value is not None:
                errors.unclipped_update(self.path)
            if any(optimizer.sparse_adam for optimizer in self._trained()):
                errors.update_outside_of_step(self.path)
            self._local.prepare_update(self._settings)
            self._following = self._exchange.new_batch()  # what was fetched ahead was so before that update
        return self._torchrec_forward(features)

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
