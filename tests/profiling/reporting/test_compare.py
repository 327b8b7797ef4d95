"""Gains of one run over another, on runs whose truth is known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_freescale.profiling.reporting.compare import DifferentWorkError, compare, differences, remarks, table
from lightning_freescale.profiling.reporting.facts import Status
from tests.helpers.reports import VERSIONS, full_report, run_of


def _documents(*runs: dict[str, Any]) -> list[dict[str, Any]]:
    return [run_of(**run).document() for run in runs]


def test_equal_compute_per_sample() -> None:
    """30 ms of bubble become 10: r = 2/3, and 1/(1 - r*b) is the speed-up."""
    (one,) = compare(_documents({}, {"wall": 0.08}))
    assert one.base_bubble == pytest.approx(0.3) and one.bubble == pytest.approx(0.125)
    assert one.removed == pytest.approx(2 / 3) and one.speed_up == pytest.approx(1.25)
    assert one.from_bubbles == pytest.approx(1.25) and one.compute_change == pytest.approx(0.0, abs=1e-8)
    assert one.limit == pytest.approx(1 / 0.7)
    assert (one.per, one.base_rate, one.rate) == ("sample", pytest.approx(640), pytest.approx(800))


def test_bubbles_count_per_sample_not_per_step() -> None:
    """Twice the samples in steps twice as long, with a third of the bubble per sample gone."""
    (one,) = compare(_documents({}, {"wall": 0.18, "compute": 0.14, "count": 128}), force=True)
    assert one.removed == pytest.approx(1 / 3) and one.from_bubbles == pytest.approx(one.speed_up)
    assert one.speed_up == pytest.approx(0.2 / 0.18)


def test_unknown_samples_are_compared_per_step() -> None:
    for counts in ((0, 0), (0, 64), (64, 0)):
        documents = _documents({"count": counts[0]}, {"wall": 0.08, "count": counts[1], "label": "b"})
        (one,) = compare(documents)
        assert (one.per, one.base_rate) == ("step", pytest.approx(10)) and one.speed_up == pytest.approx(1.25)
        unknown = sum(not count for count in counts)
        assert len([line for line in remarks(*documents) if "unknown: compared per step" in line]) == unknown
        assert "compute/step" in table(documents[0], [one]) and "steps/s" in table(documents[0], [one])


seconds = st.floats(0.001, 1.0)


@given(seconds, seconds, seconds, seconds, st.integers(1, 999), st.integers(1, 999))
def test_the_speed_up_is_r_b_and_compute(c: float, bubble: float, c2: float, bubble2: float, n: int, n2: int) -> None:
    documents = _documents({"wall": c + bubble, "compute": c, "count": n}, {"wall": c2 + bubble2, "compute": c2, "count": n2})
    (one,) = compare(documents, force=True)
    b = one.base_bubble
    assert one.removed is not None and one.compute_change is not None and one.limit is not None
    assert one.speed_up == pytest.approx(1 / (1 - one.removed * b + (1 - b) * one.compute_change), rel=1e-5)
    assert one.removed == pytest.approx(1 - (bubble2 / n2) / (bubble / n), rel=1e-5, abs=1e-5)
    assert one.from_bubbles is None or one.from_bubbles <= one.limit * (1 + 1e-6)


def test_where_there_is_no_bubble_or_no_compute() -> None:
    (none,) = compare(_documents({"wall": 0.1, "compute": 0.1}, {"wall": 0.125, "compute": 0.1}))
    assert none.removed is None and none.from_bubbles == pytest.approx(0.8) and none.speed_up == pytest.approx(0.8)
    (idle,) = compare(_documents({"compute": 0.0}, {"wall": 0.05, "compute": 0.05}))
    assert (idle.limit, idle.from_bubbles, idle.compute_change) == (None, None, None) and idle.removed == 1.0
    told = table(run_of().document(), [idle])
    assert "speed-up 2.00x (r and b alone give -, the limit is -)" in told and "compute per sample" not in told
    with pytest.raises(ValueError, match="base has no wall time: step_s is 0"):
        compare(_documents({"label": "base", "wall": 0.0, "compute": 0.0, "count": 0}, {}))
    with pytest.raises(ValueError, match="two reports or more, not 1"):
        compare(_documents({}))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"model": "SASRec"}, "model of a and b: 'HSTU' and 'SASRec'"),
        ({"parameters": 7}, "parameters of a and b: 123456 and 7"),
        ({"world_size": 4}, "world_size of a and b: 2 and 4"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches of a and b: 1 and 2"),
        ({"count": 32}, "samples per step of a and b: 64 and 32"),
    ],
)
def test_different_work_is_refused(change: dict[str, Any], difference: str) -> None:
    documents = _documents({"label": "a"}, {"label": "b", **change})
    assert differences(*documents) == [difference] and remarks(*documents) == []
    with pytest.raises(DifferentWorkError) as refused:
        compare(documents)
    assert str(refused.value).splitlines()[1:] == [f"  {difference}"]
    assert len(compare(documents, force=True)) == 1


def test_every_difference_of_every_run_is_named() -> None:
    documents = _documents(
        {"label": "a"}, {"label": "b"}, {"label": "c", "model": "X"}, {"label": "d", "count": 32, "model": "Y"}
    )
    with pytest.raises(DifferentWorkError) as refused:
        compare(documents)
    assert [line.split(":")[0] for line in str(refused.value).splitlines()[1:]] == [
        "  model of a and c",
        "  model of a and d",
        "  samples per step of a and d",
    ]


def test_last_batches_may_be_shorter() -> None:
    assert not differences(*_documents({"count": 1000}, {"count": 1010}))
    assert differences(*_documents({"count": 1000}, {"count": 1011}))
    assert differences(*_documents({"count": 1000}, {"count": 989}))


def test_remarks() -> None:
    versions = {"torch": "2.12.0", "python": "3.11.7", "lightning_freescale": VERSIONS["lightning_freescale"]}
    base, other = _documents({"label": "a"}, {"label": "b", "device": "cuda", "versions": versions, "strategy": "ddp"})
    assert differences(base, other) == []
    assert remarks(base, other) == [
        "device of a and b: 'cpu' and 'cuda'",
        "version of python of a and b: None and '3.11.7'",
        "version of torch of a and b: '2.13.0' and '2.12.0'",
    ]
    cut = full_report(status=Status(False, "KeyboardInterrupt", 5, 2)).document()
    assert "freescale did not come to its end: KeyboardInterrupt" in remarks(base, cut)
    assert "freescale did not come to its end: KeyboardInterrupt" in remarks(cut, base)


def test_a_run_whose_waits_are_not_divided_is_told() -> None:
    documents = _documents({"label": "a"}, {"label": "b"})
    documents[1]["wait_attribution"].update(aligned=False, reason="the ranks' clocks agreed only within 3.00 ms")
    assert differences(*documents) == []
    assert remarks(*documents) == [
        "waits of b are not divided into straggler wait and transfer: the ranks' clocks agreed only within 3.00 ms"
    ]


def test_table() -> None:
    documents = _documents(
        {"label": "ddp"}, {"label": "balanced", "wall": 0.08}, {"label": "all of it", "wall": 0.08, "compute": 0.0714}
    )
    head, base, *rows = table(documents[0], compare(documents)).splitlines()
    assert head.split("  ")[0] == "run" and base.split() == ["ddp", "640.0", "30.0%", "-", "-", "-", "-"]
    assert rows[0].split() == ["balanced", "800.0", "12.5%", "66.7%", "1.25x", "1.25x", "+0.0%"]
    assert rows[1].split() == ["all", "of", "it", "800.0", "10.8%", "71.3%", "1.25x", "1.27x", "+2.0%"]
    assert len({len(line) for line in (head, base, *rows[:2])}) == 1, "columns are aligned"
    assert rows[2:] == [
        "balanced: r = 66.7% of the base's b = 30.0% removed, speed-up 1.25x (r and b alone give 1.25x, the limit is 1.43x)",
        "  compute per sample is the same",
        "all of it: r = 71.3% of the base's b = 30.0% removed, speed-up 1.25x (r and b alone give 1.27x, the limit is 1.43x)",
        "  compute per sample changed by +2.0%: by this the two speed-ups differ",
    ]
