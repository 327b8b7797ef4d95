"""Tables, bars and remarks of the page's sections."""

import pytest

from tests.helpers.documents import REASON, bare, document
from tests.helpers.reports import full_report, plan
from tests.helpers.shown_page import every, pixels, plain, rows, words

pytestmark = pytest.mark.xdist_group("browser")

IDEAS = [
    {"name": "perfect balance", "speed_up": 1.25, "limit": 1.5, "note": "a note"},
    {"name": "no data wait", "speed_up": 1.0, "limit": 1.5, "note": None},
    {"name": "no contention", "speed_up": 0.98, "limit": 1.5, "note": None},
    {"name": "full overlap", "speed_up": None, "limit": None, "note": "the clocks were not aligned"},
]
CAUSES = {"data_s": 0.006, "hardware_s": 0.003, "jitter_s": 0.001, "slow_ranks": {"3": 1.3}, "residual": None}


def _visible(page, section):
    return page.evaluate(f"document.getElementById('{section}').checkVisibility()")


def _legend(page, section):
    return [" ".join(plain(line).split()) for line in every(page, f"#{section} .legend li", "e.innerText")]


def test_tables_and_bars_of_a_run(show):
    made = document(8, 30, summary={"step_s": 0.1, "compute_imbalance": 1.15, "predicted_imbalance": 1.1}, what_if=IDEAS)
    made["ranks"][3]["shares"].update(compute=0.8, straggler_wait=0.015)
    made["ranks"][3].update(step_s=0.1034, score=1.3, last=1234)
    made["ranks"][4]["score"] = None
    one = {"straggler_wait_s": 0.0123, "transfer_s": 0.00456, "wait_s": 0.0, "hidden_s": 0.0}
    one |= {"name": "rows", "per_step": 1.0, "moved_bytes": 3_400_000, "last": [1, 3]}
    made["exchanges"] = [one, {**one, "name": "gradients", "per_step": 0.5, "moved_bytes": None, "last": [0, 0]}]
    made["host_s"] = {"small": 0.000004, "large": 0.002}
    made["device_idle"] = {"steps": 3, "idle": [0.3, None], "compute": [0.6, None], "other": [0.1, None]}
    page = show({**made, "balance": plan(), "imbalance": {**made["imbalance"], **CAUSES, "method": "ranks"}})
    table = rows(page, "ranks")
    assert [line[0] for line in table] == ["0", "1", "2", "3 slow", "4", "5", "6", "7"]
    third = table[3]
    assert third[1] == "103 ms" and third[3:6] == ["20.0 %", "80.0 %", "1.5 %"] and third[-2:] == ["1.30", "1,234"]
    assert table[4][-2] == "-" and every(page, "tr.slow", "e.dataset.rank") == ["3"]
    assert rows(page, "exchanges") == [
        ["rows", "1", "12.3 ms", "4.56 ms", "0 ms", "3.24 MiB", "rank 1, 75.0 %"],
        ["gradients", "0.50", "12.3 ms", "4.56 ms", "0 ms", "-", "-"],
    ]
    assert rows(page, "host") == [["large", "2.00 ms", "2.0 %"], ["small", "4.00 µs", "0.00 %"]]
    assert rows(page, "device") == [["0", "60.0 %", "10.0 %", "30.0 %"], ["1", "-", "-", "-"]]
    assert "3 traced steps" in words(page, "#device .lead")
    assert rows(page, "balance") == [
        ["compute", "1.400", "1.100", "1.050", "4.8 %", "1.150", "-"],
        ["tokens", "1.300", "1.020", "-", "-", "-", "97.3 %"],
    ]
    assert "1.10 predicted" in words(page, "[data-figure='compute imbalance']")
    table = rows(page, "what-if")
    assert [line[2:] for line in table] == [["1.25x", "1.50x"], ["1.00x", "1.50x"], ["0.98x", "1.50x"], ["-", "-"]]
    assert table[0][0].endswith("; a note") and table[3][0].endswith(IDEAS[3]["note"]) and table[3][1] == "left out"
    assert table[2][0].endswith("slow down compute"), "a case of earlier versions"
    assert _legend(page, "imbalance") == ["data 60.0 % 6.00 ms", "hardware 30.0 % 3.00 ms", "jitter, up to 10.0 % 1.00 ms"]
    text = words(page, "#imbalance .body")
    assert "10.0 ms longer" in text and "rank 3 takes 1.30 times" in text and "by rank" in text
    assert "wait for peers" not in page.evaluate("document.querySelector('main').textContent")


@pytest.mark.slow
def test_what_a_report_does_not_have_is_left_out_or_said(show):
    page = show(bare(2, 3))
    assert not any(_visible(page, name) for name in ("device", "balance", "memory", "heat", "selector", "ablation"))
    said = {name: words(page, f"#{name} .body") for name in ("host", "exchanges", "what-if", "imbalance", "waterfall")}
    assert [name for name, text in said.items() if not text or rows(page, name)] == []
    (nothing,) = {words(show(document(median_step={"step": 7, "ranks": [[], []]})), "#waterfall .body")}
    assert nothing == said["waterfall"]


@pytest.mark.slow
def test_waits_that_are_not_divided_are_a_part_of_their_own(show):
    page = show(document(divided=False))
    certainty = words(page, "#certainty .body")
    assert REASON in plain(certainty) and "±" not in certainty
    legend = dict(every(page, "#shares .legend li", "[e.dataset.part, e.children[1].textContent]"))
    assert plain(legend["wait"]) == f"wait for peers (not divided: {REASON})"
    heads = {section: every(page, f"#{section} thead th", "e.textContent") for section in ("ranks", "exchanges")}
    assert all("wait for peers" in head for head in heads.values())
    cells = dict(zip(heads["exchanges"], rows(page, "exchanges")[0]))
    assert (cells["straggler wait"], cells["transfer"]) == ("0 ms", "0 ms") and cells["wait for peers"] != "0 ms"
    keys = every(page, "#waterfall .legendtext", "e.textContent")
    assert "wait for peers" in keys and not {"straggler wait", "transfer"} & set(keys)
    assert every(page, "#waterfall .waits li", "e.textContent") == []


