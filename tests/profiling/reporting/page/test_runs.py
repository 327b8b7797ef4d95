import pytest

from tests.helpers.documents import bare, document
from tests.helpers.shown_page import every, pixels, rows, words

pytestmark = pytest.mark.slow  # what the page shows in detail


def run_of(label, step_s, bubble, **changes):
    summary = {
        "step_s": step_s,
        "bubble": bubble,
        "limit": 1 / (1 - bubble),
        "samples": 1280,
        "samples_per_s": 32 / step_s,
    }
    return document(
        2, 40, run={"label": label, **changes.pop("run", {})}, summary={**summary, **changes.pop("summary", {})}, **changes
    )


def test_runs_are_compared_with_the_first(show):
    # 100 ms with 50 of bubble, 62.5 with 12.5: three quarters are gone, and 1 / (1 - 0.75 * 0.5) = 1.6
    page = show(
        run_of("ddp", 0.1, 0.5), run_of("freescale", 0.0625, 0.2), run_of("worse", 0.125, 0.6, status={"complete": False})
    )
    table = rows(page, "ablation")
    assert table == [
        ["1. ddp", "", "100 ms", "320", "50.0 %", "-", "1.00x", "-"],
        ["2. freescale", "", "62.5 ms", "512", "20.0 %", "75.0 %", "1.60x", "0.0 %"],
        ["3. worse interrupted", "", "125 ms", "256", "60.0 %", "-50.0 %", "0.80x", "0.0 %"],
    ]
    right = "e.lastChild.getBoundingClientRect().right - e.getBoundingClientRect().left"
    lengths = every(page, "#ablation .stack", right)
    assert [length / lengths[2] for length in lengths] == pytest.approx([0.8, 0.5, 1.0], abs=0.02)
    assert page.evaluate("document.querySelector('#ablation .warning')") is None


def test_a_first_run_without_bubble_leaves_the_reduction_open(show):
    assert rows(show(run_of("a", 0.1, 0.0), run_of("b", 0.1, 0.2)), "ablation")[1][5] == "-"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"run": {"model": "SASRec"}}, "model of a and b: 'HSTURecommender' and 'SASRec'"),
        ({"run": {"parameters": 5}}, "parameters of a and b: 1234567 and 5"),
        ({"run": {"world_size": 4}}, "world_size of a and b: 2 and 4"),
        ({"summary": {"samples": 2560}}, "samples per step of a and b: 32 and 64"),
    ],
)
def test_runs_that_did_different_work_are_warned_of(show, changes, says):
    warning = words(show(run_of("a", 0.1, 0.5), run_of("b", 0.1, 0.5, **changes)), "#ablation .warning")
    assert warning == f"These runs did different work, so their speed-ups say little:{says}"


def test_runs_are_compared_by_the_time_of_a_sample(show):
    # twice the samples in 1.25 times the time
    page = show(run_of("a", 0.1, 0.5), run_of("b", 0.125, 0.2, summary={"samples": 2560, "samples_per_s": 512}))
    assert rows(page, "ablation")[1][5:] == ["75.0 %", "1.60x", "0.0 %"]
    assert every(page, "#ablation thead th", "e.innerText")[-1] == "compute per sample"


def test_a_change_of_compute_is_told(show):
    assert rows(show(run_of("a", 0.1, 0.5), run_of("b", 0.1, 0.4)), "ablation")[1][5:] == ["20.0 %", "1.00x", "+20.0 %"]


def test_what_to_know_about_a_run_is_told(show):
    page = show(
        run_of("a", 0.1, 0.5), run_of("b", 0.1, 0.5, run={"device": "cuda"}, summary={"samples": 0, "samples_per_s": None})
    )
    assert (
        words(page, "#ablation .note") == "device of a and b: 'cpu' and 'cuda'the samples of b are unknown: compared per step"
    )
    assert every(page, "#ablation thead th", "e.innerText")[-1] == "compute per step"


def test_a_smaller_last_step_is_no_different_work(show):
    page = show(run_of("a", 0.1, 0.5), run_of("b", 0.1, 0.5, summary={"samples": 1270}))
    assert page.evaluate("document.querySelector('#ablation .warning')") is None


def test_the_selector_chooses_the_run(show):
    page = show(run_of("first", 0.1, 0.5), {**bare(), "run": {**document()["run"], "label": "second", "world_size": 1}})
    assert every(page, "option", "e.textContent") == ["1. first", "2. second"]
    assert words(page, "#label") == "first" and len(rows(page, "ranks")) == 2
    page.evaluate(
        "(() => { const s = document.querySelector('select'); s.value = '1'; s.dispatchEvent(new Event('change')); })()"
    )
    assert words(page, "#label") == "second" and len(rows(page, "ranks")) == 1 and len(rows(page, "ablation")) == 2
    assert words(page, "#waterfall .body").startswith("This report holds no single step")
    assert not page.evaluate("document.getElementById('device').checkVisibility()")
    page.evaluate(
        "(() => { const s = document.querySelector('select'); s.value = '0'; s.dispatchEvent(new Event('change')); })()"
    )
    assert words(page, "#label") == "first" and page.evaluate("document.getElementById('device').checkVisibility()")
    assert pixels(page, "waterfall-picture", [(0.5, 0.25)])[0] != (255, 255, 255)


def test_one_run_needs_no_selector(show):
    page = show(document())
    assert not page.evaluate("document.getElementById('selector').checkVisibility()")
    assert not page.evaluate("document.getElementById('ablation').checkVisibility()")
