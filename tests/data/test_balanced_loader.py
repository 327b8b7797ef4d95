"""The loader that follows a planned sampler."""

from __future__ import annotations

import io

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_freescale import FreeScaleDataModule
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


def test_a_window_is_for_several_ranks_and_ends_where_the_trainer_does() -> None:
    data = FreeScaleDataModule(list(range(48)), list(range(1, 49)), batch_size=2)
    data.trainer = L.Trainer(accumulate_grad_batches=4, limit_train_batches=6, logger=False, enable_progress_bar=False)
    drawn = [data.sampler(0, 1).global_batch(0, step).tolist() for step in range(24)]
    alone = data.train_dataloader().sampler
    assert [alone.global_batch(0, step).tolist() for step in range(24)] == drawn, "nobody waits for a rank alone"
    data._rank_and_world_size = lambda: (0, 2)  # type: ignore[method-assign]
    shared = data.train_dataloader().sampler
    assert [shared.begun_window(0, batches) for batches in (3, 4, 5, 7)] == [(0, 4), (4, 0), (4, 2), (7, 0)]


def test_progress_of_numpy_numbers_is_plain() -> None:
    data = FreeScaleDataModule(list(range(48)), list(range(1, 49)), batch_size=np.int64(2), seed=np.int64(3))
    data.train.resumed_sampler(0, 2, 0, accumulated=4)
    stream = io.BytesIO()
    torch.save(data.train.state_dict(0, 3, 2), stream)
    stream.seek(0)
    state = torch.load(stream, weights_only=True)
    assert (state["batch_size"], state["seed"], state["window"]) == (2, 3, [0, 4])
