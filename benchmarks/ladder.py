"""What each technique takes away of the bubbles, one more at a time, end to end through Lightning's Trainer.

``python benchmarks/netlab.py --hosts 8 --rate 25mbit -- python benchmarks/ladder.py --data ml-1m.seqs.npz --compute-ms 1440``

Histories are as long as those of the data set, their items Zipf-distributed over ``--rows`` rows, and compute is a sleep by a
cost model of the lengths, ``--compute-ms`` for a mean batch. The rungs take turns in the same processes, each a fit of its own:

floor      equal costs on all ranks, and no embedding exchange: what the loop, DDP and this machine take
plain      TorchRec's own exchange under DDP, samples as drawn
balance    the same samples in each step, assigned by cost, at counts up to 25 % apart
overlap    the ids go ahead, and rows and gradients travel behind compute
dedup      every row once per rank and step
split      the gradients of the dense weights, a share of compute, come last: those of the rows are on the way by then
window     2 micro-batches, in which the tables do not change
two-level  what several ranks of a host need crosses the network once; with netlab's ``--ranks-per-host``

Without lookahead there is no dedup here, so ids ahead have no row of their own; no cache replicates hot rows: two levels save
the same bytes exactly. A higher lane goes before a lower one in every exchange that overlaps.

The bubble b is 1 - compute summed over ranks / (ranks x wall time). With P, F and X the time per step that is not compute, of
plain, floor and a rung: the reduction is r = (P - X) / (P - F), and "of what r and b allow" is the speed-up over
1 / (1 - r b).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import end_to_end  # first: it sets the environment
import lengths
import lightning as L
import numpy as np
import overlap_variants
import overlap_workload
import planted
import torch
from harness import finish_on_all_ranks, parser
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale import BubbleProfiler, FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.balance import CostModel
from lightning_freescale.data import BalanceOptions

RUNGS: dict[str, dict[str, Any]] = {
    "floor": {"balance": True},
    "plain": {},
    "balance": {"balance": True},
    "overlap": {"overlap": True},
    "dedup": {"dedup": True},
    "split": {"split_backward": True},
    "window": {"micro_batches": 2},
    "two-level": {"exchange": "two_level"},
}
"""What each adds to those before it; the floor and plain stand for themselves."""
BY_DEFAULT = tuple(RUNGS)[:-1]
PARTS = ("data_wait", "straggler_wait", "transfer", "host_overhead", "unexplained")


@dataclass(frozen=True)
class Archetype:
    """What a training run is made of.

    Attributes:
        attention: share of a mean history's compute that grows with the square of its length.
        tables: how many, each asked for every item.
        dim: of their rows.
        batch: histories per rank and step.
        family: lengths are drawn from it, see ``lengths.py``; those of ``--data`` if not given.
    """

    attention: float = 0.5
    tables: int = 1
    dim: int = 64
    batch: int = 32
    family: str | None = None


ARCHETYPES = {
    "middle": Archetype(),
    "compute-heavy": Archetype(attention=0.9, dim=8),
    "embedding-heavy": Archetype(attention=0.0, tables=4, batch=64, family="short"),
}


def main() -> None:
    """All ranks."""
    options = _options()
    kind, leads = ARCHETYPES[options.archetype], int(os.environ["RANK"]) == 0
    data = Histories(kind, options)
    runs: dict[str, list[Fit]] = {name: [] for name in options.rungs}
    for number in range(options.rounds):
        for name in options.rungs:
            runs[name].append(_fit(name, kind, data, options, number))
    figures = _figures(runs)
    if leads:
        _show(figures, options)
        if options.plot is not None:
            _plot(figures, options)
    finish_on_all_ranks(figures, options)


class Histories(Dataset[Tensor]):
    """Each sample the items of one history in every table, shape ``[tables, length]``, drawn from its own index."""

    def __init__(self, kind: Archetype, options: Any) -> None:
        samples = (options.steps + end_to_end.SKIPPED) * kind.batch * int(os.environ["WORLD_SIZE"])
        random = np.random.default_rng(overlap_workload.SEED)
        self.lengths = _lengths(kind, options.data, random, samples)
        popularity = np.cumsum(np.arange(1, options.rows + 1, dtype=np.float64) ** -overlap_workload.EXPONENT)
        place = random.permutation(options.rows)  # the popular ones are anywhere in the table
        drawn = random.random((kind.tables, int(self.lengths.sum()))) * popularity[-1]
        ids = torch.from_numpy(place[np.searchsorted(popularity, drawn)])
        self._ids = ids.split(self.lengths.tolist(), dim=1)
        mean, square = self.lengths.mean(), float((self.lengths.astype(np.float64) ** 2).mean())
        # of a second of mean compute, as shares of the two kinds; both by the mean history
        seconds = options.compute_ms / 1000 / kind.batch
        self.cost = CostModel(linear=seconds * (1 - kind.attention) / mean, quadratic=seconds * kind.attention / square)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return self._ids[index]


def _lengths(kind: Archetype, path: Path | None, random: np.random.Generator, samples: int) -> NDArray[np.int64]:
    if kind.family is not None:
        return lengths.draw_lengths(kind.family, random, samples).astype(np.int64)
    _, known = lengths.read_lengths(overlap_workload.RATINGS if path is None else path)
    return random.choice(known, samples).astype(np.int64)


class Sleeper(end_to_end.Sleeper):
    """Sleeps as long as the cost model says, and asks every table."""

    def __init__(self, kind: Archetype, cost: CostModel, options: Any, exchanges: bool) -> None:
        super().__init__(options, 0.0, exchanges)
        self._cost, self._keys = cost, _keys(kind)
        if exchanges:
            tables = [
                EmbeddingConfig(num_embeddings=options.rows, embedding_dim=kind.dim, name=key, feature_names=[key])
                for key in self._keys
            ]
            self.items = EmbeddingCollection(tables=tables, device=torch.device("meta"))

    def seconds_of(self, batch: KeyedJaggedTensor) -> float:
        """By the lengths of the histories."""
        samples = batch.lengths()[: batch.stride()]
        return float(self._cost(samples.double().numpy()).sum())

    def rows_of(self, batch: KeyedJaggedTensor) -> Tensor:
        """Those of all tables, added up."""
        found = self.items(batch)
        return sum((found[key].values() for key in self._keys if key in found), torch.zeros(()))


def _keys(kind: Archetype) -> list[str]:
    return ["item", *(f"item_{number}" for number in range(1, kind.tables))]


@dataclass(frozen=True)
class Fit:
    """What one fit measured; seconds of each step on this rank, shares of all ranks' time on rank 0."""

    wall: NDArray[np.float64]
    compute: NDArray[np.float64]
    shares: dict[str, float]
    collision_rate: float | None


