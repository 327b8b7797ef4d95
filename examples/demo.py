"""Train an HSTU-style model on MovieLens histories with two ranks, with one more technique in each run, and compare the runs.

The first table is that of this machine. If possible, a second one is that of two emulated hosts with a slow link.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two ranks share the machine's cores

import lightning as L
from hstu import CollateWithNegatives, HSTURecommender

from lightning_freescale import BubbleProfiler, FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.profiling.reporting.page import write_page

LINK = os.environ.get("NETLAB_RATE")  # the speed of the link if each rank runs on a separate emulated host
RATINGS = Path(__file__).parent / "data" / "ml-latest-small" / "ratings.csv.gz"
NETLAB = Path(__file__).parents[1] / "benchmarks" / "netlab.py"
COLUMNS: dict[str, Any] = {"user": "userId", "item": "movieId", "time": "timestamp", "order": "sort", "ties": "keep"}
RUNGS: dict[str, dict[str, Any]] = {
    "plain": {"balance": False, "overlap": "torchrec"},
    "+ balance": {"balance": True, "overlap": "torchrec"},
    "+ overlap": {"balance": True},
    "+ split backward": {"balance": True, "split_backward": True},
}
"""The runs. Plain is TorchRec's own exchange with DDP. ``+ overlap`` is the default of the strategy and the data module."""
PARTS = ("data_wait", "straggler_wait", "transfer", "host_overhead")
NOTHING = 1.02
"""The gain below which a technique is reported as ineffective."""


def main() -> int:
    """Run all techniques and print the tables."""
    options = _arguments()
    quiet()
    environment = dict(os.environ)  # before the Trainer's launcher adds to it
    if LINK:
        os.environ |= {"TORCHELASTIC_RUN_ID": "demo", "GROUP_RANK": os.environ["RANK"]}
    started = time.perf_counter()
    runs = {name: _run(options, name, **chosen) for name, chosen in RUNGS.items()}
    if runs["+ balance"]["rank"] != 0:
        return 0
    print(_table(runs, options.devices))
    page = write_page(options.out / "report.html", [run["report"].document() for run in runs.values()])
    print(f"{time.perf_counter() - started:.0f} s. Open this page of the runs in a browser: {page}")
    print("Open these traces at https://ui.perfetto.dev:")
    print(*(f"  {run['files']['trace']}" for run in runs.values()), sep="\n")
    return 0 if LINK or options.link == "none" else _over_a_link(options, environment)


def _run(options: argparse.Namespace, name: str, balance: bool, **chosen: bool) -> dict[str, Any]:
    L.seed_everything(options.seed, verbose=False)
    data = FreeScaleDataModule.from_interactions(
        RATINGS,
        **COLUMNS,
        batch_size=options.batch_size,
        balance=balance,
        seed=options.seed,
    )
    data.collate_fn = CollateWithNegatives(data.histories.num_items)
    model = HSTURecommender(num_items=data.histories.num_items)
    profiler = BubbleProfiler(options.out / name.strip("+ ").replace(" ", "_"), verbose=False)
    trainer = L.Trainer(
        strategy=FreeScaleStrategy(**chosen),
        accelerator="cpu",
        devices=1 if LINK else options.devices,
        num_nodes=options.devices if LINK else 1,
        max_epochs=options.epochs,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        callbacks=[profiler],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=int(os.environ.get("RANK", "0")) == 0,
    )
    if trainer.is_global_zero:
        print(f"\n{name}: {options.epochs} epochs on {options.devices} ranks, {_where()}", flush=True)
    trainer.fit(model, data)
    _refuse_too_few_steps(options, trainer.global_step, profiler.options.warmup_steps)
    scores = trainer.test(model, data, verbose=False)[0]
    return {"rank": trainer.global_rank, "report": profiler.report, "files": profiler.files, "scores": scores}


def _refuse_too_few_steps(options: argparse.Namespace, steps: int, warmup: int) -> None:
    """Exit on every rank if a run has no report."""
    if steps <= warmup:
        raise SystemExit(
            f"--epochs {options.epochs} --batch-size {options.batch_size} --devices {options.devices}: a run has {steps} "
            f"steps, but the report omits the first {warmup}. Pass a smaller --batch-size or more --epochs"
        )


def _where() -> str:
    return f"on two hosts, links of {LINK}" if LINK else "on one host"


