"""The exchanges of a collection: what its worker does with every batch, in the same order on every rank.

A step takes four of them, in three jobs::

    announce     A  ids of the next batch, and the gradients of the batch before for which nobody waits      to the owners
    prefetch     B  which rows the current batch still updates (colliding), and the values of all others     from the owners
    exchange_    C  gradients of the current batch for the colliding rows                                    to the owners
    colliding    D  values of the colliding rows                                                             from the owners

A and B run while the current batch computes, C and D between its backward and the lookup of the next one. An owner applies
the gradients that come with A before it reads the rows that go with B, so a row has all updates of the batches before.

No sizes travel ahead: A's head tells its own, B's are bounded by what was asked, those of C and D are known from B. Two things
add exchanges: a rank whose model looks up other ids than it had submitted is served anew, and a rank that does not know the
next ids when it needs the current ones sends them in a message of their own; the heads of A tell all ranks of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.comm_ops import get_gradient_division

from lightning_freescale.embeddings.overlap.batch_state import GradientAccumulator, PipelinedBatch, SomeRows
from lightning_freescale.embeddings.overlap.handshake import Head, IdsToSend, LookedUp, LookupHandshake, NextIds
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.messages import PartLayout, put, take
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics
from lightning_freescale.embeddings.overlap.row_requests import IncomingRows, RowRequest, RowSubset

_IDS, _OTHER_IDS = Head._fields.index("ids"), Head._fields.index("other_ids")
_FEWEST_IDS = 1024
"""Ids that a message has room for at first; what does not fit goes in one more exchange, and the room grows for the next."""


class RowExchange:
    """Runs on the collection's worker only, so that its rows need no lock.

    Args:
        path: of the collection, for errors.
        local: this rank's rows.
        group: process group of this collection alone.
        dedup: request each row once per rank and batch.
        statistics: what to count in.
    """

    def __init__(
        self, path: str, local: LocalRows, group: dist.ProcessGroup, dedup: bool, statistics: ExchangeStatistics
    ) -> None:
        self.local, self.group, self.statistics = local, group, statistics
        self.accumulator = GradientAccumulator()
        self._rank, self._ranks, self._device = group.rank(), group.size(), local.layout.device
        self._handshake = LookupHandshake(path, group, local.layout, dedup)
        self._no_rows = self._handshake.no_rows
        self._slots = self._no_rows.slots.shape[1]
        self._preamble = len(Head._fields) + self._slots
        self._room, self._messages, self._batches = _FEWEST_IDS, 0, 0
        # the number of the last batch that asked for each row: two batches are compared without sorting, and nothing is reset
        self._last_batch = torch.zeros(local.count, dtype=torch.int32, device=self._device)
        self._window_start = 0
        self._heads: list[Head] = []

    def new_batch(self) -> PipelinedBatch:
        """Return the state of a batch that nothing is known of."""
        self._batches += 1
        request = self._no_rows
        incoming = IncomingRows(request.order, request.sizes, request.slots)
        return PipelinedBatch(self._batches, request, incoming, self._rows(0), request.inverse)

    # -- the jobs of a step

    def announce(
        self,
        following: PipelinedBatch,
        current: PipelinedBatch,
        previous: PipelinedBatch | None,
        looked_up: KeyedJaggedTensor | None,
        predicted: bool,
        state: NextIds,
        features: KeyedJaggedTensor | None,
        mode: int,
    ) -> None:
        """A: tell the owners which rows the batch after ``current`` needs, and send gradients that nobody waits for.

        Args:
            following: the batch after ``current``.
            current: the batch that computes.
            previous: the batch whose last gradients have not been sent; None if there is none.
            looked_up: what the model has looked up in ``current``, None if nothing.
            predicted: whether that was submitted ahead.
            state: of the ids of ``following``.
            features: these ids.
            mode: how this rank comes to know ids.
        """
        lookup, request, wrong = LookedUp.PREDICTED, self._no_rows, None
        if not (predicted and current.submitted):
            lookup, current.digest = LookedUp.OTHERS, 0
            try:
                if looked_up is not None:
                    request, current.digest = self._handshake.request(looked_up)
            except ValueError as error:
                lookup, wrong = LookedUp.WRONG, error.with_traceback(None)  # no circle through this frame
        sent = self._handshake.ids_to_send(state, features, mode)
        head = self._head(sent, current, lookup)
        self._heads, following.incoming = self._send_ids(sent, head, request.sizes, previous)
        following.request, following.digest = sent.request, sent.digest
        self._handshake.raise_errors(self._heads, wrong, looked_up)
        if any(head.lookup == LookedUp.OTHERS for head in self._heads):
            self._serve_anew(current, request, lookup)

    def prefetch(
        self,
        following: PipelinedBatch,
        current: PipelinedBatch,
        state: NextIds,
        features: KeyedJaggedTensor | None,
        mode: int,
    ) -> None:
        """B: learn which rows of ``following`` are updated before it, and fetch all others."""
        if any(head.state == NextIds.LATER for head in self._heads):
            self._hear_later(following, current, self._handshake.ids_to_send(state, features, mode))
        states = [head.state for head in self._heads]
        agree = len({head.digest for head in self._heads if head.digest}) <= 1
        following.mode = max(head.mode for head in self._heads)
        following.ended_ranks = [rank for rank, each in enumerate(states) if each == NextIds.ENDED]
        # ranks that disagree on the features are all asked again at the lookup, where it is an error
        following.any_submitted = agree and NextIds.REQUESTED in states
        following.submitted = agree and states[self._rank] == NextIds.REQUESTED
        following.all_submitted = agree and set(states) == {NextIds.REQUESTED}
        if not following.any_submitted:
            nothing = self.new_batch()
            following.request, following.incoming, following.digest = nothing.request, nothing.incoming, 0
            return
        self._send_rows(following, current, *self._find_collisions(following, current))

    def exchange_colliding(self, current: PipelinedBatch, following: PipelinedBatch, gradient: Tensor | None) -> None:
        """C and D: send what the next batch waits for of a gradient (``[ids, dim]``; None is zero), and fetch its last rows."""
        current.gradient = self._sum_per_row(current, gradient)
        if current.urgent is None or following.awaited is None:
            return
        rows, gradients = self._owned(
            current, current.urgent, self._exchange_some(current.gradient.index_select(0, current.urgent.requested.index), current.urgent, to_owners=True)
        )
        kept = self.accumulator.rows
        self._update(current, rows, gradients, self._last_batch[kept[0]] == following.number if kept else None)
        awaited = following.awaited
        values = self.local.read(following.incoming.rows.index_select(0, awaited.incoming.index))
        late = self._exchange_some(values, awaited, to_owners=False)
        following.rows[following.late_place : following.late_place + late.shape[0]] = late

    # -- between steps

    def drain(self, previous: PipelinedBatch) -> None:
        """Send the gradients of a batch that nobody waits for, now. Collective."""
        sent = IdsToSend(NextIds.DRAINING, self._no_rows)
        heads, _ = self._send_ids(sent, self._head(sent, previous, LookedUp.PREDICTED), self._no_rows.sizes, previous)
        self._handshake.raise_errors(heads, None, None)

    def discard_accumulated(self, current: PipelinedBatch, previous: PipelinedBatch | None) -> None:
        """Forget the gradients kept for an optimizer step that does not come; a window begins with ``current``."""
        self.accumulator.pop()
        self._window_start = current.number
        if previous is not None:
            previous.patient = SomeRows(*(RowSubset.all_of(self._no_rows.sizes, self._device) for _ in range(2)))

    # -- A

    def _head(self, sent: IdsToSend, current: PipelinedBatch, lookup: LookedUp) -> Head:
        self._messages += 1
        most, updates = max(sent.request.sizes), int(current.updates)
        number = self._messages & 0x7FFFFFFF
        return Head(number, sent.state, lookup, 0, most, 0, sent.digest, current.digest, updates, sent.mode)

    def _send_ids(
        self, sent: IdsToSend, head: Head, other_ids: Sequence[int], previous: PipelinedBatch | None
    ) -> tuple[list[Head], IncomingRows]:
        """Exchange heads, ids and the last gradients of ``previous``, and apply these; return what the other ranks told."""
        request, room = sent.request, self._room
        given = None if previous is None else self._patient(previous)
        counts = [min(size, room) for size in request.sizes]
        gives = given.requested.sizes if given is not None else self._no_rows.sizes
        gets = given.incoming.sizes if given is not None else self._no_rows.sizes
        parts = PartLayout(self.local.dim, [4 * (self._preamble + count) for count in counts], gives)
        message = self._rows(parts.length)
        if given is not None and sum(gives):
            source = torch.zeros(parts.length, dtype=torch.int64, device=self._device)
            put(source, parts.first_rows, gives, given.requested.index)
            torch.index_select(previous.gradient, 0, source, out=message)
        words = message.view(torch.int32).view(-1)
        heads = np.empty((self._ranks, self._preamble), np.int32)
        heads[:, : len(head)] = head
        heads[:, _IDS], heads[:, _OTHER_IDS], heads[:, len(head) :] = request.sizes, other_ids, request.slots
        put(words, parts.words(), [self._preamble] * self._ranks, torch.from_numpy(heads.ravel()).to(self._device))
        put(words, parts.words(self._preamble), counts, self._first_of_each(request.rows, request.sizes, counts))

        slots = PartLayout(self.local.dim, [4 * (self._preamble + room)] * self._ranks, gets)
        received = self._exchange(message, slots.length, parts.sizes, slots.sizes)
        words = received.view(torch.int32).view(-1)
        told = take(words, slots.words(), [self._preamble] * self._ranks).view(self._ranks, -1).tolist()
        answers = [Head(*each[: len(head)]) for each in told]
        arrived = [min(answer.ids, room) for answer in answers]
        rows = take(words, slots.words(self._preamble), arrived)
        if given is not None:
            # the gradients follow the ids that came, wherever the slot ends
            came = PartLayout(self.local.dim, [4 * (self._preamble + count) for count in arrived], gets)
            begin = [slot + first - start for slot, first, start in zip(slots.starts, came.first_rows, came.starts)]
            self._apply_patient(previous, given, take(received, begin, gets))
        own_ids = sum(counts) - counts[self._rank] + (self._ranks - 1) * self._preamble
        self.statistics.count("ids_bytes", 4 * own_ids)
        self.statistics.count("non_colliding_bytes", 4 * self.local.dim * (sum(gives) - gives[self._rank]))
        most = max(answer.most_ids for answer in answers)
        if most > room:
            rows = self._send_rest(request, counts, rows, arrived, [answer.ids for answer in answers])
            self._room = 1 << most.bit_length()
        by_slot = torch.tensor([each[len(head) :] for each in told], dtype=torch.int64).view(self._ranks, self._slots)
        return answers, IncomingRows(rows.long(), [answer.ids for answer in answers], by_slot)

    def _send_rest(
        self, request: RowRequest, sent: list[int], rows: Tensor, arrived: list[int], sizes: list[int]
    ) -> Tensor:
        """Exchange the ids that did not fit, and return all that came, by rank."""
        gives = [size - count for size, count in zip(request.sizes, sent)]
        gets = [size - count for size, count in zip(sizes, arrived)]
        begins = [*accumulate(request.sizes, initial=0)]
        rest = take(request.rows, [begin + count for begin, count in zip(begins, sent)], gives)
        received = self._exchange_words(rest, gives, gets)
        pairs = zip(rows.split(arrived), received.split(gets))
        return torch.cat([part for pair in pairs for part in pair])

    def _hear_later(self, following: PipelinedBatch, current: PipelinedBatch, sent: IdsToSend) -> None:
        """Hear the ids of the ranks that did not know them when they needed the rows of the current batch."""
        later = [head.state == NextIds.LATER for head in self._heads]
        if not later[self._rank]:
            sent = IdsToSend(NextIds.TOLD, self._no_rows)
        heads, incoming = self._send_ids(sent, self._head(sent, current, LookedUp.PREDICTED), self._no_rows.sizes, None)
        self._handshake.raise_errors(heads, None, None)
        self._heads = [new if is_later else old for new, old, is_later in zip(heads, self._heads, later)]
        following.incoming = following.incoming.replaced(incoming, later)
        if later[self._rank]:
            following.request, following.digest = sent.request, sent.digest

    def _serve_anew(self, current: PipelinedBatch, request: RowRequest, lookup: LookedUp) -> None:
        """Serve the ranks whose model has looked up others than were submitted, before rows are compared with this batch."""
        changed = [head.lookup == LookedUp.OTHERS for head in self._heads]
        gets = [head.other_ids + self._slots if asks else 0 for head, asks in zip(self._heads, changed)]
        gives = [size + self._slots if lookup == LookedUp.OTHERS else 0 for size in request.sizes]
        words = request.rows
        if self._slots:  # the counts of each rank go before its ids
            by_rank = zip(request.slots.int().to(self._device), request.rows.split(request.sizes))
            words = torch.cat([part for pair in by_rank for part in pair])[: sum(gives)]
        received = self._exchange_words(words, gives, gets)
        parts = received.split(gets)
        by_slot = torch.stack([part[: self._slots] if asks else part.new_zeros(self._slots) for part, asks in zip(parts, changed)])
        sizes = [head.other_ids if asks else 0 for head, asks in zip(self._heads, changed)]
        rows = torch.cat([part[self._slots :] for part in parts]).long()
        new = IncomingRows(rows, sizes, by_slot.long().cpu())
        whole = SomeRows(RowSubset.all_of(request.sizes, self._device), RowSubset.all_of(sizes, self._device))
        values = self._exchange_some(self.local.read(rows), whole, to_owners=False)
        if lookup == LookedUp.OTHERS:
            current.request, current.rows, current.places = request, values, request.inverse
        current.incoming = current.incoming.replaced(new, changed)
        self._last_batch[rows] = current.number

    # -- B

    def _find_collisions(self, following: PipelinedBatch, current: PipelinedBatch) -> tuple[Tensor, Tensor]:
        """Owner: return which incoming rows of ``following`` are updated before it, and which of ``current`` it needs."""
        rows = following.incoming.rows
        if current.updates:  # a row collides if any batch of the window has it
            awaited = self._last_batch[rows] >= self._window_start
            self._window_start = following.number
        else:
            awaited = torch.zeros_like(rows, dtype=torch.bool)
        self._last_batch[rows] = following.number
        self.statistics.count_collisions(rows, awaited)
        return awaited, self._last_batch[current.incoming.rows] == following.number

    def _send_rows(self, following: PipelinedBatch, current: PipelinedBatch, awaited: Tensor, urgent: Tensor) -> None:
        """Exchange which rows collide, and the values of those that do not."""
        dim, device = self.local.dim, self._device
        asked, here = following.incoming.sizes, current.incoming.sizes if current.updates else self._no_rows.sizes
        late, at_once = RowSubset.split(awaited, asked)
        parts = PartLayout(dim, [a + b for a, b in zip(asked, here)], at_once.sizes)
        source = torch.zeros(parts.length, dtype=torch.int64, device=device)
        put(source, parts.first_rows, at_once.sizes, following.incoming.rows.index_select(0, at_once.index))
        message = self.local.read(source) if at_once.index.numel() else self._rows(parts.length)
        flags, starts = message.view(torch.uint8).view(-1), parts.octets()
        put(flags, starts, asked, awaited.view(torch.uint8))
        if current.updates:
            put(flags, [start + size for start, size in zip(starts, asked)], here, urgent.view(torch.uint8))

        asks, mine = following.request.sizes, current.request.sizes if current.updates else self._no_rows.sizes
        slots = PartLayout(dim, [a + b for a, b in zip(asks, mine)], asks)
        # the rows that come last go behind the slots
        following.late_place = slots.length
        following.rows = self._rows(slots.length + sum(asks))
        self._exchange_into(following.rows[: slots.length], message, parts.sizes, slots.sizes)
        flags, starts = following.rows.view(torch.uint8).view(-1), slots.octets()
        waiting, others = RowSubset.split(take(flags, starts, asks).view(torch.bool), asks)
        places = torch.empty(sum(asks), dtype=torch.int64, device=device)
        places[waiting.index] = torch.arange(slots.length, slots.length + waiting.index.numel(), device=device)
        # in its slot, behind the rows before it that are there
        before = [first - done for first, done in zip(slots.first_rows, accumulate(others.sizes, initial=0))]
        shifts = torch.repeat_interleave(torch.tensor(before), torch.tensor(others.sizes), output_size=others.index.numel())
        places[others.index] = torch.arange(others.index.numel(), device=device) + shifts.to(device)
        following.places = places.index_select(0, following.request.inverse)
        following.awaited = SomeRows(waiting, late)
        if current.updates:
            shared = take(flags, [start + size for start, size in zip(starts, asks)], mine).view(torch.bool)
            pairs = zip(RowSubset.split(shared, mine), RowSubset.split(urgent, here))
            current.urgent, current.patient = (SomeRows(*pair) for pair in pairs)
        moved = sum(asked) + sum(here) - asked[self._rank] - here[self._rank]
        self.statistics.count("ids_bytes", moved)
        self.statistics.count("non_colliding_bytes", 4 * dim * (sum(at_once.sizes) - at_once.sizes[self._rank]))

    # -- gradients

    def _sum_per_row(self, current: PipelinedBatch, gradient: Tensor | None) -> Tensor:
        if gradient is None:
            return torch.zeros(len(current.request.rows), self.local.dim, device=self._device)
        self.statistics.count_lookup(current.request, self._rank, self.local.dim)
        sums = current.request.sum_per_row(gradient)
        return sums.div_(self._ranks) if get_gradient_division() else sums

    def _patient(self, batch: PipelinedBatch) -> SomeRows:
        """Return the rows of a batch whose gradients nobody waits for."""
        if batch.patient is None:
            both = (batch.request.sizes, batch.incoming.sizes)
            batch.patient = SomeRows(*(RowSubset.all_of(sizes, self._device) for sizes in both))
        return batch.patient

    def _apply_patient(self, previous: PipelinedBatch, given: SomeRows, gradients: Tensor) -> None:
        rows, gradients = self._owned(previous, given, gradients)
        previous.gradient = None
        if previous.updates:
            self._update(previous, rows, gradients, None)
        else:
            self.accumulator.accumulate(rows, gradients)

    def _owned(self, batch: PipelinedBatch, chosen: SomeRows, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return some rows that this rank owns, and their gradients, in the order of summation."""
        rows = batch.incoming.rows.index_select(0, chosen.incoming.index)
        order = batch.incoming.order_by_slot(chosen.incoming.index)
        return (rows, gradients) if order is None else (rows[order], gradients[order])

    def _update(self, batch: PipelinedBatch, rows: Tensor, gradients: Tensor, due: Tensor | None) -> None:
        if self.accumulator.rows:
            kept_rows, kept_gradients = self.accumulator.pop(due)
            rows, gradients = torch.cat([*kept_rows, rows]), torch.cat([*kept_gradients, gradients])
        self.local.update(rows, gradients, batch.rates, batch.step)

    # -- transport

    def _exchange_some(self, values: Tensor, chosen: SomeRows, to_owners: bool) -> Tensor:
        """Exchange values of some rows, ``[rows, dim]``, of which both sides know how many there are."""
        given, got = chosen.requested.sizes, chosen.incoming.sizes
        if not to_owners:
            given, got = got, given
        dim = self.local.dim
        self.statistics.count("colliding_bytes", 4 * dim * (sum(given) - given[self._rank]))
        return self._exchange(values, sum(got), [size * dim for size in given], [size * dim for size in got])

    def _exchange_words(self, words: Tensor, gives: list[int], gets: list[int]) -> Tensor:
        received = words.new_empty(sum(gets))
        self._exchange_into(received.view(torch.float32), words.view(torch.float32), gives, gets)
        self.statistics.count("ids_bytes", 4 * (sum(gives) - gives[self._rank]))
        return received

    def _exchange(self, message: Tensor, rows: int, gives: list[int], gets: list[int]) -> Tensor:
        received = self._rows(rows)
        self._exchange_into(received, message, gives, gets)
        return received

    def _exchange_into(self, received: Tensor, message: Tensor, gives: list[int], gets: list[int]) -> None:
        """Send ``gives[rank]`` floats of the message to each rank, and take at most ``gets[rank]`` from it."""
        with self.statistics.timed("transfer_s"):
            self.group.exchange(received.view(-1), message.view(-1), gets, gives)

    def _first_of_each(self, rows: Tensor, sizes: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Return the first ``counts[rank]`` of each rank's ``sizes[rank]`` rows."""
        if list(sizes) == list(counts):
            return rows
        return take(rows, [*accumulate(sizes, initial=0)], counts)

    def _rows(self, count: int) -> Tensor:
        return torch.empty(count, self.local.dim, device=self._device)

