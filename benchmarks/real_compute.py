"""Steps of real models on two ranks, one core each: what users run today, other balancers, and each technique of this package.

``python benchmarks/netlab.py --hosts 2 --rate 50mbit -- python benchmarks/real_compute.py --model hstu --data ml-1m.seqs.npz``

Compute is real: forward, backward and optimizer of the HSTU of ``examples/hstu.py`` or of the SASRec of ``examples/sasrec.py``,
which pads its batches. Histories have the lengths of the data set, cut to ``--max-length``, and Zipf-distributed items. The
rungs take turns in the same processes, each in a fit of its own, on the same samples in each step:

floor        our plan, and each rank has a whole table to itself: lookups and updates, but no exchange of rows
floor-drawn  the same with samples as drawn
ddp          strategy "ddp" with torch's buckets: a whole table on each rank, whose dense gradient is reduced
plain        TorchRec's row-wise sharded table under DDP, samples as drawn
pipeline     the same in a loop with TorchRec's TrainPipelineSparseDist, which exchanges the ids ahead
plain-once   plain with a model that looks up each id of its batch once
verl         plain, with the samples of each step assigned by verl's balancer; needs ``--peers``
nvidia       plain, with the samples of each step assigned by NVIDIA's balancer; needs ``--peers``
grouped      plain, with samples of similar length in a step, as with Hugging Face's group_by_length; steps have other samples
balance      plain, with our assignment
overlap      rows exchanged during compute
dedup        each row once per rank and step: the default
split        the gradients of dense weights last

Link is the time that a link needs for the bytes of a step, so no schedule of the same bytes makes the step shorter.

Exposed is the time in which ranks wait for others or for a transfer (straggler wait and transfer of the profiler), beyond that
of the floor with the same assignment. The pipeline has no profiler: its waits are its step without the time in which ranks of
plain do not wait. Later is the median step beyond that of the floor. It also contains processor time, because the exchange and
compute share a core. The bubble b is the share of time in which ranks do not compute, and r is the share of the bubble beyond
the floor's that a rung removes. The two allow a speed-up of 1 / (1 - r b). A padded model computes less with our plan, so its
speed-up can exceed that. The speed-up is that of the mean step. Brackets contain the least and the most of the rounds. Every
second round has the reverse order. All rungs but ddp have the DDP buckets, the placement of rows and the exchange
of this package. TorchRec's TrainPipelinePEC needs CUDA events, so it does not run here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))

import ladder
import numpy as np
import real_fits
import torch
import torch.distributed as dist
from demo import quiet
from harness import finish_on_all_ranks, parser
from netlab import link_rate
from real_fits import OURS, RUNGS, Fit

DRAWN = ("plain", "pipeline", "ddp", "plain_once")
"""The rungs with samples as drawn, which are compared with that floor."""
WAITS = ("straggler_wait", "transfer")


def main() -> None:
    """Run on all ranks."""
    options = read_options()
    torch.set_num_threads(1)
    quiet()
    dist.init_process_group("gloo")
    data = real_fits.Histories(options)
    runs: dict[str, list[Fit]] = {name: [] for name in options.rungs}
    for number in range(options.rounds):
        for name in options.rungs[:: 1 if number % 2 == 0 else -1]:
            if name != "ddp" or number < options.ddp_rounds:
                runs[name].append(real_fits.fit(name, data, options, number))
    figures = summarize(runs)
    if dist.get_rank() == 0:
        _show(figures, options)
    typical = {name: runs[name][-1].step for name in ("plain", "dedup") if name in runs}
    finish_on_all_ranks(figures, options, steps=typical)


def summarize(runs: dict[str, list[Fit]]) -> dict[str, float]:
    """Return the figures of all ranks by rung. Collective."""
    figures: dict[str, float] = {}
    rounds: list[dict[str, float]] = [{} for _ in range(max(map(len, runs.values())))]
    for name, fits in runs.items():
        key, counted = name.replace("-", "_"), [_mean_over_ranks(fit.counted) for fit in fits]
        shares = {part: float(np.mean([fit.shares.get(part, 0.0) for fit in fits])) for part in ("compute", *ladder.PARTS)}
        figures |= figures_of(key, np.concatenate(counted), shares)
        for of_round, each, fit in zip(rounds, counted, fits):
            of_round |= figures_of(key, each, fit.shares)
    for key in (name.replace("-", "_") for name in runs if not name.startswith("floor")):
        gained, by_round = compare(figures, key), [compare(each, key) for each in rounds]
        # the last rounds have no fit under "ddp"
        spread = (ladder.spread([{name: each[name]} for each in by_round if name in each]) for name in gained)
        figures |= gained | {name: value for each in spread for name, value in each.items()}
    if dist.get_rank() == 0 and "plain_bubble" in figures:
        figures["limit"] = 1 / (1 - figures["plain_bubble"])
    return figures


def _mean_over_ranks(counted: Any) -> Any:
    mean = torch.from_numpy(counted)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).numpy()


def figures_of(key: str, counted: Any, shares: dict[str, float]) -> dict[str, float]:
    """Return the figures of a rung from the counters of each step, as in a Fit, and shares of the time, if there are any."""
    wall, processor, sent = counted.T * [[1e3], [1e3], [1.0]]
    low, middle, high = np.percentile(wall, [25, 50, 75])
    found = {"low_ms": low, "ms": middle, "high_ms": high, "mean_ms": wall.mean(), "cpu_ms": processor.mean()}
    found |= {"sent_mb": sent.mean() / 1e6, "link_ms": 1e3 * sent.mean() / link_rate(float("inf"))}
    if shares.get("compute"):
        waits = wall.mean() * sum(shares[part] for part in WAITS)
        found |= {part: shares[part] for part in ladder.PARTS} | {"bubble": 1 - shares["compute"], "waits_ms": waits}
    return {f"{key}_{name}": float(each) for name, each in found.items()}


def compare(figures: dict[str, float], key: str) -> dict[str, float]:
    """Return what a rung gains over the others, as far as they are known."""
    of = {name: _rung(figures, name) for name in {key, *DRAWN, "floor", "floor_drawn"}}
    if of["pipeline"] and "waits_ms" in of["plain"]:
        of["pipeline"]["waits_ms"] = of["pipeline"]["mean_ms"] - (of["plain"]["mean_ms"] - of["plain"]["waits_ms"])
    plain_bubble = of["plain"].get("bubble", 0.0)
    others = [name for name in DRAWN if name != key and of[name]]
    floors = dict.fromkeys(DRAWN, of["floor_drawn"]) | dict.fromkeys(OURS, of["floor"])
    found = {f"speed_up_vs_{name}": of[name]["mean_ms"] / of[key]["mean_ms"] for name in others if of[key]}
    for measure, time in (("exposed", "waits_ms"), ("later", "ms")):
        known = [name for name in (key, *others) if time in of[name].keys() & floors.get(name, {}).keys()]
        beyond = {name: of[name][time] - floors[name][time] for name in known}
        if key in beyond:
            found[f"{measure}_ms"] = beyond.pop(key)
            found |= {f"{measure}_less_than_{name}": 1 - found[f"{measure}_ms"] / each for name, each in beyond.items()}
    lost = {name: of[name]["mean_ms"] * of[name]["bubble"] for name in ("plain", "floor", key) if "bubble" in of[name]}
    if len(lost) == 3 and key in OURS:
        found["reduction"] = (lost["plain"] - lost[key]) / (lost["plain"] - lost["floor"])
        found["of_allowed"] = found["speed_up_vs_plain"] * (1 - found["reduction"] * plain_bubble)
    return {f"{key}_{name}": each for name, each in found.items()}


def _rung(figures: dict[str, float], key: str) -> dict[str, float]:
    names = ("ms", "mean_ms", "bubble", "waits_ms")
    return {name: figures[f"{key}_{name}"] for name in names if f"{key}_{name}" in figures}


def _show(figures: dict[str, float], options: Any) -> None:
    rate, source = os.environ.get("NETLAB_RATE", "unknown rate"), options.data.name if options.data else "ml-latest-small"
    print(f"{options.model} of {options.layers} layers, {dist.get_world_size()} ranks, links of {rate}; per rank and step,")
    print(f"{options.batch} histories of at most {options.max_length} items ({source}); ", end="")
    print(f"{options.rows} rows of {real_fits.DIM}; {options.rounds} fits of {options.steps} counted steps")
    if "limit" in figures:
        bubble, limit = figures["plain_bubble"], figures["limit"]
        print(f"the bubble b of plain is {bubble:.1%}; without any bubble, a step is {limit:.2f} times as fast")
    print("".join(f"{title:>{width}}" for title, width in _HEAD.items()))
    for name in options.rungs:
        print(_row(name, figures))


_HEAD = {"": 12, "step ms": 9, "half within": 15, "CPU ms": 8, "link ms": 9, "bubble": 8, "straggler": 11, "transfer": 10,
         "exposed ms": 12, "later ms": 10, "less exposed than plain": 26, "pipeline": 10, "less late": 11, "pipeline ": 10,
         "r": 8, "of allowed": 12, "speed-up over plain": 22}  # fmt: skip


def _row(name: str, figures: dict[str, float]) -> str:
    key = name.replace("-", "_")
    of = {figure.removeprefix(f"{key}_"): value for figure, value in figures.items() if figure.startswith(f"{key}_")}
    ends = {figure: f"({of[f'{figure}_least']:.2f} - {of[f'{figure}_most']:.2f})" for figure in of if f"{figure}_least" in of}
    half = f"{of['low_ms']:.0f} - {of['high_ms']:.0f}"
    row = f"{name:<12}{of['ms']:9.1f}{half:>15}{of['cpu_ms']:8.1f}{of['link_ms']:9.1f}"
    columns = {"bubble": ".1%", "straggler_wait": ".1%", "transfer": ".1%", "exposed_ms": ".1f", "later_ms": ".1f",
               "exposed_less_than_plain": ".1%", "exposed_less_than_pipeline": ".1%", "later_less_than_plain": ".1%",
               "later_less_than_pipeline": ".1%", "reduction": ".1%", "of_allowed": ".1%"}  # fmt: skip
    for (figure, form), width in zip(columns.items(), [*_HEAD.values()][5:]):
        row += f"{format(of[figure], form) if figure in of else '':>{width}}"
    figure = "speed_up_vs_plain"
    return row + (f"{of[figure]:6.2f} {ends.get(figure, ''):>15}" if figure in of else "")


def read_options(words: Sequence[str] | None = None) -> Any:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--model", choices=("hstu", "sasrec"), default="hstu")
    add("--rungs", nargs="+", choices=RUNGS, default=[name for name in RUNGS if name not in ("verl", "nvidia")])
    add("--data", type=Path, help="lengths, see lengths.py (default: those of ml-latest-small)")
    add("--peers", type=Path, help="folder of fetch_peers.py, for the rungs verl and nvidia")
    add("--max-length", type=int, default=200)
    add("--layers", type=int, default=8)
    add("--batch", type=int, default=32, help="histories per rank and step (default: 32)")
    add("--rows", type=int, default=500_000)
    add("--steps", type=int, default=20, help="counted steps of a fit (default: 20)")
    add("--rounds", type=int, default=3)
    add("--ddp-steps", type=int, default=20, help="counted steps of a fit under ddp (default: 20)")
    add("--ddp-rounds", type=int, default=3, help="rounds with a fit under ddp (default: 3)")
    return arguments.parse_args(words)


if __name__ == "__main__":
    main()
