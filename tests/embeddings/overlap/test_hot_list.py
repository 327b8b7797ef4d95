"""Published lists have the rows and the accesses of all ranks, whatever route the requests took."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.overlap.hot_rows import HotList
from lightning_freescale.testing import run_distributed
from tests.helpers.hot_rows import HOT
from tests.helpers.sequences import CATEGORIES, ITEMS, OPTIMIZERS, TAGS, Batch, batches, known, train_overlapped

STEPS, RANKS = 8, 4
FEATURES = {"items.embeddings.item": ("ids", ["history", "candidate"], ITEMS)}
FEATURES |= {"items.embeddings.category": ("ids", ["category"], CATEGORIES), "tags.embeddings.tag": ("tags", ["tag"], TAGS)}
Lists = dict[str, dict[int, float]]


def _published(late_ranks: range) -> list[tuple[Lists, dict[str, tuple[torch.Tensor, torch.Tensor]]]]:
    found = []

    def after(step: int, tables: Any, engine: Any) -> None:
        # the list of the next batch's ids, which the engine has exchanged by now
        engine.drain()
        rows = engine.hot_rows()
        found.append(({name: dict(zip(*(each.tolist() for each in pair))) for name, pair in rows.items()}, rows))

    options = {**HOT, "submit": None}
    if dist.get_rank() in late_ranks:
        options["submit"] = lambda _, following: ({}, known(following) or {})
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


@pytest.mark.parametrize("late_ranks", [range(0), range(RANKS), range(0, RANKS, 2)])
def test_lists_have_the_accesses_of_all_ranks(late_ranks: range) -> None:
    """Check that the accesses are those of all ranks although a proxy requests a row for several of them.

    Ids of ``late_ranks`` come after the forward, in a second message.
    """
    expected = _expected()
    assert any(count > 2 for lists in expected for rows in lists.values() for count in rows.values())
    for found in run_distributed(_published, RANKS, late_ranks):
        for step, ((lists, rows), wanted) in enumerate(zip(found, expected)):
            assert lists == wanted, f"after step {step}"
            for ids, counts in rows.values():
                assert ids.dtype == torch.int64 and counts.dtype == torch.float32
                assert (counts.diff() <= 0).all(), "the most requested rows are first"


STEPS_OF_SHIFT, SHIFT = 48, 16


def _popular() -> list[Batch]:
    """Return batches of 20 popular rows, and of 20 others from step SHIFT on.

    Ranks 0 and 1 request all of them, and ranks 2 and 3 share them, so 1.5 ranks of a node request a popular row. Each tag is
    requested by one rank of each node.
    """
    rank, data = dist.get_rank(), batches(0, STEPS_OF_SHIFT)
    for step, batch in enumerate(data):
        popular = torch.arange(20) + (100 if step >= SHIFT else 0)
        items = popular if rank < 2 else popular[rank % 2 :: 2]
        lengths, none = torch.zeros(2, 6, dtype=torch.int64)
        lengths[:2] = len(items) // 2
        pairs = none + 2
        keys = ["history", "candidate", "category"]
        batch["ids"] = KeyedJaggedTensor(keys, torch.cat([items, popular[:12]]), lengths=torch.cat([lengths, pairs, none]))
        tags = torch.full((len(items),), rank % 2) % TAGS
        batch["tags"] = KeyedJaggedTensor(["tag"], tags, lengths=lengths)
    return data


def _following() -> list[tuple[str, list[int]]]:
    found, publish = [], HotList._publish

    def published(hot_list: HotList) -> None:
        publish(hot_list)
        layout = hot_list._layout
        popular = layout.keys(0, torch.cat([torch.arange(20), torch.arange(100, 120)]))
        first, second = torch.isin(popular, hot_list._keys).view(2, 20).sum(dim=1).tolist()
        found.append((layout.tables[0].name, [len(hot_list._keys), first, second]))

    with patch.object(HotList, "_publish", published):
        options = {"hot_rows": 0.7, "rerank_every_n_steps": 4, "ranks_per_node": 2}
        train_overlapped(OPTIMIZERS["sgd"], _popular(), dedup=True, **options)
    return sorted(found, key=lambda each: each[0])  # the collections have a thread each


def test_the_list_follows_popularity_and_proxies_report_their_readers() -> None:
    """Check that popular rows stay in the list although their owners see one request per node since the first list."""
    every = run_distributed(_following, 4)
    assert all(found == every[0] for found in every), "all ranks have the same list"
    items = [counts for name, counts in every[0] if name == "item"]
    tags = [counts[0] for name, counts in every[0] if name == "tag"]
    assert items[:5] == [[20, 20, 0]] * 5
    assert items[5] == [40, 20, 20], "the change"
    assert items[-1] == [20, 0, 20]
    assert set(tags) == {0}
