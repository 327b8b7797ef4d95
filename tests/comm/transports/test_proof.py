"""What a transport must show before it takes the place of torch's own backend; real ranks, and a clock that is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.transports import proof
from lightning_freescale.comm.transports.proof import AllToAll, Proof, ProofDevice, Verdict, part_sizes
from lightning_freescale.testing import run_distributed

CHUNK, LARGEST = 1000, 300_000
SIZES = [1, 3, CHUNK - 1, CHUNK, CHUNK + 1, LARGEST]
LIMIT = 8.0
Candidates = Callable[[int, list[float]], dict[str, AllToAll]]


def _over_gloo(change: Callable[[Tensor], None] = lambda part: None, before: Callable[[], None] = lambda: None) -> AllToAll:
    """Right; ``change`` may touch every part that comes from the rank before, ``before`` is called when it is waited for."""
    group = dist.new_group(timeout=timedelta(seconds=30))

    def begin(received: Tensor, send: Tensor, gets: list[int], gives: list[int]) -> Any:
        work = dist.all_to_all_single(received, send, gets, gives, group=group, async_op=True)

        def wait(seconds: float) -> None:
            before()
            assert work is not None
            work.wait()
            change(received.split(gets)[dist.get_rank() - 1])

        return wait

    return begin


def _verdicts(candidates: Candidates, native: float = 1.0, **options: Any) -> list[Verdict]:
    """What each of three ranks finds; ``candidates(rank, clock)`` may move the clock, which compute moves by 10 s."""

    def run() -> Verdict:
        clock = [0.0]
        proof.time = SimpleNamespace(perf_counter=lambda: clock[0], sleep=time.sleep, monotonic=time.monotonic)
        device = ProofDevice(torch.device("cpu"), lambda: _move(clock, 10.0), lambda: None)

        def gather(mine: dict[str, Any]) -> list[dict[str, Any]]:
            said: list[Any] = [None] * 3
            dist.all_gather_object(said, mine)
            return said

        rank = dist.get_rank()
        of_torch = _over_gloo(before=lambda: _move(clock, native))
        sizes = {"largest_bytes": LARGEST, "typical_bytes": 3000, **options}
        given = of_torch, candidates(rank, clock), device, rank, [10, 11, 12], gather, LIMIT, CHUNK
        return Proof(*given, **sizes).run()

    verdicts = run_distributed(run, 3)
    assert verdicts[0] == verdicts[1] == verdicts[2]
    return verdicts


def _move(clock: list[float], seconds: float) -> None:
    clock[0] += seconds


def _taking(clock: list[float], seconds: float) -> AllToAll:
    return _over_gloo(before=lambda: _move(clock, seconds))


def test_the_faster_one_wins() -> None:
    verdict = _verdicts(lambda rank, clock: {"a": _taking(clock, 0.2), "b": _taking(clock, 0.1)}, native=5.0)[0]
    assert verdict.chosen == "b" and not verdict.failures
    # torch's own backend brings the ranks together before; that is not measured
    assert verdict.milliseconds == pytest.approx({"native": 15_000, "a": 10_200, "b": 10_100})


@pytest.mark.parametrize(("seconds", "chosen"), [(20.0, "native"), (5.0, "native"), (4.3, "native"), (4.2, "a")])
def test_a_win_by_less_than_the_margin_is_none(seconds: float, chosen: str) -> None:
    """Of 15 s, 5 % are 0.75 s."""
    assert _verdicts(lambda rank, clock: {"a": _taking(clock, seconds)}, native=5.0)[0].chosen == chosen


def test_the_slowest_rank_counts() -> None:
    verdict = _verdicts(lambda rank, clock: {"a": _taking(clock, 9.0 if rank == 1 else 0.1)}, native=5.0)[0]
    assert verdict.chosen == "native" and verdict.milliseconds["a"] == pytest.approx(19_000)


def test_a_few_slow_rounds_do_not_count() -> None:
    def candidates(rank: int, clock: list[float]) -> dict[str, AllToAll]:
        calls = iter(range(1000))
        return {"a": _over_gloo(before=lambda: _move(clock, 50.0 if next(calls) % 3 == 0 else 0.1))}

    assert _verdicts(candidates, native=5.0)[0].chosen == "a"


def test_a_wrong_byte_in_a_part_of_any_size_is_seen_on_all_ranks() -> None:
    def candidates(rank: int, clock: list[float]) -> dict[str, AllToAll]:
        def changing(size: int) -> AllToAll:
            def change(part: Tensor) -> None:
                if len(part) == size and rank == 1:
                    part[size // 2] ^= 64

            return _over_gloo(change)

        return {**{str(size): changing(size) for size in SIZES}, "right": _taking(clock, 0.1)}

    verdict = _verdicts(candidates, native=5.0)[0]
    wrong = "rank 11: 1 of {} bytes from rank 10 are not those that torch's own backend delivers"
    assert verdict.failures == {str(size): wrong.format(size) for size in SIZES}
    assert verdict.chosen == "right" and verdict.milliseconds.keys() == {"native", "right"}


def test_bytes_that_do_not_come_are_seen() -> None:
    """Also where nothing is overwritten that came before."""

    def nothing(received: Tensor, send: Tensor, gets: list[int], gives: list[int]) -> Any:
        return lambda seconds: None

    failure = _verdicts(lambda rank, clock: {"nothing": nothing})[0].failures["nothing"]
    assert "rank 10: " in failure and "rank 12: " in failure


def test_what_came_before_does_not_pass_for_what_comes() -> None:
    def candidates(rank: int, clock: list[float]) -> dict[str, AllToAll]:
        before: list[Tensor] = []
        group = _over_gloo()

        def stale(received: Tensor, *rest: Any) -> Any:
            wait = group(received, *rest)

            def waited(seconds: float) -> None:
                wait(seconds)
                before.append(received.clone())
                if len(before) > 1 and len(before[-2]) == len(received):
                    received.copy_(before[-2])

            return waited

        return {"stale": stale}

    assert "are not those" in _verdicts(candidates)[0].failures["stale"]


class _Impatient:
    """Right, but it takes what has come after a second for all."""

    def __init__(self) -> None:
        self.group, self.kept = dist.new_group(), []

    def __call__(self, received: Tensor, send: Tensor, gets: list[int], gives: list[int]) -> Any:
        rank, came = dist.get_rank(), [torch.zeros(size, dtype=torch.uint8) for size in gets]
        coming = [dist.irecv(each, peer, group=self.group) for peer, each in enumerate(came) if peer != rank and len(each)]
        going = [(peer, part.clone()) for peer, part in enumerate(send.split(gives)) if peer != rank and len(part)]
        self.kept += [dist.isend(part, peer, group=self.group) for peer, part in going] + coming + going + came
        came[rank].copy_(send.split(gives)[rank])

        def wait(seconds: float) -> None:
            end = time.monotonic() + 1.0
            while time.monotonic() < end and not all(work.is_completed() for work in coming if work is not None):
                time.sleep(0.001)
            received.copy_(torch.cat(came))

        return wait


@pytest.mark.parametrize(("late_seconds", "noticed"), [(2.5, True), (0.0, False)])
def test_what_leaves_out_a_late_rank_is_seen(late_seconds: float, noticed: bool) -> None:
    verdict = _verdicts(lambda rank, clock: {"impatient": _Impatient()}, late_seconds=late_seconds)[0]
    assert bool(verdict.failures) == noticed
    if noticed:
        assert "bytes from rank 12 are not those" in verdict.failures["impatient"]


@pytest.mark.parametrize("at", [0, 14])
def test_what_fails_or_hangs_on_one_rank_is_dropped_on_all(at: int) -> None:
    """At once, or when it is measured; the others go on."""

    def candidates(rank: int, clock: list[float]) -> dict[str, AllToAll]:
        def failing(error: Exception) -> AllToAll:
            calls = iter(range(1000))

            def fail() -> None:
                if next(calls) == at and rank == 2:
                    time.sleep(0.3)
                    raise error

            return _over_gloo(before=fail)

        return {"hangs": failing(TimeoutError()), "right": _taking(clock, 0.1), "breaks": failing(OSError("it broke"))}

    verdict = _verdicts(candidates, native=5.0)[0]
    assert verdict.failures == {"hangs": "rank 12: its exchanges did not end within 8 s in all", "breaks": "rank 12: it broke"}
    assert verdict.chosen == "right"


def test_the_limit_is_for_all_exchanges_together() -> None:
    def candidates(rank: int, clock: list[float]) -> dict[str, AllToAll]:
        given: list[float] = []
        group = _over_gloo()

        def begin(*tensors_and_sizes: Any) -> Any:
            wait = group(*tensors_and_sizes)

            def slow(seconds: float) -> None:
                wait(seconds)
                given.append(seconds)
                time.sleep(0.3)
                if len(given) == 5 and not (given == sorted(given, reverse=True) and 0 < given[-1] <= LIMIT - 4 * 0.3):
                    raise AssertionError(given)

            return slow

        return {"slow": begin}

    assert not _verdicts(candidates)[0].failures


def test_torchs_own_backend_must_not_fail() -> None:
    def fail(*args: Any) -> Any:
        raise dist.DistBackendError("NCCL is gone")

    device = ProofDevice(torch.device("cpu"), lambda: None, lambda: None)
    with pytest.raises(dist.DistBackendError, match="NCCL is gone"):
        Proof(fail, {"a": fail}, device, 0, [0], lambda mine: [mine], 1.0, CHUNK).run()


def test_nothing_to_try_is_not_measured() -> None:
    verdict = _verdicts(lambda rank, clock: {})[0]
    assert (verdict.chosen, verdict.milliseconds) == ("native", {})


@pytest.mark.parametrize(("ranks", "chunk"), [(1, 1), (2, 2**20), (8, 2**20), (256, 2**20), (256, 1000), (3, 2**28)])
def test_every_two_ranks_have_parts_of_all_sizes_in_bounded_memory(ranks: int, chunk: int) -> None:
    largest = 64 * 2**20
    matrices = [sizes for sizes, _ in part_sizes(ranks, chunk, largest)]
    small = {0, 1, 3, chunk - 1, chunk, chunk + 1, 2**20}
    for source, target in {(0, 0), (0, 1 % ranks), (ranks - 1, 0)}:
        assert {sizes[source][target] for sizes in matrices} >= small
    assert matrices[-1][0][1 % ranks] == largest
    most = max(max(sum(row) for row in sizes) for sizes in matrices)
    assert most <= max(largest, 2 * (chunk + 1))
    columns = max(max(map(sum, zip(*sizes))) for sizes in matrices)
    assert columns <= max(largest, 2 * (chunk + 1))
    assert [late for _, late in part_sizes(ranks, chunk, largest)].count(True) == 1
