"""No rank hangs: one that raises, one that dies, steps that do not divide evenly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.recommender import Recommender, Samples, collate, trainer


class Fails(Recommender):
    """One rank raises or dies in its third step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            if self.how == "raises":
                raise KeyError("the needle")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


class CannotTell(Recommender):
    """One rank raises when it is asked which ids the fourth step will look up."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.asked = 0

    def embedding_ids(self, batch: dict[str, Any]) -> Any:
        self.asked += 1
        if self.asked == 3 and self.global_rank == 1:
            raise KeyError("the needle")
        return batch["features"]


def _fit(how: str) -> None:
    data = Samples(64)
    module = CannotTell(how) if how == "cannot tell" else Fails(how)
    trainer(devices=3).fit(module, FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "rank 1: (?s:.*)the needle"),
        ("dies", "rank 1: died with exit code -9"),
        ("cannot tell", "rank 1: (?s:.*)the needle(?s:.*)raised by CannotTell.embedding_ids"),
    ],
)
def test_the_other_ranks_end_too(how: str, message: str) -> None:
    """With an error of their own, and long before the timeout of the process group."""
    started = time.monotonic()
    with pytest.raises(RankFailed, match=message) as failure:
        run_distributed(_fit, 3, how, timeout=100)
    assert time.monotonic() - started < 60
    assert "did not finish" not in str(failure.value)


SCRIPT = """
import sys, torch
sys.path.insert(0, {root!r})
from tests.strategy.test_failures import Fails
from tests.helpers.recommender import Samples, collate, trainer
from lightning_freescale import FreeScaleDataModule
data = Samples(64)
trainer(devices=2).fit(Fails({how!r}), FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "dies"])
def test_lightnings_own_launcher_ends(how: str, tmp_path: Path) -> None:
    script = tmp_path / "fit.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[2]), how=how))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=90, cwd=tmp_path)
    assert done.returncode != 0


class Keeps(Recommender):
    """Keeps the samples it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.seen += batch["index"].tolist()
        return super().training_step(batch, batch_idx)


def _fit_uneven(samples: int) -> list[int]:
    module, data = Keeps(), Samples(samples)
    stages = {"val_dataset": Samples(samples)}
    trainer(devices=3).fit(module, FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, **stages))
    return module.seen


@pytest.mark.parametrize("samples", [3, 13, 25, 35])
def test_uneven_last_batch(samples: int) -> None:
    """Three ranks of four: left-overs of one, two and eleven samples, and a single short step."""
    seen = run_distributed(_fit_uneven, 3, samples)
    assert sorted(index for rank in seen for index in rank) == list(range(samples))
