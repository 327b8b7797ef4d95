"""What moves between ranks in an exchange, and is counted: messages of floats, rows, numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from itertools import compress
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.embeddings.overlap.launch_order import LaunchOrder
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics

FAREWELL = timedelta(seconds=2)
"""How long a rank that has done all its exchanges waits for the others."""


class ExchangeObserver(Protocol):
    """The part of a timeline that records exchanges, and waits for rows."""

    @property
    def recording(self) -> bool:
        """Whether anything is recorded now."""

    def stamp(self) -> Any:
        """Return a stamp of now."""

    def awaited(self, name: str, arrived: Any) -> AbstractContextManager[Any]:
        """Record the block as a wait for others, by a rank which had done its part at ``arrived``.

        It is entered with a record whose ``done`` takes the stamp of when that was over, or with None.
        """

    def background_collective(self, name: str, moved: int) -> AbstractContextManager[None]:
        """Record the block as a collective of another thread that moves so many bytes."""


class Transport:
    """Moves the messages of one collection over its own group.

    Args:
        group: process group of this collection alone.
        dim: width of a row.
        device: of rows and ids.
        statistics: what to count in.
        order: in which exchanges of device memory take turns with those of other collections; None: they need not.
        far: which ranks of the group are on other nodes; empty if none is, or nobody knows.

    Attributes:
        observer: told of every exchange.
    """

    def __init__(
        self,
        group: Any,
        dim: int,
        device: torch.device,
        statistics: ExchangeStatistics,
        order: LaunchOrder | None = None,
        far: Sequence[bool] = (),
    ) -> None:
        self.rank, self.ranks, self.dim, self.device = group.rank(), group.size(), dim, device
        self.observer: ExchangeObserver | None = None
        self._group, self._statistics, self._order = group, statistics, order
        self._far = far

    def rows(self, count: int) -> Tensor:
        """Return memory for ``count`` rows."""
        return torch.empty(count, self.dim, device=self.device)

    def exchange(self, received: Tensor, message: Tensor, gives: list[int], gets: list[int], exact: bool = False) -> None:
        """Send ``gives[rank]`` floats of the message to each rank, and take ``gets[rank]`` from it, or fewer. Collective."""
        began = time.perf_counter()
        with self._recorded(gives, gets if exact else gives), self._turn():
            self._group.exchange(received.view(-1), message.view(-1), gets, gives, exact=exact)
        self._statistics.count(transfer_s=time.perf_counter() - began)

    def exchange_rows(self, values: Tensor, gives: list[int], gets: list[int]) -> Tensor:
        """Send ``gives[rank]`` rows to each rank, and return those that come, ``gets[rank]`` from each. Collective."""
        received, dim = self.rows(sum(gets)), self.dim
        self.exchange(received, values, [size * dim for size in gives], [size * dim for size in gets], exact=True)
        self.count("colliding", 4 * dim, gives)
        return received

    def exchange_words(self, words: Tensor, gives: list[int], gets: list[int]) -> Tensor:
        """Send ``gives[rank]`` numbers of 32 bits to each rank, and return those that come. Collective."""
        received = words.new_empty(sum(gets))
        self.exchange(received.view(torch.float32), words.view(torch.float32), gives, gets, exact=True)
        self.count("ids", 4, gives)
        return received

    def exchange_numbers(self, numbers: np.ndarray) -> list[list[int]]:
        """Send row ``rank`` of numbers of 32 bits to each rank, from host to host; return a row of each. Collective."""
        received, size = np.empty_like(numbers), [numbers.shape[1]] * self.ranks
        with self._recorded(size, size):
            self._group.exchange(torch.from_numpy(received.ravel()), torch.from_numpy(numbers.ravel()), size, size, exact=True)
        self.count("ids", 4, size)
        return [[int(number) for number in row] for row in received]

    def say_farewell(self) -> None:
        """Wait until all ranks have come as far as this, or one of them is gone or late."""
        if self.device.type == "cpu":
            nothing, sizes = torch.zeros(self.ranks), [1] * self.ranks
            with suppress(dist.DistBackendError):
                self._group.exchange(torch.empty_like(nothing), nothing, sizes, sizes, exact=True, timeout=FAREWELL)

    def count(self, kind: str, width: int, gives: list[int]) -> None:
        """Count the bytes of what goes to other ranks: ``gives[rank]`` times ``width`` to each."""
        counted = {f"{kind}_bytes": width * (sum(gives) - gives[self.rank])}
        if self._far:
            counted["cross_node_bytes"] = width * sum(compress(gives, self._far))
        self._statistics.count(**counted)

    def _turn(self) -> AbstractContextManager[None]:
        """Return the block in which this collection may launch. Collective."""
        if self._order is None:
            return nullcontext()
        first, others = self.rank == 0, [0, *[1] * (self.ranks - 1)]
        number = torch.full((self.ranks - 1 if first else 1,), self._order.draw() if first else 0)
        sent, came = (number, number.new_empty(0)) if first else (number.new_empty(0), number)
        none = [0] * self.ranks
        gives, gets = (others, none) if first else (none, [1, *none[1:]])
        self._group.exchange(came, sent, gets, gives, exact=True)
        return self._order.turn(int(number[0]))

    def _recorded(self, gives: list[int], gets: list[int]) -> AbstractContextManager[None]:
        if self.observer is None or not self.observer.recording:
            return nullcontext()
        moved = max(sum(sizes) - sizes[self.rank] for sizes in (gives, gets))
        return self.observer.background_collective("embedding exchange", 4 * moved)
