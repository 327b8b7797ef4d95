"""Error of the common clock of all ranks, its stated uncertainty, and the duration of a measurement.

Run it on shaped links: ``python benchmarks/netlab.py --hosts 4 --rate 200mbit -- python benchmarks/clock.py``. All hosts of
netlab share one clock. The true offset is therefore 0, and each measured offset is an error. The benchmark measures while all
ranks are idle, while each rank sends to the next one at full rate, and in the second state after an idle measurement.
``held`` is the share of errors that are no larger than the stated uncertainty. It must be 1.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parent))

import harness
import torch
import torch.distributed as dist
from netlab import link_rate

from lightning_freescale.profiling.clock_sync import Alignment

MESSAGE = 1 << 20
Sample = tuple[float, float, float, float, bool]  # error, uncertainty, round trip, duration, whether the transfer outlasted it


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--syncs", type=int, default=20, help="measurements on idle links")
    parser.add_argument("--loaded-syncs", type=int, default=4, help="measurements beside a transfer")
    parser.add_argument("--loaded-rounds", type=int, default=10, help="round trips of each measurement beside a transfer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    group, beside = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    settled = Alignment()
    settled.measure_offset(group)
    rounds = options.loaded_rounds
    figures = _part("idle", [_sample(Alignment(), lambda each: each.measure_offset(group)) for _ in range(options.syncs)])
    loaded = [_loaded(Alignment(), group, beside, rounds) for _ in range(options.loaded_syncs)]
    figures |= _part("loaded", loaded)
    figures |= _part("settled", [_loaded(settled, group, beside, rounds) for _ in range(options.loaded_syncs)])
    harness.finish_on_all_ranks(figures, options)


def _loaded(alignment: Alignment, group: dist.ProcessGroup, beside: dist.ProcessGroup, rounds: int) -> Sample:
    """Measure while each rank sends to the next one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    seconds = 0.5 + 0.04 * rounds * (size - 1)
    messages = int(seconds * link_rate() / MESSAGE) + 1
    sent, received = torch.zeros(MESSAGE, dtype=torch.uint8), torch.empty(messages, MESSAGE, dtype=torch.uint8)
    works = [dist.irecv(row, group=beside, group_src=(rank - 1) % size) for row in received]
    works += [dist.isend(sent, group=beside, group_dst=(rank + 1) % size) for _ in range(messages)]
    time.sleep(0.2)  # the links' buckets and queues fill
    *figures, _ = _sample(alignment, lambda each: each.measure_offset(group, rounds))
    outlasted = not all(work.is_completed() for work in works)
    for work in works:
        work.wait()
    return (*figures, outlasted)


def _sample(alignment: Alignment, sync: Callable[[Alignment], None]) -> Sample:
    dist.barrier()
    began = time.perf_counter()
    sync(alignment)
    now = time.perf_counter()
    error, round_trip = abs(alignment.to_rank_zero(now) - now), alignment.figures()["round_trip_s"]
    return error, alignment.uncertainty_at(now), round_trip, now - began, True


def _part(name: str, own: list[Sample]) -> dict[str, float]:
    """Return the figures of all ranks except the one that owns the clock."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    errors, claims, round_trips, _, outlasted = zip(*(sample for rank in ranks[1:] for sample in rank))
    figures = {
        f"{name}_error_us": median(errors) * 1e6,
        f"{name}_error_us_max": max(errors) * 1e6,
        f"{name}_uncertainty_us": median(claims) * 1e6,
        f"{name}_uncertainty_us_max": max(claims) * 1e6,
        f"{name}_held": sum(error <= claim for error, claim in zip(errors, claims)) / len(errors),
        f"{name}_round_trip_us": median(round_trips) * 1e6,
        f"{name}_sync_ms": median(duration for *_, duration, _ in ranks[0]) * 1e3,
        f"{name}_sync_ms_max": max(duration for *_, duration, _ in ranks[0]) * 1e3,
        f"{name}_under_way": sum(outlasted) / len(outlasted),
    }
    if name == "idle":
        del figures["idle_under_way"]  # no transfer was pending
    if dist.get_rank() == 0:
        print(
            f"{name:8}" + "  ".join(f"{key.removeprefix(name + '_')} {value:.4g}" for key, value in figures.items()), flush=True
        )
    return figures


if __name__ == "__main__":
    main()
