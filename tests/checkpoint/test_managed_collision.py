"""Managed collisions: checkpoints are those of the unsharded module, and a resumed run is the run that did not stop."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.managed_tables import IDS, MANAGED, ROWS, ManagedBatches, ManagedRecommender, TwoRates
from tests.helpers.recommender import trainer

STEPS = 12
KINDS = {"sgd": ManagedRecommender, "rowwise_adagrad": ManagedRecommender, "two_rates": TwoRates}


class SaveAt(L.Callback):
    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def _fit(kind: str, steps: int, saves: dict[int, str], resume: str | None = None) -> dict[str, Any]:
    torch.manual_seed(7 if resume else 0)
    module, rank = KINDS[kind](kind), int(os.environ["RANK"])
    callbacks: list[L.Callback] = [SaveAt(step, path) for step, path in saves.items()]
    fit = trainer(devices=int(os.environ["WORLD_SIZE"]), callbacks=callbacks, max_steps=steps, max_epochs=-1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit.fit(module, ManagedBatches(rank, STEPS), ckpt_path=resume)
    weights = fit._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]
    return {"losses": module.losses, "weights": weights, "warned": [str(w.message) for w in caught]}


Whole = Callable[[str], tuple[list[dict[str, Any]], dict[int, str]]]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """What two ranks know after all steps, and the checkpoints of some; one run of a kind for all tests."""

    @cache
    def run(kind: str) -> tuple[list[dict[str, Any]], dict[int, str]]:
        folder = tmp_path_factory.mktemp(kind)
        paths = {step: str(folder / f"{step}.ckpt") for step in (5, 6, 7)}
        return run_distributed(_fit, 2, kind, STEPS, paths), paths

    return run


@pytest.mark.parametrize(
    "step", [5, pytest.param(6, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)]
)  # the tables let ids in at every second and at every third step
@pytest.mark.parametrize(
    "kind", [pytest.param("sgd", marks=pytest.mark.slow), "rowwise_adagrad", pytest.param("two_rates", marks=pytest.mark.slow)]
)
def test_resume_is_bitwise(kind: str, step: int, whole_run: Whole) -> None:
    whole, paths = whole_run(kind)
    resumed = run_distributed(_fit, 2, kind, STEPS, {}, paths[step])
    for rank in range(2):
        assert resumed[rank]["losses"] == whole[rank]["losses"][step:]
    assert resumed[0]["weights"].keys() == whole[0]["weights"].keys()
    for name, value in whole[0]["weights"].items():
        assert torch.equal(resumed[0]["weights"][name], value), name


def test_checkpoint_loads_strictly_into_the_unsharded_module(whole_run: Whole) -> None:
    state = torch.load(whole_run("sgd")[1][7])["state_dict"]
    module = ManagedRecommender()
    module.load_state_dict(state, strict=True)
    for name, rows in ROWS.items():
        prefix = f"net.{MANAGED}.{name}."
        for tensor in ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_mch_last_access_iter"):
            assert state[prefix + tensor].shape == (rows,)
        assert torch.equal(state[f"{prefix}_mch_remapped_ids_mapping"].sort().values, torch.arange(rows))
        assert int(state[f"{prefix}_current_iter_tensor"]) == 7
    _finds_the_same_rows(module, state)


def _finds_the_same_rows(module: ManagedRecommender, state: dict[str, Any]) -> None:
    """Every id that has a row has the same one in the unsharded module."""
    manager = module.net.items._managed_collision_collection._managed_collision_modules["item"].eval()
    assert isinstance(manager, nn.Module)
    ids, rows = (state[f"net.{MANAGED}.item.{name}"] for name in ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"))
    taken = ids < IDS
    assert int(taken.sum()) > ROWS["item"] // 2
    original = ids[taken] * pow(1237, -1, IDS) % IDS  # the module spreads them itself
    batch = ManagedBatches(0, 1).batches[0]["features"]["history"]
    found = manager({"item": type(batch)(values=original, lengths=torch.ones(len(original), dtype=torch.int32))})
    assert torch.equal(found["item"].values(), rows[taken])


def _through_unsharded(source: str, path: str) -> None:
    checkpoint = torch.load(source)
    module = ManagedRecommender()
    module.load_state_dict(checkpoint["state_dict"])
    checkpoint["state_dict"] = module.state_dict()
    torch.save(checkpoint, path)


@pytest.mark.slow
def test_resume_after_the_unsharded_module_has_sorted_the_ids(whole_run: Whole, tmp_path: Path) -> None:
    path = str(tmp_path / "mid.ckpt")
    whole, paths = whole_run("sgd")
    _through_unsharded(paths[5], path)
    resumed = run_distributed(_fit, 2, "sgd", STEPS, {}, path)
    assert [r["losses"] for r in resumed] == [w["losses"][5:] for w in whole]


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_resume_on_fewer_ranks_finds_the_ids(before: int, after: int, tmp_path: Path) -> None:
    """Each rank takes over all ids and rows of some others."""
    path = str(tmp_path / "mid.ckpt")
    whole = run_distributed(_fit, before, "sgd", 6, {6: path})
    resumed = run_distributed(_fit, after, "sgd", 7, {}, path)
    assert any("what the id maps" in text for text in resumed[0]["warned"])
    ids, rows = (f"net.{MANAGED}.item.{name}" for name in ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"))
    had, has = ({int(i): int(r) for i, r in zip(w[0]["weights"][ids], w[0]["weights"][rows])} for w in (whole, resumed))
    assert {i: r for i, r in has.items() if i < IDS} == {i: r for i, r in had.items() if i < IDS}
    segments = resumed[0]["weights"][f"net.{MANAGED}.item._output_segments_tensor"]
    assert segments[segments >= 0].tolist() == [ROWS["item"] // after * rank for rank in range(after + 1)]


def _validate(path: str) -> dict[str, Any]:
    fit, module = trainer(devices=2), ManagedRecommender()
    fit.validate(module, ManagedBatches(int(os.environ["RANK"]), 1), ckpt_path=path, verbose=False)
    return fit._checkpoint_connector.dump_checkpoint(weights_only=True)


@pytest.mark.slow
def test_checkpoint_of_an_unsharded_module_without_ids(tmp_path: Path) -> None:
    path, module = str(tmp_path / "new.ckpt"), ManagedRecommender()
    torch.save({**run_distributed(_validate, 2, None)[0], "state_dict": module.state_dict()}, path)
    state = run_distributed(_validate, 2, path)[0]["state_dict"]
    for name, value in module.state_dict().items():
        assert "segments" in name or torch.equal(state[name], value), name


def test_resume_on_more_ranks_is_refused(whole_run: Whole) -> None:
    path = whole_run("sgd")[1][6]
    with pytest.raises(RankFailed, match=r"table 'item' \(net\.items.*by 2 ranks, and on 4 ranks .* Use 2 ranks"):
        run_distributed(_fit, 4, "sgd", 7, {}, path)


def _in_parts(cuts: list[int]) -> list[float]:
    torch.manual_seed(0)
    module, whole = Seeded("sgd"), ManagedBatches(int(os.environ["RANK"]), STEPS)
    for start, stop in zip([0, *cuts], [*cuts, STEPS]):
        part = ManagedBatches(int(os.environ["RANK"]), STEPS)
        part.batches = whole.batches[start:stop]
        trainer(devices=2).fit(module, part)
    return module.losses


class Seeded(ManagedRecommender):
    """Draws the same random rows, whatever came before a step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(len(self.losses))


@pytest.mark.slow
def test_second_fit_goes_on_from_the_maps() -> None:
    assert run_distributed(_in_parts, 2, [5]) == run_distributed(_in_parts, 2, [])
