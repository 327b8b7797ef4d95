"""A training step that runs ahead of time and leaves no trace."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from tests.helpers.dry_running import DIM, Model, dry_run, example_batch, item_collection
from tests.helpers.jagged import same_features

NOTED: list[Any] = []
"""A global of the steps, which no dry run puts back."""


@pytest.fixture(autouse=True)
def _nothing_noted() -> None:
    NOTED.clear()


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
    model.idle = item_collection()
    result = dry_run(model, batch)
    assert set(result.features) == {"items", "bags"} and result.error is None, "it does not call the other one"
    assert model.after == 0 and model.losses == [0.5], "it ran to its end, without a trace"
    for path, features in _seen_in_a_real_step(model, batch).items():
        (found,) = result.features[path]
        assert same_features(found, features) and found is not features
    assert model.after == 1


def test_stops_at_the_last_one_wanted() -> None:
    model, batch = Model(lambda model, batch: NOTED.append(model.items(batch["more"]))), example_batch()
    batch["more"] = KeyedJaggedTensor(["clicked", "shown"], torch.arange(2), lengths=torch.ones(2, dtype=torch.int64))
    first = dry_run(model, batch, wanted={"items": 1}).features
    assert set(first) == {"items"} and not NOTED
    both = dry_run(model, batch, wanted={"items": 2}).features["items"]
    assert [each.values().tolist() for each in both] == [batch["ids"].tolist(), [0, 1]]
    assert torch.equal(first["items"][0].values(), batch["ids"])


def test_without_gradients_and_without_copies_of_the_tables() -> None:
    model = Model(lambda model, batch: NOTED.extend([torch.is_grad_enabled(), model.items.state, model.queue]))
    model.items.register_buffer("state", torch.zeros(3))
    assert dry_run(model).error is None
    assert NOTED[0] is False and NOTED[1] is model.items.state and NOTED[2] is not model.queue


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


def test_what_is_shared_stays_shared_and_a_table_may_be_held_anywhere() -> None:
    def between(model: Any, batch: dict[str, Any]) -> None:
        NOTED.extend([model.alias is model.losses, model.norm.shared is model.queue])
        for bags in (model.nested["again"], model.again[0]):
            NOTED.append(float(bags(batch["users"]).values().abs().sum()))

    model = Model(between)
    model.alias, model.again = model.losses, [model.bags]
    model.nested = nn.ModuleDict({"again": model.bags})
    model.norm.register_buffer("shared", model.queue)
    result = dry_run(model, wanted={"items": 1, "bags": 3})
    assert result.error is None and set(result.features) == {"items", "bags"}
    assert NOTED == [True, True, 0.0, 0.0], "no lookup but of zeros"


def test_weights_that_need_gradients_and_a_backward_that_waits() -> None:
    model = Model(lambda model, batch: model.norm(batch["dense"]))
    model.norm.eval()
    waiting = (model.norm(torch.rand(2, 3)) * model.queue).sum()
    assert dry_run(model).error is None
    waiting.backward()
    assert model.norm.weight.grad is not None and torch.is_grad_enabled()


def test_nothing_is_logged_or_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def logs(model: Model, batch: dict[str, Any]) -> None:
        model.log("early", 1.0)
        model.log_dict({"early": 1.0})
        model.print("early")

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what Lightning gives where there is no Trainer
        assert dry_run(Model(logs)).error is None
    assert not capsys.readouterr().out
