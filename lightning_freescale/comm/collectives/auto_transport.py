"""The trial of ``transport="auto"``: a transport replaces torch's own backend if it is correct, and faster beside compute.

All ranks run the same steps and exchange the results after each step. A candidate that fails on one rank is therefore dropped
on all ranks, and all ranks reach the same verdict.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.collectives.executor import CollectiveExecutor
from lightning_freescale.comm.collectives.native import NativeBackends
from lightning_freescale.comm.transports.p2p import GlooP2P
from lightning_freescale.comm.transports.selection import TransportRefused, auto_candidates, refusal
from lightning_freescale.comm.transports.topology import Topology
from lightning_freescale.comm.transports.transport import RankBuffers

Wait = Callable[[float], object]
"""A function that waits for at most the given seconds, and raises the error of the exchange, or TimeoutError."""
AllToAll = Callable[[Tensor, Tensor, list[int], list[int]], Wait]
"""A function that starts an all-to-all. Its arguments are the received tensor, the sent tensor, and the part sizes of each."""
_MOST_SECONDS = 60.0
"""The time limit of a candidate's trial, unless half the timeout of the group is less."""
_verdicts: dict[tuple[Any, ...], str] = {}
"""The verdicts in this process by ranks, GPUs and sizes. The lane of another collection uses the same verdict."""
_log = logging.getLogger(__name__)


def settle_transport(backend_opts: Any, lane: CollectiveExecutor, backends: NativeBackends) -> None:
    """Set up the transport of an ``"auto"`` lane for CUDA tensors if one passes its trial. Collective. Not tested on GPU.

    Each candidate runs on a separate lane, so a failure ends only that lane. The first rank of the group logs the verdict.
    """
    topology, first = lane.topology, backend_opts.group_rank == 0
    sizes = lane.options.chunk_bytes, lane.options._max_ctas
    key = topology.ranks, tuple(each.gpu for each in topology.hardware), sizes, lane.options.priority
    known = set(lane.p2p.gather_json(_verdicts.get(key, "")))
    if len(known) > 1 or known == {""}:  # the trial needs all ranks, including those that have a verdict
        alone = topology.find_alone()
        if first and alone and all(refusal(kind, topology) for kind in ("peer", "two-level")):
            _warn_of_hidden_gpus(alone)
        with backends.hiding_nccl():
            device = ProofDevice.from_cuda()
            verdict = _prove(backend_opts, lane, backends, device)
            device.release()
        _verdicts[key] = verdict.chosen
        if first:
            _log_verdict(verdict, topology, backends)
    if _verdicts[key] == "native":
        return
    try:
        lane.set_up_transport(_verdicts[key])
    except TransportRefused as error:  # on all ranks
        if first:
            _log.warning("transport='auto' uses torch's own backend for this lane: %s", error)


def _prove(backend_opts: Any, lane: CollectiveExecutor, backends: NativeBackends, device: ProofDevice) -> Verdict:
    trials: dict[str, CollectiveExecutor] = {}
    refused: dict[str, str] = {}
    limit = min(_MOST_SECONDS, backend_opts.timeout.total_seconds() / 2)  # a rank waits longer for another one
    try:
        for name in auto_candidates(lane.topology):
            options = replace(lane.options, transport=name, name=f"{name} on trial")
            store = dist.PrefixStore(f"{name} on trial", backend_opts.store)
            try:
                trials[name] = CollectiveExecutor(backend_opts, options, store)
            except TransportRefused as error:  # on all ranks
                refused[name] = str(error)
        candidates: dict[str, AllToAll] = {name: partial(_begin, trial, limit) for name, trial in trials.items()}
        verdict = Proof(
            native=partial(_begin_native, backends),
            candidates=candidates,
            device=device,
            p2p=lane.p2p,
            limit=limit,
            chunk_bytes=lane.options.chunk_bytes,
        ).run()
        return replace(verdict, failures={**refused, **verdict.failures})
    finally:
        for trial in trials.values():
            trial.abort()


def _begin_native(backends: NativeBackends, received: Tensor, send: Tensor, gets: list[int], gives: list[int]) -> Wait:
    work = backends.call("alltoall_base", received, send, gets, gives, dist.AllToAllOptions())
    return lambda seconds: work.wait()  # torch enforces the group's timeout


def _begin(trial: CollectiveExecutor, limit: float, received: Tensor, send: Tensor, gets: list[int], gives: list[int]) -> Wait:
    outgoing = partial(RankBuffers.from_tensor, "input", send, gives)
    incoming = partial(RankBuffers.from_tensor, "output", received, gets)
    return trial.run("all_to_all_single", outgoing, incoming, timedelta(seconds=limit), background=True).result


