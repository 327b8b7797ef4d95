"""Fits for the tests of the overlap: the results of a fit, comparisons of fits, and batches of all kinds."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchrec import KeyedJaggedTensor

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import Recommender, StopAt, fixed_loader, trainer

Batch = dict[str, Any]
Counts = tuple[int, int, int]

STEPS, EPOCHS = 6, 2
# lookups that were predicted, not predicted, mispredicted
GIVEN = (STEPS * EPOCHS - EPOCHS, EPOCHS, 0)
"""All lookups but the first of an epoch are predicted: a function returns the ids."""
KNOWN = (STEPS * EPOCHS - EPOCHS - 1, EPOCHS + 1, 0)
"""The second lookup of all is not predicted either: the place of ids has just been learned."""
NEVER = (0, STEPS * EPOCHS, 0)
PLAIN = {"overlap": "torchrec"}
"""The option of the strategy with which TorchRec exchanges rows."""


@dataclass
class Run:
    """The results of a fit; weights and optimizer states are whole, on rank 0."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: list[Any] = field(default_factory=list)
    statistics: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)

    def looked_ahead(self) -> Counts:
        return tuple(
            int(self.statistics[name]) for name in ("predicted_lookups", "unpredicted_lookups", "mispredicted_lookups")
        )


class CountingModel(Recommender):
    def __init__(self, optimizer: str = "adagrad") -> None:
        super().__init__(optimizer)
        self.statistics: dict[str, float] = {}

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, FreeScaleStrategy) and strategy.engine is not None:
            self.statistics = strategy.engine.statistics()


def exchange_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("freescale")]


def fit(module: Any, loader: Any, validation: Any = None, ckpt_path: Any = None, **options: Any) -> Run:
    """Fit on the ranks of ``run_distributed``."""
    fitting = trainer(**{"devices": int(os.environ["WORLD_SIZE"]), **options})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitting.fit(module, loader, validation, ckpt_path=ckpt_path)
    if isinstance(fitting.strategy, FreeScaleStrategy):
        assert fitting.strategy.engine is None, "the engine ends with the fit"
    state = fitting._checkpoint_connector.dump_checkpoint(weights_only=False)
    messages = [str(one.message) for one in caught]
    return Run(module.losses, state["state_dict"], state["optimizer_states"], module.statistics, messages, exchange_threads())


def notices(run: Run) -> list[str]:
    return [text for text in run.warnings if "overlapped" in text]


def my_loader(steps: int) -> DataLoader:
    return fixed_loader(int(os.environ["RANK"]), steps)


# -- comparing fits


@dataclass
class Case:
    """A fit that is made in several ways and compared."""

    make: Callable[[], Any] = CountingModel
    loader: Callable[[], Any] = lambda: my_loader(STEPS)
    options: dict[str, Any] = field(default_factory=dict)  # of the Trainer; functions among them make the value
    overlap: dict[str, Any] = field(default_factory=dict)  # options of FreeScaleStrategy where it overlaps
    validation: Callable[[], Any] | None = None
    ahead: Counts | list[Counts] | None = None  # predicted, not predicted and mispredicted lookups; a list has those by rank
    notice: str | None = ""  # part of the only warning of lookups that are not overlapped; None if there may be any
    error: Sequence[str] = ()  # parts of the error with which the fit ends
    steps: int | None = None  # losses that were computed before that

    def fit(self, way: str | dict[str, Any]) -> Run:
        """Fit on this rank, by the strategy of that name, or by FreeScaleStrategy with these options."""
        overlap = {} if way == PLAIN else self.overlap
        options = {**way, **overlap} if isinstance(way, dict) else {}
        options |= {"plan": options["plan"]()} if "plan" in options else {}
        torch.manual_seed(0)
        strategy = way if isinstance(way, str) else FreeScaleStrategy(**options)
        made = {name: each() if callable(each) else each for name, each in self.options.items()}
        validation = None if self.validation is None else self.validation()
        return fit(self.make(), self.loader(), validation, **{"max_epochs": EPOCHS, "strategy": strategy, **made})


def fit_all(cases: dict[str, Case], *ways: str | dict[str, Any]) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {}
    for name, case in cases.items():
        for way in ways:
            try:
                runs.setdefault(name, []).append(case.fit(way))
            except Exception as error:
                raise RuntimeError(f"case {name!r}, {way}") from error
    return runs


Tolerance = tuple[float, float]
EXACTLY = (0.0, 0.0)


