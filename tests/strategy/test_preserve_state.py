"""A training step that runs ahead of time: whatever state it changes is put back, or it is refused."""

from __future__ import annotations

import importlib
import itertools
import os
import queue
import random
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_freescale.strategy.file_writes import FileWritesRefused
from lightning_freescale.strategy.preserve_state import LeavesTraceError
from tests.helpers import overlap_modules as modules
from tests.helpers.dry_running import Model, dry_run, example_batch
from tests.helpers.overlap_training import (
    EPOCHS,
    KNOWN,
    PLAIN,
    STEPS,
    Batch,
    Case,
    as_tensors,
    changed_loader,
    compared,
    not_refused,
)
from tests.helpers.recommender import DIM
from tests.strategy.test_balance_monitor import Kept

# -- states that a step may hold: how to make one, and how a step changes it, for a number that says where it is


class Plain:
    def __init__(self) -> None:
        self.numpy, self.torch = np.random.default_rng(0), torch.Generator().manual_seed(0)
        self.python, self.legacy = random.Random(0), np.random.RandomState(0)
        self.calls = 0

    def draw(self) -> float:
        self.calls += 1
        drawn = self.numpy.random() + self.python.random() + self.legacy.rand() + torch.rand(1, generator=self.torch)
        return float(drawn) + self.calls / 10


class Slotted:
    __slots__ = ("count", "late")

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> float:
        self.count += 1
        self.late = [*getattr(self, "late", []), self.count]
        return len(self.late) / 10


class Shared:
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


def _closure() -> Callable[[], float]:
    draw, calls = np.random.default_rng(5), 0

    def sample(drawn: list[float] = []) -> float:  # noqa: B006 (what users write)
        nonlocal calls
        calls += 1
        drawn.append(draw.random())
        return (calls + len(drawn)) / 10 + drawn[-1]

    return sample


def _add(container: Any, key: Any) -> float:
    container[key] += 1
    return float(container[key]) / 10


def _append(items: Any) -> float:
    items.append(0)
    return len(items) / 10


def _normalize(found: list[nn.Module]) -> float:
    found[0](torch.rand(3, 1))
    return float(found[0].num_batches_tracked / 10 + found[0].running_mean)


def _generator() -> Iterator[float]:
    for n in itertools.count():
        yield n / 10


STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "sampler": (Plain, lambda sampler: sampler.draw()),
    "sampler in a closure": (_closure, lambda sample: sample()),
    "bound method": (lambda: Plain().draw, lambda draw: draw()),
    "bound method of numpy": (lambda: np.random.default_rng(1).random, lambda draw: draw()),
    "partial": (lambda: partial(np.random.default_rng(1).integers, 0, 13), lambda draw: draw() / 13),
    "generator in a list": (lambda: [torch.Generator().manual_seed(3)], lambda found: torch.rand(1, generator=found[0])),
    "sampler in a tuple": (lambda: (Plain(), torch.zeros(1)), lambda found: found[0].draw() + found[1].add_(1)),
    "slots": (Slotted, lambda slotted: slotted.add()),
    "class attributes": (Shared, lambda shared: shared.add()),
    "iterator in Python": (Steps, next),
    "lists in a list": (lambda: [[], []], lambda lists: _append(lists[0])),
    "tensors in a list": (lambda: [torch.zeros(1)], lambda found: found[0].add_(0.1)),
    "arrays in a dict": (lambda: {"n": np.zeros(2)}, lambda found: _add(found["n"], 0)),
    "Counter": (Counter, lambda counts: _add(counts, "steps")),
    "deque": (lambda: deque([1, 2, 3], maxlen=5), lambda recent: _append(recent) + sum(recent)),
    "set": (set, lambda found: found.add(len(found)) or len(found) / 10),
    "bytes": (bytearray, _append),
    "hidden module": (lambda: [nn.BatchNorm1d(1)], _normalize),
    "torch": (lambda: None, lambda _: torch.rand(1)),
    "python": (lambda: None, lambda _: random.random()),
    "numpy": (lambda: None, lambda _: np.random.rand()),
}
EFFECTS: dict[str, Callable[[Model, dict[str, Any]], Any]] = {
    "batch norm": lambda model, batch: model.norm(batch["dense"]).sum() + model.norm.running_mean.sum(),
    "metric": lambda model, batch: model.metric(batch["dense"]) + model.metric.compute(),
    "list metric": lambda model, batch: model.mean.update(batch["dense"]) or len(model.mean.value),
    "buffer": lambda model, batch: model.queue.add_(1).sum(),
    "buffer replaced": lambda model, batch: setattr(model, "queue", model.queue + 1) or model.queue.sum(),
    "nested list": lambda model, batch: model.counters["steps"].append(1) or len(model.counters["steps"]),
    "parameter": lambda model, batch: model.teacher.add_(1).sum(),
    "parameter's data": lambda model, batch: model.teacher.data.add_(1).sum(),
    "parameter's data replaced": lambda model, batch: setattr(model.teacher, "data", model.teacher + 1) or model.teacher.sum(),
    "trained parameter": lambda model, batch: model.norm.weight.data.mul_(2).sum(),
    "compiled module": lambda model, batch: model.compiled(batch["dense"]).sum() + model.compiled.running_mean.sum(),
    "number": lambda model, batch: setattr(model, "step", model.step + 1) or model.step,
    "new attribute": lambda model, batch: hasattr(model, "extra") or setattr(model, "extra", 1) or 0,
    "training mode": lambda model, batch: model.norm.training * len(model.eval().losses),
    "hook": lambda model, batch: model.norm.register_forward_hook(print) and len(model.norm._forward_hooks),
    "popped": lambda model, batch: batch.pop("dense").sum(),
    "changed": lambda model, batch: batch["dense"].mul_(2).sum(),
    "ids changed": lambda model, batch: batch["users"].values().add_(1).sum(),
    "names": lambda model, batch: batch["names"].append("c") or len(batch["names"]) * batch["dense"].sum(),
}


