"""Predicted imbalance over ranks as a picture; the only file here that needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_freescale.balance.simulation.table import Forecast

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = {  # attribute of Forecast: label, colour, marker, line, width
    "drawn": ("as drawn", "#8c8c8c", "o", "-", 1.6),
    "zigzag": ("zig-zag", "#e08214", "s", "-", 1.6),
    "balanced": ("balanced", "#2166ac", "o", "-", 2.4),
    "lower_bound": ("lower bound", "black", "", "--", 1.2),
}


def new_figure() -> Figure:
    """An empty picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'lightning-freescale[plot]'") from error
    return Figure(figsize=(7.5, 4.5), layout="constrained")


def plot(figure: Figure, rows: Sequence[Forecast], path: Path, title: str) -> None:
    """Draw ``rows`` and write them to ``path``, in the format that its suffix names."""
    axes, ordered = figure.subplots(), sorted(rows, key=lambda row: row.ranks)
    ranks = [row.ranks for row in ordered]
    for name, (label, color, marker, line, width) in _LINES.items():
        values = [getattr(row, name) for row in ordered]
        axes.plot(ranks, values, label=label, color=color, marker=marker or "x", linestyle=line, linewidth=width)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(count) for count in ranks])
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.set_ylabel("predicted imbalance (max / mean over ranks)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    _add_idle_axis(axes)
    figure.savefig(path, dpi=150)


def _add_idle_axis(axes: Axes) -> None:
    axes.set_ylim(bottom=1 - 0.03 * (axes.get_ylim()[1] - 1))
    axis = axes.secondary_yaxis("right", functions=(_idle_percent, _imbalance))
    axis.set_ylabel("idle share of the ranks' compute time (%)")


def _idle_percent(imbalance: Any) -> Any:
    return 100 - 100 / np.maximum(imbalance, 1e-3)


def _imbalance(percent: Any) -> Any:
    return 100 / np.maximum(100 - np.asarray(percent), 1e-3)
