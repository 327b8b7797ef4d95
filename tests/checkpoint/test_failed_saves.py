"""Saves that fail: all ranks end soon, their errors name rank, path and cause, and the previous checkpoint stays."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem

from lightning_freescale.checkpoint import conversion, partial_files, single_file
from lightning_freescale.testing import RankFailed, run_distributed
from tests.checkpoint.fits import Large, fit


class Larger(Large):
    """A model whose first table has 19 MB. Some ranks may have too little memory after the callbacks have seen a checkpoint."""

    def __init__(self) -> None:
        super().__init__(600_000)
        self.poor: tuple[int, ...] = ()
        self.held: list[torch.Tensor] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank in self.poor:
            pages = _pages()
            while pages == _pages():  # until no freed memory is left that a message would fit into
                self.held.append(torch.empty(9_000_000, dtype=torch.uint8))
            ctypes.CDLL(None).malloc_trim(0)  # the free end of the heap would be a part of the message's memory
            used = _pages() * resource.getpagesize() + (8 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))


def _pages() -> int:
    """Return the size of the process's memory, which also counts what it has freed but not returned."""
    return int(Path("/proc/self/statm").read_text().split()[0])


@contextmanager
def _limited(case: str, module: Larger) -> Iterator[None]:
    """Limit the memory, or the size of files, of the rank that the case ends with."""
    kind, *ranks = case.split()
    try:
        if kind == "memory":
            module.poor = (int(ranks[0]),)
        if kind == "size" and int(ranks[0]) == module.global_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        yield
    finally:
        module.poor, module.held = (), []
        for limit in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
            resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class SavesInVain(L.Callback):
    """A callback that saves once without a failure, and once in each case, and records the errors."""

    def __init__(self, cases: dict[str, Path]) -> None:
        self.left = list(cases.items())
        self.errors: dict[str, str] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.left[0][1])
            trainer.strategy.files.finish()
        elif self.left:
            case, path = self.left.pop(0)
            with _limited(case, module):
                try:
                    trainer.save_checkpoint(path)
                    trainer.strategy.files.finish()
                except RuntimeError as error:
                    self.errors[case] = str(error)


def _save_in_vain(kind: str, cases: dict[str, Path]) -> dict[str, str]:
    saves = SavesInVain(cases)
    fit(Larger, strategy={"checkpoint": kind}, callbacks=[saves])
    assert saves.errors.keys() == cases.keys()
    return saves.errors


def _save_all_in_vain(folder: Path, kinds: tuple[str, ...]) -> dict[str, dict[str, str]]:
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: large blocks are returned when they are freed
    path, below = (lambda kind: folder / f"{kind}.ckpt"), folder / "a file" / "a.ckpt"
    cases = {
        "single": ["memory 0", "memory 1", "size 0", "below"],
        "sharded": ["size 0", "size 1", "below"],
        "async": ["size 1", "below"],
    }
    return {
        kind: _save_in_vain(kind, {case: below if case == "below" else path(kind) for case in cases[kind]}) for kind in kinds
    }


CAUSES = {"memory": "can't allocate memory", "size": "[Errno 27] File too large", "below": "[Errno 17] File exists"}


