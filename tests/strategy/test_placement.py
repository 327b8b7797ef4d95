"""Rows are spread over the ranks by a hash, which changes no number, and nothing that the user sees."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import (
    PLAIN,
    Case,
    CountingModel,
    Run,
    assert_same,
    departures,
    fit_all,
    my_loader,
    not_refused,
)
from tests.helpers.recommender import OPTIMIZERS, REPEATS, Samples, StopAt, collate, trainer

STEPS = 6
CLOSE = {"losses": (1e-5, 1e-12), "weights": (1e-5, 1e-6), "states": (1e-5, 1e-6)}
ADAM = {**OPTIMIZERS, "adam": lambda params: torch.optim.Adam(params, lr=0.05)}


class Model(CountingModel):
    """Also knows Adam, and keeps its last validation loss, and which rows this rank holds."""

    def configure_optimizers(self) -> Any:
        return ADAM[self.optimizer](self.parameters())

    def on_train_end(self) -> None:
        super().on_train_end()
        self.statistics["val"] = float(self.trainer.callback_metrics.get("val", 0.0))
        if isinstance(self.trainer.strategy, FreeScaleStrategy):
            self.statistics["ids"] = {
                shard.table.name: shard.ids[:3].tolist() for shard in self.trainer.strategy.tables.shards()
            }


def _data() -> FreeScaleDataModule:
    data, validation = Samples(4 * STEPS * 2), Samples(4 * 2 * 2, seed=1)
    return FreeScaleDataModule(data, data.lengths, 4, val_dataset=validation, collate_fn=collate, **REPEATS)


def case(optimizer: str, **options: Any) -> Case:
    return Case(partial(Model, optimizer), _data, {"val_check_interval": 2, "num_sanity_val_steps": 1, **options}, notice=None)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "ranks"), [("adagrad", 2), ("rowwise_adagrad", 4)])
def test_placement_changes_no_number(optimizer: str, ranks: int) -> None:
    cases = {optimizer: case(optimizer)}
    results = [
        runs[optimizer] for runs in run_distributed(fit_all, ranks, cases, "ddp", {}, {"dedup": False}, {"overlap": "torchrec"})
    ]
    assert departures({"bitwise": case(optimizer)}, [{"bitwise": each[2:]} for each in results]) == []
    assert departures(cases, [{optimizer: each} for each in results], **CLOSE) == []
    for under_ddp, hashed, bitwise, by_torchrec in results:
        assert bitwise.statistics["val"] == by_torchrec.statistics["val"]
        assert bitwise.statistics["val"] == pytest.approx(under_ddp.statistics["val"], rel=1e-5)
        ids = hashed.statistics["ids"]["item"]
        assert max(ids) - min(ids) > 50 // ranks


def _load(file: str) -> Run:
    """Return the state where a fit resumes and takes no step: the first epoch was the last."""
    return case("adam", max_epochs=1, ckpt_path=file).fit({})


def test_a_checkpoint_loads_on_any_number_of_ranks(tmp_path: Path) -> None:
    file = str(tmp_path / "end.ckpt")
    saving = case("adam", max_epochs=1, callbacks=lambda: [StopAt(STEPS, file)])
    saved = run_distributed(saving.fit, 2, {})[0]
    for ranks in (1, 3):
        found = run_distributed(_load, ranks, file)[0]
        assert_same((found.losses, found.weights, found.states), ([], saved.weights, saved.states))


def _written_and_read() -> None:
    """Read a table as it is at first, and as a plain state dict has it that is loaded into the sharded module."""
    torch.manual_seed(0)
    module, name = Model(), "net.embeddings.embeddings.item"
    whole = {key: value.detach().clone() for key, value in module.state_dict().items()}
    fitting = trainer(strategy=FreeScaleStrategy(), devices=2)
    fitting.validate(module, my_loader(2), verbose=False)
    assert_same(fitting.strategy.full_weight(name), whole[f"{name}.weight"])
    other = {key: torch.arange(float(value.numel())).view(value.shape) for key, value in whole.items()}
    module.load_state_dict(other, strict=True)
    assert_same(fitting.strategy.full_weight(name), other[f"{name}.weight"])


def test_tables_are_read_and_written_in_the_order_of_the_module() -> None:
    run_distributed(_written_and_read, 2)


class Wrong(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            batch["features"].values()[0] = 77
        return super().training_step(batch, batch_idx)


def test_errors_name_the_id_that_the_user_gave() -> None:
    parts = ["ValueError", "'history'", "id 77", "table 'item'", "num_embeddings=50"]
    assert not_refused(2, {"wrong": Case(Wrong, lambda: my_loader(STEPS), error=parts)}) == []
    assert not_refused(2, {"wrong": Case(Wrong, lambda: my_loader(STEPS), error=parts)}, PLAIN) == []
