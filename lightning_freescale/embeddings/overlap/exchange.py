"""The exchange of one collection, step by step: when the training thread submits a job, and what the worker thread does in it.

The training thread runs the model. A worker thread of the collection sends and receives all messages, in the same order on
every rank. A step takes four exchanges, in three jobs::

    training thread             job of the worker          what is exchanged

    first lookup of the         announce              A    to the owners: ids of the next batch, and the gradients of the
    current batch                                          batch before that no rank waits for
                                prefetch              B    from the owners: which rows the current batch still updates
                                                           (colliding), and the values of all others
    backward arrives at         exchange_colliding    C    to the owners: gradients of the current batch for colliding rows
    the rows of all lookups                           D    from the owners: the values of the colliding rows
    first lookup of the         (it waits for D)
    next batch

A and B run while the current batch computes, C and D between its backward and the lookup of the next one. An owner applies the
gradients that come with A before it reads the rows that go with B, so a row has all updates of the batches before.

A :class:`Batch` passes through this twice, first as the next one and then as the current one. It holds three values::

    requested    after A of the step before    the rows that this rank needs, and those that it gives as an owner
    rows         after B of the step before    their values; complete after D of the step before
    gradients    after its own backward        their sums: the urgent ones go with C of its step, all others with the next A

No sizes travel ahead. A's head contains its own, B's are bounded by what was asked, those of C and D are known from B. The
heads of A and C tell all ranks about additional exchanges:

- A rank whose model first looks up other ids than it had submitted is served anew, behind A.
- A rank that does not know the next ids when it needs the current ones sends them in a message of their own before B, with
  several collections once its forward has ended.
- A rank that looks up more than it had submitted asks for it in place of that message, or of C. Its rows were not compared with
  those of the next batch, so in that step all rows count as colliding.

Where gradients are clipped by more than their own row, or a loss is over all rows of a table, all gradients go with C. The
owners hold them; the update and D wait until they are complete. After such a loss all rows have changed: none is compared, and
all go with D.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Any

import numpy as np
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.id_prediction import GivesUp, KJTSnapshot
from lightning_freescale.embeddings.overlap.batch_state import Batch, StepLookups
from lightning_freescale.embeddings.overlap.id_exchange import KnownIds, NextIds
from lightning_freescale.embeddings.overlap.row_exchange import RowExchange
from lightning_freescale.embeddings.overlap.transport import ExchangeWorker


class ExchangeStep:
    """The training thread's side of one step: it submits the jobs, which every rank does in this order.

    With several collections it submits prefetch again when its forward ends, for ids that some rank did not know before.

    Args:
        exchange: the worker's side.
        worker: runs the jobs.
        before: the step before; None makes a placeholder before the first step, which is not open.
        gives_up: whether this rank gives up the prediction of ids.
        moves_without_gradient: whether an update by a gradient of zero would move a row.
        beside_others: whether the module has other collections, for which ranks may wait in their forward.

    Attributes:
        current: the batch of the step.
        following: the batch of the next one.
        ready: done when the rows of the current batch are complete; None if nothing was submitted.
        unsent: the batch whose last gradients have not been sent: that of the step before, after backward the current one.
        lookups: what the model has looked up.
        announced: the job in which this rank has announced what it looks up; None before.
        announced_submitted: whether it announced that it looks up what it had submitted.
        updated: the last job that brought updates of earlier steps into the tables; None if there was none.
        prefetched: the job in which this rank hears of the next batch; None before.
        pooled_rows: pooled rows that TorchRec would have sent to this rank, by the rank that sends them; 0 without bags.
        gradient_sent: whether the gradients have been handed over.
        held: the batch whose gradients the owners hold until they are clipped; None if they hold none.
        open: whether the step has begun and not ended.
        gives_up: as the argument; the caller may change it before the announcement.
    """

    def __init__(
        self,
        exchange: RowExchange,
        worker: ExchangeWorker,
        before: ExchangeStep | None = None,
        gives_up: GivesUp = (False, False),
        moves_without_gradient: bool = False,
        beside_others: bool = False,
    ) -> None:
        self._exchange, self._worker, self._moves = exchange, worker, moves_without_gradient
        self.current: Batch = exchange.new_batch() if before is None else before.following
        self.following: Batch = exchange.new_batch()
        self._submitted = None if before is None else before._submitted_next
        if self._submitted and not self.current.announced.submitted:
            self._submitted = []  # they were wrong, or the ranks' features differ: all are asked again
        self.ready = None if before is None else before._ready_next
        self.unsent: Batch | None = None if before is None else before.unsent
        self.updated: Future[Any] | None = None if before is None else before.updated
        self.open = before is not None
        self.lookups = StepLookups(self._submitted, self._take_gradient)
        self.announced: Future[Any] | None = None
        self.prefetched: Future[Any] | None = None
        self.announced_submitted = self.gradient_sent = False
        self.pooled_rows: np.ndarray | int = 0
        self.held: Batch | None = None
        self._next_ids: list[KJTSnapshot] | None = None
        self._submitted_next: list[KJTSnapshot] | None = None
        self._ready_next: Future[Any] | None = None
        self.gives_up = gives_up
        self._ended = False
        self._looks_up = beside_others  # until its forward has ended
        self._forward_first = Lock()  # taken by the first event: the forward ends, or the worker would wait for late ids
        self._prefetch_again: tuple[Any, ...] | None = None
        self._fetches = False  # whether it has asked or served in this step

    # -- the ids of the next batch

    def submit_next_ids(self, lookups: Sequence[KeyedJaggedTensor]) -> None:
        """Submit the ids of the batch after the current one, by lookup, before backward; the first ones of a step count."""
        if self.open and self.prefetched is None and not self._ended and self._next_ids is None:
            self._next_ids = [KJTSnapshot(features) for features in lookups]
            if self.lookups.made:
                self.prefetch()

    def submit_end(self) -> None:
        """Submit that there is no batch after the current one."""
        self._ended = self.open and self.prefetched is None

    def forget_next(self) -> None:
        """Forget the rows of the next batch that were fetched ahead, because the tables have been written."""
        self.following, self._submitted_next, self._ready_next = self._exchange.new_batch(), None, None

    @property
    def next_is_known(self) -> bool:
        """Whether the next batch's ids have been submitted, or that there is none."""
        return self._next_ids is not None or self._ended

    def _known(self, final: bool) -> KnownIds:
        """Return what this rank can tell of the next batch; ``final``: it will not know more later."""
        mispredicted = any(lookup.predicted is False for lookup in self.lookups.made)
        gives_up = self.gives_up[mispredicted]
        if self._ended:
            return KnownIds(NextIds.ENDED, (), gives_up)
        if self._next_ids is not None:
            return KnownIds(NextIds.REQUESTED, [snapshot.features for snapshot in self._next_ids], gives_up)
        return KnownIds(NextIds.UNKNOWN if final else NextIds.LATER, (), gives_up)

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
            predicted = bool(made[0].predicted) if made else early and bool(self._submitted)
            self.announced_submitted = predicted
            unsent, self.unsent = self.unsent, None
            batches = (self.following, self.current, unsent)
            job = (self._exchange.announce, *batches, looked_up, predicted, self._known(final))
            self.announced = self.updated = self._worker.submit(*job)
        return self.announced

    def prefetch(self, early: bool = False) -> None:
        """Submit all that this rank will know of the next batch before backward, after :meth:`announce`; done once."""
        if self.prefetched is None:
            self._submitted_next = self._next_ids
            self.announce(final=True, early=early)
            job = (self._exchange.prefetch, self.following, self.current, self._known(final=True))
            self.prefetched = self._worker.submit(*job, self._forward_first if self._looks_up else None)
            self._next_ids, self._prefetch_again = None, job if self._looks_up else None

    def fetch_more(self, lookups: Sequence[KeyedJaggedTensor] = ()) -> Future[Any]:
        """Submit that lookups need rows which were not submitted ahead; without any, that other ranks may need some."""
        self._fetches = True
        return self._worker.submit(self._exchange.fetch_more, self.current, list(lookups))

    def announce_in_time(self) -> None:
        """Submit what is known, because this rank waits in another collection."""
        if self.open and self.announced is None:
            if self.next_is_known:
                self.prefetch(early=True)
            else:
                self.announce(early=True)

    def serve_in_time(self) -> None:
        """Serve a rank that may need more rows, because this one waits in another collection."""
        if self.open and not self.gradient_sent:
            self.announce_in_time()
            self.fetch_more()

    def end_forward(self) -> None:
        """Submit what is known once the model has looked everything up: other ranks may wait for it before their backward."""
        if self.open:
            self._end_lookups()
            if not self.lookups.made:
                self.send_gradient()

    def send_gradient(self) -> None:
        """Hand over the gradients that have arrived; there are no others."""
        self._end_lookups()
        batch, self.gradient_sent = self.current, True
        self._worker.arrive()
        gradient, anew = self.lookups.gradient(self._exchange.local.dim, none_is_not_zero=self._moves)
        if self._moves and self.announced_submitted and not self.lookups.made:
            anew = []
        job = (self._exchange.exchange_colliding, batch, self.following, gradient, anew, self.pooled_rows)
        exchanged = self._worker.submit(*job)
        # rows change with updates only: without one, the next lookup waits for nothing that this backward has brought about
        self._ready_next = exchanged if batch.update.updates else self.prefetched
        self.unsent, self.held = (None, batch) if batch.update.held else (batch, None)

    def end(self) -> None:
        """Hand over, after backward, what backward has not, so that no rank waits for this one."""
        if self.open:
            if not self.gradient_sent:
                self.send_gradient()
            self.open, self.lookups = False, StepLookups()

    def apply_gradients(self) -> None:
        """Update the rows by the gradients that are held, if there are any. Collective."""
        held, self.held = self.held, None
        if held is not None:
            self._worker.arrive()
            self.updated = self._ready_next = self._worker.submit(self._exchange.apply_held, held, self.following)

    def drain(self) -> None:
        """Submit the last gradients of the steps that have ended, unless :meth:`announce` has; wait until they are applied."""
        if self.open and self.lookups.made:
            self.announce()
        elif self.unsent is not None:
            unsent, self.unsent = self.unsent, None
            self.updated = self._worker.submit(self._exchange.drain, unsent)
        if self.updated is not None:
            self._worker.wait(self.updated)

    def _end_lookups(self) -> None:
        # With several collections a rank tells ids that were late, and hears those of others, no earlier than here. Until then
        # its n-th wait for further rows gives every collection its n-th message, asking or serving, and none of these waits for
        # a forward to end. So where all ranks wait, the one that has waited least often has its answers: the others in their
        # forward have waited as often, and those past it answer any number, with the late ids or the gradients.
        self._looks_up = False
        self.prefetch()
        job, self._prefetch_again = self._prefetch_again, None
        # behind what has been asked or served; else, where the worker has not come to it, the first one will do
        if job is not None and (self._fetches or not self._forward_first.acquire(blocking=False)):
            self.prefetched = self._worker.submit(*job, None)

    def _take_gradient(self, again: bool) -> None:
        """Called in backward when the gradients of some lookups have arrived."""
        if again or self.gradient_sent:
            raise ValueError(
                f"embedding collection {self._exchange.path!r}: a second backward through the rows of one lookup, or one after "
                "its step has ended. Call backward once per batch, on the sum of the losses"
            )
        if self.lookups.all_gradients_came:
            self.send_gradient()
