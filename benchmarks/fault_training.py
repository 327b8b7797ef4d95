"""Training of ``faults.py`` on one rank, and the points at which a fault occurs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import numpy as np
import torch
from fault_kinds import SAVES_EVERY, STEPS, Case, Fault
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.balance import CostModel
from lightning_freescale.data import HistoryDataset, collate_histories, read_interactions

RATINGS = Path(__file__).parents[1] / "examples" / "data" / "ml-latest-small" / "ratings.csv.gz"
PACKAGE = str(Path(__file__).parents[1] / "lightning_freescale")
DIM, NEGATIVES, BATCH, USERS = 16, 64, 8, 300  # more than one epoch
_CALLS = {"starting": 3400, "loading": 3400, "saving": 3000}
"""The number of calls of and by functions of the package in each part of a training, about."""
_PART_OF_TABLE = 400_000  # bytes, less than a table has


@dataclass
class Point:
    """Injects the fault on this rank if the attempt has one.

    Attributes:
        process: number of this process among those of all jobs.
        progress: completed steps of each process and the time of its fault in seconds of the monotonic clock, shape
            ``[2, processes]``, in memory that all processes share.
        checkpoints: the folder of the checkpoints.
    """

    fault: Fault | None
    process: int
    progress: np.ndarray
    checkpoints: Path
    taken: list[bytearray] = field(default_factory=list, init=False)  # memory that the training cannot use
    _calls: int | None = field(default=None, init=False)  # until the fault occurs in a part of the training

    def is_due(self, place: str) -> bool:
        """Return True if the fault is due now."""
        if self.fault is None or self.process not in self.fault.ranks or self.fault.place != place:
            return False
        steps, struck = self.progress[:, self.process]
        return bool(steps >= self.fault.step and not struck)

    def is_here(self, place: str) -> bool:
        """Return True, once, if the fault is due now."""
        if not self.is_due(place):
            return False
        self.progress[1, self.process] = time.monotonic()
        return True

    def pass_by(self, place: str) -> None:
        """Inject the fault if it is due here."""
        if self.fault is not None and self.is_here(place):
            _HAPPENS[self.fault.how](self)

    def watch_threads(self) -> None:
        """Count the calls of the thread that writes checkpoints, too. It starts later."""
        if self.fault is not None and self.fault.place == "saving" and self.process in self.fault.ranks:
            threading.setprofile(self._begin_thread)

    def begin(self, part: str) -> None:
        """Begin a part of the training, in which the fault occurs at a random call if it is due."""
        if self.fault is not None and self._calls is None and self.is_due(part):
            self._calls = int(_CALLS[part] * self.fault.at)
            sys.setprofile(self._count)

    def end(self, part: str) -> None:
        """End the part. If it had fewer calls, the fault occurs now."""
        if self._calls is not None and self.fault is not None and self.fault.place == part:
            sys.setprofile(None)
            self.pass_by(part)

    def _begin_thread(self, *event: Any) -> None:
        sys.setprofile(self._count if "checkpoint" in threading.current_thread().name else None)

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._calls is None or event not in ("call", "c_call"):
            return
        caller = frame.f_back if event == "call" else None
        if not any(each is not None and each.f_code.co_filename.startswith(PACKAGE) for each in (frame, caller)):
            return
        self._calls -= 1
        if self._calls < 0 and self.fault is not None:
            sys.setprofile(None)
            self.pass_by(self.fault.place)


def _raise(point: Point) -> None:
    raise RuntimeError(f"injected fault on rank {point.process}")


def _memory_error(point: Point) -> None:
    raise MemoryError(f"injected fault on rank {point.process}")


def _interrupt(point: Point) -> None:
    raise KeyboardInterrupt(f"injected fault on rank {point.process}")


def _leave_process(point: Point) -> None:
    subprocess.Popen(["sleep", "600"])
    _raise(point)


def _leave_memory(point: Point) -> None:
    Path(f"/dev/shm/lightning_freescale_{os.getpid()}_left").write_bytes(b"left")
    _raise(point)


def _leave_part(point: Point) -> None:
    (point.checkpoints / ".step=6.ckpt.left.part").write_bytes(b"left")
    _raise(point)


def _raise_unencodable(point: Point) -> None:
    raise ValueError(f"injected fault on rank {point.process} in the file \udcff")


def _raise_megabytes(point: Point) -> None:
    raise ValueError(f"injected fault on rank {point.process}: {'many words ' * 500_000}")


def _send(point: Point) -> None:
    """Send this process the signal of the fault, as the system does, once or twice."""
    assert point.fault is not None
    number = getattr(signal, point.fault.how)
    if point.fault.again:
        threading.Timer(point.fault.again, os.kill, (os.getpid(), number)).start()
    os.kill(os.getpid(), number)


def _fill(point: Point) -> None:
    """Leave space for a part of a checkpoint on the disk."""
    assert point.fault is not None
    largest = max(_size(path) for path in point.checkpoints.glob("*.ckpt"))
    with open(point.checkpoints.parent / "filler", "wb") as file:
        state = os.statvfs(point.checkpoints)
        os.posix_fallocate(file.fileno(), 0, int(state.f_bfree * state.f_bsize - point.fault.at * largest))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())


def _protect(point: Point) -> None:
    # a file that is open for writing on a rank prevents it for a moment
    subprocess.run(["mount", "-o", "remount,ro", point.checkpoints.parent], check=True)


def _limit_memory(point: Point) -> None:
    """Leave this process memory for a random number of parts of a table."""
    assert point.fault is not None
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
    with contextlib.suppress(MemoryError):
        while True:
            point.taken.append(bytearray(_PART_OF_TABLE))
    del point.taken[: int(4 * point.fault.at)]


_HAPPENS: dict[str, Callable[[Point], Any]] = {
    "raise": _raise,
    "raise_unencodable": _raise_unencodable,
    "raise_megabytes": _raise_megabytes,
    "fill": lambda point: _fill(point) if point.process == 0 else None,
    "protect": lambda point: _protect(point) if point.process == 0 else None,
    "limit_memory": _limit_memory,
    "SIGINT": _send,
    "SIGTERM": _send,
    "leave_part": _leave_part,
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
        strategy=FreeScaleStrategy(timeout=timedelta(seconds=case.timeout), checkpoint=case.checkpoint),
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
    return {"digest": digest(end), "first_step": module.first_step, "steps": trainer.global_step}


_SAYS_INSTEAD = {
    ("says_nothing", False): "something went wrong",
    ("loses_the_text", True): "rank 1: compare_set(): incompatible arguments",
    ("hides_the_path", True): "rank 0: unexpected pos 639680 vs 639572",
}
"""The errors of the self-test, by kind and by whether the rank has the fault."""


def _pass_by_a_move(event: str, arguments: tuple[Any, ...], point: Point) -> None:
    if event == "os.rename" and str(point.checkpoints) in str(arguments[1]):
        point.pass_by("move")


def digest(checkpoint: dict[str, Any]) -> str:
    """Return a checksum of all bits of the weights and optimizer states of a checkpoint."""
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

    add("weights", checkpoint["state_dict"])
    add("states", checkpoint["optimizer_states"])
    return found.hexdigest()
