import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_freescale.profiling.reporting.page import write_page
from tests.helpers.documents import PART_NAMES, document
from tests.helpers.shown_page import LEFT, cells, colour, every, hover, intervals, pixel, plain, words

pytestmark = pytest.mark.slow  # what the page shows in detail


def test_shares_are_bars_of_their_width_and_explained(show):
    shares = dict(zip(PART_NAMES[1:], (0.05, 0.2, 0.3, 0.1, 0.2, 0.08, 0.0, 0.04, 0.03, 0.12)), compute=0.6)
    page = show(document(summary={"shares": shares, "step_s": 0.1, "overlap_efficiency": 0.6}))
    script = (
        "Array.from(document.querySelectorAll('#shares .stack span'), s => [s.dataset.part, s.getBoundingClientRect().width])"
    )
    widths = dict(page.evaluate(script))
    total = sum(widths.values())
    assert {name: width / total for name, width in widths.items()} == pytest.approx(
        {n: shares[n] for n in PART_NAMES[1:-1] if n != "wait"}, abs=0.005
    )
    legend = every(page, "#shares .legend li", "[e.dataset.part, e.innerText, e.title]")
    text = {name: " ".join(plain(words).split()) for name, words, _ in legend}
    assert text["straggler_wait"] == "straggler wait 20.0 % 20.0 ms"
    assert text["data_wait"] == "data wait 5.0 % 5.00 ms"
    assert all(len(title) > 20 for _, _, title in legend)
    assert words(page, "#shares .note") == (
        "Exchanges were hidden behind compute for 12.0 % of the wall time (12.0 ms per step). "
        "Overlap efficiency, hidden over hidden + transfer, is 60.0 %."
    )


def test_the_heat_map_has_a_cell_per_rank_and_step(show):
    page = show(cells([(100, 0), (80, 20)], [(60, 40), (40, 60)], [(20, 80), (10, 90)]))
    width = page.evaluate("document.getElementById('heatmap-canvas').clientWidth")
    w = (width - LEFT) / 3
    painted = [
        [sum(pixel(page, "heatmap-canvas", round(LEFT + (s + 0.5) * w), 13 + 26 * r)) for s in range(3)] for r in range(2)
    ]
    order = [painted[r][s] for s in range(3) for r in range(2)]
    assert order == sorted(order, reverse=True) and len(set(order)) == 6  # the more bubble, the darker
    assert pixel(page, "heatmap-canvas", round(LEFT + w / 2), 13) == colour(page, "heat-low")
    assert pixel(page, "heatmap-canvas", round(LEFT + 2.5 * w), 39) == colour(page, "heat-high")
    assert words(page, "#heatmap .scale") == "bubble 090 %"
    assert "Means of the ranks: from 40.0 % (rank 0) to 56.7 % (rank 1)." in words(page, "#heatmap .note")


def test_the_heat_map_tells_rank_step_and_parts(show):
    page = show(cells([(100_000, 0), (80_000, 20_000)], [(60_000, 40_000), (40_000, 60_000)]))
    width = page.evaluate("document.getElementById('heatmap-canvas').clientWidth")
    said = hover(page, "heatmap-canvas", LEFT + 0.75 * (width - LEFT), 39)
    assert said.startswith("rank 1, step 6bubble60.0 %wall100 msforward40.0 ms")
    assert "straggler wait60.0 ms" in said and said.endswith("hidden0 ms")
    assert [
        f"{name}0 ms" in said for name in ("backward", "optimizer", "transfer", "data wait", "host overhead", "unexplained")
    ] == [True] * 6
    page.mouse.move(2, 2)
    assert page.evaluate("document.getElementById('tip').hidden")


def test_the_heat_map_can_be_walked_by_keyboard(show):
    page = show(cells([(100, 0), (80, 20)], [(60, 40), (40, 60)]))
    page.evaluate("document.getElementById('heatmap-canvas').focus()")
    told = []
    for key in ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowLeft"):
        page.keyboard.press(key)
        told.append(page.evaluate("document.querySelector('#tip strong').textContent"))
    assert told == [f"rank {r}, step {s}" for r, s in ((0, 5), (1, 5), (1, 6), (0, 6), (0, 5))]


