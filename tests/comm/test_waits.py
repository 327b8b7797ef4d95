"""A rank that waits for others when the default process group is created prints which ranks are missing."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.comm import waits
from lightning_freescale.testing import run_distributed
from tests.helpers.fake_gpu import on_ranks
from tests.helpers.recommender import Recommender, fixed_loader, trainer


def test_an_error_of_a_creation_is_no_timeout_of_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    def create() -> None:
        raise TimeoutError("no address")

    monkeypatch.setattr(waits, "WAITING", [SimpleNamespace(another_failed=lambda: False)])
    assert [str(error) for error in on_ranks(1, lambda rank: waits.until_another_fails(create), timeout=5)] == ["no address"]


def _lines(printed: str) -> list[tuple[str, str]]:
    """Return the printing rank and the missing ranks of each line."""
    return re.findall(r"rank (\d) still waits for ranks \[(.*)\] of 3 at 127.0.0.1:\d+\. Start", printed)


def _fit(folder: Path, late: int, comes: bool, printing: list[int]) -> str:
    """Fit on a node for each rank while ``late`` starts after a line is printed, or not at all; return this rank's output."""
    rank, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.update(GROUP_RANK=f"{rank}", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    waits.FIRST_REPORT, waits.NEXT_REPORT = 0.4, 0.7
    if rank == late and not comes:
        return ""
    begun = time.monotonic()
    while rank == late and any((f"{each}", f"{late}") not in _lines((folder / f"{each}").read_text()) for each in printing):
        assert time.monotonic() - begun < 30, "the others have not named this rank"
        time.sleep(0.1)
    options: dict[str, Any] = {} if comes else {"timeout": timedelta(seconds=2)}
    error = ""
    with (folder / f"{rank}").open("w") as printed, redirect_stderr(printed):
        try:
            fit = trainer(devices=1, num_nodes=nodes, strategy=FreeScaleStrategy(**options))
            fit.fit(Recommender(), fixed_loader(rank, 1))
        except RuntimeError as given_up:
            error = str(given_up)
    return (folder / f"{rank}").read_text() + error


@pytest.mark.parametrize(
    ("late", "comes", "printing"),
    [
        (2, True, [0]),
        pytest.param(0, True, [1, 2], marks=pytest.mark.slow),
        pytest.param(2, False, [0], marks=pytest.mark.slow),
    ],
)
def test_missing_ranks_are_named(late: int, comes: bool, printing: list[int], tmp_path: Path) -> None:
    for rank in printing:
        (tmp_path / f"{rank}").touch()
    printed = run_distributed(_fit, 3, tmp_path, late, comes, printing, init=False)
    for rank, text in enumerate(printed):
        assert (_lines(text)[-1:] == [(f"{rank}", f"{late}")]) == (rank in printing), text
    assert ("Timed out after 3 seconds waiting for clients. 2/3 clients joined" in printed[0]) == (not comes)


RESTARTED = """
import os, sys, time
from lightning_freescale.comm import waits
from tests.helpers.recommender import Recommender, fixed_loader, trainer

rank, attempt, late = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(sys.argv[1])
if attempt == 1 and rank != late:
    waits.FIRST_REPORT, waits.NEXT_REPORT = 4.0, 60.0  # the starts of ranks may be seconds apart
if (rank == late) == (attempt == 1):  # at first, the others are late
    time.sleep(8)
trainer(devices=3).fit(Recommender(), fixed_loader(rank, 3))
sys.exit(attempt == 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("late", "printing"), [(2, 0), (0, 1)])
def test_missing_ranks_are_named_after_a_restart(late: int, printing: int, tmp_path: Path) -> None:
    """Check that torchrun's store, which outlives an attempt, hides no rank, and that polling it prints no warnings."""
    (tmp_path / "restarted.py").write_text(RESTARTED)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run = ["torch.distributed.run", f"--master-port={port}", "--nproc-per-node=3", "--max-restarts=1"]
    command = [sys.executable, "-m", *run, f"{tmp_path / 'restarted.py'}", f"{late}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=Path(__file__).parents[2])
    assert {*re.findall(r"rank (\d) still waits for ranks \[(.*)\] of 3", done.stderr)} == {(f"{printing}", f"{late}")}
    assert "TCPStore" not in done.stderr and "wait timeout" not in done.stderr
