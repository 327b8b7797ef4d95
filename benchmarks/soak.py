"""Resources of a long run, or with ``--fits`` of many fits in one process, on gloo processes.

The long run has many small steps with overlap and profiler. Every ``--every`` steps, each rank notes its private memory
(RssAnon), threads, open files and Python objects. The increase per thousand steps is the slope from the second note on.

With ``--fits N``, the ranks run N fits of all kinds in turn: checkpoints in files and in folders, also in the background, the
profiler, workers of loaders, streams, Fabric, several models and Trainers at once, validation, test and prediction, and fits
that fail. After each fit, each rank also records the numbers of its sockets, listening ports, pieces of mapped shared memory,
child processes and process groups. ``NAME_increase`` is the largest growth over all fits, compared with the second fit of the
same kind. The figures are those of the worst rank.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import harness
import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale import BubbleProfiler, FreeScaleDataModule, FreeScaleFabricStrategy, FreeScaleStrategy
from lightning_freescale.testing import run_distributed

NAMES = ("rss_mb", "threads", "files", "objects")
COUNTED = ("threads", "files", "sockets", "ports", "shared_memory", "children", "groups")
FAILING_HOOKS = (
    *("setup", "configure_model", "configure_optimizers", "on_train_start", "training_step", "on_before_optimizer_step"),
    *("validation_step", "on_save_checkpoint", "on_train_end", "on_fit_end", "teardown"),
)
ROWS = 5000


class Histories(Dataset):
    """Random histories of up to eleven items."""

    def __init__(self, size: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(1, 12, (size,), generator=draw)
        self.items = torch.randint(0, ROWS, (size, 12), generator=draw)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a history."""
        return self.items[index, : self.lengths[index]]


def collate(samples: list[torch.Tensor]) -> KeyedJaggedTensor:
    """Return one feature, whose targets are the items themselves."""
    lengths = torch.tensor([len(sample) for sample in samples], dtype=torch.int32)
    return KeyedJaggedTensor(keys=["f"], values=torch.cat(samples), lengths=lengths)


class Model(L.LightningModule):
    """A table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingConfig(name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["f"])
        self.items, self.head = EmbeddingCollection(tables=[config]), nn.Linear(8, 1)

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> torch.Tensor:
        """Return a loss that moves rows and layer."""
        loss = self.head(self.items(batch)["f"].values()).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> torch.Tensor:
        """Look up rows."""
        return self.items(batch)["f"].values().sum()

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> Any:
        """Return Adagrad for all."""
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


class Notes(L.Callback):
    """Records the resources of the process at regular steps."""

    def __init__(self, every: int) -> None:
        self.every, self.noted = every, list[list[float]]()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Record the resources."""
        if trainer.global_step % self.every == 0:
            gc.collect()
            self.noted.append(
                [harness.memory_mb()[0], threading.active_count(), len(os.listdir("/proc/self/fd")), len(gc.get_objects())]
            )
            if trainer.is_global_zero:
                print(trainer.global_step, *(f"{value:.1f}" for value in self.noted[-1]), flush=True)