def _log_verdict(verdict: Verdict, topology: Topology, backends: NativeBackends) -> None:
    for name, failure in verdict.failures.items():
        _log.warning("transport='auto' does not use %r, which failed its trial: %s", name, failure)
    native = "NCCL" if backends.uses_nccl else "gloo"
    measured = [f"{native if name == 'native' else name} {value:.2f} ms" for name, value in verdict.milliseconds.items()]
    refusals = {kind: refusal(kind, topology) for kind in ("peer", "two-level")}
    reasons = [f"{kind!r} {reason}" for kind, reason in refusals.items()] if all(refusals.values()) else []
    _log.info(
        "transport='auto' uses %s for ranks %s. Time of an exchange with compute beside it on the slowest rank: %s%s",
        native if verdict.chosen == "native" else repr(verdict.chosen),
        ", ".join(map(str, topology.ranks)),
        ", ".join(measured) or "not measured",
        "".join(f"; {reason}" for reason in reasons),
    )


@cache
def _warn_of_hidden_gpus(alone: str) -> None:
    _log.warning(
        "transport='auto' cannot try copies between the GPUs of a host, because %s see one GPU each. Make all GPUs of the host "
        "visible to every process and call torch.cuda.set_device (SLURM: --gpu-bind=none; Ray: "
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1), or pass transport='native'",
        alone,
    )


_MIB = 2**20
_MARGIN = 0.05
"""The share of time by which a candidate must be faster than torch's own backend, because less may be noise."""
_WARM_UP, _ROUNDS = 2, 5


@dataclass(frozen=True)
class ProofDevice:
    """The device that the exchanges run on."""

    device: torch.device
    compute: Callable[[], None]  # enqueues a fixed amount of compute on the current stream
    synchronize: Callable[[], None]  # waits for all enqueued work
    release: Callable[[], None] = lambda: None  # frees unused memory

    @staticmethod
    def from_cuda() -> ProofDevice:
        """Return the current GPU with 24 products of 2048 x 2048 matrices as compute, about 1 ms. Not tested on GPU."""
        device = torch.device("cuda", torch.cuda.current_device())
        factor = torch.ones((2048, 2048), dtype=torch.bfloat16, device=device)
        product = torch.empty_like(factor)

        def compute() -> None:
            for _ in range(24):
                torch.mm(factor, factor, out=product)

        return ProofDevice(device, compute, lambda: torch.cuda.synchronize(device), torch.cuda.empty_cache)


@dataclass(frozen=True)
class Verdict:
    """The result of a trial, which is the same on all ranks."""

    chosen: str  # a candidate, or "native"
    milliseconds: dict[str, float]  # the time of an exchange with the compute beside it, on the slowest rank
    failures: dict[str, str]  # why candidates were dropped


