"""The predicted step compared with closed forms and limits."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.balance import predict
from lightning_freescale.simulator import Catalogue, Network, Quantity, StepTraffic, Techniques, TrainingLoad
from lightning_freescale.simulator import simulate as simulated
from lightning_freescale.simulator.network import EXACT_RANKS
from lightning_freescale.simulator.outlook import format_outlooks, pairs_of_steps
from lightning_freescale.simulator.quantity import assumed, pinned, quantities
from lightning_freescale.simulator.training_step import LADDER, expected_traffic, step_times


def exactly(value: float) -> Quantity:
    return Quantity(value, "assumed")


NET = Network(exactly(100.0), exactly(0.0), exactly(0.0), 1, exactly(1e9))
LOAD = TrainingLoad(
    2, linear=exactly(1.0), quadratic=exactly(0.0), row_bytes=4, dense_bytes=exactly(0.0), last_bucket=exactly(0.0),
    host=exactly(0.0), call=exactly(0.0), contention=exactly(0.0), late_weights=exactly(0.25), split_cost=exactly(0.0),
)  # fmt: skip


def simulate(lengths: Any, ranks: int, load: TrainingLoad = LOAD, network: Network = NET, **options: Any) -> Any:
    return simulated(np.asarray(lengths, float), ranks, load, network, **{"steps": 4, "draws": 1, **options})


def _traffic(compute: Any, ids: float = 0.0, rows: float = 0.0, colliding: float = 0.0) -> list[StepTraffic]:
    seconds = np.asarray(compute, float)
    each = np.ones(len(seconds))
    return [StepTraffic(seconds, each * ids, each * rows, each * colliding, each * colliding)] * 2


OVERLAP, DEDUP = Techniques(overlap=True), Techniques(overlap=True, dedup=True)
SPLIT, SM_FREE = Techniques(overlap=True, split_backward=True), Techniques(overlap=True, sm_free=True)
LATE = replace(NET, latency=exactly(0.5), peer_latency=exactly(0.25))
BUCKETS = replace(LOAD, last_bucket=exactly(200.0))
BUSY, SLOWED = replace(LOAD, host=exactly(3.0), base=exactly(1.0)), replace(LOAD, contention=exactly(0.25))
PLAIN = _traffic([4.0, 10.0], ids=400, rows=800)
# 4 of 8 parts of 800 bytes cross between the nodes in each direction; in two levels, a quarter of them
NODES = [replace(each, node_share=0.25) for each in _traffic([0.0] * 8, rows=800, colliding=800)]
STEPS = {  # traffic, load, network, techniques, seconds
    # half of 800 bytes stay on their rank: 4 s in each direction at 100 B/s; 2 s of ids; the slowest rank computes 10 s
    "plain": (PLAIN, LOAD, NET, Techniques(), 2 + 4 + 10 + 4),
    "latency": (PLAIN, LOAD, LATE, Techniques(), 20 + 3 * 0.75),
    "host": (PLAIN, BUSY, NET, Techniques(), 24),
    "colliding rows": (_traffic([10.0] * 2, 400, 800, colliding=200), LOAD, NET, OVERLAP, 10 + 1 + 1),
    # 2 s of ids and 2 x 6 s of rows behind 5 s of compute, so the link is the limit
    "the link": (_traffic([5.0] * 2, 400, 1400, colliding=200), LOAD, NET, OVERLAP, 14 + 2),
    # 2.5 s of 10 s of compute overlap an exchange of 2 s; an exchange of 6 s hides them
    "split backward": (_traffic([10.0] * 2, 0, 800, colliding=200), LOAD, NET, SPLIT, 10),
    "a long exchange": (_traffic([10.0] * 2, 0, 800, colliding=600), LOAD, NET, SPLIT, 7.5 + 6),
    # 6 s of exchanges slow 4.8 s of work down by a quarter; the other 5.2 s are unchanged
    "contention": (_traffic([10.0] * 2, 0, 600), SLOWED, NET, OVERLAP, 11.2),
    "no contention": (_traffic([10.0] * 2, 0, 600), SLOWED, NET, SM_FREE, 10),
    # 2 x 1/2 x 1000 bytes at 100 B/s behind two thirds of 9 s
    "all-reduce": (_traffic([9.0] * 2), replace(LOAD, dense_bytes=exactly(1000.0)), NET, Techniques(), 9 + 4),
    "a hidden all-reduce": (_traffic([18.0] * 2), replace(LOAD, dense_bytes=exactly(1000.0)), NET, Techniques(), 18),
    # 2 s of the last bucket begin after backward, and a smaller model has no more bytes than the bucket
    "the last bucket": (_traffic([18.0] * 2), replace(BUCKETS, dense_bytes=exactly(1000.0)), NET, Techniques(), 18 + 2),
    "one bucket": (_traffic([18.0] * 2), replace(BUCKETS, dense_bytes=exactly(100.0)), NET, Techniques(), 18 + 1),
    # a split backward computes the gradients of weights last, in 2.5 s of 10 s
    "all-reduce, split": (_traffic([10.0] * 2), replace(LOAD, dense_bytes=exactly(1000.0)), NET, SPLIT, 10 + 7.5),
    "nodes": (NODES, LOAD, replace(NET, ranks_per_node=4), DEDUP, 2 * 400 / 100),
    "two levels": (NODES, LOAD, replace(NET, ranks_per_node=4), replace(DEDUP, two_level=True), 2 * 100 / 100),
}


def test_steps_take_what_the_closed_form_says() -> None:
    took = {name: float(step_times(*arguments)[0]) for name, (*arguments, _) in STEPS.items()}
    assert took == pytest.approx({name: seconds for name, (*_, seconds) in STEPS.items()}, rel=1e-4)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_flows_and_the_busiest_link_agree_on_simultaneous_arrivals(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, even = np.full(ranks, 3.0), np.full(ranks, 700.0)
    rng = np.random.default_rng(ranks)
    uneven = rng.uniform(100, 900, ranks)
    flows = [NET.finish(begin, even, 0 * even), NET.finish(begin, 0 * even, uneven)]
    monkeypatch.setattr("lightning_freescale.simulator.network.EXACT_RANKS", 1)
    barrier = [NET.finish(begin, even, 0 * even), NET.finish(begin, 0 * even, uneven)]
    assert flows[0] == pytest.approx(barrier[0])
    assert flows[1].max() == pytest.approx(barrier[1].max(), rel=0.02)


def test_a_late_rank_holds_up_its_own_flows_alone() -> None:
    """Rank 0 of three sends 1000 bytes to each other rank, and one of these arrives late."""
    done = NET.finish(np.array([0.0, 0.0, 50.0]), np.array([3000.0, 0.0, 0.0]), np.zeros(3))
    assert done == pytest.approx([60, 10, 60])


def test_links_within_a_node_are_others() -> None:
    """Each rank sends 2 x 100 of 800 bytes within its node at 10 B/s, and 4 x 100 between nodes at 100 B/s."""
    net = replace(NET, ranks_per_node=3, node_bandwidth=exactly(10.0))
    for ranks, seconds in ((3, 2 * 800 / 3 / 10), (6, 2 * 800 / 6 / 10)):
        assert net.finish(np.zeros(ranks), np.full(ranks, 800.0), np.zeros(ranks)) == pytest.approx(seconds)


def test_one_rank_waits_for_no_other() -> None:
    plain, *others = simulate([3.0], 1)
    assert plain.step.value == pytest.approx(6) and plain.bubble.value == pytest.approx(0)
    assert {each.removed.value for each in others} == {0.0}, "there is no bubble to remove"
    assert {each.removed.low for each in simulate([3.0], 1, replace(LOAD, call=exactly(1e-6)))} == {0.0, -1.0}
    same = simulate([5.0] * 40, 4, draws=0)
    assert all(each.speed_up.low == each.speed_up.value == each.speed_up.high for each in same), "all lengths are equal"


def test_what_lookups_need_is_what_is_drawn() -> None:
    known, rng = Catalogue(5000, exactly(1.0)), np.random.default_rng(0)
    chance = 1 / np.arange(1, 5001)
    batches = [np.unique(rng.choice(5000, 8000, p=chance / chance.sum())) for _ in range(8)]
    unique = float(np.mean([len(each) for each in batches]))
    colliding = float(np.mean([np.isin(after, before).sum() for before, after in zip(batches, batches[1:])]))
    assert float(known.unique(8000.0)) == pytest.approx(unique, rel=0.02)
    assert float(known.colliding(8000.0, 8000.0)) == pytest.approx(colliding, rel=0.03)
    assert known.unique(np.array([0.0, 1.0])) == pytest.approx([0, 1], rel=0.02)


def test_catalogue_is_fitted_to_a_measured_rate() -> None:
    known = Catalogue(100_000).fitted(Quantity(0.4, "measured", 0.38, 0.42), 20_000)
    assert known.collision_rate(20_000) == pytest.approx(0.4, abs=0.01) and known.exponent.word == "measured"
    assert known.exponent.low < known.exponent.value < known.exponent.high
    assert known.collision_rate(200_000) > 0.4, "more ranks share more rows"
    for rows, exponent in ((4000, 1.03), (4000, 0.3), (10**7, 1.03)):  # with few rows, the rate falls with the exponent
        rate = Catalogue(rows, exactly(exponent)).collision_rate(20_000)
        assert Catalogue(rows).fitted(Quantity(rate, "measured"), 20_000).exponent.value == pytest.approx(exponent, abs=0.02)
    with pytest.raises(ValueError, match=r"collision rate 0\.010 .* 90000 lookups in 1000 rows"):
        Catalogue(1000).fitted(Quantity(0.01, "measured"), 90_000)


numbers = st.floats(0, 1e3)


@settings(max_examples=60, deadline=None)
@given(
    compute=st.integers(1, 12).flatmap(lambda n: st.lists(st.lists(numbers, min_size=n, max_size=n), min_size=2, max_size=3)),
    volume=st.tuples(numbers, numbers, st.floats(0, 1)),
    network=st.tuples(st.floats(1e-2, 1e4), numbers, numbers, st.integers(1, 4)),
    load=st.tuples(numbers, numbers, st.floats(0, 1), st.floats(0, 0.6), st.floats(0, 0.2), numbers),
    techniques=st.sampled_from([*LADDER.values(), Techniques(overlap=True), Techniques(dedup=True)]),
)
def test_no_step_is_shorter_than_its_compute(
    compute: list[list[float]], volume: Any, network: Any, load: Any, techniques: Techniques
) -> None:
    """No technique has a speed-up above 1 / (1 - b), because all keep the compute."""
    work = np.array(compute)
    ids, rows, share = volume
    each = np.ones(work.shape[1])
    traffic = [StepTraffic(row, each * ids, each * rows, each * rows * share, each * rows * share) for row in work]
    speed, latency, peer, per_node = network
    net = Network(exactly(speed), exactly(latency), exactly(peer), per_node, exactly(2 * speed))
    host, base, contention, late, cost, dense = map(exactly, load)
    known = replace(LOAD, host=host, base=base, contention=contention, late_weights=late, split_cost=cost, dense_bytes=dense)
    plain, walls = (step_times(traffic, known, net, chosen) for chosen in (Techniques(), techniques))
    assert (walls >= work.mean(axis=1) * (1 - 1e-9)).all()
    useful = (work + base.value).mean(axis=1).sum()
    if useful > 0:
        # 1 - bubble, up to rounding where almost nothing is computed
        assert plain.sum() / walls.sum() <= plain.sum() / useful * (1 + 1e-9)


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.floats(1, 4000), min_size=1, max_size=60), ranks=st.integers(1, 40), seed=st.integers(0, 99))
def test_no_prediction_is_above_the_limit(lengths: list[float], ranks: int, seed: int) -> None:
    load = TrainingLoad.from_compute(2, np.array(lengths), assumed(0.1, 0.05, 0.2, "s"), assumed(0.5, 0.2, 0.8))
    for found in simulate(lengths, ranks, load, Network(), seed=seed):
        assert found.speed_up.value <= found.limit.value * (1 + 1e-9)
        assert found.speed_up.high <= found.limit.high * (1 + 1e-9)
        assert 0 <= found.bubble.low <= found.bubble.high <= 1 and -1 <= found.removed.low <= found.removed.high <= 1


def test_a_loss_that_rounds_to_nothing_has_no_sign() -> None:
    (plain,) = simulate([3.0], 1, variants={})
    assert " 0.0% (-1.0% - 0.0%)" in format_outlooks([replace(plain, name="+ two levels", removed=assumed(-4e-4, -0.01, 0))])


def test_every_figure_says_what_it_is() -> None:
    lengths = np.random.default_rng(0).lognormal(4, 1, 500)
    load = TrainingLoad.from_compute(8, lengths, assumed(0.1, 0.05, 0.2, "s"), assumed(0.5, 0.2, 0.8))
    found, alike = (simulate(lengths, 16, load, Network(), draws=draws) for draws in (4, 0))
    assert [each.name for each in found] == list(LADDER)
    assert [each.step.value for each in found] == [each.step.value for each in alike], "draws change the ranges alone"
    for each in found:
        stated = json.loads(json.dumps(asdict(each)))
        figures = {name: stated[name] for name in ("step", "bubble", "speed_up", "removed", "limit")}
        assert all(one["word"] == "predicted" and one["low"] <= one["value"] <= one["high"] for one in figures.values())
        assert each.name == "plain" or figures["speed_up"]["low"] < figures["speed_up"]["high"]


def test_a_thousand_ranks_and_the_same_again() -> None:
    lengths = np.random.default_rng(0).lognormal(4, 1, 3000)
    load = replace(LOAD, batch_size=4)
    first, again = (simulate(lengths, 1024, load, Network(), variants={"balance": Techniques(balance=True)}) for _ in "ab")
    assert first == again and [each.name for each in first] == ["plain", "balance"]
    assert first[1].speed_up.value > 1.3 and first[0].ranks == 1024 > EXACT_RANKS


def test_traffic_of_no_item_and_of_parts() -> None:
    nothing = expected_traffic(np.ones((2, 2)), np.zeros((2, 2)), LOAD, NET, Techniques(overlap=True, dedup=True))
    assert all(each.rows.sum() == 0 and each.node_share == 1 for each in nothing)
    whole, parts = (
        expected_traffic(np.ones((2, 4)), np.full((2, 4), 900.0), LOAD, NET, Techniques(overlap=True, micro_batches=count))[0]
        for count in (1, 4)
    )
    assert (parts.colliding_rows < whole.colliding_rows).all() and (parts.rows == whole.rows).all()
    once = expected_traffic(np.ones((2, 4)), np.full((2, 4), 900.0), LOAD, NET, Techniques(dedup=True))[0]
    assert (once.rows < whole.rows).all()


def test_ranges() -> None:
    known = assumed(4.0, 1.0, 16.0)
    assert [known.at(share) for share in (0, 0.5, 1)] == [1, 4, 16] and assumed(1, 0, 3).at(0.5) == 1.5
    load = pinned(LOAD, {**{name: each.value for name, each in quantities(LOAD).items()}, "exponent": 0.5})
    assert load.catalogue.exponent.value == load.catalogue.exponent.high == 0.5 and load.linear == LOAD.linear


def test_network_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    path.write_text('{"bandwidth": {"value": 2e9, "low": 1e9, "high": 3e9, "word": "measured"}, "ranks_per_node": 4}')
    read = Network.read(path)
    assert (read.bandwidth.value, read.bandwidth.word, read.bandwidth.unit, read.ranks_per_node) == (2e9, "measured", "B/s", 4)
    assert read.latency == Network().latency
    path.write_text('{"latency": 0.001}')
    assert Network.read(path).latency == Quantity(0.001, "assumed", unit="s", source="network.json")


def test_what_is_no_network(tmp_path: Path) -> None:
    for text, said in (
        ("{", "network.json"),
        ("[1]", "network.json"),
        ('{"speed": 1}', "network.json"),
        ('{"ranks_per_node": 0}', "ranks_per_node: 0"),
        ('{"latency": "quick"}', "latency: 'quick'"),
        ('{"latency": {"value": 1, "low": 2}}', "latency: "),
        ('{"bandwidth": 0}', "bandwidth"),
    ):
        (tmp_path / "network.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            Network.read(tmp_path / "network.json")


def test_what_is_refused() -> None:
    for wrong, said in (
        (lambda: Quantity(1.0, "guessed"), "word='guessed'"),
        (lambda: Quantity(1.0, "assumed", low=2.0), "low <= value <= high"),
        (lambda: Catalogue(0), "rows=0"),
        (lambda: replace(LOAD, batch_size=0), "batch_size=0"),
        (lambda: Techniques(micro_batches=0), "micro_batches=0"),
        (lambda: Techniques(overlap=True, two_level=True), "dedup=True"),
        (lambda: simulate([], 2), "history"),
        (lambda: simulate([1.0], 0), "ranks=0"),
        (lambda: simulate([1.0], 2, steps=1), "steps=1"),
    ):
        with pytest.raises(ValueError, match=said):
            wrong()


@pytest.mark.parametrize("mode", ["fixed", "slack"])
def test_compute_is_that_of_the_forecast(mode: str) -> None:
    """Imbalances differ only by the draw: the simulator draws with replacement, the forecast without."""
    lengths = np.random.RandomState(0).gamma(4, 25, 4000).round() + 1
    load = replace(LOAD, batch_size=8, quadratic=exactly(0.01))
    pairs = list(pairs_of_steps(lengths, 16, load, 60, 0, assignment_mode=mode, resample=False))
    seconds = {balanced: np.concatenate([load.seconds(pair[balanced]) for pair in pairs]) for balanced in (False, True)}
    drawn, balanced = (seconds[each].max(axis=1).sum() / seconds[each].mean(axis=1).sum() for each in (False, True))
    report = predict(lengths + 0.01 * lengths**2, 16, 8, steps=30, assignment_mode=mode)
    assert (drawn, balanced) == (pytest.approx(report.unbalanced, rel=0.02), pytest.approx(report.balanced, rel=0.02))
