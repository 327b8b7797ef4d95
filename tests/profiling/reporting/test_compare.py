"""Gains of one run over another, on runs whose truth is known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_freescale.profiling.reporting.compare import DifferentWorkError, compare, differences, remarks, table
from lightning_freescale.profiling.reporting.document import Status
from tests.helpers.reports import VERSIONS, full_report, run_of


def _documents(*runs: dict[str, Any]) -> list[dict[str, Any]]:
    return [run_of(**run).document() for run in runs]


def test_unknown_samples_are_compared_per_step() -> None:
    for counts in ((0, 0), (0, 64), (64, 0)):
        documents = _documents({"count": counts[0]}, {"wall": 0.08, "count": counts[1], "label": "b"})
        (one,) = compare(documents)
        assert (one.per, one.base_rate) == ("step", pytest.approx(10)) and one.speed_up == pytest.approx(1.25)
        assert len([line for line in remarks(*documents) if "samples" in line]) == sum(not count for count in counts)
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
    shown_text = table(run_of().document(), [idle])
    assert "2.00x (- by r and b alone, limit -)" in shown_text and "compute per sample" not in shown_text
    with pytest.raises(ValueError, match=r"base.*step_s is 0"):
        compare(_documents({"label": "base", "wall": 0.0, "compute": 0.0, "count": 0}, {}))
    with pytest.raises(ValueError, match="at least two"):
        compare(_documents({}))


def test_different_work_is_refused_and_every_difference_of_every_run_is_named() -> None:
    for change, difference in (
        ({"model": "SASRec"}, "model of a and b: 'HSTU' and 'SASRec'"),
        ({"parameters": 7}, "parameters of a and b: 123456 and 7"),
        ({"world_size": 4}, "world_size of a and b: 2 and 4"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches of a and b: 1 and 2"),
        ({"count": 32}, "samples per step of a and b: 64 and 32"),
    ):
        documents = _documents({"label": "a"}, {"label": "b", **change})
        assert differences(*documents) == [difference] and remarks(*documents) == []
        with pytest.raises(DifferentWorkError) as refused:
            compare(documents)
        assert str(refused.value).splitlines()[1:] == [f"  {difference}"]
        assert len(compare(documents, force=True)) == 1
    documents = _documents(
        {"label": "a"}, {"label": "b"}, {"label": "c", "model": "X"}, {"label": "d", "count": 32, "model": "Y"}
    )
    with pytest.raises(DifferentWorkError) as refused:
        compare(documents)
    named = [line.split(":")[0].strip() for line in str(refused.value).splitlines()[1:]]
    assert named == ["model of a and c", "model of a and d", "samples per step of a and d"]
    for count, same in ((1010, True), (1011, False), (989, False)):  # the last batch of an epoch may be shorter
        assert bool(differences(*_documents({"count": 1000}, {"count": count}))) != same


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
    assert all(any("KeyboardInterrupt" in line for line in remarks(*pair)) for pair in ((base, cut), (cut, base)))
    undivided = _documents({"label": "c"})[0]
    undivided["wait_attribution"].update(aligned=False, reason="the clocks drift")
    (remark,) = remarks(base, undivided)
    assert "c " in remark and remark.endswith("the clocks drift") and differences(base, undivided) == []


def test_table() -> None:
    documents = _documents(
        {"label": "ddp"}, {"label": "balanced", "wall": 0.08}, {"label": "all", "wall": 0.08, "compute": 0.0714}
    )
    head, base, *rows = table(documents[0], compare(documents)).splitlines()
    assert head.split("  ")[0] == "run" and base.split() == ["ddp", "640.0", "30.0%", "-", "-", "-", "-"]
    assert rows[0].split() == ["balanced", "800.0", "12.5%", "66.7%", "1.25x", "1.25x", "+0.0%"]
    assert rows[1].split() == ["all", "800.0", "10.8%", "71.3%", "1.25x", "1.27x", "+2.0%"]
    assert len({len(line) for line in (head, base, *rows[:2])}) == 1, "columns are aligned"
    one, same, other, changed = rows[2:]
    assert one.startswith("balanced: ") and all(figure in one for figure in ("66.7%", "30.0%", "1.25x", "1.43x"))
    assert other.startswith("all: ") and all(figure in other for figure in ("71.3%", "30.0%", "1.25x", "1.27x", "1.43x"))
    assert "same" in same and "+2.0%" in changed
