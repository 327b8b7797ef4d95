"""The division of a rank's samples into micro-batches, the number of micro-batches of a step, and its candidate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_freescale.balance import BalancedSampler, MicroBatches, MicroBatchSchedule
from lightning_freescale.balance.micro_batches import TRIAL_BLOCK, Turns, cut, most_parts

COSTS = np.random.default_rng(0).pareto(1.2, 97) + 1


def samplers(ranks: int, count: int, **options: Any) -> list[BalancedSampler]:
    """Return a sampler for each rank, with a schedule of its own."""
    given = [{"rank": rank, "micro_batches": MicroBatchSchedule(count, 8), **options} for rank in range(ranks)]
    return [BalancedSampler(COSTS, 8, num_replicas=ranks, **each) for each in given]


def test_shares_are_those_of_the_weights() -> None:
    weights, costs = np.array([1.0, 2.0, 1.0]), np.array([5.0, 2.0, 2.0])
    assert cut([10, 11, 12], 2, costs, weights) == MicroBatches(([10], [11, 12]), (0.25, 0.75))
    assert cut([10, 11, 12], 2, costs, weights, loss_is_sum=True) == MicroBatches(([10], [11, 12]), (0.25, 0.75), True)
    assert cut([10, 11, 12], 2, costs, np.zeros(3)).shares == pytest.approx((1 / 3, 2 / 3))
    costs = np.array([4.0, 1.0, 2.0, 9.0, 3.0, 5.0, 6.0, 2.0])
    assert max(costs[batch].sum() for batch in cut(list(range(8)), 4, costs, np.ones(8)).batches) == 9


def test_samples_that_weigh_nothing_are_shared_out_by_cost() -> None:
    costs, weights = np.array([1.0, 1.0, 9.0, 7.0, 3.0, 1.0]), np.array([1.0, 1.0, 0, 0, 0, 0])
    batches = cut(list("abcdef"), 2, costs, weights).batches
    assert {"".join(batch) for batch in batches} == {"acf", "bde"}
    assert most_parts(weights) == 2
    with pytest.raises(ValueError, match="3 ranks"):
        cut(list("abcdef"), 3, costs, weights)


def test_a_batch_whose_parts_stay_is_the_same_batch() -> None:
    batch = MicroBatches(([1], [2]), (0.5, 0.5), True)
    assert batch.map(lambda part: part) is batch
    assert batch.map(lambda part: part + part) == MicroBatches(([1, 1], [2, 2]), (0.5, 0.5), True)
    one = batch.batches[1]
    changed = batch.map(lambda part: part if part is one else [3])
    assert changed.batches == ([3], [2]) and changed.batches[1] is one


FEW = np.where(np.arange(97) % 3, 0.0, 1.0)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (3, {}),
        (5, {}),  # the last 17 samples, 3 on some ranks
        (3, {"assignment_mode": "slack"}),
        (3, {"drop_last": True}),
        (3, {"loss_weights": COSTS}),
        (3, {"loss_weights": FEW}),
        (
            1,
            {"loss_weights": np.repeat([0.0, 1.0], [48, 49]), "shuffle": False},
        ),  # in some steps all weights are 0, so that each sample counts
        (3, {"assignment_mode": "free"}),
        (3, {"assignment_mode": "free", "loss_weights": FEW}),
    ],
)
def test_steps_are_cut_into_as_many_parts_on_all_ranks(ranks: int, options: dict[str, Any]) -> None:
    """Check that each part has samples with a weight, and that all parts together are the undivided step."""
    weights, counts = options.get("loss_weights", np.ones(97)), set()
    for whole, divided in zip(zip(*samplers(ranks, 1, **options)), zip(*samplers(ranks, 4, **options)), strict=True):
        parts_of_ranks = [batch.batches if isinstance(batch, MicroBatches) else [batch] for batch in divided]
        weigh = [weights[samples] if weights[samples].any() else np.ones(len(samples)) for samples in whole]
        fewest = min(np.count_nonzero(each) for each in weigh)
        assert {len(parts) for parts in parts_of_ranks} == {min(4, fewest)}
        counts.add(min(4, fewest))
        for samples, each, batch, parts in zip(whole, weigh, divided, parts_of_ranks):
            assert sorted(sample for part in parts for sample in part) == sorted(samples)
            if len(parts) > 1:
                weight = dict(zip(samples, each / each.sum()))
                assert batch.shares == pytest.approx([sum(weight[sample] for sample in part) for part in parts])
                loads = [COSTS[part].sum() for part in parts]
                assert loads == sorted(loads, reverse=True) and min(batch.shares) > 0
    assert max(counts) > 1


def test_candidates_take_turns_until_one_is_chosen() -> None:
    schedule = MicroBatchSchedule("auto", 12)
    assert schedule.candidates == [1, 2, 3, 4, 6]
    schedule.count(0, 29)
    assert not schedule.decided
    with pytest.raises(RuntimeError, match=r"micro_batches=4.*step 29 of epoch 0"):
        schedule.decide(4, 0, 29)
    schedule.decide(4, 0, 31)
    assert (schedule.count(0, 30), schedule.count(0, 31), schedule.count(1, 0)) == (1, 4, 4)
    assert schedule.chosen == 4


def test_what_is_settled_holds_from_the_first_step_on() -> None:
    schedule = MicroBatchSchedule("auto", 12)
    schedule.count(0, 29)
    schedule.settle(3)
    assert [schedule.count(epoch, 0) for epoch in range(3)] == [3, 3, 3]
    schedule.settle(1)
    assert (schedule.chosen, schedule.count(0, 0), schedule.measured) == (1, 1, None)
    assert MicroBatchSchedule("auto", 1).chosen == 1
    assert MicroBatchSchedule(3, 8).chosen == 3


def test_turns_are_blocks_of_steps_and_short_epochs_come_to_all() -> None:
    """Steps are measurements if the step before had the same candidate, and if there is another candidate."""
    turns = Turns("ab")
    assert "".join(turns.candidate(0, step) for step in range(2 * TRIAL_BLOCK)) == "a" * TRIAL_BLOCK + "b" * TRIAL_BLOCK
    measured = [turns.measured(0, step) for step in range(2 * TRIAL_BLOCK)]
    assert measured == [None, *[0] * (TRIAL_BLOCK - 1), None, *[1] * (TRIAL_BLOCK - 1)]
    assert [Turns("abc").candidate(epoch, 0) for epoch in range(4)] == ["a", "b", "c", "a"]
    assert Turns("a").measured(0, 1) is None


def test_a_change_of_candidates_counts_from_its_step_on() -> None:
    turns = Turns("ab")
    turns.change("c", 0, 8)
    turns.change("de", 1, 2)
    assert [turns.candidate(0, step) for step in (5, 7, 8, 100)] == ["a", "b", "c", "c"]
    assert turns.candidate(1, 1) == "c"
    assert turns.candidate(1, 2) == turns.candidate(1, 3) == "e"
    assert turns.measured(0, 7) is None, "before the last change"
    assert turns.measured(1, 2) is None, "the step before had another candidate"
    assert turns.measured(1, 3) == 1
    assert turns.last == ("d", "e")
