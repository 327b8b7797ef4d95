"""A delay that is put in comes back in the part where it belongs, by whatever way the ranks talk to each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_freescale.profiling.analysis.breakdown import column
from lightning_freescale.profiling.reporting.report import BubbleReport
from lightning_freescale.testing import run_distributed
from tests.helpers.plain_modules import DELAY, Plain, delayed, fit, medians, named, profiled, profiler

pytestmark = pytest.mark.xdist_group("timing")

# -- who waits for whom


def _messages() -> None:
    if dist.get_rank():
        dist.send(torch.ones(4), 0)
    else:
        dist.recv(torch.zeros(4), 1)


def _batch_of_messages() -> None:
    peer = 1 - dist.get_rank()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(4), peer), dist.P2POp(dist.irecv, torch.zeros(4), peer)])
    for work in works:
        work.wait()


def _coalesced() -> None:
    with dist._coalescing_manager():
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4))


def _functional() -> None:
    _ = funcol.all_reduce(torch.ones(4), "sum", dist.group.WORLD) + 1


class Talking(Plain):
    """The ranks talk in every step, after one DELAY of forward on rank 0 and two on rank 1."""

    def __init__(self, talk: Callable[[], None]) -> None:
        super().__init__()
        self.talk = talk

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(DELAY * (1 + self.global_rank))
        self.talk()
        return self.layer(batch).square().mean()


TALKS = {  # and the exchange as which it is seen
    _messages: "recv",
    _batch_of_messages: "recv",
    _coalesced: "all_reduce (coalesced)",
    _functional: "all_reduce",
}


def test_a_late_rank_is_waited_for(tmp_path: Path) -> None:
    def run() -> dict[Any, BubbleReport]:
        return {talk: profiled(tmp_path / talk.__name__, Talking(talk), steps=8) for talk in TALKS}

    reports = run_distributed(run, 2)[0]
    wrong = {}
    for talk, report in reports.items():
        name = talk.__name__
        wrong[name] = delayed(report, straggler_wait=(1, 0), transfer=(0, 0))
        assert medians(report, "compute") == pytest.approx([DELAY, 2 * DELAY], rel=0.3), f"{name}: the wait is no compute"
        waited = named(report, TALKS[talk]).straggler_wait
        waited += named(report, "send").straggler_wait if TALKS[talk] == "recv" else 0.0
        assert waited == pytest.approx(DELAY / 2, rel=0.4), f"{name}: the mean over the two ranks"
        balanced = next(case.speed_up for case in report.what_if if case.name == "perfect balance")
        assert balanced == pytest.approx(2 / 1.5, rel=0.1), f"{name}: the replay knows who waited for whom"
    assert not any(wrong.values()), wrong


# -- strategies


class Sharded(Plain):
    """Two layers, each sharded."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(seconds)
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layer:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.layer, mesh=mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank == 1:
            time.sleep(self.seconds)
        return self.layer(batch).square().mean()


def _sharded(folder: Path, seconds: float | None) -> tuple[BubbleReport | None, list[Tensor]]:
    L.seed_everything(0)
    module, callback = Sharded(seconds or 0.0), profiler(folder)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    fit(module, [] if seconds is None else [callback], steps=8, strategy=strategy)
    return callback.report, [parameter.full_tensor().detach() for parameter in module.parameters()]


def test_sharded_layers(tmp_path: Path) -> None:
    (report, watched), (_, alone) = run_distributed(lambda: (_sharded(tmp_path, DELAY), _sharded(tmp_path, None)), 2)[0]
    assert delayed(report, straggler_wait=(1, 0)) == []
    assert named(report, "all_gather_single").per_step >= 2, "forward"
    assert named(report, "reduce_scatter_single").per_step == pytest.approx(2, abs=0.5)
    assert column(report.breakdown, "unexplained").max() < 1e-6
    assert all(torch.equal(one, other) for one, other in zip(watched, alone, strict=True)), "watching changes no number"


# -- resuming, saving


class Uneventful(Plain):
    """A step takes ``DELAY`` / 4; every start of the training takes three ``DELAY``."""

    def on_train_start(self) -> None:
        time.sleep(3 * DELAY)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(DELAY / 4)
        return self.layer(batch).square().mean()


class SlowToSave(L.Callback):
    """A checkpoint takes three ``DELAY``."""

    def on_save_checkpoint(self, trainer: L.Trainer, module: Any, checkpoint: Any) -> None:
        time.sleep(3 * DELAY)


def test_a_resumed_run_has_all_of_its_steps_and_no_spike(tmp_path: Path) -> None:
    """Inside an epoch, at its end, and with warm-up steps, which count from the resume."""
    options: dict[str, Any] = {"steps": 9, "limit_val_batches": 0}

    def resumed(at: int, warmup: int) -> BubbleReport:
        second, folder = profiler(tmp_path / f"{at} {warmup}", warmup_steps=warmup), tmp_path / f"step={at}.ckpt"
        fit(Uneventful(), [second], max_epochs=2 if at == 9 else 1, ckpt_path=str(folder), **options)
        return second.report

    def run() -> Any:
        saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
        first = profiler(tmp_path / "first", warmup_steps=0)
        fit(Uneventful(), [first, saving, SlowToSave()], enable_checkpointing=True, **options)
        return first.report, {at: resumed(at, 0) for at in (3, 9)}, resumed(3, 2)

    first, reports, warmed_up = run_distributed(run, 2)[0]
    assert list(first.steps) == list(range(9)), "saving is no step"
    assert column(first.breakdown, "wall").max() < 2 * DELAY, "nor part of one"
    for at, report in reports.items():
        assert list(report.steps) == list(range(9 if at == 9 else 9 - at)), "the first step after the resume is there"
        assert (report.samples == 2).all()
        for name in ("wall", "host_overhead", "straggler_wait"):
            assert column(report.breakdown, name).max() < 2 * DELAY, (at, name)
        assert column(report.breakdown, "data_wait").max() < DELAY / 2, at
        assert column(report.breakdown, "unexplained").max() < 1e-6, at
    assert list(warmed_up.steps) == list(range(2, 6))
