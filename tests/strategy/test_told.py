"""What a user is told of, in the words of this strategy."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning_utilities.core import rank_zero

from lightning_freescale import FreeScaleDataModule, FreeScaleFabricStrategy, FreeScaleStrategy
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.recommender import Recommender, fixed_loader, trainer


class TwoOptimizers(Recommender):
    def configure_optimizers(self) -> Any:
        parts = self.net.embeddings, self.net.hidden
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]


class AdamFor(Recommender):
    """One table is trained, with Adam or Adagrad, the other one is frozen."""

    def __init__(self, adam: bool) -> None:
        super().__init__()
        self.kind = torch.optim.AdamW if adam else torch.optim.Adagrad

    def configure_optimizers(self) -> Any:
        return self.kind([p for name, p in self.named_parameters() if "cat" not in name], lr=0.1)


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _fit(make: Callable[..., Recommender], *args: Any) -> list[str]:
    told = Told()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(told)
    trainer(devices=2).fit(make(*args), fixed_loader(int(os.environ["RANK"]), 2))
    return [text for text in told.texts if "looks up" in text]


def test_tables_that_adam_updates_lazily_are_named() -> None:
    (told,), elsewhere = run_distributed(_fit, 2, AdamFor, True)
    assert "Adam updates only the rows of tables ['net.embeddings.embeddings.item.weight'] that a step looks up" in told
    assert not elsewhere
    assert run_distributed(_fit, 2, AdamFor, False) == [[], []]


def test_several_optimizers_are_told_two_ways() -> None:
    with pytest.raises(RankFailed) as failed:
        run_distributed(_fit, 2, TwoOptimizers)
    told = str(failed.value)
    assert "TwoOptimizers.configure_optimizers returns several optimizers" in told
    assert "a parameter group for" in told and "apply_optimizer_in_backward" in told


def _fabric(strategy: Any) -> Any:
    return Fabric(accelerator="cpu", strategy=strategy)


def _lightning_fabric(strategy: Any) -> Any:
    return pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", strategy=strategy)


def _pytorch_lightning(strategy: Any) -> Any:
    return pytest.importorskip("pytorch_lightning").Trainer(accelerator="cpu", strategy=strategy)


def _trainer(strategy: Any) -> Any:
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)


OTHERS = [
    (_lightning_fabric, lambda: "freescale", r"import lightning as L, and use L.Trainer or L.Fabric"),
    (_lightning_fabric, FreeScaleFabricStrategy, r"from lightning.fabric import Fabric, not lightning_fabric"),
    (_pytorch_lightning, lambda: "freescale", r"import lightning as L, and use L.Trainer or L.Fabric"),
    (_pytorch_lightning, FreeScaleStrategy, r"import lightning as L, not pytorch_lightning"),
    (_fabric, FreeScaleStrategy, r"Fabric takes lightning_freescale.FreeScaleFabricStrategy"),
    (_trainer, FreeScaleFabricStrategy, r"which only lightning.fabric takes"),
]


@pytest.mark.parametrize(("make", "strategy", "told"), OTHERS)
def test_others_say_what_to_import(
    make: Callable[[Any], Any], strategy: Callable[[], Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero, "log", rank_zero.log)  # which the others' import replaces for everybody
    with pytest.raises(ValueError, match=told):
        make(strategy())


@pytest.mark.parametrize("strategy", [lambda: "freescale", FreeScaleStrategy], ids=["name", "object"])
def test_the_trainer_takes_it(strategy: Callable[[], Any]) -> None:
    assert isinstance(_trainer(strategy()).strategy, FreeScaleStrategy)


def _named(name: str) -> tuple[str, bool]:
    strategy: Any = Fabric(accelerator="cpu", devices=1, strategy=name).strategy
    return type(strategy).__name__, strategy.ddp_options.get("find_unused_parameters", False)


@pytest.mark.parametrize(("name", "unused"), [("freescale", False), ("freescale_find_unused_parameters_true", True)])
def test_fabric_takes_the_name(name: str, unused: bool) -> None:
    assert _named(name) == ("FreeScaleFabricStrategy", unused)


def test_a_trainer_of_the_other_namespace_is_refused_by_the_data_module() -> None:
    other = pytest.importorskip("pytorch_lightning")
    trainer = other.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    data = FreeScaleDataModule([0, 1, 2], lambda sample: 1)
    with pytest.raises(TypeError, match=r"not for that of pytorch_lightning.*import lightning as L"):
        trainer.fit(other.LightningModule(), datamodule=data)
