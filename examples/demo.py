"""Train an HSTU-style model on MovieLens histories with two ranks, first as drawn, then balanced, and show what it brought."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two ranks share the machine's cores

import lightning as L
from hstu import CollateWithNegatives, HSTURecommender

from lightning_freescale import BubbleProfiler, FreeScaleDataModule
from lightning_freescale.profiling.reporting.page import write_page

RATINGS = Path(__file__).parent / "data" / "ml-latest-small" / "ratings.csv.gz"
COLUMNS: dict[str, Any] = {"user": "userId", "item": "movieId", "time": "timestamp", "order": "sort", "ties": "keep"}
ROWS = {
    "bubble": "1 - compute / wall time",
    "data_wait": "",
    "straggler_wait": "waiting for a slower rank",
    "transfer": "exchange that no compute hid",
    "host_overhead": "",
}


def main() -> None:
    """Both runs and the table."""
    options = _arguments()
    quiet()
    started = time.perf_counter()
    runs = {}
    for name, balance in (("off", False), ("on", True)):
        runs[name] = _run(options, name, balance)
    if runs["on"]["rank"] == 0:
        print(_table(runs, options.devices))
        page = write_page(options.out / "report.html", [run["report"].document() for run in runs.values()])
        print(f"{time.perf_counter() - started:.0f} s. Both runs as a page, open it in a browser: {page}")
        print("Their traces, open them at https://ui.perfetto.dev:")
        print(*(f"  {run['files']['trace']}" for run in runs.values()), sep="\n")


def _run(options: argparse.Namespace, name: str, balance: bool) -> dict[str, Any]:
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
    label = "balanced" if balance else "as drawn"
    profiler = BubbleProfiler(options.out / name, label=label, verbose=False)
    trainer = L.Trainer(
        strategy="freescale",
        accelerator="cpu",
        devices=options.devices,
        max_epochs=options.epochs,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        callbacks=[profiler],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    if trainer.is_global_zero:
        print(f"\n{label.capitalize()}: {options.epochs} epochs on {options.devices} ranks", flush=True)
    trainer.fit(model, data)
    scores = trainer.test(model, data, verbose=False)[0]
    return {
        "rank": trainer.global_rank,
        "report": profiler.report,
        "files": profiler.files,
        "scores": scores,
    }


def _table(runs: dict[str, dict[str, Any]], ranks: int) -> str:
    off, on = runs["off"]["report"], runs["on"]["report"]
    steps = off.breakdown.shape[0]
    lines = [
        "",
        f"HSTU on ml-latest-small, {ranks} ranks, {steps} measured steps each, same samples in every step",
        f"{'':<46}{'as drawn':>10}{'balanced':>10}",
        _row("bubble (1 - compute / wall time)", off.bubble, on.bubble, ".1%"),
    ]
    for part, note in list(ROWS.items())[1:]:
        label = part.replace("_", " ") + (f" ({note})" if note else "")
        lines.append(_row(f"  {label}", off.shares[part], on.shares[part], ".1%"))
    plan = on.balance
    lines += [
        _row("predicted imbalance (max / mean) *", plan.unbalanced, plan.balanced, ".3f"),
        f"{'  no assignment gets below *':<46}{'':>10}{plan.lower_bound:>10.3f}",
        _row("measured compute imbalance", off.compute_imbalance, on.compute_imbalance, ".3f"),
        _row("compute, ms per step and rank", off.compute_s * 1e3, on.compute_s * 1e3, ".1f"),
        _row("samples/s", off.samples_per_s, on.samples_per_s, ".1f"),
    ]
    for metric in ("NDCG@10", "HR@10"):
        lines.append(_row(f"{metric} (all unseen items)", *(r["scores"][f"test_{metric}"] for r in runs.values()), ".4f"))
    removed = 1 - on.bubble / off.bubble if off.bubble else 0.0
    alone, measured = (1 - on.bubble) / (1 - off.bubble), on.samples_per_s / off.samples_per_s
    lines += [
        f"* by {plan.costs}, as on the balanced run's page;",
        f"  the page of the run as drawn has {off.balance.unbalanced:.3f}, by {off.balance.costs}",
        f"{removed:.0%} of a bubble of {off.bubble:.1%} removed: {alone:.2f}x the samples/s at equal compute,",
        f"{measured:.2f}x measured (the runs follow each other, so the machine's other load shows)",
    ]
    return "\n".join(lines)


def _row(label: str, off: float, on: float, form: str) -> str:
    return f"{label:<46}{off:>10{form}}{on:>10{form}}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=15, help="epochs of each run (default: 15)")
    parser.add_argument("--batch-size", type=int, default=16, help="histories per rank and step (default: 16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("demo_output"), help="folder for reports, page and traces (default: demo_output)"
    )
    return parser.parse_args()


def quiet() -> None:
    """Lightning's and TorchRec's notes about this machine are not what the demo is about."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