def counts() -> dict[str, int]:
    """Return the numbers of the resources :data:`COUNTED` that this process holds."""
    files = list[str]()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    tcp = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]]
    threads = os.listdir("/proc/self/task")
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return {
        "threads": len(threads),
        "files": len(files),
        "sockets": sum(file.startswith("socket:") for file in files),
        "ports": sum(row[3] == "0A" and f"socket:[{row[9]}]" in files for row in tcp),  # "0A": listens
        "shared_memory": sum("/dev/shm" in line or "/memfd:" in line for line in mapped),
        "children": sum(len(Path(f"/proc/self/task/{thread}/children").read_text().split()) for thread in threads),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


# -- one long run


def long_run(options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of a run of many steps."""
    print("step", *NAMES)
    noted = np.array(run_distributed(_run, options.ranks, options, timeout=3600 * 4))
    after = noted[:, 1:] if noted.shape[1] > 2 else noted
    slopes = np.polyfit(np.arange(after.shape[1]), after.transpose(1, 0, 2).reshape(after.shape[1], -1), 1)[0]
    worst = slopes.reshape(options.ranks, len(NAMES)).max(axis=0)
    figures = {f"{name}_per_thousand_steps": float(value) * 1000 / options.every for name, value in zip(NAMES, worst)}
    for number in (1, 2, 5, 10, 20):
        if number <= noted.shape[1]:
            figures |= {f"{name}_after_{number}_notes": float(value) for name, value in zip(NAMES, noted[0, number - 1])}
    return figures


def _run(options: argparse.Namespace) -> list[list[float]]:
    data, notes = Histories(8 * options.ranks * 500), Notes(options.every)
    with tempfile.TemporaryDirectory() as folder:
        fitting = trainer(max_steps=options.steps, callbacks=[notes, BubbleProfiler(folder, verbose=False)])
        fitting.fit(Model(), FreeScaleDataModule(data, data.lengths, 8, collate_fn=collate, loss_reduction="target_mean"))
    return notes.noted


# -- many fits


class FitError(Exception):
    """Raised by the hook of a :class:`Failing` module."""


class Failing(Model):
    """A module whose hook of the given name raises on every rank."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        setattr(self, hook, self._fail)

    def _fail(self, *args: Any, **kwargs: Any) -> Any:
        raise FitError


class Stream(IterableDataset):
    """The stream of one rank."""

    def __init__(self, size: int, rank: int) -> None:
        self.data, self.rank = Histories(size), rank

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.data[index] for index in range(self.rank, len(self.data), dist.get_world_size()))


def trainer(strategy: Any = "freescale", **options: Any) -> L.Trainer:
    """Return a Trainer that prints nothing."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    common = {"accelerator": "cpu", "devices": dist.get_world_size(), "max_epochs": -1, "num_sanity_val_steps": 0}
    return L.Trainer(strategy=strategy, **common | quiet | options)


def module_of_data(**options: Any) -> FreeScaleDataModule:
    """Return data for training and evaluation."""
    data = Histories(8 * dist.get_world_size() * 10)
    others = dict.fromkeys(("val_dataset", "test_dataset", "predict_dataset"), Histories(9))
    given = {"collate_fn": collate, "loss_reduction": "target_mean"} | others | options
    return FreeScaleDataModule(data, data.lengths, 8, **given)


def fit_single(folder: str) -> None:
    """Save files, with validation."""
    saving = ModelCheckpoint(folder, every_n_train_steps=2, save_last=True)
    trainer(max_steps=4, callbacks=[saving], enable_checkpointing=True).fit(Model(), module_of_data())


def fit_folders(folder: str, kind: str = "sharded", **options: Any) -> None:
    """Save folders, with the profiler."""
    callbacks = [
        ModelCheckpoint(folder, every_n_train_steps=2, save_last=True),
        BubbleProfiler(f"{folder}/bubbles", verbose=False),
    ]
    strategy = FreeScaleStrategy(checkpoint=kind)
    fitting = trainer(strategy, max_steps=4, callbacks=callbacks, enable_checkpointing=True)
    fitting.fit(Model(), module_of_data(**options))


def fit_in_background(folder: str) -> None:
    """Save folders in the background, with workers that load data."""
    fit_folders(folder, "async", num_workers=1)


def fit_by_torchrec(folder: str) -> None:
    """Use TorchRec's exchange."""
    trainer(FreeScaleStrategy(overlap="torchrec"), max_steps=2).fit(Model(), module_of_data())


def fit_stream(folder: str) -> None:
    """Read a stream."""
    data = Stream(8 * dist.get_world_size() * 10, dist.get_rank())
    streamed = FreeScaleDataModule(data, len, 8, collate_fn=collate, loss_reduction="target_mean")
    trainer(max_steps=2).fit(Model(), streamed)


def evaluate(folder: str) -> None:
    """Fit twice with one Trainer, then validate, test and predict, and save."""
    model, data, fitting = Model(), module_of_data(), trainer(max_steps=2)
    fitting.fit(model, data)
    fitting.fit_loop.epoch_loop.max_steps = 4
    fitting.fit(model, data)
    for run in (fitting.validate, fitting.test, fitting.predict):
        run(model, data)
    fitting.strategy.full_weight("items.embeddings.t")
    fitting.save_checkpoint(f"{folder}/end.ckpt")


def fit_several(folder: str) -> None:
    """Keep two Trainers and two models alive, and train each of them again."""
    models, trainers = [Model(), Model()], [trainer(max_steps=2), trainer(max_steps=2)]
    for steps in (2, 4):
        for model, fitting in zip(models, trainers):
            fitting.fit_loop.epoch_loop.max_steps = steps
            fitting.fit(model, module_of_data())


def fail(folder: str) -> None:
    """Fail in hooks before, in and after training, with the profiler, each with a new Trainer."""
    for hook in FAILING_HOOKS:
        callbacks = [
            ModelCheckpoint(f"{folder}/{hook}", every_n_train_steps=3),
            BubbleProfiler(f"{folder}/{hook}/bubbles", verbose=False),
        ]
        options = {"callbacks": callbacks, "enable_checkpointing": True, "val_check_interval": 2}
        fitting = trainer(FreeScaleStrategy(checkpoint="async"), max_steps=4, **options)
        with suppress(FitError):
            fitting.fit(Failing(hook), module_of_data())
            sys.exit(f"the failure in {hook} was lost")


def train_with_fabric(folder: str) -> None:
    """Train in a loop over Fabric."""
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=FreeScaleFabricStrategy())
    fabric.launch()
    model = Model()
    wrapped, optimizer = fabric.setup(model, model.configure_optimizers())
    data = Histories(16)
    for batch in fabric.setup_dataloaders(DataLoader(data, 8, collate_fn=collate), use_distributed_sampler=False):
        fabric.backward(wrapped.training_step(batch, 0))
        optimizer.step()
        optimizer.zero_grad()


