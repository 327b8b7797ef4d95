import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_freescale.profiling.reporting.page import write_page
from tests.helpers.documents import PART_NAMES, document
from tests.helpers.shown_page import cells, centre, colour, every, hover, inside, intervals, pixels, plain, rows, said, words

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
    order = pixels(page, "heatmap-picture", [((s + 0.5) / 3, (r + 0.5) / 2) for s in range(3) for r in range(2)])
    brightness = [sum(colours) for colours in order]
    assert brightness == sorted(brightness, reverse=True) and len(set(brightness)) == 6  # the more bubble, the darker
    assert order[0] == colour(page, "heat-low") and order[-1] == colour(page, "heat-high")
    assert every(page, "#heatmap .cbaxis text", "e.textContent.replace('\\u00a0', ' ')") == ["bubble 0", "90 %"]
    assert "Means of the ranks: from 40.0 % (rank 0) to 56.7 % (rank 1)." in words(page, "#heatmap .note")


def test_the_heat_map_tells_rank_step_and_parts(show):
    page = show(cells([(100_000, 0), (80_000, 20_000)], [(60_000, 40_000), (40_000, 60_000)]))
    assert hover(page, "heatmap-picture", 0.75, 0.75).split("|") == [
        "rank 1, step 6",
        "bubble 60.0 % of 100 ms",
        "forward 40.0 ms, backward 0 ms",
        "optimizer 0 ms, straggler wait 60.0 ms",
        "transfer 0 ms, data wait 0 ms",
        "host overhead 0 ms, unexplained 0 ms",
        "hidden 0 ms",
    ]
    page.mouse.move(2, 2)
    page.wait_for_timeout(300)
    assert said(page, "heatmap-picture") == ""


def _walk(page, picture, keys):
    page.evaluate(f"document.getElementById('{picture}').focus()")
    told = []
    for key in keys:
        page.keyboard.press(key)
        page.wait_for_timeout(50)
        told.append(said(page, picture).split("|")[0])
    return told


