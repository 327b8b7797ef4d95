"""A still picture of a report, for places that cannot show its page; needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lightning_freescale.profiling.analysis.breakdown import ADDENDS, column
from lightning_freescale.profiling.reporting.report import BubbleReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# those of the page in page.css
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
"""Ranks in the picture, those with the largest bubbles; more bars cannot be told apart."""


def draw(report: BubbleReport) -> Figure:
    """Return a figure of two charts: where each rank's time went, and the bubble of every step, in time and over the ranks.

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
        if seconds.max() > 1e-4 * wall.mean():  # what can be seen
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
