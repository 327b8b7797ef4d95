"""The loader that follows a planned sampler."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

from lightning_freescale.balance import BalancedSampler
from lightning_freescale.data import BalancedDataLoader


class Noise(Dataset):
    """Augments with random numbers."""

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))


def _epoch(epoch: int, rank: int = 0, workers: int = 1) -> list[list[float]]:
    sampler = BalancedSampler([1.0] * 8, 2, num_replicas=2, rank=rank)
    sampler.set_epoch(epoch)
    return [batch.tolist() for batch in BalancedDataLoader.from_sampler(Noise(), sampler, num_workers=workers)]


def test_workers_draw_anew_in_every_epoch_and_on_every_rank() -> None:
    torch.manual_seed(1)
    first, again, next_epoch, other_rank = _epoch(0), _epoch(0), _epoch(1), _epoch(0, rank=1)
    assert first == again != next_epoch
    assert first != other_rank


@pytest.mark.parametrize("workers", [0, 1])
def test_creating_the_iterator_leaves_the_global_state_alone(workers: int) -> None:
    torch.manual_seed(1)
    expected = [float(torch.rand(())) for _ in range(5)]
    torch.manual_seed(1)
    drawn = [value for batch in _epoch(0, workers=workers) for value in batch]
    assert (drawn == expected[:4]) == (workers == 0)
    assert float(torch.rand(())) == expected[0 if workers else 4]


def test_batches_for_a_gpu_are_pinned_unless_said_otherwise() -> None:
    sampler = BalancedSampler([1.0] * 8, 2, num_replicas=2, rank=0)
    made = [
        BalancedDataLoader.from_sampler(Noise(), sampler, for_gpu=for_gpu, **options)
        for for_gpu, options in ((True, {}), (False, {}), (True, {"pin_memory": False}))
    ]
    assert [loader.pin_memory for loader in made] == [True, False, False]
