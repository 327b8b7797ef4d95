"""Reports of the overlap and of hot rows are means per step of totals."""

from __future__ import annotations

import pytest

from lightning_freescale.embeddings.overlap.report import COUNTS, Heat, HeatReport, OverlapReport


def test_hot_rows_are_reported_beside_the_overlap() -> None:
    totals = {"steps": 4.0, **{name: 8.0 * number for number, name in enumerate(COUNTS)}}
    flat = OverlapReport.from_totals(totals)
    assert flat is not None and flat.heat is None
    assert not any(name.startswith("freescale/heat/") for name in flat.scalars())
    heats = [Heat([3, 4], 0.1, 5, 50, 1.25), Heat([0, 2], 0.2, 1, 8, 1.5)]
    report = OverlapReport.from_totals(totals, heats)
    assert report is not None and report.heat is not None
    at = {name: 2.0 * number for number, name in enumerate(COUNTS)}
    sent = at["ids_bytes"] + at["colliding_bytes"] + at["non_colliding_bytes"]
    assert vars(report.heat) == {
        "rows": 9,
        "rows_of_half": 6,
        "rows_of_most": 58,
        "largest_load": 1.5,
        "colliding_share": pytest.approx(at["hot_colliding_rows"] / at["far_colliding_rows"]),
        "sent_bytes": sent,
        **{name: at[name] for name in ("cross_node_bytes", "hot_near_bytes", "hot_far_bytes", "hot_direct_bytes")},
    }
    scalars = report.scalars()
    assert set(scalars) == set(flat.scalars()) | {f"freescale/heat/{name}" for name in vars(report.heat)}
    assert scalars["freescale/heat/rows"] == 9 and "freescale/overlap/heat" not in scalars


def test_without_colliding_rows_their_share_is_unknown() -> None:
    report = HeatReport.of([Heat([0], 0.0, 0, 0, 1.0)], dict.fromkeys(COUNTS, 0.0), 1.0)
    assert report is not None and report.colliding_share is None
    assert "freescale/heat/colliding_share" not in report.scalars()


def test_means_are_those_since_the_totals_before() -> None:
    before = {"steps": 1.0, **dict.fromkeys(COUNTS, 1.0)}
    now = {"steps": 3.0, **dict.fromkeys(COUNTS, 5.0)}
    report = OverlapReport.from_totals(now, [Heat([1], 0.0, 1, 1, 1.0)], before)
    assert report is not None and report.heat is not None
    assert (report.tokens, report.heat.hot_near_bytes, report.heat.colliding_share) == (2.0, 2.0, 1.0)
