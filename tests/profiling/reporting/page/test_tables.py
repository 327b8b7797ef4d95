import numpy as np
import pytest

from tests.helpers.documents import document
from tests.helpers.reports import full_report
from tests.helpers.shown_page import every, plain, rows, words

pytestmark = pytest.mark.slow  # what the page shows in detail


def test_ranks_stand_in_a_table_and_slow_ones_stand_out(show):
    made = document(8, 30)
    made["ranks"][3]["shares"].update(compute=0.8, straggler_wait=0.015)
    made["ranks"][3].update(step_s=0.1034, score=1.3, last=1234)
    made["ranks"][4]["score"] = None
    page = show(made)
    table = rows(page, "ranks")
    assert [line[0] for line in table] == ["0", "1", "2", "3 slow", "4", "5", "6", "7"]
    third = table[3]
    assert third[1] == "103 ms" and third[3:6] == ["20.0 %", "80.0 %", "1.5 %"] and third[-2:] == ["1.30", "1,234"]
    assert table[4][-2] == "-"
    assert every(page, "tr.slow", "e.dataset.rank") == ["3"]


def test_exchanges_and_host_overhead_stand_in_tables(show):
    one = {
        "name": "rows",
        "per_step": 1.0,
        "straggler_wait_s": 0.0123,
        "transfer_s": 0.00456,
        "wait_s": 0.0,
        "hidden_s": 0.0,
        "moved_bytes": 3_400_000,
        "last": [1, 3],
    }
    other = {**one, "name": "gradients", "per_step": 0.5, "moved_bytes": None, "last": [0, 0]}
    page = show({**document(exchanges=[one, other]), "host_s": {}})
    assert rows(page, "exchanges") == [
        ["rows", "1", "12.3 ms", "4.56 ms", "0 ms", "3.24 MiB", "rank 1, 75.0 %"],
        ["gradients", "0.50", "12.3 ms", "4.56 ms", "0 ms", "-", "-"],
    ]
    assert words(page, "#host .body") == "No host overhead was recorded."


def test_host_overhead_comes_largest_first(show):
    made = document(summary={"step_s": 0.1})
    made["host_s"] = {"small": 0.000004, "large": 0.002}
    assert rows(show(made), "host") == [
        ["large", "2.00 ms", "2.0 %"],
        ["small", "4.00 µs", "0.00 %"],
    ]


def test_what_ifs_stand_beside_their_limits(show):
    ideas = [
        {"name": "perfect balance", "speed_up": 1.25, "limit": 1.5, "note": "a note"},
        {"name": "no data wait", "speed_up": 1.0, "limit": 1.5, "note": None},
        {"name": "no contention", "speed_up": 0.98, "limit": 1.5, "note": None},
    ]
    page = show(document(what_if=ideas))
    table = rows(page, "what-if")
    assert table[0] == ["perfect balance every rank computes the same in every step; a note", "", "1.25x", "1.50x"]
    assert [line[2] for line in table] == ["1.25x", "1.00x", "0.98x"]
    across = "/ e.getBoundingClientRect().width"
    fills = every(page, ".gauge", f"e.querySelector('.fill').getBoundingClientRect().width {across}")
    limits = every(
        page, ".gauge", f"(e.querySelector('.limit').getBoundingClientRect().right - e.getBoundingClientRect().left) {across}"
    )
    assert (fills, limits) == (pytest.approx([0.5, 0, 0], abs=0.01), pytest.approx([1, 1, 1], abs=0.01))


def test_what_ifs_of_some_steps_say_which(show):
    page = show(full_report(replayed=np.array([0, 2])).document())
    assert "2 of steps 5 to 7 were played again; of their time 70.0 % is compute." in words(page, "#what-if .body")
    assert "played again" not in words(show(full_report().document()), "#what-if .body")


PLAN = {
    "compute": {"as_drawn": 1.4, "balanced": 1.1, "lower_bound": 1.05, "gap": 1.1 / 1.05 - 1},
    "tokens": {"as_drawn": 1.3, "balanced": 1.02, "fullest": 0.973},
    "fitted_steps": 0,
}


def test_compute_and_tokens_are_a_row_each(show):
    made = document(summary={"compute_imbalance": 1.15, "predicted_imbalance": 1.1})
    page = show({**made, "balance": PLAN})
    assert rows(page, "balance") == [
        ["compute", "1.400", "1.100", "1.050", "4.8 %", "1.150", "-"],
        ["tokens", "1.300", "1.020", "-", "-", "-", "97.3 %"],
    ]
    assert "predicted, by the costs as given." in words(page, "#balance .body")
    assert "1.10 predicted by the costs as given" in words(page, "#figures")


def test_a_run_whose_samples_stayed_as_drawn_has_no_figure_of_balance(show):
    compute = {**PLAN["compute"], "balanced": None, "gap": None}
    page = show({**document(), "balance": {**PLAN, "compute": compute, "tokens": None, "fitted_steps": 40}})
    assert rows(page, "balance")[0][:5] == ["compute", "1.400", "-", "1.050", "-"]
    text = words(page, "#balance .body")
    assert "by costs fitted to measured times." in text and "stayed as drawn" in text


def test_a_run_that_nobody_planned_has_no_section_of_it(show):
    assert not show(document()).evaluate("document.getElementById('balance').checkVisibility()")


