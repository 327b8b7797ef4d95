"""Whatever state a training_step may change before it looks up ids, and how."""

from __future__ import annotations

import itertools
import os
import queue
import random
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn

from tests.helpers import overlap_modules as modules
from tests.helpers.overlap_training import STEPS, Batch
from tests.helpers.recommender import DIM

NOTES = Path("notes.txt")


class Case(NamedTuple):
    """A state of a module, and what a training_step does with it.

    Attributes:
        use: changes it, and returns a number on which ids and loss depend.
        make: makes it.
        refused: what a trial run says of it; None if it is exact.
    """

    use: Callable[[Any, Any], Any]
    make: Callable[[], Any] = lambda: None
    refused: str | None = None


class Stateful(modules.Schedules, modules.Computes):
    """Uses states before it looks up."""

    calls = 0
    history: list[int] = []

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.states = names, [CASES[name].make() for name in names]
        self.slow, self.fast = (nn.Linear(DIM, 1, bias=False) for _ in range(2))
        self.slow.requires_grad_(False)
        self.save_hyperparameters({"n": 0})
        self.used: list[float] = []
        self.calls = 0
        self.slow.register_forward_pre_hook(lambda *_: setattr(self, "calls", self.calls + 1))

    def ids(self, batch: Batch) -> Tensor:
        return (super().ids(batch) + int(self.used[-1] * 8)) % 13

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        uses = zip(self.names, self.states)
        self.used.append(float(sum(CASES[name].use(self, state) for name, state in uses)))
        return super().training_step(batch, batch_idx) * (1 + self.used[-1] ** 2) + 0.1 * self.fast.weight.square().sum()


class Plain:
    """A negative sampler as users write it."""

    def __init__(self) -> None:
        self.numpy, self.torch = np.random.default_rng(0), torch.Generator().manual_seed(0)
        self.python, self.legacy = random.Random(0), np.random.RandomState(0)
        self.calls = 0

    def draw(self) -> float:
        self.calls += 1
        drawn = self.numpy.random() + self.python.random() + self.legacy.rand() + torch.rand(1, generator=self.torch)
        return float(drawn) + self.calls / 10


@dataclass
class Count:
    n: int = 0
    seen: list[Any] = field(default_factory=lambda: [[], {"deep": torch.zeros(1)}])

    def add(self) -> float:
        self.n += 1
        self.seen[0].append(self.n)
        self.seen[1]["deep"] += 1
        return (len(self.seen[0]) + float(self.seen[1]["deep"]) + self.n) / 10


class Slotted:
    __slots__ = ("count", "late")

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> float:
        self.count += 1
        self.late = [*getattr(self, "late", []), self.count]
        return len(self.late) / 10


class Shared:
    """Counts in its class."""

    count = 0
    rows: list[int] = []

    def add(self) -> float:
        type(self).count += 1
        self.rows.append(1)
        return (self.count + len(self.rows)) / 10


class Steps(Iterator[float]):
    """An iterator of Python, whose state is in its attributes."""

    def __init__(self) -> None:
        self.at = 0.0

    def __next__(self) -> float:
        self.at += 0.1
        return self.at


class Noting(Logger):
    """Keeps what the step logs to it."""

    name = version = "noting"

    def __init__(self) -> None:
        super().__init__()
        self.got: list[Any] = []

    @property
    def experiment(self) -> Any:
        return self

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.got += [(name, step) for name in metrics if name == "x"]

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


def _closure() -> Callable[[], float]:
    draw, calls = np.random.default_rng(5), 0

    def sample(drawn: list[float] = []) -> float:  # noqa: B006 (what users write)
        nonlocal calls
        calls += 1
        drawn.append(draw.random())
        return (calls + len(drawn)) / 10 + drawn[-1]

    return sample


@torch.no_grad()
def _average_in_place(model: Any, state: Any) -> Tensor:
    return model.slow.weight.mul_(0.9).add_(model.fast.weight, alpha=0.1).sum()


@torch.no_grad()
def _norm_in_place(model: Any, state: Any) -> Tensor:
    return model.fast.weight.div_(model.fast.weight.norm() * 1.1).sum()


def _average_data(model: Any, state: Any) -> Tensor:
    return model.slow.weight.data.mul_(0.9).add_(model.fast.weight.data, alpha=0.1).sum()


def _add(container: Any, key: Any) -> float:
    container[key] += 1
    return float(container[key]) / 10


def _append(items: Any) -> float:
    items.append(0)
    return len(items) / 10


def _count_hparams(model: Any, state: Any) -> float:
    model.hparams.n += 1
    return model.hparams.n / 10


def _count_in_class(model: Any, state: Any) -> float:
    Stateful.history.append(1)
    return len(Stateful.history) / 10


def _steepen(model: Any, state: Any) -> float:
    model.lr_schedulers().gamma *= 0.99
    return model.lr_schedulers().gamma


def _decay(model: Any, state: Any) -> float:
    (group,) = model.trainer.optimizers[0].param_groups
    group["lr"] *= 0.9
    return group["lr"]


def _stop_late(model: Any, state: Any) -> float:
    model.trainer.should_stop = model.global_step == STEPS + 2
    return 0.0


def _normalize(model: Any, found: list[nn.Module]) -> Tensor:
    found[0](torch.rand(3, 1))
    return found[0].num_batches_tracked / 10 + found[0].running_mean


