"""A run that hangs reports the position of its ranks and then continues undisturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_freescale.profiling import hang_watch
from lightning_freescale.testing import run_distributed
from tests.helpers.plain_modules import Plain, Rows, fit, profiler

STEPS, HANGS_AT = 10, 6


def _until(ready: Callable[[], Any], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until, "no report came"
        time.sleep(0.05)


def _reports(folder: Path) -> list[dict[str, Any]]:
    """Return the reports of the step that hangs. On a busy machine other steps may also exceed the limit."""
    if not (folder / "hang.json").exists():
        return []
    document = json.loads((folder / "hang.json").read_text())
    assert document["format"] == "lightning_freescale hangs" and document["version"] == 1
    return [report for report in document["reports"] if any(rank.get("step") == HANGS_AT for rank in report["ranks"])]


def _waits(folder: Path) -> None:
    """Wait for a report of the hang."""
    _until(lambda: _reports(folder))


def _stops(folder: Path) -> None:
    """Freeze this process until a report has been written."""
    written = f"grep -qs '\"step\": {HANGS_AT}' '{folder}/hang.json'"
    wait = f"for i in $(seq 600); do {written} && break; sleep 0.1; done; kill -CONT {os.getpid()}"
    subprocess.Popen(["bash", "-c", wait])
    os.kill(os.getpid(), signal.SIGSTOP)


def _signals(folder: Path) -> None:
    """Ask rank 0 until it waits in a collective."""
    path = folder / "rank 0 is here"
    _until(lambda: path.exists() and path.read_text())
    reports: list[dict[str, Any]] = []
    while not reports or not reports[-1]["exchanges"]:
        known = len(reports)
        os.kill(int(path.read_text()), signal.SIGUSR2)
        _until(lambda: len(_reports(folder)) > known)  # noqa: B023
        reports = _reports(folder)


class SlowRows(Rows):
    """Data whose samples are late on rank 1 in one row."""

    def __init__(self, count: int, folder: Path) -> None:
        super().__init__(count)
        self.folder, self.read = folder, 0

    def __getitem__(self, index: int) -> Tensor:
        self.read += 1
        if os.environ["RANK"] == "1" and self.read == 2 * HANGS_AT + 1:
            _waits(self.folder)  # the loader hangs here
        return super().__getitem__(index)


class Hanging(Plain):
    """A module with a fault on one rank."""

    def __init__(self, how: Callable[[Path], None] | None, rank: int, folder: Path) -> None:
        super().__init__()
        self.how, self.hanging, self.folder, self.losses = how, rank, folder, []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == HANGS_AT and self.how is not None:
            if self.global_rank == self.hanging:
                self.how(self.folder)  # the step hangs here
            else:
                (self.folder / "rank 0 is here").write_text(str(os.getpid()))
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss


def _no_thread_is_left() -> bool:
    return not [one.name for one in threading.enumerate() if one.name.startswith("freescale")]


def _trained(folder: Path, how: Any = None, rank: int = 1, timeout: float = 1.5) -> tuple[list[float], dict[str, Path]]:
    """Return losses and files. ``how`` is the fault of a rank; ``"loader"`` means late data."""
    hang_watch._FIRST_SECONDS = hang_watch._LEAST_SECONDS = timeout
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    size = int(os.environ["WORLD_SIZE"])
    module, callback = Hanging(None if how == "loader" else how, rank, folder), profiler(folder)
    rows = SlowRows(2 * STEPS * size, folder) if how == "loader" else Rows(2 * STEPS * size)
    fit(module, [callback], devices=size, rows=rows)
    assert _no_thread_is_left() and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    return module.losses, callback.files


HANGS = {
    "calm": (None, 600.0),
    "loader": ("loader", 1.5),
    "forward": (_waits, 1.5),
    "stopped": (_stops, 1.5),
    "asked": (_signals, 600.0),
}


def test_a_late_rank_is_named_and_the_run_goes_on_undisturbed(tmp_path: Path, capfd: Any) -> None:
    def run() -> dict[str, Any]:
        return {name: _trained(tmp_path / name, how, timeout=timeout) for name, (how, timeout) in HANGS.items()}

    ranks = run_distributed(run, 2, init=False)
    assert not (tmp_path / "calm" / "hang.json").exists()
    reports = {name: _reports(tmp_path / name) for name in HANGS if name != "calm"}
    for name in reports:
        assert [rank[name][0] for rank in ranks] == [rank["calm"][0] for rank in ranks], name
        assert ranks[0][name][1]["hang"] == tmp_path / name / "hang.json" and "hang" not in ranks[1][name][1], name
    for name, stage in (("loader", "data wait: fetch"), ("forward", "forward")):
        waits, late = reports[name][0]["ranks"]
        assert waits["step"] == late["step"] == HANGS_AT and len(waits["last_steps_s"]) == 5
        assert waits["exchange"]["group"] == "world" and waits["since_s"] > 0.5
        assert late["exchange"] is None and late["stage"] == stage, name
        assert any(waiting in late["place"] for waiting in ("_until", "_reports")), name  # the former calls the latter
        (exchange,) = reports[name][0]["exchanges"]
        assert exchange.items() >= {"waiting": [0], "missing": [1], "unknown": [], "step": HANGS_AT}.items(), name
    stopped, asked = reports["stopped"][0], reports["asked"][-1]
    assert "kill -CONT" in stopped["ranks"][1]["silent"]
    assert stopped["exchanges"][0]["waiting"] == [0] and stopped["exchanges"][0]["unknown"] == [1]
    # a signal to one rank asks all, also where its main thread waits in a collective, in which no handler of Python's runs
    assert "rank 0" in asked["why"] and "SIGUSR2" in asked["why"]
    assert [rank["step"] for rank in asked["ranks"]] == [HANGS_AT, HANGS_AT] and asked["exchanges"][0]["missing"] == [1]
    printed = capfd.readouterr().err
    written = [json.loads((tmp_path / name / "hang.json").read_text())["reports"] for name in reports]
    assert printed.count("BubbleProfiler: rank") == sum(map(len, written)), "one rank reports for all"
    assert f"rank 1 has not reached {waits['exchange']['name']}" in printed and "test_hangs.py" in printed
    assert "rank 1 does not answer, and rank 0 waits in" in printed


@pytest.mark.slow
def test_the_rank_that_holds_the_store_is_stopped(tmp_path: Path) -> None:
    """Stop the rank that holds the store, so that the others report only themselves."""
    run_distributed(_trained, 2, tmp_path, _stops, 0, init=False)
    report = _reports(tmp_path)[0]
    assert "store" in report["ranks"][0]["silent"] and report["exchanges"][0]["waiting"] == [1]
