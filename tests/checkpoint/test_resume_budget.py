"""A run whose steps are cut by tokens resumes inside an epoch: to the bit on the same ranks, every sample once on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.data import BalanceOptions
from lightning_freescale.testing import RankFailed, run_distributed
from tests.checkpoint.test_resume import Seen
from tests.helpers.recommender import Samples, StopAt, collate, trainer

TOKENS = {"batch_tokens": 100}
REPEATS = BalanceOptions(calibrate=False)


def _fit(
    path: str, stop_at: int | None = None, resume: bool = False, ranks: int = 2, budget: Any = TOKENS, **options: Any
) -> dict[str, Any]:
    torch.manual_seed(7 if resume else 0)
    module, data = Seen("adagrad"), Samples(64)
    loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=REPEATS, **budget, **options)
    callbacks = [] if stop_at is None else [StopAt(stop_at, path)]
    fit = trainer(devices=ranks, max_epochs=2, callbacks=callbacks)
    fit.fit(module, loader, ckpt_path=path if resume else None)
    weights = fit._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]
    steps = fit.train_dataloader.sampler.steps_per_epoch
    return {"losses": module.losses, "seen": module.seen, "weights": weights, "steps": steps, "at": fit.global_step}


def test_resume_inside_an_epoch_is_bitwise(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    whole = run_distributed(_fit, 2, path)
    steps = whole[0]["steps"]
    assert whole[0]["at"] == 2 * steps
    first = run_distributed(_fit, 2, path, stop_at=steps + 3)
    second = run_distributed(_fit, 2, path, resume=True)
    for rank in range(2):
        assert first[rank]["seen"] + second[rank]["seen"] == whole[rank]["seen"]
        assert first[rank]["losses"] + second[rank]["losses"] == whole[rank]["losses"]
    for name, weight in whole[0]["weights"].items():
        assert torch.equal(weight, second[0]["weights"][name])


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 70), (3, 100)])
def test_resume_with_another_budget_or_ranks_has_every_sample_once(ranks: int, tokens: int, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    first = run_distributed(_fit, 2, path, stop_at=3)
    second = run_distributed(_fit, ranks, path, resume=True, ranks=ranks, budget={"batch_tokens": tokens})
    before = [sample for rank in first for step in rank["seen"] for sample in step]
    left = second[0]["at"] - 3 - second[0]["steps"]
    rest = [sample for rank in second for step in rank["seen"][:left] for sample in step]
    assert sorted(before + rest) == list(range(64))
    assert sorted(sample for rank in second for step in rank["seen"][left:] for sample in step) == list(range(64))


def test_a_number_of_samples_cannot_go_on_inside_an_epoch_that_a_budget_cut(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    run_distributed(_fit, 2, path, stop_at=3)
    with pytest.raises(RankFailed, match=r"the checkpoint stopped inside an epoch with .*samples would be lost or repeated"):
        run_distributed(_fit, 2, path, resume=True, budget={})