def _fit(name: str, kind: Archetype, data: Histories, options: Any, number: int) -> Fit:
    choices = _choices(name)
    torch.manual_seed(0)
    options.dim, options.variants = kind.dim, options.rungs
    model = Sleeper(kind, data.cost, options, exchanges=name != "floor")
    module = FreeScaleDataModule(
        data, data.lengths, kind.batch, cost=data.cost, collate_fn=lambda samples: _collate(samples, kind), seed=number,
        balance=choices.pop("balance", False) and BalanceOptions(assignment_mode="slack"), loss_reduction="target_mean",
        micro_batches=choices.pop("micro_batches", 1),
    )  # fmt: skip
    strategy = FreeScaleStrategy(**{"overlap": False, **choices})
    profiler = BubbleProfiler(mkdtemp(), warmup_steps=end_to_end.SKIPPED, verbose=False)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]), max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[profiler],
    )  # fmt: skip
    trainer.fit(model, datamodule=module)
    first = end_to_end.SKIPPED
    overlap = strategy.overlap_report
    return Fit(
        wall=np.diff(model.began)[first - 1 : -1],
        compute=np.array(model.computed[first - 1 : -2]),
        shares={} if profiler.report is None else dict(profiler.report.shares),
        collision_rate=None if overlap is None else overlap.collision_rate,
    )


