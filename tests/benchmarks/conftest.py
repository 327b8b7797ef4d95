"""Benchmarks are scripts that import each other by name; a test runs one with some flags and looks at its figures."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

Run = Callable[..., dict[str, float]]


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """What a benchmark sets for its process, the environment and how much is logged, goes again."""
    loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    levels = [each.level for each in loggers]
    with patch.dict(os.environ):
        yield
    for logger, level in zip(loggers, levels):
        logger.setLevel(level)


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A file with the histories of 100 users."""
    path = tmp_path / "few.users.npz"
    np.savez(path, offsets=np.append(0, np.cumsum(np.random.RandomState(0).lognormal(3, 1, 100).astype(int) + 1)))
    return path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a benchmark and returns its figures."""

    def figures(script: ModuleType, *flags: object) -> dict[str, float]:
        written = tmp_path / "figures.json"
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, flags), "--json", str(written)])
        script.main()
        return json.loads(written.read_text())["figures"]

    return figures
