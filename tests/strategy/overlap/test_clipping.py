"""Gradients are clipped over the dense part and the tables together, as under "ddp"; or it is refused."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import grad_norm
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.optim import apply_optimizer_in_backward

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers import overlap_modules as modules
from tests.helpers.overlap_training import CountingModel, Run, as_tensors, assert_same, changed_loader, fit, my_loader
from tests.helpers.recommender import DIM, ITEMS, OPTIMIZERS, trainer
from tests.helpers.several_lookups import KINDS, Drawn, loader

STEPS = 5
BY_NORM = {"gradient_clip_val": 0.05}
BY_VALUE = {"gradient_clip_val": 0.005, "gradient_clip_algorithm": "value"}


def _fit(make: Callable[[], CountingModel], strategy: Any, change: Any = None, **options: Any) -> Run:
    torch.manual_seed(0)
    loader = my_loader(STEPS) if change is None else changed_loader(STEPS, change)
    return fit(make(), loader, strategy=strategy, **options)


def _against_ddp(
    makes: list[Callable[[], CountingModel]], change: Any = None, reference: str = "ddp", **options: Any
) -> list[list[Run]]:
    """Of every module: under the reference, and under "freescale" with and without dedup."""
    lookahead = "trial_run" if change is as_tensors else "batch"
    return [
        [
            _fit(make, strategy, change, **options)
            for strategy in (reference, *(FreeScaleStrategy(dedup=dedup, lookahead=lookahead) for dedup in (True, False)))
        ]
        for make in makes
    ]


def _assert_as_ddp(ranks: list[list[list[Run]]]) -> None:
    for ddp, *mine in ranks[0]:
        for run in mine:
            assert run.losses == pytest.approx(ddp.losses, rel=1e-6)
            assert_same(run.weights, ddp.weights, rtol=1e-6, atol=1e-6)
            states = [_moved(each.states[0]["state"]) for each in (run, ddp)]
            assert_same(states[0], states[1], rtol=1e-5, atol=1e-7)
            assert run.looked_ahead()[0] > 0, "not overlapped"


def _moved(states: dict[int, Any]) -> dict[int, Any]:
    return {index: state for index, state in states.items() if state and state["step"]}  # frozen tables have one under "ddp"


def _differ(one: Run, other: Run, part: str = "embeddings") -> bool:
    names = [name for name in one.weights if part in name]
    return bool(names) and all((one.weights[name] - other.weights[name]).abs().max() > 1e-4 for name in names)


class WithLargeEps(CountingModel):
    """Adagrad's eps is far above what is left of gradients that cancel: with less, their rounding moves a weight as any other.

    Their rounding is some 1e-9, and moves a weight by lr / eps times as much: a tenth of the tolerance.
    """

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        for group in optimizer.param_groups:
            group.update({"eps": 1e-3} if isinstance(optimizer, torch.optim.Adagrad) else {})
        return optimizer


def _every_optimizer(**options: Any) -> tuple[list[list[Run]], list[Run]]:
    makes = [lambda name=name: WithLargeEps(name) for name in OPTIMIZERS]
    unclipped = {**options, "gradient_clip_val": None, "gradient_clip_algorithm": None}
    return _against_ddp(makes, **options), [_fit(make, "ddp", **unclipped) for make in makes]


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("clip", [BY_NORM, BY_VALUE], ids=["norm", "value"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_as_under_ddp(ranks: int, clip: dict[str, Any], accumulated: int) -> None:
    told = run_distributed(_every_optimizer, ranks, **clip, accumulate_grad_batches=accumulated)
    _assert_as_ddp([runs for runs, _ in told])
    runs, unclipped = told[0]
    assert all(_differ(ddp, without) for (ddp, *_), without in zip(runs, unclipped)), "nothing was clipped"


class ByHook(CountingModel):
    """Clips as it likes: by value, by norm, by both, or not at all; in every step by other limits."""

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        if self.global_step % 4 in (0, 2):
            self.clip_gradients(optimizer, 0.003 + 0.001 * self.global_step, "value")
        if self.global_step % 4 in (1, 2):
            self.clip_gradients(optimizer, 0.02 + 0.01 * self.global_step, "norm")


class WithTags(modules.TwoCollections, modules.Schedules):
    """Two collections, and a learning rate for every step."""


class FreezesItems(CountingModel):
    def __init__(self) -> None:
        super().__init__()
        self.net.embeddings.embeddings["item"].weight.requires_grad_(False)


class FreezesBetween(CountingModel):
    """One table is frozen at first, the other one from the fourth step on."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.net.embeddings.embeddings["item"].weight.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.net.embeddings.embeddings["item"].weight.requires_grad_(True)
        if batch_idx == 3:
            self.net.embeddings.embeddings["cat"].weight.requires_grad_(False)


