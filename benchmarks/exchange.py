"""Speed of an all-to-all of the process group "freescale" compared with the links, and its effect on other work.

Run it on shaped links: ``python benchmarks/netlab.py --hosts 2 --rate 200mbit -- python benchmarks/exchange.py``. Each rank
sends ``--mbytes`` to all ranks together, including its own part. The last rank starts ``--late-ms`` late. Times run from the
start of the last rank to the end of the last rank, so the wait for it is excluded. *Ideal* is the number of bytes that leave a
rank over the rate of its link. Three methods take turns in the same processes: ours, gloo's own ``all_to_all_single``, and
``agreed``, which is ``ProcessGroupFreeScale.exchange`` of the same bytes without the own part.

``--parts`` selects the measurements:

- ``exchange``: the comparison above.
- ``overlap``: the share of the exchange that a sleep and a one-thread matrix product hide.
- ``lanes``: 64 KiB for each peer on a high lane while a low lane sends 64 MiB, over its time on an idle link. The bucket of a
  link lets a small message pass at once, so use netlab's ``--burst 16kb``.
- ``latency``: 16 numbers per rank, and ``agreed`` against gloo's ``alltoall_base`` called directly. It requires torchrun, and
  no netlab.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parent))

import harness
import torch
import torch.distributed as dist
from netlab import link_rate
from torch import Tensor

from lightning_freescale.comm import ProcessGroupFreeScaleOptions

HIGH, LOW = 64 * 1024, 64 * 1024 * 1024
Action = Callable[[], Any]


def main() -> None:
    parts = {"exchange": _exchange, "overlap": _overlap, "lanes": _lanes, "latency": _latency}
    parser = harness.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--mbytes", type=float, help="megabytes per rank (default: those that the link sends in 0.5 s)")
    parser.add_argument("--late-ms", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--low-chunk", type=int, default=32 * 1024, help="chunk_bytes of the low lane (default: 32768)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    _say(f"{dist.get_world_size()} ranks, links of {os.environ.get('NETLAB_RATE', 'loopback')}")
    figures: dict[str, float] = {}
    for part in options.parts:
        figures |= parts[part](options)
    harness.finish_on_all_ranks(figures, options)


def _exchange(options: Any) -> dict[str, float]:
    input, output, ideal = _tensors(options)
    length, rank = len(input) // dist.get_world_size(), dist.get_rank()
    own = slice(rank * length, (rank + 1) * length)
    others, received = (torch.cat([each[: own.start], each[own.stop :]]) for each in (input, output))
    ways = _ways(output, input) | {"agreed": _agreed(received, others, length)}
    times: dict[str, list[float]] = {way: [] for way in ways}
    results = {}
    for _ in range(options.rounds + 1):
        for way, action in ways.items():
            times[way].append(_timed(action, options.late_ms))
            results[way] = output.clone()
    assert torch.equal(results["ours"], results["gloo"])
    assert torch.equal(received, torch.cat([output[: own.start], output[own.stop :]]))
    ratios = {way: median(values[1:]) / ideal for way, values in times.items()}
    _say(f"  {len(input) / 2**20:.1f} MiB per rank, ideal {ideal:.1f} ms, one rank {options.late_ms:g} ms late")
    for way, values in times.items():
        _say(f"  {way:<10}{_spread(values[1:])}, {ratios[way]:.3f} times the ideal")
    return {f"{way}_over_ideal": ratio for way, ratio in ratios.items()}


def _overlap(options: Any) -> dict[str, float]:
    input, output, ideal = _tensors(options)
    begin = _ways(output, input, asynchronous=True)["ours"]
    return {
        "hidden_sleep": _hidden("sleep", begin, partial(time.sleep, ideal / 1000), options.rounds),
        "hidden_matmul": _hidden("matmul", begin, _matmul(ideal / 1000), options.rounds),
    }


def _hidden(name: str, begin: Action, compute: Action, rounds: int) -> float:
    """Return the share of the shorter part that the overlap saves."""

    def beside() -> None:
        work = begin()
        compute()
        work.wait()

    def exchange() -> None:
        begin().wait()

    ways = {"compute": compute, "exchange": exchange, "blocking": lambda: (exchange(), compute()), "overlapped": beside}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way, action in ways.items():
            times[way].append(_timed(action))
    took = {way: median(values[1:]) for way, values in times.items()}
    hidden = (took["blocking"] - took["overlapped"]) / min(took["compute"], took["exchange"])
    _say(f"  {name:<10}" + ", ".join(f"{way} {value:.1f} ms" for way, value in took.items()) + f": {hidden:.0%} hidden")
    return hidden


def _lanes(options: Any) -> dict[str, float]:
    size = dist.get_world_size()
    urgent = _lane(ProcessGroupFreeScaleOptions(name="high", priority=1), HIGH * size)
    bulk = _lane(ProcessGroupFreeScaleOptions(name="low", chunk_bytes=options.low_chunk), LOW // size * size)
    idle = [_timed(lambda: urgent().wait()) for _ in range(4 * options.rounds)]
    alone = [_timed(lambda: bulk().wait()) for _ in range(3)]
    busy: list[float] = []
    beside: list[float] = []
    while len(busy) < 2 * options.rounds:
        start, work = time.perf_counter(), bulk()
        while _everywhere(not work.is_completed()):
            time.sleep(0.05)
            busy.append(_timed(lambda: urgent().wait()))
        work.wait()
        beside.append((time.perf_counter() - start) * 1000)
    figures = {"high_over_idle": median(busy) / median(idle), "low_slowdown": median(beside) / median(alone)}
    figures |= {"high_idle_ms": median(idle), "high_busy_ms": median(busy)}
    _say(f"  high lane, 64 KiB per peer, idle link: {_spread(idle)}")
    _say(f"  while the low lane moves 64 MiB: {_spread(busy)}, {figures['high_over_idle']:.2f} times as long")
    _say(f"  the low lane takes {figures['low_slowdown']:.2f} times its time alone")
    return figures


def _latency(options: Any) -> dict[str, float]:
    length = 16 * dist.get_world_size()
    figures = {}
    for name, asynchronous in (("sync", False), ("async", True)):
        ways = _ways(torch.empty(length), torch.ones(length), asynchronous)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for way, action in 10 * list(ways.items()):
            dist.barrier()
            for _ in range(50):
                start = time.perf_counter()
                work = action()
                if asynchronous:
                    work.wait()
                times[way].append((time.perf_counter() - start) * 1e6)
        figures[f"latency_over_gloo_{name}"] = median(times["ours"]) / median(times["gloo"])
        _say(f"  16 floats, {name}: " + ", ".join(f"{way} {_spread(values, 'us')}" for way, values in times.items()))
    return figures | _agreed_latency()


def _agreed_latency() -> dict[str, float]:
    received, send = torch.empty(16 * (dist.get_world_size() - 1)), torch.ones(16 * (dist.get_world_size() - 1))
    gloo, sizes, plain = dist.new_group(backend="gloo"), _without_own(16), dist.AllToAllOptions()
    ways: dict[str, Action] = {
        "agreed": _agreed(received, send, 16),
        "gloo": lambda: gloo.alltoall_base(received, send, sizes, sizes, plain).wait(),
    }
    ways["gloo again"] = ways["gloo"]
    times: dict[str, list[float]] = {way: [] for way in ways}
    ratios: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(30):
        for way, action in ways.items():
            dist.barrier()
            times[way] += [_took(action) * 1e6 for _ in range(50)]
        for way, values in times.items():
            ratios[way].append(median(values[-50:]) / median(times["gloo"][-50:]))
    _say("  16 floats, agreed: " + ", ".join(f"{way} {_spread(values, 'us')}" for way, values in times.items()))
    _say("    over gloo's, turn by turn: " + ", ".join(f"{way} {_spread(values, '', 2)}" for way, values in ratios.items()))
    return {"agreed_latency_over_gloo": median(times["agreed"]) / median(times["gloo"])}


def _took(action: Action) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _tensors(options: Any) -> tuple[Tensor, Tensor, float]:
    """Return the input, the output and the ideal time in milliseconds."""
    size, rate = dist.get_world_size(), link_rate()
    length = int(options.mbytes * 2**20 if options.mbytes else 0.5 * rate) // size * size
    sent = torch.randint(0, 255, (length,), dtype=torch.uint8)
    return sent, torch.empty_like(sent), 1000 * length * (size - 1) / size / rate


def _ways(output: Tensor, input: Tensor, asynchronous: bool = False) -> dict[str, Action]:
    backends = {"ours": "freescale", "gloo": "gloo"}
    groups = {way: dist.new_group(backend=backend) for way, backend in backends.items()}
    return {
        way: partial(dist.all_to_all_single, output, input, group=group, async_op=asynchronous) for way, group in groups.items()
    }


def _agreed(received: Tensor, send: Tensor, length: int) -> Action:
    """Return an exchange of this many elements with each other rank, on a separate group."""
    sizes = _without_own(length)
    return partial(dist.new_group(backend="freescale").exchange, received, send, sizes, sizes)


def _without_own(length: int) -> list[int]:
    return [0 if rank == dist.get_rank() else length for rank in range(dist.get_world_size())]


def _lane(options: ProcessGroupFreeScaleOptions, length: int) -> Action:
    """Return an all-to-all of this many bytes on a separate lane."""
    group = dist.new_group(backend="freescale", pg_options=options)
    tensors = torch.empty(length, dtype=torch.uint8), torch.ones(length, dtype=torch.uint8)
    return partial(dist.all_to_all_single, *tensors, group=group, async_op=True)


def _matmul(seconds: float) -> Action:
    """Return matrix products on one thread of about this duration, the same number on each rank."""
    a, b, out = (torch.randn(512, 512) for _ in range(3))
    start = time.perf_counter()
    for _ in range(8):
        torch.mm(a, b, out=out)
    count = torch.tensor(8 * seconds / (time.perf_counter() - start))
    dist.broadcast(count, 0)
    return lambda: [torch.mm(a, b, out=out) for _ in range(max(1, int(count)))]


def _timed(action: Action, late: float = 0.0) -> float:
    """Return the milliseconds from the start of the last rank to the last end; the hosts of netlab share one clock."""
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(late / 1000)
    start = time.perf_counter()
    action()
    marks = torch.tensor([start, time.perf_counter()], dtype=torch.float64)
    dist.all_reduce(marks, dist.ReduceOp.MAX)
    return float(marks[1] - marks[0]) * 1000


def _everywhere(holds: bool) -> bool:
    agreed = torch.tensor(int(holds))
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed)


def _spread(values: list[float], unit: str = "ms", digits: int = 1) -> str:
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.{digits}f} {unit} (half within {low:.{digits}f} to {high:.{digits}f})"


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
