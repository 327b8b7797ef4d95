"""Streams of several ranks: nothing lost, nobody waits, and a resume changes nothing."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
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

from lightning_freescale.balance.assign import assign
from lightning_freescale.data.streaming.loader import StreamLoader
from lightning_freescale.testing import RankFailed, run_distributed

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


def _cost(sample: tuple[int, int, float]) -> float:
    return sample[2]


def _loader(sizes: list[int], kind: type[Part] = Part, breaks_at: int = -1, **options: Any) -> StreamLoader:
    """This rank's; a break is on rank 1."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    group = dist.new_group(timeout=timedelta(seconds=20)) if len(sizes) > 1 else None
    dataset = kind(rank, sizes[rank], breaks_at if rank == 1 else -1)
    return StreamLoader(
        dataset, 4, **{"cost": _cost, "rank": rank, "world_size": len(sizes), "group": group, "collate_fn": list, **options}
    )


def _threads() -> int:
    """How many there are, without those that torch's loader workers are fed by: they end on their own."""
    return sum(thread.name != "QueueFeederThread" for thread in threading.enumerate())


def _run(sizes: list[int], count: int | None = None, **options: Any) -> dict[str, Any]:
    """The batches of this rank, and what the loader says of the steps."""
    loader = _loader(sizes, **options)
    batches = list(islice(loader, count))
    steps = range(len(batches))
    told = {name: [getattr(loader, name)(step) for step in steps] for name in ("counts", "costs", "drawn", "loss_weight")}
    return {"batches": batches, "bound": loader.stream_bound(), "threads": _threads(), **told}


def _samples(ranks: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return sorted((source, number) for rank in ranks for batch in rank["batches"] for source, number, _ in batch)


def _all_of(sizes: list[int]) -> list[tuple[int, int]]:
    return [(rank, number) for rank, size in enumerate(sizes) for number in range(size)]


def _check_told(ranks: list[dict[str, Any]], weights: bool = False) -> None:
    """What every rank was told of the steps is what the batches are."""
    assert len({len(rank["batches"]) for rank in ranks}) == 1, "all stop together"
    for step, batches in enumerate(zip(*(rank["batches"] for rank in ranks))):
        mine = np.array([sum((1 + s[1] if weights else 1) for s in batch) for batch in batches], dtype=float)
        for index, rank in enumerate(ranks):
            assert rank["counts"][step] == [len(batch) for batch in batches]
            np.testing.assert_allclose(rank["costs"][step], [sum(map(_cost, batch)) for batch in batches])
            assert rank["loss_weight"][step] == pytest.approx(mine[index] * len(ranks) / mine.sum())


def _imbalance(ranks: list[dict[str, Any]], name: str) -> float:
    loads = np.array(ranks[0][name])
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum())


@pytest.mark.parametrize("sizes", [[40, 40, 40], [41, 40, 40], [100, 9, 0], [3, 0, 0], [24, 26, 25]])
def test_exchange_loses_nothing_also_of_uneven_streams(sizes: list[int]) -> None:
    ranks = run_distributed(lambda: _run(sizes, exchange="samples", weight=lambda sample: 1 + sample[1]), 3)
    assert _samples(ranks) == _all_of(sizes)
    _check_told(ranks, weights=True)
    counts = np.array(ranks[0]["counts"])
    assert (counts[:-1] == 4).all()
    assert counts[-1].max() - counts[-1].min() <= 1 and counts[-1].min() >= 1 and counts[-1].max() <= 5
    assert {rank["threads"] for rank in ranks} == {1}


def test_exchange_assigns_as_a_map_style_set() -> None:
    ranks = run_distributed(lambda: _run([80, 80, 80], exchange="samples"), 3)
    for step in range(20):
        read = [(rank, number) for rank in range(3) for number in range(4 * step, 4 * step + 4)]
        cost = np.array([COSTS[700 * rank + number] for rank, number in read])
        target = assign(cost, 3).rank_of_sample
        for rank in range(3):
            expected = [sample for sample, to in zip(read, target) if to == rank]
            assert [sample[:2] for sample in ranks[rank]["batches"][step]] == expected
        np.testing.assert_allclose(ranks[0]["drawn"][step], cost.reshape(3, 4).sum(axis=1))
    assert _imbalance(ranks, "costs") < 0.8 * _imbalance(ranks, "drawn")


