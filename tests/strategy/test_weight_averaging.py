"""WeightAveraging and EMAWeightAveraging over sharded tables: as under "ddp", and what cannot be averaged."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchrec import EmbeddingCollection
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.checkpoint.conversion import open_checkpoint
from lightning_freescale.testing import run_distributed
from tests.checkpoint.fits import SaveAt
from tests.helpers.bags import BagModel, bag_loader
from tests.helpers.managed_tables import ManagedRecommender
from tests.helpers.overlap_training import assert_same, my_loader
from tests.helpers.plain_embeddings import SHARDED, PlainModel, plain_loader
from tests.helpers.recommender import Recommender, fixed_loader, tables, trainer

STEPS, EPOCHS, SAVED = 4, 2, 5
"""Steps of an epoch, epochs, and after how many steps the checkpoint is saved."""
ITEM = "net.embeddings.embeddings.item.weight"


class Bags(BagModel):
    """Sequences and bags, with buffers beside the tables; keeps its losses of validation, too."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.norm = nn.BatchNorm1d(8)

    def scores(self, batch: Any) -> Any:
        scores = super().scores(batch)
        return scores + self.norm(scores.unsqueeze(1).expand(-1, 8)).mean(dim=1)


class Plain(PlainModel):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(nn.functional.mse_loss(self.scores(batch), batch["label"]).item())


class EverySecond(WeightAveraging):
    """Not after the last step, whose updates are under way when training ends; with a ``setup`` of its own."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.is_set_up = True

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return self.is_set_up and step_idx is not None and step_idx % 2 == 0


def ema() -> L.Callback:
    return EMAWeightAveraging(decay=0.7, update_starting_at_step=1)


def planned(kind: Any) -> ShardingPlan:
    """Return a plan with one kind of sharding for all tables of :class:`Recommender`."""
    options = {"local_size": 2, "world_size": 2, "device_type": "cpu"}
    plan = {config.name: kind for config in tables()}
    entry = construct_module_sharding_plan(EmbeddingCollection(tables=tables()), plan, **options)
    return ShardingPlan({"net.embeddings": entry})


Make = tuple[Callable[[], Any], Callable[[int], Any], Callable[[], Any]]
BAGS: Make = (Bags, bag_loader, ema)
PLAIN: Make = (partial(Plain, "adagrad"), plain_loader, partial(EverySecond, use_buffers=False))
CASES: dict[str, tuple[Make, Any]] = {
    "bags under ddp": (BAGS, "ddp"),
    "bags": (BAGS, {"checkpoint": "async"}),
    "embeddings under ddp": (PLAIN, "ddp"),
    "embeddings": (PLAIN, {"shard": SHARDED}),
    "nothing sharded": (PLAIN, {}),
}
NET: Make = (Recommender, my_loader, ema)
MORE_CASES: dict[str, tuple[Make, Any]] = {
    "bags under ddp": (BAGS, "ddp"),
    "exchanged by TorchRec": (BAGS, {"overlap": "torchrec"}),
    "without overlap": (BAGS, {"overlap": False, "dedup": False}),
    "sequences under ddp": (NET, "ddp"),
    "by columns": (NET, {"plan": planned(column_wise(ranks=[0, 0], compute_kernel="fused"))}),
}
ALL_CALLS = ["embeddings under ddp", "embeddings"]


def _fits(make: Make, strategy: Any, path: Path, all_calls: bool) -> dict[str, Any]:
    """Fit with a checkpoint on the way, and resume from it; return losses and weights by call."""
    module_of, loader, callback_of = make
    found: dict[str, Any] = {}

    def run(name: str, module: Any, callback: Any, call: str = "fit", ckpt_path: Any = None) -> None:
        saving = [SaveAt(path, SAVED)] if name == "fit" else []
        made = strategy if isinstance(strategy, str) else FreeScaleStrategy(**strategy)
        options = {"max_epochs": EPOCHS, "val_check_interval": 3, "callbacks": [callback, *saving]}
        running = trainer(strategy=made, devices=2, **options)
        module.losses.clear()
        getattr(running, call)(module, *([loader(STEPS)] if call == "fit" else []), loader(1), ckpt_path=ckpt_path)
        state = running._checkpoint_connector.dump_checkpoint(weights_only=False)["state_dict"]
        found[name] = [list(module.losses), copy.deepcopy(state)]
        if all_calls and name == "fit":
            running.validate(module, loader(1), verbose=False)
            found["validate after it"] = [list(module.losses)]

    torch.manual_seed(0)
    module, callback = module_of(), callback_of()
    if all_calls:
        run("validate", module, callback, "validate")
    run("fit", module, callback)
    torch.manual_seed(1)
    run("resume", module_of(), callback_of(), ckpt_path=path)
    if all_calls:
        run("validate a checkpoint", module_of(), callback_of(), "validate", ckpt_path=path)
        run("fit again", module, callback)
    return found


def _saved(path: Path) -> dict[str, Any]:
    with open_checkpoint(path, weights_only=False) as file:
        checkpoint = torch.load(file, weights_only=False)
    names = ("state_dict", "current_model_state", "averaging_state", "callbacks")
    return {name: {k: v for k, v in checkpoint[name].items() if "SaveAt" not in k} for name in names}


def _all_fits(folder: Path, cases: dict[str, tuple[Make, Any]]) -> dict[str, Any]:
    return {name: _fits(make, how, folder / name, name in ALL_CALLS) for name, (make, how) in cases.items()}


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.slow)], ids=["first", "more"])
def test_as_under_ddp(tmp_path: Path, cases: dict[str, tuple[Make, Any]]) -> None:
    ranks = run_distributed(_all_fits, 2, tmp_path, cases, init=False)
    for name, (make, _) in cases.items():
        under_ddp = next(other for other, case in cases.items() if case == (make, "ddp"))
        for rank, fits in enumerate(ranks):
            for call, found in fits[name].items():
                kept = slice(2) if rank == 0 else slice(1)  # weights are whole on the first rank
                said = f"{name}, rank {rank}, {call}"
                torch.testing.assert_close(found[kept], fits[under_ddp][call][kept], rtol=1e-6, atol=1e-6, msg=said)
        saved, expected = _saved(tmp_path / name), _saved(tmp_path / under_ddp)
        assert_same(saved, expected, rtol=1e-6, atol=1e-6)
        assert any(not torch.equal(value, saved["current_model_state"][key]) for key, value in saved["state_dict"].items())


def _from(saved: Path, strategy: str) -> list[Any]:
    torch.manual_seed(1)
    running = trainer(strategy=strategy, devices=2, max_epochs=EPOCHS, callbacks=[ema()])
    running.fit(Recommender(), fixed_loader(int(os.environ["RANK"]), STEPS), ckpt_path=saved)
    kept = running._checkpoint_connector.dump_checkpoint(weights_only=False)
    return [kept[key] for key in ("state_dict", "current_model_state")]


def _changes(folder: Path) -> list[Any]:
    kept = []
    for name, strategy, callbacks in (("averaged", "ddp", [ema()]), ("current", "freescale", [])):
        torch.manual_seed(0)
        saving = [*callbacks, SaveAt(folder / name, SAVED)]
        running = trainer(strategy=strategy, devices=2, max_epochs=EPOCHS, callbacks=saving)
        running.fit(Recommender(), fixed_loader(int(os.environ["RANK"]), STEPS))
        kept.append([_from(folder / name, then) for then in ("ddp", "freescale")])
    return kept


def test_resumes_from_ddp_and_from_a_run_without_averages(tmp_path: Path) -> None:
    for expected, found in run_distributed(_changes, 2, tmp_path, init=False)[0]:
        assert_same(found, expected, rtol=1e-6, atol=1e-6)


class OnMeta(Recommender):
    """Its tables have no memory before they are sharded, some in ``configure_model``."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late, self.equal = late, []
        self.net.embeddings = nn.Identity()
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if isinstance(self.net.embeddings, nn.Identity):
            self.net.embeddings = EmbeddingCollection(tables=tables(), device=torch.device("meta"))