def test_more_steps_than_pixels_share_cells_and_say_so(show):
    odd_waits = [[(100, 0)] if step % 2 else [(20, 80)] for step in range(3000)]
    page = show(cells(*odd_waits))
    width = page.evaluate("document.getElementById('heatmap-canvas').clientWidth") - LEFT
    assert f"3,000 steps in {width:,} columns. A cell shows the mean" in words(page, "#heatmap .note:last-child")
    assert page.evaluate("document.querySelector('#heatmap canvas').width") == width + LEFT
    said = hover(page, "heatmap-canvas", LEFT + 10.5, 10)
    first, last = 5 + 10 * 3000 // width, 5 + 11 * 3000 // width - 1
    assert said.startswith(f"rank 0, steps {first}-{last}bubble")
    compute = [100 if step % 2 else 20 for step in range(first - 5, last - 4)]
    assert f"bubble{100 - sum(compute) / len(compute):.1f} %" in said
    assert "A point of the lines is the mean of up to" in words(page, "#series > .body > .note")


def test_more_ranks_than_pixels_share_cells_and_say_so(show):
    page = show(cells([(50, 50)] * 1040))
    assert "1,040 ranks in 520 rows." in words(page, "#heatmap .note:last-child")
    assert hover(page, "heatmap-canvas", 300, 519).startswith("ranks 1038-1039, step 5bubble50.0 %")


def test_few_values_come_without_a_note(show):
    page = show(document(2, 40))
    assert words(page, "#heatmap .note:last-child") == words(page, "#series > .body > .note") == ""


def test_the_waterfall_shows_who_waits_for_whom(show):
    early = [
        ("forward", "", 0, 20_000),
        ("straggler_wait", "rows", 20_000, 60_000),
        ("transfer", "rows", 60_000, 80_000),
        ("host", "hooks after the step", 80_000, 100_000),
    ]
    late = [
        ("data", "batch", 0, 40_000),
        ("forward", "", 40_000, 60_001),
        ("transfer", "rows", 60_001, 80_000),
        ("optimizer", "", 80_000, 90_000),
    ]
    page = show(intervals(early, late))
    width = page.evaluate("document.getElementById('waterfall-canvas').clientWidth") - LEFT - 8

    def at(ms: float) -> float:
        return LEFT + ms / 100 * width

    shown = [[pixel(page, "waterfall-canvas", round(at(ms)), y) for ms in (10, 35, 50, 70, 85, 97)] for y in (14, 42)]
    names = [
        ["forward", "straggler_wait", "straggler_wait", "transfer", "host_overhead", "host_overhead"],
        ["data_wait", "data_wait", "forward", "transfer", "optimizer", "none"],
    ]
    palette = {name: colour(page, name) for name in PART_NAMES[1:-1]} | {"none": (0, 0, 0)}
    assert shown == [[palette[name] for name in line] for line in names]
    assert words(page, "#waterfall .waits") == "rows at 60.0 ms: 1 rank waited up to 40.0 ms for rank 1."
    marks = [pixel(page, "waterfall-canvas", round(at(60)) - 5, y) for y in (14, 42)]
    assert marks == [palette["straggler_wait"], colour(page, "paper")]
    line = [
        pixel(page, "waterfall-canvas", x, y) for x in (int(at(60)) - 1, int(at(60)), int(at(60)) + 1) for y in (27, 28, 29)
    ]
    assert any(sum(point) < 3 * 128 and point != palette["straggler_wait"] for point in line)
    assert (
        hover(page, "waterfall-canvas", at(40), 14)
        == "rank 0, straggler waitwhatrowsfor40.0 msfrom20.0 msto60.0 msuntilrank 1 arrived"
    )
    assert hover(page, "waterfall-canvas", at(90), 14).startswith("rank 0, host overheadwhathooks after the stepfor20.0 ms")
    assert page.evaluate("document.getElementById('tip').hidden") is False
    assert hover(page, "waterfall-canvas", at(97), 42) is not None and page.evaluate("document.getElementById('tip').hidden")