def test_exchange_with_another_assignment() -> None:
    def reverse(costs: np.ndarray, ranks: int) -> Any:
        given = assign(costs, ranks)
        return dataclasses.replace(given, rank_of_sample=given.rank_of_sample[::-1])

    one = run_distributed(lambda: _run([40, 40], exchange="samples"), 2)
    other = run_distributed(lambda: _run([40, 40], exchange="samples", assign=reverse), 2)
    assert _samples(one) == _samples(other)
    assert one[0]["batches"] != other[0]["batches"]


@pytest.mark.parametrize("exchange", ["none", "samples"])
def test_drop_last_gives_whole_steps(exchange: str) -> None:
    ranks = run_distributed(lambda: _run([42, 43], exchange=exchange, drop_last=True, pool_batches=3), 2)
    assert ranks[0]["counts"] == [[4, 4]] * 10
    _check_told(ranks)


def test_pool_moves_no_sample_and_balances() -> None:
    sizes = [400, 400, 401]
    ranks = run_distributed(lambda: _run(sizes), 3)
    assert _samples(ranks) == _all_of(sizes)
    assert all(sample[0] == index for index, rank in enumerate(ranks) for batch in rank["batches"] for sample in batch)
    _check_told(ranks)
    assert (np.array(ranks[0]["counts"])[:90] == 4).all()
    assert _imbalance(ranks, "costs") < 1 + 0.5 * (_imbalance(ranks, "drawn") - 1)
    for index, rank in enumerate(ranks):
        as_read = COSTS[(700 * index + np.arange(400)) % 2000].reshape(100, 4).sum(axis=1)
        np.testing.assert_allclose(np.array(rank["drawn"])[:100, index], as_read)
    means = [COSTS[(700 * index + np.arange(size)) % 2000].mean() for index, size in enumerate(sizes)]
    assert ranks[0]["bound"] == pytest.approx(max(means) / np.mean(means))
    assert {rank["threads"] for rank in ranks} == {1}


def test_pool_shares_what_is_left_at_the_end() -> None:
    """Streams that end within a pool's content of each other lose nothing."""
    sizes = [60, 43]
    ranks = run_distributed(lambda: _run(sizes), 2)
    assert _samples(ranks) == _all_of(sizes)
    _check_told(ranks)
    assert max(map(max, ranks[0]["counts"])) == 4


def test_pool_divides_the_cost_that_is_left_evenly() -> None:
    """Whatever has piled up in a pool must go in the last steps: not all of it in the very last."""
    ranks = run_distributed(lambda: _run([60, 60], cost=lambda sample: 1.0 + 3 * sample[0] * (sample[1] % 2)), 2)
    last = np.array(ranks[0]["costs"])[-7:, 1]
    assert last.max() - last.min() <= 3, "one dear sample"


def test_pool_tells_what_cannot_be_trained() -> None:
    def run() -> tuple[dict[str, Any], list[str]]:
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("lightning_freescale.data").addHandler(handler)
        return _run([8, 90], pool_batches=3), messages

    ranks = run_distributed(run, 2)
    _check_told([rank for rank, _ in ranks])
    (message,), nothing = (messages for _, messages in ranks)
    left = 90 - sum(map(len, ranks[1][0]["batches"]))
    assert not nothing
    assert "ends after 2 steps" in message and "not trained are at least 12 on rank 1" in message
    assert left >= 12


@pytest.mark.parametrize("exchange", ["none", "samples"])
def test_stopping_early_leaves_no_thread(exchange: str) -> None:
    def run() -> tuple[list[list[Any]], int, int]:
        loader, threads = _loader([400, 400], kind=SlowOnOne, exchange=exchange), []
        batches = []
        for step, batch in enumerate(loader):
            threads.append(_threads())
            batches.append(batch)
            if step == 6:
                time.sleep(0.1 * (dist.get_rank() == 0))  # its thread goes on, and needs that of rank 1 to finish
                break
        loader.set_epoch(1)  # the ranks' threads have done the same, so another epoch on the same group is in step
        return batches + list(islice(loader, 3)), max(threads), _threads()

    ranks = run_distributed(run, 2)
    assert [len(rank[0]) for rank in ranks] == [10, 10]
    assert {(most, last) for _, most, last in ranks} == {(2, 1)}


