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
            torch.optim.AdamW([WEIGHT], lr=0.5, betas=(0.8, 0.9), weight_decay=0.1),
            torch.optim.Adam,
            {"lr": 0.5, "eps": 1e-8, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.1},
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
        (torch.optim.NAdam([WEIGHT]), "NAdam.*'table'"),
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


class OnlyTables(InBackward):
    """Nothing is left for an optimizer."""

    def configure_optimizers(self) -> None:
        self.net.hidden.requires_grad_(False)


def _fit(module: Recommender, epochs: int, save: str = "", resume: str | None = None, **options: Any) -> Any:
    data, fit = Samples(32), trainer(devices=2, max_epochs=epochs, **options)
    fit.fit(module, FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=REPEATS), ckpt_path=resume)
    if save:
        fit.save_checkpoint(save)
    return fit


def _in_backward(folder: Path) -> tuple[list[list[float]], list[float]]:
    """Losses of a run, and of one in two halves; squares that have been accumulated after a fit, and after a second."""
    losses, files = [], [str(folder / f"{name}.ckpt") for name in ("whole", "half", "rest", "only")]
    for epochs, save, resume in ((2, files[0], None), (1, files[1], None), (2, files[2], files[1])):
        torch.manual_seed(7 if resume else 0)
        module = InBackward()
        _fit(module, epochs, save, resume)
        losses.append(module.losses)
    module, sums = OnlyTables(), []
    for epochs in (1, 0):  # the second fit ends before its first step
        shards = _fit(module, epochs, files[3] if epochs else "").strategy.tables.shards()
        sums.append(sum(float(shard.state["sum"].sum()) for shard in shards if shard.state))
    return losses, sums


def test_optimizer_applied_in_backward_stays_and_resumes(tmp_path: Path) -> None:
    """A frozen table does not move, one with its own optimizer does, and its state is in the checkpoint."""
    for (whole, half, rest), (first, second) in run_distributed(_in_backward, 2, tmp_path):
        assert half + rest == whole and 0 < first == second
    end, resumed, only = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("whole", "rest", "only"))
    assert [name for name, weight in end["state_dict"].items() if not torch.equal(weight, resumed["state_dict"][name])] == []
    key = "net.embeddings.embeddings.item.weight"
    state, again = (each["freescale"]["in_backward_states"][key]["sum"] for each in (end, resumed))
    assert state.shape == (50, 1) and state.sum() > 0 and torch.equal(state, again)
    torch.manual_seed(0)
    frozen = key.replace("item", "cat")
    assert torch.equal(end["state_dict"][frozen], InBackward().state_dict()[frozen])
    assert only["freescale"]["updates"] == 4, "also without any optimizer of the module's own"


class Towers(Recommender):
    """Looks its tables up twice in a step."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.net(features=batch["features"]).pow(2).mean()


def _warnings_of_towers() -> list[int]:
    found = []
    for optimizer, overlap in (("adagrad", False), ("sgd", False), ("adagrad", True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _fit(Towers(optimizer), 1, strategy=FreeScaleStrategy(overlap=overlap))
        found.append(sum("looked up 2 times" in str(w.message) and "Adagrad" in str(w.message) for w in caught))
    return found


def test_two_lookups_in_a_step_without_overlap_are_told_once() -> None:
    assert run_distributed(_warnings_of_towers, 2) == [[1, 0, 0]] * 2