def test_two_waits_for_exchanges_of_one_name_are_two_arrivals(show):
    first = [("straggler_wait", "rows", 0, 10_000), ("transfer", "rows", 10_000, 20_000), ("transfer", "rows", 60_000, 70_000)]
    second = [("forward", "", 0, 10_000), ("transfer", "rows", 10_000, 20_000), ("straggler_wait", "rows", 20_000, 60_000)]
    page = show(intervals(first, second))
    assert every(page, ".waits li", "e.textContent.replaceAll('\\u00a0', ' ')") == [
        "rows at 10.0 ms: 1 rank waited up to 10.0 ms for rank 1.",
        "rows at 60.0 ms: 1 rank waited up to 40.0 ms for rank 0.",
    ]


@pytest.mark.parametrize("median", [None, {"step": 7, "ranks": [[], []]}])
def test_no_median_step_is_said(show, median):
    page = show(document(2, 6, median_step=median))
    assert words(page, "#waterfall .body") == "This report holds no single step in full: none was kept."


def test_series_show_every_step_and_the_means(show):
    made = cells([(100_000, 0)], [(50_000, 150_000)])
    made["summary"].update(step_s=0.15, bubble=0.5)
    page = show(made)
    captions = every(page, "#series figcaption", "e.textContent")
    assert [plain(c) for c in captions] == [
        "Step time, mean over ranksmean 150 ms, most 200 ms",
        "Bubblemean 50.0 %, most 75.0 %",
        "Shares of wall time",
    ]
    width = page.evaluate("document.getElementById('shares-canvas').clientWidth") - LEFT
    columns = [[pixel(page, "shares-canvas", round(LEFT + share * width), y) for y in (10, 50, 150)] for share in (0.25, 0.75)]
    forward, wait = colour(page, "forward"), colour(page, "straggler_wait")
    assert columns == [[forward] * 3, [wait, wait, forward]]
    assert hover(page, "time-canvas", LEFT + 0.75 * width, 60) == "step 6step time200 ms"
    assert hover(page, "bubble-canvas", LEFT + 0.25 * width, 60) == "step 5bubble0.0 %"
    assert hover(page, "shares-canvas", LEFT + 0.75 * width, 60).startswith(
        "step 6forward25.0 %backward0.0 %optimizer0.0 %straggler wait75.0 %"
    )


def test_lines_are_drawn_where_the_values_are(show):
    made = cells(*[[(100_000, 0)]] * 4)
    made["summary"].update(step_s=0.03)  # the mean line apart from the values
    page = show(made)
    drawn = "Array.from(document.getElementById('time-canvas').getContext('2d').getImageData(600, 0, 20, 120).data)"
    seen = np.array(page.evaluate(drawn), dtype=int).reshape(120, 20, 4)
    ink = np.abs(seen - [*colour(page, "ink"), 255]).sum(axis=2)
    assert ink.min(axis=1).argmin() <= 1 and ink[5:].min() > 100  # 100 ms is the top of the axis
    quiet = np.abs(seen - [*colour(page, "quiet"), 255]).sum(axis=2).min(axis=1)
    assert 83 <= 20 + quiet[20:100].argmin() <= 84


def test_a_band_shows_the_extremes_of_steps_that_share_a_point(show):
    page = show(cells(*[[(100, 0)] if step % 2 else [(20, 80)] for step in range(3000)]))
    # the axis ends at 100 %, so that the band goes from 24 to 120 of 120 pixels, around the line at 72
    shown = [pixel(page, "bubble-canvas", 600, y) == colour(page, "band") for y in (15, 30, 100)]
    assert shown == [False, True, True]


def test_the_readmes_picture_comes_from_a_page(browser, tmp_path):
    pixels = pytest.importorskip("PIL.Image")
    one, other = (document() for _ in range(2))
    other["run"]["label"] = "another"
    page, picture = write_page(tmp_path / "report.html", [one, other]), tmp_path / "images" / "picture.png"
    script = Path(__file__).parents[4] / "scripts" / "picture.py"
    subprocess.run([sys.executable, str(script), str(page), str(picture)], check=True, timeout=60)
    with pixels.open(picture) as drawn:
        assert drawn.width == 1800 and drawn.height > 600 and len(drawn.convert("RGB").getcolors(4096)) > 5
