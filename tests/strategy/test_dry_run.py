"""A training step that runs ahead of time and leaves no trace."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingCollection, KeyedJaggedTensor

from lightning_freescale.strategy.preserve_state import LeavesTraceError
from tests.helpers.dry_running import DIM, Model, dry_run, example_batch, item_collection
from tests.helpers.jagged import same_features

NOTED: list[Any] = []
"""What a step notes in a global, which no dry run puts back."""


@pytest.fixture(autouse=True)
def _nothing_noted() -> None:
    NOTED.clear()


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _seen_in_a_real_step(model: Model, batch: dict[str, Any]) -> dict[str, KeyedJaggedTensor]:
    seen: dict[str, KeyedJaggedTensor] = {}
    for path, module in (("items", model.items), ("bags", model.bags)):

        def keep(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            seen[path] = args[0] if args else kwargs["features"]

        module.register_forward_pre_hook(keep, with_kwargs=True)
    model.log = lambda *args, **kwargs: None
    model.training_step(batch, 0)
    return seen


def test_sees_what_the_step_looks_up() -> None:
    model, batch = Model(), example_batch()
    result = dry_run(model, batch)
    assert result.error is None and set(result.features) == {"items", "bags"}
    assert model.after == 0, "the step goes no further than its last lookup"
    for path, features in _seen_in_a_real_step(model, batch).items():
        (found,) = result.features[path]
        assert same_features(found, features) and found is not features
    assert model.after == 1


def test_stops_at_the_last_one_wanted() -> None:
    result = dry_run(Model(lambda model, batch: NOTED.append("between")), wanted={"items": 1})
    assert set(result.features) == {"items"} and not NOTED


def test_several_lookups_in_their_order() -> None:
    model, batch = Model(lambda model, batch: model.items(batch["more"])), example_batch()
    batch["more"] = KeyedJaggedTensor(["clicked", "shown"], torch.arange(2), lengths=torch.ones(2, dtype=torch.int64))
    (first,) = dry_run(model, batch, wanted={"items": 1}).features["items"]
    both = dry_run(model, batch, wanted={"items": 2}).features["items"]
    assert torch.equal(first.values(), batch["ids"])
    assert [each.values().tolist() for each in both] == [batch["ids"].tolist(), [0, 1]]


def test_without_gradients_and_without_copies_of_the_tables() -> None:
    model = Model(lambda model, batch: NOTED.extend([torch.is_grad_enabled(), model.items.state, model.queue]))
    model.items.register_buffer("state", torch.zeros(3))
    assert dry_run(model).error is None
    assert NOTED[0] is False and NOTED[1] is model.items.state and NOTED[2] is not model.queue


def test_a_collection_that_the_step_does_not_call() -> None:
    model = Model()
    model.idle = item_collection()
    result = dry_run(model)
    assert set(result.features) == {"items", "bags"} and result.error is None
    assert model.after == 0 and model.losses == [0.5], "it ran to its end, without a trace"


class Outputs(Model):
    """Keeps what the lookups return."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        found = self.items(KeyedJaggedTensor(["clicked", "shown"], batch["ids"], lengths=batch["lengths"]))
        KEPT[:] = [found, self.bags(batch["users"]), self.items.embedding_dim()]


KEPT: list[Any] = []


def test_zeros_of_the_shape_that_the_collection_returns() -> None:
    model = Outputs()
    model.idle = item_collection()
    model.training_step(example_batch(), 0)
    found, pooled, dim = KEPT
    assert dry_run(model).error is None
    blank, blank_pooled, dim_in_dry_run = KEPT
    assert dim == dim_in_dry_run == DIM
    assert blank.keys() == found.keys()
    for name, jagged in blank.items():
        assert not jagged.values().any()
        for part in ("values", "lengths", "weights"):
            mine, real = getattr(jagged, part)(), getattr(found[name], part)()
            assert (mine.shape, mine.dtype) == (real.shape, real.dtype)
        assert torch.equal(jagged.lengths(), found[name].lengths())
        assert torch.equal(jagged.weights(), found[name].weights())
    assert blank_pooled.keys() == pooled.keys() == ["user", "shared@user", "shared@other"]
    assert blank_pooled.length_per_key() == pooled.length_per_key()
    assert blank_pooled.values().shape == pooled.values().shape


def test_manual_optimization_is_not_run() -> None:
    model = Model(lambda model, batch: NOTED.append("ran"))
    model.automatic_optimization = False
    assert "automatic_optimization" in str(dry_run(model).error) and not NOTED


def test_no_hook_of_a_collection_fires_and_a_forward_of_its_own_stays() -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError

    model = Model()
    model.items.register_forward_pre_hook(refuse)
    model.bags.forward = refuse
    result = dry_run(model)
    assert result.error is None and set(result.features) == {"items", "bags"}
    assert model.bags.forward is refuse and len(model.items._forward_pre_hooks) == 1


