"""Managed collisions: checkpoints equal those of the unsharded module, and a resumed run equals the uninterrupted run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_freescale.testing import RankFailed, run_distributed
from tests.checkpoint.fits import SaveAt
from tests.helpers.managed_tables import IDS, MANAGED, ROWS, ManagedBatches, ManagedRecommender, TwoRates
from tests.helpers.overlap_training import assert_same
from tests.helpers.recommender import trainer

STEPS = 12
KINDS = {"sgd": ManagedRecommender, "rowwise_adagrad": ManagedRecommender, "two_rates": TwoRates}


def _fit(kind: str, steps: int, folder: Path | None = None, resume: Path | None = None) -> dict[str, Any]:
    """Fit; if there is a folder, save the checkpoints after steps 5, 6 and 7 in it."""
    torch.manual_seed(7 if resume else 0)
    module, rank = KINDS[kind](kind), int(os.environ["RANK"])
    saving = [] if folder is None else [SaveAt(folder / "{step}.ckpt", 5, 6, 7)]
    fit = trainer(devices=int(os.environ["WORLD_SIZE"]), callbacks=saving, max_steps=steps, max_epochs=-1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit.fit(module, ManagedBatches(rank, STEPS), ckpt_path=resume)
    weights = fit._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]
    return {"losses": module.losses, "weights": weights, "warned": [str(w.message) for w in caught]}


Whole = Callable[[str], tuple[list[dict[str, Any]], Path]]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return the results of two ranks after all steps, and the folder of the checkpoints; one run per kind."""

    @cache
    def run(kind: str) -> tuple[list[dict[str, Any]], Path]:
        folder = tmp_path_factory.mktemp(kind)
        return run_distributed(_fit, 2, kind, STEPS, folder), folder

    return run


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in (("rowwise_adagrad", 6), ("two_rates", 7))]


@pytest.mark.parametrize(("kind", "step"), [("sgd", 5), *SLOW])  # the tables let ids in at every second and at every third step
def test_resume_is_bitwise(kind: str, step: int, whole_run: Whole) -> None:
    whole, folder = whole_run(kind)
    resumed = run_distributed(_fit, 2, kind, STEPS, None, folder / f"{step}.ckpt")
    for rank in range(2):
        assert resumed[rank]["losses"] == whole[rank]["losses"][step:]
    assert_same(dict(resumed[0]["weights"]), dict(whole[0]["weights"]))


def test_checkpoint_loads_strictly_into_the_unsharded_module(whole_run: Whole) -> None:
    state = torch.load(whole_run("sgd")[1] / "7.ckpt")["state_dict"]
    module = ManagedRecommender()
    module.load_state_dict(state, strict=True)
    for name, rows in ROWS.items():
        prefix = f"net.{MANAGED}.{name}."
        for tensor in ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_mch_last_access_iter"):
            assert state[prefix + tensor].shape == (rows,)
        assert torch.equal(state[f"{prefix}_mch_remapped_ids_mapping"].sort().values, torch.arange(rows))
        assert int(state[f"{prefix}_current_iter_tensor"]) == 7
    # every id that has a row has the same one in the unsharded module
    manager = module.net.items._managed_collision_collection._managed_collision_modules["item"].eval()
    assert isinstance(manager, nn.Module)
    ids, rows = (state[f"net.{MANAGED}.item.{name}"] for name in ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"))
    taken = ids < IDS
    assert int(taken.sum()) > ROWS["item"] // 2
    original = ids[taken] * pow(1237, -1, IDS) % IDS  # the module spreads them itself
    batch = ManagedBatches(0, 1).batches[0]["features"]["history"]
    found = manager({"item": type(batch)(values=original, lengths=torch.ones(len(original), dtype=torch.int32))})
    assert torch.equal(found["item"].values(), rows[taken])


@pytest.mark.slow
def test_resume_after_the_unsharded_module_has_sorted_the_ids(whole_run: Whole, tmp_path: Path) -> None:
    whole, folder = whole_run("sgd")
    checkpoint, module = torch.load(folder / "5.ckpt"), ManagedRecommender()
    module.load_state_dict(checkpoint["state_dict"])
    checkpoint["state_dict"] = module.state_dict()
    torch.save(checkpoint, tmp_path / "mid.ckpt")
    resumed = run_distributed(_fit, 2, "sgd", STEPS, None, tmp_path / "mid.ckpt")
    assert [r["losses"] for r in resumed] == [w["losses"][5:] for w in whole]


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_resume_on_fewer_ranks_finds_the_ids(before: int, after: int, tmp_path: Path) -> None:
    """Resume on ranks that take over all ids and rows of other ranks."""
    whole = run_distributed(_fit, before, "sgd", 6, tmp_path)
    resumed = run_distributed(_fit, after, "sgd", 7, None, tmp_path / "6.ckpt")
    assert any(f"id maps of {before} ranks" in text for text in resumed[0]["warned"])
    ids, rows = (f"net.{MANAGED}.item.{name}" for name in ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"))
    had, has = ({int(i): int(r) for i, r in zip(w[0]["weights"][ids], w[0]["weights"][rows])} for w in (whole, resumed))
    assert {i: r for i, r in has.items() if i < IDS} == {i: r for i, r in had.items() if i < IDS}
    segments = resumed[0]["weights"][f"net.{MANAGED}.item._output_segments_tensor"]
    assert segments[segments >= 0].tolist() == [ROWS["item"] // after * rank for rank in range(after + 1)]


def test_resume_on_more_ranks_is_refused(whole_run: Whole) -> None:
    path = whole_run("sgd")[1] / "6.ckpt"
    with pytest.raises(RankFailed, match=r"table 'item' \(net\.items.* 2 ranks.* 4 ranks"):
        run_distributed(_fit, 4, "sgd", 7, None, path)