@pytest.mark.parametrize("kinds", [("single", "async"), pytest.param(("sharded",), marks=pytest.mark.slow)])
def test_all_ranks_name_path_rank_and_cause_in_the_last_line(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Check that the ranks go on together after each error."""
    (tmp_path / "a file").touch()
    for found in run_distributed(_save_all_in_vain, 2, tmp_path, kinds):
        for kind, errors in found.items():
            for case, error in errors.items():
                cause, rank = case.split()[0], case.split()[1:] or ["0"]
                path = tmp_path / ("a file/a.ckpt" if cause == "below" else f"{kind}.ckpt")
                last = error.splitlines()[-1]
                assert last.startswith(f"the checkpoint {path} could not be written: rank {rank[0]}: "), (kind, case, error)
                assert CAUSES[cause] in last, (kind, case, error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a file", *sorted(f"{kind}.ckpt" for kind in kinds)]
    for kind in kinds:
        conversion.read_checkpoint(tmp_path / f"{kind}.ckpt")


# -- a disk that is full or read-only


def _save_there(folder: Path, kind: str) -> str:
    with pytest.raises(RuntimeError) as raised:
        fit(Large, save=folder / "a.ckpt", strategy={"checkpoint": kind}, max_epochs=1, samples=24)
    return str(raised.value)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a file system of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this user may not mount file systems")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_a_full_disk_and_a_read_only_disk_are_named(kind: str, small_disk: Path) -> None:
    for cause in ("[Errno 28] No space left on device", "[Errno 30] Read-only file system"):
        for error in run_distributed(_save_there, 2, small_disk, kind):
            assert str(small_disk / "a.ckpt") in error and cause in error, error
        assert list(small_disk.iterdir()) == []
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)


# -- Ctrl-C


class Interrupts(Large):
    """A model whose rank ``victim`` gets SIGINT at one place of its second save."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if INTERRUPTED == "hook" and self.global_rank == VICTIM and SAVES:
            os.kill(os.getpid(), signal.SIGINT)


PLACES: dict[str, tuple[Any, str]] = {
    "receive": (dist, "recv"),
    "send": (dist, "send"),
    "write of a part": (single_file._InParts, "write"),
    "write of a file": (partial_files.SummedFile, "write"),
    "replace": (partial_files, "replace_path"),
    "write of a piece": (filesystem, "_write_item"),
}
INTERRUPTED, VICTIM, SAVES = "", 0, 0


def _interrupt(path: Path, kind: str, place: str, victim: int, times: int, inside: bool) -> None:
    global INTERRUPTED, VICTIM, SAVES
    INTERRUPTED, VICTIM = place, victim
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(call: Any, *args: Any, **kwargs: Any) -> Any:
        if SAVES and dist.get_rank() == victim:
            if times == 2:  # the second arrives while the first is handled
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            os.kill(os.getpid(), signal.SIGINT)
        return call(*args, **kwargs)

    if place in PLACES:
        owner, name = PLACES[place]
        call = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: interrupted(call, *args, **kwargs))

    class Saves(L.Callback):
        def save(self, trainer: L.Trainer) -> None:
            global SAVES
            trainer.save_checkpoint(path)
            SAVES += 1

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if inside and trainer.global_step < 3:
                self.save(trainer)

        def on_fit_end(self, trainer: L.Trainer, *args: Any) -> None:
            self.save(trainer)

    fit(Interrupts, strategy={"checkpoint": kind}, callbacks=[Saves()], save=path, max_epochs=1)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("kind", "place", "victim", "times", "inside"),
    [
        ("single", "receive", 0, 1, False),
        ("sharded", "write of a piece", 1, 1, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("single", "hook", 1, 1, True),
                ("single", "send", 1, 1, True),
                ("single", "receive", 0, 2, True),
                ("single", "write of a part", 0, 1, False),
                ("single", "replace", 0, 2, True),
                ("sharded", "write of a file", 0, 1, False),
                ("sharded", "write of a piece", 0, 1, True),
                ("sharded", "replace", 0, 1, False),
            ]
        ),
    ],
)
def test_an_interrupt_ends_all_ranks_and_leaves_the_last_checkpoint(
    kind: str, place: str, victim: int, times: int, inside: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    with pytest.raises(RankFailed) as failed:
        run_distributed(_interrupt, 2, path, kind, place, victim, times, inside, init=False)
    survivor = str(failed.value).partition(f"rank {1 - victim}: Traceback")[2]
    assert survivor, failed.value
    last = survivor.rstrip().splitlines()[-1] if victim == 0 else survivor
    assert f"rank {victim}" in last and "KeyboardInterrupt" in last and str(path) in last, survivor
    conversion.read_checkpoint(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]
