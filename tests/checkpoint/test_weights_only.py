"""A checkpoint of ours is read without running code, unless the user's own objects are in it."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_freescale import BubbleProfiler, FreeScaleDataModule
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import Recommender, Samples, collate, trainer

OURS = {"updates", "table_updates", "in_backward_states", "id_maps", "random_states", "bucket_order", "bag_states"}


class Setting:
    """A user's class."""


class WithHyperparameters(Recommender):
    def __init__(self, **hyperparameters: Any) -> None:
        super().__init__("rowwise_adagrad")
        self.save_hyperparameters(hyperparameters)


class ObjectInCheckpoint(Recommender):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["setting"] = Setting()


MODULES = {
    "none": lambda: Recommender("rowwise_adagrad"),
    "plain": lambda: WithHyperparameters(lr=0.1, layers=[8, 8], name="net", nested={"bias": False, "none": None}),
    "object": lambda: WithHyperparameters(setting=Setting()),
    "hook": ObjectInCheckpoint,
}


def _fit(folder: Path, modules: list[str]) -> None:
    data = Samples(16)
    for name in modules:
        loaded = FreeScaleDataModule(data, data.lengths, 2, collate_fn=collate)
        saving = ModelCheckpoint(folder / name, monitor="loss", filename="best", save_last=True)
        callbacks = [saving, BubbleProfiler(folder / "bubbles", verbose=False)]
        trainer(devices=2, callbacks=callbacks, enable_checkpointing=True).fit(MODULES[name](), loaded)


@pytest.mark.slow
def test_a_checkpoint_is_read_with_weights_only_unless_it_holds_objects_of_the_user(tmp_path: Path) -> None:
    run_distributed(_fit, 2, tmp_path, [*MODULES])
    for name in ("none", "plain"):
        for file in ("best.ckpt", "last.ckpt"):
            found = torch.load(tmp_path / name / file, weights_only=True)
            assert found["freescale"].keys() <= OURS and len(found["freescale"]["random_states"]) == 2
            assert "FreeScaleDataModule" in found and "state_dict" in found
        assert found.get("hyper_parameters", {}).get("lr") == (0.1 if name == "plain" else None)
    for name, said in {"object": "Setting", "hook": "Setting"}.items():
        with pytest.raises(UnpicklingError, match=said):
            torch.load(tmp_path / name / "last.ckpt", weights_only=True)
