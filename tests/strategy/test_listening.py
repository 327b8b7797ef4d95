"""A run listens with one socket for each process group."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback

from lightning_freescale import BubbleProfiler, FreeScaleDataModule
from lightning_freescale.testing import run_distributed
from tests.docs.pages import ROOT
from tests.helpers.recommender import Recommender, Samples, collate, fixed_loader, trainer

sys.path.append(str(ROOT / "benchmarks"))

import soak


def _fit(planned: bool, folder: str | None) -> list[int]:
    """Return the number of sockets that listen after each of three steps, and after the fit."""
    counts: list[int] = []
    counting = LambdaCallback(on_train_batch_end=lambda *_: counts.append(soak.counts()["ports"]))
    callbacks = [counting, *([] if folder is None else [BubbleProfiler(folder, verbose=False)])]
    data = Samples(16)
    loaded = FreeScaleDataModule(data, data.lengths, 2, collate_fn=collate) if planned else fixed_loader(dist.get_rank(), 3)
    trainer(devices=2, callbacks=callbacks, max_steps=3).fit(Recommender(), loaded)
    gc.collect()
    return [*counts, soak.counts()["ports"]]


@pytest.mark.parametrize(
    ("planned", "profiled", "groups"),
    [
        (False, False, 5),  # torch's default group, the notices, TorchRec's exchanges, those of the collection, the plan's
        (True, False, 5),
        (True, True, 6),  # and the profiler's
    ],
)
def test_every_group_that_a_fit_needs_has_one_socket(planned: bool, profiled: bool, groups: int, tmp_path: Path) -> None:
    folder = str(tmp_path) if profiled else None
    for rank, steps in enumerate(run_distributed(_fit, 2, planned, folder)):
        stores = 1 if rank == 0 else 0
        assert steps == [*[groups + stores] * 3, 2 + stores]  # the last after the fit
