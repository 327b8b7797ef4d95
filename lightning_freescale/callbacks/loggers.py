"""Send the report of a finished run to loggers that accept files or text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_freescale._lightning.loops import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger, rank_zero_warn
from lightning_freescale.profiling.reporting.report import BubbleReport

_PAGE, _VERDICT = "freescale/bubble/report", "freescale/bubble/verdict"


def log_report(loggers: Sequence[Logger], report: BubbleReport, files: Mapping[str, Path], step: int) -> None:
    """Send a report to Weights & Biases, MLflow and TensorBoard; ignore other loggers.

    A failure of a logger is only a warning, because the run was successful and its files are on disk.
    """
    for logger in loggers:
        try:
            if isinstance(logger, WandbLogger):
                _log_to_wandb(logger.experiment, report, files)
            elif isinstance(logger, MLFlowLogger):
                _log_to_mlflow(logger, report, files)
            elif isinstance(logger, TensorBoardLogger):  # it supports neither pages nor files
                indented = "\n".join(f"    {line}" for line in str(report).splitlines())  # a block of Markdown keeps columns
                logger.experiment.add_text(_PAGE, indented, step)
        except Exception as error:
            kept = ", ".join(str(path) for path in files.values())
            rank_zero_warn(
                f"BubbleProfiler: {type(logger).__name__} did not accept the report ({type(error).__name__}: {error}). The "
                f"files of the report are: {kept}"
            )


def _log_to_wandb(run: Any, report: BubbleReport, files: Mapping[str, Path]) -> None:
    """Log the page as a panel, all files as an artifact, and the verdict in the summary."""
    import wandb

    if "page" in files:  # otherwise the page could not be written, and the profiler has warned
        # inject=False: the page has its own styles, and its security policy forbids those of wandb
        run.log({_PAGE: wandb.Html(str(files["page"]), inject=False)})
    artifact = wandb.Artifact(f"bubbles-{run.id}", type="bubble-report", metadata={"verdict": _verdict(report)})
    for path in files.values():
        artifact.add_file(str(path))
    run.log_artifact(artifact)
    run.summary[_VERDICT] = _verdict(report)


def _log_to_mlflow(logger: Any, report: BubbleReport, files: Mapping[str, Path]) -> None:
    """Log all files as artifacts in a folder, and the verdict as a tag."""
    client = logger.experiment
    for path in files.values():
        client.log_artifact(logger.run_id, str(path), "bubbles")
    client.set_tag(logger.run_id, _VERDICT, _verdict(report))


def _verdict(report: BubbleReport) -> str:
    found = report.document(series=False)["verdict"]
    return "\n".join(f"{name.capitalize()}: {found[name]}" for name in ("verdict", "why", "next"))
