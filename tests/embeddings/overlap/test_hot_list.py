"""Published lists have the rows and the accesses of all ranks, whatever route the requests took."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_freescale.testing import run_distributed
from tests.helpers.hot_rows import HOT
from tests.helpers.sequences import CATEGORIES, ITEMS, OPTIMIZERS, TAGS, batches, train_overlapped

STEPS, RANKS = 8, 4
FEATURES = {"items.embeddings.item": ("ids", ["history", "candidate"], ITEMS)}
FEATURES |= {"items.embeddings.category": ("ids", ["category"], CATEGORIES), "tags.embeddings.tag": ("tags", ["tag"], TAGS)}
Lists = dict[str, dict[int, float]]


def _published(hot_rows: Any) -> list[tuple[Lists, dict[str, tuple[torch.Tensor, torch.Tensor]]]]:
    found = []

    def after(step: int, tables: Any, engine: Any) -> None:
        # the list of the next batch's ids, which the engine has exchanged by now
        engine.drain()
        rows = engine.hot_rows()
        found.append(({name: dict(zip(*(each.tolist() for each in pair))) for name, pair in rows.items()}, rows))

    options = {**HOT, "hot_rows": hot_rows}
    train_overlapped(OPTIMIZERS["sgd"], batches(dist.get_rank(), STEPS), between=after, **options)
    return found


def _expected() -> list[Lists]:
    """Return the accesses of the rows that any node has visited lately, after each step but the last."""
    data = [batches(rank, STEPS) for rank in range(RANKS)]
    reads, visits = ({name: np.zeros(rows) for name, (_, _, rows) in FEATURES.items()} for _ in range(2))
    lists = []
    for step in range(1, STEPS):
        for name, (key, features, rows) in FEATURES.items():
            has = np.zeros((RANKS, rows), bool)
            for rank in range(RANKS):
                ids = data[rank][step][key]
                has[rank, torch.cat([ids[feature].values() for feature in features])] = True
            reads[name] = reads[name] / 2 + has.sum(axis=0)
            visits[name] = visits[name] / 2 + has.reshape(RANKS // 2, 2, rows).any(axis=1).sum(axis=0)
        lists.append(
            {name: {int(row): float(reads[name][row]) for row in np.flatnonzero(visits[name] >= 1)} for name in FEATURES}
        )
    return lists


def test_lists_have_the_accesses_of_all_ranks() -> None:
    """Check that the accesses are those of all ranks although a proxy requests a row for several of them."""
    expected = _expected()
    assert any(count > 2 for lists in expected for rows in lists.values() for count in rows.values())
    for found in run_distributed(_published, RANKS, 0.5):
        for step, ((lists, rows), wanted) in enumerate(zip(found, expected)):
            assert lists == wanted, f"after step {step}"
            for ids, counts in rows.values():
                assert ids.dtype == torch.int64 and counts.dtype == torch.float32
                assert (counts.diff() <= 0).all(), "the most requested rows are first"


def test_without_hot_rows_there_are_no_lists() -> None:
    for found in run_distributed(_published, RANKS, 0):
        assert [lists for lists, _ in found] == [{}] * STEPS