@pytest.mark.parametrize("caught", [Exception, BaseException])
def test_a_step_that_catches_everything(caught: type[BaseException]) -> None:
    class Careful(Model):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor | None:
            try:
                return super().training_step(batch, batch_idx)
            except caught as error:
                NOTED.append(error)
                return None

    result = dry_run(Careful())
    assert result.error is None and set(result.features) == {"items", "bags"}
    assert bool(NOTED) == (caught is BaseException)


def test_what_is_shared_stays_shared() -> None:
    model = Model(lambda model, batch: NOTED.extend([model.alias is model.losses, model.norm.shared is model.queue]))
    model.alias = model.losses
    model.norm.register_buffer("shared", model.queue)
    assert dry_run(model).error is None
    assert NOTED == [True, True]


def test_a_table_held_twice() -> None:
    model = Model(lambda model, batch: model.nested["again"](batch["users"]))
    model.nested = nn.ModuleDict({"again": model.bags})
    result = dry_run(model)
    assert result.error is None and set(result.features) == {"items", "bags"}


def test_a_table_in_a_list() -> None:
    model = Model(lambda model, batch: NOTED.append(float(model.again[0](batch["users"]).values().abs().sum())))
    model.again = [model.bags]
    result = dry_run(model, wanted={"items": 1, "bags": 1, "more": 1})
    assert result.error is None and set(result.features) == {"items", "bags"}
    assert NOTED == [0.0], "no lookup but one of zeros"


def _write(name: str) -> None:
    with open(name, "w") as file:
        file.write("written")


def test_a_step_that_writes_a_file_is_refused_before_it_has(in_folder: Path) -> None:
    result = dry_run(Model(lambda model, batch: _write("notes")))
    assert isinstance(result.error, LeavesTraceError) and "writes to the file 'notes'" in str(result.error)
    assert not Path("notes").exists()
    _write("notes")
    assert dry_run(Model(lambda model, batch: NOTED.append(Path("notes").read_text()))).error is None
    assert NOTED == ["written"], "reading is free"


def test_what_cannot_be_put_back_is_named_and_the_step_does_not_run() -> None:
    model = Model(lambda model, batch: NOTED.append("ran"))
    model.norm.sampler = {"of": [iter([])]}
    model.extra = {}
    result = dry_run(model)
    assert isinstance(result.error, LeavesTraceError)
    assert str(result.error) == "self.norm.sampler['of'][0], of type list_iterator, cannot go back to where it was"
    assert not NOTED and isinstance(model.items, EmbeddingCollection) and model.queue is model._buffers["queue"]


def test_weights_that_need_gradients_and_a_backward_that_waits() -> None:
    model = Model(lambda model, batch: model.norm(batch["dense"]))
    model.norm.eval()
    waiting = (model.norm(torch.rand(2, 3)) * model.queue).sum()
    assert dry_run(model).error is None
    waiting.backward()
    assert model.norm.weight.grad is not None and torch.is_grad_enabled()


@pytest.mark.slow
def test_a_compiled_model_is_neither_compiled_again_nor_run() -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    class Compiled(Model):
        def __init__(self) -> None:
            super().__init__()
            self.tower = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), backend=backend)

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + self.tower(batch["dense"]).sum()

    model = Compiled()
    model.between = lambda model, batch: model.tower(batch["dense"])
    model.tower(example_batch()["dense"])
    graphs = len(compiled)
    assert graphs and dry_run(model).error is None
    model.tower(example_batch()["dense"])
    assert len(compiled) == graphs


# -- with a Trainer


class Ahead(L.Callback):
    """Runs a dry run of another batch before every step."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        result = dry_run(module, {**example_batch(100 + batch_idx), "ahead": True}, leave=[trainer])
        assert result.error is None and set(result.features) == {"items", "bags"}


def _fit(path: Any, callbacks: list[L.Callback]) -> tuple[dict[str, Tensor], str]:
    def between(model: Model, batch: dict[str, Any]) -> None:
        model.log("early", model.metric(nn.functional.dropout(model.norm(batch["dense"]))), on_epoch=True)
        model.log_dict({"random": random.random(), "numpy": np.random.rand()})
        if "ahead" in batch:
            model.log("dry", 1.0)
            model.log_dict({"drier": 1.0})

    L.seed_everything(1, verbose=False)
    logger = CSVLogger(path)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "accelerator": "cpu"}
    trainer = L.Trainer(logger=logger, callbacks=callbacks, max_epochs=2, log_every_n_steps=1, **quiet)
    model = Model(between)
    trainer.fit(model, DataLoader([example_batch(seed) for seed in range(3)], batch_size=None))
    return model.state_dict(), (logger.experiment.metrics_file_path and open(logger.experiment.metrics_file_path).read())


def test_training_with_dry_runs_is_training_without(tmp_path: Any) -> None:
    (plain, logged), (dry_runs, logged_with_dry_runs) = _fit(tmp_path / "plain", []), _fit(tmp_path / "dry runs", [Ahead()])
    assert all(torch.equal(plain[name], dry_runs[name]) for name in plain)
    assert logged == logged_with_dry_runs and "early" in logged