def _log(model: Any, state: Any) -> float:
    model.logger.log_metrics({"x": 1.0}, step=model.global_step)
    model.logger.experiment.log_metrics({"x": 2.0}, step=model.global_step)
    return 0.0


def _append_to_file(model: Any, state: Any) -> float:
    with NOTES.open("a") as file:
        file.write("x")
        return file.tell() / 10


def _write_array(model: Any, state: Any) -> float:
    shape = np.loadtxt("array.txt", ndmin=1).shape if Path("array.txt").exists() else (0,)
    np.savetxt("array.txt", np.ones(shape[0] + 1))
    return shape[0] / 10


def _truncate(model: Any, state: Any) -> float:
    os.truncate(NOTES, NOTES.stat().st_size + 1)
    return NOTES.stat().st_size / 10


def _rename(model: Any, state: Any) -> float:
    here, there = (NOTES, Path("more.txt")) if NOTES.exists() else (Path("more.txt"), NOTES)
    here.rename(there)
    return 0.1 * (here == NOTES)


def _generator() -> Iterator[float]:
    for n in itertools.count():
        yield n / 10


def _log_file(model: Any, file: Any) -> float:
    file.write(b"x")
    return file.tell() / 10


CASES: dict[str, Case] = {
    "parameter by its data": Case(_average_data),
    "frozen parameter in place": Case(_average_in_place),
    "trained parameter in place": Case(_norm_in_place),
    "trained parameter by its data": Case(lambda model, state: model.fast.weight.data.mul_(0.97).sum()),
    "sampler": Case(lambda model, sampler: sampler.draw(), Plain),
    "sampler in a closure": Case(lambda model, sample: sample(), _closure),
    "bound method": Case(lambda model, draw: draw(), lambda: Plain().draw),
    "bound method of numpy": Case(lambda model, draw: draw(), lambda: np.random.default_rng(1).random),
    "partial": Case(lambda model, draw: draw() / 13, lambda: partial(np.random.default_rng(1).integers, 0, 13)),
    "generator in a list": Case(
        lambda model, found: torch.rand(1, generator=found[0]), lambda: [torch.Generator().manual_seed(3)]
    ),
    "dataclass": Case(lambda model, count: count.add(), Count),
    "dataclass in a tuple": Case(lambda model, found: found[0].add() + found[1].add_(1), lambda: (Count(), torch.zeros(1))),
    "slots": Case(lambda model, slotted: slotted.add(), Slotted),
    "class attributes": Case(lambda model, shared: shared.add(), Shared),
    "class attribute of the module": Case(_count_in_class),
    "iterator in Python": Case(lambda model, steps: next(steps), Steps),
    "lists in a list": Case(lambda model, lists: _append(lists[0]), lambda: [[], []]),
    "tensors in a list": Case(lambda model, found: found[0].add_(0.1), lambda: [torch.zeros(1)]),
    "arrays in a dict": Case(lambda model, found: _add(found["n"], 0), lambda: {"n": np.zeros(2)}),
    "Counter": Case(lambda model, counts: _add(counts, "steps"), Counter),
    "deque": Case(lambda model, recent: _append(recent) + sum(recent), lambda: deque([1, 2, 3], maxlen=5)),
    "set": Case(lambda model, found: found.add(len(found)) or len(found) / 10, set),
    "bytes": Case(lambda model, found: _append(found), bytearray),
    "hidden module": Case(_normalize, lambda: [nn.BatchNorm1d(1)]),
    "hparams": Case(_count_hparams),
    "hook": Case(lambda model, state: model.slow(torch.ones(1, DIM)).sum() * 0 + model.calls / 10),
    "learning rate": Case(_decay),
    "schedule": Case(_steepen),
    "end of training": Case(_stop_late),
    "logger": Case(_log),
    "itertools.count": Case(
        lambda model, count: next(count) / 10, itertools.count, "self.states[0], of type itertools.count, cannot go back"
    ),
    "iterator": Case(lambda model, found: next(found), lambda: iter([0.1] * 99), "self.states[0], of type list_iterator"),
    "generator in an object": Case(
        lambda model, found: next(found["of"].it),
        lambda: {"of": type("Of", (), {"__init__": lambda self: setattr(self, "it", _generator())})()},
        "self.states[0]['of'].it, of type generator",
    ),
    "open file": Case(_log_file, tempfile.TemporaryFile, "self.states[0], of type _io.BufferedRandom"),
    "queue": Case(
        lambda model, found: found.put(1) or found.qsize() / 10,
        queue.SimpleQueue,
        "self.states[0], of type _queue.SimpleQueue, cannot be copied",
    ),
    "memory map": Case(
        lambda model, found: _add(found, 0),
        lambda: np.memmap("mapped", mode="w+", shape=(2,)),
        "self.states[0], of type numpy.memmap, writes to a file",
    ),
    "file": Case(_append_to_file, refused="training_step writes to the file "),
    "file of numpy": Case(_write_array, refused="training_step writes to the file 'array.txt'"),
    "truncated file": Case(_truncate, refused="training_step truncates the file"),
    "renamed file": Case(_rename, refused="training_step renames the file"),
}
EXACT = [name for name, case in CASES.items() if case.refused is None]
REFUSED = [name for name, case in CASES.items() if case.refused is not None]
