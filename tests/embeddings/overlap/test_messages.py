"""Messages of the step: what is put in comes out, however many ranks there are."""

from __future__ import annotations

import pytest
import torch

from lightning_freescale.embeddings.overlap import messages
from lightning_freescale.embeddings.overlap.messages import PartLayout, put, take


@pytest.mark.parametrize("few_ranks", [0, 32])
@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 0]])
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
