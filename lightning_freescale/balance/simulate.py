"""The forecast for several numbers of ranks from a file of history lengths, as a table."""

from __future__ import annotations

import csv
import gzip
import time
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np

from lightning_freescale.balance.budget import Budget, BudgetSteps
from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.forecast import PLANNED_STEPS, advise_on, draw_steps, evenly_spread, in_mode, report_plans
from lightning_freescale.balance.micro_batches import MicroBatchSchedule
from lightning_freescale.balance.plan import StepPlan
from lightning_freescale.balance.report import BalanceReport, idle_fraction
from lightning_freescale.balance.validation import Floats, non_negative

KINDS = "one length per line (.txt, .txt.gz), .npy, .npz with 'lengths' or 'offsets', or .csv, .csv.gz with --column"


# -- the file of lengths


def read_lengths(path: Path, column: str | None = None) -> Floats:
    """Return the length of each sample in a file, shape ``[samples]``.

    Args:
        path: ``.txt`` or no suffix: one length per line. ``.npy``: lengths, shape ``[samples]``. ``.npz``: ``lengths``, or
            ``offsets``, shape ``[samples + 1]``. ``.csv``: a header and one row per interaction. Text and CSV also as ``.gz``.
        column: Column of a CSV file. Each value of this column is a sample; its length is its number of rows.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file cannot be read or holds no lengths.
    """
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Pass a file with {KINDS}.")
    if kind not in ("", ".txt", ".npy", ".npz", ".csv") or (path.suffix == ".gz" and kind in (".npy", ".npz")):
        raise ValueError(f"{path} has the unknown suffix {''.join(path.suffixes[-2:])!r}. Pass a file with {KINDS}.")
    if kind != ".csv" and column is not None:
        raise ValueError(f"{path} with --column {column!r}: only a .csv file has columns. Remove --column.")
    try:
        values = _from_csv(path, column) if kind == ".csv" else _from_array(path) if kind[:3] == ".np" else _from_text(path)
    except (EOFError, OSError, UnicodeDecodeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read: {error}. Check that it is complete and matches its suffix.") from error
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.number) or np.iscomplexobj(values):
        raise ValueError(f"{path} holds {values.dtype} of shape {values.shape}. Pass one number per sample, shape [samples].")
    if not len(values):
        raise ValueError(f"{path} holds no length. Pass a file with at least one length.")
    return non_negative(f"{path}, lengths", values)


def describe_lengths(lengths: Floats) -> str:
    """Return the number, mean, median, 99th percentile and maximum of the lengths as a line."""
    return (
        f"{len(lengths)} samples; lengths: mean {lengths.mean():.1f}, median {np.median(lengths):.4g}, "
        f"p99 {np.percentile(lengths, 99):.4g}, max {lengths.max():g}"
    )


def summarize_lengths(lengths: Floats) -> dict[str, list[Any]]:
    """Return the ``values`` and ``counts`` of at most 32 groups of similar lengths. The longest lengths are the last group."""
    edges = np.unique(np.geomspace(1.0, max(float(lengths.max()), 1.0), 31))
    group = np.searchsorted(edges, lengths, side="right")
    counts, sums = np.bincount(group), np.bincount(group, lengths)
    return {"values": (sums[counts > 0] / counts[counts > 0]).tolist(), "counts": counts[counts > 0].tolist()}


def _open(path: Path) -> TextIO:
    opened = gzip.open if path.suffix == ".gz" else open
    return cast("TextIO", opened(path, "rt", encoding="utf-8-sig", newline=""))


def _from_text(path: Path) -> Floats:
    values = []
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                values += [float(line)] if line.strip() else []
            except ValueError:
                text = line.strip()[:40]
                raise ValueError(f"{path}, line {number}: {text!r} is no number. Write one length per line.") from None
    return np.array(values, dtype=np.float64)


def _from_csv(path: Path, column: str | None) -> Floats:
    with _open(path) as file:
        rows = csv.reader(file)
        header = next(rows, [])
        if column not in header:
            raise ValueError(f"{path} with --column {column!r}: the columns are {header}. Pass one of them as --column.")
        place, counts = header.index(column), Counter[str]()
        for row in rows:
            if len(row) <= place or not row[place]:
                raise ValueError(f"{path}, line {rows.line_num}: no value in column {column!r}. Fill or drop the row.")
            counts[row[place]] += 1
    return np.array(list(counts.values()), dtype=np.float64)


