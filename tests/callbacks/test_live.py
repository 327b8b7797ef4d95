"""What is told while training goes on: a line beside the progress bar, and the verdict in the log."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_freescale import BubbleProfiler
from lightning_freescale.testing import run_distributed
from tests.helpers.plain_modules import Plain, Rows, profiler
from tests.helpers.terminal import terminal

BARS: dict[str, type[ProgressBar]] = {"tqdm": TQDMProgressBar, "rich": RichProgressBar}
LINE = re.compile(r"\d+\.\d% \([a-z ]+ \d+\.\d%, slowest rank [01]\)")


class Logs(Plain):
    """Has a metric on the bar, by whatever name."""

    metric = "score"

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log(self.metric, torch.tensor(0.125), prog_bar=True)
        return super().training_step(batch, batch_idx)


def _train(folder: str, bar: str, metric: str = "score", **options: Any) -> tuple[str, dict[str, Any], bool]:
    logging.getLogger("lightning.pytorch").addHandler(logging.FileHandler(Path(folder, f"{os.environ['RANK']}.log")))
    module = Logs()
    module.metric = metric
    callbacks: list[L.Callback] = [profiler(folder, every_n_steps=3, **options), *([BARS[bar]()] if bar else [])]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "enable_progress_bar": bool(bar)}
    with terminal() as shown:
        fitted = L.Trainer(strategy="ddp", accelerator="cpu", devices=2, max_epochs=1, callbacks=callbacks, **quiet)
        fitted.fit(module, DataLoader(Rows(56), batch_size=2))
    own = fitted.progress_bar_callback
    return (
        shown[0],
        {name: float(value) for name, value in fitted.callback_metrics.items()},
        "get_metrics" in vars(own or object),
    )


@pytest.mark.parametrize("bar", BARS)
def test_a_line_beside_the_bar(bar: str, tmp_path: Path) -> None:
    if bar == "rich":
        pytest.importorskip("rich")
    (shown, metrics, replaced), (elsewhere, *_) = run_distributed(_train, 2, str(tmp_path), bar, live=True, init=False)
    assert LINE.search(shown), shown[-2000:]
    assert "bubble" in shown and "score" in shown and "0.125" in shown
    assert "bubble" not in elsewhere, "rank 0 alone has a bar"
    assert metrics.keys() == {"score", "loss"}, "it is no metric of the user's"
    assert not replaced, "the bar is left as it was"


def test_without_being_asked_there_is_none(tmp_path: Path) -> None:
    (shown, *_), _ = run_distributed(_train, 2, str(tmp_path), "tqdm", init=False)
    assert "score" in shown and "bubble" not in shown


def test_a_metric_of_that_name_stays(tmp_path: Path) -> None:
    (shown, metrics, _), _ = run_distributed(_train, 2, str(tmp_path), "tqdm", "bubble", live=True, init=False)
    assert "bubble=0.125" in shown and re.search(rf"freescale/bubble={LINE.pattern}", shown)
    assert metrics["bubble"] == 0.125


def test_without_a_bar_it_is_a_line_of_the_log(tmp_path: Path) -> None:
    run_distributed(_train, 2, str(tmp_path), "", live=True, init=False)
    logged, elsewhere = ((tmp_path / f"{rank}.log").read_text() for rank in range(2))
    assert 3 <= len(re.findall(rf"^bubble: {LINE.pattern}$", logged, re.MULTILINE)) <= 4, "one for each exchange"
    assert "bubble" not in elsewhere


def _logged(folder: str, verbose: bool, fails: bool) -> tuple[str, str]:
    log = logging.getLogger("lightning.pytorch")
    log.addHandler(logging.FileHandler(Path(folder, "log.txt")))
    module, callback = Plain(), BubbleProfiler(folder, verbose=verbose)
    if fails:
        module.on_train_epoch_end = _fail  # type: ignore[method-assign]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "enable_progress_bar": False}
    with terminal() as shown:
        fitted = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[callback], **quiet)
        try:
            fitted.fit(module, DataLoader(Rows(30), batch_size=2))
        except ValueError:
            assert fails
    return shown[0], Path(folder, "log.txt").read_text()


def _fail() -> None:
    raise ValueError("the model broke")


@pytest.mark.parametrize("fails", [False, True])
def test_the_verdict_is_in_the_log_and_printed_once(fails: bool, tmp_path: Path, capfd: Any) -> None:
    ((shown, log),) = run_distributed(_logged, 1, str(tmp_path), True, fails, init=False)
    (line,) = [line for line in log.splitlines() if "Verdict:" in line]
    assert "Why:" in line and "Next:" in line
    assert line.startswith("INCOMPLETE: ValueError: the model broke") == fails
    captured = capfd.readouterr()
    assert (shown + captured.out + captured.err).count("Verdict:") == 1


def test_a_quiet_profiler_logs_nothing(tmp_path: Path) -> None:
    ((shown, log),) = run_distributed(_logged, 1, str(tmp_path), False, False, init=False)
    assert "Verdict:" not in shown + log
