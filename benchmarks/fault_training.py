"""Training of ``faults.py`` on one rank, and the points at which a fault occurs."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from fault_kinds import SAVES_EVERY, STEPS, Case, Fault
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale import BalanceOptions, FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.data import HistoryDataset, collate_histories, read_interactions

RATINGS = Path(__file__).parents[1] / "examples" / "data" / "ml-latest-small" / "ratings.csv.gz"
DIM, NEGATIVES, BATCH = 16, 64, 8


@dataclass
class Point:
    """Injects the fault on this rank if the attempt has one.

    Attributes:
        progress: completed steps of each rank and the time of the fault in seconds of the monotonic clock, shape
            ``[2, ranks]``, in memory that all processes share.
        checkpoints: the folder of the checkpoints.
    """

    fault: Fault | None
    rank: int
    progress: np.ndarray
    checkpoints: Path

    def is_here(self, place: str) -> bool:
        """Return True, once, if the fault is due now."""
        if self.fault is None or self.rank not in self.fault.ranks or self.fault.place != place:
            return False
        steps, struck = self.progress[:, self.rank]
        if steps < self.fault.step or struck:
            return False
        self.progress[1, self.rank] = time.monotonic()
        return True

    def pass_by(self, place: str) -> None:
        """Inject the fault if it is due here."""
        if self.fault is not None and self.is_here(place):
            _HAPPENS[self.fault.how](self)


def _raise(point: Point) -> None:
    raise RuntimeError(f"injected fault on rank {point.rank}")


def _memory_error(point: Point) -> None:
    raise MemoryError(f"injected fault on rank {point.rank}")


def _interrupt(point: Point) -> None:
    raise KeyboardInterrupt(f"injected fault on rank {point.rank}")


def _leave_process(point: Point) -> None:
    subprocess.Popen(["sleep", "600"])
    _raise(point)


def _leave_memory(point: Point) -> None:
    Path(f"/dev/shm/lightning_freescale_{os.getpid()}_left").write_bytes(b"left")
    _raise(point)


_HAPPENS: dict[str, Callable[[Point], Any]] = {
    "raise": _raise,
    "memory_error": _memory_error,
    "interrupt": _interrupt,
    "exit": lambda point: sys.exit(3),
    "exit_0": lambda point: os._exit(0),
    "hang": lambda point: time.sleep(100_000),
    "kill": lambda point: os.kill(os.getpid(), signal.SIGKILL),
    "remove": lambda point: shutil.rmtree(point.checkpoints),
    "leave_process": _leave_process,
    "leave_memory": _leave_memory,
}


def histories() -> HistoryDataset:
    """Return the training histories; read once, before ranks are forked."""
    found = read_interactions(RATINGS, user="userId", item="movieId", time="timestamp", order="sort", ties="keep")
    return HistoryDataset(found, np.flatnonzero(found.lengths >= 4), "train", 40)


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
        table = EmbeddingConfig(name="item", num_embeddings=items, embedding_dim=DIM, feature_names=names)
        self.items, self.embedding, self.point = items, EmbeddingCollection(tables=[table]), point
        self.net = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, DIM))
        self.first_step = -1

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
        if self.point.is_here("write"):
            assert self.point.fault is not None
            _no_file_grows(self.point.checkpoints, kill=self.point.fault.how == "kill")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.point.pass_by("load")

    def configure_optimizers(self) -> Any:
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

    def __init__(self, kind: str, point: Point) -> None:
        self.kind, self.point = kind, point

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.point.pass_by("train_start")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *batch: Any) -> None:
        self.point.progress[0, self.point.rank] = trainer.global_step
        if self.point.is_here("weights"):
            pl_module.net[0].bias.data[0] += 1e-6
        self.point.pass_by("callback")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.point.pass_by("train_end")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self.kind == "does_not_end" and not self.point.progress[1, self.point.rank]:
            time.sleep(100_000)


def train(
    case: Case, fault: Fault | None, samples: HistoryDataset, folder: Path, rank: int, progress: np.ndarray, resume: str | None
) -> dict[str, Any]:
    """Train to the end on this rank, and return a description of the final state.

    Args:
        case: the case.
        fault: the fault to inject; None for none.
        samples: the result of :func:`histories`.
        folder: folder of this case, which contains the folder of the checkpoints.
        rank: this rank.
        progress: see :class:`Point`.
        resume: the argument ``Trainer.fit(ckpt_path=)``.
    """
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    point = Point(fault, rank, progress, folder / "checkpoints")
    if fault is not None and fault.place == "move":
        sys.addaudithook(lambda event, arguments: _pass_by_a_move(event, arguments, point))
    module = _Recommender(samples.histories.num_items, point)
    data = FreeScaleDataModule(
        _Samples(samples, point),
        samples.lengths,
        BATCH,
        collate_fn=_Collate(point),
        loss_reduction="target_mean",
        num_workers=case.workers,
        balance=BalanceOptions(calibrate=False),  # otherwise the run without a fault would depend on the clock
    )
    saving = ModelCheckpoint(point.checkpoints, "{step}", every_n_train_steps=SAVES_EVERY, save_last=True, save_top_k=-1)
    trainer = L.Trainer(
        strategy=FreeScaleStrategy(timeout=timedelta(seconds=case.timeout), checkpoint=case.checkpoint),
        accelerator="cpu",
        devices=case.ranks,
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        detect_anomaly=case.detect_anomaly,
        callbacks=[saving, _Points(case.kind, point)],
    )
    try:
        trainer.fit(module, data, ckpt_path=resume)
    except RuntimeError:
        if case.kind == "says_nothing" and not progress[1, rank]:
            raise RuntimeError("something went wrong") from None
        raise
    end = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    content = {"weights": end["state_dict"], "optimizer_states": end["optimizer_states"]}
    return {"digest": _digest(content), "first_step": module.first_step, "steps": trainer.global_step}


def _pass_by_a_move(event: str, arguments: tuple[Any, ...], point: Point) -> None:
    if event == "os.rename" and str(point.checkpoints) in str(arguments[1]):
        point.pass_by("move")


def _digest(content: Any) -> str:
    """Return a checksum of all bits of the tensors in nested containers, by position."""
    found = hashlib.sha256()

    def add(place: str, part: Any) -> None:
        if isinstance(part, Tensor):
            found.update(f"{place} {part.dtype} {tuple(part.shape)}".encode() + part.detach().contiguous().numpy().tobytes())
        elif isinstance(part, dict):
            for name in sorted(part, key=str):
                add(f"{place}.{name}", part[name])
        elif isinstance(part, (list, tuple)):
            for index, each in enumerate(part):
                add(f"{place}.{index}", each)
        else:
            found.update(json.dumps([place, str(part)]).encode())

    add("", content)
    return found.hexdigest()
