"""Fixtures for tests of the benchmarks, which are scripts that import each other by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

Run = Callable[..., dict[str, float]]


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """Write a file with the histories of 100 users."""
    path = tmp_path / "few.users.npz"
    np.savez(path, offsets=np.append(0, np.cumsum(np.random.RandomState(0).lognormal(3, 1, 100).astype(int) + 1)))
    return path


@pytest.fixture
def rounds(tmp_path: Path) -> Path:
    """Write a file with 96 users who visit 60 items in their order, each from a random item; most histories are short."""
    draw = np.random.RandomState(0)
    lengths = np.clip(draw.lognormal(2, 0.8, 96).astype(int), 4, 40)
    items = np.concatenate([(draw.randint(60) + np.arange(length)) % 60 for length in lengths]).astype(np.uint16)
    path = tmp_path / "rounds.npz"
    np.savez(path, items=items, offsets=np.append(0, lengths.cumsum()), users=np.arange(96))
    return path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a benchmark and returns its figures."""

    def figures(script: ModuleType, *flags: object) -> dict[str, float]:
        written = tmp_path / "figures.json"
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, flags), "--json", str(written)])
        script.main()
        return json.loads(written.read_text())["figures"]

    return figures