def _identities(model: Model) -> list[Any]:
    attributes = {key: id(value) for key, value in vars(model).items()}
    # autograd may have saved buffers
    return [attributes, [id(module) for module in model.modules()], [buffer._version for buffer in model.buffers()]]


def _numbers(name: str, dry_runs: int) -> list[float]:
    """Return what a model's steps use, before each of which there are dry runs of it."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    Shared.count = 0
    Shared.rows.clear()
    used: list[float] = []
    make, use = STATES.get(name, (None, None))

    @torch.no_grad()
    def between(model: Model, batch: dict[str, Any]) -> None:
        RAN.append(name)
        found = EFFECTS[name](model, batch) if use is None else use(model.state)
        RAN.append(float(found))

    model = Model(between)
    model.state = make and make()
    for step in range(4):
        batch = example_batch(step)
        for _ in range(dry_runs):
            RAN.clear()
            before = _identities(model)
            assert dry_run(model, batch).error is None
            assert len(RAN) == 2, "it got as far as that"
            assert _identities(model) == before
        between(model, batch)
        used.append(RAN[-1])
    return used


RAN: list[Any] = []
"""A global, which no dry run puts back."""


@pytest.mark.parametrize("name", [*STATES, *EFFECTS])
def test_what_a_step_changes_is_put_back(name: str) -> None:
    alone = _numbers(name, 0)
    assert len(set(alone)) > 1, "the state moves, or equality means nothing"
    assert _numbers(name, 2) == alone


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_so_it_is_after_an_error(error: type[BaseException]) -> None:
    def fail(model: Model, batch: dict[str, Any]) -> None:
        model.queue.add_(1)
        model.losses.append(1.0)
        raise error

    model = Model(fail)
    if error is ValueError:
        result = dry_run(model)
        assert result.features == {} and isinstance(result.error, ValueError)
    else:
        with pytest.raises(KeyboardInterrupt):
            dry_run(model)
    assert model.queue.sum() == 0 and model.losses == [0.5]


class Holder:
    def __init__(self, value: Any) -> None:
        self.it = value


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Holder([itertools.count()]), ".it[0], of type itertools.count,"),
        (lambda: iter([0.1]), ", of type list_iterator,"),
        (lambda: {"of": Holder(_generator())}, "['of'].it, of type generator,"),
        (tempfile.TemporaryFile, ", of type _io.BufferedRandom,"),
        (queue.SimpleQueue, ", of type _queue.SimpleQueue, cannot be copied"),
        (lambda: np.memmap("mapped", mode="w+", shape=(2,)), ", of type numpy.memmap,"),
    ],
)
def test_what_cannot_be_put_back_is_named_and_the_step_does_not_run(make: Callable[[], Any], message: str) -> None:
    RAN.clear()
    model = Model(lambda model, batch: RAN.append("ran"))
    model.norm.sampler = make()
    items, buffer = model.items, model.queue
    result = dry_run(model)
    assert isinstance(result.error, LeavesTraceError) and f"self.norm.sampler{message}" in str(result.error)
    assert not RAN and model.items is items and model.queue is buffer


# -- files


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("there").write_text("before")
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: Path("new").write_text("x"), "writes to the file 'new'"),
        (lambda: Path("there").open("a").close(), "writes to the file 'there'"),
        (lambda: os.remove("there"), "removes the file 'there'"),
        (lambda: os.rename("there", "new"), "renames the file 'there'"),
        (lambda: os.truncate("there", 0), "truncates the file 'there'"),
        (lambda: np.savetxt("new", np.ones(1)), "writes to the file 'new'"),
    ],
)
def test_files_are_not_changed(change: Callable[[], object], message: str) -> None:
    with FileWritesRefused(), pytest.raises(LeavesTraceError, match=message):
        change()
    with FileWritesRefused(), suppress(Exception):  # a step that catches the error has not written either
        change()
    result = dry_run(Model(lambda model, batch: change()))
    assert isinstance(result.error, LeavesTraceError) and message in str(result.error)
    assert Path("there").read_text() == "before" and not Path("new").exists()
    change()


def test_reading_other_threads_and_caches_of_compiled_code(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("imported_meanwhile.py").write_text("NUMBER = 3")
    monkeypatch.syspath_prepend(in_folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    thread = threading.Thread(target=Path("new").write_text, args=["x"])
    with FileWritesRefused():
        assert Path("there").read_text() == "before"
        Path(os.devnull).write_text("x")
        thread.start()
        thread.join()
        assert importlib.import_module("imported_meanwhile").NUMBER == 3
    assert Path("new").exists() and list(in_folder.rglob("*.pyc"))


# -- in fits


@torch.no_grad()
def _average_in_place(model: Any) -> Tensor:
    return model.slow.weight.mul_(0.9).add_(model.fast.weight, alpha=0.1).sum()


def _scale(container: Any, key: str, factor: float) -> float:
    container[key] *= factor
    return container[key]


def _stop_late(model: Any) -> float:
    model.trainer.should_stop = model.global_step == STEPS + 2
    return model.global_step / 10


def _log(model: Any) -> float:
    model.logger.log_metrics({"x": 1.0}, step=model.global_step)
    model.logger.experiment.log_metrics({"x": 2.0}, step=model.global_step)
    return model.global_step / 10


PARAMETERS: dict[str, Callable[[Any], Any]] = {
    "frozen parameter in place": _average_in_place,
    "trained parameter by its data": lambda model: model.fast.weight.data.mul_(0.97).sum(),
}
"""The optimizer moves those between trial run and step."""
OF_THE_RUN: dict[str, Callable[[Any], Any]] = {
    "hparams": lambda model: _add(model.hparams, "n"),
    "hook": lambda model: float(model.slow(torch.ones(1, DIM)).detach().sum()) * 0 + model.calls / 10,
    "learning rate": lambda model: _scale(model.trainer.optimizers[0].param_groups[0], "lr", 0.9),
    "schedule": lambda model: _scale(vars(model.lr_schedulers()), "gamma", 0.99),
    "logger": _log,
    "end of training": _stop_late,
}


class Stateful(modules.Schedules, modules.Computes):
    """Uses states before it looks up; ids and loss depend on them."""

    calls = 0

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.states = names, [STATES[name][0]() for name in names if name in STATES]
        self.slow, self.fast = (nn.Linear(DIM, 1, bias=False) for _ in range(2))
        self.slow.requires_grad_(False)
        self.save_hyperparameters({"n": 0})
        self.used: list[float] = []
        self.slow.register_forward_pre_hook(lambda *_: setattr(self, "calls", self.calls + 1))

    def ids(self, batch: Batch) -> Tensor:
        return (super().ids(batch) + int(self.used[-1] * 8)) % 13

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        uses = PARAMETERS | OF_THE_RUN
        states = iter(self.states)
        found = [STATES[name][1](next(states)) if name in STATES else uses[name](self) for name in self.names]
        self.used.append(float(sum(map(float, found))))
        return super().training_step(batch, batch_idx) * (1 + self.used[-1] ** 2) + 0.1 * self.fast.weight.square().sum()

    def on_train_end(self) -> None:
        super().on_train_end()
        assert len(set(self.used)) > 2, "the state moves, or equality means nothing"
        assert len(self.logger.of("x")) == 2 * self.global_step * ("logger" in self.names)
        assert self.global_step == (STEPS + 3 if "end of training" in self.names else STEPS * EPOCHS)


def _case(*names: str, **expected: Any) -> Case:
    def make() -> Stateful:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        Shared.count = 0
        Shared.rows.clear()
        return Stateful(*names)

    return Case(make, lambda: changed_loader(STEPS, as_tensors), {"logger": lambda: [Kept()]}, **expected)


def test_a_fit_with_trial_runs_is_exact() -> None:
    cases = {name: _case(name) for name in (*PARAMETERS, "end of training")}
    cases |= {name: _case(name, ahead=KNOWN) for name in OF_THE_RUN if name != "end of training"}
    cases["all"] = _case(*STATES, *(name for name in OF_THE_RUN if name != "end of training"), ahead=KNOWN)
    assert compared(2, cases, PLAIN, {"lookahead": "trial_run", "dedup": False}) == []


def test_every_rank_refuses_a_trial_run_that_cannot_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATES, "iterator", (lambda: iter([0.1] * 99), next))
    parts = ("lookahead='trial_run'", "self.states[1], of type list_iterator", "ids_of=", "embedding_ids(batch)")
    assert not_refused(2, {"iterator": _case("sampler", "iterator", error=parts)}, {"lookahead": "trial_run"}) == []
