"""History lengths from a file, for predictions before there is a data set."""

from __future__ import annotations

import csv
import gzip
import zipfile
from collections import Counter
from pathlib import Path
from typing import TextIO, cast

import numpy as np

from lightning_freescale.balance.validation import Floats, non_negative

KINDS = "one length per line (.txt, .txt.gz), .npy, .npz with 'lengths' or 'offsets', or .csv, .csv.gz with --column"


def read_lengths(path: Path, column: str | None = None) -> Floats:
    """Return the length of every sample in ``path``, shape ``[samples]``.

    Args:
        path: ``.txt`` (or no suffix): one length per line; ``.npy``: one-dimensional lengths; ``.npz``: ``lengths``, or
            ``offsets``, one more than samples; ``.csv``: a header and one row per interaction. Text and CSV also as ``.gz``.
        column: of a CSV file; a sample is one value of this column, its length the number of its rows.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: what is wrong, where, and what to pass instead.
    """
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: pass a file with {KINDS}")
    if kind not in ("", ".txt", ".npy", ".npz", ".csv") or (path.suffix == ".gz" and kind in (".npy", ".npz")):
        raise ValueError(f"{path}: unknown suffix {''.join(path.suffixes[-2:])!r}; pass a file with {KINDS}")
    if (kind == ".csv") != (column is not None):
        raise ValueError(f"{path} with --column {column!r}: a .csv file needs the name of the column to count, others none")
    try:
        values = _from_csv(path, column) if column is not None else _from_array(path) if kind[:3] == ".np" else _from_text(path)
    except (EOFError, OSError, UnicodeDecodeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read ({error}): is it cut off, or of another kind than its suffix says?") from error
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.number) or np.iscomplexobj(values):
        raise ValueError(f"{path} holds {values.dtype} of shape {values.shape}: pass one number per sample, shape [samples]")
    if not len(values):
        raise ValueError(f"{path} holds no length: pass a file with at least one")
    return non_negative(f"{path}, lengths", values)


def describe_lengths(lengths: Floats) -> str:
    """Return number, mean, median and tail of the lengths in one line."""
    return (
        f"{len(lengths)} samples; lengths: mean {lengths.mean():.1f}, median {np.median(lengths):g}, "
        f"p99 {np.percentile(lengths, 99):.4g}, max {lengths.max():g}"
    )


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
                raise ValueError(f"{path}, line {number}: {text!r} is no number; write one length per line") from None
    return np.array(values, dtype=np.float64)


def _from_csv(path: Path, column: str) -> Floats:
    with _open(path) as file:
        rows = csv.reader(file)
        header = next(rows, [])
        if column not in header:
            raise ValueError(f"{path} has no column {column!r}, only {header}: name one of them with --column")
        place, counts = header.index(column), Counter[str]()
        for row in rows:
            if len(row) <= place or not row[place]:
                raise ValueError(f"{path}, line {rows.line_num}: no value for column {column!r}; fill or drop the row")
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
                return np.diff(loaded["offsets"].astype(np.int64))  # unsigned offsets would hide a step backwards
            names = sorted(loaded)
    except ValueError as error:
        raise ValueError(f"{path} holds no array of numbers ({error}); pass a file with {KINDS}") from error
    raise ValueError(f"{path} holds {names}: name the array 'lengths' or 'offsets'")
