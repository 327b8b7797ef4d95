"""Streams of several ranks: no sample is lost, batches of all ranks cost nearly the same, and a resume is exact."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from lightning_freescale.balance import BalanceReport, MicroBatches, MicroBatchSchedule
from lightning_freescale.balance.assign import assign
from lightning_freescale.data.streaming.stream_loader import BalancedStreamLoader
from lightning_freescale.testing import RankFailed, run_distributed

COSTS = np.random.RandomState(0).lognormal(4, 1.0, size=2000).round(3)


class Part(IterableDataset):
    """The stream of one rank, divided among the workers; a sample is (rank, number in the stream, cost)."""

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
    """Return this rank's loader; ``breaks_at`` applies to rank 1."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    group = dist.new_group(timeout=timedelta(seconds=20)) if len(sizes) > 1 else None
    dataset = kind(rank, sizes[rank], breaks_at if rank == 1 else -1)
    return BalancedStreamLoader(
        dataset,
        4,
        **{"cost_fn": sample_cost, "rank": rank, "world_size": len(sizes), "group": group, "collate_fn": list, **options},
    )


def stream_threads() -> int:
    """Return the number of threads, without those that feed torch's loader workers, which end on their own."""
    return sum(thread.name != "QueueFeederThread" for thread in threading.enumerate())


def run_streams(sizes: list[int], **options: Any) -> dict[str, Any]:
    loader = loader_of(sizes, **options)
    batches, names = list(loader), ("counts", "costs", "balance", "loss_weight")
    described = {name: [getattr(loader, name)(step) for step in range(len(batches))] for name in names}
    return {"batches": batches, "threads": stream_threads(), **described}


