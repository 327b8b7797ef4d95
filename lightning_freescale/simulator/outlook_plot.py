"""Outlooks as a picture: the bubble that each technique leaves, and the speed-up that it brings, over the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_freescale.simulator.outlook import SHARE, Outlook

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#8c8c8c", "#e08214", "#8073ac", "#2166ac", "#1b9e77", "#b2182b", "#542788", "#35978f", "#bf812d")


def new_figure() -> Figure:
    """Return an empty picture; ImportError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'lightning-freescale[plot]'") from error
    return Figure(figsize=(9.5, 4.6), layout="constrained")


def plot(figure: Figure, outlooks: Sequence[Outlook], path: Path, title: str) -> None:
    """Draw the outlooks, and write them to ``path``, in the format that its suffix names; a band is an interval."""
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(each.name for each in outlooks))
    for name, colour in zip(names, _COLOURS * (1 + len(names) // len(_COLOURS))):
        of_name = sorted((each for each in outlooks if each.name == name), key=lambda each: each.ranks)
        ranks = [each.ranks for each in of_name]
        for axes, quantity, factor in ((left, "bubble", 100.0), (right, "speed_up", 1.0)):
            found = [getattr(each, quantity) for each in of_name]
            low, value, high = ([factor * getattr(each, end) for each in found] for end in ("low", "value", "high"))
            axes.plot(ranks, value, marker="o", color=colour, label=name)
            axes.fill_between(ranks, low, high, color=colour, alpha=0.08, linewidth=0)
    plain = sorted((each for each in outlooks if each.name == "plain"), key=lambda each: each.ranks)
    right.plot(
        [each.ranks for each in plain], [each.limit.value for each in plain], "k--", linewidth=1.2, label="limit 1 / (1 - b)"
    )
    ticks = sorted({each.ranks for each in outlooks})
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(count) for count in ticks])
        axes.minorticks_off()
        axes.set_xlabel("ranks")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylim(bottom=0)
    left.set_ylabel("predicted bubble (% of the ranks' time)")
    right.set_ylim(bottom=min(1.0, right.get_ylim()[0]))
    right.set_ylabel("predicted speed-up over plain, end to end")
    figure.suptitle(f"{title}\nbands: {SHARE:.0%} intervals", fontsize=9)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