def _choices(name: str) -> dict[str, Any]:
    """Return the options of a rung: what the rungs up to it add."""
    rungs = list(RUNGS)
    climbed = rungs[1 : rungs.index(name) + 1] if name != "floor" else ["floor"]
    choices = {key: value for rung in climbed for key, value in RUNGS[rung].items()}
    if choices.get("overlap"):
        choices.setdefault("dedup", False)
    return choices


def _collate(samples: list[Tensor], kind: Archetype) -> KeyedJaggedTensor:
    lengths_of = torch.tensor([each.shape[1] for each in samples]).int().repeat(kind.tables)
    return KeyedJaggedTensor(_keys(kind), torch.cat(samples, dim=1).flatten(), lengths=lengths_of)


def _figures(runs: dict[str, list[Fit]]) -> dict[str, float]:
    """By rung; of all ranks. Collective."""
    figures: dict[str, float] = {}
    for name, fits in runs.items():
        world = torch.distributed.get_world_size()
        mean = torch.tensor(
            np.array([[np.concatenate([getattr(f, kind) for f in fits])] for kind in ("wall", "compute")])[:, 0]
        )
        torch.distributed.all_reduce(mean)
        key = name.replace("-", "_")
        figures |= {f"{key}_{figure}": value for figure, value in summarize(*(mean / world).numpy()).items()}
        for part in PARTS:
            figures[f"{key}_{part}"] = float(np.mean([fit.shares.get(part, 0.0) for fit in fits]))
        rates = [fit.collision_rate for fit in fits if fit.collision_rate is not None]
        if rates:
            figures[f"{key}_collision_rate"] = float(np.mean(rates))
    if {"floor", "plain"} <= set(runs):
        for name in runs:
            if name not in ("floor", "plain"):
                figures |= compare(figures, name.replace("-", "_"))
        figures |= best(figures, [name.replace("-", "_") for name in runs if name not in ("floor", "plain")])
    return figures


def summarize(wall: NDArray[np.float64], compute: NDArray[np.float64]) -> dict[str, float]:
    """Return the figures of a rung from seconds of every step, means over ranks."""
    low, middle, high = np.percentile(1e3 * wall, [25, 50, 75])
    return {
        "step_ms": float(1e3 * wall.mean()),
        "compute_ms": float(1e3 * compute.mean()),
        "median_ms": float(middle),
        "low_ms": float(low),
        "high_ms": float(high),
        "lost_ms": float(1e3 * (wall - compute).mean()),
        "bubble": float(1 - compute.sum() / wall.sum()),
    }


def compare(figures: dict[str, float], key: str) -> dict[str, float]:
    """Return what a rung has gained over plain: reduction, speed-up, and its share of what the two allow."""
    plain, floor, lost = (figures[f"{name}_lost_ms"] for name in ("plain", "floor", key))
    reduction = (plain - lost) / (plain - floor)
    speed_up = figures["plain_step_ms"] / figures[f"{key}_step_ms"]
    allowed = 1 / (1 - reduction * figures["plain_bubble"])
    return {
        f"{key}_reduction": reduction,
        f"{key}_reduction_with_floor": 1 - lost / plain,
        f"{key}_speed_up": speed_up,
        f"{key}_of_allowed": speed_up / allowed,
    }


def best(figures: dict[str, float], keys: list[str]) -> dict[str, float]:
    """Return the figures of the rung with the shortest step, and the limit."""
    first = min(keys, key=lambda key: figures[f"{key}_step_ms"])
    names = ("reduction", "reduction_with_floor", "speed_up", "of_allowed", "bubble")
    found = {f"best_{name}": figures[f"{first}_{name}"] for name in names}
    return found | {"best_rung": float(list(RUNGS).index(first.replace("_", "-"))), "limit": 1 / (1 - figures["plain_bubble"])}


