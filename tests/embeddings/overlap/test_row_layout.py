"""A layout numbers the rows of all tables, and gives back the tables and ids of these numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torchrec import EmbeddingBagCollection

from lightning_freescale.embeddings.row_order import RowOrder
from tests.helpers.bags import TABLES, configs, layouts_of


@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_ids_of_keys_are_those_that_gave_the_keys(row_wise: bool, ranks: int) -> None:
    for by_id in layouts_of(EmbeddingBagCollection(tables=configs(TABLES)), ranks, row_wise)[1]:
        layout = replace(by_id, orders=tuple(RowOrder.hashed(table.rows) for table in by_id.tables))
        given = [layout.keys(index, torch.arange(table.rows)) for index, table in enumerate(layout.tables)]
        keys = torch.cat(given).sort().values
        assert keys.tolist() == list(range(sum(table.rows for table in layout.tables)))
        for index, table in enumerate(layout.tables):
            inside, ids = layout.ids(index, keys)
            assert torch.equal(keys[inside], given[index].sort().values)
            assert torch.equal(layout.keys(index, ids), keys[inside])
            assert ids.sort().values.tolist() == list(range(table.rows))
        inside, ids = layout.ids(0, keys[:0])
        assert not len(inside) and not len(ids)


@pytest.mark.parametrize("order", [RowOrder(7), RowOrder.hashed(7), RowOrder.hashed(1000)])
def test_ids_at_positions(order: RowOrder) -> None:
    ids = torch.arange(order.rows).flip(0)
    positions = order.positions(ids)
    kept = positions.clone()
    assert torch.equal(order.ids_at(positions), ids) and torch.equal(positions, kept)
    assert torch.equal(order.ids(2, 5), order.ids_at(torch.arange(2, 5)))
