"""A delay that is put in comes back in the part where it belongs, by whatever way the ranks talk to each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_freescale.profiling import Timeline, collectives_on
from lightning_freescale.profiling.analysis.breakdown import column
from lightning_freescale.profiling.reporting.report import BubbleReport
from lightning_freescale.testing import run_distributed
from tests.helpers.plain_modules import Plain, fit, named, profiler

DELAY = 0.2


def _medians(report: BubbleReport, name: str) -> list[float]:
    return np.median(column(report.breakdown, name), axis=0).tolist()


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
    """The ranks talk in every step, after ``seconds`` of forward, twice as many on rank 1."""

    def __init__(self, talk: Callable[[], None]) -> None:
        super().__init__(DELAY)
        self.talk = talk

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self.seconds * (1 + self.global_rank))
        self.talk()
        return self.layer(batch).square().mean()


def _talking(folder: str, talk: Callable[[], None]) -> BubbleReport | None:
    callback = profiler(folder)
    fit(Talking(talk), [callback], steps=10)
    return callback.report


@pytest.mark.parametrize(
    ("talk", "name"),
    [
        (_messages, "recv"),
        (_batch_of_messages, "recv"),
        (_coalesced, "all_reduce (coalesced)"),
        (_functional, "all_reduce"),
    ],
    ids=["messages", "batch of messages", "coalesced", "functional"],
)
def test_a_late_rank_is_waited_for(talk: Callable[[], None], name: str, tmp_path: Path) -> None:
    report, _ = run_distributed(_talking, 2, str(tmp_path), talk)
    waits, transfers = _medians(report, "straggler_wait"), _medians(report, "transfer")
    assert 0.8 * DELAY < waits[0] < 1.5 * DELAY and waits[1] < 0.3 * DELAY
    assert max(transfers) < 0.3 * DELAY
    assert _medians(report, "compute") == pytest.approx([DELAY, 2 * DELAY], rel=0.3), "the wait is no compute"
    seen = named(report, name)
    both = seen.straggler_wait + (named(report, "send").straggler_wait if name == "recv" else 0.0)
    assert both == pytest.approx(DELAY / 2, rel=0.4), "mean over the two ranks"
    balanced = next(case.speed_up for case in report.what_if if case.name == "perfect balance")
    assert balanced == pytest.approx(2 / 1.5, rel=0.1), "the replay knows who waited for whom"


_KEPT: list[dist.Work | None] = []


class Unanswered(Plain):
    """Rank 1 sends late, and never asks whether what it sent has arrived."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank:
            time.sleep(DELAY)
            _KEPT.append(dist.isend(torch.ones(4), 0))
        else:
            dist.recv(torch.zeros(4), 1)
        return self.layer(batch).square().mean()


def _unanswered(folder: str) -> BubbleReport | None:
    callback = profiler(folder)
    fit(Unanswered(), [callback], steps=8)
    return callback.report


def test_a_message_that_one_end_never_waits_for_is_transfer(tmp_path: Path) -> None:
    report, _ = run_distributed(_unanswered, 2, str(tmp_path))
    assert 0.8 * DELAY < _medians(report, "transfer")[0] < 1.5 * DELAY
    assert _medians(report, "straggler_wait")[0] < 0.3 * DELAY


# -- DDP


class SlowBackward(torch.autograd.Function):
    """Takes ``DELAY`` on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(DELAY)
        return gradient


class SlowInBackward(Plain):
    """Backward of the last layer, whose gradients DDP can exchange meanwhile, then a pause, then that of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.last(SlowBackward.apply(self.layer(batch))).square().mean()


def _hiding(folder: str) -> BubbleReport | None:
    callback = profiler(folder)
    fit(SlowInBackward(), [callback], steps=8, strategy=DDPStrategy(bucket_cap_mb=1e-5))
    return callback.report


def test_what_ddp_hides_behind_backward_is_told_as_a_bound(tmp_path: Path) -> None:
    report, _ = run_distributed(_hiding, 2, str(tmp_path))
    behind = named(report, "dense gradients (behind backward, at most)")
    assert behind.per_step > 0.8, "in all steps but the first"
    assert 0.8 * DELAY < behind.hidden / behind.per_step < 1.3 * DELAY
    assert behind.moved == int((4 + 16 + 16) * behind.per_step), "all but the weight of the first layer"
    assert behind.transfer == behind.straggler_wait == 0
    assert min(_medians(report, "backward")) > 0.8 * DELAY
    assert max(_medians(report, "hidden")) < 0.3 * DELAY, "a bound is no measurement"


# -- FSDP2


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


def _sharded(folder: str, profiled: bool) -> tuple[BubbleReport | None, list[Tensor]]:
    L.seed_everything(0)
    callback, module = profiler(folder), Sharded(DELAY if profiled else 0.0)
    fit(
        module,
        [callback] if profiled else [],
        steps=10,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    )
    return callback.report, [parameter.full_tensor().detach() for parameter in module.parameters()]


