"""What the ranks tell each other before ids travel: who needs how many rows, who has no next batch, who has an error."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale._objects import gather_objects
from lightning_freescale.embeddings.overlap.row_layout import RowLayout
from lightning_freescale.embeddings.overlap.row_requests import RowRequest


class IdState(IntEnum):
    """What a rank knows of the ids of a batch."""

    UNKNOWN = 0  # they cannot be known ahead
    ENDED = 1  # there is no such batch
    REQUESTED = 2  # they follow
    PREDICTED = 3  # they are those that were submitted ahead
    FAILED = 4  # they are wrong, the error follows


_HEADER = 4
"""Numbers before the counts: state, digest of the features, whether a step follows, mode."""


@dataclass(frozen=True)
class Consensus:
    """What all ranks have told, this one included.

    Attributes:
        request: the rows that this rank needs.
        requested: for every rank whether ids come from it.
        counts: rows that each rank requests from this one, by slot; shape ``[ranks, slots]``.
        ended_ranks: those that have no such batch.
        from_all: whether ids come from every rank, and no two disagree on the features.
        mode: the highest of any rank, see :class:`LookaheadMode`.
    """

    request: RowRequest
    requested: list[bool]
    counts: Tensor
    ended_ranks: list[int]
    from_all: bool
    mode: int


class LookupHandshake:
    """One small message from every rank to every rank.

    Args:
        path: of the collection, for errors.
        group: process group of this collection alone.
        layout: of its tables.
        dedup: as in :meth:`RowRequest.from_features`.
    """

    def __init__(self, path: str, group: dist.ProcessGroup, layout: RowLayout, dedup: bool) -> None:
        self.path, self.group, self.layout, self.dedup = path, group, layout, dedup
        self._no_rows = RowRequest.empty(layout, dedup)
        self._features: tuple[str, ...] | None = None

    def agree(
        self,
        state: IdState,
        features: KeyedJaggedTensor | None = None,
        *,
        updates: bool = False,
        mode: int = 0,
        ahead: bool = False,
    ) -> Consensus:
        """Tell all ranks what this one knows, and hear them. Collective.

        Wrong ids that are only submitted ahead count as unknown: the model may never look them up.

        Args:
            state: what this rank knows of the ids.
            features: the ids, if it requests rows.
            updates: whether an optimizer step follows its current batch.
            mode: how it comes to know ids ahead.
            ahead: whether the model has not looked them up.

        Raises:
            ValueError: on every rank, if the ids of any rank are wrong or the ranks disagree on the features.
        """
        request, keys, wrong = self._no_rows, (), None
        if features is not None and state == IdState.REQUESTED:
            keys = tuple(features.keys())
            try:
                self._check_order(keys)
                request = RowRequest.from_features(features, self.layout, self.dedup)
            except ValueError as error:
                state, wrong = IdState.FAILED, error.with_traceback(None)  # no circle through this frame
        digest = zlib.crc32("\0".join(keys).encode()) + 1 if keys else 0
        headers, counts = self._exchange([int(state), digest, int(updates), int(mode)], request.counts)
        states, digests, updates_of, modes = headers.T.tolist()
        self._refuse_other_windows(updates_of)
        same_features = len({each for each in digests if each}) <= 1
        if IdState.FAILED in states and not ahead:
            self._raise_errors(wrong)
        if not same_features and not ahead:
            self._raise_disagreement(keys)
        requested = [each == IdState.REQUESTED for each in states]
        ended = [rank for rank, each in enumerate(states) if each == IdState.ENDED]
        return Consensus(request, requested, counts, ended, same_features and all(requested), max(modes))

    def _exchange(self, header: list[int], counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return headers and counts of all ranks, one row each."""
        sent = torch.empty(len(counts), _HEADER + counts.shape[1], dtype=torch.int64)
        sent[:, :_HEADER] = torch.tensor(header)
        sent[:, _HEADER:] = counts
        sent = sent.to(self.layout.device)
        received = torch.empty_like(sent)
        dist.all_to_all(list(received), list(sent), group=self.group)
        received = received.cpu()
        return received[:, :_HEADER], received[:, _HEADER:]

    def _check_order(self, keys: tuple[str, ...]) -> None:
        self._features = self._features or keys
        if keys != self._features:
            raise ValueError(
                f"the KeyedJaggedTensor has features {list(keys)}, in earlier batches it had {list(self._features)}: keep them "
                "and their order"
            )

    @staticmethod
    def _refuse_other_windows(updates: list[int]) -> None:
        if len(set(updates)) > 1:
            steps = [rank for rank, update in enumerate(updates) if update]
            raise ValueError(
                f"after this batch ranks {steps} take an optimizer step, the others go on accumulating gradients: give every "
                "rank the same number of batches and the same accumulate_grad_batches"
            )

    def _raise_errors(self, wrong: Exception | None) -> None:
        texts = gather_objects(str(wrong) if wrong else None, self.group)
        found = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        raise ValueError(f"embedding collection {self.path!r}, {'; '.join(found)}") from wrong

    def _raise_disagreement(self, features: tuple[str, ...]) -> None:
        found = "; ".join(
            f"rank {rank} has {list(keys)}" for rank, keys in enumerate(gather_objects(features, self.group)) if keys
        )
        raise ValueError(
            f"embedding collection {self.path!r}: the ranks look up different features, {found}: pass the same on every rank, "
            "in the same order"
        )