@pytest.mark.slow
def test_memory_stands_in_a_table_and_a_rank_that_grows_stands_out(show):
    page = show(full_report().document())
    assert rows(page, "memory") == [
        ["0", "286 MiB", "381 MiB", "477 MiB", "0 B"],
        ["1 grows", "635 MiB", "731 MiB", "826 MiB", "5.72 MiB"],
    ]
    assert every(page, "#memory tr.slow", "e.dataset.rank") == ["1"]
    assert "1.31 for the peaks" in words(page, "#memory .body")


@pytest.mark.slow
def test_bytes_of_hot_rows_stand_beside_those_of_the_direct_route(show):
    page = show(full_report().document())
    assert rows(page, "heat") == [
        ["hot rows, between nodes", "1.91 MiB", "2.86 MiB"],
        ["hot rows, within the node", "1.43 MiB", "0 B"],
        ["all rows, between nodes", "4.77 MiB", "5.72 MiB"],
        ["all rows", "10.5 MiB", "10.0 MiB"],
    ]
    text = words(page, "#heat .body")
    assert "4,675 rows in the current lists" in text and "353 rows make 50" in text and "12,345 make 90" in text
    assert "1.04x the mean" in text and "87.5" in text


def run_of(label, step_s, bubble, run=(), summary=(), **changes):
    figures = {"step_s": step_s, "bubble": bubble, "limit": 1 / (1 - bubble), "samples": 1280, "samples_per_s": 32 / step_s}
    return document(2, 40, run={"label": label, **dict(run)}, summary={**figures, **dict(summary)}, **changes)


def test_padding_is_marked_inside_the_bar_of_compute(show):
    shares = document()["summary"]["shares"]
    padding = {"kind": "fixed", "tokens": 0.5, "time": 0.5 * shares["compute"]}
    page = show(document(summary={"padding": padding, "step_s": 0.1}))
    box = "(() => { const r = e.getBoundingClientRect(); return [r.left, r.right]; })()"
    parts = dict(every(page, "#shares .stack span", f"[e.dataset.part, {box}]"))
    (left, right), begin, end = parts["padding"], parts["forward"][0], parts["optimizer"][1]
    assert left == pytest.approx(begin, abs=2) and right - left == pytest.approx((end - begin) / 2, rel=0.02)
    note = words(page, "#shares .padding-note")
    assert "50.0 %" in note and f"{50 * shares['compute']:.1f} %" in note and "part of compute" in note
    assert "padding" not in words(show(document()), "#shares")


def test_runs_are_compared_with_the_first(show):
    # 100 ms with 50 of bubble, 62.5 with 12.5: three quarters are removed, and 1 / (1 - 0.75 * 0.5) = 1.6
    worse = run_of("worse", 0.125, 0.6, status={"complete": False})
    page = show(run_of("ddp", 0.1, 0.5), run_of("freescale", 0.0625, 0.2), worse)
    assert rows(page, "ablation") == [
        ["1. ddp", "", "100 ms", "320", "50.0 %", "-", "1.00x", "-"],
        ["2. freescale", "", "62.5 ms", "512", "20.0 %", "75.0 %", "1.60x", "0.0 %"],
        ["3. worse interrupted", "", "125 ms", "256", "60.0 %", "-50.0 %", "0.80x", "0.0 %"],
    ]
    assert every(page, "#ablation thead th", "e.innerText")[-1] == "compute per sample"
    assert page.evaluate("document.querySelector('#ablation .warning')") is None


@pytest.mark.slow
def test_what_to_know_about_two_runs_is_told(show):
    page = show(run_of("a", 0.1, 0.5), run_of("b", 0.1, 0.4, {"model": "SASRec", "parameters": 5}))
    assert rows(page, "ablation")[1][5:] == ["20.0 %", "1.00x", "+20.0 %"]
    differences = [plain(line) for line in every(page, "#ablation .warning li", "e.textContent")]
    assert differences == ["model of a and b: 'HSTURecommender' and 'SASRec'", "parameters of a and b: 1234567 and 5"]
    page = show(run_of("a", 0.1, 0.0), run_of("b", 0.1, 0.5, {"device": "cuda"}, {"samples": 0, "samples_per_s": None}))
    assert len(every(page, "#ablation ul.note li", "e")) == 2 and "'cpu' and 'cuda'" in words(page, "#ablation .note")
    assert every(page, "#ablation thead th", "e.innerText")[-1] == "compute per step"
    assert rows(page, "ablation")[1][5] == "-", "the first run has no bubble"


def test_the_selector_chooses_the_run(show):
    page = show(run_of("first", 0.1, 0.5), {**bare(), "run": {**document()["run"], "label": "second", "world_size": 1}})
    assert every(page, "option", "e.textContent") == ["1. first", "2. second"]
    assert words(page, "#label") == "first" and len(rows(page, "ranks")) == 2
    page.locator("select").select_option("1")
    assert words(page, "#label") == "second" and len(rows(page, "ranks")) == 1 and len(rows(page, "ablation")) == 2
    assert not rows(page, "waterfall") and not _visible(page, "device")
    page.locator("select").select_option("0")
    assert words(page, "#label") == "first" and _visible(page, "device")
    assert pixels(page, "waterfall-picture", [(0.5, 0.25)])[0] != (255, 255, 255)