def _table(runs: Mapping[str, Mapping[str, Any]], ranks: int) -> str:
    """Return the table of the runs."""
    reports = [run["report"] for run in runs.values()]
    plain, balanced, last = reports[0], reports[1], reports[-1]
    heads = (
        "bubble",
        *(part.split("_")[0] for part in PARTS),
        "ms/step",
        "samples/s",
        "speed-up",
        "at equal compute",
        "NDCG@10",
    )
    lines = [
        "",
        f"HSTU on ml-latest-small, {ranks} ranks, {_where()}: {plain.breakdown.shape[0]} steps each, of the same samples",
        f"{'':<18}" + "".join(f"{head:>{max(10, len(head) + 2)}}" for head in heads),
    ]
    for (name, run), report in zip(runs.items(), reports):
        shares = "".join(f"{share:>10.1%}" for share in (report.bubble, *(report.shares[part] for part in PARTS)))
        gains = f"{f'{report.samples_per_s / plain.samples_per_s:.2f}x':>10}{f'{_equal(plain, report):.2f}x':>18}"
        score = run["scores"]["test_NDCG@10"]
        lines.append(f"{name:<18}{shares}{report.step_s * 1e3:>10.1f}{report.samples_per_s:>11.1f}{gains}{score:>10.4f}")
    plan, limit = balanced.balance["compute"], plain.limit
    removed = 1 - last.bubble / plain.bubble if plain.bubble else 0.0
    lines += [
        "plain: TorchRec's own exchange with DDP. data, straggler, transfer: waits for the batch, for a slower rank, and for",
        "  bytes that compute does not hide. host: the loop and its hooks. speed-up: ratio of samples/s, which other programs",
        "  on the machine affect. at equal compute: speed-up by the bubbles alone, without the compute that a technique adds,",
        "  such as a split backward. NDCG@10 varies: the negatives of a sample depend on the other samples of its rank.",
        f"imbalance of compute (max / mean): predicted {plan['as_drawn']:.3f} as drawn, {plan['balanced']:.3f} balanced,",
        f"  no assignment gets below {plan['lower_bound']:.3f}, by the costs of the plans;",
        f"  measured {plain.compute_imbalance:.3f} as drawn, {balanced.compute_imbalance:.3f} balanced",
        *_nothing(list(runs), reports),
        f"in all {removed:.0%} of a bubble of {plain.bubble:.1%} is removed: {_equal(plain, last):.2f}x at equal compute "
        f"of at most {limit:.2f}x",
    ]
    return "\n".join(lines)


def _equal(before: Any, after: Any) -> float:
    """Return the speed-up of a run over another at equal compute."""
    return float((1 - after.bubble) / (1 - before.bubble))


def _nothing(names: list[str], reports: list[Any]) -> list[str]:
    """Return a line for each ineffective technique with the time that it could have removed."""
    removes = {"+ balance": "straggler_wait", "+ overlap": "transfer", "+ split backward": "transfer"}
    lines = []
    for name, before, after in zip(names[1:], reports, reports[1:]):
        if _equal(before, after) < NOTHING:
            part = removes[name]
            took, takes = before.shares[part], after.shares[part]
            lines.append(f"{name} gains nothing here: {part.replace('_', ' ')} was {took:.1%} of the time, and is {takes:.1%}")
    return lines


def _over_a_link(options: argparse.Namespace, environment: dict[str, str]) -> int:
    """Repeat the runs on emulated hosts of this machine."""
    can = subprocess.run([sys.executable, NETLAB, "--check"], env=environment, capture_output=True, text=True)
    if can.returncode:
        print(f"\nThere is no second table with a slow link: {(can.stderr or can.stdout).strip()}")
        return 0
    print(f"\nThe same runs over links of {options.link} between emulated hosts on this machine:", flush=True)
    lab = [NETLAB, "--hosts", str(options.devices), "--rate", options.link, "--"]
    script = [sys.executable, __file__, "--devices", str(options.devices), "--epochs", str(max(1, options.epochs // 2))]
    rest = ["--batch-size", str(options.batch_size), "--seed", str(options.seed), "--out", options.out / "slow_link"]
    names = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # the emulated hosts have no names, for which gloo warns
    return subprocess.run([sys.executable, *lab, *script, *rest], env=environment | names).returncode


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=6, help="epochs of each run, half of them over a slow link (default: 6)")
    parser.add_argument("--batch-size", type=int, default=16, help="histories per rank and step (default: 16)")
    parser.add_argument(
        "--link", default="50mbit", help="speed of the slow link; none omits the second table (default: 50mbit)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("demo_output"), help="folder for reports, page and traces (default: demo_output)"
    )
    return parser.parse_args()


def quiet() -> None:
    """Hide notes of Lightning and TorchRec about this machine."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