class Reads(CountingModel):
    """Asks for the whole state between backward and the optimizer step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        state = self.trainer.strategy.lightning_module_state_dict()
        if self.global_rank == 0:
            self.losses.append(sum(float(value.double().square().sum()) for value in state.values()))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (ByHook, {}),
        (ByHook, {"accumulate_grad_batches": 2}),
        (WithTags, {**BY_NORM, "change": modules.with_tags}),
        (WithTags, {**BY_VALUE, "change": modules.with_tags}),
        (FreezesItems, BY_NORM),
        (modules.StepsAfterClosure, BY_NORM),
        (Reads, BY_NORM),
        (Reads, {**BY_NORM, "accumulate_grad_batches": 2}),
        (modules.CutsShort, {**BY_NORM, "accumulate_grad_batches": 3, "max_epochs": 2}),
        (modules.Computes, {**BY_NORM, "change": as_tensors}),
    ],
)
def test_as_under_ddp_also(make: Any, options: dict[str, Any]) -> None:
    _assert_as_ddp(run_distributed(_against_ddp, 2, [make], **options))


@pytest.mark.parametrize("options", [BY_NORM, BY_VALUE], ids=["norm", "value"])
def test_tables_that_are_frozen_for_a_time(options: dict[str, Any]) -> None:
    """On several ranks DDP does not reduce what was frozen when it was made."""
    _assert_as_ddp(run_distributed(_against_ddp, 1, [FreezesBetween], reference="auto", **options))


def test_steps_without_a_loss() -> None:
    """Lightning allows them on one rank."""
    _assert_as_ddp(run_distributed(_against_ddp, 1, [lambda: modules.Skips("sgd")], **BY_NORM))


class ClipsTwice(Drawn):
    """It clips before its last lookup, which the loss does not use, is known to have no gradient; and once more."""

    def negatives(self, batch: Any, batch_idx: int) -> KeyedJaggedTensor | None:
        self.look_up(super().negatives(batch, batch_idx))
        return None

    def on_after_backward(self) -> None:
        self.clip_gradients(self.optimizers().optimizer)


def _several_lookups(kind: str, optimizer: str, **options: Any) -> list[Run]:
    """Under "ddp", there also almost without clipping, and under "freescale"."""
    runs = []
    for make, limit in ((DDPStrategy, 0.03), (DDPStrategy, 1e6), (FreeScaleStrategy, 0.03)):
        lazy = make is DDPStrategy and optimizer == "adam"
        module = {**KINDS, "ClipsTwice": ClipsTwice}[kind]("lazy_adam" if lazy else optimizer)
        strategy, world = make(find_unused_parameters=True), int(os.environ["WORLD_SIZE"])
        fitting = trainer(strategy=strategy, devices=world, gradient_clip_val=limit, max_epochs=2, **options)
        fitting.fit(module, loader(int(os.environ["RANK"]), 9))
        runs.append(Run(module.losses, fitting._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]))
    return runs


@pytest.mark.parametrize(
    ("kind", "optimizer", "options"),
    [
        ("ThreeLookups", "adam", {}),
        ("Conditional", "adam", {}),
        ("Drawn", "adam", {}),
        ("Drawn", "adagrad", {"accumulate_grad_batches": 2}),
        ("OnSomeRanks", "adagrad", {}),
        ("NothingOnSomeRanks", "adagrad", {"accumulate_grad_batches": 2}),
        ("Detaches", "adam", {}),
        ("ClipsTwice", "adagrad", {}),
        ("ThreeLookups", "adam", {"gradient_clip_algorithm": "value"}),
    ],
)
def test_several_lookups_in_a_step(kind: str, optimizer: str, options: dict[str, Any]) -> None:
    for ddp, _, mine in (ranks := run_distributed(_several_lookups, 2, kind, optimizer, **options)):
        assert mine.losses == pytest.approx(ddp.losses, rel=1e-6, abs=1e-6)
    ddp, unclipped, mine = ranks[0]
    assert_same(mine.weights, ddp.weights, rtol=1e-6, atol=1e-6)
    assert _differ(ddp, unclipped, "items"), "nothing was clipped"


class OwnOptimizers(CountingModel):
    """Its tables are updated during backward, wherever it trains, and so before anything is clipped."""

    def __init__(self) -> None:
        super().__init__()
        apply_optimizer_in_backward(torch.optim.SGD, self.net.embeddings.parameters(), {"lr": 0.5})

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_grad_norm_(self.parameters(), 0.04)


@pytest.mark.parametrize("options", [BY_NORM, BY_VALUE], ids=["norm", "value"])
def test_tables_that_are_in_no_optimizer_stay_as_they_are(options: dict[str, Any]) -> None:
    """DDP cannot have optimizers in backward without a GPU."""
    _assert_as_ddp(run_distributed(_against_ddp, 1, [OwnOptimizers], reference="auto", **options))


# -- the dense part alone


class ClipsHidden(CountingModel):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_grad_norm_(self.net.hidden.parameters(), 0.03)


def _dense_alone() -> list[Run]:
    def dense(**options: Any) -> FreeScaleStrategy:
        return FreeScaleStrategy(clip="dense", **options)

    option = {"gradient_clip_val": 0.03}
    return [
        *(_fit(lambda: CountingModel("sgd"), strategy, **option) for strategy in (dense(), dense(overlap=False))),
        *(_fit(lambda: ClipsHidden("sgd"), strategy) for strategy in (dense(), "ddp")),
        _fit(lambda: CountingModel("sgd"), "ddp", **option),
    ]


def test_the_dense_part_alone_on_request() -> None:
    """It is what a hook does that clips the dense parameters by their names."""
    *mine, ddp, together = run_distributed(_dense_alone, 2)[0]
    for run in mine:
        assert run.losses == pytest.approx(ddp.losses, rel=1e-6)
        assert_same(run.weights, ddp.weights, rtol=1e-6, atol=1e-6)
    assert _differ(ddp, together) and _differ(ddp, together, "hidden")


# -- what hooks do


class Hook(CountingModel):
    """Does something between backward and the optimizer step."""

    def __init__(self, act: Callable[[L.LightningModule, Any], Any]) -> None:
        super().__init__("sgd")
        self.act = act

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.act(self, optimizer)


class AfterBackward(Hook):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def on_after_backward(self) -> None:
        self.act(self, self.optimizers().optimizer)


class InCallback(L.Callback):
    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        clip_grad_norm_(module.parameters(), 1.0)


class ChangesValue(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.gradient_clip_val = None


class LooksUpBetween(CountingModel):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.net(batch["features"]).sum().backward()


class WeightedMean(CountingModel):
    """Bags that only TorchRec pools."""

    def __init__(self) -> None:
        super().__init__("sgd")
        config = EmbeddingBagConfig(name="bag", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["history"])
        config.pooling = PoolingType.MEAN
        self.bags = EmbeddingBagCollection(tables=[config], is_weighted=True)


def _with_norm(module: L.LightningModule, optimizer: Any) -> None:
    parameters = list(module.parameters())
    clip_grads_with_norm_(parameters, 1.0, get_total_norm([p.grad for p in parameters if p.grad is not None]))


def _error(make: Callable[[], CountingModel], strategy: Any = "freescale", **options: Any) -> str:
    try:
        _fit(make, strategy, **options)
    except ValueError as error:
        return str(error)
    return "nothing"


TORCHS = r"sees the gradients of the dense part alone"
NOT_KEPT = r"the gradients of the embedding tables are not kept until here"


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: Hook(lambda m, _: clip_grad_norm_(m.parameters(), 1.0)), {}, f"clip_grad_norm_(parameters, 1.0) {TORCHS}"),
        (lambda: Hook(lambda m, _: clip_grad_value_(m.parameters(), 1.0)), {}, f"clip_grad_value_(parameters, 1.0) {TORCHS}"),
        (lambda: Hook(_with_norm), {}, f"clip_grads_with_norm_(parameters, 1.0) {TORCHS}"),
        (lambda: Hook(lambda _, o: clip_grad_norm_(o.param_groups[0]["params"], 1.0)), {}, TORCHS),
        (lambda: Hook(lambda m, o: clip_grad_norm_(m.trainer.precision_plugin.main_params(o), 1.0)), BY_NORM, TORCHS),
        (lambda: AfterBackward(lambda m, _: clip_grad_norm_(m.parameters(), 1.0)), BY_VALUE, TORCHS),
        (CountingModel, {"callbacks": [InCallback()]}, TORCHS),
        (lambda: Hook(lambda m, o: m.clip_gradients(o, 1.0)), {}, NOT_KEPT),
        (lambda: Hook(lambda m, o: m.clip_gradients(o, 1.0, "value")), {}, NOT_KEPT),
        (lambda: AfterBackward(lambda m, o: m.clip_gradients(o)), {**BY_NORM, "accumulate_grad_batches": 2}, NOT_KEPT),
        (lambda: AfterBackward(lambda m, o: m.clip_gradients(o)), {**BY_VALUE, "accumulate_grad_batches": 2}, NOT_KEPT),
        (CountingModel, {**BY_VALUE, "callbacks": [ChangesValue()]}, "was changed during training, to gradient_clip_val=None"),
        (LooksUpBetween, BY_NORM, "looked up outside of a step, with gradients, which are clipped in steps only"),
        (LooksUpBetween, BY_VALUE, "looked up outside of a step, with gradients, which are clipped in steps only"),
        (WeightedMean, BY_NORM, "Trainer(gradient_clip_val=0.05): collections ['bags'] are updated during backward"),
        (ByHook, {"strategy": FreeScaleStrategy(overlap=False)}, "ByHook.configure_gradient_clipping: collections ['net.emb"),
        (
            lambda: Hook(lambda m, o: m.clip_gradients(o, 1.0)),
            {"strategy": FreeScaleStrategy(overlap=False)},
            NOT_KEPT,
        ),
    ],
)
def test_refused(make: Any, options: dict[str, Any], message: str) -> None:
    for told in run_distributed(_error, 2, make, **options):
        assert message in told
        assert "clip_gradients" in told or "clip='dense'" in told


def _log_norms(module: L.LightningModule, optimizer: Any) -> None:
    total = clip_grad_norm_(module.parameters(), math.inf)
    assert float(grad_norm(module, 2)["grad_2.0_norm_total"]) == pytest.approx(float(total), abs=1e-3)


def _add_noise(module: L.LightningModule, optimizer: Any) -> None:
    for parameter in module.net.hidden.parameters():
        parameter.grad.add_(0.01)
    clip_grad_norm_([module.net.hidden[0].weight], 0.02)


@pytest.mark.parametrize("act", [_log_norms, _add_noise])
def test_hooks_may_look_at_gradients_and_change_dense_ones(act: Any) -> None:
    _assert_as_ddp(run_distributed(_against_ddp, 2, [lambda: Hook(act)]))


def _torchs_own(strategy: Any) -> list[Any]:
    functions = clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_
    before = [function.__closure__ and function.__closure__[0].cell_contents for function in functions]
    _fit(lambda: CountingModel("sgd"), strategy, **BY_NORM)
    return [function.__closure__[0].cell_contents is one for function, one in zip(functions, before)]


def test_torchs_functions_are_their_own_again() -> None:
    assert run_distributed(_torchs_own, 1, "freescale") == [[True] * 3]
