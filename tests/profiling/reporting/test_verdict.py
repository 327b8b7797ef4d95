"""The verdict names the most expensive cause and the advice that fits the run."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lightning_freescale
from lightning_freescale.callbacks.advice import _HOST_OVERHEAD, advise
from lightning_freescale.profiling.analysis.imbalance import Imbalance
from lightning_freescale.profiling.analysis.what_if import WhatIf
from lightning_freescale.profiling.reporting.document import ExchangeFigures, RunInfo, Status, WaitAttribution
from lightning_freescale.profiling.reporting.report import BubbleReport
from lightning_freescale.profiling.reporting.verdict import _ADVICE, _NOTHING, LINKS, BubbleVerdict, verdict_line, verdict_on
from tests.helpers.reports import full_report, report_of, run_info, step

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from planted_documents import documents, repeated_advice

CASES = ("perfect balance", "full overlap", "balance + overlap", "no data wait", "no host overhead", "no padding")
UNDIVIDED = WaitAttribution(False, 0.0, "the clocks were never compared")


def _uneven(
    data: float, hardware: float, jitter: float, slow: float | None = None, score: float = 1.0, costs: bool = True
) -> Any:
    """Milliseconds by cause; ``slow`` is the slowness of rank 1 if it is slow."""
    seconds = (data / 1e3, hardware / 1e3, jitter / 1e3)
    scores = (1.0, slow or score)
    return Imbalance("cost model" if costs else "ranks", *seconds, scores, {1: slow} if slow else {}, 0.03 if costs else None)


def _exchange(name: str, transfer: float = 0.05, moved: float | None = 5e7, hidden: float = 0.0) -> ExchangeFigures:
    return ExchangeFigures(name, 1.0, 0.001, transfer, hidden, moved, (1, 1))


UNEQUAL, SLOW = _uneven(20, 1, 2), _uneven(1, 20, 2, slow=1.4)
MIXED = _uneven(22.3, 4.8, 0, slow=1.3)
ROWS, TORCHREC = _exchange("embedding rows", 0.02, 4e6, 0.03), _exchange("all_to_all_single", 0.02, 4e6)
DENSE, LONG = _exchange("dense gradients", 0.005, None), _exchange("dense gradients")
BEHIND = _exchange("embedding exchange (background)", 0.0, 6e7, 0.05)
EARLIER = _exchange("dense gradients (behind backward, at most)", 0.0, 2e7, 0.02)


def _report(gains: dict[str, float | None], **more: Any) -> BubbleReport:
    cases = [WhatIf(name, gains.get(name, 1.0), 1.6) for name in CASES]
    shown_text = {
        name: more.pop(name)
        for name in ("strategy", "assignment", "overlap", "sharded_tables", "num_workers", "options")
        if name in more
    }
    return full_report(what_if=cases, run=run_info(**shown_text), advise=advise, **more)


def _verdict(gains: dict[str, float | None], **more: Any) -> BubbleVerdict:
    return verdict_on(_report(gains, **more).document(), advise)


def _balance(imbalance: Imbalance, cause: str, advice: str, **more: Any) -> tuple[Any, ...]:
    return {"perfect balance": 1.25}, {"imbalance": imbalance, **more}, cause, advice


def _overlap(exchanges: Any, cause: str, advice: str, **more: Any) -> tuple[Any, ...]:
    return {"full overlap": 1.2}, {"exchanges": exchanges, **more}, cause, advice


EMBEDDING, DENSELY, OTHERWISE = "embedding exchange", "dense communication", "other communication"
UNPREDICTED: dict[str, Any] = {"assignment": "fixed", "predicted": np.ones((3, 2)), "parts": ...}
WAYS_OUT = [
    ({"no data wait": 1.3, "full overlap": 1.1}, {}, "data loading", "num_workers=2 "),
    ({"no data wait": 1.3}, {"num_workers": 2}, "data loading", "more workers than num_workers=2"),
    _balance(UNEQUAL, "imbalance of data", "FreeScaleDataModule(train_set, lengths=..., collate_fn=...)"),
    _balance(UNEQUAL, "imbalance of data", "balance=False", assignment="as drawn"),
    _balance(UNEQUAL, "imbalance of data", "'slack'", assignment="fixed"),
    _balance(UNEQUAL, "imbalance of data", "balance fit", **UNPREDICTED, options={"lengths": True}),
    _balance(UNEQUAL, "imbalance of data", "BubbleProfiler(lengths_fn=...)", **UNPREDICTED),
    _balance(UNEQUAL, "imbalance of data", "larger batches", assignment="free"),
    _balance(SLOW, "slow hardware", "See what else runs on that device"),
    _balance(_uneven(0, 20, 2, slow=1.4, costs=False), "slow hardware", "lengths_fn="),
    _balance(_uneven(1, 1, 20), "uneven compute", "other work on the machine"),
    _balance(_uneven(0, 1, 20, costs=False), "uneven compute", "lengths_fn="),
    _overlap((ROWS, DENSE), EMBEDDING, "target_bubble_reduction", overlap="on"),
    _overlap((TORCHREC, DENSE), EMBEDDING, "overlap=False", overlap="off"),
    _overlap((TORCHREC, DENSE), EMBEDDING, "notice", overlap="impossible"),
    _overlap((BEHIND, LONG), EMBEDDING, "split backward", overlap="on"),
    _overlap((BEHIND, EARLIER, LONG), DENSELY, "accumulate_grad_batches=", overlap="on"),
    _overlap((TORCHREC, DENSE), EMBEDDING, "Trainer(strategy='freescale')", strategy="ddp"),
    _overlap((TORCHREC,), EMBEDDING, "Trainer(strategy='freescale')", strategy="ddp", sharded_tables=True),
    _overlap((TORCHREC,), OTHERWISE, "torch_profiler_steps", strategy="ddp", sharded_tables=False),
    _overlap((_exchange("reduce_scatter_tensor"),), EMBEDDING, "notice", overlap="impossible"),
    _overlap((ROWS, LONG), DENSELY, "accumulate_grad_batches="),
    _overlap((_exchange("buffers"),), DENSELY, "FreeScaleStrategy(broadcast_buffers=False)"),
    _overlap((_exchange("buffers"),), DENSELY, "DDPStrategy(broadcast_buffers=False)", strategy="ddp"),
    _overlap((_exchange("all_gather_single"),), DENSELY, "sharded weights", strategy="ModelParallelStrategy"),
    _overlap((_exchange("all_gather_object"),), OTHERWISE, "torch_profiler_steps", strategy="ModelParallelStrategy"),
    _overlap((_exchange("all_gather"),), OTHERWISE, "torch_profiler_steps"),
    _overlap((_exchange("all_reduce"),), OTHERWISE, "sync_dist=True"),
    _overlap((ROWS, _exchange("all_gather")), OTHERWISE, "torch_profiler_steps", overlap="on"),
    _overlap((_exchange("all_to_all"),), OTHERWISE, "torch_profiler_steps", overlap="on"),
    ({"no host overhead": 1.2}, {}, "host overhead", "on_train_batch_end"),
    ({"no host overhead": 1.02, "perfect balance": 1.029, "balance + overlap": 1.1}, {}, "nothing", "more samples per rank"),
]


@pytest.mark.parametrize(("gains", "more", "cause", "advice"), WAYS_OUT)
def test_each_cause_has_its_way_out(gains: dict[str, float | None], more: dict[str, Any], cause: str, advice: str) -> None:
    if "parts" in more:  # compute twice as uneven as the plan predicted
        more = {**more, "parts": np.array([[step(0.1, forward=0.02, straggler_wait=0.06), step(0.1, forward=0.08)]] * 3)}
    report = _report(gains, **more)
    verdict = verdict_on(report.document(), advise)
    assert verdict.cause == cause and advice in verdict.next
    assert verdict.speed_up == max(gain for name, gain in gains.items() if name != "balance + overlap" and gain is not None)
    text = str(report).splitlines()
    link = LINKS.get(cause, "Next:")
    assert (link in verdict.next or cause == "nothing") and sum(link in line for line in text) == 1, "in one piece"
    assert text[0].startswith(f"Verdict: {verdict.verdict[:60]}")
    assert [line.split(":")[0] for line in text if line.startswith(("Why:", "Next:"))] == ["Why", "Next"]
    # without Lightning, the advice is for any loop
    plain = verdict_on(_report(gains, **{name: more[name] for name in more.keys() - {"parts", "predicted"}}).document())
    assert plain.cause == cause and plain.next.startswith(_ADVICE[cause][1] if cause in _ADVICE else _NOTHING)
    assert not any(word in plain.next for word in ("FreeScale", "Trainer", "BubbleProfiler", "on_train_batch"))


def test_the_line_of_a_log() -> None:
    document = full_report(status=Status(False, "KeyboardInterrupt")).document()
    shown_text = document["verdict"]
    line = verdict_line(document)
    assert line.startswith("INCOMPLETE: KeyboardInterrupt ") and line.endswith(
        f"Verdict: {shown_text['verdict']} Why: {shown_text['why']} Next: {shown_text['next']}"
    )
    assert verdict_line(full_report().document()).startswith("Verdict:")


def test_a_slow_rank_is_named_beside_histories_that_cost_more() -> None:
    """Check that the gain includes both causes."""
    report = _report({"perfect balance": 1.37, "no host overhead": 1.0}, imbalance=MIXED)
    verdict = verdict_on(replace(report, what_if=[*report.what_if, WhatIf("equal histories", 1.14, 1.6)]).document(), advise)
    assert verdict.cause == "imbalance of data" and "slow ranks" in verdict.verdict
    assert "rank 1 takes 1.30 times" in verdict.why and "1.14x" in verdict.why
    assert "FreeScaleDataModule(train_set" in verdict.next and "See what else runs on that device" in verdict.next
    without = _verdict({"perfect balance": 1.37}, imbalance=MIXED)
    assert "rank 1" in without.why and "x as fast" not in without.why, "what was not replayed is not said"
    alone = _verdict({"perfect balance": 1.37}, imbalance=UNEQUAL)
    assert "slow ranks" not in alone.verdict and "See what else" not in alone.next
    also = _verdict({"perfect balance": 1.37}, imbalance=_uneven(5, 20, 0, slow=1.4)).why
    assert "rank 1 takes 1.40 times" in also.replace("Rank", "rank") and "25 ms" in also and "5 ms" in also
    assert "histories" not in _verdict({"perfect balance": 1.37}, imbalance=SLOW).why


@pytest.mark.parametrize("costs", [True, False])
def test_a_rank_that_is_always_a_little_slower_is_the_cause_where_nothing_is_larger(costs: bool) -> None:
    verdict = _verdict({"perfect balance": 1.04}, imbalance=_uneven(0.7 * costs, 1.8, 0, score=1.08, costs=costs))
    assert verdict.cause == "slow hardware" and "ank 1 takes 1.08 times" in verdict.why and "step to step" not in verdict.why


def test_one_rank_that_loads_slowly_is_named() -> None:
    slow, other = step(0.1, data_wait=0.05, forward=0.05), step(0.1, straggler_wait=0.05, forward=0.05)
    cases = (WhatIf("no data wait", 1.8, 2.0), WhatIf("perfect balance", 1.0, 2.0))
    verdict = verdict_on(report_of(np.array([[other, slow, other, other]] * 3), what_if=cases).document())
    assert verdict.cause == "data loading" and "rank 1" in verdict.why
    both = verdict_on(report_of(np.array([[slow, slow]] * 3), what_if=cases).document())
    assert both.cause == "data loading" and "on rank" not in both.why


def _undivided(cases: dict[str, float], **parts: float) -> BubbleVerdict:
    row = step(1.0, **parts)
    known = [WhatIf(name, cases.get(name), 2.0) for name in CASES]
    return verdict_on(report_of(np.array([[row, row]] * 3), wait_attribution=UNDIVIDED, what_if=known).document())


def test_waits_that_are_not_divided_are_no_verdict_on_their_cause() -> None:
    """Nor are they nothing: neither where a part as large is not worth removing, nor beside one that is."""
    alone = _undivided({"no data wait": 1.0}, forward=0.5, wait=0.4, host_overhead=0.1)
    assert (alone.cause, alone.speed_up) == ("waiting for peers", None) and "never compared" in alone.why
    assert (
        _undivided({"no data wait": 1.02, "no host overhead": 1.0}, forward=0.85, wait=0.07, data_wait=0.08).cause
        == alone.cause
    )
    beside = _undivided({"no data wait": 1.2, "no host overhead": 1.0}, forward=0.7, wait=0.1, data_wait=0.2)
    assert beside.cause == "data loading" and (beside.also or "").startswith("Waiting for peers, 10.0%")
    unexplained = _undivided({"no data wait": 1.0, "no host overhead": 1.9}, forward=0.43, wait=0.07, unexplained=0.5)
    assert (unexplained.cause, unexplained.speed_up) == ("host overhead", 1.9) and "Waiting for peers" in (
        unexplained.also or ""
    )
    assert _undivided({"no data wait": 1.0}, forward=0.98, wait=0.02).cause == "nothing", "too short to be worth a word"


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_not_replayed_is_not_nothing(ranks: int) -> None:
    """As of a run that is still going on, or one without compute."""
    parts = np.array([[step(0.1, data_wait=0.06, forward=0.04)] * ranks] * 3)
    verdict = verdict_on(report_of(parts, what_if=(), status=Status(False, "still running")).document())
    assert (verdict.cause, verdict.speed_up) == ("data wait", None) and "Data wait, 60.0%" in verdict.verdict
    assert "end" in verdict.why and verdict.next == f"See {LINKS['data loading']}"
    idle = verdict_on(report_of(np.array([[step(0.1, data_wait=0.1)] * ranks] * 3), what_if=()).document())
    assert idle.cause == "data wait" and "no compute" in idle.why and "order" not in idle.why
    assert verdict_on(report_of(np.array([[step(0.1, forward=0.1)] * ranks] * 3)).document()).cause == "nothing"


def test_shares_and_gains_are_of_the_same_steps() -> None:
    """Use a loader that was slow in the replayed steps, the last quarter."""
    fast, slow = step(0.04, forward=0.04), step(0.1, forward=0.04, data_wait=0.06)
    gain = [WhatIf("no data wait", 2.5, 2.5)]
    report = report_of(np.array([[fast]] * 6 + [[slow]] * 2), replayed=np.array([6, 7]), what_if=gain)
    assert report.limit == pytest.approx(44 / 32), "of all steps"
    verdict = verdict_on(report.document())
    assert all(fact in verdict.verdict for fact in ("60.0%", "steps 11 to 12", "2.50x"))
    assert "60 ms" in verdict.why and "100 ms" in verdict.why
    assert "what if in steps 11 to 12: no data wait 2.50x" in " ".join(str(report).split())
    with_gap = verdict_on(replace(report, replayed=np.array([0, 2, 3])).document())
    assert "3 of steps 5 to 8" in with_gap.verdict
    nothing = verdict_on(replace(report, replayed=np.arange(6), what_if=[WhatIf("no data wait", 1.0, 1.0)]).document())
    assert nothing.cause == "nothing" and "steps 5 to 10" in nothing.verdict and nothing.why.startswith("100.0%")


def test_a_loop_that_stamps_no_data_is_told_that_it_may_wait_for_it() -> None:
    def verdict(**parts: float) -> BubbleVerdict:
        row = np.array([[step(0.1, forward=0.04, **parts)]] * 3)
        run, gain = RunInfo("plain loop", "MyModel", 1, 1), [WhatIf("no host overhead", 2.4, 2.5)]
        return verdict_on(report_of(row, run=run, what_if=gain).document())

    unseen, seen = verdict(), verdict(data_wait=0.001)
    assert unseen.cause == "host overhead" and "was recorded" in unseen.why
    assert "batches_on(timeline, loader)" in unseen.next and "hooks" not in unseen.next
    assert "was recorded" not in seen.why and "batches_on" not in seen.next and "BubbleProfiler" not in seen.next


def test_one_rank_makes_no_other_wait() -> None:
    parts = np.array([[step(0.1, forward=0.07, data_wait=0.03)]] * 3)
    alone, two = (report_of(parts.repeat(n, axis=1), what_if=[WhatIf("no data wait", 2.0, 2.5)]) for n in (1, 2))
    assert "other ranks" not in verdict_on(alone.document()).why and "other ranks" in verdict_on(two.document()).why


def test_the_second_cause_stands_beside_the_first() -> None:
    two = _verdict({"no data wait": 1.3, "perfect balance": 1.1, "no host overhead": 1.05}, imbalance=UNEQUAL)
    assert two.cause == "data loading" and two.also is not None
    assert two.also.startswith("Straggler wait") and "1.10x" in two.also and "FreeScaleDataModule" in two.also
    one = _report({"no data wait": 1.3, "perfect balance": 1.02}, imbalance=UNEQUAL)
    assert verdict_on(one.document()).also is None and "Also:" not in str(one)


def test_an_exchange_in_front_of_compute_has_its_speed() -> None:
    exchange = _exchange("all_to_all_single", 0.2, 1.2e6)
    why = _verdict({"full overlap": 1.5}, exchanges=(exchange,), overlap="off").why
    assert "1.2 MB" in why and " 6 MB/s" in why
    beside = _exchange("all_to_all_single", 0.2, 1.2e6, hidden=0.1)
    assert "MB/s" not in _verdict({"full overlap": 1.5}, exchanges=(beside,), overlap="on").why
    for exchanges, moved in (((EARLIER, LONG), "50 MB, after 20 MB that leave during backward"), ((LONG,), "50 MB")):
        why = _verdict({"full overlap": 1.5}, exchanges=exchanges, overlap="on").why
        assert "MB/s" not in why and f": {moved}." in why, "DDP may send a part during backward"
    # transfer is a tenth of the time: without it 1.11x
    for gain, short in ((1.1, False), (1.04, True)):
        assert ("too little compute" in _verdict({"full overlap": gain}, exchanges=(ROWS,), overlap="off").why) == short


def test_small_sections_of_host_overhead_are_not_named() -> None:
    named = _verdict({"no host overhead": 1.3}, host={"hooks before forward": 0.09, "embeddings: before the step": 0.0005})
    assert "90 ms in hooks before forward" in named.why and "embeddings" not in named.why
    assert "on_train_batch_start" in named.next and "log_every_n_steps" not in named.next


def test_each_section_of_host_overhead_has_its_way_out() -> None:
    package = Path(lightning_freescale.__file__).parent
    found = {
        name for path in package.rglob("*.py") for name in re.findall(r'span\("host", "(embeddings.+?)"\)', path.read_text())
    }
    assert len(found) == 4 and found <= _HOST_OVERHEAD.keys()


def _padded(kind: str, tokens: float = 0.67) -> dict[str, Any]:
    return {"kind": kind, "tokens": tokens}


@pytest.mark.parametrize(
    ("kind", "run", "advice"),
    [
        ("fixed", {}, "A collate_fn that pads to the longest sample of the batch"),
        ("batch, planned", {"overlap": "on"}, "micro_batches='auto'"),
        ("batch, planned", {"overlap": "off"}, "micro_batches=2"),
        ("batch", {"assignment": "as drawn"}, "Remove balance=False"),
    ],
)
def test_padding_has_its_way_out(kind: str, run: dict[str, str], advice: str) -> None:
    gains: dict[str, float | None] = {"no padding": 1.9, "perfect balance": 1.1}
    verdict = _verdict(gains, padded=_padded(kind), imbalance=UNEQUAL, **run)
    # compute is 70 % of the time
    assert (verdict.cause, verdict.speed_up) == ("padding", 1.9) and advice in verdict.next
    assert verdict.verdict.startswith("Padding: 67% of the computed tokens, 46.9% of the time") and "1.90x" in verdict.verdict
    assert "proportional" in verdict.why and (verdict.also or "").startswith("Straggler wait")
    assert ("jagged attention" in verdict.next) == (kind == "batch, planned")
    first = _verdict({"no padding": 1.3, "no data wait": 1.6}, padded=_padded(kind))
    assert first.cause == "data loading" and (first.also or "").startswith("Padding: 67%")


@pytest.mark.parametrize("padded", [_padded("batch, planned", 0.15), None])
def test_jagged_batches_and_little_padding_are_no_cause(padded: dict[str, Any] | None) -> None:
    verdict = _verdict({"no padding": 1.12}, padded=padded)
    assert verdict.cause == "nothing" and "one cause is 1.00x" in verdict.verdict
    assert ("15% of the computed tokens" in verdict.why) == (padded is not None)


def test_padding_beside_waits_that_are_not_divided() -> None:
    row, gains = step(1.0, forward=0.7, wait=0.3), {"no padding": 1.9, "no data wait": 1.0}
    cases = [WhatIf(name, gains.get(name), 2.0) for name in CASES]
    report = report_of(np.array([[row, row]] * 3), wait_attribution=UNDIVIDED, what_if=cases, padded=_padded("fixed"))
    verdict = verdict_on(report.document())
    assert verdict.cause == "padding" and "Waiting for peers" in (verdict.also or "")


@pytest.mark.parametrize(
    ("gains", "cause"), [({"perfect balance": 1.25}, "uneven compute"), ({"full overlap": 1.2}, DENSELY), ({}, "nothing")]
)
def test_a_prediction_that_measured_compute_does_not_follow_is_named(gains: dict[str, float | None], cause: str) -> None:
    uneven = np.array([[step(0.1, forward=0.038, straggler_wait=0.024), step(0.1, forward=0.062)]] * 3)
    more = {"parts": uneven, "imbalance": _uneven(1, 1, 20), "exchanges": (LONG,), "assignment": "free"}
    verdict = _verdict(gains, predicted=np.ones((3, 2)), **more)
    assert verdict.cause == cause and "compute imbalance of 1.00" in verdict.why and "1.24" in verdict.why
    assert "predicted" not in _verdict(gains, predicted=np.array([[0.76, 1.24]] * 3), **more).why
    assert "predicted" not in _verdict(gains, predicted=None, **more).why


def test_uneven_compute_of_batches_that_are_padded_as_drawn() -> None:
    """Use a plan without padding, so that no cost explains the differences of compute."""
    more = {"imbalance": _uneven(1, 1, 20), "assignment": "free", "options": {"batch_tokens": 100.0}}
    gains: dict[str, float | None] = {"perfect balance": 1.25}
    assert (
        "Replace batch_tokens= by batch_size=: samples of similar length"
        in _verdict(gains, padded=_padded("batch", 0.3), **more).next
    )
    assert "padding" not in _verdict(gains, padded=_padded("batch, planned", 0.3), **more).next


def _watched(idle: list[float | None]) -> dict[str, Any]:
    return {"steps": 3, "idle": idle, "compute": [0.05] * len(idle), "other": [0.0] * len(idle)}


def test_a_device_that_is_idle_in_compute_is_a_cause() -> None:
    """Stamps call the whole of forward and backward compute, also while the device waits for the host."""
    verdict = _verdict({}, device_idle=_watched([0.95, None]))
    assert verdict.cause == "idle device" and "Idle device, 65.0% of the time" in verdict.verdict
    assert verdict.speed_up == pytest.approx(1 / 0.35) and "larger batch" in verdict.next
    assert "idle 95.0%" in str(_report({}, device_idle=_watched([0.95, None])))
    # 30 % of the time is no compute, in which a device is idle for a known reason
    assert _verdict({"full overlap": 1.2}, device_idle=_watched([0.31, 0.32])).cause != "idle device"
    assert _verdict({}, device_idle=_watched([1.0, 1.0])).speed_up == pytest.approx(1 / 0.3)


@pytest.mark.parametrize(("device", "named"), [("cpu", False), ("NVIDIA H200", True)])
def test_nothing_worth_doing_on_a_gpu_says_how_to_see_it_idle(device: str, named: bool) -> None:
    run = replace(run_info(), device=device)
    report = full_report(what_if=[WhatIf(name, 1.0, 1.6) for name in CASES], run=run, device_idle=None)
    assert ("torch_profiler_steps=3" in verdict_on(report.document(), advise).next) == named


PLANTED = list(documents())


def test_no_next_step_recommends_what_is_on_or_has_lost() -> None:
    """Judge every cause beside every group of settings."""
    assert len(PLANTED) >= 200
    found = [(settings, cause, repeated_advice(document), document["verdict"]["next"]) for settings, cause, document in PLANTED]
    assert [each for each in found if each[2]] == []
    for settings, cause, document in PLANTED:
        verdict = document["verdict"]
        assert verdict["cause"] == cause and len(verdict["next"]) > 60 and verdict["next"].endswith(LINKS.get(cause, "."))
        assert not verdict["next"].startswith("See http"), (settings, cause)
