"""Streams with the Trainer: every sample once, the gradient of the global batch, and exact resume."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.testing import RankFailed, run_distributed
from tests.checkpoint.fits import Rereading, Stream, fit
from tests.helpers.recommender import Recommender, Samples, StopAt, collate, trainer

SIZE = 50
SLOW = pytest.mark.slow


class Fixed(Rereading):
    for_rank = property()


def _length(sample: dict[str, Any]) -> int:
    return len(sample["history"])


def _fit(
    path: Path | None = None, stop: tuple[int, Path] | None = None, kind: type[Rereading] = Stream, **options: Any
) -> list[list[int]]:
    """Train two epochs from the start or a checkpoint, or until a stop; return this rank's samples of each step."""
    callbacks = [] if stop is None else [StopAt(stop[0], str(stop[1]))]
    return fit(samples=SIZE, batch_size=4, data=options, stream=kind, callbacks=callbacks, resume=path).seen


def _all(ranks: list[list[list[int]]], first: int = 0, last: int | None = None) -> list[int]:
    return [sample for rank in ranks for step in rank[first:last] for sample in step]


def _one_step(batch_size: int, balance: bool = True) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    data = FreeScaleDataModule(Stream(16), _length, batch_size, collate_fn=collate, balance=balance)
    fitting = trainer(devices=int(os.environ["WORLD_SIZE"]), max_steps=1)
    fitting.fit(Recommender("sgd"), data)
    return fitting._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]


def test_assigning_samples_keeps_the_gradient() -> None:
    """Compare with one rank that computes the global batch, and with the ranks' batches as read."""
    balanced = run_distributed(_one_step, 2, 8)[0]
    for other in (run_distributed(_one_step, 1, 16)[0], run_distributed(_one_step, 2, 8, False)[0]):
        for name, weight in balanced.items():
            torch.testing.assert_close(weight, other[name], rtol=1e-6, atol=1e-7)


def _validate_then_save(path: Path) -> None:
    fitting, module = trainer(devices=2), Recommender()
    data = FreeScaleDataModule(Stream(SIZE), _length, 4, collate_fn=collate, val_dataset=Samples(8))
    fitting.fit(module, data)
    fitting.validate(module, data, verbose=False)
    fitting.save_checkpoint(path)


def _fit_planned(path: Path) -> None:
    samples = Samples(SIZE)
    data = FreeScaleDataModule(samples, samples.lengths, 4, collate_fn=collate)
    trainer(devices=2, max_epochs=2).fit(Recommender(), data, ckpt_path=path)


@pytest.mark.slow
def test_a_checkpoint_made_after_validation_and_of_another_kind_of_data(tmp_path: Path) -> None:
    run_distributed(_validate_then_save, 2, tmp_path / "after.ckpt")
    assert torch.load(tmp_path / "after.ckpt", weights_only=True)["FreeScaleDataModule"]["streams"][0]["batches"] == 0
    with pytest.raises(RankFailed, match=r"IterableDataset.* map-style"):
        run_distributed(_fit_planned, 2, tmp_path / "after.ckpt")


# -- on another number of ranks


@pytest.mark.parametrize(
    ("before", "after", "kind", "workers"),
    [
        (2, 3, Rereading, 0),
        (3, 1, Stream, 0),
        pytest.param(3, 2, Rereading, 2, marks=SLOW),
        pytest.param(2, 1, Stream, 2, marks=SLOW),
    ],
)
def test_every_sample_comes_once(before: int, after: int, kind: type[Rereading], workers: int, tmp_path: Path) -> None:
    options = {"kind": kind, "num_workers": workers}
    first = run_distributed(_fit, before, stop=(3, tmp_path / "a.ckpt"), **options)
    second = run_distributed(_fit, after, path=tmp_path / "a.ckpt", **options)
    rest = SIZE - len(_all(first))
    assert rest > 0
    assert len(_all(second)) == rest + SIZE, "the rest of this epoch, and the next one"
    steps = next(n for n in range(len(second[0])) if len(_all(second, 0, n)) == rest)
    assert sorted(_all(first) + _all(second, 0, steps)) == list(range(SIZE))
    assert sorted(_all(second, steps)) == list(range(SIZE))


def test_what_is_read_on_may_be_interrupted_again(tmp_path: Path) -> None:
    path, again = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    first = run_distributed(_fit, 2, stop=(2, path))
    second = run_distributed(_fit, 3, path=path, stop=(4, again))
    third = run_distributed(_fit, 3, path=again)
    left = SIZE - len(_all(first)) - len(_all(second))
    assert left > 0 and len(_all(third)) == left + SIZE
    steps = next(n for n in range(len(third[0]) + 1) if len(_all(third, 0, n)) == left)
    assert sorted(_all(first) + _all(second) + _all(third, 0, steps)) == list(range(SIZE))
    with pytest.raises(RankFailed, match=r"2 ranks.* already resumed"):
        run_distributed(_fit, 2, path=again)


def test_a_stream_that_no_rank_can_read_on_is_refused(tmp_path: Path) -> None:
    run_distributed(_fit, 2, stop=(3, tmp_path / "a.ckpt"), kind=Fixed)
    with pytest.raises(RankFailed, match=r"2 streams.* 3 ranks.*Fixed\.for_rank"):
        run_distributed(_fit, 3, tmp_path / "a.ckpt", kind=Fixed)


def _forking_threads(path: Path) -> set[str]:
    names, start = set(), multiprocessing.process.BaseProcess.start

    def start_noted(process: Any) -> None:
        names.add(threading.current_thread().name)
        start(process)

    multiprocessing.process.BaseProcess.start = start_noted
    _fit(path=path, kind=Rereading, num_workers=2)
    return names


def test_workers_are_forked_in_the_main_thread(tmp_path: Path) -> None:
    """Fork workers in the main thread; otherwise they may inherit a lock of another thread and wait for it forever."""
    run_distributed(_fit, 3, stop=(3, tmp_path / "a.ckpt"), kind=Rereading, num_workers=2)
    assert run_distributed(_forking_threads, 1, tmp_path / "a.ckpt") == [{"MainThread"}]
