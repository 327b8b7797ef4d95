"""The verdict names the cause that costs most, and the way out that fits the run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_freescale.profiling.analysis.imbalance import Imbalance
from lightning_freescale.profiling.analysis.what_if import WhatIf
from lightning_freescale.profiling.reporting.facts import ExchangeFigures, RunInfo, WaitAttribution
from lightning_freescale.profiling.reporting.report import BubbleReport
from lightning_freescale.profiling.reporting.verdict import BubbleVerdict, verdict_on
from tests.helpers.reports import RUN, full_report, report_of, step

CASES = ("perfect balance", "full overlap", "both", "no data wait", "no host overhead", "no contention")
UNEQUAL = Imbalance("cost model", 0.02, 0.001, 0.002, (1.0, 1.0), {}, 0.03)
SLOW = Imbalance("cost model", 0.001, 0.02, 0.002, (1.0, 1.4), {1: 1.4}, 0.03)
SLOW_OR_LONG = Imbalance("ranks", 0.0, 0.02, 0.002, (1.0, 1.4), {1: 1.4}, None)
JITTER = Imbalance("cost model", 0.001, 0.001, 0.02, (1.0, 1.0), {}, 0.3)
UNKNOWN = Imbalance("ranks", 0.0, 0.001, 0.02, (1.0, 1.0), {}, None)
ROWS = ExchangeFigures("embedding rows", 1.0, 0.001, 0.02, 0.03, 4e6, (1, 1))
TORCHREC = ExchangeFigures("all_to_all_single", 4.0, 0.001, 0.02, 0.0, 4e6, (1, 1))
DENSE = ExchangeFigures("dense gradients", 1.0, 0.001, 0.005, 0.0, None, (1, 1))
DENSE_LONG = ExchangeFigures("dense gradients", 1.0, 0.001, 0.05, 0.0, 5e7, (1, 1))


BEHIND = ExchangeFigures("embedding exchange (background)", 4.0, 0.0, 0.0, 0.05, 6e7, (0, 0))


def _exchange(name: str) -> ExchangeFigures:
    return ExchangeFigures(name, 1.0, 0.001, 0.05, 0.0, 5e7, (1, 1))


def _report(
    gains: dict[str, float | None], strategy: str = "freescale", assignment: Any = None, overlap: Any = None, **more: Any
) -> Any:
    cases = [WhatIf(name, gains.get(name, 1.0), 1.6) for name in CASES]
    run = RunInfo(**{**vars(RUN), "strategy": strategy, "assignment": assignment, "overlap": overlap})
    return full_report(what_if=cases, run=run, **more)


def _verdict(gains: dict[str, float | None], **more: Any) -> BubbleVerdict:
    return verdict_on(_report(gains, **more).document())


@pytest.mark.parametrize(
    ("gains", "more", "cause", "advice"),
    [
        ({"no data wait": 1.3, "full overlap": 1.1}, {}, "data loading", "num_workers=2"),
        ({"perfect balance": 1.25}, {"imbalance": UNEQUAL}, "imbalance of data", "FreeScaleDataModule(train_set, lengths=...)"),
        ({"perfect balance": 1.25}, {"imbalance": UNEQUAL, "assignment": "as drawn"}, "imbalance of data", "balance=True"),
        ({"perfect balance": 1.25}, {"imbalance": UNEQUAL, "assignment": "fixed"}, "imbalance of data", "'slack'"),
        ({"perfect balance": 1.25}, {"imbalance": UNEQUAL, "assignment": "free"}, "imbalance of data", "larger batches"),
        ({"perfect balance": 1.25}, {"imbalance": SLOW}, "slow hardware", "slow_ranks='rebalance'"),
        ({"perfect balance": 1.25}, {"imbalance": SLOW_OR_LONG}, "slow hardware", "lengths_fn="),
        ({"perfect balance": 1.25}, {"imbalance": JITTER}, "uneven compute", "other work on the machine"),
        ({"perfect balance": 1.25}, {"imbalance": UNKNOWN}, "uneven compute", "lengths_fn="),
        ({"full overlap": 1.2}, {"exchanges": (ROWS, DENSE), "overlap": "on"}, "embedding exchange", "target_bubble_reduction"),
        ({"full overlap": 1.2}, {"exchanges": (TORCHREC, DENSE), "overlap": "off"}, "embedding exchange", "overlap=True"),
        ({"full overlap": 1.2}, {"exchanges": (TORCHREC, DENSE), "overlap": "impossible"}, "embedding exchange", "the notice"),
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
            "sharded weights",
        ),
        ({"full overlap": 1.2}, {"exchanges": (_exchange("all_gather"),)}, "other communication", "shows who calls it"),
        ({"full overlap": 1.2}, {"exchanges": (_exchange("all_reduce"),)}, "other communication", "sync_dist=True"),
        (
            {"full overlap": 1.2},
            {"exchanges": (_exchange("reduce_scatter_tensor"),), "overlap": "impossible"},
            "embedding exchange",
            "the notice",
        ),
        ({"no host overhead": 1.2}, {}, "host overhead", "log_every_n_steps"),
        ({"no host overhead": 1.02, "perfect balance": 1.029, "both": 1.1}, {}, "nothing", "more samples per rank"),
    ],
)
def test_each_cause_has_its_way_out(gains: dict[str, float | None], more: dict[str, Any], cause: str, advice: str) -> None:
    verdict = _verdict(gains, **more)
    assert verdict.cause == cause and advice in verdict.next
    assert verdict.speed_up == max(gain for name, gain in gains.items() if name != "both" and gain is not None)
    text = str(_report(gains, **more)).splitlines()
    assert text[0].startswith(f"Verdict: {verdict.verdict[:60]}")
    assert [line.split(":")[0] for line in text if line.startswith(("Why:", "Next:"))] == ["Why", "Next"]


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


def test_what_was_not_replayed_is_not_nothing() -> None:
    """As of a run that is still going on."""
    parts = np.array([[step(0.1, data_wait=0.06, forward=0.04)] * 2] * 3)
    verdict = verdict_on(report_of(parts, what_if=()).document())
    assert verdict.cause == "data wait" and verdict.speed_up is None and "Data wait, 60.0% of the time" in verdict.verdict


def test_of_one_rank_without_what_ifs_there_is_nothing_to_say() -> None:
    report: BubbleReport = report_of(np.array([[step(0.1, forward=0.1)]] * 3))
    assert verdict_on(report.document()).cause == "nothing"