def departures(
    cases: dict[str, Case],
    ranks: list[dict[str, list[Run]]],
    losses: Tolerance = EXACTLY,
    weights: Tolerance = EXACTLY,
    states: Tolerance = EXACTLY,
    moves: float = 1.0,
) -> list[str]:
    """Return in which cases, and in what, a run departs from the first one of its case, or from what the case expects.

    Tolerances are relative and absolute; the largest loss must exceed the smallest ``moves`` times, or equality means nothing.
    """
    found = []
    for name, case in cases.items():
        for rank, (expected, *runs) in enumerate(of_case[name] for of_case in ranks):
            if not max(expected.losses) > moves * min(expected.losses):
                found.append(f"{name}, rank {rank}: the loss does not move")
            ahead = case.ahead[rank] if isinstance(case.ahead, list) else case.ahead
            for way, run in enumerate(runs, 1):
                near = pytest.approx(expected.losses, rel=losses[0], abs=losses[1])
                texts = [] if run.losses == near else [f"losses {run.losses}, not {expected.losses}"]
                if ahead is not None:
                    texts += _differences("lookups", run.looked_ahead(), ahead)
                texts += _differences("threads", run.threads, [])
                if rank == 0:
                    texts += _differences("weights", run.weights, expected.weights, weights)
                    texts += _differences("states", _moved(run), _moved(expected), states)
                found += [f"{name}, way {way}, rank {rank}: {text}" for text in texts]
        for way in range(1, len(ranks[0][name])):
            said = [text for of_case in ranks for text in notices(of_case[name][way])]
            if case.notice is not None and [case.notice in text for text in said] != [True] * bool(case.notice):
                found.append(f"{name}, way {way}: said {said}")
    return found


def _moved(run: Run) -> list[Any]:
    """Return groups, and states of parameters with updates."""
    return [
        [state["param_groups"], {index: each for index, each in state["state"].items() if each and each.get("step", 1)}]
        for state in run.states
    ]


def _differences(what: str, one: Any, other: Any, tolerance: Tolerance = EXACTLY) -> list[str]:
    try:
        assert_same(one, other, rtol=tolerance[0], atol=tolerance[1])
    except AssertionError as error:
        return [f"{what}: {error}"]
    return []


def compared(ranks: int, cases: dict[str, Case], *ways: str | dict[str, Any], **tolerances: Any) -> list[str]:
    """Fit every case in every way on several ranks, and return the :func:`departures` from the first way."""
    return departures(cases, run_distributed(fit_all, ranks, cases, *ways), **tolerances)


def continued(case: Case, file: str, after: int, before: str | dict[str, Any], then: str | dict[str, Any]) -> list[Run]:
    """Return a run in the second way, and one that goes on in it from where one in the first way has stopped."""
    stopping = replace(case, options={**case.options, "callbacks": lambda: [StopAt(after, file)]})
    resuming = replace(case, make=lambda: torch.manual_seed(7) and case.make(), options={**case.options, "ckpt_path": file})
    whole, first, second = case.fit(then), stopping.fit(before), resuming.fit(then)
    assert len(first.losses) == after
    return [whole, replace(second, losses=first.losses + second.losses)]


def errors(cases: dict[str, Case], way: str | dict[str, Any]) -> dict[str, tuple[str, int]]:
    """Return the error of every case, and how many losses were computed before it."""
    found = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        module, text = case.make(), "nothing"
        try:
            replace(case, make=lambda made=module: made).fit(way)
        except Exception as error:
            text = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
        found[name] = (text, len(module.losses))
    return found


def not_refused(ranks: int, cases: dict[str, Case], way: str | dict[str, Any] | None = None) -> list[str]:
    """Return which cases do not end on every rank with the error that they expect."""
    found = []
    for rank, ends in enumerate(run_distributed(errors, ranks, cases, {} if way is None else way)):
        for name, (text, steps) in ends.items():
            case = cases[name]
            if not all(part in text for part in case.error) or case.steps not in (None, steps):
                found.append(f"{name}, rank {rank}, after {steps} steps: {text}")
    return found


def assert_same(one: Any, other: Any, **tolerance: float) -> None:
    """Compare nested tensors; bitwise without a tolerance."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), f"{sorted(one, key=str)}, not {sorted(other, key=str)}"
        for key in one:
            assert_same(one[key], other[key], **tolerance)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), f"{len(one)}, not {len(other)}"
        for pair in zip(one, other):
            assert_same(*pair, **tolerance)
    elif isinstance(one, Tensor):
        torch.testing.assert_close(one, other, **(tolerance or {"rtol": 0, "atol": 0}))
    else:
        assert one == other, f"{one}, not {other}"


# -- batches


def changed_loader(steps: int, change: Any) -> DataLoader:
    """Return this rank's batches, each after ``change``."""
    return DataLoader([change(batch) for batch in my_loader(steps)], batch_size=None)


class Stream(IterableDataset):
    """Return this rank's batches without a length, so Lightning fetches the first one when it creates the loader."""

    def __iter__(self) -> Iterator[Batch]:
        yield from my_loader(STEPS)


class OneBuffer:
    def __init__(self) -> None:
        self.batches = [as_tensors(batch) for batch in my_loader(STEPS)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        ids, label = np.zeros(max(len(batch["ids"]) for batch in self.batches), np.int64), np.zeros(4, np.float32)
        for batch in self.batches:
            count = len(batch["ids"])
            ids[:count], label[:] = batch["ids"], batch["label"]
            yield {**batch, "ids": torch.from_numpy(ids)[:count], "label": torch.from_numpy(label)}


@dataclass
class Record:
    """A batch that is not a dict."""

    features: KeyedJaggedTensor
    label: Tensor


def as_record(batch: Batch) -> Record:
    return Record(batch["features"], batch["label"])


def as_tensors(batch: Batch) -> Batch:
    return {"ids": batch["features"].values(), "lengths": batch["features"].lengths(), "label": batch["label"]}
