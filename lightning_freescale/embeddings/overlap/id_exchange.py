"""Messages with a head: the state of each rank, the rows it requests, and gradients.

A message is one flat tensor of words of 4 bytes with a part per rank. A part begins with bytes, followed by rows. Both start at
multiples of the row width, so that rows are gathered directly into place. A receiver knows an upper bound of each part: a slot
may be longer than the part that arrives in it. A requested row is a word: its number on the owner, which has fewer than 2**31.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.overlap.batch_state import RequestedRows, SomeRows
from lightning_freescale.embeddings.overlap.row_requests import IncomingRows, RowRequest
from lightning_freescale.embeddings.overlap.transport import RowTransport

_FEW_RANKS = 32
"""Up to this number of ranks, a slice per rank is faster than an index of all numbers."""


def ranges(starts: Sequence[int], counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the concatenated ranges of ``counts[k]`` numbers from ``starts[k]`` on."""
    before = [*accumulate(counts, initial=0)]
    shifts = torch.tensor([start - done for start, done in zip(starts, before)], device=device)
    shifts = torch.repeat_interleave(shifts, torch.tensor(counts, device=device), output_size=before[-1])
    return shifts + torch.arange(before[-1], device=device)


def take(source: Tensor, starts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Return the concatenated slices of ``counts[k]`` elements of ``source`` from ``starts[k]`` on."""
    if len(counts) > _FEW_RANKS:
        return source[ranges(starts, counts, source.device)]
    return torch.cat([source[start : start + count] for start, count in zip(starts, counts)])


def put(target: Tensor, starts: Sequence[int], counts: list[int], values: Tensor) -> None:
    """Write ``values`` to the positions that :func:`take` reads."""
    if len(counts) > _FEW_RANKS:
        target[ranges(starts, counts, target.device)] = values.to(target.dtype)  # unlike a slice, an index does not convert
        return
    for start, count, part in zip(starts, counts, values.split_with_sizes(counts)):
        target[start : start + count] = part


class PartLayout:
    """The positions of the parts of a message. The part of a rank is a preamble of bytes, followed by rows."""

    def __init__(self, width: int, preambles: Sequence[int], rows: Sequence[int]) -> None:
        heads = [-(-size // (4 * width)) for size in preambles]
        # in rows: the start of each part and the end of the last, and the start of the rows of each part
        self.starts = [*accumulate((head + count for head, count in zip(heads, rows)), initial=0)]
        self.first_rows = [start + head for start, head in zip(self.starts, heads)]
        self.sizes = [width * (head + count) for head, count in zip(heads, rows)]  # in words of 4 bytes
        self.length, self._width = self.starts[-1], width

    def words(self, offset: int = 0) -> list[int]:
        """Return the start of each part plus ``offset``, in words of 4 bytes."""
        return [start * self._width + offset for start in self.starts[:-1]]


class NextIds(IntEnum):
    """The state of the next batch's ids on a rank."""

    UNKNOWN = 0  # they cannot be known ahead
    ENDED = 1  # there is no next batch
    REQUESTED = 2  # they are in this message
    LATER = 3  # they may be in the next message, which all ranks send
    ANNOUNCED = 4  # they were in an earlier message
    DRAINING = 5  # no ids: this message contains gradients only
    EVALUATING = 6  # the message belongs to no step: it requests the rows of a lookup without gradients


class LookedUp(IntEnum):
    """The lookups of a rank in the current batch."""

    PREDICTED = 0  # the ids that were submitted ahead
    OTHERS = 1  # other ids, or ids that were not submitted; they follow
    MORE = 2  # more ids in this message, which is repeated after their rows have been sent
    WRONG = 3  # ids that have no row; the error follows


class Head(NamedTuple):
    """The first numbers of a message, each of 32 bits."""

    number: int  # number of the message, to detect ranks that are out of step
    state: int  # NextIds
    lookup: int  # LookedUp
    ids: int  # number of rows requested from the receiver in this message
    most_ids: int  # largest number of rows that the sender requests from any rank
    gradients: int  # number of rows whose gradients follow
    moves: int  # whether the sender has a gradient of the current batch
    updates: int  # whether an optimizer step follows the current batch
    gives_up: int  # whether the sender gives up the prediction of ids
    evaluated: int  # number of the module that the sender looks up outside of steps, from 1 on; 0 for none


def refuse_ranks_out_of_step(heads: Sequence[Head]) -> None:
    draining = [rank for rank, head in enumerate(heads) if head.state == NextIds.DRAINING]
    if 0 < len(draining) < len(heads):
        raise RuntimeError(
            f"Ranks {draining} apply pending updates to the tables (they evaluate, save, or call state_dict()). The other "
            "ranks go on training. Do this on every rank."
        )
    evaluating = [rank for rank, head in enumerate(heads) if head.state == NextIds.EVALUATING]
    if 0 < len(evaluating) < len(heads):
        raise RuntimeError(
            f"Ranks {evaluating} look up rows outside of a training step. The other ranks train or save. Evaluate on "
            "every rank. If ranks evaluate different numbers of batches, do it inside `with strategy.evaluation():`. In a "
            "loop of your own, call engine.serve_evaluation() afterwards."
        )
    if len({head.number for head in heads}) > 1:
        numbers = [head.number for head in heads]
        raise RuntimeError(f"The ranks are out of step: they send messages {numbers}. Run the same loop on every rank.")
    steps = [rank for rank, head in enumerate(heads) if head.updates]
    if 0 < len(steps) < len(heads):
        raise ValueError(
            f"After this batch, ranks {steps} take an optimizer step and the other ranks accumulate gradients. Use the "
            "same number of batches and the same accumulate_grad_batches on every rank."
        )


class KnownIds(NamedTuple):
    """This rank's knowledge of the ids of the next batch."""

    state: NextIds
    lookups: Sequence[KeyedJaggedTensor]
    gives_up: bool  # whether this rank gives up the prediction of ids


@dataclass(frozen=True)
class IdsToSend:
    """The content of a message of this rank, without gradients."""

    state: NextIds
    request: RowRequest
    gives_up: bool = False  # as in Head
    moves: bool = False  # as in Head
    evaluated: int = 0  # as in Head
    before: RequestedRows | None = None  # rows of an earlier message; they stay valid for ranks without a request now


_IDS, _MOST_IDS, _GRADIENTS = map(Head._fields.index, ("ids", "most_ids", "gradients"))
_FEWEST_IDS = 1024
"""The initial number of ids that a part has space for. The rest goes in one more exchange, and the space grows for the next."""


def heads_travel_apart(device: torch.device) -> bool:
    """Return whether heads are sent from host to host separately: the host would have to wait for heads on a GPU."""
    return device.type == "cuda"


class IdExchange:
    """Sends ``[head | rows by slot | ids | gradients]`` to every owner, with ``slots`` as in :class:`.RowRequest`."""

    def __init__(self, transport: RowTransport, slots: int) -> None:
        self._transport, self._slots = transport, slots
        self._apart = heads_travel_apart(transport.device)
        self._preamble = 0 if self._apart else len(Head._fields) + slots  # of the message with the ids
        self._no_slots = torch.empty(transport.ranks, 0, dtype=torch.int64)
        self._capacity = _FEWEST_IDS
        self._messages = 0

    def exchange(
        self,
        sent: IdsToSend,
        updates: bool,
        lookup: LookedUp,
        given: SomeRows,
        gradients: Tensor,
    ) -> tuple[list[Head], IncomingRows, Tensor]:
        """Send every rank the head, the requested rows and gradients. Collective.

        ``given`` are the rows of a batch whose gradients are included, and ``gradients`` those of all its requested rows, shape
        ``[rows, words]``.

        Return the heads of all ranks, the rows they request, and the received gradients, shape ``[rows, words]`` for the rows
        in ``given.incoming``. The gradients of a rank that sends none are undefined.
        """
        self._messages = (self._messages + 1) & 0x7FFFFFFF
        most, moves = max(sent.request.sizes), int(sent.moves)
        head = Head(self._messages, sent.state, lookup, 0, most, 0, moves, int(updates), int(sent.gives_up), sent.evaluated)
        numbers = np.empty((self._transport.ranks, len(head) + self._slots), np.int32)
        numbers[:, : len(head)] = head
        numbers[:, _IDS], numbers[:, _GRADIENTS] = sent.request.sizes, given.requested.sizes
        if self._slots:
            numbers[:, len(head) :] = sent.request.slots
        exchange = self._exchange_apart if self._apart else self._exchange_together
        answers, rows, came = exchange(sent.request, numbers, given, gradients)
        heads = [Head(*each[: len(head)]) for each in answers]
        by_slot = torch.tensor([each[len(head) :] for each in answers]) if self._slots else self._no_slots
        return heads, IncomingRows(rows.long(), [each.ids for each in heads], by_slot), came

    def _exchange_together(
        self, request: RowRequest, numbers: np.ndarray, given: SomeRows, gradients: Tensor
    ) -> tuple[list[list[int]], Tensor, Tensor]:
        capacity, ranks, preamble = self._capacity, self._transport.ranks, self._preamble
        counts = [min(size, capacity) for size in request.sizes]
        message, parts = self._pack(request, counts, given, gradients)
        words = message.view(torch.int32).view(-1).numpy()
        for start, each in zip(parts.words(), numbers):
            words[start : start + preamble] = each
        slots = self._layout([capacity] * ranks, given.incoming.sizes)
        received = self._transport.gradients(slots.length)
        self._transport.exchange(received, message, parts.sizes, slots.sizes)
        self._transport.count("ids", 4, [preamble + count for count in counts])

        received_words = received.view(torch.int32).view(-1)
        words = received_words.numpy()
        answers = [words[start : start + preamble].tolist() for start in slots.words()]
        asked = [each[_IDS] for each in answers]
        arrived = [min(ids, capacity) for ids in asked]
        rows = take(received_words, slots.words(preamble), arrived) if any(arrived) else received_words[:0]
        came = self._layout(arrived, given.incoming.sizes)  # gradients follow the ids directly, before the end of the slot
        starts = [slot + first - start for slot, first, start in zip(slots.starts, came.first_rows, came.starts)]
        most = max(each[_MOST_IDS] for each in answers)
        if most > capacity:
            rows = self._send_rest(request, counts, rows, arrived, asked)
            self._capacity = 1 << most.bit_length()
        return answers, rows, take(received, starts, given.incoming.sizes)

    def _exchange_apart(
        self, request: RowRequest, numbers: np.ndarray, given: SomeRows, gradients: Tensor
    ) -> tuple[list[list[int]], Tensor, Tensor]:
        answers = self._transport.exchange_numbers(numbers)
        asked, gradient_rows = [each[_IDS] for each in answers], [each[_GRADIENTS] for each in answers]
        message, parts = self._pack(request, request.sizes, given, gradients)
        slots = self._layout(asked, gradient_rows)
        received = self._transport.gradients(slots.length)
        self._transport.exchange(received, message, parts.sizes, slots.sizes, exact=True)
        self._transport.count("ids", 4, request.sizes)
        rows = take(received.view(torch.int32).view(-1), slots.words(), asked)
        return answers, rows, take(received, slots.first_rows, gradient_rows)

    def _layout(self, ids: Sequence[int], rows: Sequence[int]) -> PartLayout:
        return PartLayout(self._transport.wire.gradients.words, [4 * (self._preamble + count) for count in ids], rows)

    def _pack(self, request: RowRequest, counts: list[int], given: SomeRows, gradients: Tensor) -> tuple[Tensor, PartLayout]:
        """Return a message with the first ``counts[rank]`` ids for each rank and gradients, without heads."""
        parts = self._layout(counts, given.requested.sizes)
        message = self._transport.gradients(parts.length)
        if given.requested.index.numel():
            source = given.requested.index.new_zeros(parts.length)
            put(source, parts.first_rows, given.requested.sizes, given.requested.index)
            torch.index_select(gradients, 0, source, out=message)
        if any(counts):
            first = request.rows if counts == request.sizes else take(request.rows, _starts(request.sizes), counts)
            put(message.view(torch.int32).view(-1), parts.words(self._preamble), counts, first)
        return message, parts

    def _send_rest(
        self, request: RowRequest, counts: list[int], rows: Tensor, arrived: list[int], asked: Sequence[int]
    ) -> Tensor:
        """Exchange the ids that did not fit; return all ids by rank."""
        gives = [size - count for size, count in zip(request.sizes, counts)]
        gets = [ids - count for ids, count in zip(asked, arrived)]
        starts = [start + count for start, count in zip(_starts(request.sizes), counts)]
        rest = self._transport.exchange_words(take(request.rows, starts, gives), gives, gets)
        pairs = zip(rows.split(arrived), rest.split(gets))
        return torch.cat([part for pair in pairs for part in pair])


def _starts(sizes: Sequence[int]) -> list[int]:
    return [*accumulate(sizes, initial=0)][:-1]