def _show(figures: dict[str, float], options: Any) -> None:
    rate, world = os.environ.get("NETLAB_RATE", "unknown rate"), os.environ["WORLD_SIZE"]
    kind = ARCHETYPES[options.archetype]
    source = kind.family or ("ml-latest-small" if options.data is None else options.data.name)
    print(f"{options.archetype}: {world} ranks, links of {rate}, {kind.batch} histories ({source}) per rank and step,")
    print(
        f"{kind.tables} x {options.rows} rows of {kind.dim}, {options.compute_ms:g} ms of compute, {options.rounds} fits each"
    )
    if "limit" in figures:
        waits = ", ".join(f"{part.replace('_', ' ')} {figures[f'plain_{part}']:.1%}" for part in PARTS[:4])
        print(f"what can be gained: plain's bubble b is {figures['plain_bubble']:.1%} ({waits}),")
        print(f"so no more than 1 / (1 - b) = {figures['limit']:.2f}x")
    head = (
        "bubble",
        "data",
        "straggler",
        "transfer",
        "host",
        "step ms",
        "half within",
        "collide",
        "r",
        "speed-up",
        "of allowed",
    )
    print(f"{'':<11}" + "".join(f"{name:>{16 if name == 'half within' else 11}}" for name in head))
    for name in options.rungs:
        print(_row(name, figures))


def _row(name: str, figures: dict[str, float]) -> str:
    of = {figure: figures.get(f"{name.replace('-', '_')}_{figure}") for figure in (*PARTS, "collision_rate", "reduction")}
    step = {figure: figures[f"{name.replace('-', '_')}_{figure}"] for figure in ("bubble", "median_ms", "low_ms", "high_ms")}
    shares = "".join(f"{of[part]:>11.1%}" for part in PARTS[:4])
    half = f"{step['low_ms']:.0f} - {step['high_ms']:.0f}"
    title = "+ " * (name not in ("floor", "plain")) + name
    row = f"{title:<11}{step['bubble']:>11.1%}{shares}{step['median_ms']:>11.1f}{half:>16}"
    row += f"{'':>11}" if of["collision_rate"] is None else f"{of['collision_rate']:>11.0%}"
    if of["reduction"] is not None:
        key = name.replace("-", "_")
        row += f"{of['reduction']:>11.1%}{figures[f'{key}_speed_up']:>11.2f}{figures[f'{key}_of_allowed']:>11.1%}"
    return row


def _plot(figures: dict[str, float], options: Any) -> None:
    """Where the time of a step goes, a bar for each rung."""
    from matplotlib.figure import Figure

    colours = {
        "compute": "#2166ac",
        "straggler_wait": "#e08214",
        "transfer": "#b2182b",
        "data_wait": "#8073ac",
        "host_overhead": "#8c8c8c",
    }
    figure = Figure(figsize=(7.5, 0.45 * len(options.rungs) + 1.4), layout="constrained")
    axes = figure.subplots()
    names = list(reversed(options.rungs))
    left = np.zeros(len(names))
    for part, colour in colours.items():
        keys = [name.replace("-", "_") for name in names]
        shares = [1 - figures[f"{key}_bubble"] if part == "compute" else figures[f"{key}_{part}"] for key in keys]
        width = np.array([share * figures[f"{key}_step_ms"] for share, key in zip(shares, keys)])
        axes.barh(names, width, left=left, color=colour, label=part.replace("_", " "))
        left += width
    axes.set_xlabel(f"ms per step, {os.environ['WORLD_SIZE']} ranks, {options.archetype}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    figure.savefig(options.plot, dpi=150)


def _options() -> Any:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--rungs", nargs="+", choices=RUNGS, default=list(BY_DEFAULT))
    add("--archetype", choices=ARCHETYPES, default="middle")
    add("--data", type=Path, help="lengths, see lengths.py (default: those of ml-latest-small)")
    add("--compute-ms", type=float, default=240.0, help="sleep of a mean step (default: 240)")
    add("--rows", type=int, default=5_000_000)
    add("--weights-share", type=float, default=0.15, help="of compute, what a split backward has last (default: 0.15)")
    add("--steps", type=int, default=16, help="of a fit that count (default: 16)")
    add("--rounds", type=int, default=2)
    add("--plot", type=Path, metavar="FILE", help="a picture of where the time goes")
    options = arguments.parse_args()
    planted.be_quiet()
    overlap_variants.weights_share = options.weights_share
    return options


if __name__ == "__main__":
    main()
