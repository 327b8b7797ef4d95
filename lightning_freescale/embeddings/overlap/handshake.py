"""What the ranks tell each other at the head of the message with their ids: what comes, who has none, who has an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from lightning_freescale._objects import gather_objects
from lightning_freescale.embeddings.overlap.row_layout import RowLayout
from lightning_freescale.embeddings.overlap.row_requests import IncomingRows, RowRequest


class NextIds(IntEnum):
    """What a rank knows of the ids of the batch that follows."""

    UNKNOWN = 0  # they cannot be known ahead
    ENDED = 1  # there is no such batch
    REQUESTED = 2  # they are in this message
    LATER = 3  # they may be in the next one: all ranks send another
    TOLD = 4  # they were in a message before
    DRAINING = 5  # none are asked for: this message only carries gradients
    EVALUATING = 6  # the message belongs to no step: it asks for the rows of a lookup without gradients


class LookedUp(IntEnum):
    """What a rank's model has looked up in the current batch."""

    PREDICTED = 0  # the ids that were submitted ahead
    OTHERS = 1  # others, or ids that nobody had submitted: they follow
    MORE = 2  # others beside those: they are in this message, which is sent anew once their rows have come
    WRONG = 3  # ids that have no row; the error follows


class Head(NamedTuple):
    """The first numbers of a message, each of 32 bits."""

    number: int  # of the message, so that ranks which have lost step notice
    state: int  # :class:`NextIds`
    lookup: int  # :class:`LookedUp`
    ids: int  # rows asked of the receiver in this message
    most_ids: int  # the most that the sender asks of any rank
    other_ids: int  # rows asked of the receiver for the current batch
    gradients: int  # rows whose gradients follow
    moves: int  # whether the sender has a gradient of the current batch
    updates: int  # whether an optimizer step follows the current batch
    mode: int  # how the sender comes to know ids
    evaluated: int  # number of the module that the sender looks up outside of steps, from 1 on; 0 for none


@dataclass(frozen=True)
class IdsToSend:
    """What this rank has to tell.

    Attributes:
        state: of the ids of the next batch.
        request: the rows that it needs.
        mode: how this rank comes to know ids.
        moves: whether it has a gradient of the current batch.
        evaluated: as in :class:`Head`.
        before: what had come in of the same batch in an earlier message, by which ranks that ask for nothing now stand.
    """

    state: NextIds
    request: RowRequest
    mode: int = 0
    moves: bool = False
    evaluated: int = 0
    before: IncomingRows | None = None


class LookupHandshake:
    """Makes requests of ids, and turns the error of one rank into one of all.

    Args:
        path: of the collection, for errors.
        group: process group of this collection alone.
        layout: of its tables.
        dedup: as in :meth:`RowRequest.from_lookups`.
    """

    def __init__(self, path: str, group: dist.ProcessGroup, layout: RowLayout, dedup: bool) -> None:
        self.path, self.group = path, group
        self.no_rows = RowRequest.empty(layout, dedup)
        self._layout, self._dedup = layout, dedup

    def request(self, lookups: Sequence[KeyedJaggedTensor]) -> RowRequest:
        """Return the rows that the lookups of a batch need.

        Raises:
            ValueError: the ids are wrong.
        """
        return RowRequest.from_lookups(lookups, self._layout, self._dedup)

    def ids_to_send(self, state: NextIds, lookups: Sequence[KeyedJaggedTensor], mode: int) -> IdsToSend:
        """Return what to tell of a batch; ids that are wrong count as unknown: the model may never look them up."""
        if state != NextIds.REQUESTED:
            return IdsToSend(state, self.no_rows, mode=mode)
        try:
            return IdsToSend(state, self.request(lookups), mode)
        except ValueError:
            return IdsToSend(NextIds.UNKNOWN, self.no_rows, mode=mode)

    def raise_errors(self, heads: Sequence[Head], wrong: Exception | None = None) -> None:
        """Raise what any rank's lookup of the current batch has got wrong, on every rank; collective if there is anything.

        Raises:
            ValueError: the ids of a rank are wrong.
            RuntimeError: the ranks are not in step.
        """
        self._refuse_other_places(heads)
        if LookedUp.WRONG in {head.lookup for head in heads}:
            texts = gather_objects(str(wrong) if wrong else None, self.group)
            found = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
            raise ValueError(f"embedding collection {self.path!r}, {'; '.join(found)}") from wrong

    def _refuse_other_places(self, heads: Sequence[Head]) -> None:
        draining = [rank for rank, head in enumerate(heads) if head.state == NextIds.DRAINING]
        if 0 < len(draining) < len(heads):
            raise RuntimeError(
                f"ranks {draining} bring the tables up to date (they evaluate, save, or call state_dict()), the others train "
                "on: do it on every rank"
            )
        evaluating = [rank for rank, head in enumerate(heads) if head.state == NextIds.EVALUATING]
        if 0 < len(evaluating) < len(heads):
            raise RuntimeError(
                f"ranks {evaluating} look up rows outside of a training step (they evaluate), the others train on or save: "
                "evaluate on every rank; if ranks evaluate different numbers of batches, do it inside `with "
                "strategy.evaluation():`, or call engine.serve_evaluation() after it in a loop of your own"
            )
        if len({head.number for head in heads}) > 1:
            raise RuntimeError(f"the ranks are not in step: they send messages {[head.number for head in heads]}")
        steps = [rank for rank, head in enumerate(heads) if head.updates]
        if 0 < len(steps) < len(heads):
            raise ValueError(
                f"after this batch ranks {steps} take an optimizer step, the others go on accumulating gradients: give every "
                "rank the same number of batches and the same accumulate_grad_batches"
            )
