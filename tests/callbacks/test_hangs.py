"""A run that hangs says where its ranks stand, and goes on as if nothing had happened."""

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

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_freescale import BubbleProfiler, FreeScaleDataModule
from lightning_freescale.testing import run_distributed
from tests.helpers.plain_modules import Plain, Rows, profiler
from tests.helpers.recommender import Recommender, Samples, collate, trainer

STEPS, HANGS_AT = 10, 6


def _told(folder: str) -> Callable[[], None]:
    """What waits until the hang has been told of."""

    def wait() -> None:
        until = time.monotonic() + 60
        while not _reports(Path(folder)):
            assert time.monotonic() < until, "nobody has told of the hang"
            time.sleep(0.05)

    return wait


def _stopped(folder: str) -> None:
    """Freeze this process until a report has been written."""
    told = f"grep -qs '\"step\": {HANGS_AT}' {folder}/hang.json"
    wait = f"for i in $(seq 600); do {told} && break; sleep 0.1; done; kill -CONT {os.getpid()}"
    subprocess.Popen(["bash", "-c", wait])
    os.kill(os.getpid(), signal.SIGSTOP)


def _signals_rank_zero(folder: str) -> None:
    """Ask rank 0 until it stands in a collective."""
    until, path = time.monotonic() + 60, Path(folder, "rank 0 is here")
    while not path.exists() or not path.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    reports: list[dict[str, Any]] = []
    while not reports or not reports[-1]["exchanges"]:
        os.kill(int(path.read_text()), signal.SIGUSR2)
        told = len(reports)
        while len(reports) == told:
            assert time.monotonic() < until, "nobody has told where the ranks stand"
            time.sleep(0.05)
            reports = _reports(Path(folder))


class SlowRows(Rows):
    """Rows of which one comes late on rank 1."""

    def __init__(self, count: int, folder: str) -> None:
        super().__init__(count)
        self.folder, self.read = folder, 0

    def __getitem__(self, index: int) -> Tensor:
        self.read += 1
        if os.environ["RANK"] == "1" and self.read == 2 * HANGS_AT + 1:
            _told(self.folder)()  # the loader hangs here
        return super().__getitem__(index)


class Hanging(Plain):
    """Some rank does in a step what it should not."""

    def __init__(self, how: Callable[[], None] | None, ranks: tuple[int, ...], folder: str) -> None:
        super().__init__()
        self.how, self.ranks, self.folder, self.losses = how, ranks, folder, []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == HANGS_AT and self.how is not None:
            if self.global_rank in self.ranks:
                self.how()  # the step hangs here
            else:
                Path(self.folder, "rank 0 is here").write_text(str(os.getpid()))
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss


def _watched_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("freescale")]