def test_works_ahead_but_not_further() -> None:
    """The data set is read for the batches that may be made, and for no others."""
    read: list[int] = []

    class Watched(Part):
        def _sample(self, number: int) -> tuple[int, int, float]:
            read.append(number)
            return super()._sample(number)

    loader = StreamLoader(Watched(0, 400), 4, cost=_cost, exchange="samples", collate_fn=list, ahead=3)
    batches = iter(loader)
    for taken in range(1, 6):
        next(batches)
        done = 4 * (taken + 3 + 1)  # one global batch is read ahead of the last that may be made
        for _ in range(1000):
            if len(read) >= done:
                break
            threading.Event().wait(0.01)
        threading.Event().wait(0.02)
        assert len(read) == done
    batches.close()  # type: ignore[attr-defined]
    assert _threads() == 1


@pytest.mark.parametrize("exchange", ["none", "samples"])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_one_rank_ends_all(exchange: str, workers: int) -> None:
    def run() -> tuple[str, int, int]:
        loader, taken = _loader([400, 400, 400], breaks_at=100, exchange=exchange, num_workers=workers), 0
        try:
            for _ in loader:
                taken += 1
        except (KeyError, RuntimeError) as error:
            left = _threads() + (len(multiprocessing.active_children()) if dist.get_rank() != 1 else 0)
            return f"{type(error).__name__}: {error}", taken, left
        return "no error", taken, _threads()

    first, broken, last = run_distributed(run, 3)
    assert "the needle" in broken[0] and broken[0].startswith("KeyError")
    assert first[0] == last[0] == "PeerFailed: rank 1 failed to read its stream: its own traceback tells why"
    assert first[1] == broken[1] == last[1] > 10
    assert first[2] == broken[2] == last[2] == 1


def test_a_killed_rank_ends_all() -> None:
    def run() -> None:
        for step, _ in enumerate(_loader([400, 400])):
            if step == 3 and dist.get_rank() == 1:
                import os

                os._exit(3)

    with pytest.raises(RankFailed, match=r"(?s)rank 0: .*PeerFailed.*rank 1: died"):
        run_distributed(run, 2, timeout=30)


def test_samples_that_cannot_be_sent() -> None:
    class Unpicklable(Part):
        def _sample(self, number: int) -> Any:
            _, number, cost = super()._sample(number)
            return (lambda: number) if self.rank == 1 and number == 41 else self.rank, number, cost

    def run() -> str:
        loader = _loader([80, 80], kind=Unpicklable, exchange="samples", assign=_swap)
        with pytest.raises(Exception) as caught:  # noqa: PT011 (which one is the answer)
            list(loader)
        both = torch.ones(1)
        dist.all_reduce(both, group=loader._group)
        assert both == 2, "the ranks are still in step"
        return f"{caught.type.__name__}: {caught.value}"

    other, broken = run_distributed(run, 2)
    assert "rank 1 could not pickle its samples" in other
    assert "lambda" in broken