def test_the_causes_of_imbalance_are_told(show):
    causes = {
        "method": "ranks",
        "data_s": 0.006,
        "hardware_s": 0.003,
        "jitter_s": 0.001,
        "slow_ranks": {"3": 1.3},
        "residual": None,
    }
    page = show(document(imbalance=causes))
    legend = every(page, "#imbalance .legend li", "e.innerText")
    assert [" ".join(plain(line).split()) for line in legend] == [
        "data 60.0 % 6.00 ms",
        "hardware 30.0 % 3.00 ms",
        "jitter 10.0 % 1.00 ms",
    ]
    text = words(page, "#imbalance .body")
    assert "computes 10.0 ms longer than the mean rank" in text
    assert "rank 3 takes 1.30 times as long as its samples explain" in text
    assert "Told apart by ranks alone, without a cost model." in text
    widths = every(page, "#imbalance .stack span", "e.getBoundingClientRect().width")
    assert [w / sum(widths) for w in widths] == pytest.approx([0.6, 0.3, 0.1], abs=0.01)


def test_slow_ranks_with_less_work_make_hardware_count_less_than_nothing(show):
    causes = {"data_s": 0.012, "hardware_s": -0.002, "jitter_s": 0.0, "slow_ranks": {}, "residual": 0.031}
    page = show(document(imbalance=causes))
    legend = every(page, "#imbalance .legend li", "e.innerText")
    assert [" ".join(plain(line).split()) for line in legend][:2] == ["data 120.0 % 12.0 ms", "hardware -20.0 % -2.00 ms"]
    text = words(page, "#imbalance .body")
    assert "less than nothing: it is below the error of what samples explain" in text
    assert "Its median error is 3.1 %" in text and "No rank stands out" in text
    page = show(document(imbalance={**causes, "slow_ranks": {"1": 1.3}}))
    assert "less than nothing: ranks that are slow were given less work" in words(page, "#imbalance .body")


def test_what_was_not_told_apart_is_said(show):
    page = show(document(imbalance=None, device_idle=None))
    assert words(page, "#imbalance .body") == "The causes were not told apart in this run."
    assert not page.evaluate("document.getElementById('device').checkVisibility()")


def test_device_idle_is_shown_per_rank(show):
    page = show(document(2, 6, device_idle={"steps": 3, "idle": [0.3, None], "compute": [0.6, None], "other": [0.1, None]}))
    assert rows(page, "device") == [
        ["0", "60.0 %", "10.0 %", "30.0 %"],
        ["1", "-", "-", "-"],
    ]
    assert "3 traced steps" in words(page, "#device .lead")


def test_how_waiting_was_measured_is_told(show):
    text = words(show(document(divided=False)), "#certainty .body")
    assert "Wait for peersNot divided into straggler wait and transfer: the ranks' clocks agreed only within 3.00 ms" in text
    assert "Turn from wait to transfer" not in text
    text = words(show(document(wait_attribution={"uncertainty_s": 0.0011, "clock": None})), "#certainty .body")
    assert "Wait for peersDivided by every rank's arrival at an exchange, on one clock" in text
    assert "± 1.10 ms" in text and "round trip" not in text
    clocks = words(show(document()), "#certainty .body")
    assert "compared 3 times, best round trip 0.14 ms, 12 slow answers left out, drift 0.10 µs per second" in clocks
    assert "Not divided" not in clocks
    assert "With one rank there is nobody to wait for." in words(show(document(1, 3)), "#certainty .body")


def test_waits_that_are_not_divided_are_a_part_of_their_own(show):
    page = show(document(divided=False))
    legend = every(page, "#shares .legend li", "[e.dataset.part, e.children[1].textContent]")
    reason = "wait for peers (not divided: the ranks' clocks agreed only within 3.00 ms)"
    assert {name: plain(label) for name, label in legend}["wait"] == reason
    heads = {section: every(page, f"#{section} thead th", "e.textContent") for section in ("ranks", "exchanges")}
    assert all("wait for peers" in head for head in heads.values())
    cells = dict(zip(heads["exchanges"], rows(page, "exchanges")[0]))
    assert (cells["straggler wait"], cells["transfer"]) == ("0 ms", "0 ms") and cells["wait for peers"] != "0 ms"
    assert words(page, "#verdict").startswith("Verdict: Waiting for peers,")
    keys = every(page, "#waterfall .legendtext", "e.textContent")
    assert "wait for peers" in keys and not {"straggler wait", "transfer"} & set(keys)
    assert every(page, "#waterfall .waits li", "e.textContent") == []


def test_where_all_waits_are_divided_there_is_no_other_wait(show):
    page = show(document())
    assert "wait for peers" not in page.evaluate("document.querySelector('main').textContent")


def test_a_what_if_that_was_left_out_says_why(show):
    left_out = {"name": "full overlap", "speed_up": None, "limit": None, "note": "the clocks were not aligned"}
    page = show(document(what_if=[left_out, {"name": "no data wait", "speed_up": 1.2, "limit": 1.5, "note": None}]))
    assert rows(page, "what-if")[0] == [
        "full overlap every transfer is hidden behind compute; the clocks were not aligned",
        "left out",
        "-",
        "-",
    ]
    assert words(page, "#verdict").startswith("Verdict: Data wait,")


def test_memory_stands_in_a_table_and_a_rank_that_grows_stands_out(show):
    page = show(full_report().document())
    assert rows(page, "memory") == [
        ["0", "286 MiB", "381 MiB", "477 MiB", "0 B"],
        ["1 grows", "635 MiB", "731 MiB", "826 MiB", "5.72 MiB"],
    ]
    assert every(page, "#memory tr.slow", "e.dataset.rank") == ["1"]
    assert "1.31 of the peaks" in words(page, "#memory .body")


def test_memory_that_nobody_knows_is_left_out(show):
    page = show(full_report(memory=None).document())
    assert page.locator("#memory").is_hidden()
