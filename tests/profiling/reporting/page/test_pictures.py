import re

import pytest

from lightning_freescale.profiling.analysis.breakdown import PART_NAMES
from tests.helpers.documents import document
from tests.helpers.shown_page import cells, colour, every, hover, inside, intervals, pixels, plain, said, words

pytestmark = pytest.mark.xdist_group("browser")

NOTE = "#heatmap .note:last-child"
TWO_STEPS = cells([(100_000, 0), (80_000, 20_000)], [(60_000, 40_000), (40_000, 60_000)])


@pytest.mark.slow
def test_shares_are_explained(show):
    shares = dict(zip(PART_NAMES[1:], (0.05, 0.2, 0.3, 0.1, 0.2, 0.08, 0.0, 0.04, 0.03, 0.12)), compute=0.6)
    page = show(document(summary={"shares": shares, "step_s": 0.1, "overlap_efficiency": 0.6}))
    legend = every(page, "#shares .legend li", "[e.dataset.part, e.innerText, e.title]")
    text = {name: " ".join(plain(words).split()) for name, words, _ in legend}
    assert text["straggler_wait"] == "straggler wait 20.0 % 20.0 ms" and text["data_wait"] == "data wait 5.0 % 5.00 ms"
    assert all(len(title) > 20 for _, _, title in legend)
    assert re.findall(r"[\d.]+ (?:%|ms)", words(page, "#shares .note")) == ["12.0 %", "12.0 ms", "60.0 %"]


def test_the_heat_map_has_a_cell_per_rank_and_step(show):
    page = show(cells([(100, 0), (80, 20)], [(60, 40), (40, 60)], [(20, 80), (10, 90)]))
    order = pixels(page, "heatmap-picture", [((s + 0.5) / 3, (r + 0.5) / 2) for s in range(3) for r in range(2)])
    brightness = [sum(colours) for colours in order]
    assert brightness == sorted(brightness, reverse=True) and len(set(brightness)) == 6  # the more bubble, the darker
    assert order[0] == colour(page, "heat-low") and order[-1] == colour(page, "heat-high")
    assert [plain(text) for text in every(page, "#heatmap .cbaxis text", "e.textContent")] == ["bubble 0", "90 %"]
    assert re.findall(r"[\d.]+ %|rank \d", words(page, "#heatmap .note")) == ["40.0 %", "rank 0", "56.7 %", "rank 1"]
    assert words(page, NOTE) == ""
    assert hover(page, "heatmap-picture", 0.5, 0.75).split("|") == [
        *("rank 1, step 6", "bubble 60.0 % of 0.10 ms", "forward 0.040 ms, backward 0 ms"),
        *("optimizer 0 ms, straggler wait 0.060 ms", "transfer 0 ms, data wait 0 ms"),
        *("host overhead 0 ms, unexplained 0 ms", "hidden 0 ms"),
    ]
    page.mouse.move(2, 2)
    page.wait_for_timeout(300)
    assert said(page, "heatmap-picture") == ""


def _walk(page, picture, keys):
    page.evaluate(f"document.getElementById('{picture}').focus()")
    shown_text = []
    for key in keys:
        page.keyboard.press(key)
        page.wait_for_timeout(50)
        shown_text.append(said(page, picture).split("|")[0])
    return shown_text