def _from_array(path: Path) -> Floats:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            if "lengths" in loaded:
                return loaded["lengths"]
            if "offsets" in loaded:
                return np.diff(loaded["offsets"].astype(np.int64))  # signed, to detect decreasing offsets
            names = sorted(loaded)
    except ValueError as error:
        raise ValueError(f"{path} holds no array of numbers: {error}. Pass a file with {KINDS}.") from error
    raise ValueError(f"{path} holds the arrays {names}. Name the array 'lengths' or 'offsets'.")


# -- the forecast


@dataclass(frozen=True, kw_only=True)
class Forecast(BalanceReport):
    """The predicted balance of some steps on one number of ranks, and further predicted figures."""

    ranks: int
    samples_per_step: int  # maximum, on all ranks
    zigzag: float | None  # imbalance of FreeScale's zig-zag (arXiv 2604.24073); None with a budget or padding
    planning_ms: float  # measured median time to assign one global batch
    advice: str | None
    fill: float | None = None  # share of the budget that an epoch uses; None without a budget

    @property
    def speedup(self) -> float:
        """The ratio of the compute times of the slowest rank, as drawn and balanced."""
        return self.unbalanced / self.balanced


def forecast(
    lengths: Floats,
    ranks: int,
    batch_size: int | Budget,
    cost: CostModel | None = None,
    *,
    steps: int = 32,
    seed: int = 0,
    micro_batches: int = 1,
    **options: Any,
) -> Forecast:
    """Predict the first steps of a :class:`BalancedSampler` for samples of these lengths, see :func:`predict`.

    ``cost`` is by default ``CostModel()``. ``options`` are ``assignment_mode`` and ``padded`` of :func:`assign`.
    """
    padded = options.get("padded", False)
    if padded:
        options |= {"tokens": lengths, "micro_batches": MicroBatchSchedule(micro_batches, micro_batches)}
    costs = (CostModel() if cost is None else cost)(lengths)
    setting: dict[str, Any] = {"costs": costs, "ranks": ranks, "batch_size": batch_size, "seed": seed, **options}
    plans = draw_steps(**setting, steps=steps)
    planning_ms = _planning_ms(evenly_spread(plans, PLANNED_STEPS))
    ours = report_plans(plans, PLANNED_STEPS)
    zigzags = not padded and not isinstance(batch_size, Budget)
    return Forecast(
        **vars(ours),
        ranks=ranks,
        samples_per_step=max(len(plan.samples) for plan in plans),
        zigzag=report_plans(in_mode("zigzag", plans)).balanced if zigzags else None,
        planning_ms=planning_ms,
        advice=advise_on(ours, ours, plans, setting, lengths),
        fill=BudgetSteps(batch_size, ranks).fill if isinstance(batch_size, Budget) else None,
    )


def _planning_ms(plans: Sequence[StepPlan]) -> float:
    """Return the median time to assign the samples of a step, except the first step, which has its assignment already."""
    taken = []
    for plan in plans[1:] or [replace(plans[0])]:  # a copy has no assignment yet
        start = time.perf_counter()
        plan.assignment  # noqa: B018 (computed on first use)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken) * 1e3)


# -- as a table

_TITLES = ("", "----- imbalance (max / mean over ranks) -----", "----- idle -----", "steps", "predicted", "planning")
_COLUMNS = ("ranks", "as drawn  zig-zag  balanced  lower bound", "as drawn  balanced", "dominated", "speed-up", "ms / step")


def format_table(rows: Sequence[Forecast]) -> str:
    """Return a table with one row for each number of ranks."""
    lines = ["{:5}  {:>44}  {:>18}  {:>9}  {:>9}  {:>9}".format(*head) for head in (_TITLES, _COLUMNS)]
    for row in rows:
        unbalanced, balanced = idle_fraction(row.unbalanced), idle_fraction(row.balanced)
        zigzag = "-" if row.zigzag is None else f"{row.zigzag:.3f}"
        lines.append(
            f"{row.ranks:5d}  {row.unbalanced:12.3f}  {zigzag:>7}  {row.balanced:8.3f}  {row.lower_bound:11.3f}"
            f"  {unbalanced:8.1%}  {balanced:8.1%}  {row.dominated:9.0%}  {row.speedup:8.2f}x  {row.planning_ms:9.1f}"
        )
    return "\n".join(lines)
