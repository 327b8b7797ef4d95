"""What a table's optimizer is derived from."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import REPEATS, Recommender, Samples, collate, trainer

CUDA = torch.device("cuda")
WEIGHT = torch.nn.Parameter(torch.zeros(3, 2))


@pytest.mark.parametrize(
    ("optimizer", "fused", "arguments"),
    [
        (torch.optim.SGD([WEIGHT], lr=0.5), torch.optim.SGD, {"lr": 0.5}),
        (torch.optim.Adagrad([WEIGHT], lr=0.5, eps=1e-6), torch.optim.Adagrad, {"lr": 0.5, "eps": 1e-6}),
        (RowWiseAdagrad([WEIGHT], lr=0.5), RowWiseAdagrad, {"lr": 0.5, "eps": 1e-10}),
        (
            torch.optim.Adam([WEIGHT], lr=0.5, betas=(0.8, 0.9)),
            torch.optim.Adam,
            {"lr": 0.5, "eps": 1e-8, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0},
        ),
        (
            torch.optim.AdamW([WEIGHT], lr=0.5, weight_decay=0.1),
            torch.optim.Adam,
            {"lr": 0.5, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1},
        ),
    ],
)
def test_derived_on_gpu(optimizer: Any, fused: type, arguments: dict[str, Any]) -> None:
    derived = TableOptimizer.from_parameter_group(optimizer, 0, "table", CUDA)
    assert (derived.fused_class, derived.arguments, derived.group) == (fused, arguments, 0)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.Adam([WEIGHT], weight_decay=0.1), "weight_decay=0.1"),
        (torch.optim.Adam([WEIGHT], amsgrad=True), "amsgrad=True"),
        (torch.optim.SGD([WEIGHT], maximize=True), "maximize=True"),
        (torch.optim.NAdam([WEIGHT]), "NAdam holds the embedding table 'table'"),
    ],
)
def test_refused_on_gpu(optimizer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TableOptimizer.from_parameter_group(optimizer, 0, "table", CUDA)


class InBackward(Recommender):
    """Its item table has an optimizer of its own; the user's Adam lists it too and drives the other parameters."""

    def __init__(self) -> None:
        super().__init__()
        item, cat = self.net.embeddings.embeddings["item"], self.net.embeddings.embeddings["cat"]
        apply_optimizer_in_backward(RowWiseAdagrad, item.parameters(), {"lr": 0.1})
        cat.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def _fit(strategy: str, epochs: int, path: str, resume: bool = False) -> dict[str, Any]:
    torch.manual_seed(7 if resume else 0)
    module, data = InBackward(), Samples(64)
    fit = trainer(strategy=strategy, devices=2, max_epochs=epochs)
    fit.fit(
        module,
        FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=REPEATS),
        ckpt_path=path if resume else None,
    )
    fit.save_checkpoint(path if not resume else f"{path}.end")
    return {"losses": module.losses}


@pytest.mark.slow
def test_optimizer_applied_in_backward_stays_and_resumes(tmp_path: Path) -> None:
    """A frozen table does not move, one with its own optimizer does, and its state is in the checkpoint."""
    whole = run_distributed(_fit, 2, "freescale", 2, str(tmp_path / "whole.ckpt"))[0]
    half = run_distributed(_fit, 2, "freescale", 1, str(tmp_path / "half.ckpt"))[0]
    rest = run_distributed(_fit, 2, "freescale", 2, str(tmp_path / "half.ckpt"), resume=True)[0]
    assert half["losses"] + rest["losses"] == whole["losses"]
    end, resumed = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.ckpt", "half.ckpt.end"))
    for name, weight in end["state_dict"].items():
        assert torch.equal(weight, resumed["state_dict"][name])
    key = "net.embeddings.embeddings.item.weight"
    state = end["freescale"]["in_backward_states"][key]["sum"]
    assert state.shape == (50, 1)
    assert state.sum() > 0
    assert torch.equal(state, resumed["freescale"]["in_backward_states"][key]["sum"])
    torch.manual_seed(0)
    assert torch.equal(end["state_dict"][key.replace("item", "cat")], InBackward().state_dict()[key.replace("item", "cat")])


class OnlyTables(InBackward):
    """Nothing is left for an optimizer."""

    def configure_optimizers(self) -> None:
        self.net.hidden.requires_grad_(False)


def _fit_twice(path: str) -> list[float]:
    module, data = OnlyTables(), Samples(32)
    sums = []
    for epochs in (1, 0):  # the second fit ends before its first step
        fit = trainer(devices=2, max_epochs=epochs)
        fit.fit(module, FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=REPEATS))
        sums.append(sum(float(s.state["sum"].sum()) for s in fit.strategy.tables.shards() if s.state))
        if epochs:
            fit.save_checkpoint(path)
    return sums


def test_optimizer_applied_in_backward_goes_on_in_a_second_fit(tmp_path: Path) -> None:
    """With the squares it has accumulated; and a module without any optimizer of its own can be saved."""
    path = str(tmp_path / "x.ckpt")
    for first, second in run_distributed(_fit_twice, 2, path):
        assert 0 < first == second
    assert torch.load(path, weights_only=True)["freescale"]["updates"] == 4


class Towers(Recommender):
    """Looks its tables up twice in a step."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.net(features=batch["features"]).pow(2).mean()


def _fit_towers(optimizer: str, overlap: bool) -> int:
    module, data = Towers(optimizer), Samples(32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(devices=2, strategy=FreeScaleStrategy(overlap=overlap)).fit(
            module, FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=REPEATS)
        )
    return sum("looked up 2 times in one step: Adagrad" in str(w.message) for w in caught)


def test_two_lookups_in_a_step_without_overlap_are_told_once() -> None:
    assert run_distributed(_fit_towers, 2, "adagrad", False) == [1, 1]
    assert run_distributed(_fit_towers, 2, "sgd", False) == run_distributed(_fit_towers, 2, "adagrad", True) == [0, 0]
