"""Messages of the step: what is put in comes out, however many ranks there are and however much does not fit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.embeddings.overlap import id_exchange, messages
from lightning_freescale.embeddings.overlap.messages import PartLayout, put, take
from lightning_freescale.testing import run_distributed
from tests.helpers.sequences import OPTIMIZERS, Run, batches, train_overlapped, train_plain


@pytest.mark.parametrize("few_ranks", [0, 32])
@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 0], [1, 4, 0]])
def test_what_is_put_is_what_is_taken(few_ranks: int, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_FEW_RANKS", few_ranks)
    starts, target = [1, 7, 12], torch.zeros(20, dtype=torch.int64)
    values = torch.arange(1, sum(counts) + 1)
    put(target, starts, counts, values)
    assert torch.equal(take(target, starts, counts), values)
    at = [start + number for start, count in zip(starts, counts) for number in range(count)]
    assert target.nonzero().flatten().tolist() == at and target[at].tolist() == values.tolist()


def test_rows_begin_behind_what_stands_before_them() -> None:
    layout = PartLayout(dim=4, preambles=[0, 1, 17], rows=[2, 0, 3])
    assert layout.starts == [0, 2, 3, 8] and layout.length == 8
    assert layout.first_rows == [0, 3, 5], "17 bytes take two rows of 16"
    assert layout.sizes == [8, 4, 20]
    assert layout.words(1) == [1, 9, 13] and layout.octets() == [0, 32, 48]


def _trained(few_ranks: int, fewest_ids: int, dedup: bool) -> tuple[Run, Run]:
    messages._FEW_RANKS, id_exchange._FEWEST_IDS = few_ranks, fewest_ids
    data = batches(dist.get_rank(), 10)
    how = OPTIMIZERS["rowwise_adagrad"]
    return train_plain(how, data), train_overlapped(how, data, dedup=dedup)


@pytest.mark.parametrize(("few_ranks", "fewest_ids"), [(0, 1024), (32, 1)], ids=["as for many ranks", "ids do not fit"])
def test_the_numbers_stay(few_ranks: int, fewest_ids: int) -> None:
    for plain, mine in run_distributed(_trained, 3, few_ranks, fewest_ids, False):
        assert plain.losses == mine.losses
        assert all(torch.equal(value, mine.tables[name]) for name, value in plain.tables.items())