class Compares(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        kept = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        pairs = [(kept["state_dict"][name], value) for name, value in kept["current_model_state"].items()]
        module.equal.append(
            all(torch.equal(*pair) for pair in pairs) and (ITEM in kept["state_dict"]) == (module.global_rank == 0)
        )


def _on_meta() -> list[list[bool]]:
    found = []
    for late in (False, True):
        module = OnMeta(late)
        loader = fixed_loader(int(os.environ["RANK"]), 3)
        trainer(devices=2, callbacks=[EMAWeightAveraging(decay=0.0), Compares()]).fit(module, loader)
        found.append(module.equal)
    return found


def test_the_average_is_of_tables_that_are_up_to_date() -> None:
    assert run_distributed(_on_meta, 2, init=False) == [[[True] * 3] * 2] * 2


# -- what cannot be averaged or copied


class OwnAverage(L.Callback):
    """An average by hand, in some ways that tables cannot follow."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        for name, make in {"copy": copy.deepcopy, "average": AveragedModel, "pickle": pickle.dumps}.items():
            with pytest.raises(TypeError) as raised:
                make(module)
            self.said[name] = str(raised.value)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        with pytest.raises(RuntimeError) as raised:
            _ = {name: value * 0.9 for name, value in module.state_dict().items()}
        self.said["state dict"] = str(raised.value)


def _refused() -> dict[str, str]:
    own = OwnAverage()
    loader = fixed_loader(int(os.environ["RANK"]), 1)
    trainer(devices=2, callbacks=[own]).fit(Recommender(), loader)
    cached = FreeScaleStrategy(plan=planned(row_wise(compute_kernel="fused_uvm_caching")))
    for module, strategy, reason in (
        (ManagedRecommender(), "freescale", "'net.items': managed collisions"),
        (Recommender(), cached, "'net.embeddings': compute_kernel='fused_uvm_caching'"),
    ):
        with pytest.raises(ValueError, match=f"EMAWeightAveraging .*{reason}"):
            trainer(devices=2, strategy=strategy, callbacks=[ema()]).fit(module, loader)
    return own.said


def test_refused_by_name() -> None:
    for said in run_distributed(_refused, 2, init=False):
        for name in ("copy", "average", "pickle"):
            assert all(
                word in said[name]
                for word in ("'net.embeddings'", "EMAWeightAveraging", "full_weight", "'net.embeddings.embeddings.item'")
            )
        assert "ShardedTensor" in said["state dict"], "docs/limits.md says what to do"