KINDS = {
    "single": fit_single,
    "sharded": fit_folders,
    "async": fit_in_background,
    "torchrec": fit_by_torchrec,
    "stream": fit_stream,
    "evaluation": evaluate,
    "several": fit_several,
    "failures": fail,
    "fabric": train_with_fabric,
}


def many_fits(options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of many fits in one process."""
    print("fit", "kind", "memory_mb", *COUNTED)
    noted = np.array(run_distributed(_fits, options.ranks, options, timeout=3600 * 4))
    kinds, half = len(options.kinds), noted.shape[1] // 2
    slopes = np.polyfit(np.arange(noted.shape[1] - half), noted[:, half:, 0].T, 1)[0]
    figures = {"fits": float(options.fits), "memory_mb_per_fit": float(slopes.max())}
    later = range(2 * kinds, noted.shape[1])
    for index, name in enumerate(COUNTED, start=1):
        counted = noted[:, :, index]
        figures[f"{name}_increase"] = max(float((counted[:, i] - counted[:, kinds + i % kinds]).max()) for i in later)
        figures[name] = float(counted[:, -1].max())
    return figures


def _fits(options: argparse.Namespace) -> list[list[float]]:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    noted = list[list[float]]()
    for number in range(options.fits):
        kind = options.kinds[number % len(options.kinds)]
        with tempfile.TemporaryDirectory() as folder:
            shared = [folder]
            dist.broadcast_object_list(shared)
            KINDS[kind](shared[0])
            dist.barrier()
        gc.collect()
        dist.barrier()
        found = counts()
        noted.append([harness.memory_mb()[0], *(found[name] for name in COUNTED)])
        if dist.get_rank() == 0:
            print(number + 1, kind, *(f"{value:.1f}" for value in noted[-1][:1]), *noted[-1][1:], flush=True)
    return noted


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=1000, help="steps between two notes (default: 1000)")
    parser.add_argument("--fits", type=int, default=0, help="number of fits in one process, instead of a long run")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="kinds of fits (default: all)")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    if 0 < options.fits <= 2 * len(options.kinds):
        parser.error(f"--fits {options.fits}: pass more than two fits of each of the {len(options.kinds)} kinds")
    figures = many_fits(options) if options.fits else long_run(options)
    print(", ".join(f"{name} {value:+.3f}" for name, value in figures.items()))
    harness.finish(figures, options)


if __name__ == "__main__":
    main()
