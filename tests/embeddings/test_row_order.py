"""The order in which rows are laid out: every position once, neighbours far apart, the same everywhere."""

from __future__ import annotations

import pytest
import torch

from lightning_freescale.embeddings.row_order import RowOrder


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 12, 30, 64, 97, 1000, 30030, 65536])
def test_every_row_has_a_position_of_its_own(rows: int) -> None:
    order, ids = RowOrder.hashed(rows), torch.arange(rows)
    positions = order.positions(ids)
    assert torch.equal(positions.sort().values, ids)
    assert torch.equal(order.ids(0, rows)[positions], ids)
    assert torch.equal(order.ids(rows // 3, rows), order.ids(0, rows)[rows // 3 :])


@pytest.mark.parametrize(("rows", "owners"), [(1000, 8), (65536, 2), (5_000_000, 64), (2**31 - 1, 64)])
def test_any_run_of_ids_is_spread_evenly(rows: int, owners: int) -> None:
    order, block = RowOrder.hashed(rows), -(-rows // owners)
    for first in (0, rows // 7, rows // 2):
        for count in (owners, 10 * owners):
            ids = torch.arange(first, first + count).clamp(max=rows - 1)
            held = torch.bincount(order.positions(ids) // block, minlength=owners)
            assert held.max() <= count // owners + 3


def test_it_is_a_function_of_the_number_of_rows_and_does_not_overflow() -> None:
    """Checkpoints of a window and other versions depend on it."""
    assert RowOrder.hashed(5_000_000) == RowOrder(5_000_000, 3_090_171, 4_715_853)
    rows = 3_037_000_499
    order = RowOrder.hashed(rows)
    for at in (0, 1, rows // 2, rows - 2, rows - 1):
        expected = (at * order.multiplier + order.offset) % rows
        assert int(order.positions(torch.tensor([at]))) == expected
        assert int(order.ids(expected, expected + 1)) == at
    with pytest.raises(ValueError, match=r"3037000500.*placement='blocks'"):
        RowOrder.hashed(rows + 1)
    order, ids = RowOrder.hashed(2**31 - 1), torch.tensor([0, 1, 2**31 - 2])
    assert torch.equal(order.positions(ids.int()), order.positions(ids))


@pytest.mark.parametrize("order", [RowOrder(10), RowOrder.hashed(10)])
def test_parts_are_read_and_written_in_the_order_of_ids(order: RowOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_freescale.embeddings.row_order._ROWS_AT_ONCE", 2)
    whole = torch.arange(20.0).view(10, 2)
    again, states, sums = torch.zeros(10, 2), torch.zeros(10, 1), whole.sum(dim=1, keepdim=True)
    for start, stop in ((0, 4), (4, 9), (9, 10)):
        part, per_row = torch.zeros(stop - start, 2), torch.zeros(stop - start)
        order.read(whole, start, part)
        assert torch.equal(part, whole[order.ids(start, stop)])
        order.write(part, start, again)
        order.read(sums, start, per_row)  # a state of a row has no columns where it is kept
        order.write(per_row, start, states)
    assert torch.equal(again, whole) and torch.equal(states, sums)
