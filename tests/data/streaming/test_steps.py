"""Nothing lost, nobody waits, and all ranks' batches cost nearly the same."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest

from lightning_freescale.balance.assign import assign
from lightning_freescale.testing import run_distributed
from tests.helpers.streams import COSTS, all_of, check_told, imbalance_of, run_streams, samples_of


@pytest.mark.parametrize("sizes", [[40, 40, 40], [41, 40, 40], [100, 9, 0], [3, 0, 0], [24, 26, 25]])
def test_global_balancing_loses_nothing_also_of_uneven_streams(sizes: list[int]) -> None:
    ranks = run_distributed(lambda: run_streams(sizes, stream_balancing="global", weight_fn=lambda sample: 1 + sample[1]), 3)
    assert samples_of(ranks) == all_of(sizes)
    check_told(ranks, weights=True)
    counts = np.array(ranks[0]["counts"])
    assert (counts[:-1] == 4).all()
    assert counts[-1].max() - counts[-1].min() <= 1 and counts[-1].min() >= 1 and counts[-1].max() <= 5
    assert {rank["threads"] for rank in ranks} == {1}


def test_global_balancing_assigns_as_a_map_style_set() -> None:
    ranks = run_distributed(lambda: run_streams([80, 80, 80], stream_balancing="global"), 3)
    for step in range(20):
        read = [(rank, number) for rank in range(3) for number in range(4 * step, 4 * step + 4)]
        cost = np.array([COSTS[700 * rank + number] for rank, number in read])
        target = assign(cost, 3).rank_of_sample
        for rank in range(3):
            expected = [sample for sample, to in zip(read, target) if to == rank]
            assert [sample[:2] for sample in ranks[rank]["batches"][step]] == expected
        np.testing.assert_allclose(ranks[0]["unbalanced_costs"][step], cost.reshape(3, 4).sum(axis=1))
    assert imbalance_of(ranks, "costs") < 0.8 * imbalance_of(ranks, "unbalanced_costs")


def test_global_balancing_with_another_assignment() -> None:
    def reverse(costs: np.ndarray, ranks: int) -> Any:
        given = assign(costs, ranks)
        return dataclasses.replace(given, rank_of_sample=given.rank_of_sample[::-1])

    one = run_distributed(lambda: run_streams([40, 40], stream_balancing="global"), 2)
    other = run_distributed(lambda: run_streams([40, 40], stream_balancing="global", assign_fn=reverse), 2)
    assert samples_of(one) == samples_of(other)
    assert one[0]["batches"] != other[0]["batches"]


@pytest.mark.parametrize("balancing", ["local", "global"])
def test_drop_last_gives_whole_steps(balancing: str) -> None:
    ranks = run_distributed(lambda: run_streams([42, 43], stream_balancing=balancing, drop_last=True, pool_batches=3), 2)
    assert ranks[0]["counts"] == [[4, 4]] * 10
    check_told(ranks)


def test_local_balancing_moves_no_sample_and_balances() -> None:
    sizes = [400, 400, 401]
    ranks = run_distributed(lambda: run_streams(sizes), 3)
    assert samples_of(ranks) == all_of(sizes)
    assert all(sample[0] == index for index, rank in enumerate(ranks) for batch in rank["batches"] for sample in batch)
    check_told(ranks)
    assert (np.array(ranks[0]["counts"])[:90] == 4).all()
    assert imbalance_of(ranks, "costs") < 1 + 0.5 * (imbalance_of(ranks, "unbalanced_costs") - 1)
    for index, rank in enumerate(ranks):
        as_read = COSTS[(700 * index + np.arange(400)) % 2000].reshape(100, 4).sum(axis=1)
        np.testing.assert_allclose(np.array(rank["unbalanced_costs"])[:100, index], as_read)
    means = [COSTS[(700 * index + np.arange(size)) % 2000].mean() for index, size in enumerate(sizes)]
    assert ranks[0]["bound"] == pytest.approx(max(means) / np.mean(means))
    assert {rank["threads"] for rank in ranks} == {1}


def test_local_balancing_shares_what_is_left_at_the_end() -> None:
    """Streams that end within a pool's content of each other lose nothing."""
    sizes = [60, 43]
    ranks = run_distributed(lambda: run_streams(sizes), 2)
    assert samples_of(ranks) == all_of(sizes)
    check_told(ranks)
    assert max(map(max, ranks[0]["counts"])) == 4


def test_local_balancing_divides_the_cost_that_is_left_evenly() -> None:
    """Whatever has piled up in a pool must go in the last steps: not all of it in the very last."""
    ranks = run_distributed(lambda: run_streams([60, 60], cost_fn=lambda sample: 1.0 + 3 * sample[0] * (sample[1] % 2)), 2)
    last = np.array(ranks[0]["costs"])[-7:, 1]
    assert last.max() - last.min() <= 3, "one dear sample"


def test_local_balancing_tells_what_cannot_be_trained() -> None:
    def run() -> tuple[dict[str, Any], list[str]]:
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logging.getLogger("lightning_freescale.data").addHandler(handler)
        return run_streams([8, 90], pool_batches=3), messages

    ranks = run_distributed(run, 2)
    check_told([rank for rank, _ in ranks])
    (message,), nothing = (messages for _, messages in ranks)
    left = 90 - sum(map(len, ranks[1][0]["batches"]))
    assert not nothing
    assert "ends after 2 steps" in message and "not trained are at least 12 on rank 1" in message
    assert left >= 12
