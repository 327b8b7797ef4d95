import re

import pytest

from lightning_freescale._version import SITE
from tests.helpers.documents import HOSTILE, bare, document, hostile
from tests.helpers.shown_page import cells, colour, every, hover, pixels, plain, rows, words

pytestmark = pytest.mark.xdist_group("browser")

IDLE = {"idle": [0.1, None], "compute": [0.9, None], "other": [0.0, None]}
DOCUMENTS = {
    "several": [document(8, 30), document(8, 30, pace=0.4), bare()],
    "one step, one rank": [document(1, 1)],
    "interrupted": [document(2, status={"complete": False})],
    "nulls": [bare()],
    "nulls in between": [document(2, device_idle=IDLE, imbalance={"residual": None})],
    "undivided waits": [document(4, 30, divided=False)],
}


@pytest.mark.parametrize("name", ["several", *(pytest.param(n, marks=pytest.mark.slow) for n in DOCUMENTS if n != "several")])
def test_every_report_is_shown_without_a_complaint(show, name):
    for width in (1200, 390):
        page = show(*DOCUMENTS[name], width=width)
        assert words(page, "#footer").endswith("report version 1")  # the last text that the script writes
        shown = page.evaluate("document.body.innerText")
        assert not [word for word in ("undefined", "NaN", "Infinity", "null", "[object") if word in shown]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert max(every(page, ".scroll", "e.scrollWidth - e.clientWidth")) <= 1, "no table is cut off"


def test_strange_strings_stay_text(show):
    page = show(hostile(), hostile())
    assert " ".join(HOSTILE.split())[:40] in hover(page, "waterfall-picture", 0.3, 0.25)
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    # the reports and their two series, Plotly packed and as it runs, the page's own
    assert page.evaluate("document.querySelectorAll('script').length") == 6
    assert {link.split("#")[0] for link in every(page, "a[href], [onerror]", "e.href")} == {
        f"{SITE}how_to/read_the_report.html"
    }
    text = page.evaluate("document.querySelector('main').textContent + document.querySelector('header').textContent")
    # label twice in the selector, in the heading and in the ablation; model, strategy, device, reason; what-if and its note,
    # exchange, section, method, reason of the waits, method, slow rank; the waterfall's list
    assert text.count(HOSTILE) >= 14
    assert page.evaluate("document.getElementById('label').textContent") == HOSTILE
    assert rows(page, "exchanges")[0][0] == " ".join(HOSTILE.split())


def test_a_screen_reader_finds_names_of_everything(show):
    page = show(*DOCUMENTS["several"])
    assert page.evaluate("document.documentElement.lang") == "en" and len(every(page, "h1", "e.id")) == 1
    assert set(every(page, "th", "e.scope")) == {"row", "col"} and all(every(page, "table", "e.caption.textContent"))
    labels = every(page, ".picture", "[e.id, e.getAttribute('role'), e.getAttribute('aria-label'), e.tabIndex]")
    assert [name for name, *_ in labels] == ["heatmap-picture", "waterfall-picture", "series-picture"]
    assert all(role == "figure" and len(label) > 40 and tab == 0 for _, role, label, tab in labels)
    buttons = every(page, ".modebar-btn", "e.getAttribute('aria-label') ?? e.dataset.title")
    assert len(buttons) == 3 * 7 and all(buttons)
    assert "straggler wait" in every(page, "#shares .stack", "e.getAttribute('aria-label')")[0]


def test_the_header_has_the_run_its_figures_and_the_verdict(show):
    shares = {**document()["summary"]["shares"], "compute": 0.7, "straggler_wait": 0.12, "transfer": 0.16}
    summary = {"bubble": 0.3, "limit": 1 / 0.7, "step_s": 0.1034, "samples": 9440, "samples_per_s": 195.14, "shares": shares}
    gains = (("perfect balance", 1.1), ("full overlap", 1.2), ("balance + overlap", 1.4))
    ideas = [{"name": name, "speed_up": value, "limit": 1.5, "note": None} for name, value in gains]
    summary["compute_imbalance"], overhead = 1.344, {"share": 0.00104, "total_s": 0.000107}
    page = show(document(2, 6, summary=summary, overhead=overhead, status={"steps": 295}, what_if=ideas))
    assert words(page, "#label") == "freescale" and page.evaluate("document.title").startswith("freescale")
    run = words(page, "#run").split(" · ")
    assert run[:2] == ["HSTURecommender", "1.23 M parameters"] and run[-1] == "complete"
    assert [re.sub(r"\D+", " ", fact).split() for fact in run[3:5]] == [["2"], ["295", "5"]]
    values = every(page, "#figures > div", "[e.dataset.figure, e.querySelector('dd').textContent]")
    assert {name: plain(value) for name, value in values} == {
        "bubble": "30.0 %",
        "limit": "1.43x",
        "step time": "103 ms",
        "samples per second": "195",
        "compute imbalance": "1.34",
        "profiler overhead": "0.10 %",
    }
    assert words(page, "#status") == ""
    assert "2026-11-21 08:00 UTC · lightning_freescale 0.1.0 · torch 2.13.0" in words(page, "#footer")
    assert every(page, "#verdict p", "e.className") == ["verdict", "why", "next", "also"]
    shown_text = words(page, "#verdict")
    assert "16.0%" in shown_text and "rows of user_history" in shown_text and "12.0%" in shown_text.partition("Also:")[2]
    # the section with the cause's figures comes right after where the time went
    assert every(page, "main > section", "e.id")[1:3] == ["shares", "exchanges"]


@pytest.mark.slow
def test_what_a_report_lacks_is_said(show):
    lost = {"complete": False, "reason": "rank 1 raised RuntimeError: out of memory", "not_exchanged": 7}
    page = show(document(2, 40, status=lost))
    shown_text = words(page, "#status")
    assert lost["reason"] in shown_text and "40 steps" in shown_text and "7 further steps" in shown_text
    assert page.evaluate("document.getElementById('status').checkVisibility()")
    assert words(page, "#run").endswith("interrupted")
    assert re.findall(r"\d+", words(show(document(1, 3, run={"world_size": 8})), "#status")) == ["1", "8"]
    assert words(show(document(1, 3, summary={"limit": None, "bubble": 1.0})), "[data-figure=limit] dd") == "-"
    page = show({name: value for name, value in document().items() if name != "verdict"})  # of an earlier version
    assert every(page, "#verdict p", "e.className") == ["verdict"]


@pytest.mark.slow
def test_the_fixtures_notice_a_broken_page(open_page, tmp_path):
    policy = "<meta http-equiv=Content-Security-Policy content=\"img-src 'none'\">"
    script = "<script>console.log('hello'), Promise.reject(new Error('rejected'))</script>"
    (tmp_path / "broken.html").write_text(
        f"<!doctype html><title>x</title>{policy}{script}<img src='http://127.0.0.1:9/x.png'>"
    )
    page, watch = open_page(tmp_path / "broken.html")
    page.wait_for_timeout(200)
    assert watch.requests == ["http://127.0.0.1:9/x.png"]
    missed = [said for said in ("log: hello", "rejected", "Content Security Policy") if said not in "\n".join(watch.console)]
    assert missed == []


@pytest.mark.slow
def test_pictures_follow_the_theme(show):
    page = show(cells([(10, 90)]))
    (light,) = pixels(page, "series-picture", [(0.5, 0.95)], "xy3")
    assert light == colour(page, "forward")
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(500)
    (dark,) = pixels(page, "series-picture", [(0.5, 0.95)], "xy3")
    assert dark == colour(page, "forward") != light
