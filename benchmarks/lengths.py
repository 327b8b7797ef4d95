"""History lengths of the data sets that benchmarks read from outside the project."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def read_lengths(path: str | Path) -> tuple[str, NDArray[np.float64]]:
    """A data set's name and the length of every user's history.

    ``path`` is an ``.npz`` with ``offsets``, or text (also ``.gz``) with a user and then the items on every line.
    """
    path = Path(path)
    name = path.name.split(".")[0]
    if path.suffix == ".npz":
        return name, np.diff(np.load(path)["offsets"].astype(np.int64)).astype(np.float64)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return name, np.array([len(line.split()) - 1 for line in file if line.strip()], dtype=np.float64)
