"""How close an all-to-all of the process group "freescale" comes to what the links allow, and what it lets run beside it.

Run it on shaped links: ``python benchmarks/netlab.py --hosts 2 --rate 200mbit -- python benchmarks/exchange.py``. Every rank
sends ``--mbytes`` to all ranks together, its own part included; the last rank comes ``--late-ms`` late. Times are the late
rank's, so that waiting for it is not charged. *Ideal* is the bytes that leave a rank over the rate of its link. Ours and gloo's
own ``all_to_all_single`` take turns in the same processes.

``--parts`` chooses: ``exchange`` as above; ``overlap``, what of the exchange a sleep and a one-thread matrix product hide;
``lanes``, a message of 64 KiB on a high lane while a low lane moves 64 MiB, over its time on an idle link; ``latency``, of 16
numbers per rank on both.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parent))

import harness
import torch
import torch.distributed as dist

from lightning_freescale.comm import LaneOptions

PARTS = ("exchange", "overlap", "lanes", "latency")
RATES = {"mbit": 1e6, "gbit": 1e9}
HIGH, LOW = 64 * 1024, 64 * 1024 * 1024


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--mbytes", type=float, help="per rank (default: what the link moves in 0.2 s)")
    parser.add_argument("--late-ms", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--low-chunk", type=int, default=32 * 1024, help="chunk_bytes of the low lane (default: 32768)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    figures: dict[str, float] = {}
    for part in options.parts:
        figures |= globals()[f"_{part}"](options)
    if dist.get_rank() == 0:
        harness.finish(figures, options)
    dist.barrier()
    dist.destroy_process_group()


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def _rate() -> float:
    """Bytes per second of a link."""
    text = os.environ.get("NETLAB_RATE", "")
    unit = next((unit for unit in RATES if text.endswith(unit)), None)
    if unit is None:
        sys.exit(f"NETLAB_RATE={text!r}: run this under benchmarks/netlab.py with a --rate in mbit or gbit")
    return float(text.removesuffix(unit)) * RATES[unit] / 8


def _tensors(options: object) -> tuple[torch.Tensor, torch.Tensor, float]:
    """What goes, where it comes to, and the ideal time in seconds."""
    size = dist.get_world_size()
    length = int(options.mbytes * 2**20 if options.mbytes else 0.2 * _rate()) // size * size
    return (
        torch.randint(0, 255, (length,), dtype=torch.uint8),
        torch.empty(length, dtype=torch.uint8),
        length * (size - 1) / size / _rate(),
    )


def _ways(output: torch.Tensor, input: torch.Tensor, asynchronous: bool = False) -> dict[str, Callable[[], object]]:
    ours, theirs = dist.new_group(backend="freescale"), dist.new_group(backend="gloo")
    return {
        "ours": lambda: dist.all_to_all_single(output, input, group=ours, async_op=asynchronous),
        "gloo": lambda: dist.all_to_all_single(output, input, group=theirs, async_op=asynchronous),
    }


def _timed(action: Callable[[], object], late: float = 0.0) -> float:
    """Milliseconds from when the last rank begins, on the rank that took least."""
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(late / 1000)
    start = time.perf_counter()
    action()
    took = torch.tensor((time.perf_counter() - start) * 1000)
    dist.all_reduce(took, dist.ReduceOp.MIN)
    return float(took)


def _spread(values: list[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 4]:.1f} to {ordered[-1 - len(ordered) // 4]:.1f}"


def _exchange(options: object) -> dict[str, float]:
    input, output, ideal = _tensors(options)
    ways, times, results = _ways(output, input), {"ours": [], "gloo": []}, {}
    for _ in range(options.rounds + 1):
        for way, action in ways.items():
            times[way].append(_timed(action, options.late_ms))
            results[way] = output.clone()
    assert torch.equal(results["ours"], results["gloo"])
    figures = {}
    _say(
        f"{dist.get_world_size()} ranks, {os.environ['NETLAB_RATE']}, {len(input) / 2**20:.1f} MiB per rank, ideal {ideal * 1e3:.1f} ms"
    )
    for way, values in times.items():
        figures[f"{way}_over_ideal"] = median(values[1:]) / ideal / 1000
        _say(
            f"  {way:<8}{median(values[1:]):8.1f} ms (half within {_spread(values[1:])}), {figures[f'{way}_over_ideal']:.3f} of the ideal"
        )
    return figures


def _overlap(options: object) -> dict[str, float]:
    input, output, ideal = _tensors(options)
    exchange = _ways(output, input, asynchronous=True)["ours"]
    figures = {}
    for name, compute in {"sleep": lambda: time.sleep(ideal), "matmul": _matmul(ideal)}.items():
        times = {"compute": [], "exchange": [], "blocking": [], "overlapped": []}
        for _ in range(options.rounds + 1):
            times["compute"].append(_timed(compute))
            times["exchange"].append(_timed(lambda: exchange().wait()))
            times["blocking"].append(_timed(lambda: (exchange().wait(), compute())))
            times["overlapped"].append(_timed(lambda: _beside(exchange, compute)))
        took = {way: median(values[1:]) for way, values in times.items()}
        hidden = (took["blocking"] - took["overlapped"]) / min(took["compute"], took["exchange"])
        figures[f"hidden_{name}"] = hidden
        _say(f"  {name}: " + ", ".join(f"{way} {value:.1f} ms" for way, value in took.items()) + f", hidden {hidden:.1%}")
    return figures


def _beside(exchange: Callable[[], object], compute: Callable[[], object]) -> None:
    work = exchange()
    compute()
    work.wait()


def _matmul(seconds: float) -> Callable[[], object]:
    """Matrix products on one thread that take about so long, the same number on every rank."""
    a, b, out = (torch.randn(512, 512) for _ in range(3))
    start = time.perf_counter()
    for _ in range(8):
        torch.mm(a, b, out=out)
    count = torch.tensor(8 * seconds / (time.perf_counter() - start))
    dist.broadcast(count, 0)
    return lambda: [torch.mm(a, b, out=out) for _ in range(max(1, int(count)))]


def _lanes(options: object) -> dict[str, float]:
    size = dist.get_world_size()
    high = dist.new_group(backend="freescale", pg_options=LaneOptions(name="high", priority=1))
    low = dist.new_group(backend="freescale", pg_options=LaneOptions(name="low", chunk_bytes=options.low_chunk))
    small, large = (torch.ones(bytes_ // size * size, dtype=torch.uint8) for bytes_ in (HIGH, LOW))
    out, bulk = torch.empty_like(small), torch.empty_like(large)
    urgent = lambda: dist.all_to_all_single(out, small, group=high)  # noqa: E731
    idle = [_timed(urgent) for _ in range(4 * options.rounds)]
    alone = [_timed(lambda: dist.all_to_all_single(bulk, large, group=low)) for _ in range(3)]
    busy, beside = [], []
    while len(busy) < 2 * options.rounds:
        start, work = time.perf_counter(), dist.all_to_all_single(bulk, large, group=low, async_op=True)
        while _everywhere(not work.is_completed()):
            time.sleep(0.05)
            busy.append(_timed(urgent))
        work.wait()
        beside.append((time.perf_counter() - start) * 1000)
    figures = {"high_over_idle": median(busy) / median(idle), "low_slowdown": median(beside) / median(alone)}
    _say(
        f"  64 KiB on the high lane: {median(idle):.1f} ms on an idle link, {median(busy):.1f} ms (half within {_spread(busy)}) while the"
    )
    _say(
        f"  low lane moves 64 MiB, {figures['high_over_idle']:.2f} times; the low lane takes {figures['low_slowdown']:.2f} times its time alone"
    )
    return figures


def _everywhere(holds: bool) -> bool:
    told = torch.tensor(int(holds))
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told)


def _latency(options: object) -> dict[str, float]:
    numbers = 16 * dist.get_world_size()
    figures = {}
    for name, asynchronous in (("sync", False), ("async", True)):
        ways, times = _ways(torch.empty(numbers), torch.ones(numbers), asynchronous), {"ours": [], "gloo": []}
        for _ in range(20):
            for way, action in ways.items():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(20):
                    work = action()
                    if asynchronous:
                        work.wait()
                times[way].append((time.perf_counter() - start) / 20 * 1e6)
        figures[f"latency_over_gloo_{name}"] = median(times["ours"]) / median(times["gloo"])
        _say(f"  16 floats, {name}: ours {median(times['ours']):.0f} us, gloo {median(times['gloo']):.0f} us")
    return figures


if __name__ == "__main__":
    main()
