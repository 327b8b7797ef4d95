"""Many fits in one process hold no more resources than two."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_freescale import BubbleProfiler, FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.docs.pages import ROOT
from tests.helpers.recommender import Recommender, Samples, collate, trainer

sys.path.append(str(ROOT / "benchmarks"))

import soak


def _settled() -> dict[str, int]:
    gc.collect()
    dist.barrier()  # a connection is closed once both of its ranks have let it go
    gc.collect()
    time.sleep(0.3)  # the store and gloo notice on threads of their own that a peer has closed a connection
    return soak.counts()


def _fails_then_fits(folder: str) -> dict[str, Any]:
    """Fit a model, let another fit fail on all ranks, and use the first model and new ones again."""

    class Fails(Recommender):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            raise ZeroDivisionError

    def fit(model: Recommender) -> Any:
        samples = Samples(16)
        callbacks = [ModelCheckpoint(folder, save_last=True), BubbleProfiler(folder, verbose=False)]
        options = {"max_steps": 2, "callbacks": callbacks, "enable_checkpointing": True}
        fitting = trainer(strategy=FreeScaleStrategy(checkpoint="async"), devices=2, **options)
        fitting.fit(model, FreeScaleDataModule(samples, samples.lengths, 4, collate_fn=collate))
        return fitting

    torch.manual_seed(0)
    kept = Recommender()
    first, counted = fit(kept), []
    table = first.strategy.tables.tables[0].key
    before = first.strategy.full_weight(table)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            fit(Fails())
        counted.append(_settled())
        fit(Recommender())
        counted.append(_settled())
    after = first.strategy.full_weight(table)
    first.validate(kept, FreeScaleDataModule(Samples(16), Samples(16).lengths, 4, collate_fn=collate, val_dataset=Samples(8)))
    first.save_checkpoint(f"{folder}/end.ckpt")
    return {"counted": counted, "same": torch.equal(before, after), "losses": len(fit(kept).lightning_module.losses)}


@pytest.mark.slow
def test_a_fit_after_a_failed_one_and_models_of_earlier_fits_work(tmp_path: Any) -> None:
    for found in run_distributed(_fails_then_fits, 2, str(tmp_path)):
        counted = found["counted"]
        assert found["same"] and found["losses"] == 4
        assert counted[2:4] == counted[4:]  # after the second fit


@pytest.mark.slow
def test_the_fits_of_every_kind_leave_nothing_behind() -> None:
    kinds = [*soak.KINDS]
    figures = soak.many_fits(argparse.Namespace(fits=3 * len(kinds), kinds=kinds, ranks=2))
    increases = {name: figures[f"{name}_increase"] for name in soak.COUNTED}
    assert max(increases.values()) <= 0.0, increases