def _swap(costs: np.ndarray, ranks: int) -> Any:
    given = assign(costs, ranks)
    return dataclasses.replace(given, rank_of_sample=np.arange(len(costs))[::-1] * ranks // len(costs))


# -- resume


@pytest.mark.parametrize("kind", [Part, SeekablePart])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("exchange", ["none", "samples"])
def test_resume_gives_the_batches_that_were_to_come(exchange: str, workers: int, kind: type[Part]) -> None:
    def run() -> None:
        options = {"exchange": exchange, "num_workers": workers, "kind": kind, "pool_batches": 3, "max_age": 6}
        whole = _loader([70, 64], **options)
        whole.set_epoch(1)
        batches = list(whole)
        assert len(batches) > 15
        for consumed in (0, 1, 6, 13, len(batches) - 1, len(batches)):
            state = json.loads(json.dumps(whole.state_after(consumed)))
            resumed = _loader([70, 64], **options)
            resumed.load_state_dict(state)
            resumed.set_epoch(1)
            assert list(resumed) == batches[consumed:]
            for step in range(consumed, len(batches)):
                assert resumed.counts(step) == whole.counts(step)
                assert resumed.costs(step).tolist() == whole.costs(step).tolist()
                assert resumed.drawn(step).tolist() == whole.drawn(step).tolist()
                assert resumed.loss_weight(step) == whole.loss_weight(step)
            assert resumed.state_after(consumed) == state
            if consumed < len(batches):
                assert resumed.stream_bound() == whole.stream_bound()
                assert resumed.state_after(len(batches)) == whole.state_after(len(batches))

    run_distributed(run, 2)


def test_state_counts_what_was_consumed_not_what_was_made() -> None:
    loader = _loader([100])
    batches = iter(loader)
    seen = [next(batches) for _ in range(3)]
    state = loader.state_after(2)
    resumed = _loader([100])
    resumed.load_state_dict(state)
    assert next(iter(resumed)) == seen[2]
    with pytest.raises(ValueError, match=r"step=3 .*only those just loaded are \(0 to 2\)"):
        loader.state_after(4)


def test_resume_is_for_its_epoch() -> None:
    loader, other = _loader([100]), _loader([100])
    list(loader)
    other.load_state_dict(loader.state_after(5))
    other.set_epoch(1)
    assert len(list(other)) == 25
    assert other.state_after(0)["stream"] is None


def test_old_steps_are_forgotten() -> None:
    loader = _loader([4 * 300], exchange="samples")
    list(loader)
    assert loader.counts(199) == [4]
    with pytest.raises(ValueError, match="step=150"):
        loader.state_after(151)


@pytest.mark.parametrize("exchange", ["none", "samples"])
def test_state_is_small(exchange: str) -> None:
    loader = _loader([4 * 200], kind=SeekablePart, exchange=exchange)
    list(loader)
    state = loader.state_after(150)
    assert len(json.dumps(state)) < 2000
    assert state["stream"]["reader"]["first"] >= 4 * (150 - 33), "no more is read again than may still be held"
    assert len(state["stream"].get("rounds", [])) <= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [({"batch_size": 5}, "batch_size=4, this loader has batch_size=5"), ({"exchange": "samples"}, "exchange='none'")],
)
def test_state_of_another_loader(change: dict[str, Any], message: str) -> None:
    loader = _loader([100])
    list(islice(loader, 3))
    other = StreamLoader(Part(0, 100), **{"batch_size": 4, "cost": _cost, **change})
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(loader.state_after(2))
    other.load_state_dict(loader.state_after(0))  # nothing was consumed: nothing can be lost


def test_a_stream_that_has_become_shorter() -> None:
    loader, other = _loader([100]), _loader([20])
    list(loader)
    other.load_state_dict(loader.state_after(20))
    with pytest.raises(ValueError, match="the data set ended before sample 99"):
        list(other)


# -- arguments


def test_summed_loss() -> None:
    loader = _loader([10], summed=True)
    list(loader)
    assert loader.loss_weight(0) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"ahead": 0}, "ahead=0"),
        ({"exchange": "all"}, "exchange='all'"),
        ({"world_size": 2}, "world_size=2, group=None"),
        ({"max_age": 3}, "max_age=3 cannot be kept with pool_batches=8"),
        ({"dataset": [1]}, "dataset=list"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StreamLoader(**{"dataset": Part(0, 9), "batch_size": 4, "cost": _cost, **options})


@pytest.mark.parametrize("name", ["cost", "weight"])
def test_bad_numbers(name: str) -> None:
    loader = _loader([40], **{name: lambda sample: -1.0 if sample[1] == 17 else 1.0})
    with pytest.raises(ValueError, match=rf"{name}\(sample\) is -1.0 for sample 17"):
        list(loader)


@pytest.mark.parametrize("exchange", ["none", "samples"])
def test_too_few_samples(exchange: str) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=r"stream of rank 1 has 0 samples|streams have 1 samples"):
            list(_loader([1, 0], exchange=exchange))

    run_distributed(run, 2)
