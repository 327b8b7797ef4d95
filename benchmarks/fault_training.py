"""Training of ``faults.py`` on one rank."""

from __future__ import annotations

import resource
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from checkpoint_contents import digest
from fault_kinds import SAVES_EVERY, STEPS, Case, Fault
from fault_points import Point
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.balance import CostModel
from lightning_freescale.data import HistoryDataset, collate_histories, read_interactions

RATINGS = Path(__file__).parents[1] / "examples" / "data" / "ml-latest-small" / "ratings.csv.gz"
DIM, NEGATIVES, BATCH, USERS = 16, 64, 8, 300  # more than one epoch
_TIMEOUT = 300.0  # of a process group whose ranks notice the fault before


def histories() -> HistoryDataset:
    """Return the training histories; read once, before ranks are forked."""
    found = read_interactions(RATINGS, user="userId", item="movieId", time="timestamp", order="sort", ties="keep")
    return HistoryDataset(found, np.flatnonzero(found.lengths >= 4)[:USERS], "train", 40)


class _Samples(Dataset):
    def __init__(self, histories: HistoryDataset, point: Point) -> None:
        self.histories, self.point = histories, point

    def __len__(self) -> int:
        return len(self.histories)

    def __getitem__(self, index: int) -> Any:
        self.point.pass_by("sample")
        return self.histories[index]


class _Collate:
    def __init__(self, point: Point) -> None:
        self.point = point

    def __call__(self, samples: list[Any]) -> Any:
        self.point.pass_by("collate")
        return collate_histories(samples)


class _Recommender(L.LightningModule):
    """Compares the mean of the items so far, through a layer with dropout, with the next item and negatives."""

    def __init__(self, items: int, point: Point) -> None:
        super().__init__()
        names = ["item", "target", "negative"]
        table = EmbeddingConfig(
            name="item", num_embeddings=items, embedding_dim=DIM, feature_names=names, init_fn=self._begin_table
        )
        self.items, self.point = items, point
        self.embedding = EmbeddingCollection(tables=[table])
        self.net = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, DIM))
        self.first_step = -1

    def _begin_table(self, weight: Tensor) -> None:
        if hasattr(self, "embedding"):  # the set-up has begun
            self.point.pass_by("table")
        nn.init.uniform_(weight, -0.01, 0.01)

    def configure_model(self) -> None:
        self.point.pass_by("configure_model")

    def setup(self, stage: str) -> None:
        self.point.pass_by("module_setup")

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if self.first_step < 0:
            self.first_step = self.global_step
        self.point.pass_by("step")
        history, target = batch["features"], batch["target"]
        lengths, draw = history.lengths(), torch.Generator().manual_seed(self.global_step)
        negative = torch.randint(0, self.items, (NEGATIVES,), generator=draw)
        drawn = torch.zeros_like(lengths)
        drawn[0] = NEGATIVES
        ids = torch.cat([history.values(), target, negative])
        found = self.embedding(
            KeyedJaggedTensor(["item", "target", "negative"], ids, lengths=torch.cat([lengths, lengths, drawn]))
        )
        summed = nn.functional.dropout(found["item"].values(), 0.2).cumsum(0)
        begin = (lengths.long().cumsum(0) - lengths).repeat_interleave(lengths.long())
        before = torch.cat([torch.zeros_like(summed[:1]), summed])[begin]
        predicted = self.net((summed - before) / (torch.arange(len(summed)) - begin + 1)[:, None])
        right = (predicted * found["target"].values()).sum(1, keepdim=True)
        scores = torch.cat([right, predicted @ found["negative"].values().T], 1)
        loss = -nn.functional.log_softmax(scores, 1)[:, 0].mean()
        return loss * float("nan") if self.point.is_here("loss") else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.point.pass_by("before_optimizer_step")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.point.pass_by("save")
        self.point.pass_by("disk")
        self.point.begin("saving")
        if self.point.is_here("write"):
            assert self.point.fault is not None
            _no_file_grows(self.point.checkpoints, kill=self.point.fault.how == "kill")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.point.pass_by("load")

    def configure_optimizers(self) -> Any:
        self.point.pass_by("configure_optimizers")
        self.point.begin("loading")
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def _no_file_grows(checkpoints: Path, kill: bool) -> None:
    """Limit the files of this process to half the size of the largest checkpoint.

    The kernel then kills the process while it writes, or writing raises an error, as on a full disk.
    """
    largest = max(path.stat().st_size for path in checkpoints.rglob("*") if path.is_file())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, resource.RLIM_INFINITY))
    if kill:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it


