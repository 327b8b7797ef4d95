"""Owners count who requests their rows, and choose those that pay off through proxies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_freescale.embeddings.overlap import hot_rows
from lightning_freescale.embeddings.overlap.hot_rows import (
    AccessCounts,
    HotRowsRule,
    LinkCosts,
    Nodes,
    check_hot_rows,
    measure_links,
)
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics, Heat
from lightning_freescale.embeddings.overlap.transport import RowTransport, new_group
from lightning_freescale.testing import run_distributed

NODES, CPU = Nodes(6, 3), torch.device("cpu")
COSTS = LinkCosts(near_s_per_byte=1e-9, far_s_per_byte=4e-9, near_latency_s=1e-6)  # hot above 4/3 readers per node


def counted(rows: int = 0, reads: Any = (), visits: Any = (), batches: float = 1.0) -> AccessCounts:
    counts = AccessCounts(rows or len(reads), NODES, CPU)
    if len(reads):
        counts.reads, counts.visits = torch.tensor(reads).float(), torch.tensor(visits).float()
    counts.batches = batches
    return counts


def chosen(option: Any, *given: tuple[Any, Any], costs: LinkCosts = COSTS, row_bytes: int = 1) -> tuple[list[Any], Heat]:
    """Return the candidates of owners with these reads and visits, and the result that all of them agree on."""
    rule = HotRowsRule(option, NODES, row_bytes, costs)
    owners = [counted(reads=reads, visits=visits) for reads, visits in given]
    lists = [rule.candidates(counts) for counts in owners]
    sent = [rule.numbers(counts, rows) for counts, rows in zip(owners, lists)]
    assert all(len(numbers) == NODES.ranks and (numbers == numbers[0]).all() for numbers in sent)
    return [rows.tolist() for rows in lists], rule.choose([numbers[0].tolist() for numbers in sent])


def test_counts_are_those_of_ranks_and_nodes() -> None:
    random, counts = np.random.default_rng(0), AccessCounts(20, NODES, CPU)
    reads, visits = np.zeros(20), np.zeros(20)
    for _ in range(5):
        asked = [random.permutation(20)[: random.integers(0, 15)] for _ in range(NODES.ranks)]
        counts.count(torch.from_numpy(np.concatenate(asked)), [len(rows) for rows in asked])
        for row in range(20):
            has = [row in rows for rows in asked]
            reads[row] += sum(has)
            visits[row] += any(has[:3]) + any(has[3:])
    assert counts.reads.tolist() == reads.tolist() and counts.visits.tolist() == visits.tolist() and counts.batches == 5
    assert (reads > visits).any()
    counts.add_reads(torch.tensor([3, 7, 3]), torch.tensor([2.0, 1.0, 1.0]))
    reads[[3, 7]] += [3, 1]
    counts.decay()
    assert counts.reads.tolist() == (reads / 2).tolist() and counts.visits.tolist() == (visits / 2).tolist()
    assert counts.batches == 2.5


def test_rows_with_enough_readers_for_the_links_are_hot() -> None:
    reads, visits = [12, 13, 40, 9, 4, 3, 3, 0], [9, 9, 30, 3, 2, 3, 2, 0]
    (rows,), _ = chosen("auto", (reads, visits))
    assert rows == [1, 3, 4], "12 / 9 and 40 / 30 are the threshold itself, one more reader in all is too few"
    (rows,), _ = chosen("auto", ([100, 115, 41], [90, 100, 40]), costs=LinkCosts(1e-9, 1e-6, 1e-6))
    assert rows == [1], "few readers save little, however dear far transfers are"
    (rows,), _ = chosen("auto", (reads, visits), costs=LinkCosts(1e-9, 1e-9, 1e-6))
    assert rows == [], "far transfers are not dearer"


def test_a_float_is_the_share_of_a_node() -> None:
    reads, visits = [6, 4, 5, 0, 0.9], [3, 3, 2, 0, 0.3]
    assert chosen(2 / 3, (reads, visits))[0] == [[0, 2]], "the last one is nearly forgotten"
    assert chosen(1.0, (reads, visits))[0] == [[]]
    assert chosen(1 / 3, (reads, visits))[0] == [[0, 1, 2]]


def test_an_int_is_a_number_of_rows() -> None:
    reads, visits = [5, 9, 7, 2, 6], [4, 3, 3, 2, 3]
    for option, rows in [(1, [1]), (6, [1]), (7, [1, 2]), (18, [1, 2, 4]), (1000, [0, 1, 2, 4])]:
        assert chosen(option, (reads, visits))[0] == [rows], option
    assert HotRowsRule(5, NODES, 1).candidates(AccessCounts(0, NODES, CPU)).tolist() == []


def test_a_list_is_published_if_it_saves_more_than_its_messages_cost() -> None:
    """10 requests cost 40 ns far; with proxies 10 of 1 ns near and 4 of 4 ns far. Half of them stay within the node."""
    owner = [10, 1], [4, 1]
    saved = (40 - 10 - 4 * 4) * 1e-9 * 0.5 * 1000 / 6
    for latency, sizes in [(0.99 * 2 * saved / 8, [1, 1]), (1.01 * 2 * saved / 8, [0, 0])]:
        heat = chosen("auto", owner, owner, costs=LinkCosts(1e-9, 4e-9, latency), row_bytes=1000)[1]
        assert heat.saved_s == pytest.approx(2 * saved)
        assert heat.sizes == sizes
        heat = chosen(0.5, owner, owner, costs=LinkCosts(1e-9, 4e-9, latency), row_bytes=1000)[1]
        assert heat.sizes == [1, 1], "asked for by the user"
    rule = HotRowsRule("auto", NODES, 1000, COSTS)
    counts = counted(reads=owner[0], visits=owner[1], batches=2)
    numbers = rule.numbers(counts, rule.candidates(counts))
    assert rule.choose(numbers[:1].tolist()).saved_s == pytest.approx(saved / 2), "per step"


def test_before_any_request_nothing_is_hot() -> None:
    for option in ("auto", 0.5, 7):
        lists, heat = chosen(option, ([0] * 4, [0] * 4), ([0] * 3, [0] * 3))
        assert lists == [[], []] and heat == Heat([0, 0], 0.0, 0, 0, 1.0)


def test_rows_of_half_of_all_accesses_are_told_from_a_histogram() -> None:
    reads = np.floor(1e5 / np.arange(1, 4001) ** 1.05)
    owners = [(reads[owner::5], reads[owner::5]) for owner in range(5)]
    heat = chosen(0.5, *owners)[1]
    so_far = np.cumsum(reads) / reads.sum()
    assert heat.rows_of_half == pytest.approx(np.searchsorted(so_far, 0.5) + 1, rel=0.05)
    assert heat.rows_of_most == pytest.approx(np.searchsorted(so_far, 0.9) + 1, rel=0.02)
    loads = [sum(each) for each, _ in owners]
    assert heat.largest_load == pytest.approx(max(loads) / np.mean(loads))
    assert heat.largest_load > 1.2
    assert chosen(0.5, ([8.0] * 10, [8] * 10))[1].rows_of_half == 5
    alone = chosen(0.5, ([2.0**24, *[0.01] * 10], [1] * 11))[1]
    assert (alone.rows_of_half, alone.rows_of_most) == (1, 1), "beyond the histogram, and forgotten"


@pytest.mark.parametrize("option", [True, False, None, "flat", "1", -1, 0.0, -0.5, 1.5, math.nan, math.inf, [1], 1j])
def test_other_values_of_the_option_are_refused(option: Any) -> None:
    with pytest.raises(ValueError, match=r"^hot_rows=.* is not allowed\. Pass 'auto'; an int .*; or a float .* Pass 0 "):
        check_hot_rows(option)


class _Link:
    """A transport whose exchanges take ``latency`` and ``cost`` per byte on a clock of its own; other ranks take the same."""

    def __init__(self, clock: list[float], rank: int, ranks: int, latency: float, cost: float) -> None:
        self.rank, self.ranks, self.device = rank, ranks, CPU
        self.clock, self.latency, self.cost = clock, latency, cost
        self.sizes: list[list[int]] = []

    def exchange(self, received: Any, message: Any, gives: list[int], gets: list[int], exact: bool = False) -> None:
        assert exact and len(message) == len(received) == sum(gives) == sum(gets) and len(gives) == self.ranks
        late = 1.0 if len(self.sizes) % 6 == 0 else 0.0  # another rank, in the first of each series
        self.clock[0] += late + self.latency + 4 * self.cost * sum(gives)
        self.sizes.append(gives)

    def exchange_numbers(self, numbers: np.ndarray) -> list[list[int]]:
        return numbers.tolist()


@pytest.mark.parametrize("far", [6.4e-7, 1e-8, 1e-11])  # seconds per byte; the first is 50 Mbit/s for 4 ranks
def test_costs_of_the_links_are_those_of_the_messages(monkeypatch: pytest.MonkeyPatch, far: float) -> None:
    nodes, clock = Nodes(12, 4), [0.0]
    near, direct = _Link(clock, 1, 4, 3e-5, 2e-10), _Link(clock, 5, 12, 2e-4, far)
    monkeypatch.setattr(hot_rows, "perf_counter", lambda: clock[0])
    costs = measure_links(near, direct, nodes)
    assert costs.near_latency_s == pytest.approx(3e-5, rel=0.01)
    assert costs.near_s_per_byte == pytest.approx(2e-10, rel=0.01)
    assert costs.far_s_per_byte == pytest.approx(far, rel=0.2 if far < 1e-10 else 0.01)
    assert {tuple(rank for rank, size in enumerate(sizes) if size) for sizes in near.sizes} == {(0, 2, 3)}
    assert {tuple(rank for rank, size in enumerate(sizes) if size) for sizes in direct.sizes} == {(1, 9)}
    if far > 1e-7:
        assert far * 4 * sum(map(sum, direct.sizes)) < 0.3, "at set-up nobody likes to wait"


def _measured() -> tuple[LinkCosts, dict[str, float]]:
    rank, nodes, statistics = dist.get_rank(), Nodes(4, 2), ExchangeStatistics()
    direct = new_group("items", "auto", None)
    near = [new_group(f"items (near {node})", "auto", None, [2 * node, 2 * node + 1]) for node in range(2)]
    groups = near[rank // 2], direct
    for group in groups:
        group.connect()
    with statistics.suspended():
        found = measure_links(*(RowTransport(group, 3, CPU, statistics) for group in groups), nodes)
    for group in groups:
        dist.destroy_process_group(group)
    return found, statistics.totals()


def test_all_ranks_agree_on_the_costs() -> None:
    found = run_distributed(_measured, 4)
    costs = found[0][0]
    assert all(each == (costs, found[0][1]) for each in found)
    assert min(costs.near_s_per_byte, costs.far_s_per_byte, costs.near_latency_s) > 0
    assert not any(found[0][1].values()), "set-up is no part of a step"
