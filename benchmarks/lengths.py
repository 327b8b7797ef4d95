"""Lengths of histories: those of data sets outside of the repository, and drawn ones."""

from __future__ import annotations

import csv
import gzip
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LONGEST = 2**20
"""Drawn histories end here, so that costs of ``L**2`` stay whole numbers in float64."""


def read_lengths(path: str | Path) -> tuple[str, Floats]:
    """Return the name of a data set and the length of each user's history.

    ``path`` is an ``.npz`` with ``offsets``; text (also ``.gz``) with a user and then the items on each line; or ``.csv``
    (also ``.gz``) with a header, an interaction on each line and its user first. The name of a ``.csv`` is that of its folder.
    """
    path = Path(path)
    name = path.name.split(".")[0]
    if path.suffix == ".npz":
        return name, np.diff(np.load(path)["offsets"].astype(np.int64)).astype(np.float64)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        if ".csv" in path.suffixes:
            users = Counter(row[0] for row in list(csv.reader(file))[1:])
            return path.parent.name, np.array(list(users.values()), dtype=np.float64)
        return name, np.array([len(line.split()) - 1 for line in file if line.strip()], dtype=np.float64)


Draw = Callable[[np.random.Generator, int], NDArray[np.floating | np.integer]]


def _heavy(alpha: float) -> Draw:
    return lambda draw, samples: np.minimum(3 * (1 + draw.pareto(alpha, samples)), LONGEST)


def _two_clusters(draw: np.random.Generator, samples: int) -> Floats:
    return np.where(draw.random(samples) < 0.2, draw.normal(500, 25, samples), draw.normal(20, 3, samples))


SYNTHETIC: dict[str, Draw] = {
    "short": lambda draw, samples: draw.integers(3, 51, samples),
    "heavy-1.1": _heavy(1.1),
    "heavy-1.3": _heavy(1.3),
    "heavy-1.5": _heavy(1.5),
    "heavy-1.2-cut": lambda draw, samples: np.minimum(_heavy(1.2)(draw, samples), 4096),  # many at the cut alike
    "two-clusters": _two_clusters,
    "lognormal": lambda draw, samples: draw.lognormal(3.5, 1.2, samples),
    "lognormal-cut": lambda draw, samples: np.minimum(draw.lognormal(3.5, 1.2, samples), 200),
}
"""Drawn families by name, each a function of a generator and the number of samples; lengths are rounded down after."""


def draw_lengths(family: str, draw: np.random.Generator, samples: int) -> Floats:
    """Return lengths of one of ``SYNTHETIC``, shape ``[samples]``, whole numbers of at least 1."""
    return np.maximum(1, np.floor(SYNTHETIC[family](draw, samples))).astype(np.float64)
