import pytest

from lightning_freescale.profiling.reporting.page import write_page
from tests.helpers.documents import HOSTILE, bare, document, hostile
from tests.helpers.shown_page import every, hover, pixels, plain, rows, words

DOCUMENTS = {
    "two ranks": [document(2)],
    "eight ranks": [document(8, 30)],
    "one step, one rank": [document(1, 1)],
    "no step": [document(2, 0, device_idle=None)],
    "interrupted": [document(2, status={"complete": False, "reason": "rank 1 was killed", "not_exchanged": 7})],
    "interrupted, nobody knows why": [document(2, status={"complete": False})],
    "nulls": [bare()],
    "nulls in between": [
        document(
            2, device_idle={"idle": [0.1, None], "compute": [0.9, None], "other": [0.0, None]}, imbalance={"residual": None}
        )
    ],
    "strange strings": [hostile(), hostile()],
    "undivided waits": [document(4, 30, divided=False)],
    "several": [document(8, 30), document(8, 30, pace=0.4), bare()],
}
SHOWN = ("eight ranks", "nulls", "strange strings", "several")


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["light", "dark"])
@pytest.mark.parametrize("name", [name if name in SHOWN else pytest.param(name, marks=pytest.mark.slow) for name in DOCUMENTS])
def test_every_report_is_shown_without_a_complaint(show, name, dark):
    page = show(*DOCUMENTS[name], dark=dark)
    assert words(page, "h1") == " ".join(DOCUMENTS[name][0]["run"]["label"].split())
    assert words(page, "#footer").endswith("report version 1")  # the last thing put there
    assert not [
        word for word in ("undefined", "NaN", "Infinity", "null", "[object") if word in page.evaluate("document.body.innerText")
    ]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(
    "name", [name if name == "several" else pytest.param(name, marks=pytest.mark.slow) for name in DOCUMENTS]
)
def test_a_narrow_page_is_not_wider_than_the_screen(show, name):
    page = show(*DOCUMENTS[name], width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_strange_strings_stay_text(show):
    page = show(hostile(), hostile())
    told = hover(page, "waterfall-picture", 0.3, 0.25)
    assert " ".join(HOSTILE.split())[:40] in told
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    # the reports and their two series, Plotly packed and as it runs, the page's own
    assert page.evaluate("document.querySelectorAll('script').length") == 6
    assert every(page, "a[href], [onerror]", "e.outerHTML") == []
    text = page.evaluate("document.querySelector('main').textContent + document.querySelector('header').textContent")
    # label twice in the selector, in the heading and in the ablation; model, strategy, device, reason; what-if and its note,
    # exchange, section, method, reason of the waits, method, slow rank; the waterfall's list
    assert text.count(HOSTILE) >= 14
    assert page.evaluate("document.getElementById('label').textContent") == HOSTILE
    assert rows(page, "exchanges")[0][0] == " ".join(HOSTILE.split())


def test_it_can_be_read_without_seeing(show):
    page = show(*DOCUMENTS["several"])
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.evaluate("Array.from(document.querySelectorAll('h1')).length") == 1
    assert (
        page.evaluate("Array.from(document.querySelectorAll('th')).filter(th => !['row', 'col'].includes(th.scope)).length")
        == 0
    )
    assert page.evaluate("Array.from(document.querySelectorAll('table')).filter(t => !t.caption.textContent).length") == 0
    labels = every(page, ".picture", "[e.id, e.getAttribute('role'), e.getAttribute('aria-label'), e.tabIndex]")
    assert [name for name, *_ in labels] == ["heatmap-picture", "waterfall-picture", "series-picture"]
    assert all(role == "figure" and len(label) > 40 and tab == 0 for _, role, label, tab in labels)
    buttons = every(page, ".modebar-btn", "e.getAttribute('aria-label') ?? e.dataset.title")
    assert len(buttons) == 3 * 7 and all(buttons)
    stacks = every(page, "#shares .stack", "e.getAttribute('aria-label')")
    assert "straggler wait" in stacks[0]


def test_the_header_tells_the_run_and_its_figures(show):
    summary = {
        "bubble": 0.3,
        "limit": 1 / 0.7,
        "step_s": 0.1034,
        "samples": 9440,
        "samples_per_s": 195.14,
        "compute_imbalance": 1.344,
    }
    page = show(document(2, 6, summary=summary, overhead={"share": 0.00104, "total_s": 0.000107}, status={"steps": 295}))
    assert words(page, "#label") == "freescale"
    assert (
        words(page, "#run")
        == "HSTURecommender · 1.23 M parameters · strategy freescale · 2 ranks on cpu · 295 steps after 5 of warm-up · complete"
    )
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
    assert words(page, "#footer").startswith("Started 2026-11-21 08:00 UTC · lightning_freescale 0.1.0 · torch 2.13.0")
    assert page.evaluate("document.title") == "freescale: bubble report"


def test_the_verdict_stands_at_the_top(show):
    shares = {**document()["summary"]["shares"], "compute": 0.7, "straggler_wait": 0.12, "transfer": 0.16}
    ideas = [
        {"name": name, "speed_up": value, "limit": 1.5, "note": None}
        for name, value in (("perfect balance", 1.1), ("full overlap", 1.2), ("balance + overlap", 1.4))
    ]
    page = show(document(summary={"shares": shares}, what_if=ideas))
    assert every(page, "#verdict p", "e.className") == ["verdict", "why", "next", "also"]
    told = words(page, "#verdict")
    assert told.startswith(
        "Verdict: Transfer, 16.0% of the time, most of it of rows of user_history: without it the run would be"
    )
    assert "Why: A rank waits" in told and "Next: " in told and "docs/how_to/read_the_report.md" in told
    assert "Also: Straggler wait, 12.0% of the time" in told
    # what tells of it comes right after where the time went
    assert every(page, "main > section", "e.id")[1:3] == ["shares", "exchanges"]


def test_a_report_of_an_earlier_version_has_no_verdict(show):
    page = show({name: value for name, value in document().items() if name != "verdict"})
    assert every(page, "#verdict p", "e.className") == ["verdict"]


@pytest.mark.slow
def test_an_interrupted_run_says_so(show):
    page = show(
        document(2, 40, status={"complete": False, "reason": "rank 1 raised RuntimeError: out of memory", "not_exchanged": 7})
    )
    assert words(page, "#status") == (
        "Interrupted: rank 1 raised RuntimeError: out of memory. The report covers 40 steps. "
        "7 further steps ran, but the ranks' records of them were not brought together."
    )
    assert page.evaluate("document.getElementById('status').checkVisibility()")
    assert words(page, "#run").endswith("interrupted")


@pytest.mark.slow
def test_missing_ranks_are_told(show):
    page = show(document(1, 3, run={"world_size": 8}))
    assert words(page, "#status") == "Only 1 rank of 8 could be reported."


@pytest.mark.slow
def test_a_run_without_compute_has_no_limit(show):
    page = show(document(1, 3, summary={"limit": None, "bubble": 1.0}))
    assert words(page, "[data-figure=limit] dd") == "-"


@pytest.mark.slow
def test_a_long_run_on_many_ranks_is_shown(show):
    page = show(document(64, 2000))
    assert len(rows(page, "ranks")) == 64
    assert "2,000 steps in" in words(page, "#heatmap .note:last-child")
    colours = set(pixels(page, "heatmap-picture", [(x, y) for x in (0.1, 0.5, 0.9) for y in (0.01, 0.5, 0.99)]))
    assert (255, 255, 255) not in colours and len(colours) > 2


@pytest.mark.slow
def test_a_long_run_on_many_ranks_makes_no_large_file(tmp_path):
    assert write_page(tmp_path / "report.html", [document(64, 2000)]).stat().st_size < 6e6
