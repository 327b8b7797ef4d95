"""A fit that ended inside an epoch, by ``max_steps`` or otherwise, is gone on with where it ended."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.data import StreamOptions
from lightning_freescale.testing import run_distributed
from tests.checkpoint.test_resume import Seen
from tests.data.streaming.test_training import Stream
from tests.helpers.recommender import REPEATS, Samples, collate, trainer


class Stops(L.Callback):
    """As early stopping does, in the middle of an epoch."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == self.batches:
            trainer.should_stop = True


def _fit(
    data: str = "map-style",
    overlap: bool = True,
    workers: int = 0,
    accumulate: int = 1,
    micro_batches: int = 1,
    ended_by: str = "",
    saved_by: str = "",
    path: Path | None = None,
) -> tuple[list[list[int]], list[float], dict[str, Any]]:
    """Two epochs of six steps; or only the first three batches."""
    torch.manual_seed(0)
    module, samples = Seen("adagrad"), Samples(48)
    if data == "map-style":
        loader = FreeScaleDataModule(
            samples, samples.lengths, 4, collate_fn=collate, num_workers=workers, micro_batches=micro_batches, balance=REPEATS
        )
    else:
        stream = StreamOptions(stream_balancing=data)  # type: ignore[arg-type]
        loader = FreeScaleDataModule(
            Stream(48), lambda sample: len(sample["history"]), 4, collate_fn=collate, num_workers=workers, stream=stream
        )
    callbacks: list[L.Callback] = [Stops(3)] if ended_by == "should_stop" else []
    if saved_by == "epoch's end":
        assert path is not None
        callbacks.append(ModelCheckpoint(path.parent, filename=path.stem, save_on_train_epoch_end=True, every_n_epochs=1))
    fit = trainer(
        devices=2,
        max_epochs=2,
        max_steps=3 // accumulate + 3 % accumulate if ended_by == "max_steps" else -1,
        callbacks=callbacks,
        accumulate_grad_batches=accumulate,
        strategy=FreeScaleStrategy(overlap=overlap),
        enable_checkpointing=saved_by == "epoch's end",
    )
    resume = None if ended_by else path
    fit.fit(module, loader, ckpt_path=resume)
    if ended_by and saved_by == "hand":
        fit.save_checkpoint(path)  # type: ignore[arg-type]
    state = fit._checkpoint_connector.dump_checkpoint(weights_only=False)
    return module.seen, module.losses, {"weights": state["state_dict"], "states": state["optimizer_states"]}


RUNS: dict[str, dict[str, Any]] = {
    "map-style": {},
    "no overlap": {"overlap": False},
    "workers": {"workers": 2},
    "accumulation": {"accumulate": 2},
    "micro-batches": {"micro_batches": 2},
    "stream": {"data": "global"},
    "own stream": {"data": "local"},
    "stream without overlap": {"data": "global", "overlap": False},
    "stream with workers": {"data": "global", "workers": 2},
}


@cache
def _uninterrupted(run: str) -> list[Any]:
    return run_distributed(_fit, 2, **RUNS[run])


@pytest.mark.parametrize("saved_by", ["hand", "epoch's end"])
@pytest.mark.parametrize("ended_by", ["max_steps", "should_stop"])
@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=[] if run in ("map-style", "stream") else [pytest.mark.slow]) for run in RUNS]
)
def test_no_sample_is_lost_or_comes_twice(run: str, ended_by: str, saved_by: str, tmp_path: Path) -> None:
    if run == "accumulation" and ended_by == "should_stop" and saved_by == "hand":
        pytest.skip("the fit has ended inside a window, whose gradients are gone: a warning says so")
    path, whole = tmp_path / "a.ckpt", _uninterrupted(run)
    first = run_distributed(_fit, 2, ended_by=ended_by, saved_by=saved_by, path=path, **RUNS[run])
    second = run_distributed(_fit, 2, path=path, **RUNS[run])
    for before, after, straight in zip(first, second, whole):
        assert 0 < len(before[0]) < len(straight[0]) / 2, "it ends inside the first epoch"
        assert before[0] + after[0] == straight[0], "samples"
        assert before[1] + after[1] == straight[1], "losses"
    torch.testing.assert_close(second[0][2], whole[0][2], rtol=0, atol=0)
