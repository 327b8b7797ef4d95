"""What the ranks tell each other about their streams."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lightning_freescale.balance.assign import load_imbalance
from lightning_freescale.balance.report import StepBalance
from lightning_freescale.comm.all_to_all_bytes import exchange_bytes

T = TypeVar("T")

_FAILED = b"!"  # no pickle is a single byte of this kind


class PeerFailed(RuntimeError):  # noqa: N818 (says what happened)
    """Another rank's stream failed, or the rank is gone."""


@dataclass(frozen=True)
class StreamStep:
    """One step of all ranks.

    Attributes:
        step: counted from the start of the epoch.
        counts: samples per rank.
        costs: cost per rank, shape ``[ranks]``; likewise
        weights: weight in the mean loss, and
        drawn: what the batch would have cost as read.
        read: cost and number of all samples that each rank has read in the epoch so far, shape ``[ranks, 2]``.
        state: where the rank's stream goes on after the step.
        lower_bound: the imbalance that no assignment of the step's samples can beat; 1.0 where no samples are assigned.
        dominated: a single sample costs more than the mean rank's.
    """

    step: int
    counts: list[int]
    costs: NDArray[np.float64]
    weights: NDArray[np.float64]
    drawn: NDArray[np.float64]
    read: NDArray[np.float64]
    state: dict[str, Any]
    lower_bound: float = 1.0
    dominated: bool = False

    @property
    def balance(self) -> StepBalance:
        """What the step's assignment is worth."""
        return StepBalance(
            unbalanced=load_imbalance(self.drawn),
            balanced=load_imbalance(self.costs),
            lower_bound=self.lower_bound,
            dominated=self.dominated,
            tokens_imbalance=None,
            cost=float(self.costs.sum()),
        )


class StreamGroup:
    """The ranks of a group that read streams side by side.

    Args:
        rank: the own one.
        size: how many there are.
        group: moves CPU tensors and serves nobody else; needed for more than one rank.
        width: how many numbers a rank tells the others at a time.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None, width: int) -> None:
        self.rank, self.size, self.group, self.width = rank, size, group, width
        self._told = False

    def gather(self, row: ArrayLike) -> NDArray[np.float64]:
        """Every rank's row, shape ``[ranks, width]``. Collective.

        Raises:
            PeerFailed: a rank said that it failed, or is gone.
        """
        table = self._gather(np.append(np.asarray(row, dtype=np.float64), 0.0))
        failed = np.flatnonzero(table[:, -1])
        if failed.size:
            raise PeerFailed(f"rank {failed[0]} failed to read its stream: its own traceback tells why")
        return table[:, :-1]

    def exchange(self, parts: list[list[Any]]) -> list[list[Any]]:
        """Send the samples ``parts[r]`` to rank ``r``; what each rank sent here. Collective.

        Raises:
            PeerFailed: a rank could not pickle its samples, or is gone.
        """
        if self.group is None:
            return parts
        try:
            outgoing = [pickle.dumps(part, 5) if part and rank != self.rank else b"" for rank, part in enumerate(parts)]
        except Exception:
            self._told = True
            self._swap([_FAILED] * self.size)
            raise
        incoming = [self._unpickle(rank, data) for rank, data in enumerate(self._swap(outgoing))]
        incoming[self.rank] = parts[self.rank]
        return incoming

    def guard(self, items: Iterator[T]) -> Iterator[T]:
        """The items; if making one fails here, the other ranks are told, so that they do not wait for this one."""
        try:
            yield from items
        except PeerFailed:
            raise
        except Exception:
            if self._told:
                raise
            with contextlib.suppress(PeerFailed):  # then nobody is left to tell; the error itself matters
                self._gather(np.append(np.zeros(self.width), 1.0))
            raise

    def _swap(self, outgoing: list[bytes]) -> list[Tensor]:
        assert self.group is not None
        try:
            return exchange_bytes(outgoing, self.group)
        except RuntimeError as error:
            raise PeerFailed(f"rank {self.rank} could not exchange samples with the other ranks: {error}") from error

    def _unpickle(self, rank: int, data: Tensor) -> list[Any]:
        content = data.numpy().tobytes()
        if content == _FAILED:
            raise PeerFailed(f"rank {rank} could not pickle its samples: its own traceback tells why")
        return pickle.loads(content) if len(content) else []  # noqa: S301 (from a rank of this very run)

    def _gather(self, row: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.group is None:
            return row[None]
        mine = torch.from_numpy(row)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(everyone, mine, group=self.group)
        except RuntimeError as error:
            raise PeerFailed(f"rank {self.rank} lost another rank while reading the streams: {error}") from error
        return torch.stack(everyone).numpy()
