"""Reports of the overlap and of hot rows are means per step of totals; they count the bytes that TorchRec would send."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from lightning_freescale.embeddings.collections import find_collections
from lightning_freescale.embeddings.overlap.report import (
    COUNTS,
    ExchangeStatistics,
    Heat,
    HeatReport,
    OverlapReport,
    bag_senders,
)
from lightning_freescale.embeddings.overlap.row_layout import RowLayout
from lightning_freescale.embeddings.overlap.row_requests import RowRequest
from lightning_freescale.embeddings.row_order import RowOrder
from tests.helpers.bags import SUM, configs


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


@pytest.mark.parametrize(
    ("row_wise", "rank", "ids", "pooled_rows"), [(False, 0, 3, 3), (False, 2, 9, 6 + 3), (True, 1, 9, 9 + 9 + 9)]
)
def test_bytes_of_ids_and_pooled_rows_of_other_ranks(row_wise: bool, rank: int, ids: int, pooled_rows: int) -> None:
    """Count on four ranks; the first table has two features, so ranks 0 and 1 own the whole tables."""
    bags = EmbeddingBagCollection(tables=configs({"0": (400, 8, ["a", "b"], SUM), "1": (400, 8, ["c"], SUM)}))
    ((collection, _),) = find_collections(nn.ModuleDict({"bags": bags}))
    rows, plan = 100 if row_wise else 400, {}
    for table in collection.tables:
        owners = range(4) if row_wise else [int(table.name)]
        shards = [ShardMetadata([i * rows, 0], [rows, 8], f"rank:{owner}/cpu") for i, owner in enumerate(owners)]
        plan[table.name] = SimpleNamespace(sharding_spec=SimpleNamespace(shards=shards))
    layout = RowLayout.from_plan(collection, plan, {"0": RowOrder(400), "1": RowOrder(400)}, 4, torch.device("cpu"))
    features = KeyedJaggedTensor(["c", "unused", "a", "b"], torch.arange(12), lengths=torch.ones(12, dtype=torch.int32))
    statistics = ExchangeStatistics()
    statistics.count_lookup(RowRequest.from_lookups([features], layout, True), rank, 8, bag_senders(layout, rank))
    assert statistics.totals()["torchrec_bytes"] == 8 * ids + pooled_rows * (4 + 2 * 4 * 8)