def test_fully_sharded_data_parallel(tmp_path: Path) -> None:
    (report, watched), _ = run_distributed(_sharded, 2, str(tmp_path), True)
    waits = _medians(report, "straggler_wait")
    assert 0.8 * DELAY < waits[0] < 1.5 * DELAY and waits[1] < 0.3 * DELAY
    assert named(report, "all_gather_single").per_step >= 2, "forward"
    assert named(report, "reduce_scatter_single").per_step == pytest.approx(2, abs=0.5)
    assert column(report.breakdown, "unexplained").max() < 1e-6
    _, alone = run_distributed(_sharded, 2, str(tmp_path), False)[0]
    assert all(torch.equal(one, other) for one, other in zip(watched, alone, strict=True))


class Split(Sharded):
    """Its layers are split over the ranks, which all have the same samples; torch's DTensor talks for them."""

    def configure_model(self) -> None:
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(self.layer, self.device_mesh["tensor_parallel"], plan)


def _split(folder: str) -> BubbleReport | None:
    callback = profiler(folder)
    fit(Split(DELAY), [callback], steps=8, strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2))
    return callback.report


def test_tensor_parallel(tmp_path: Path) -> None:
    report, _ = run_distributed(_split, 2, str(tmp_path))
    waits = _medians(report, "straggler_wait")
    assert 0.8 * DELAY < waits[0] < 1.5 * DELAY and waits[1] < 0.3 * DELAY
    assert named(report, "all_reduce").straggler_wait == pytest.approx(DELAY / 2, rel=0.3)


def _wrapped() -> list[tuple[str, float]]:
    """Lightning's FSDPStrategy refuses CPUs, torch's FullyShardedDataParallel does not."""
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), device_id=torch.device("cpu"))
    timeline = Timeline()
    timeline.enable(torch.device("cpu"))
    with collectives_on(timeline):
        for _ in range(2):
            dist.barrier()
            timeline.open_step()
            time.sleep(DELAY * dist.get_rank())
            model(torch.randn(2, 4)).sum().backward()
            record = timeline.close_step()
    assert record is not None
    return [(collective.name, collective.end - collective.start) for collective in record.collectives]


@pytest.mark.filterwarnings("ignore")
def test_the_first_fsdp() -> None:
    early, late = run_distributed(_wrapped, 2)
    assert [name for name, _ in early] == [name for name, _ in late]
    assert any(name.startswith("all_gather") for name, _ in early)
    assert any(name.startswith("reduce_scatter") for name, _ in early)
    assert early[0][1] > 0.8 * DELAY > 0.4 * DELAY > late[0][1]


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


def _resumed(folder: str, at: int) -> tuple[BubbleReport | None, BubbleReport | None]:
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=at, save_top_k=-1)
    first, second = (profiler(Path(folder, name), warmup_steps=0) for name in ("first", "second"))
    fit(Uneventful(), [first, saving, SlowToSave()], steps=9, enable_checkpointing=True, limit_val_batches=0)
    options = {"steps": 9, "limit_val_batches": 0, "max_epochs": 2 if at == 9 else 1}
    trainer = fit_from(Uneventful(), [second], str(Path(folder, f"step={at}.ckpt")), **options)
    assert trainer.global_step == 9 * options["max_epochs"]
    return first.report, second.report


def fit_from(module: L.LightningModule, callbacks: list[L.Callback], checkpoint: str, **options: Any) -> L.Trainer:
    """Go on where a checkpoint was saved."""
    return fit(module, callbacks, ckpt_path=checkpoint, **options)


@pytest.mark.parametrize("at", [3, 9], ids=["inside an epoch", "at its end"])
def test_a_resumed_run_has_all_of_its_steps_and_no_spike(at: int, tmp_path: Path) -> None:
    first, second = run_distributed(_resumed, 2, str(tmp_path), at)[0]
    assert list(first.steps) == list(range(9)), "saving is no step"
    walls = column(first.breakdown, "wall")
    assert walls.max() < 2 * DELAY, "nor part of one"
    left = 9 if at == 9 else 9 - at
    assert list(second.steps) == list(range(left)), "the first step after the resume is there"
    assert (second.samples == 2).all()
    for name in ("wall", "data_wait", "host_overhead", "straggler_wait"):
        assert column(second.breakdown, name).max() < 2 * DELAY, name
    assert column(second.breakdown, "data_wait").max() < DELAY / 2
    assert column(second.breakdown, "unexplained").max() < 1e-6


def _warmed_up(folder: str) -> int:
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    fit(Plain(), [saving], steps=9, enable_checkpointing=True, limit_val_batches=0)
    again = profiler(Path(folder, "again"), warmup_steps=2)
    fit_from(Plain(), [again], str(Path(folder, "step=3.ckpt")), steps=9, limit_val_batches=0)
    return 0 if again.report is None else int(again.report.steps[0])


def test_warm_up_counts_from_the_resume(tmp_path: Path) -> None:
    assert run_distributed(_warmed_up, 2, str(tmp_path))[0] == 2
