"""Jobs that write the same checkpoint at the same time, and the partial files of jobs that have ended."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing as mp
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_freescale._runtime.object_gather import gather_objects
from lightning_freescale.checkpoint import partial_files
from lightning_freescale.checkpoint.conversion import opened, read, read_checkpoint, write_file, write_folder
from lightning_freescale.checkpoint.sharded_folder import materialized
from lightning_freescale.testing import run_distributed
from tests.checkpoint.fits import Large, fit

WRITERS = {"single": write_file, "sharded": write_folder}
DAY = 24 * 3600


def _checkpoint(job: int) -> dict[str, Any]:
    """Return a checkpoint whose values are all ``job``, with two tables in separate files or records."""
    tables = {name: torch.full((20_000, 16), float(job)) for name in ("items", "users")}
    state = {**tables, "net": torch.full((8, 8), float(job))}
    return {"state_dict": state, "global_step": job, "pytorch-lightning_version": "2.6"}


def _job_of(path: Path) -> int:
    """Return the job that wrote a checkpoint, after a check that all its values are of this job."""
    return _only_value(read_checkpoint(path))


def _only_value(checkpoint: dict[str, Any]) -> int:
    found = materialized(checkpoint)
    values = {float(value) for tensor in found["state_dict"].values() for value in tensor.unique()}
    assert values == {float(found.get("value", found["global_step"]))}
    return int(values.pop())


def _write(kind: str, job: int, path: Path) -> None:
    WRITERS[kind](_checkpoint(job), path)


def _write_and_stop(kind: str, job: int, path: Path, stop_at: int) -> None:
    """Write, but stop this process before it waits for the disk for the ``stop_at``-th time."""
    fsync, calls = os.fsync, iter(range(1, 100))

    def stop(file: int) -> None:
        if next(calls) == stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        fsync(file)

    os.fsync = stop
    _write(kind, job, path)


class Job:
    """A process that stops inside a write."""

    def __init__(self, *arguments: Any) -> None:
        self.process = mp.get_context("fork").Process(target=_write_and_stop, args=arguments)
        self.process.start()
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "the process has ended before it was stopped"

    def end(self, signalled: signal.Signals) -> int:
        os.kill(self.process.pid, signalled)
        self.process.join(60)
        return self.process.exitcode


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("stop_at", [1, 2])
@pytest.mark.parametrize(("first", "second"), [("single", "single"), ("sharded", "sharded"), ("single", "sharded")])
def test_each_of_two_jobs_replaces_the_checkpoint_as_a_whole(first: str, second: str, stop_at: int, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    _write(second, 3, path)
    stopped = Job(first, 1, path, stop_at)
    assert _job_of(path) == 3 or (first, stop_at) == ("single", 2), "the earlier checkpoint stays until another is complete"
    _write(second, 2, path)
    assert _job_of(path) == 2
    assert stopped.end(signal.SIGCONT) == 0
    assert _job_of(path) == (2 if (first, stop_at) == ("single", 2) else 1)
    assert _names(tmp_path) == ["last.ckpt"]


def _as_of_another_machine(path: Path) -> Path:
    """Rename a partial file or folder like one of another machine."""
    return path.rename(path.with_name(f".freescale-0123abcd-{path.name.rpartition('-')[2]}"))


@pytest.mark.parametrize("kind", WRITERS)
def test_the_next_save_removes_what_a_dead_job_has_left_and_nothing_else(kind: str, tmp_path: Path) -> None:
    """Check files of a live job, and those of another machine, which are kept for a day."""
    others = [".freescale-of-the-user.part", ".last.ckpt.part", ".hidden.ckpt"]
    for name in others:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1e9, 1e9))
    dead, alive = (Job(kind, job, tmp_path / f"{job}.ckpt", 1) for job in (1, 2))
    dead.end(signal.SIGKILL)
    left = {*_names(tmp_path)}
    _write(kind, 3, tmp_path / "3.ckpt")
    kept = {*_names(tmp_path)} - {*others, "3.ckpt"}
    assert kept < left and len(kept) == len(left - {*others}) / 2
    assert alive.end(signal.SIGCONT) == 0
    assert _names(tmp_path) == sorted([*others, "2.ckpt", "3.ckpt"])

    elsewhere = Job(kind, 1, tmp_path / "1.ckpt", 1)
    elsewhere.end(signal.SIGKILL)
    partial = [_as_of_another_machine(path) for path in tmp_path.glob(".freescale-*-*.*") if path.name not in others]
    _write(kind, 4, tmp_path / "4.ckpt")
    assert partial and all(path.exists() for path in partial)
    for path in [each for top in partial for each in (top, *top.glob("*"))]:
        age(path, DAY + 600)
    _write(kind, 4, tmp_path / "4.ckpt")
    assert not any(path.exists() for path in partial)
    assert _names(tmp_path) == sorted([*others, "2.ckpt", "3.ckpt", "4.ckpt"])


def _claim_often(path: Path, times: int) -> None:
    for _ in range(times):
        with partial_files.claimed(path) as beside:
            assert beside.exists()


def test_a_save_keeps_its_file_if_another_finds_it_before_its_lock(tmp_path: Path) -> None:
    jobs = [mp.get_context("fork").Process(target=_claim_often, args=(tmp_path / "a.ckpt", 100)) for _ in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0] * 3 and _names(tmp_path) == []


def test_files_stay_while_a_job_without_locks_writes_or_a_folder_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", _without_locks)
        claimed = partial_files.claimed(tmp_path / "a.ckpt")
        beside = claimed.__enter__()
    _write("single", 1, tmp_path / "b.ckpt")
    assert beside.exists()
    partial_files.folder_of(beside).mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        claimed.__exit__(None, None, None)
    assert len(_names(tmp_path)) == 3, "without the file, no save removes the folder"
    for path in (beside, partial_files.folder_of(beside)):
        age(path, DAY + 600)
    _write("single", 1, tmp_path / "b.ckpt")
    assert _names(tmp_path) == ["b.ckpt"]


def _without_locks(*_: Any) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def age(path: Path, seconds: float) -> None:
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


# -- rounds of two writers, beside two ranks that read


def _write_in_rounds(kind: str, job: int, path: Path, rounds: int, begin: Any) -> None:
    draw = random.Random(job)
    for _ in range(rounds):
        begin.wait(60)
        time.sleep(draw.random() * 0.05)
        _write(kind, job * 1000, path)


class FillsAndSaves(L.Callback):
    """A callback that sets all weights to a number of this job and step, and saves, at the same time as another job."""

    def __init__(self, job: int, path: Path, begin: Any) -> None:
        self.job, self.path, self.begin = job, path, begin

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.is_global_zero:
            self.begin.wait(60)
        trainer.strategy.drain()  # the rest of the update of this step
        for weight in trainer.strategy._own_parameters().values():
            weight.data.fill_(self._value(trainer))
        trainer.save_checkpoint(self.path)

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["value"] = self._value(trainer)

    def _value(self, trainer: L.Trainer) -> int:
        return self.job * 1000 + trainer.global_step


def _train(kind: str, saving: FillsAndSaves, rounds: int) -> None:
    fit(Large, strategy={"checkpoint": kind, "overlap": False}, callbacks=[saving], max_steps=rounds, max_epochs=-1)


def _train_in_rounds(kind: str, job: int, path: Path, rounds: int, begin: Any) -> None:
    run_distributed(_train, 2, kind, FillsAndSaves(job, path, begin), rounds, timeout=500)


def _until_ended(write: Callable[..., None], kind: str, job: int, path: Path, *arguments: Any) -> None:
    try:
        write(kind, job, path, *arguments)
    finally:
        (path.parent / f"ended{job}").touch()


def _read_meanwhile(path: Path) -> Counter[int]:
    """Return how often the ranks have read the checkpoint of each job. All ranks must read the same one."""
    found: Counter[int] = Counter()
    while not all(gather_objects((path.parent / f"ended{job}").exists()) == [True] * 2 for job in (1, 2)):
        values = gather_objects(_only_value(read(opened(path, together=True), True)))
        assert len({*values}) == 1, f"the ranks have read different checkpoints: {values}"
        found[values[0] // 1000] += 1
    return found


ROUNDS = [
    ("single", 20, _write_in_rounds),
    ("sharded", 20, _write_in_rounds),
    ("single", 10, _train_in_rounds),
    ("sharded", 10, _train_in_rounds),
    ("async", 10, _train_in_rounds),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rounds", "write"), ROUNDS)
def test_every_reader_gets_one_whole_checkpoint(kind: str, rounds: int, write: Callable[..., None], tmp_path: Path) -> None:
    path, context = tmp_path / "last.ckpt", mp.get_context("fork")
    _write("single" if kind == "single" else "sharded", 3000, path)
    begin = context.Barrier(2)
    jobs = [context.Process(target=_until_ended, args=(write, kind, job, path, rounds, begin)) for job in (1, 2)]
    for job in jobs:
        job.start()
    found = run_distributed(_read_meanwhile, 2, path, timeout=500)[0]
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0, 0]
    assert _only_value(read_checkpoint(path)) // 1000 in (1, 2) and sum(found.values()) > 1
    assert _names(tmp_path) == ["ended1", "ended2", "last.ckpt"]
