"""Jobs that write the same checkpoint at the same time, and the partial files of jobs that have ended."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_freescale.checkpoint.conversion import read_checkpoint, write_file, write_folder
from lightning_freescale.checkpoint.sharded_folder import materialized

WRITERS = {"single": write_file, "sharded": write_folder}
DAY = 24 * 3600


def _checkpoint(job: int) -> dict[str, Any]:
    """Return a checkpoint whose values are all ``job``, with two tables in separate files or records."""
    tables = {name: torch.full((20_000, 16), float(job)) for name in ("items", "users")}
    return {"state_dict": {**tables, "net": torch.full((8, 8), float(job))}, "global_step": job}


def _job_of(path: Path) -> int:
    """Return the job that wrote a checkpoint, after a check that all its values are of this job."""
    found = materialized(read_checkpoint(path))
    values = {float(value) for tensor in found["state_dict"].values() for value in tensor.unique()}
    assert values == {found["global_step"]}
    return int(found["global_step"])


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
        """Continue or kill the process, and return its exit code."""
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


def age(path: Path, seconds: float) -> None:
    """Make a file look older."""
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))
