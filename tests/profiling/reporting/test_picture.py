"""The still picture: what stands in it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import lightning_freescale.profiling.reporting.page as page
from lightning_freescale.profiling.reporting.picture import _COLORS, draw
from tests.helpers.reports import full_report, report_of, step


def test_the_bars_are_the_seconds_of_the_parts() -> None:
    row = {"data_wait": 0.01, "forward": 0.03, "backward": 0.04, "straggler_wait": 0.015}
    slow = {**row, "forward": 0.05, "straggler_wait": 0.0}
    parts = np.array([[step(0.1, **row), step(0.1, **slow)]] * 4)
    above, below = draw(report_of(parts)).axes
    bars = {box.get_label(): [bar.get_width() for bar in box] for box in above.containers}
    assert bars["forward"] == pytest.approx([0.03, 0.05])
    assert bars["straggler wait"] == pytest.approx([0.015, 0.0])
    assert "transfer" not in bars, "what nobody spends time in is not in the legend"
    ends = [max(bar.get_x() + bar.get_width() for box in above.containers for bar in box)]
    assert ends == pytest.approx([0.1]), "they add up to the step"
    assert [label.get_text() for label in above.get_yticklabels()] == ["rank 0", "rank 1"]
    assert below.lines[0].get_ydata() == pytest.approx([1 - 0.16 / 0.2] * 4)
    assert "bubble 20.0%" in above.get_title()


def test_of_many_ranks_those_with_the_largest_bubbles() -> None:
    parts = np.array([[step(0.1, forward=0.09 - 0.001 * rank) for rank in range(64)]] * 3)
    figure = draw(report_of(parts))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [f"rank {rank}" for rank in range(32, 64)]
    assert "the 32 of 64 ranks with the largest" in figure.axes[0].get_title()


def test_a_report_of_one_step_is_drawn(tmp_path: Path) -> None:
    draw(full_report(parts=np.array([[step(0.1, forward=0.05)]]))).savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000


def test_colours_are_those_of_the_page() -> None:
    style = (Path(page.__file__).parent / "page.css").read_text()
    light = dict(re.findall(r"--(\w+): (#\w{6});", style.split("@media")[0]))
    assert {name: light[name] for name in _COLORS} == _COLORS
