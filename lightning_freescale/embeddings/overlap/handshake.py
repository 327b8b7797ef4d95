"""What the ranks tell each other at the head of the message with their ids: what comes, who has none, who has an error."""

from __future__ import annotations

import zlib
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
    digest: int  # of the features of the next batch; 0 without
    lookup_digest: int  # of those of the current batch
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
        digest: of its features.
        mode: how this rank comes to know ids.
        moves: whether it has a gradient of the current batch.
        evaluated: as in :class:`Head`.
        before: what had come in of the same batch in an earlier message, by which ranks that ask for nothing now stand.
    """

    state: NextIds
    request: RowRequest
    digest: int = 0
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
        dedup: as in :meth:`RowRequest.from_features`.
    """

    def __init__(self, path: str, group: dist.ProcessGroup, layout: RowLayout, dedup: bool) -> None:
        self.path, self.group = path, group
        self.no_rows = RowRequest.empty(layout, dedup)
        self._layout, self._dedup = layout, dedup
        self._features: tuple[str, ...] | None = None

    def request(self, lookups: Sequence[KeyedJaggedTensor]) -> tuple[RowRequest, int]:
        """Return the rows that the lookups of a batch need, and a digest of their features; 0 if there are none.

        Raises:
            ValueError: the ids are wrong, or the features are others than before.
        """
        for features in lookups:
            keys = tuple(features.keys())
            self._features = self._features or keys
            if keys != self._features:
                raise ValueError(
                    f"the KeyedJaggedTensor has features {list(keys)}, in earlier lookups it had {list(self._features)}: keep "
                    "them and their order"
                )
        digest = zlib.crc32("\0".join(self._features or ()).encode()) & 0x7FFFFFFF or 1 if lookups else 0
        return self.request_rows(lookups), digest

    def request_rows(self, lookups: Sequence[KeyedJaggedTensor]) -> RowRequest:
        """Return the rows that the lookups need; their features may be others than before.

        Raises:
            ValueError: the ids are wrong.
        """
        return RowRequest.from_lookups(lookups, self._layout, self._dedup)

    def ids_to_send(self, state: NextIds, lookups: Sequence[KeyedJaggedTensor], mode: int) -> IdsToSend:
        """Return what to tell of a batch; ids that are wrong count as unknown: the model may never look them up."""
        if state != NextIds.REQUESTED:
            return IdsToSend(state, self.no_rows, mode=mode)
        try:
            return IdsToSend(state, *self.request(lookups), mode)
        except ValueError:
            return IdsToSend(NextIds.UNKNOWN, self.no_rows, mode=mode)

    def raise_errors(
        self, heads: Sequence[Head], wrong: Exception | None = None, lookups: Sequence[KeyedJaggedTensor] = ()
    ) -> None:
        """Raise what any rank's lookup of the current batch has got wrong, on every rank; collective if there is anything.

        Raises:
            ValueError: the ids of a rank are wrong, or the ranks look up different features.
            RuntimeError: the ranks are not in step.
        """
        self._refuse_other_places(heads)
        if LookedUp.WRONG in {head.lookup for head in heads}:
            texts = gather_objects(str(wrong) if wrong else None, self.group)
            found = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
            raise ValueError(f"embedding collection {self.path!r}, {'; '.join(found)}") from wrong
        if len({head.lookup_digest for head in heads if head.lookup_digest}) > 1:
            keys = gather_objects(list(lookups[0].keys()) if lookups else None, self.group)
            found = [f"rank {rank} has {mine}" for rank, mine in enumerate(keys) if mine]
            raise ValueError(
                f"embedding collection {self.path!r}: the ranks look up different features, {'; '.join(found)}: pass the same "
                "on every rank, in the same order"
            )

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
