"""Output during training: a line beside the progress bar, and the verdict in the log."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch import Tensor

from lightning_freescale import BubbleProfiler
from lightning_freescale.testing import run_distributed
from tests.helpers.plain_modules import Plain, fit, profiler
from tests.helpers.terminal import terminal

LINE = re.compile(r"\d+\.\d% \([a-z ]+ \d+\.\d%, slowest rank [01]\)")


class Logs(Plain):
    """A module that logs a metric with any name to the bar."""

    def __init__(self, metric: str) -> None:
        super().__init__()
        self.metric = metric

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log(self.metric, torch.tensor(0.125), prog_bar=True)
        return super().training_step(batch, batch_idx)


def _shown(folder: Path, bar: Any = None, metric: str = "score", verbose: Any = None) -> tuple[str, dict[str, float], bool]:
    """Return the text on the terminal, the metrics, and whether the fit has replaced the bar."""
    callbacks = [profiler(folder, every_n_steps=3, verbose=verbose), *([] if bar is None else [bar()])]
    with terminal() as shown:
        fitted = fit(Logs(metric), callbacks, limit_val_batches=0, enable_progress_bar=bar is not None)
    own = fitted.progress_bar_callback
    metrics = {name: float(value) for name, value in fitted.callback_metrics.items()}
    return shown[0], metrics, "get_metrics" in vars(own or object)


def test_a_line_beside_the_bar(tmp_path: Path) -> None:
    def run() -> dict[str, Any]:
        bars = {"tqdm": TQDMProgressBar, "rich": RichProgressBar}
        found = {name: _shown(tmp_path, bar) for name, bar in bars.items()}
        found["quiet"] = _shown(tmp_path, TQDMProgressBar, verbose=False)
        return {**found, "taken": _shown(tmp_path, TQDMProgressBar, "bubble"), "no bar": _shown(tmp_path)}

    here, elsewhere = run_distributed(run, 2)
    for name in ("tqdm", "rich"):
        shown, metrics, replaced = here[name]
        assert LINE.search(shown), shown[-2000:]
        assert "bubble" in shown and "score" in shown and "0.125" in shown
        assert not LINE.search(elsewhere[name][0]), "rank 0 alone has a bar"
        assert metrics.keys() == {"score", "loss"}, "it is no metric of the user's"
        assert not replaced, "the bar is left as it was"
    assert "score" in here["quiet"][0] and "bubble" not in here["quiet"][0]
    shown, metrics, _ = here["taken"]
    assert "bubble=0.125" in shown and re.search(rf"freescale/bubble={LINE.pattern}", shown) and metrics["bubble"] == 0.125
    assert not LINE.search(here["no bar"][0])


class Breaks(Plain):
    """A module that fails at the end of the epoch."""

    def on_train_epoch_end(self) -> None:
        raise ValueError("the model broke")


def test_the_verdict_is_in_the_log_and_printed_once(tmp_path: Path, capfd: Any) -> None:
    runs = {"ends": (Plain(), None), "fails": (Breaks(), None), "whole": (Plain(), True), "quiet": (Plain(), False)}

    def run() -> dict[str, tuple[str, str]]:
        found = {}
        for name, (module, verbose) in runs.items():
            handler = logging.FileHandler(tmp_path / f"{name}.log")
            logging.getLogger("lightning.pytorch").addHandler(handler)
            with terminal() as shown:
                try:
                    fit(module, [BubbleProfiler(tmp_path / name, verbose=verbose)], devices=1, strategy="auto")
                except ValueError:
                    assert name == "fails"
                print(f"end of {name}")
            logging.getLogger("lightning.pytorch").removeHandler(handler)
            found[name] = shown[0], (tmp_path / f"{name}.log").read_text()
        return found

    (found,) = run_distributed(run, 1, init=False)
    captured = capfd.readouterr()
    for name in ("ends", "fails", "whole"):
        (line,) = [line for line in found[name][1].splitlines() if "Verdict:" in line]
        assert "Why:" in line and "Next:" in line
        assert line.startswith("INCOMPLETE: ValueError: the model broke") == (name == "fails")
    printed = "".join(shown for shown, _ in found.values()) + captured.out + captured.err
    assert printed.count("Verdict:") == 3 and "Verdict:" not in found["quiet"][0] + found["quiet"][1]
    assert printed.count("Where the time went:") == 3 and printed.count("full report: ") == 2
    assert printed.count("profiler overhead") == 1 and printed.count("written: ") == 3, "everything else only with verbose=True"
