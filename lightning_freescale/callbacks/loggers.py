"""Send the report of a finished run to loggers that accept pages, pictures and text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_freescale._lightning.loops import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger, rank_zero_warn
from lightning_freescale.profiling.analysis.breakdown import ADDENDS, column
from lightning_freescale.profiling.reporting.report import BubbleReport

# the colors of page.css
_COLORS = {
    "forward": "#154a85",
    "backward": "#4a86d4",
    "optimizer": "#86b8e8",
    "data_wait": "#7d1450",
    "straggler_wait": "#cf4310",
    "transfer": "#dcb04e",
    "wait": "#421400",
    "host_overhead": "#727272",
    "unexplained": "#d6d4cf",
}
_ROWS = 32
"""The largest number of ranks in the picture. It shows those with the largest bubbles."""
_PAGE, _VERDICT = "freescale/bubble/report", "freescale/bubble/verdict"


def log_report(loggers: Sequence[Logger], report: BubbleReport, files: Mapping[str, Path], step: int) -> None:
    """Send a report to Weights & Biases, MLflow and TensorBoard; ignore other loggers.

    A failure of a logger is only a warning, because the run was successful and its files are on disk.
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
                f"BubbleProfiler: {type(logger).__name__} did not accept the report ({type(error).__name__}: {error}). The "
                f"files of the report are: {kept}"
            )


def _log_to_wandb(logger: Any, report: BubbleReport, files: Mapping[str, Path], step: int) -> None:
    """Log the page as a panel, all files as an artifact, and the verdict in the summary."""
    import wandb

    run = logger.experiment
    if "page" in files:  # otherwise the page could not be written, and the profiler has warned
        # inject=False: the page has its own styles, and its security policy forbids those of wandb
        run.log({_PAGE: wandb.Html(str(files["page"]), inject=False)})
    artifact = wandb.Artifact(f"bubbles-{run.id}", type="bubble-report", metadata={"verdict": _verdict(report)})
    for path in files.values():
        artifact.add_file(str(path))
    run.log_artifact(artifact)
    run.summary[_VERDICT] = _verdict(report)


def _log_to_mlflow(logger: Any, report: BubbleReport, files: Mapping[str, Path], step: int) -> None:
    """Log all files as artifacts in a folder, and the verdict as a tag."""
    client = logger.experiment
    for path in files.values():
        client.log_artifact(logger.run_id, str(path), "bubbles")
    client.set_tag(logger.run_id, _VERDICT, _verdict(report))


def _log_to_tensorboard(logger: Any, report: BubbleReport, files: Mapping[str, Path], step: int) -> None:
    """Log the summary as text, and a picture if matplotlib is installed. TensorBoard supports neither pages nor files."""
    indented = "\n".join(f"    {line}" for line in str(report).splitlines())  # an indented block keeps columns in Markdown
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


if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(report: BubbleReport) -> Figure:
    """Return a figure with two charts: the time of each rank by cause, and the bubble of every step.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    wall, compute = report.breakdown[..., 0], column(report.breakdown, "compute")
    bubbles = 1 - compute.sum(axis=0) / np.maximum(wall.sum(axis=0), 1e-12)
    ranks = np.sort(np.argsort(-bubbles, kind="stable")[:_ROWS])
    figure = Figure(figsize=(9, 3.6 + 0.2 * len(ranks)), layout="constrained")
    above, below = figure.subplots(2, height_ratios=[1 + 0.2 * len(ranks), 2.2])

    names, left = [f"rank {rank}" for rank in ranks], np.zeros(len(ranks))
    for part in sorted(ADDENDS, key=[*_COLORS].index):
        seconds = column(report.breakdown, part)[:, ranks].mean(axis=0)
        if seconds.max() > 1e-4 * wall.mean():  # omit parts that are too narrow to see
            above.barh(names, seconds, left=left, color=_COLORS[part], label=part.replace("_", " "))
        left += seconds
    above.margins(y=0.02)
    above.invert_yaxis()
    above.set_xlabel("seconds per step")
    all_ranks = wall.shape[1]
    some = "" if len(ranks) == all_ranks else f"; below the {len(ranks)} of {all_ranks} ranks with the largest"
    above.set_title(f"{report.run.label}: bubble {report.bubble:.1%}{some}", fontsize=10)
    above.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))

    of_step = 1 - compute / np.maximum(wall, 1e-12)
    steps = np.asarray(report.steps)
    below.fill_between(steps, of_step.min(axis=1), of_step.max(axis=1), color="#f0c9a8", label="of single ranks")
    below.plot(steps, 1 - compute.sum(axis=1) / np.maximum(wall.sum(axis=1), 1e-12), color="#cf4310", label="of all ranks")
    below.set(ylim=(0, 1), xlabel="step", ylabel="bubble")
    below.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