@dataclass
class Proof:
    """A trial of candidates against torch's own backend. Collective."""

    native: AllToAll  # torch's own backend, which must not fail
    candidates: dict[str, AllToAll]
    device: ProofDevice
    p2p: GlooP2P  # gathers the results of all ranks
    limit: float  # the time limit of a candidate for all exchanges, in seconds
    chunk_bytes: int  # the chunk size of the lane; the trial has parts of this size and of one byte more or less
    largest_bytes: int = 64 * _MIB  # the size of the largest part, and the approximate size of an exchange
    typical_bytes: int = 32 * _MIB  # about the bytes that a rank sends in a measured exchange
    late_seconds: float = 0.3  # the delay of a late rank
    _failures: dict[str, str] = field(default_factory=dict)
    _spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def run(self) -> Verdict:
        """Choose the fastest candidate that passes all checks and is faster than torch's own backend."""
        for number, (sizes, late) in enumerate(part_sizes(self.p2p.size, self.chunk_bytes, self.largest_bytes)):
            self._check(number, sizes, late)
        milliseconds = self._measure() if self._left else {}
        best = min(self._left, key=milliseconds.__getitem__, default="native")
        wins = best != "native" and milliseconds[best] <= (1 - _MARGIN) * milliseconds["native"]
        return Verdict(best if wins else "native", milliseconds, self._failures)

    @property
    def _left(self) -> list[str]:
        return [name for name in self.candidates if name not in self._failures]

    def _check(self, number: int, sizes: list[list[int]], late: bool) -> None:
        """Compare the bytes with those of torch's own backend. ``sizes[source][target]`` is the size of a part."""
        gives, gets = sizes[self.p2p.rank], [row[self.p2p.rank] for row in sizes]
        # use different bytes each time, so that bytes of the previous exchange in a transport's memory do not pass
        draw = torch.Generator(self.device.device).manual_seed(number * self.p2p.size + self.p2p.rank)
        given = torch.randint(0, 256, (sum(gives),), generator=draw, dtype=torch.uint8, device=self.device.device)
        expected = given.new_empty(sum(gets))
        self.native(expected, given, gets, gives)(self.limit)
        for name in self._left:
            # use separate tensors, because a dropped candidate may still write
            received, send = torch.empty_like(expected), torch.zeros_like(given)
            self.device.synchronize()

            def exchange(name: str = name, received: Tensor = received, send: Tensor = send) -> float:
                if late and self.p2p.rank == self.p2p.size - 1:
                    time.sleep(self.late_seconds)
                # a transport that does not wait for the stream sends zeros, or its received bytes are overwritten
                self.device.compute()
                send.copy_(given)
                torch.bitwise_not(expected, out=received)  # so that a missing byte is detected
                self._wait(name, self.candidates[name](received, send, gets, gives))
                for source, (came, should) in enumerate(zip(received.split(gets), expected.split(gets))):
                    if not torch.equal(came, should):
                        wrong = f"{int((came != should).sum())} of {len(should)} bytes from rank {self.p2p.ranks[source]}"
                        raise RuntimeError(f"{wrong} differ from those of torch's own backend")
                return 0.0

            self._attempt(name, exchange)

    def _measure(self) -> dict[str, float]:
        """Return the milliseconds of each candidate on its slowest rank, as the median of interleaved rounds."""
        # Parts of real exchanges are uneven. A transport that pads all parts to the length of the largest one pays for it here.
        size, half = self.p2p.size, max(1, self.typical_bytes // self.p2p.size // 2)
        parts = [3 * half if (self.p2p.rank + other) % 2 else half for other in range(size)]
        send = torch.zeros(sum(parts), dtype=torch.uint8, device=self.device.device)
        ready = torch.empty_like(send[:size])
        received = {name: torch.empty_like(send) for name in ("native", *self._left)}
        taken: dict[str, list[list[float]]] = {name: [] for name in received}
        for number in range(_WARM_UP + _ROUNDS):
            names = ["native", *self._left]
            for name in names[number % len(names) :] + names[: number % len(names)]:  # vary the order

                def timed(name: str = name) -> float:
                    begin = self.candidates.get(name, self.native)
                    self.native(ready, send[:size], [1] * size, [1] * size)(self.limit)  # the ranks start together
                    self.device.synchronize()
                    start = time.perf_counter()
                    wait = begin(received[name], send, parts, parts)
                    self.device.compute()
                    self._wait(name, wait)
                    self.device.synchronize()
                    return 1000 * (time.perf_counter() - start)

                of_ranks = self._attempt(name, timed)
                if number >= _WARM_UP and of_ranks is not None:
                    taken[name].append(of_ranks)
        left = ("native", *self._left)
        return {name: max(median(of_rank) for of_rank in zip(*taken[name])) for name in left}

    def _wait(self, name: str, wait: Wait) -> None:
        start = time.monotonic()
        try:
            wait(self.limit if name == "native" else max(0.0, self.limit - self._spent[name]))
        except (TimeoutError, NotDone):  # the same class since Python 3.11
            raise TimeoutError(f"its exchanges did not end within {self.limit:g} s in total") from None
        self._spent[name] += time.monotonic() - start

    def _attempt(self, name: str, run: Callable[[], float]) -> list[float] | None:
        """Return the value of every rank, or None if the call fails on any rank, which drops the candidate."""
        error = None
        try:
            mine: dict[str, Any] = {"value": run()}
        except Exception as caught:
            error, mine = caught, {"error": str(caught) or type(caught).__name__}
        if error is not None and name == "native":
            raise error
        everyone = self.p2p.gather_json(mine)
        failed = [f"rank {rank}: {each['error']}" for rank, each in zip(self.p2p.ranks, everyone) if "error" in each]
        if failed:
            self._failures[name] = "; ".join(failed)
            return None
        return [each["value"] for each in everyone]


def part_sizes(ranks: int, chunk_bytes: int, largest_bytes: int) -> Iterator[tuple[list[list[int]], bool]]:
    """Yield the bytes from every rank to every rank, and whether a rank is late.

    The sizes are those at which transports change their method, each once for every pair of ranks. With many ranks, only some
    pairs have parts, so that a rank sends about ``largest_bytes``. The last exchange has one part of that size to the next
    rank.
    """
    few = [0, 1, 3, chunk_bytes - 1, chunk_bytes, chunk_bytes + 1, min(_MIB, largest_bytes)]
    near = max(2, largest_bytes // max(few))
    for shift in range(len(few)):
        sizes = [
            [
                few[(source + 2 * target + shift) % len(few)] if (target - source) % ranks < near else 0
                for target in range(ranks)
            ]
            for source in range(ranks)
        ]
        yield sizes, False
        if shift == 0:
            yield sizes, True
    yield [[largest_bytes * (target == (source + 1) % ranks) for target in range(ranks)] for source in range(ranks)], False
