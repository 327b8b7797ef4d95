"""What steps look up, and the rows that this moves: by hand, and between ranks and nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import overlap_workload
import placement
import pytest
import two_level

from lightning_freescale.embeddings.row_order import RowOrder


def test_requests_by_hand() -> None:
    """Of four rows, in the order 1 0 3 2, each of two ranks owns a pair."""
    order = RowOrder(4, 3, 1)
    assert order.ids(0, 4).tolist() == [1, 0, 3, 2]
    found = overlap_workload.requests([np.array([0, 0, 2]), np.array([1, 2, 3])], order)
    assert found.tolist() == [[2, 1], [1, 2]]


def test_other_items_become_popular() -> None:
    steady, shifting = overlap_workload.production(1000, 8), overlap_workload.production(1000, 8, shift_at=1)
    assert all((ids == more).all() for ids, more in zip(steady(0, 0), shifting(0, 0)))
    popular = [np.bincount(draw(1, 0)[0], minlength=1000).argmax() for draw in (steady, shifting)]
    assert popular[0] != popular[1] and (steady(1, 0)[1] == shifting(1, 0)[1]).all()


def test_collisions_by_hand() -> None:
    """Two ranks with rows 0 1 and 2 3. Of what they fetch in the step between, row 2 alone is needed in another, the last."""
    steps = [([0], [3]), ([0, 2, 2], [1, 1, 3]), ([2], [2])]
    figures = overlap_workload.collisions(lambda step, rank: (np.array(steps[step][rank]), np.ones(1, int)), 3, 2, 4)
    assert figures["collision_rate"] == 2 / 4
    assert figures["tokens_per_rank"] == 10 / 6 and figures["unique_per_rank"] == 8 / 6
    assert figures["predicted_reduction_vs_plain"] == 1 - 1 / 8 and figures["predicted_reduction_vs_dedup"] == 1 - 1 / 4
    divided = overlap_workload.collisions(
        lambda step, rank: (np.array(steps[step][rank]), np.array([len(steps[step][rank])])), 3, 2, 4, [1]
    )
    assert divided["predicted_micro_1_vs_plain"] == figures["predicted_reduction_vs_plain"], "one part is the batch"
    assert figures["predicted_busiest_vs_plain"] == 1 - 1 / 4 and figures["predicted_busiest_vs_dedup"] == 1 - 1 / 2


def test_hard_batches_are_the_latest_items_of_users() -> None:
    rows, draw = overlap_workload.hard(5)
    ids, lengths = draw(3, 1)
    assert len(lengths) == 5 and len(ids) == lengths.sum() and lengths.max() <= 200 and ids.max() < rows
    assert all(np.array_equal(*pair) for pair in zip(draw(3, 1), (ids, lengths)))


def test_placement_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash beats the blocks of a sorted catalogue, and those of a shuffled one."""
    written = tmp_path / "figures.json"
    size = ["--rows", "100000", "--batch", "8", "--steps", "2", "--ranks", "8", "16", "--json", str(written)]
    demands = ["--require", "hash_8_imbalance<=1.2", "--require", "hash_16_imbalance<=1.2"]
    monkeypatch.setattr(sys, "argv", ["placement.py", *size, *demands])
    placement.main()
    figures = json.loads(written.read_text())["figures"]
    for ranks in (8, 16):
        of = {way: figures[f"{way}_{ranks}_imbalance"] for way in ("blocks", "hash", "shuffled")}
        assert 1 <= of["hash"] < of["shuffled"] < of["blocks"]
        assert figures[f"hash_{ranks}_rows_mean"] == figures[f"blocks_{ranks}_rows_mean"]
        assert figures[f"hash_{ranks}_imbalance_without_dedup"] > of["hash"], "one item is 9 % of all ids"


@pytest.mark.slow
def test_two_level_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What owners are asked for by another node is what the ids alone say."""
    written = tmp_path / "figures.json"
    size = ["--rows", "3000", "--dim", "4", "--batch", "2", "--steps", "3", "--ranks-per-node", "2", "--hot", "1"]
    monkeypatch.setattr(sys, "argv", ["two_level.py", *size, "--json", str(written)])
    two_level.main()
    figures = json.loads(written.read_text())["figures"]
    draw, per_row = overlap_workload.production(3000, 2), 4 + 2 + 2 * 4 * 4
    crossed = {"flat": 0, "two_level": 0}
    for step in (1, 2):
        for node in (0, 1):
            own = [np.unique(draw(step, rank)[0]) for rank in (2 * node, 2 * node + 1)]
            for way, asked in (("flat", own), ("two_level", [np.unique(np.concatenate(own))])):
                crossed[way] += sum(int((ids // 1500 != node).sum()) for ids in asked)
    for way, rows in crossed.items():
        assert figures[f"{way}_hot_bytes"] == pytest.approx(rows * per_row / 2)
        assert figures[f"{way}_all_bytes"] > 0.8 * figures[f"{way}_hot_bytes"]
    assert 0 < figures["hot_reduction"] < 0.5 and 0 < figures["all_reduction"] < 0.5
