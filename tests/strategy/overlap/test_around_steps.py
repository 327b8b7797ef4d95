"""Around a fit's steps: tables that the user's code reads and writes, split backward, and the end of a fit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers import overlap_training as training
from tests.helpers.micro_batch_training import data
from tests.helpers.overlap_modules import TwoCollections, with_tags
from tests.helpers.overlap_training import PLAIN, Case, CountingModel, Run, assert_same, compared, departures, fit, my_loader
from tests.helpers.recommender import trainer

STEPS, SOON = 5, 50.0


class Reads(CountingModel):
    """Keeps this rank's part of every table from the state dict after each step."""

    def __init__(self, write: Callable[[Any], None] = lambda strategy: None, after: int = 0) -> None:
        super().__init__()
        self.write, self.after = write, after
        self.read: list[list[Tensor]] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 0 and batch_idx == self.after:
            self.write(self.trainer.strategy)
        tables = [value for name, value in self.state_dict().items() if "embeddings" in name]
        self.read.append([shard.tensor.clone() for table in tables for shard in table.local_shards()])

    def on_fit_end(self) -> None:
        self.statistics["read"] = self.read


def _halve(strategy: Any) -> None:
    with torch.no_grad():
        for shard in strategy.tables.shards():
            shard.weight.mul_(0.5)


def _announced(strategy: Any) -> None:
    with strategy.writing_tables():
        _halve(strategy)


def _after_a_drain(strategy: Any) -> None:
    strategy.drain()
    _halve(strategy)


def by_hand(make: Callable[[], Any], ahead: Any = None, **rest: Any) -> Case:
    return Case(make, lambda: my_loader(STEPS), ahead=ahead, **rest)


CASES = {
    "reads": by_hand(Reads, (2 * STEPS - 3, 3, 0)),
    # prefetched rows are discarded
    "writes in the middle": by_hand(partial(Reads, _announced, 2), (6, 4, 0)),
    "writes at the end of an epoch": by_hand(partial(Reads, _announced, STEPS - 1), (7, 3, 0)),
}


def _fits(cases: dict[str, Case], seconds: float, at_the_end: float) -> dict[str, list[Run]]:
    plain = LocalRows.update

    def slow(self: LocalRows, rows: Tensor, gradients: Tensor, settings: Any) -> None:
        time.sleep(at_the_end if settings[0].step == 2 * STEPS - 1 else seconds)
        plain(self, rows, gradients, settings)

    LocalRows.update = slow
    return training.fit_all(cases, PLAIN, {"dedup": False})


@pytest.mark.parametrize(
    ("cases", "late"),
    [
        (CASES, (0.0, 0.0)),
        pytest.param({"late for a reader": CASES["reads"]}, (0.05, 0.05), marks=pytest.mark.slow),
        pytest.param({"late for the end of the fit": by_hand(CountingModel)}, (0.0, 2.0), marks=pytest.mark.slow),
    ],
)
def test_what_is_read_and_written(cases: dict[str, Case], late: tuple[float, float]) -> None:
    ranks = run_distributed(_fits, 2, cases, *late)
    assert departures(cases, ranks) == []
    for name, pair in ((name, pair) for runs in ranks for name, pair in runs.items() if cases[name].make is not CountingModel):
        expected, read = (run.statistics["read"] for run in pair)
        assert len(read) == 2 * STEPS and len(read[0]) == 2
        assert not torch.equal(read[0][0], read[1][0]), f"{name}: the tables must move, or equality means nothing"
        assert_same(read, expected)


def test_writing_unannounced_is_an_error() -> None:
    cases = {
        write.__name__: by_hand(partial(Reads, write, 2), error=["RuntimeError", "writing_tables()", "'net.embeddings'"])
        for write in (_halve, _after_a_drain)
    }
    assert training.not_refused(2, cases) == []


class Halves(CountingModel):
    """Compare with "ddp", which has no strategy methods."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and hasattr(self.trainer.strategy, "writing_tables"):
            _announced(self.trainer.strategy)
        elif batch_idx == 2:
            for weight in self.net.embeddings.parameters():
                weight.data.mul_(0.5)


def test_written_between_the_batches_of_one_step() -> None:
    """Check that earlier gradients stay."""
    case = by_hand(partial(Halves, "sgd"), options={"accumulate_grad_batches": 2})
    assert compared(2, {"halves": case}, "ddp", {}, losses=(1e-5, 1e-12), weights=(1e-4, 1e-6), states=(1e-4, 1e-6)) == []


# -- split_backward=True: the rows' gradients are on their way before those of the weights are there

SPLIT = {"split_backward": True}


class NotesOrder(CountingModel):
    """Records for each weight's gradient whether the gradients of rows had been submitted before."""

    def on_fit_start(self) -> None:
        self.handed_over: list[bool] = []
        for layer in (self.net.hidden[0], self.net.hidden[2]):
            layer.weight.register_post_accumulate_grad_hook(self._note)

    def _note(self, weight: Tensor) -> None:
        strategy: Any = self.trainer.strategy
        engine = strategy.engine
        self.handed_over.append(all(each.step.gradient_sent for each in engine.collections.values()))

    def on_fit_end(self) -> None:
        self.statistics["handed over"] = self.handed_over


