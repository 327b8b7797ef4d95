"""What the worker of a collection is given to do in one step, and when."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.lookahead.kjt_path import KJTSnapshot
from lightning_freescale.embeddings.lookahead.probe import ModeProposal
from lightning_freescale.embeddings.overlap import errors
from lightning_freescale.embeddings.overlap.batch_state import FurtherLookup, PipelinedBatch
from lightning_freescale.embeddings.overlap.exchange_worker import ExchangeWorker
from lightning_freescale.embeddings.overlap.id_exchange import NextIds
from lightning_freescale.embeddings.overlap.row_exchange import RowExchange
from lightning_freescale.embeddings.overlap.step_lookups import StepLookups


class StepJobs:
    """The jobs of one step: announce, prefetch, exchange the colliding rows; every rank gives them in this order.

    With several collections it gives prefetch again when its forward ends, for ids that some rank did not know before.

    Args:
        exchange: does them.
        worker: runs them.
        before: the jobs of the step before; None makes a placeholder before the first step, which is not open.
        mode: how this rank comes to know ids; not given to the placeholder.
        moves_without_gradient: whether an update by a gradient of zero would move a row.
        beside_others: whether the module has other collections, for which ranks may wait in their forward.

    Attributes:
        current: the batch of the step.
        following: the batch of the next one.
        unsent: the batch whose last gradients have not been sent: that of the step before, after backward the current one.
        lookups: what the model has looked up.
        announced: the job in which this rank has said what it looks up; None before.
        announced_submitted: whether it said there that it looks up what it had submitted.
        updated: the last job that brought updates of earlier steps into the tables; None if there was none.
        prefetched: the job in which this rank hears of the next batch; None before.
        open: whether the step has begun and not ended.
    """

    def __init__(
        self,
        exchange: RowExchange,
        worker: ExchangeWorker,
        before: StepJobs | None = None,
        mode: ModeProposal | None = None,
        moves_without_gradient: bool = False,
        beside_others: bool = False,
    ) -> None:
        self._exchange, self._worker, self._moves = exchange, worker, moves_without_gradient
        self.current: PipelinedBatch = exchange.new_batch() if before is None else before.following
        self.following: PipelinedBatch = exchange.new_batch()
        if self.current.submitted_ids and not self.current.submitted:
            self.current.submitted_ids = []  # they were wrong, or the ranks' features differ: all are asked again
        self.unsent: PipelinedBatch | None = None if before is None else before.unsent
        self.updated: Future[Any] | None = None if before is None else before.updated
        self.open = before is not None
        self.lookups = StepLookups(self.current.submitted_ids, self._take_gradient)
        self.announced: Future[Any] | None = None
        self.prefetched: Future[Any] | None = None
        self.announced_submitted = False
        self._next_ids: list[KJTSnapshot] | None = None
        self._mode = mode or ModeProposal()
        self._ended = False
        self._looks_up = beside_others  # until its forward has ended
        self._prefetch: tuple[Any, ...] | None = None  # given again then
        self._fetches = False  # whether it has asked or served in this step
        self._held: PipelinedBatch | None = None  # its gradients are kept until they are clipped

    # -- the ids of the next batch

    def submit_next_ids(self, lookups: Sequence[KeyedJaggedTensor]) -> None:
        """Submit the ids of the batch after the current one, by lookup, before backward; the first ones of a step count."""
        if self.open and self.prefetched is None and not self._ended and self._next_ids is None:
            self._next_ids = [KJTSnapshot(features) for features in lookups]
            if self.current.looked_up:
                self.prefetch()

    def submit_end(self) -> None:
        """Submit that there is no batch after the current one."""
        self._ended = self.open and self.prefetched is None

    def propose_mode(self, mode: int) -> None:
        """Set the mode that goes to the other ranks with the next ids, if it is known after the forward only."""
        self._mode = ModeProposal(mode, mode)

    @property
    def next_is_known(self) -> bool:
        """Whether the next batch's ids have been submitted, or that there is none."""
        return self._next_ids is not None or self._ended

    # -- the jobs, in their order

    def announce(self, final: bool = False, early: bool = False) -> Future[Any]:
        """Submit what this rank has looked up, and the next ids; done once.

        Args:
            final: the next ids will not be known later.
            early: where nothing has been looked up, what was submitted will be; else there will be nothing.
        """
        if self.announced is None:
            made = self.lookups.made
            looked_up = [lookup.features for lookup in made[:1]]
            predicted = bool(made[0].predicted) if made else early and bool(self.current.submitted_ids)
            self.announced_submitted = predicted
            unsent, self.unsent = self.unsent, None
            batches, mine = (self.following, self.current, unsent), (looked_up, predicted)
            job = (self._exchange.announce, *batches, *mine, self._state(final), self._ids_to_tell(), self._mode_to_tell())
            self.announced = self.updated = self._worker.submit(*job)
        return self.announced

    def prefetch(self, early: bool = False) -> None:
        """Submit all that this rank will know of the next batch before backward, after :meth:`announce`; done once."""
        if self.prefetched is not None:
            return
        self.following.submitted_ids = self._next_ids
        self.announce(final=True, early=early)
        told = (self._state(final=True), self._ids_to_tell(), self._mode_to_tell())
        job = (self._exchange.prefetch, self.following, self.current, *told)
        self.prefetched, self._next_ids = self._worker.submit(*job, self._looks_up), None
        self._prefetch = job if self._looks_up else None

    def fetch_more(self, lookup: FurtherLookup | None = None) -> Future[Any]:
        """Submit that a lookup needs rows which were not submitted ahead; without one, that other ranks may need some."""
        self._fetches = True
        return self._worker.submit(self._exchange.fetch_more, self.current, lookup)

    def announce_in_time(self) -> None:
        """Submit what is known, because this rank waits in another collection."""
        if self.open and self.announced is None:
            if self.next_is_known:
                self.prefetch(early=True)
            else:
                self.announce(early=True)

    def serve_in_time(self) -> None:
        """Serve a rank that may need more rows, because this one waits in another collection."""
        if self.open and not self.current.gradient_sent:
            self.announce_in_time()
            self.fetch_more()

    def end_forward(self) -> None:
        """Submit what is known once the model has looked everything up: other ranks may wait for it before their backward."""
        if self.open:
            self._end_lookups()
            if not self.current.looked_up:
                self.send_gradient()

    def send_gradient(self) -> None:
        """Hand over the gradients that have come; there are no others."""
        self._end_lookups()
        batch = self.current
        batch.gradient_sent = True
        self._worker.arrive()
        gradient, anew = self.lookups.gradient(self._exchange.local.dim, none_is_not_zero=self._moves)
        if self._moves and self.announced_submitted and not self.lookups.made:
            anew = []
        exchanged = self._worker.submit(self._exchange.exchange_colliding, batch, self.following, gradient, anew)
        # rows change with updates only: without one, the next lookup waits for nothing that this backward has brought about
        self.following.ready = exchanged if batch.updates else self.prefetched
        self.unsent, self._held = (None, batch) if batch.held else (batch, None)

    def end(self) -> None:
        """Hand over, after backward, what backward has not, so that no rank waits for this one."""
        if self.open:
            if not self.current.gradient_sent:
                self.send_gradient()
            self.open, self.lookups = False, StepLookups()

    # -- clipping, between backward and the optimizer step

    def submit_square_sum(self) -> Future[Any] | None:
        """Have the square sum of the step's whole gradient found; None if it is not held. Collective."""
        return None if self._held is None else self._worker.submit(self._exchange.held.sum_squares, self._held.settings)

    def square_sum(self, job: Future[Any]) -> Tensor:
        """Wait for the sum, and return it: float64, without dimensions, the same on all ranks."""
        self._worker.await_rows(job)
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
            self._worker.arrive()
            self.updated = self.following.ready = self._worker.submit(self._exchange.apply_held, held, self.following)

    # -- between steps

    def drain(self) -> None:
        """Submit the last gradients of the steps that have ended, unless :meth:`announce` has; wait until they are applied."""
        if self.open and self.current.looked_up:
            self.announce()
        elif self.unsent is not None:
            unsent, self.unsent = self.unsent, None
            self.updated = self._worker.submit(self._exchange.drain, unsent)
        if self.updated is not None:
            self._worker.wait(self.updated)

    # -- parts of a job

    def _end_lookups(self) -> None:
        # With several collections a rank tells ids that were late, and hears those of others, no earlier than here. Until then
        # its n-th wait for further rows gives every collection its n-th message, asking or serving, and none of these waits for
        # a forward to end. So where all ranks wait, the one that has waited least often has its answers: the others in their
        # forward have waited as often, and those past it answer any number, with the late ids or the gradients.
        self._looks_up = False
        self.prefetch()
        job, self._prefetch = self._prefetch, None
        # behind what has been asked or served; else, where the worker has not come to it, the first one will do
        if job is not None and (self._fetches or not self.following.forward_first.acquire(blocking=False)):
            self.prefetched = self._worker.submit(*job, self._looks_up)

    def _state(self, final: bool) -> NextIds:
        if self._ended:
            return NextIds.ENDED
        if self._next_ids is not None:
            return NextIds.REQUESTED
        return NextIds.UNKNOWN if final else NextIds.LATER

    def _ids_to_tell(self) -> list[KeyedJaggedTensor]:
        return [snapshot.features for snapshot in self._next_ids or ()]

    def _mode_to_tell(self) -> int:
        mispredicted = any(lookup.predicted is False for lookup in self.lookups.made)
        return self._mode.if_mispredicted if mispredicted else self._mode.mode

    def _take_gradient(self, again: bool) -> None:
        """Called in backward, when it has come by some of the lookups."""
        if again or self.current.gradient_sent:
            errors.second_backward(self._exchange.path)
        if self.lookups.all_gradients_came:
            self.send_gradient()