class _Points(L.Callback):
    """Passes the points that are callbacks, and injects the defects of the self-test."""

    def __init__(self, kind: str, point: Point, job: int) -> None:
        self.kind, self.point, self.job = kind, point, job

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.point.begin("starting")
        self.point.pass_by("callback_setup")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.point.end("starting")
        self.point.end("loading")
        self.point.pass_by("train_start")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *batch: Any) -> None:
        self.point.end("saving")
        self.point.progress[0, self.point.process] = trainer.global_step
        if self.point.is_here("weights"):
            pl_module.net[0].bias.data[0] += 1e-6
        self.point.pass_by("callback")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        last = self.point.checkpoints / "last.ckpt"
        if self.kind == "mixes_jobs" and self.job and last.exists():
            checkpoint["state_dict"]["net.0.bias"] = torch.load(last, weights_only=False)["state_dict"]["net.0.bias"]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.point.pass_by("train_end")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self.kind in ("does_not_end", "waits_while_starting") and not self.point.progress[1, self.point.process]:
            time.sleep(100_000)


class _Data(FreeScaleDataModule):
    point: Point

    def setup(self, stage: str) -> None:
        self.point.pass_by("data_setup")
        super().setup(stage)


def train(
    case: Case,
    fault: Fault | None,
    samples: HistoryDataset,
    checkpoints: Path,
    process: int,
    progress: np.ndarray,
    resume: str | None,
    job: int = 0,
) -> dict[str, Any]:
    """Train to the end on this rank, and return a description of the final state.

    Args:
        case: the case.
        fault: the fault to inject; None for none.
        samples: the result of :func:`histories`.
        checkpoints: folder for the checkpoints.
        process: number of this process among those of all jobs.
        progress: see :class:`Point`.
        resume: the argument ``Trainer.fit(ckpt_path=)``.
        job: number of the training that this rank belongs to.
    """
    torch.set_num_threads(1)
    L.seed_everything(job, verbose=False)
    point = Point(fault, process, progress, checkpoints)
    point.watch_threads()
    if fault is not None and fault.place == "move":
        sys.addaudithook(lambda event, arguments: _pass_by_a_move(event, arguments, point))
    module = _Recommender(samples.histories.num_items, point)
    data = _Data(
        _Samples(samples, point),
        samples.lengths,
        BATCH,
        collate_fn=_Collate(point),
        loss_reduction="target_mean",
        num_workers=case.workers,
        cost=CostModel(),  # otherwise the run without a fault would depend on the clock
    )
    data.point = point
    saving = ModelCheckpoint(point.checkpoints, "{step}", every_n_train_steps=SAVES_EVERY, save_last=True, save_top_k=-1)
    saving._enable_version_counter = case.jobs == 1
    trainer = L.Trainer(
        strategy=FreeScaleStrategy(timeout=timedelta(seconds=case.waits or _TIMEOUT), checkpoint=case.checkpoint),
        accelerator="cpu",
        devices=case.ranks,
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        detect_anomaly=case.detect_anomaly,
        callbacks=[saving, _Points(case.kind, point, job)],
    )
    try:
        trainer.fit(module, data, ckpt_path=resume)
    except (RuntimeError, OSError):
        if text := _SAYS_INSTEAD.get((case.kind, bool(progress[1, process]))):
            raise RuntimeError(text) from None
        raise
    end = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return {"digest": digest_of_state(end), "first_step": module.first_step, "steps": trainer.global_step}


_SAYS_INSTEAD = {
    ("says_nothing", False): "something went wrong",
    ("loses_the_text", True): "rank 1: compare_set(): incompatible arguments",
    ("hides_the_path", True): "rank 0: unexpected pos 639680 vs 639572",
}
"""The errors of the self-test, by kind and by whether the rank has the fault."""


def _pass_by_a_move(event: str, arguments: tuple[Any, ...], point: Point) -> None:
    if event == "os.rename" and str(point.checkpoints) in str(arguments[1]):
        point.pass_by("move")


def digest_of_state(checkpoint: dict[str, Any]) -> str:
    """Return a checksum of all bits of the weights and optimizer states of a checkpoint."""
    return digest([checkpoint["state_dict"], checkpoint["optimizer_states"]])
