"""The ranks that read streams side by side: what they tell each other of a step, and how samples change their rank."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
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

_FAILED = b"!"  # sent instead of samples; no pickle is a single byte of this kind


class PeerFailed(RuntimeError):  # noqa: N818 (says what happened)
    """Another rank's stream failed, or that rank is gone."""


@dataclass(frozen=True)
class StreamStep:
    """What all ranks know of one step.

    Attributes:
        step: counted from the start of the epoch.
        counts: samples per rank.
        costs: cost per rank, shape ``[ranks]``.
        weights: weight per rank in the mean loss, shape ``[ranks]``.
        most_parts: into how many micro-batches each rank's samples can be cut.
        unbalanced_costs: what each rank's batch would have cost as read, shape ``[ranks]``.
        read: cost and number of all samples that each rank has read in the epoch so far, shape ``[ranks, 2]``.
        state: where the rank's stream goes on after the step.
        lower_bound: the imbalance that no assignment of the step's samples can beat; 1.0 where no samples are assigned.
        dominated: a single sample costs more than the mean rank's.
    """

    step: int
    counts: list[int]
    costs: NDArray[np.float64]
    weights: NDArray[np.float64]
    most_parts: list[int]
    unbalanced_costs: NDArray[np.float64]
    read: NDArray[np.float64]
    state: dict[str, Any]
    lower_bound: float = 1.0
    dominated: bool = False

    @property
    def balance(self) -> StepBalance:
        """What the assignment of the step's samples is worth."""
        return StepBalance(
            unbalanced=load_imbalance(self.unbalanced_costs),
            balanced=load_imbalance(self.costs),
            lower_bound=self.lower_bound,
            dominated=self.dominated,
            tokens_imbalance=None,
            cost=float(self.costs.sum()),
        )


@dataclass(eq=False)
class StreamGroup:
    """The ranks of a group that read streams side by side.

    Args:
        rank: the own rank.
        size: number of ranks.
        group: moves CPU tensors and serves nobody else; needed for more than one rank.
        width: how many numbers a rank tells the others at a time.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    width: int
    _others_know: bool = field(default=False, init=False)  # that this rank has failed

    def gather_rows(self, row: ArrayLike) -> NDArray[np.float64]:
        """Return every rank's row, shape ``[ranks, width]``. Collective.

        Raises:
            PeerFailed: a rank said that it failed, or is gone.
        """
        table = self._all_gather(np.append(row, 0.0))
        failed = np.flatnonzero(table[:, -1])
        if failed.size:
            raise PeerFailed(f"rank {failed[0]} failed to read its stream: its own traceback tells why")
        return table[:, :-1]

    def exchange_samples(self, outgoing: list[list[Any]]) -> list[list[Any]]:
        """Send the samples ``outgoing[r]`` to rank ``r``; return what each rank sent here. Collective.

        Raises:
            PeerFailed: a rank could not pickle its samples, or is gone.
        """
        if self.group is None:
            return outgoing
        try:
            pickled = [b"" if rank == self.rank or not sent else pickle.dumps(sent, 5) for rank, sent in enumerate(outgoing)]
        except Exception:
            self._others_know = True
            self._exchange_bytes([_FAILED] * self.size)
            raise
        incoming = [self._unpickle(rank, content) for rank, content in enumerate(self._exchange_bytes(pickled))]
        incoming[self.rank] = outgoing[self.rank]
        return incoming

    def report_failure(self, items: Iterator[T]) -> Generator[T, None, None]:
        """Yield the items; if making one fails here, tell the other ranks, so that they do not wait for this one."""
        try:
            yield from items
        except Exception as error:
            if not self._others_know and not isinstance(error, PeerFailed):
                with contextlib.suppress(PeerFailed):  # then nobody is left to tell; the error itself matters
                    self._all_gather(np.append(np.zeros(self.width), 1.0))
            raise

    def _exchange_bytes(self, outgoing: list[bytes]) -> list[Tensor]:
        assert self.group is not None
        try:
            return exchange_bytes(outgoing, self.group)
        except RuntimeError as error:
            raise PeerFailed(f"rank {self.rank} could not exchange samples with the other ranks: {error}") from error

    def _unpickle(self, rank: int, received: Tensor) -> list[Any]:
        content = received.numpy().tobytes()
        if content == _FAILED:
            raise PeerFailed(f"rank {rank} could not pickle its samples: its own traceback tells why")
        return pickle.loads(content) if len(content) else []  # noqa: S301 (from a rank of this very run)

    def _all_gather(self, row: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.group is None:
            return row[None]
        own_row = torch.from_numpy(row)
        rows = [torch.empty_like(own_row) for _ in range(self.size)]
        try:
            dist.all_gather(rows, own_row, group=self.group)
        except RuntimeError as error:
            raise PeerFailed(f"rank {self.rank} lost another rank while reading the streams: {error}") from error
        return torch.stack(rows).numpy()