def _train(folder: str, how: str, ranks: tuple[int, ...] = (1,), **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    hows = {"forward": _told(folder), "stop": lambda: _stopped(folder), "signal": lambda: _signals_rank_zero(folder)}
    module = Hanging(hows.get(how), ranks, folder)
    callback = profiler(folder, **{"hang_timeout": 1.5, **options})
    size = int(os.environ["WORLD_SIZE"])
    data = SlowRows(2 * STEPS * size, folder) if how == "loader" else Rows(2 * STEPS * size)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    fitted = L.Trainer(strategy="ddp", accelerator="cpu", devices=size, max_epochs=1, callbacks=[callback], **quiet)
    fitted.fit(module, DataLoader(data, batch_size=2), DataLoader(Rows(4), batch_size=2))
    return {"losses": module.losses, "threads": _watched_threads(), "files": callback.files, "handler": _handler()}


def _handler() -> str:
    return str(signal.getsignal(signal.SIGUSR2))


def _reports(folder: Path) -> list[dict[str, Any]]:
    """Those of the step that hangs: on a busy machine another one may take as long as a hang does here."""
    if not (folder / "hang.json").exists():
        return []
    document = json.loads((folder / "hang.json").read_text())
    assert document["format"] == "lightning_freescale hangs" and document["version"] == 1
    return [report for report in document["reports"] if any(rank.get("step") == HANGS_AT for rank in report["ranks"])]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """Losses of a run that does not hang."""
    folder = tmp_path_factory.mktemp("undisturbed")
    results = run_distributed(_train, 2, str(folder), "", hang_timeout=None, hang_signal=None, init=False)
    assert not (folder / "hang.json").exists()
    return [result["losses"] for result in results]


@pytest.mark.parametrize(
    ("how", "stage", "code"),
    [("loader", "data wait: fetch", "_told(self.folder)()"), ("forward", "forward", "self.how()")],
)
def test_one_rank_is_late(how: str, stage: str, code: str, undisturbed: Any, tmp_path: Path, capfd: Any) -> None:
    results = run_distributed(_train, 2, str(tmp_path), how, init=False)
    assert [result["losses"] for result in results] == undisturbed
    assert [result["threads"] for result in results] == [[], []]
    assert [result["handler"] for result in results] == [str(signal.SIG_DFL)] * 2
    assert results[0]["files"]["hang"] == tmp_path / "hang.json" and "hang" not in results[1]["files"]
    report = _reports(tmp_path)[0]
    assert "has ended no step for" in report["why"]
    waits, late = report["ranks"]
    assert waits["step"] == late["step"] == HANGS_AT
    assert len(waits["last_steps_s"]) == 5
    assert waits["exchange"]["group"] == "world" and waits["since_s"] > 0.5
    assert late["exchange"] is None and late["stage"] == stage and "wait" in late["place"]
    (exchange,) = report["exchanges"]
    assert exchange["waiting"] == [0] and exchange["missing"] == [1] and exchange["unknown"] == []
    assert exchange["step"] == HANGS_AT
    told = capfd.readouterr().err
    reports = json.loads((tmp_path / "hang.json").read_text())["reports"]
    assert told.count("BubbleProfiler: rank") == len(reports), "one rank tells for all"
    assert f"rank 1 has not come to {waits['exchange']['name']}" in told
    assert "test_hangs.py" in told


def test_a_rank_that_is_stopped(undisturbed: Any, tmp_path: Path, capfd: Any) -> None:
    results = run_distributed(_train, 2, str(tmp_path), "stop", init=False)
    assert [result["losses"] for result in results] == undisturbed
    assert [result["threads"] for result in results] == [[], []]
    report = _reports(tmp_path)[0]
    assert "is stopped; kill -CONT" in report["ranks"][1]["silent"]
    assert report["exchanges"][0]["waiting"] == [0] and report["exchanges"][0]["unknown"] == [1]
    assert "rank 1 cannot be asked, and rank 0 waits in" in capfd.readouterr().err


@pytest.mark.slow
def test_the_rank_that_holds_the_store_is_stopped(undisturbed: Any, tmp_path: Path) -> None:
    """The others can ask nobody, and tell of themselves."""
    results = run_distributed(_train, 2, str(tmp_path), "stop", (0,), init=False)
    assert [result["losses"] for result in results] == undisturbed
    assert [result["threads"] for result in results] == [[], []]
    report = _reports(tmp_path)[0]
    assert "store" in report["ranks"][0]["silent"] and "frozen" in report["ranks"][0]["silent"]
    assert report["exchanges"][0]["waiting"] == [1]


def test_a_signal_to_one_rank_asks_all(undisturbed: Any, tmp_path: Path) -> None:
    """Also where its main thread waits in a collective, in which no handler of Python's runs."""
    results = run_distributed(_train, 2, str(tmp_path), "signal", hang_timeout=None, init=False)
    assert [result["losses"] for result in results] == undisturbed
    report = _reports(tmp_path)[-1]
    assert report["why"] == "rank 0 was asked by SIGUSR2" and report["next_s"] is None
    assert [rank["step"] for rank in report["ranks"]] == [HANGS_AT, HANGS_AT]
    assert report["exchanges"][0]["missing"] == [1]


def test_one_rank_alone(tmp_path: Path, capfd: Any) -> None:
    (result,) = run_distributed(_train, 1, str(tmp_path), "forward", (0,), init=False)
    assert result["threads"] == [] and len(result["losses"]) == STEPS
    report = _reports(tmp_path)[0]
    assert report["exchanges"] == [] and report["ranks"][0]["stage"] == "forward"
    assert "self.how()" in capfd.readouterr().err or report["ranks"][0]["code"]


class Late(Recommender):
    """Rank 1 comes late to its forward, until that has been told of."""

    folder = ""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if batch_idx == HANGS_AT and self.folder and self.global_rank == 1:
            _told(self.folder)()
        return super().training_step(batch, batch_idx)


def _recommend(folder: str, hangs: bool) -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    module, data = Late("adagrad"), Samples(8 * STEPS)
    module.folder = folder if hangs else ""
    callback = BubbleProfiler(folder, every_n_steps=4, hang_timeout=1.5, verbose=False)
    fitted = trainer(devices=2, callbacks=[callback])
    fitted.fit(module, FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate))
    return module.losses, _watched_threads()


def test_under_freescale_the_exchange_thread_says_where_it_stands(tmp_path: Path) -> None:
    calm, hangs = tmp_path / "calm", tmp_path / "hangs"
    undisturbed = run_distributed(_recommend, 2, str(calm), False)
    results = run_distributed(_recommend, 2, str(hangs), True)
    assert results == undisturbed and not (calm / "hang.json").exists()
    assert [threads for _, threads in results] == [[], []]
    report = _reports(hangs)[0]
    waits, late = report["ranks"]
    assert late["stage"] == "forward" and report["exchanges"][0]["missing"] == [1]
    exchanging = [thread for thread in waits["threads"] if thread["exchange"] == "embedding exchange"]
    assert exchanging and exchanging[0]["since_s"] > 0.5 and exchanging[0]["moved_bytes"] > 0
