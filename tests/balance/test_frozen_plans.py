"""Plans must not change unnoticed, between versions or machines: the ranks of a mixed cluster would disagree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lightning_freescale.balance import BalancedSampler, Budget, assign
from lightning_freescale.balance.solver import swaps
from lightning_freescale.balance.window import share_window

Draw = tuple[int, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


def _draws() -> Iterator[Draw]:
    """Ranks, lengths, costs, speeds and a mode; whole numbers and exact fractions, the same on every machine."""
    for seed in range(18):
        draw = np.random.RandomState(seed)
        ranks = (2, 3, 8, 33, 64, 72)[seed % 6]
        count = ranks * (3, 8, 32)[seed // 6] + 2 * (seed % 2)
        lengths = (10 + draw.randint(0, 200, count) + (200, 900)[seed % 4 == 1] * (draw.randint(0, 10, count) == 0)).astype(
            float
        )
        costs = lengths * (lengths + (0, 1280)[seed % 2])
        mode = {"assignment_mode": ("fixed", "slack", "free")[seed % 3]}
        yield ranks, lengths, costs, draw.randint(20, 65, ranks) / 64, mode


def _limited(lengths: np.ndarray, ranks: int, times: float) -> dict[str, Any]:
    return {
        "tokens": lengths,
        "max_tokens_per_rank": float(lengths.sum() / ranks * times + lengths.max() * 2 * ranks / len(lengths)),
    }


def _planned(kind: str, draw: Draw) -> list[np.ndarray]:
    ranks, lengths, costs, speeds, mode = draw
    if kind == "window":
        even = costs[: len(costs) // (3 * ranks) * 3 * ranks]
        return [share_window(even, 3, ranks)]
    if kind == "budget":
        sampler = BalancedSampler(costs, Budget(2 * lengths.max(), lengths), num_replicas=2, rank=0, seed=3)
        return [samples for step in range(min(4, len(sampler))) for samples in sampler.plan(1, step)]
    options: dict[str, dict[str, Any]] = {
        "counts": {},
        "tokens levelled": {"tokens": lengths},
        "token limit": _limited(lengths, ranks, 1.01),
        "speeds": {"rank_speeds": speeds},
        "speeds and token limit": {"rank_speeds": speeds, **_limited(lengths, ranks, 1.1)},
        "groups": {"keep_together": np.arange(len(costs)) // 2, "assignment_mode": "slack", "count_slack": 0.5},
    }
    return [assign(costs, ranks, **{**mode, **options[kind]}).rank_of_sample]


FROZEN: dict[str, str] = {
    "counts": "a1bb1be52cb79183",
    "tokens levelled": "8bbf2fd1076c0613",
    "token limit": "c18cfb4335e5e1c4",
    "speeds": "60558e62eadcb3a3",
    "speeds and token limit": "cdd6ab60b6dd126c",
    "groups": "7f77cb9204a1b65c",
    "window": "2c2088450e9e04eb",
    "budget": "851c5b1c48b1b0a6",
}


@pytest.mark.parametrize("compiled", [True, False], ids=["numba", "numpy"])
@pytest.mark.parametrize("kind", FROZEN)
def test_plans_are_as_ever(kind: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swaps, "numba_enabled", compiled)
    state = hashlib.sha256()
    for draw in _draws():
        for plan in _planned(kind, draw):
            state.update(np.ascontiguousarray(plan, dtype="<i8").tobytes())
    assert state.hexdigest()[:16] == FROZEN[kind]
