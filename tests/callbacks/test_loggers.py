"""The contents of loggers after a profiled run, read with the loggers' own packages if they are installed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_freescale.profiling.reporting.document import read
from tests.helpers.plain_modules import Plain, fit, profiler

VERDICT = "Verdict: "


def _trained(folder: Path, logger: Any) -> dict[str, Path]:
    callback = profiler(folder / "bubbles")
    fit(Plain(), [callback], devices=1, strategy="auto", logger=logger)
    return callback.files


def test_wandb_has_the_page_as_a_panel_and_the_files_as_an_artifact(tmp_path: Path, monkeypatch: Any) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))  # where artifacts wait to be uploaded
    logger = WandbLogger(offline=True, save_dir=tmp_path, project="bubbles")
    files = _trained(tmp_path, logger)
    summary = dict(logger.experiment.summary)
    wandb.finish()
    wandb.teardown()  # its process, too
    assert summary["freescale/bubble/verdict"].startswith(VERDICT)
    assert 0 <= summary["freescale/bubble/fraction"] <= 1, "and the scalars on the way"
    (shown,) = tmp_path.rglob("media/html/**/*.html")
    assert shown.read_bytes() == files["page"].read_bytes(), "nothing is added to the page, which its policy would not allow"
    waiting = [path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert sorted(waiting) == sorted(path.read_bytes() for path in files.values())


def test_mlflow_has_the_files_and_the_verdict(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger(tracking_uri=f"file:{tmp_path}/runs")
    files = _trained(tmp_path, logger)
    client, run = logger.experiment, logger.run_id
    assert {entry.path for entry in client.list_artifacts(run, "bubbles")} == {f"bubbles/{f.name}" for f in files.values()}
    (page,) = tmp_path.rglob("artifacts/bubbles/report.html")
    assert page.read_bytes() == files["page"].read_bytes()
    assert client.get_run(run).data.tags["freescale/bubble/verdict"].startswith(VERDICT)
    assert client.get_metric_history(run, "freescale/bubble/fraction")


def _events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (path,) = folder.rglob("events.out.*")
    found = EventAccumulator(str(path), size_guidance={"tensors": 0})
    found.Reload()
    return found


def test_tensorboard_has_the_summary(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    _trained(tmp_path, TensorBoardLogger(tmp_path, name="runs"))
    events = _events(tmp_path / "runs")
    assert "freescale/bubble/fraction" in events.Tags()["scalars"], "and the scalars on the way"
    (text,) = events.Tensors("freescale/bubble/report/text_summary")
    assert text.tensor_proto.string_val[0].decode().startswith(f"    {VERDICT}")
    assert text.step == 14
    assert "bubble b = " in text.tensor_proto.string_val[0].decode()


class Full(TensorBoardLogger):
    """A logger that accepts only numbers."""

    @property
    def experiment(self) -> Any:
        return self

    def add_text(self, *args: Any) -> None:
        raise OSError("no space left")

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        pass

    log_hyperparams = log_graph = finalize = save = log_metrics


def test_a_logger_that_fails_is_a_warning_and_the_next_one_gets_its_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    full = Full(tmp_path, name="full")
    with pytest.warns(UserWarning, match=r"Full.*OSError: no space left.*report\.html"):
        files = _trained(tmp_path, [full, TensorBoardLogger(tmp_path, name="runs")])
    assert read(files["report"])["status"]["complete"]
    assert "freescale/bubble/report/text_summary" in _events(tmp_path / "runs").Tags()["tensors"]


def test_other_loggers_get_numbers_alone(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="BubbleProfiler")
        _trained(tmp_path, CSVLogger(tmp_path, name="runs"))
    assert {path.name for path in (tmp_path / "runs").rglob("*") if path.is_file()} == {"metrics.csv"}