@pytest.mark.slow
def test_the_pictures_can_be_walked_by_keyboard(show):
    ranks = [("forward", "", 0, 20_000), ("backward", "", 20_000, 30_000)], [("backward", "", 0, 40_000)]
    page = show({**TWO_STEPS, "median_step": intervals(*ranks)["median_step"]})
    shown_text = _walk(page, "heatmap-picture", ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowLeft", "ArrowLeft"))
    assert shown_text == [f"rank {r}, step {s}" for r, s in ((0, 5), (1, 5), (1, 6), (0, 6), (0, 5), (0, 5))]
    shown_text = _walk(page, "waterfall-picture", ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp"))
    assert shown_text == ["rank 0, forward", "rank 0, backward", "rank 1, backward", "rank 0, forward"]
    shown_text = _walk(page, "series-picture", ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"))
    assert shown_text == ["step 5", "step 6", "step 6", "step 5"]


@pytest.mark.slow
def test_more_steps_than_pixels_share_cells_until_one_zooms_in(show):
    page = show(cells(*[[(100, 0)] if step % 2 else [(20, 80)] for step in range(3000)]))
    assert "3,000 steps in 1,000 columns" in words(page, NOTE)
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
    assert words(page, NOTE) == ""
    title, shown, *_ = hover(page, "heatmap-picture", 0.5, 0.5).split("|")
    step = int(title.removeprefix("rank 0, step "))
    assert step == pytest.approx(1355, abs=15) and shown == f"bubble {80 if step % 2 else 0}.0 % of 0.10 ms"
    page.mouse.dblclick(left + width / 2, top + height / 2)
    page.wait_for_timeout(800)
    assert "3,000 steps in 1,000 columns" in words(page, NOTE)


def test_the_waterfall_shows_who_waits_for_whom(show):
    early = [("forward", "", 0, 20_000), ("straggler_wait", "rows", 20_000, 60_000), ("transfer", "rows", 60_000, 80_000)]
    early += [("host", "hooks after the step", 80_000, 100_000)]
    late = [("data", "batch", 0, 40_000), ("forward", "", 40_000, 60_001), ("transfer", "rows", 60_001, 80_000)]
    late += [("optimizer", "", 80_000, 90_000)]
    page = show(intervals(early, late))
    shown = pixels(page, "waterfall-picture", [(ms / 100, y) for y in (0.25, 0.75) for ms in (10, 35, 50, 70, 85, 97)])
    names = [
        *("forward", "straggler_wait", "straggler_wait", "transfer", "host_overhead", "host_overhead"),
        *("data_wait", "data_wait", "forward", "transfer", "optimizer", "paper"),
    ]
    assert shown == [colour(page, name) for name in names]
    assert words(page, "#waterfall .waits") == "rows at 60.0 ms: 1 rank waited up to 40.0 ms for rank 1."
    legend = ["forward", "optimizer", "straggler wait", "transfer", "data wait", "host overhead"]
    assert every(page, "#waterfall .legendtext", "e.textContent") == legend
    shown_text = ["rank 0, straggler wait", "rows", "for 40.0 ms", "from 20.0 ms to 60.0 ms", "until rank 1 arrived"]
    assert hover(page, "waterfall-picture", 0.4, 0.25).split("|") == shown_text
    assert hover(page, "waterfall-picture", 0.9, 0.25).startswith("rank 0, host overhead|hooks after the step|for 20.0 ms")
    assert hover(page, "waterfall-picture", 0.6, 0.75).startswith("rank 1 arrives last|at rows|after 60.0 ms")
    assert hover(page, "waterfall-picture", 0.97, 0.75) == ""


def test_series_show_every_step_and_the_means(show):
    made = cells([(100_000, 0)], [(50_000, 150_000)])
    made["summary"].update(step_s=0.15, bubble=0.5)
    page = show(made)
    captions = [plain(text) for text in every(page, "#series .annotation text", "e.textContent")]
    assert captions[:2] == ["Step time: mean 150 ms, most 200 ms", "Bubble: mean 50.0 %, most 75.0 %"]
    places = [(x, y) for x in (0.25, 0.75) for y in (0.06, 0.3, 0.94)]
    forward, wait = colour(page, "forward"), colour(page, "straggler_wait")
    assert pixels(page, "series-picture", places, "xy3") == [forward] * 3 + [wait, wait, forward]
    shown_text = hover(page, "series-picture", 0.75, 0.5).split("|")  # of all three at once
    assert shown_text[:4] == ["step 6", "step time : 200 ms", "bubble : 75.0 %", "forward : 25.0 %"]
    assert shown_text[6] == "straggler wait : 75.0 %"
    shown_text = hover(page, "series-picture", 0.25, 0.5, "xy3").split("|")
    assert shown_text[:4] == ["step 5", "step time : 100 ms", "bubble : 0.0 %", "forward : 100.0 %"]
