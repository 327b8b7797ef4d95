"""The verdict names the cause that costs most, and the way out that fits the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_freescale.profiling.analysis.imbalance import Imbalance
from lightning_freescale.profiling.analysis.what_if import WhatIf
from lightning_freescale.profiling.reporting.causes import _HOW, BubbleVerdict
from lightning_freescale.profiling.reporting.facts import ExchangeFigures, RunInfo, Status, WaitAttribution
from lightning_freescale.profiling.reporting.report import BubbleReport
from lightning_freescale.profiling.reporting.verdict import verdict_on
from tests.helpers.reports import RUN, full_report, report_of, step

CASES = ("perfect balance", "full overlap", "balance + overlap", "no data wait", "no host overhead", "no contention")
UNEQUAL = Imbalance("cost model", 0.02, 0.001, 0.002, (1.0, 1.0), {}, 0.03)
SLOW = Imbalance("cost model", 0.001, 0.02, 0.002, (1.0, 1.4), {1: 1.4}, 0.03)
SLOW_OR_LONG = Imbalance("ranks", 0.0, 0.02, 0.002, (1.0, 1.4), {1: 1.4}, None)
JITTER = Imbalance("cost model", 0.001, 0.001, 0.02, (1.0, 1.0), {}, 0.3)
MIXED = Imbalance("cost model", 0.0223, 0.0048, 0.0, (1.0, 1.3), {1: 1.3}, 0.03)
SLIGHTLY_SLOW = Imbalance("cost model", 0.0007, 0.0018, -1e-6, (1.0, 1.08), {}, 0.03)
SLIGHTLY_SLOW_OR_LONG = Imbalance("ranks", 0.0, 0.0018, 1e-6, (1.0, 1.08), {}, None)
UNKNOWN = Imbalance("ranks", 0.0, 0.001, 0.02, (1.0, 1.0), {}, None)
ROWS = ExchangeFigures("embedding rows", 1.0, 0.001, 0.02, 0.03, 4e6, (1, 1))
TORCHREC = ExchangeFigures("all_to_all_single", 4.0, 0.001, 0.02, 0.0, 4e6, (1, 1))
DENSE = ExchangeFigures("dense gradients", 1.0, 0.001, 0.005, 0.0, None, (1, 1))
DENSE_LONG = ExchangeFigures("dense gradients", 1.0, 0.001, 0.05, 0.0, 5e7, (1, 1))


BEHIND = ExchangeFigures("embedding exchange (background)", 4.0, 0.0, 0.0, 0.05, 6e7, (0, 0))


def _exchange(name: str) -> ExchangeFigures:
    return ExchangeFigures(name, 1.0, 0.001, 0.05, 0.0, 5e7, (1, 1))


def _report(
    gains: dict[str, float | None],
    strategy: str = "freescale",
    assignment: Any = None,
    overlap: Any = None,
    sharded_tables: bool | None = None,
    **more: Any,
) -> Any:
    cases = [WhatIf(name, gains.get(name, 1.0), 1.6) for name in CASES]
    told = {"strategy": strategy, "assignment": assignment, "overlap": overlap, "sharded_tables": sharded_tables}
    run = RunInfo(**{**vars(RUN), **told})
    return full_report(what_if=cases, run=run, **more)


def _verdict(gains: dict[str, float | None], **more: Any) -> BubbleVerdict:
    return verdict_on(_report(gains, **more).document())


@pytest.mark.parametrize(
    ("gains", "more", "cause", "advice"),
    [
        ({"no data wait": 1.3, "full overlap": 1.1}, {}, "data loading", "num_workers=2"),
        (
            {"perfect balance": 1.25},
            {"imbalance": UNEQUAL},
            "imbalance of data",
            "FreeScaleDataModule(train_set, lengths=..., collate_fn=...)",
        ),
        (
            {"perfect balance": 1.25},
            {"imbalance": UNEQUAL, "assignment": "as drawn"},
            "imbalance of data",
            "Take out balance=False",
        ),
        ({"perfect balance": 1.25}, {"imbalance": UNEQUAL, "assignment": "fixed"}, "imbalance of data", "'slack'"),
        ({"perfect balance": 1.25}, {"imbalance": UNEQUAL, "assignment": "free"}, "imbalance of data", "larger batches"),
        ({"perfect balance": 1.25}, {"imbalance": SLOW}, "slow hardware", "slow_ranks='rebalance'"),
        ({"perfect balance": 1.25}, {"imbalance": SLOW_OR_LONG}, "slow hardware", "lengths_fn="),
        ({"perfect balance": 1.25}, {"imbalance": JITTER}, "uneven compute", "other work on the machine"),
        ({"perfect balance": 1.25}, {"imbalance": UNKNOWN}, "uneven compute", "lengths_fn="),
        ({"full overlap": 1.2}, {"exchanges": (ROWS, DENSE), "overlap": "on"}, "embedding exchange", "target_bubble_reduction"),
        (
            {"full overlap": 1.2},
            {"exchanges": (TORCHREC, DENSE), "overlap": "off"},
            "embedding exchange",
            "Take out overlap=False",
        ),
        ({"full overlap": 1.2}, {"exchanges": (TORCHREC, DENSE), "overlap": "impossible"}, "embedding exchange", "The notice"),
        ({"full overlap": 1.2}, {"exchanges": (BEHIND, DENSE_LONG), "overlap": "on"}, "embedding exchange", "split backward"),
        (
            {"full overlap": 1.2},
            {"exchanges": (TORCHREC, DENSE), "strategy": "ddp"},
            "embedding exchange",
            "Trainer(strategy='freescale')",
        ),
        ({"full overlap": 1.2}, {"exchanges": (ROWS, DENSE_LONG)}, "dense communication", "accumulate_grad_batches="),
        ({"full overlap": 1.2}, {"exchanges": (_exchange("buffers"),)}, "dense communication", "broadcast_buffers=False"),
        (
            {"full overlap": 1.2},
            {"exchanges": (_exchange("all_gather_single"),), "strategy": "ModelParallelStrategy"},
            "dense communication",
            "Sharded weights",
        ),
        ({"full overlap": 1.2}, {"exchanges": (_exchange("all_gather"),)}, "other communication", "shows who calls it"),
        ({"full overlap": 1.2}, {"exchanges": (_exchange("all_reduce"),)}, "other communication", "sync_dist=True"),
        (
            {"full overlap": 1.2},
            {"exchanges": (_exchange("reduce_scatter_tensor"),), "overlap": "impossible"},
            "embedding exchange",
            "The notice",
        ),
        (
            {"full overlap": 1.2},
            {"exchanges": (ROWS, _exchange("all_gather")), "overlap": "on"},
            "other communication",
            "shows who calls it",
        ),
        ({"full overlap": 1.2}, {"exchanges": (_exchange("all_to_all"),), "overlap": "on"}, "other communication", "who calls"),
        (
            {"full overlap": 1.2},
            {"exchanges": (TORCHREC,), "strategy": "ddp", "sharded_tables": False},
            "other communication",
            "shows who calls it",
        ),
        (
            {"full overlap": 1.2},
            {"exchanges": (TORCHREC,), "strategy": "ddp", "sharded_tables": True},
            "embedding exchange",
            "Trainer(strategy='freescale')",
        ),
        ({"no host overhead": 1.2}, {}, "host overhead", "on_train_batch_end"),
        (
            {"no host overhead": 1.02, "perfect balance": 1.029, "balance + overlap": 1.1},
            {},
            "nothing",
            "more samples per rank",
        ),
    ],
)
def test_each_cause_has_its_way_out(gains: dict[str, float | None], more: dict[str, Any], cause: str, advice: str) -> None:
    verdict = _verdict(gains, **more)
    assert verdict.cause == cause and advice in verdict.next
    assert verdict.speed_up == max(gain for name, gain in gains.items() if name != "balance + overlap" and gain is not None)
    text = str(_report(gains, **more)).splitlines()
    assert text[0].startswith(f"Verdict: {verdict.verdict[:60]}")
    assert [line.split(":")[0] for line in text if line.startswith(("Why:", "Next:"))] == ["Why", "Next"]


def test_a_slow_rank_is_named_beside_histories_that_cost_more() -> None:
    """The gain is that of both."""
    report = _report({"perfect balance": 1.37, "no host overhead": 1.0}, imbalance=MIXED)
    cases = [*report.what_if, WhatIf("equal histories", 1.14, 1.6)]
    verdict = verdict_on(replace(report, what_if=cases).document())
    assert verdict.cause == "imbalance of data" and "unequal histories and slow ranks" in verdict.verdict
    assert "rank 1 takes 1.30 times what its samples explain" in verdict.why
    assert "Equal histories alone would make the run 1.14x as fast" in verdict.why
    assert "FreeScaleDataModule(train_set" in verdict.next and "slow_ranks='rebalance'" in verdict.next
    without = _verdict({"perfect balance": 1.37}, imbalance=MIXED)
    assert "rank 1" in without.why and "alone" not in without.why, "what was not replayed is not said"
    assert "slow ranks" not in _verdict({"perfect balance": 1.37}, imbalance=UNEQUAL).verdict


@pytest.mark.parametrize("imbalance", [SLIGHTLY_SLOW, SLIGHTLY_SLOW_OR_LONG], ids=["costs", "no costs"])
def test_a_rank_that_is_always_a_little_slower_is_the_cause_where_nothing_is_larger(imbalance: Imbalance) -> None:
    verdict = _verdict({"perfect balance": 1.04}, imbalance=imbalance)
    assert verdict.cause == "slow hardware" and "ank 1 takes 1.08 times" in verdict.why and "step to step" not in verdict.why


def test_one_rank_that_loads_slowly_is_named() -> None:
    slow = step(0.1, data_wait=0.05, forward=0.05)
    other = step(0.1, straggler_wait=0.05, forward=0.05)
    parts = np.array([[other, slow, other, other]] * 3)
    cases = (WhatIf("no data wait", 1.8, 2.0), WhatIf("perfect balance", 1.0, 2.0))
    verdict = verdict_on(report_of(parts, what_if=cases).document())
    assert verdict.cause == "data loading" and "most of it on rank 1" in verdict.why


def test_waits_that_are_not_divided_are_no_verdict_on_their_cause() -> None:
    row = step(0.1, forward=0.05, wait=0.04, host_overhead=0.01)
    waits = WaitAttribution(False, 0.0, "the clocks were never compared")
    cases = [WhatIf(name, None, None, "no clocks") for name in CASES[:3]] + [WhatIf("no data wait", 1.0, 2.0)]
    verdict = verdict_on(report_of(np.array([[row, row]] * 3), wait_attribution=waits, what_if=cases).document())
    assert (verdict.cause, verdict.speed_up) == ("waiting for peers", None) and "never compared" in verdict.why


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_not_replayed_is_not_nothing(ranks: int) -> None:
    """As of a run that is still going on."""
    parts = np.array([[step(0.1, data_wait=0.06, forward=0.04)] * ranks] * 3)
    report = report_of(parts, what_if=(), status=Status(False, "still running"))
    verdict = verdict_on(report.document())
    assert verdict.cause == "data wait" and verdict.speed_up is None and "Data wait, 60.0% of the time" in verdict.verdict
    assert "had not come to its end" in verdict.why and verdict.next.endswith("#the-loader-is-late.")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_without_compute_is_not_nothing_and_says_why(ranks: int) -> None:
    verdict = verdict_on(report_of(np.array([[step(0.1, data_wait=0.1)] * ranks] * 3), what_if=()).document())
    assert verdict.cause == "data wait" and "no compute was seen" in verdict.why and "order" not in verdict.why


def _undivided(cases: dict[str, float], **parts: float) -> BubbleVerdict:
    row = step(1.0, **parts)
    waits = WaitAttribution(False, 0.0, "the clocks were never compared")
    known = [WhatIf(name, cases.get(name), 2.0) for name in CASES]
    return verdict_on(report_of(np.array([[row, row]] * 3), wait_attribution=waits, what_if=known).document())


def test_waits_that_no_replay_could_judge_are_not_nothing() -> None:
    """Neither where another part is as large, but not worth removing, nor beside one that is."""
    verdict = _undivided({"no data wait": 1.02, "no host overhead": 1.0}, forward=0.85, wait=0.07, data_wait=0.08)
    assert verdict.cause == "waiting for peers"
    verdict = _undivided({"no data wait": 1.2, "no host overhead": 1.0}, forward=0.7, wait=0.1, data_wait=0.2)
    assert verdict.cause == "data loading" and (verdict.also or "").startswith("Waiting for peers, 10.0%")


def test_time_that_nothing_explains_is_larger_than_a_wait_that_is_not_divided() -> None:
    verdict = _undivided({"no data wait": 1.0, "no host overhead": 1.9}, forward=0.43, wait=0.07, unexplained=0.5)
    assert (verdict.cause, verdict.speed_up) == ("host overhead", 1.9) and "Waiting for peers" in (verdict.also or "")


def _slow_at_the_end(ranks: int) -> BubbleReport:
    fast, slow = step(0.04, forward=0.04), step(0.1, forward=0.04, data_wait=0.06)
    return report_of(
        np.array([[fast] * ranks] * 6 + [[slow] * ranks] * 2),
        replayed=np.array([6, 7]),
        what_if=[WhatIf("no data wait", 2.5, 2.5)],
    )


def test_shares_and_gains_are_of_the_same_steps() -> None:
    """The loader was slow in those that were replayed, the last quarter."""
    report = _slow_at_the_end(1)
    assert report.limit == pytest.approx(44 / 32), "of all steps"
    verdict = verdict_on(report.document())
    assert verdict.verdict == "Data wait, 60.0% of the time in steps 11 to 12: without it they would be 2.50x as fast."
    assert "waits 60 ms of a step of 100 ms" in verdict.why
    assert "what if in steps 11 to 12: no data wait 2.50x" in " ".join(str(report).split())
    with_gap = verdict_on(report_of(report.breakdown, replayed=np.array([0, 2, 3]), what_if=report.what_if).document())
    assert "in 3 of steps 5 to 8" in with_gap.verdict
    nothing = report_of(report.breakdown, replayed=np.arange(6), what_if=[WhatIf("no data wait", 1.0, 1.0)])
    told = verdict_on(nothing.document())
    assert told.verdict.startswith("Nothing worth doing in steps 5 to 10:") and told.why.startswith("100.0% of the ranks' time")


def test_a_loop_that_stamps_no_data_is_told_that_it_may_wait_for_it() -> None:
    def verdict(**parts: float) -> BubbleVerdict:
        run = RunInfo("plain loop", "MyModel", 1, 1)
        row = np.array([[step(0.1, forward=0.04, **parts)]] * 3)
        return verdict_on(report_of(row, run=run, what_if=[WhatIf("no host overhead", 2.4, 2.5)]).document())

    unseen = verdict()
    assert unseen.cause == "host overhead" and "No wait for data was stamped" in unseen.why
    assert unseen.next.startswith("Iterate over batches_on(timeline, loader)") and "hooks" not in unseen.next
    seen = verdict(data_wait=0.001)
    assert "stamped" not in seen.why and "batches_on" not in seen.next and "BubbleProfiler" not in seen.next


def test_one_rank_makes_no_other_wait() -> None:
    more = full_report(
        parts=np.array([[step(0.1, forward=0.07, data_wait=0.03)]] * 3), what_if=[WhatIf("no data wait", 2.0, 2.5)]
    )
    alone = report_of(more.breakdown, what_if=more.what_if)
    assert "other ranks" not in verdict_on(alone.document()).why
    two = report_of(more.breakdown.repeat(2, axis=1), what_if=more.what_if)
    assert "makes other ranks wait" in verdict_on(two.document()).why


def test_the_second_cause_stands_beside_the_first() -> None:
    two = _verdict({"no data wait": 1.3, "perfect balance": 1.1, "no host overhead": 1.05}, imbalance=UNEQUAL)
    assert two.cause == "data loading" and two.also is not None
    assert two.also.startswith("Straggler wait") and "1.10x" in two.also and "FreeScaleDataModule" in two.also
    one = _report({"no data wait": 1.3, "perfect balance": 1.02}, imbalance=UNEQUAL)
    assert verdict_on(one.document()).also is None and "Also:" not in str(one)


def test_workers_that_are_there_are_not_advised() -> None:
    run = RunInfo(**{**vars(RUN), "num_workers": 2})
    report = full_report(what_if=[WhatIf("no data wait", 1.3, 1.6)], run=run)
    assert "More workers than num_workers=2" in verdict_on(report.document()).next


@pytest.mark.parametrize(
    ("run", "advice"),
    [
        (
            {"strategy": "DDPStrategy"},
            "Trainer(strategy='freescale') with FreeScaleDataModule(train_set, lengths=..., balance=",
        ),
        ({"strategy": "freescale", "assignment": "as drawn"}, "; FreeScaleDataModule(balance=BalanceOptions(calibrate=True"),
    ],
)
def test_a_slow_rank_is_relieved_in_the_way_of_the_run(run: dict[str, Any], advice: str) -> None:
    """Only our strategy calibrates; only our data module assigns."""
    assert advice in _verdict({"perfect balance": 1.25}, imbalance=SLOW, **run).next


def test_an_exchange_in_front_of_compute_has_its_speed() -> None:
    exchange = ExchangeFigures("all_to_all_single", 5.0, 0.001, 0.2, 0.0, 1.2e6, (1, 1))
    why = _verdict({"full overlap": 1.5}, exchanges=(exchange,), overlap="off").why
    assert "1.2 MB, at 6 MB/s" in why
    beside = exchange.__class__(**{**vars(exchange), "hidden": 0.1})
    assert "MB/s" not in _verdict({"full overlap": 1.5}, exchanges=(beside,), overlap="on").why


@pytest.mark.parametrize(("gain", "short"), [(1.1, False), (1.04, True)])
def test_too_little_compute_to_hide_an_exchange_is_said(gain: float, short: bool) -> None:
    """Transfer is a tenth of the time: all of it gone would be 1.11x."""
    why = _verdict({"full overlap": gain}, exchanges=(ROWS,), overlap="off").why
    assert ("too little compute" in why) == short


def test_small_sections_of_host_overhead_are_not_named() -> None:
    named = _verdict({"no host overhead": 1.3}, host={"hooks before forward": 0.09, "embeddings: before the step": 0.0005})
    assert named.why.endswith(
        ": 90 ms in hooks before forward. It also makes other ranks wait, and those waits would go with it."
    )
    assert "on_train_batch_start" in named.next and "log_every_n_steps" not in named.next


def test_every_way_out_has_its_recipe() -> None:
    """The anchors that verdicts name are headings of the page."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "how_to" / "read_the_report.md").read_text()
    headings = {"#" + line[3:].lower().replace(" ", "-") for line in page.splitlines() if line.startswith("## ")}
    assert set(_HOW.values()) <= headings


def test_of_one_rank_without_what_ifs_there_is_nothing_to_say() -> None:
    report: BubbleReport = report_of(np.array([[step(0.1, forward=0.1)]] * 3))
    assert verdict_on(report.document()).cause == "nothing"