def test_the_heat_map_can_be_walked_by_keyboard(show):
    page = show(cells([(100, 0), (80, 20)], [(60, 40), (40, 60)]))
    told = _walk(page, "heatmap-picture", ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowLeft", "ArrowLeft"))
    assert told == [f"rank {r}, step {s}" for r, s in ((0, 5), (1, 5), (1, 6), (0, 6), (0, 5), (0, 5))]


def test_the_other_pictures_can_be_walked_by_keyboard(show):
    page = show(intervals([("forward", "", 0, 20_000), ("backward", "", 20_000, 30_000)], [("backward", "", 0, 40_000)]))
    told = _walk(page, "waterfall-picture", ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp"))
    assert told == ["rank 0, forward", "rank 0, backward", "rank 1, backward", "rank 0, forward"]
    assert _walk(page, "series-picture", ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft")) == [
        "step 5",
        "step 6",
        "step 6",
        "step 5",
    ]


def test_more_steps_than_pixels_share_cells_until_one_zooms_in(show):
    odd_waits = [[(100, 0)] if step % 2 else [(20, 80)] for step in range(3000)]
    page = show(cells(*odd_waits))
    assert "3,000 steps in 1,000 columns. A cell shows the mean" in words(page, "#heatmap .note:last-child")
    title, shown, *_ = hover(page, "heatmap-picture", 0.3, 0.5).split("|")
    first, last = (int(step) for step in re.fullmatch(r"rank 0, steps (\d+)-(\d+)", title).groups())
    mean = sum(80 if step % 2 else 0 for step in range(first, last + 1)) / 3  # step 5 is the first, and waits
    assert last - first == 2 and first == pytest.approx(905, abs=6) and shown == f"bubble {mean:.1f} % of 0.10 ms"
    left, top, width, height = inside(page, "heatmap-picture")
    page.mouse.move(left + 0.4 * width, top + height / 2)
    page.mouse.down()
    page.mouse.move(left + 0.5 * width, top + height / 2, steps=4)
    page.mouse.up()
    page.wait_for_timeout(500)
    assert words(page, "#heatmap .note:last-child") == ""
    title, shown, *_ = hover(page, "heatmap-picture", 0.5, 0.5).split("|")
    step = int(title.removeprefix("rank 0, step "))
    assert step == pytest.approx(1355, abs=15) and shown == f"bubble {80 if step % 2 else 0}.0 % of 0.10 ms"
    page.mouse.dblclick(left + width / 2, top + height / 2)
    page.wait_for_timeout(800)
    assert "3,000 steps in 1,000 columns." in words(page, "#heatmap .note:last-child")


def test_more_ranks_than_pixels_share_cells_and_say_so(show):
    page = show(cells([(50, 50)] * 1040))
    assert "1,040 ranks in 520 rows." in words(page, "#heatmap .note:last-child")
    assert hover(page, "heatmap-picture", 0.5, 0.9995).startswith("ranks 1038-1039, step 5|bubble 50.0 %")


def test_few_values_come_without_a_note(show):
    assert words(show(document(2, 40)), "#heatmap .note:last-child") == ""


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
    shown = pixels(page, "waterfall-picture", [(ms / 100, y) for y in (0.25, 0.75) for ms in (10, 35, 50, 70, 85, 97)])
    names = [
        *("forward", "straggler_wait", "straggler_wait", "transfer", "host_overhead", "host_overhead"),
        *("data_wait", "data_wait", "forward", "transfer", "optimizer", "paper"),
    ]
    assert shown == [colour(page, name) for name in names]
    assert words(page, "#waterfall .waits") == "rows at 60.0 ms: 1 rank waited up to 40.0 ms for rank 1."
    assert every(page, "#waterfall .legendtext", "e.textContent") == [
        *("forward", "optimizer", "straggler wait", "transfer", "data wait", "host overhead"),
    ]
    left, top, width, height = inside(page, "waterfall-picture")
    for selector, place in ((".scatterlayer .point", (0.6, 0.75)), (".shapelayer path", (0.6, 0.5))):  # mark and line
        x, y = centre(page, f"document.querySelector('#waterfall-picture {selector}')")
        assert ((x - left) / width, (y - top) / height) == pytest.approx(place, abs=0.02)
    told = ["rank 0, straggler wait", "rows", "for 40.0 ms", "from 20.0 ms to 60.0 ms", "until rank 1 arrived"]
    assert hover(page, "waterfall-picture", 0.4, 0.25).split("|") == told
    assert hover(page, "waterfall-picture", 0.9, 0.25).startswith("rank 0, host overhead|hooks after the step|for 20.0 ms")
    assert hover(page, "waterfall-picture", 0.6, 0.75).startswith("rank 1 arrives last|at rows|after 60.0 ms")
    assert hover(page, "waterfall-picture", 0.97, 0.75) == ""


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
    captions = every(page, "#series .annotation text", "e.textContent")
    assert [plain(c) for c in captions] == [
        "Step time: mean 150 ms, most 200 ms",
        "Bubble: mean 50.0 %, most 75.0 %",
        "Shares of wall time",
    ]
    places = [(x, y) for x in (0.25, 0.75) for y in (0.06, 0.3, 0.94)]
    forward, wait = colour(page, "forward"), colour(page, "straggler_wait")
    assert pixels(page, "series-picture", places, "xy3") == [forward] * 3 + [wait, wait, forward]
    told = hover(page, "series-picture", 0.75, 0.5)  # of all three at once
    assert told.startswith(
        "step 6|step time : 200 ms|bubble : 75.0 %|forward : 25.0 %|backward : 0.0 %|optimizer : 0.0 %|straggler wait : 75.0 %"
    )
    assert hover(page, "series-picture", 0.25, 0.5, "xy3").startswith(
        "step 5|step time : 100 ms|bubble : 0.0 %|forward : 100.0 %"
    )


@pytest.mark.parametrize("steps", [4, 150])
def test_lines_and_areas_are_drawn_where_the_values_are(show, steps):
    made = cells(*[[(75_000, 25_000)]] * steps)
    made["summary"].update(step_s=0.03)  # the mean line apart from the values
    page = show(made)
    ink, quiet = colour(page, "ink"), colour(page, "quiet")

    def height(wanted, ends):
        places = [
            (x, 1 - y / 200) for y in range(*ends) for x in (0.41, 0.412, 0.414, 0.416, 0.418, 0.42, 0.422)
        ]  # over a dash
        far = np.abs(np.array(pixels(page, "series-picture", places, "xy")) - wanted).sum(axis=1)
        return (ends[0] + far.argmin() // 7) / 200, far.min()

    labels = "Array.from(document.querySelectorAll('#series-picture .yaxislayer-above .ytick text'), t => t.textContent)"
    assert "100 ms" in [plain(label) for label in page.evaluate(labels)]
    drawn, error = height(ink, (100, 200))
    mean, _ = height(quiet, (20, 100))
    assert error < 150 and 0.85 < drawn < 1
    assert mean == pytest.approx(0.3 * drawn, abs=0.02)
    shares = pixels(page, "series-picture", [(0.45, y) for y in (0.2, 0.3)], "xy3")
    assert shares == [colour(page, "straggler_wait"), colour(page, "forward")]


def test_means_stand_out_of_steps_that_are_too_many_for_a_line(show):
    page = show(cells(*[[(100, 0)] if step % 2 else [(20, 80)] for step in range(3000)]))
    column = pixels(page, "series-picture", [(0.5, y / 200) for y in range(200)], "xy2")
    ink, band = colour(page, "ink"), colour(page, "band")
    dark = [y / 200 for y, seen in enumerate(column) if sum(abs(a - b) for a, b in zip(seen, ink)) < 120]
    pale = [y / 200 for y, seen in enumerate(column) if sum(abs(a - b) for a, b in zip(seen, band)) < 60]
    assert dark and min(dark) > 0.4 and max(dark) < 0.62  # the mean, half of 80 %
    assert len(pale) > 100 and min(pale) < 0.1 and max(pale) > 0.9  # each step, 0 or 80 %


def test_a_part_is_hidden_by_its_entry_in_the_legend(show):
    page = show(cells([(100_000, 0)], [(50_000, 150_000)]))
    before = len(every(page, "#series-picture .barlayer .trace.bars", "e"))
    inside(page, "series-picture")  # scrolls there
    entries = "Array.from(document.querySelectorAll('#series-picture .traces'))"
    entry = centre(page, f"{entries}.find(e => e.textContent.startsWith('straggler')).querySelector('.legendtoggle')")
    page.mouse.click(*entry)
    page.wait_for_timeout(900)  # Plotly waits for a second click, which would hide all others
    assert len(every(page, "#series-picture .barlayer .trace.bars", "e")) == before - 1
    assert "straggler wait" not in hover(page, "series-picture", 0.75, 0.5)


@pytest.mark.parametrize(("button", "begins"), [("toImage", b"\x89PNG"), ("svg", b"<svg")])
def test_a_picture_can_be_saved(show, button, begins):
    page = show(document(2, 6))
    titles = {"toImage": "png", "svg": "svg"}
    with page.expect_download() as download:
        page.evaluate(
            "Array.from(document.querySelectorAll('#waterfall-picture .modebar-btn'))"
            f".find(b => (b.dataset.title + b.getAttribute('aria-label')).toLowerCase().includes('{titles[button]}')).click()"
        )
    assert download.value.suggested_filename == f"waterfall-picture.{titles[button]}"
    assert Path(download.value.path()).read_bytes().startswith(begins)


def test_without_the_library_a_notice_stands_in_place_of_each_picture(show, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)  # as if it were not installed
    with pytest.warns(UserWarning, match="no pictures without the package plotly"):
        page = show(document(8, 30), document(8, 30, pace=0.4))
    notices = every(page, "#heatmap-picture, #waterfall-picture, #series-picture", "e.textContent")
    assert len(notices) == 3 and all("pip install 'lightning-freescale[report]'" in notice for notice in notices)
    assert "Means of the ranks: from" in words(page, "#heatmap .note") and "waited up to" in words(page, "#waterfall .waits")
    assert len(rows(page, "ranks")) == 8 and len(rows(page, "ablation")) == 2


def test_the_readmes_picture_comes_from_a_page(browser, tmp_path):
    pixels = pytest.importorskip("PIL.Image")
    one, other = (document() for _ in range(2))
    other["run"]["label"] = "another"
    page, picture = write_page(tmp_path / "report.html", [one, other]), tmp_path / "images" / "picture.png"
    script = Path(__file__).parents[4] / "scripts" / "picture.py"
    subprocess.run([sys.executable, str(script), str(page), str(picture)], check=True, timeout=60)
    with pixels.open(picture) as drawn:
        assert drawn.width == 1800 and drawn.height > 600 and len(drawn.convert("RGB").getcolors(4096)) > 5
