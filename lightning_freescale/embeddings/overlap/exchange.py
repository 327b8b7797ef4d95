"""The exchange of one collection in a step: which jobs the training thread submits, and what the worker thread does in them.

The training thread runs the model. A worker thread of the collection sends and receives all messages, in the same order on
every rank. A step has four exchanges in three jobs::

    training thread             job of the worker          exchange

    first lookup of the         announce              A    to the owners: ids of the next batch, and the patient gradients
    current batch                                          of the batch before
                                prefetch              B    from the owners: which rows the current batch still updates
                                                           (colliding rows), and the values of all others
    backward reaches the        exchange_colliding    C    to the owners: gradients of the current batch for colliding rows
    rows of all lookups                               D    from the owners: the values of the colliding rows
    first lookup of the         (waits for D)
    next batch

A and B run while the current batch computes. C and D run between its backward and the lookup of the next batch. An owner
applies the gradients of A before it reads the rows for B, so a row contains all updates of earlier batches.

A :class:`Batch` passes through this twice, first as the next batch and then as the current one. It holds three values::

    requested    after A of the step before    the rows that this rank needs, and those that it sends as an owner
    rows         after B of the step before    their values; complete after D of the step before
    gradients    after its own backward        their sums: the urgent ones go with C, the patient ones with the next A

No sizes are sent ahead. The head of A contains the sizes of A, the requests bound those of B, and B implies those of C and D.
The heads of A and C announce additional exchanges to all ranks:

- If the first lookup of a rank has other ids than submitted, the rank receives other rows after A.
- If a rank does not know the next ids when it needs the current rows, it sends them in a separate message before B. With
  several collections this message follows the end of the forward.
- If a rank looks up more than it submitted, it requests these rows in place of that message, or of C. They were not compared
  with the rows of the next batch, so all rows of that step count as colliding.

If clipping needs more than one row, or the loss is over all rows of a table, all gradients go with C. The owners hold them
until they are complete, and delay the update and D. A loss over all rows changes every row, so no rows are compared and D
sends all.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Any

from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.id_prediction import GivesUp, KJTSnapshot
from lightning_freescale.embeddings.overlap.batch_state import Batch, StepLookups
from lightning_freescale.embeddings.overlap.id_exchange import KnownIds, NextIds
from lightning_freescale.embeddings.overlap.row_exchange import RowExchange
from lightning_freescale.embeddings.overlap.transport import ExchangeWorker


class ExchangeStep:
    """The training thread's side of one step. It submits the jobs, in the same order on every rank.

    ``before`` is the step before; it is None for the placeholder before the first step, which is not open.
    ``moves_without_gradient`` tells whether an update with a gradient of zero would change a row, and ``beside_others`` whether
    the module has other collections, for which ranks may wait in their forward.
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
            self._submitted = []  # wrong ids, or features that differ between ranks: request all of them again
        # the job that completes the rows of the current batch; None if nothing was submitted
        self.ready = None if before is None else before._ready_next
        # the batch whose patient gradients are unsent: the one before, after backward the current one
        self.unsent: Batch | None = None if before is None else before.unsent
        # the last job that applies updates of earlier steps to the tables; None if there was none
        self.updated: Future[Any] | None = None if before is None else before.updated
        self.open = before is not None  # until :meth:`end`
        self.lookups = StepLookups(self._submitted, self._take_gradient)
        self.announced: Future[Any] | None = None  # the job that announces the lookups of this rank
        self.announced_submitted = False  # whether this rank announced that it looks up what it submitted
        self.prefetched: Future[Any] | None = None  # the job in which this rank learns of the next batch
        self.gradient_sent = False  # whether the gradients have been submitted
        self.held: Batch | None = None  # the batch whose gradients the owners hold until they are clipped
        self._next_ids: list[KJTSnapshot] | None = None
        self._submitted_next: list[KJTSnapshot] | None = None
        self._ready_next: Future[Any] | None = None
        self.gives_up = gives_up  # the caller may change it before the announcement
        self._ended = False  # whether no batch follows
        self._looks_up = beside_others  # until the forward has ended
        self._forward_first = Lock()  # taken by the first event: the forward ends, or the worker would wait for late ids
        self._prefetch_again: tuple[Any, ...] | None = None
        self._fetches = False  # whether fetch_more was submitted in this step

    # -- the ids of the next batch

    def submit_next_ids(self, lookups: Sequence[KeyedJaggedTensor]) -> None:
        """Submit the ids of the next batch by lookup, before backward. Only the first call of a step counts."""
        if self.open and self.prefetched is None and not self._ended and self._next_ids is None:
            self._next_ids = [KJTSnapshot(features) for features in lookups]
            if self.lookups.made:
                self.prefetch()

    def submit_end(self) -> None:
        self._ended = self.open and self.prefetched is None

    def forget_next(self) -> None:
        self.following, self._submitted_next, self._ready_next = self._exchange.new_batch(), None, None

    @property
    def next_is_known(self) -> bool:
        """Whether the next ids have been submitted, or no batch follows."""
        return self._next_ids is not None or self._ended

    def _known(self, final: bool) -> KnownIds:
        """Return what this rank knows of the next batch; ``final`` if it will not know more later."""
        mispredicted = any(lookup.predicted is False for lookup in self.lookups.made)
        gives_up = self.gives_up[mispredicted]
        if self._ended:
            return KnownIds(NextIds.ENDED, (), gives_up)
        if self._next_ids is not None:
            return KnownIds(NextIds.REQUESTED, [snapshot.features for snapshot in self._next_ids], gives_up)
        return KnownIds(NextIds.UNKNOWN if final else NextIds.LATER, (), gives_up)

    # -- the jobs, in their order

    def announce(self, final: bool = False, early: bool = False) -> Future[Any]:
        """Submit the lookups of this rank and the next ids, once; ``final`` if the next ids will not be known later.

        Before the first lookup, ``early`` announces the submitted lookups; otherwise none are announced.
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
        """Submit all that this rank knows of the next batch before backward, once. Submit :meth:`announce` before."""
        if self.prefetched is None:
            self._submitted_next = self._next_ids
            self.announce(final=True, early=early)
            job = (self._exchange.prefetch, self.following, self.current, self._known(final=True))
            self.prefetched = self._worker.submit(*job, self._forward_first if self._looks_up else None)
            self._next_ids, self._prefetch_again = None, job if self._looks_up else None

    def fetch_more(self, lookups: Sequence[KeyedJaggedTensor] = ()) -> Future[Any]:
        """Submit lookups whose rows were not submitted ahead; without lookups, serve those of other ranks."""
        self._fetches = True
        return self._worker.submit(self._exchange.fetch_more, self.current, list(lookups))

    def announce_in_time(self) -> None:
        """Announce what is known, because this rank waits in another collection."""
        if self.open and self.announced is None:
            if self.next_is_known:
                self.prefetch(early=True)
            else:
                self.announce(early=True)

    def serve_in_time(self) -> None:
        """Serve ranks that may need more rows, because this rank waits in another collection."""
        if self.open and not self.gradient_sent:
            self.announce_in_time()
            self.fetch_more()

    def end_forward(self) -> None:
        """Submit what is known after the last lookup: other ranks may wait for it before their backward."""
        if self.open:
            self._end_lookups()
            if not self.lookups.made:
                self.send_gradient()

    def send_gradient(self) -> None:
        """Submit the gradients that have arrived, as the whole gradient of the step."""
        self._end_lookups()
        batch, self.gradient_sent = self.current, True
        self._worker.arrive()
        gradient, anew = self.lookups.gradient(self._exchange.local.dim, none_is_not_zero=self._moves)
        if self._moves and self.announced_submitted and not self.lookups.made:
            anew = []
        exchanged = self._worker.submit(self._exchange.exchange_colliding, batch, self.following, gradient, anew)
        # rows change only with updates: without one, the next lookup does not wait for the gradients of this backward
        self._ready_next = exchanged if batch.update.updates else self.prefetched
        self.unsent, self.held = (None, batch) if batch.update.held else (batch, None)

    def end(self) -> None:
        """Submit what backward has not submitted, so that no rank waits for this one."""
        if self.open:
            if not self.gradient_sent:
                self.send_gradient()
            self.open, self.lookups = False, StepLookups()

    def apply_gradients(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            self._worker.arrive()
            self.updated = self._ready_next = self._worker.submit(self._exchange.apply_held, held, self.following)

    def drain(self) -> None:
        """Submit the unsent gradients of ended steps and wait until they are applied."""
        if self.open and self.lookups.made:
            self.announce()
        elif self.unsent is not None:
            unsent, self.unsent = self.unsent, None
            self.updated = self._worker.submit(self._exchange.drain, unsent)
        if self.updated is not None:
            self._worker.wait(self.updated)

    def _end_lookups(self) -> None:
        # With several collections, a rank sends late ids and receives those of others only from here on. Before, its n-th wait
        # for further rows gives every collection its n-th message, asking or serving, and none of these waits for the end of a
        # forward. So if all ranks wait, the rank with the fewest waits gets its answers: other ranks in their forward have
        # waited as often, and those past it answer any number of messages, with late ids or gradients.
        self._looks_up = False
        self.prefetch()
        job, self._prefetch_again = self._prefetch_again, None
        # submit it again after messages that asked or served; otherwise the first job suffices if it has not started
        if job is not None and (self._fetches or not self._forward_first.acquire(blocking=False)):
            self.prefetched = self._worker.submit(*job, None)

    def _take_gradient(self, again: bool) -> None:
        if again or self.gradient_sent:
            raise ValueError(
                f"Embedding collection {self._exchange.path!r}: backward ran a second time through the rows of one lookup, or "
                "after the end of its step. Call backward once per batch, on the sum of the losses."
            )
        if self.lookups.all_gradients_came:
            self.send_gradient()
