"""What the loader is given."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_freescale.balance import MicroBatches, MicroBatchSchedule
from lightning_freescale.data.streaming.stream_loader import BalancedStreamLoader
from lightning_freescale.testing import run_distributed
from tests.helpers.streams import Part, loader_of, sample_cost


def test_summed_loss() -> None:
    loader = loader_of([10], loss_is_sum=True)
    list(loader)
    assert loader.loss_weight(0) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"prefetch_batches": 0}, "prefetch_batches=0"),
        ({"stream_balancing": "all"}, "stream_balancing='all'"),
        ({"world_size": 2}, "world_size=2, group=None"),
        ({"max_pool_age": 3}, "max_pool_age=3 cannot be kept with pool_batches=8"),
        ({"dataset": [1]}, "dataset=list"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BalancedStreamLoader(**{"dataset": Part(0, 9), "batch_size": 4, "cost_fn": sample_cost, **options})


@pytest.mark.parametrize("name", ["cost_fn", "weight_fn"])
def test_bad_numbers(name: str) -> None:
    loader = loader_of([40], **{name: lambda sample: -1.0 if sample[1] == 17 else 1.0})
    with pytest.raises(ValueError, match=rf"{name}\(sample\)\[17\] is -1.0"):
        list(loader)


@pytest.mark.parametrize("balancing", ["local", "global"])
def test_too_few_samples(balancing: str) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=r"stream of rank 1 has 0 samples|streams have 1 samples"):
            list(loader_of([1, 0], stream_balancing=balancing))

    run_distributed(run, 2)


def _weight(sample: tuple[int, int, float]) -> float:
    return float(sample[1] % 3 == 0)


def _divided(balancing: str) -> list[list[float]]:
    """Return of every step this rank's micro-batches, and what each weighs."""
    schedule = MicroBatchSchedule(4, 4)
    loader = loader_of([41, 36], stream_balancing=balancing, weight_fn=_weight, micro_batches=schedule)
    found = []
    for batch in loader:
        parts = batch.batches if isinstance(batch, MicroBatches) else (batch,)
        weights = [sum(map(_weight, part)) for part in parts]
        if not any(weights):  # then each counts the same
            weights = [float(len(part)) for part in parts]
        if isinstance(batch, MicroBatches):
            assert list(batch.shares) == pytest.approx([weight / sum(weights) for weight in weights])
        found.append(weights)
    return found


@pytest.mark.parametrize("balancing", ["local", "global"])
def test_every_micro_batch_weighs_something_and_all_ranks_have_as_many(balancing: str) -> None:
    counts = set()
    for ranks in zip(*run_distributed(_divided, 2, balancing), strict=True):
        (parts,) = {len(weights) for weights in ranks}
        counts.add(parts)
        assert parts == min(4, *(int(sum(weights)) for weights in ranks)), "samples weigh 1 or nothing"
        assert all(map(all, ranks))
    assert len(counts) > 1