def split(loader: Any = lambda: my_loader(training.STEPS), **options: Any) -> Case:
    return Case(partial(NotesOrder, "rowwise_adagrad"), loader, {"max_epochs": 1, **options}, notice=None)


SPLIT_CASES = {
    "plain": split(),
    "clipped": split(gradient_clip_val=0.1),
    "windows": split(accumulate_grad_batches=2),
    "bf16-mixed": split(precision="bf16-mixed"),
    "micro-batches": split(lambda: data(2, val_dataset=None)),
}


def test_same_bits_and_rows_first() -> None:
    results = run_distributed(training.fit_all, 2, SPLIT_CASES, {}, SPLIT)
    assert departures(SPLIT_CASES, results) == []
    for runs in results:
        for name, (plain, split) in runs.items():
            before, after = plain.statistics["handed over"], split.statistics["handed over"]
            if name == "micro-batches":  # the weights get their gradients at the end of the step
                assert after == [True] * (len(before) // 2)
            else:
                assert before == [False] * 2 * training.STEPS
                # nothing waits for a batch without an update
                assert after == [number // 2 % 2 == 1 or name != "windows" for number in range(2 * training.STEPS)], name


def test_micro_batches_where_ddp_looks_for_unused_parameters() -> None:
    cases = {"micro-batches": SPLIT_CASES["micro-batches"]}
    results = run_distributed(training.fit_all, 2, cases, *({"find_unused_parameters": True, **way} for way in ({}, SPLIT)))
    assert departures(cases, results) == []
    for runs in results:
        before, after = (run.statistics["handed over"] for run in runs["micro-batches"])
        assert len(after) == len(before) and any(after)


# -- the end: with nothing left behind, or with an error on every rank and no hang


class Normalizes(CountingModel):
    """Has buffers, which DDP copies to all ranks before every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return super().training_step({**batch, "label": self.norm(batch["label"][:, None])[:, 0]}, batch_idx)


class Raises(CountingModel):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise KeyError("the needle")


def _uneven(extra: int, epochs: int, validates: bool, make: type[CountingModel] = CountingModel) -> None:
    steps = 4 + (extra if os.environ["RANK"] == "1" else 0)
    validation = my_loader(2) if validates else None
    fit(make(), my_loader(steps), validation, max_epochs=epochs, num_sanity_val_steps=0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("end", "message"),
    [
        (partial(_uneven, 1, 1, False), r"Ranks \[0\]"),
        (partial(_uneven, 2, 2, True), r"Ranks \[0\]"),
        (partial(_uneven, -1, 1, True), r"Ranks \[1\]"),
        pytest.param(partial(_uneven, 1, 1, False, Normalizes), r"Ranks \[0\]", marks=pytest.mark.slow),
    ],
)
def test_ranks_with_other_numbers_of_steps_end_with_an_error(end: Any, message: str) -> None:
    with pytest.raises(RankFailed, match=message) as failure:
        run_distributed(end, 2, timeout=SOON)
    assert "did not finish" not in str(failure.value)


def _leaves_behind() -> tuple[set[int], list[list[float]]]:
    """Return the number of groups after fits of a module, and the losses of fits after one that raised, equal on all ranks."""
    module, groups, losses = TwoCollections(), set(), []
    for epochs in (1, 2, 1):
        fit(module, training.changed_loader(4, with_tags), my_loader(2), max_epochs=epochs)
        groups.add(len(dist.distributed_c10d._world.pg_map))
        assert training.exchange_threads() == []
    with pytest.raises(KeyError, match="the needle"):
        fit(Raises(), my_loader(8))
    assert training.exchange_threads() == []
    for _ in range(2):
        torch.manual_seed(0)
        losses.append(fit(CountingModel(), my_loader(4)).losses)
    return groups, losses


def test_nothing_is_left_of_a_fit() -> None:
    for groups, (first, second) in run_distributed(_leaves_behind, 2):
        assert len(groups) == 1
        assert first == second and len(first) == 4


class _ReadsInAStep(L.LightningModule):
    """Has no gradient for ``b`` in step 1. In step 2 only rank 0 looks it up, and the other rank is late."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.out = nn.Embedding(40, 8), nn.Embedding(40, 8), nn.Linear(8, 1)
        self.reads = reads

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.reads and batch_idx == 2:
            self.trainer.strategy.full_weight("b")
        hidden = self.a(batch)
        if batch_idx == 0 or (batch_idx == 2 and self.global_rank == 0):
            hidden = hidden + self.b(batch)
        return (self.out(hidden).squeeze(-1) - 1).square().mean()

    def on_before_backward(self, loss: torch.Tensor) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 2:
            time.sleep(0.7)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def _weight_after(reads: bool) -> torch.Tensor:
    module = _ReadsInAStep(reads)
    fitting = trainer(devices=2, strategy=FreeScaleStrategy(shard=["a", "b"]))
    draw = torch.Generator().manual_seed(fitting.global_rank)
    fitting.fit(module, DataLoader([torch.randint(0, 40, (12,), generator=draw) for _ in range(4)], batch_size=None))
    return fitting.strategy.full_weight("b")


def test_reading_a_table_in_a_step_leaves_its_step_count_alone() -> None:
    for usual, read in run_distributed(lambda: (_weight_after(False), _weight_after(True)), 2):
        assert torch.equal(usual, read)
