"""What the ranks tell each other before ids travel: who asks for how many rows, who has no next batch, who has an error."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.overlap.row_layout import RowLayout
from lightning_freescale.embeddings.overlap.row_requests import RowRequest


class State(IntEnum):
    """What a rank has to say."""

    UNKNOWN = 0  # the ids of the next batch cannot be known ahead
    ENDED = 1  # there is no next batch
    ASKS = 2  # here are ids
    SAME = 3  # the ids are those announced
    FAILED = 4  # the ids are wrong, the error follows


_HEAD = 4


@dataclass(frozen=True)
class Proposal:
    """What this rank says.

    Attributes:
        state: what it knows of the ids.
        request: the rows it needs, if it asks.
        updates: whether an optimizer step follows its current batch.
        mode: how it comes to know ids ahead, see :class:`OverlappedCollection`.
        features: the keys of its ids.
        error: what is wrong with them.
    """

    state: State
    request: RowRequest
    updates: int
    mode: int
    features: tuple[str, ...] = ()
    error: Exception | None = None


@dataclass(frozen=True)
class Consensus:
    """What all ranks have said.

    Attributes:
        anew: for every rank whether ids come from it.
        counts: rows that each rank wants from this one, by slot; shape ``[ranks, slots]``.
        ended: ranks that have no next batch.
        mode: the highest of any rank.
        sound: whether ids come from every rank, and no two disagree on the features.
    """

    anew: list[bool]
    counts: Tensor
    ended: list[int]
    sound: bool
    mode: int

    @property
    def somebody_asks(self) -> bool:
        """Whether any ids travel."""
        return any(self.anew)


class LookupHandshake:
    """One small message from every rank to every rank.

    Args:
        path: of the collection, for errors.
        group: process group of this collection alone.
        layout: of its tables.
        dedup: as in :meth:`RowRequest.of`.
    """

    def __init__(self, path: str, group: dist.ProcessGroup, layout: RowLayout, dedup: bool) -> None:
        self.path, self.group, self.layout, self.dedup = path, group, layout, dedup
        self._nothing = RowRequest.none(layout, dedup)
        self._features: tuple[str, ...] | None = None

    def ask(self, state: State, features: KeyedJaggedTensor | None = None, *, updates: bool = False, mode: int = 0) -> Proposal:
        """What this rank will say; an error in the ids becomes part of it. Without ``features`` it asks for nothing."""
        told = (int(updates), mode)
        if features is None or state != State.ASKS:
            return Proposal(state, self._nothing, *told)
        keys = tuple(features.keys())
        try:
            self._check_order(keys)
            return Proposal(state, RowRequest.of(features, self.layout, self.dedup), *told, keys)
        except ValueError as error:
            return Proposal(State.FAILED, self._nothing, *told, keys, error)

    def reach(self, asking: Proposal, ahead: bool = False) -> Consensus:
        """Tell all ranks and hear them. Collective.

        Wrong ids that are only announced (``ahead``) count as unknown: the model may never ask for them.

        Raises:
            ValueError: on every rank, if the ids of any rank are wrong or the ranks disagree on the features.
        """
        heads = self._exchange(asking)
        states, digests = heads[:, 0].tolist(), heads[:, 1].tolist()
        self._refuse_other_windows(heads[:, 2].tolist())
        agreed = len({digest for digest in digests if digest}) <= 1
        if State.FAILED in states and not ahead:
            self._raise_errors(asking)
        if not agreed and not ahead:
            self._raise_disagreement(asking)
        anew = [state == State.ASKS for state in states]
        ended = [rank for rank, state in enumerate(states) if state == State.ENDED]
        return Consensus(anew, heads[:, _HEAD:], ended, agreed and all(anew), int(heads[:, 3].max()))

    def _exchange(self, asking: Proposal) -> Tensor:
        counts = asking.request.counts
        digest = zlib.crc32("\0".join(asking.features).encode()) + 1 if asking.features else 0
        told = torch.empty(len(counts), _HEAD + counts.shape[1], dtype=torch.int64)
        told[:, :_HEAD] = torch.tensor([int(asking.state), digest, asking.updates, asking.mode])
        told[:, _HEAD:] = counts
        told = told.to(self.layout.first.device)
        heard = torch.empty_like(told)
        dist.all_to_all(list(heard), list(told), group=self.group)
        return heard.cpu()

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

    def _raise_errors(self, asking: Proposal) -> None:
        texts = self._gather(str(asking.error) if asking.error else None)
        found = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        raise ValueError(f"embedding collection {self.path!r}, {'; '.join(found)}") from asking.error

    def _raise_disagreement(self, asking: Proposal) -> None:
        given = self._gather(asking.features)
        told = "; ".join(f"rank {rank} has {list(features)}" for rank, features in enumerate(given) if features)
        raise ValueError(
            f"embedding collection {self.path!r}: the ranks look up different features, {told}: pass the same on every rank, "
            "in the same order"
        )

    def _gather(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.group.size()
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone
