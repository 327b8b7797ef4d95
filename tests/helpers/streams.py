"""Streams of several ranks, for the tests here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from lightning_freescale.data.streaming.stream_loader import BalancedStreamLoader

COSTS = np.random.RandomState(0).lognormal(4, 1.0, size=2000).round(3)


class Part(IterableDataset):
    """One rank's samples: (rank, number in its stream, cost), divided among the workers."""

    def __init__(self, rank: int, samples: int, breaks_at: int = -1) -> None:
        self.rank, self.samples, self.breaks_at, self.epoch = rank, samples, breaks_at, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _own(self) -> range:
        info = get_worker_info()
        return range(self.samples) if info is None else range(info.id, self.samples, info.num_workers)

    def _sample(self, number: int) -> tuple[int, int, float]:
        if number == self.breaks_at:
            raise KeyError("the needle")
        return self.rank, number, float(COSTS[(700 * self.rank + number + 50 * self.epoch) % 2000])

    def __iter__(self) -> Iterator[Any]:
        yield from map(self._sample, self._own())


class SlowOnOne(Part):
    """Rank 1's thread is behind that of rank 0."""

    def _sample(self, number: int) -> tuple[int, int, float]:
        time.sleep(0.003 * self.rank)
        return super()._sample(number)


class SeekablePart(Part):
    next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["next"]

    def __iter__(self) -> Iterator[Any]:
        own = self._own()
        for place in range(self.__dict__.pop("loaded", 0), len(own)):
            self.next = place + 1
            yield self._sample(own[place])


def sample_cost(sample: tuple[int, int, float]) -> float:
    return sample[2]


def loader_of(sizes: list[int], kind: type[Part] = Part, breaks_at: int = -1, **options: Any) -> BalancedStreamLoader:
    """This rank's; a break is on rank 1."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    group = dist.new_group(timeout=timedelta(seconds=20)) if len(sizes) > 1 else None
    dataset = kind(rank, sizes[rank], breaks_at if rank == 1 else -1)
    return BalancedStreamLoader(
        dataset,
        4,
        **{"cost_fn": sample_cost, "rank": rank, "world_size": len(sizes), "group": group, "collate_fn": list, **options},
    )


def stream_threads() -> int:
    """How many there are, without those that torch's loader workers are fed by: they end on their own."""
    return sum(thread.name != "QueueFeederThread" for thread in threading.enumerate())


def run_streams(sizes: list[int], **options: Any) -> dict[str, Any]:
    """The batches of this rank, and what the loader says of the steps."""
    loader = loader_of(sizes, **options)
    batches, names = list(loader), ("counts", "costs", "unbalanced_costs", "loss_weight")
    told = {name: [getattr(loader, name)(step) for step in range(len(batches))] for name in names}
    return {"batches": batches, "bound": loader.stream_bound(), "threads": stream_threads(), **told}


def samples_of(ranks: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return sorted((source, number) for rank in ranks for batch in rank["batches"] for source, number, _ in batch)


def all_of(sizes: list[int]) -> list[tuple[int, int]]:
    return [(rank, number) for rank, size in enumerate(sizes) for number in range(size)]


def check_told(ranks: list[dict[str, Any]], weights: bool = False) -> None:
    """What every rank was told of the steps is what the batches are."""
    assert len({len(rank["batches"]) for rank in ranks}) == 1, "all stop together"
    for step, batches in enumerate(zip(*(rank["batches"] for rank in ranks))):
        mine = np.array([sum((1 + s[1] if weights else 1) for s in batch) for batch in batches], dtype=float)
        for index, rank in enumerate(ranks):
            assert rank["counts"][step] == [len(batch) for batch in batches]
            np.testing.assert_allclose(rank["costs"][step], [sum(map(sample_cost, batch)) for batch in batches])
            assert rank["loss_weight"][step] == pytest.approx(mine[index] * len(ranks) / mine.sum())


def imbalance_of(ranks: list[dict[str, Any]], name: str) -> float:
    loads = np.array(ranks[0][name])
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum())