def samples_of(ranks: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return sorted((source, number) for rank in ranks for batch in rank["batches"] for source, number, _ in batch)


def all_of(sizes: list[int]) -> list[tuple[int, int]]:
    return [(rank, number) for rank, size in enumerate(sizes) for number in range(size)]


def check_steps(ranks: list[dict[str, Any]], weights: bool = False) -> None:
    assert len({len(rank["batches"]) for rank in ranks}) == 1, "all stop together"
    for step, batches in enumerate(zip(*(rank["batches"] for rank in ranks))):
        mine = np.array([sum((1 + s[1] if weights else 1) for s in batch) for batch in batches], dtype=float)
        for index, rank in enumerate(ranks):
            assert rank["counts"][step] == [len(batch) for batch in batches]
            np.testing.assert_allclose(rank["costs"][step], [sum(map(sample_cost, batch)) for batch in batches])
            assert rank["loss_weight"][step] == pytest.approx(mine[index] * len(ranks) / mine.sum())


def test_no_sample_is_lost_also_of_uneven_streams() -> None:
    cases = [40, 40, 40], [41, 40, 40], [100, 9, 0], [3, 0, 0], [24, 26, 25]
    runs = run_distributed(lambda: [run_streams(sizes, weight_fn=lambda sample: 1 + sample[1]) for sizes in cases], 3)
    for sizes, *ranks in zip(cases, *runs):
        assert samples_of(ranks) == all_of(sizes)
        check_steps(ranks, weights=True)
        counts = np.array(ranks[0]["counts"])
        assert (counts[:-1] == 4).all(), sizes
        assert counts[-1].max() - counts[-1].min() <= 1 and counts[-1].min() >= 1 and counts[-1].max() <= 5, sizes
        assert {rank["threads"] for rank in ranks} == {1}


def _reversed(costs: np.ndarray, ranks: int) -> Any:
    given = assign(costs, ranks)
    return dataclasses.replace(given, rank_of_sample=given.rank_of_sample[::-1])


def test_samples_are_assigned_as_those_of_a_map_style_set_or_by_another_function() -> None:
    given: tuple[dict[str, Any], ...] = {}, {"assign_fn": _reversed}
    ranks, others = zip(*run_distributed(lambda: [run_streams([80, 80, 80], **options) for options in given], 3))
    for step in range(20):
        read = [(rank, number) for rank in range(3) for number in range(4 * step, 4 * step + 4)]
        cost = np.array([COSTS[700 * rank + number] for rank, number in read])
        for of_ranks, target in ((ranks, assign(cost, 3).rank_of_sample), (others, _reversed(cost, 3).rank_of_sample)):
            for rank in range(3):
                expected = [sample for sample, to in zip(read, target) if to == rank]
                assert [sample[:2] for sample in of_ranks[rank]["batches"][step]] == expected
        as_read, now = cost.reshape(3, 4).sum(axis=1), ranks[0]["costs"][step]
        balance = ranks[0]["balance"][step]
        assert balance.unbalanced == pytest.approx(as_read.max() / as_read.mean())
        assert balance.balanced == pytest.approx(now.max() / now.mean())
    report = BalanceReport.from_steps(ranks[0]["balance"])
    assert report.balanced < 0.8 * report.unbalanced


def test_drop_last_gives_whole_steps() -> None:
    ranks = run_distributed(lambda: run_streams([42, 43], drop_last=True), 2)
    assert ranks[0]["counts"] == [[4, 4]] * 10
    check_steps(ranks)


# -- resume


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_resume_gives_the_batches_that_were_to_come(workers: int) -> None:
    def run(kind: type[Part]) -> None:
        options = {"num_workers": workers, "kind": kind}
        whole = loader_of([70, 64], **options)
        whole.set_epoch(1)
        batches = list(whole)
        assert len(batches) > 15
        for consumed in (0, 1, 6, 13, len(batches) - 1, len(batches)):
            state = json.loads(json.dumps(whole.state_after(consumed)))
            resumed = loader_of([70, 64], **options)
            resumed.load_state_dict(state)
            resumed.set_epoch(1)
            assert list(resumed) == batches[consumed:]
            for step in range(consumed, len(batches)):
                assert resumed.counts(step) == whole.counts(step)
                assert resumed.costs(step).tolist() == whole.costs(step).tolist()
                assert resumed.balance(step) == whole.balance(step)
                assert resumed.loss_weight(step) == whole.loss_weight(step)
            assert resumed.state_after(consumed) == state
            if consumed < len(batches):
                assert resumed.state_after(len(batches)) == whole.state_after(len(batches))

    run_distributed(lambda: (run(Part), run(SeekablePart)), 2)


def test_state_counts_what_was_consumed_not_what_was_made() -> None:
    loader, resumed = loader_of([100]), loader_of([100])
    batches = iter(loader)
    seen = [next(batches) for _ in range(3)]
    resumed.load_state_dict(loader.state_after(2))
    assert next(iter(resumed)) == seen[2]
    with pytest.raises(ValueError, match=r"step=3 .*0 to 2"):
        loader.state_after(4)


def test_a_resume_is_for_its_epoch_and_a_stream_that_is_as_long() -> None:
    loader, other, shorter = (loader_of([size], loss_is_sum=True) for size in (100, 100, 20))
    assert len(list(loader)) == 25 and loader.loss_weight(24) == 1.0
    other.load_state_dict(loader.state_after(5))
    other.set_epoch(1)
    assert len(list(other)) == 25
    assert other.state_after(0)["stream"] is None
    shorter.load_state_dict(loader.state_after(20))
    with pytest.raises(ValueError, match="sample 83"):
        list(shorter)


def test_state_is_small_and_old_steps_are_forgotten() -> None:
    loader = loader_of([4 * 300], kind=SeekablePart)
    list(loader)
    state = loader.state_after(250)
    assert len(json.dumps(state)) < 2000
    assert state["stream"]["reader"]["first"] >= 4 * 250, "no more is read again than may still be held"
    assert len(state["stream"]["rounds"]) <= 2
    assert loader.counts(199) == [4]
    with pytest.raises(ValueError, match="step=150"):
        loader.state_after(151)


def test_state_of_another_loader() -> None:
    loader = loader_of([100])
    list(islice(loader, 3))
    other = BalancedStreamLoader(Part(0, 100), 5, cost_fn=sample_cost)
    with pytest.raises(ValueError, match=r"batch_size=4.*batch_size=5"):
        other.load_state_dict(loader.state_after(2))
    other.load_state_dict(loader.state_after(0))  # nothing was consumed: nothing can be lost


# -- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"world_size": 2}, "world_size=2, group=None"),
        ({"dataset": [1]}, "dataset=list"),
        ({"cost_fn": lambda sample: 17.0 - sample[1]}, r"cost_fn\(sample\)\[18\] is -1.0"),
        ({"weight_fn": lambda sample: 17.0 - sample[1]}, r"weight_fn\(sample\)\[18\] is -1.0"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(BalancedStreamLoader(**{"dataset": Part(0, 40), "batch_size": 4, "cost_fn": sample_cost, **options}))


def _weight(sample: tuple[int, int, float]) -> float:
    return float(sample[1] % 3 == 0)


def _divided() -> list[list[float]]:
    """Return the weights of this rank's micro-batches in every step."""
    with pytest.raises(ValueError, match="1 samples"):
        list(loader_of([1, 0]))
    loader = loader_of([41, 36], weight_fn=_weight, micro_batches=MicroBatchSchedule(4, 4))
    found = []
    for batch in loader:
        parts = batch.batches if isinstance(batch, MicroBatches) else (batch,)
        weights = [sum(map(_weight, part)) for part in parts]
        if not any(weights):  # then each counts the same
            weights = [float(len(part)) for part in parts]
        if isinstance(batch, MicroBatches):
            assert list(batch.shares) == pytest.approx([weight / sum(weights) for weight in weights])
        found.append(weights)
    return found


def test_every_micro_batch_weighs_something_and_all_ranks_have_as_many() -> None:
    counts = set()
    for ranks in zip(*run_distributed(_divided, 2), strict=True):
        (parts,) = {len(weights) for weights in ranks}
        counts.add(parts)
        assert parts == min(4, *(int(sum(weights)) for weights in ranks)), "samples weigh 1 or nothing"
        assert all(map(all, ranks))
    assert len(counts) > 1


def test_cost_and_weight_functions_are_called_once_per_sample() -> None:
    def run() -> tuple[list[Any], list[Any], int]:
        costs, weights = [], []

        def cost(sample: tuple[int, int, float]) -> float:
            costs.append(sample[:2])
            return sample[2]

        def weight(sample: tuple[int, int, float]) -> float:
            weights.append(sample[:2])
            return 1.0

        loader = loader_of([24, 24], cost_fn=cost, weight_fn=weight, micro_batches=MicroBatchSchedule(2, 4))
        return costs, weights, sum(isinstance(batch, MicroBatches) for batch in loader)

    for rank, (costs, weights, divided) in enumerate(run_distributed(run, 2)):
        assert costs == weights == [(rank, number) for number in range(24)]
        assert divided == 6


# -- streams that stop early or fail: no thread is left, and no rank waits for another


def test_stopping_early_leaves_no_thread() -> None:
    def run() -> tuple[list[list[Any]], int, int]:
        loader, threads = loader_of([400, 400], kind=SlowOnOne), []
        batches = []
        for step, batch in enumerate(loader):
            threads.append(stream_threads())
            batches.append(batch)
            if step == 6:
                time.sleep(0.1 * (dist.get_rank() == 0))  # its thread goes on, and needs that of rank 1 to finish
                break
        loader.set_epoch(1)  # the ranks' threads have done the same, so another epoch on the same group is in step
        return batches + list(islice(loader, 3)), max(threads), stream_threads()

    ranks = run_distributed(run, 2)
    assert [len(rank[0]) for rank in ranks] == [10, 10]
    assert {(most, last) for _, most, last in ranks} == {(2, 1)}


def test_works_ahead_but_not_further() -> None:
    """Read only the samples of the batches that the thread may make."""
    read: list[int] = []
    threads = stream_threads()

    class Watched(Part):
        def _sample(self, number: int) -> tuple[int, int, float]:
            read.append(number)
            return super()._sample(number)

    loader = BalancedStreamLoader(Watched(0, 400), 4, cost_fn=sample_cost, collate_fn=list)
    batches = iter(loader)
    for taken in range(1, 6):
        next(batches)
        done = 4 * (taken + 2 + 1)  # one global batch is read ahead of the last that may be made
        deadline = time.monotonic() + 10
        while len(read) < done and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.02)
        assert len(read) == done
    batches.close()
    assert stream_threads() == threads


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_one_rank_ends_all(workers: int) -> None:
    def run() -> tuple[str, int, int]:
        loader, taken = loader_of([400, 400, 400], breaks_at=100, num_workers=workers), 0
        try:
            for _ in loader:
                taken += 1
        except (KeyError, RuntimeError) as error:
            left = stream_threads() + (len(multiprocessing.active_children()) if dist.get_rank() != 1 else 0)
            return f"{type(error).__name__}: {error}", taken, left
        return "no error", taken, stream_threads()

    first, broken, last = run_distributed(run, 3)
    assert "the needle" in broken[0] and broken[0].startswith("KeyError")
    assert first[0] == last[0] and first[0].startswith("PeerFailed: rank 1")
    assert first[1] == broken[1] == last[1] > 10
    assert first[2] == broken[2] == last[2] == 1


@pytest.mark.usefixtures("patient")
def test_a_killed_rank_ends_all() -> None:
    def run() -> None:
        for step, _ in enumerate(loader_of([400, 400])):
            if step == 3 and dist.get_rank() == 1:
                os._exit(3)

    with pytest.raises(RankFailed, match=r"(?s)rank 0: .*PeerFailed.*rank 1: died"):
        run_distributed(run, 2, timeout=60)


def test_samples_that_cannot_be_sent() -> None:
    class Unpicklable(Part):
        def _sample(self, number: int) -> Any:
            _, number, cost = super()._sample(number)
            return (lambda: number) if self.rank == 1 and number == 41 else self.rank, number, cost

    def run() -> str:
        loader = loader_of([80, 80], kind=Unpicklable, assign_fn=_reversed)
        with pytest.raises(Exception) as caught:  # noqa: PT011 (which one is the answer)
            list(loader)
        both = torch.ones(1)
        dist.all_reduce(both, group=loader.group)
        assert both == 2, "the ranks are still in step"
        return f"{caught.type.__name__}: {caught.value}"

    other, broken = run_distributed(run, 2)
    assert other.startswith("PeerFailed: rank 1") and "lambda" in broken
