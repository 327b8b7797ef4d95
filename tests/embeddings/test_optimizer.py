"""The derivation of a table's optimizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import STEPS, Case, CountingModel, Run, continued, departures, my_loader
from tests.helpers.recommender import trainer

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


class InBackward(CountingModel):
    """A model whose item table has its own optimizer. The user's Adam contains it, too, and updates the other parameters."""

    def __init__(self) -> None:
        super().__init__()
        item, cat = self.net.embeddings.embeddings["item"], self.net.embeddings.embeddings["cat"]
        apply_optimizer_in_backward(RowWiseAdagrad, item.parameters(), {"lr": 0.1})
        cat.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class OnlyTables(InBackward):
    def configure_optimizers(self) -> None:
        self.net.hidden.requires_grad_(False)


def _in_backward(folder: Path) -> tuple[list[Run], list[float]]:
    """Return a run, a run in two halves, and the accumulated squares after a fit and after a second fit."""
    runs, module, sums = continued(Case(InBackward), str(folder / "half.ckpt"), STEPS, {}, {}), OnlyTables(), []
    for epochs in (1, 0):  # the second fit ends before its first step
        fitting = trainer(devices=2, max_epochs=epochs)
        fitting.fit(module, my_loader(STEPS))
        if epochs:
            fitting.save_checkpoint(folder / "only.ckpt")
        sums.append(sum(float(shard.state["sum"].sum()) for shard in fitting.strategy.tables.shards() if shard.state))
    return runs, sums


def test_optimizer_applied_in_backward_stays_and_resumes(tmp_path: Path) -> None:
    """Check that a frozen table does not change, and that a table with its own optimizer is updated and resumed."""
    results, item = run_distributed(_in_backward, 2, tmp_path), "net.embeddings.embeddings.item.weight"
    assert departures({"resumed": Case()}, [{"resumed": runs} for runs, _ in results]) == []
    assert all(0 < first == second for _, (first, second) in results)
    half, only = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["freescale"] for name in ("half", "only"))
    state = half["in_backward_states"][item]["sum"]
    assert state.shape == (50, 1) and state.sum() > 0
    torch.manual_seed(0)
    before, after = InBackward().state_dict(), results[0][0][0].weights
    assert not torch.equal(after[item], before[item])
    assert torch.equal(after[item.replace("item", "cat")], before[item.replace("item", "cat")])
    assert only["updates"] == STEPS, "also without any optimizer of the module's own"


class Towers(CountingModel):
    """A model that looks its tables up twice in a step."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.net(features=batch["features"]).pow(2).mean()


def _warnings_of_towers() -> list[int]:
    cases = [("adagrad", "torchrec"), ("sgd", "torchrec"), ("adagrad", True)]
    warnings = [Case(partial(Towers, kind)).fit({"overlap": overlap}).warnings for kind, overlap in cases]
    return [sum("looked up 2 times" in text and "Adagrad" in text for text in texts) for texts in warnings]


def test_two_lookups_in_a_step_of_torchrec_are_told_once() -> None:
    assert run_distributed(_warnings_of_towers, 2) == [[1, 0, 0]] * 2
