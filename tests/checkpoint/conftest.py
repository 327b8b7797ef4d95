"""Checkpoints that several tests read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from lightning_freescale.testing import run_distributed
from tests.checkpoint.fits import Fitted, Large, SaveAt, fit


class Saved(NamedTuple):
    """Checkpoints of two ranks after steps 4 and 5, such as ``single4.ckpt``, and the result of rank 0 after all steps."""

    folder: Path
    whole: Fitted


def _save(folder: Path) -> Fitted:
    for kind in ("sharded", "single"):
        whole = fit(Large, strategy={"checkpoint": kind}, callbacks=[SaveAt(folder / f"{kind}{{step}}.ckpt", 4, 5)])
    return whole


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return checkpoints that tests must not change."""
    folder = tmp_path_factory.mktemp("saved")
    return Saved(folder, run_distributed(_save, 2, folder)[0])
