"""The report of a run that has ended, to loggers that keep more than numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_freescale._lightning.loops import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger, rank_zero_warn
from lightning_freescale.profiling.reporting.picture import draw
from lightning_freescale.profiling.reporting.report import BubbleReport

_PAGE, _VERDICT = "freescale/bubble/report", "freescale/bubble/verdict"


def log_report(loggers: Sequence[Logger], report: BubbleReport, files: Mapping[str, Path], step: int) -> None:
    """Give a report to Weights & Biases, MLflow and TensorBoard; other loggers get nothing.

    A logger that fails is a warning: the run has ended well, and its files are on disk.

    Args:
        loggers: of the Trainer.
        report: of the run.
        files: that were written, by name.
        step: the last of the fit.
    """
    for logger in loggers:
        log = next((log for kind, log in _LOG.items() if isinstance(logger, kind)), None)
        if log is None:
            continue
        try:
            log(logger, report, files, step)
        except Exception as error:
            kept = ", ".join(str(path) for path in files.values())
            rank_zero_warn(
                f"BubbleProfiler: {type(logger).__name__} did not take the report: {type(error).__name__}: {error}. The files "
                f"are there: {kept}"
            )


def _log_to_wandb(logger: Any, report: BubbleReport, files: Mapping[str, Path], step: int) -> None:
    """The page as a panel, all files as an artifact, the verdict in the summary."""
    import wandb

    run = logger.experiment
    if "page" in files:  # else the disk was full, which has been told
        # as it is: it brings its styles, and its security policy forbids those that wandb would add
        run.log({_PAGE: wandb.Html(str(files["page"]), inject=False)})
    artifact = wandb.Artifact(f"bubbles-{run.id}", type="bubble-report", metadata={"verdict": _verdict(report)})
    for path in files.values():
        artifact.add_file(str(path))
    run.log_artifact(artifact)
    run.summary[_VERDICT] = _verdict(report)


def _log_to_mlflow(logger: Any, report: BubbleReport, files: Mapping[str, Path], step: int) -> None:
    """All files as artifacts in a folder, the verdict as a tag."""
    client = logger.experiment
    for path in files.values():
        client.log_artifact(logger.run_id, str(path), "bubbles")
    client.set_tag(logger.run_id, _VERDICT, _verdict(report))


def _log_to_tensorboard(logger: Any, report: BubbleReport, files: Mapping[str, Path], step: int) -> None:
    """The summary as text, and a picture if matplotlib is installed: it can hold neither pages nor files."""
    indented = "\n".join(f"    {line}" for line in str(report).splitlines())  # which is how Markdown keeps columns
    logger.experiment.add_text(_PAGE, indented, step)
    if find_spec("matplotlib") is not None:
        logger.experiment.add_figure("freescale/bubble/picture", draw(report), step)


_LOG: dict[type[Logger], Callable[[Any, BubbleReport, Mapping[str, Path], int], None]] = {
    WandbLogger: _log_to_wandb,
    MLFlowLogger: _log_to_mlflow,
    TensorBoardLogger: _log_to_tensorboard,
}


def _verdict(report: BubbleReport) -> str:
    found = report.document(series=False)["verdict"]
    return "\n".join(f"{name.capitalize()}: {found[name]}" for name in ("verdict", "why", "next"))
