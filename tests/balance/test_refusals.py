"""Invalid arguments raise errors with their names and values, and valid ones are accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_freescale.balance import BalancedSampler, BlockShuffle, Budget, CostModel, advise, assign, predict
from lightning_freescale.balance.validation import non_negative

COSTS = np.arange(1.0, 9)
NAN, INF = float("nan"), float("inf")


def _assign(costs: Any = COSTS, ranks: Any = 2, **options: Any) -> Any:
    return assign(costs, ranks, **options)


def _sampler(batch_size: Any = 2, costs: Any = COSTS, num_replicas: Any = 2, rank: Any = 0, **options: Any) -> BalancedSampler:
    return BalancedSampler(costs, batch_size, num_replicas=num_replicas, rank=rank, **options)


FOUR = [1.0, 2.0, 3.0, 4.0]
REFUSED: list[tuple[Callable[[], Any], list[str]]] = [
    (lambda: non_negative("lengths", [NAN, -2.0, 1.0], 3), ["lengths[0] is nan", "2"]),
    (lambda: non_negative("lengths", [1.0], 2), ["lengths", "(1,)", "[2]"]),
    (lambda: non_negative("cost_fn(sample)", [1.0, -2.0], first=40), ["cost_fn(sample)[41] is -2.0"]),
    (lambda: _assign([1.0]), ["assign", "1 samples", "2 ranks"]),
    (lambda: _assign(ranks=0), ["assign(ranks=0)"]),
    (lambda: _assign(ranks=2.0), ["assign(ranks=2.0)"]),
    (lambda: _assign([1.0, -1.0]), ["assign(costs=...)[1] is -1.0"]),
    (lambda: _assign(["a", "b"], 1), ["assign(costs=...)", "<U1"]),
    (lambda: _assign(np.array([1 + 1j, 2]), 1), ["assign(costs=...)", "complex128"]),
    (lambda: _assign([1.7e308] * 4), ["assign(costs=...)", "1.7e+308"]),
    (lambda: _assign(assignment_mode="best"), ["assignment_mode='best'"]),
    (lambda: _assign(tokens=[1.0]), ["tokens=...", "(1,)"]),
    (lambda: _assign(max_tokens_per_rank=3), ["max_tokens_per_rank=3", "tokens="]),
    (lambda: _assign(tokens=COSTS, max_tokens_per_rank=INF), ["max_tokens_per_rank=inf"]),
    (lambda: _assign(tokens=COSTS, max_tokens_per_rank="8"), ["max_tokens_per_rank='8'"]),
    (lambda: _assign(tokens=[1e19] * 8, max_tokens_per_rank=9.0), ["assign(tokens=...)", "8e+19"]),
    (lambda: _assign(np.ones(4), tokens=[0.5, 0.75, 1.0, 0.5], max_tokens_per_rank=1.0), ["max_tokens_per_rank=1.0"]),
    (
        lambda: _assign(FOUR, tokens=[0.5, 0.75, 1.0, 0.5], max_tokens_per_rank=1.25, assignment_mode="zigzag"),
        ["assignment_mode='zigzag'", "max_tokens_per_rank=1.25"],
    ),
    (lambda: _assign([1.0, 2, 3], fallback=[0, 1]), ["fallback=...", "(2,)", "[3]"]),
    (lambda: _assign([1.0, 2, 3], fallback=[0, -1, 1]), ["fallback=...", "0"]),
    (lambda: _assign(fallback=np.full(8, 0.5)), ["fallback=...", "float64"]),
    (lambda: _sampler(0), ["batch_size=0"]),
    (lambda: _sampler(costs=[NAN] * 8), ["BalancedSampler(costs=...)[0] is nan"]),
    (lambda: _sampler(loss_weights=[1.0]), ["loss_weights=...", "(1,)"]),
    (lambda: _sampler(num_replicas=0), ["num_replicas=0"]),
    (lambda: _sampler(rank=2), ["num_replicas=2", "rank=2"]),
    (lambda: _sampler(window=0), ["window=0"]),
    (lambda: _sampler(window=2, balance=False), ["window=2", "balance=False"]),
    (lambda: _sampler(shuffle=BlockShuffle([2, 3])), ["BlockShuffle(sizes=...)", "5 samples", "8"]),
    (lambda: _sampler(limit=7.5), ["limit=7.5"]),
    (lambda: _sampler(limit=-1), ["limit=-1"]),
    (lambda: _sampler(assignment_mode="slak"), ["assignment_mode='slak'"]),
    (lambda: _sampler(balance=False, assignment_mode="slak"), ["assignment_mode='slak'"]),
    (lambda: _sampler(balance=False, max_tokens_per_rank=1, tokens=COSTS), ["balance=False", "max_tokens_per_rank"]),
    (lambda: _sampler(tokens=[1.0] * 9), ["tokens=...", "(9,)"]),
    (lambda: predict([1.0, -1.0], 1, 1), ["predict(costs=...)[1] is -1.0"]),
    (lambda: predict(COSTS[:1], 9, 1), ["there is 1 sample for 9 ranks"]),
    (lambda: predict(COSTS, 1, 1, steps=0), ["predict(steps=0)"]),
    (lambda: predict(COSTS, 3, 3, drop_last=True), ["drop_last=True", "8 samples", "batch_size=3", "3 ranks"]),
    (lambda: Budget(8, [1, 2, 9]), ["per_rank=8", "sample 2", "9"]),
    *[(lambda wrong=wrong: Budget(wrong, [1.0]), [f"per_rank={wrong!r}"]) for wrong in (0, -1, NAN, INF, "8")],
    (lambda: _sampler(Budget(10, [1.0])), ["Budget(sizes=...)", "(1,)", "[8]"]),
    (lambda: _sampler(Budget(1e17, COSTS * 1e16)), ["Budget(sizes=...)", "3.6e+17"]),
    (lambda: _sampler(Budget(3, []), []), ["0 samples", "2 ranks"]),
    *[
        (lambda given=given: _sampler(Budget(90, COSTS), **given), [f"{next(iter(given))}=", "Budget"])
        for given in (
            {"assignment_mode": "fixed"},
            {"max_tokens_per_rank": 5},
            {"tokens": COSTS},
            {"drop_last": True},
            {"shuffle": BlockShuffle([4, 4])},
        )
    ],
    (lambda: _sampler(Budget(90, COSTS), balance=False), ["balance=False"]),
    (lambda: BlockShuffle([-1, 2]), ["BlockShuffle(sizes=[-1, 2])"]),
    (lambda: BlockShuffle([0.5]), ["BlockShuffle(sizes=[0.5])"]),
    (lambda: BlockShuffle(3), ["BlockShuffle(sizes=3)"]),
    (lambda: BlockShuffle([1], 0), ["BlockShuffle(window=0)"]),
    (lambda: CostModel(linear=-1), ["linear=-1"]),
    (lambda: CostModel(unique=2)([1.0]), ["unique=2", "unique="]),
    (lambda: CostModel.from_config(dim=0), ["dim=0"]),
    (lambda: CostModel.from_config(dim=64, heads=3), ["dim=64", "heads=3"]),
    (lambda: CostModel.from_config(dim=64, feedforward=-1), ["feedforward=-1"]),
    (lambda: CostModel.fit(np.ones((4, 4)), np.ones(4)), ["sums (4, 4)", "five"]),
    (lambda: CostModel.fit(np.ones((6, 4)), np.zeros(6)), ["times > 0"]),
]


@pytest.mark.parametrize(("call", "facts"), REFUSED, ids=[" ".join(facts) for _, facts in REFUSED])
def test_the_error_names_the_argument_and_its_value(call: Callable[[], Any], facts: list[str]) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the facts follow)
        call()
    assert [fact for fact in facts if fact not in str(refused.value)] == []


def test_only_limits_that_were_given_are_named() -> None:
    with pytest.raises(ValueError, match=r"at most 2 samples .* and max_tokens_per_rank=3"):
        assign(np.ones(4), 2, assignment_mode="slack", tokens=[2, 2, 2, 2], max_tokens_per_rank=3)
    with pytest.raises(ValueError, match="max_tokens_per_rank=3") as refused:
        assign(np.ones(4), 2, assignment_mode="free", tokens=[2, 2, 2, 2], max_tokens_per_rank=3)
    assert "at most" not in str(refused.value)


def test_numbers_of_any_kind_are_taken() -> None:
    tokens = np.random.RandomState(0).rand(5)  # a sample as large as the limit fits
    plan = assign(np.ones(5), 5, tokens=tokens, max_tokens_per_rank=float(tokens.max()))
    assert sorted(plan.rank_of_sample) == [0, 1, 2, 3, 4]
    checked = non_negative("costs", [0, 1, 2.5], 3)
    assert checked.dtype == np.float64 and checked.tolist() == [0.0, 1.0, 2.5] and non_negative("costs", []).shape == (0,)
    plan = assign(COSTS, 2).rank_of_sample
    for ranks in (np.int8(2), np.int32(2), np.uint16(2)):
        np.testing.assert_array_equal(assign(COSTS, ranks).rank_of_sample, plan)
    assert advise([9.0, 1, 1, 1], 2, 2) == advise(np.array([9.0, 1, 1, 1]), 2, 2) is not None
    empty = BalancedSampler(np.ones(8), Budget(3, np.zeros(8)), num_replicas=2, rank=0)
    assert [len(samples) for samples in empty.plan(0, 0)] == [4, 4]
