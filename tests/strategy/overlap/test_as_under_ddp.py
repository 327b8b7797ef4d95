"""Windows of batches, clipping of the dense part and the tables together, and hot rows: equal to "ddp", or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from lightning.pytorch.utilities import grad_norm
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torchrec.optim import apply_optimizer_in_backward

from lightning_freescale.testing import run_distributed
from lightning_freescale.training import setup
from tests.helpers import overlap_modules as modules
from tests.helpers import overlap_training as training
from tests.helpers.managed_tables import managed_collection
from tests.helpers.overlap_training import PLAIN, Case, CountingModel, Run, departures, fit_all, my_loader, not_refused
from tests.helpers.recommender import OPTIMIZERS

STEPS, WINDOWS = 5, 7  # the last window of an epoch of WINDOWS is shorter
BY_NORM = {"gradient_clip_val": 0.05}
BY_VALUE = {"gradient_clip_val": 0.005, "gradient_clip_algorithm": "value"}
ACCUMULATED = {"losses": (1e-5, 1e-12), "weights": (1e-4, 1e-6), "states": (1e-4, 1e-6), "moves": 1.2}
CLIPPED = {"losses": (1e-6, 1e-12), "weights": (1e-6, 1e-6), "states": (1e-5, 1e-7)}


def windows(make: Any = CountingModel, loader: Any = lambda: my_loader(WINDOWS), **rest: Any) -> Case:
    options = {"accumulate_grad_batches": 3, **rest.pop("options", {})}
    return Case(make, loader, options, ahead=rest.pop("ahead", (2 * WINDOWS - 3, 3, 0)), **rest)


ACCUMULATING = {
    **{name: windows(partial(CountingModel, name), options={"accumulate_grad_batches": 2}) for name in OPTIMIZERS},
    "other windows in every epoch": windows(
        partial(CountingModel, "rowwise_adagrad"),
        options={"accumulate_grad_batches": 1, "callbacks": lambda: [GradientAccumulationScheduler({0: 3, 1: 2})]},
    ),
    "a learning rate for every step": windows(modules.Schedules, options={"reload_dataloaders_every_n_epochs": 1}),
    "validation inside a window": windows(options={"val_check_interval": 2}, validation=lambda: my_loader(2)),
    # Lightning forgets the gradients that wait for a step then
    "an epoch cuts a window short": windows(modules.CutsShort, ahead=None),
}


def test_windows_as_under_ddp() -> None:
    ranks = run_distributed(fit_all, 2, ACCUMULATING, "ddp", {})
    assert departures(ACCUMULATING, ranks, **ACCUMULATED) == []
    statistics = [dedup.statistics for runs in ranks for _, dedup in runs.values()]
    assert all(counted["rows"] < counted["tokens"] for counted in statistics), "each row once"


# -- clipping


def _differ(one: Run, other: Run, part: str = "embeddings") -> bool:
    names = [name for name in one.weights if part in name]
    return bool(names) and all((one.weights[name] - other.weights[name]).abs().max() > 1e-4 for name in names)


class WithLargeEps(CountingModel):
    """Uses Adagrad with an eps far above the rounding of gradients that cancel.

    The rounding is about 1e-9 and changes a weight by lr / eps times as much, a tenth of the tolerance.
    """

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        for group in optimizer.param_groups:
            group.update({"eps": 1e-3} if isinstance(optimizer, torch.optim.Adagrad) else {})
        return optimizer


def clipping(make: Any, change: Any = dict, ahead: Any = (STEPS - 2, 2, 0), **options: Any) -> Case:
    loader = partial(training.changed_loader, STEPS, change)
    return Case(make, loader, {"max_epochs": 1, **options}, ahead=ahead)


def _every_optimizer(**options: Any) -> dict[str, Case]:
    return {name: clipping(partial(WithLargeEps, name), **options) for name in OPTIMIZERS}


@pytest.mark.parametrize(("clip", "accumulated"), [(BY_NORM, 2), (BY_VALUE, 1)])
def test_as_under_ddp(clip: dict[str, Any], accumulated: int) -> None:
    cases, unclipped = (_every_optimizer(**each, accumulate_grad_batches=accumulated) for each in (clip, {}))
    runs = run_distributed(fit_all, 2, cases, "ddp", {}, {"dedup": False})
    assert departures(cases, runs, **CLIPPED) == []
    others = run_distributed(fit_all, 2, unclipped, "ddp")[0]
    assert all(_differ(runs[0][name][0], others[name][0]) for name in cases), "nothing was clipped"


class ByHook(CountingModel):
    """Clips by value, by norm, by both, or not at all, with other limits in every step."""

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        if self.global_step % 4 in (0, 2):
            self.clip_gradients(optimizer, 0.003 + 0.001 * self.global_step, "value")
        if self.global_step % 4 in (1, 2):
            self.clip_gradients(optimizer, 0.02 + 0.01 * self.global_step, "norm")


class WithTags(modules.TwoCollections, modules.Schedules):
    """Has two collections, and a learning rate for every step."""


def _frozen(make: type[CountingModel], optimizer: str = "adagrad") -> CountingModel:
    module = make(optimizer)
    module.net.embeddings.embeddings["item"].weight.requires_grad_(False)
    return module


class FreezesBetween(CountingModel):
    """Trains one table from the third step on, and the other until the fourth."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.net.embeddings.embeddings["item"].weight.requires_grad_(True)
        if batch_idx == 3:
            self.net.embeddings.embeddings["cat"].weight.requires_grad_(False)


class Reads(CountingModel):
    """Reads the whole state between backward and the optimizer step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        state = self.trainer.strategy.lightning_module_state_dict()
        if self.global_rank == 0:
            self.losses.append(sum(float(value.double().square().sum()) for value in state.values()))


class OwnOptimizers(CountingModel):
    """Has tables that are updated during backward under any strategy, before clipping."""

    def __init__(self) -> None:
        super().__init__()
        apply_optimizer_in_backward(torch.optim.SGD, self.net.embeddings.parameters(), {"lr": 0.5})

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_grad_norm_(self.parameters(), 0.04)


class Acts(CountingModel):
    """Calls a function in a hook: by default between backward and the optimizer step."""

    def __init__(self, act: Callable[..., Any], hook: str = "on_before_optimizer_step") -> None:
        super().__init__("sgd")
        setattr(self, hook, partial(act, self))


def _log_norms(module: L.LightningModule, optimizer: Any) -> None:
    total = clip_grad_norm_(module.parameters(), math.inf)
    assert float(grad_norm(module, 2)["grad_2.0_norm_total"]) == pytest.approx(float(total), abs=1e-3)


def _add_noise(module: L.LightningModule, optimizer: Any) -> None:
    for parameter in module.net.hidden.parameters():
        parameter.grad.add_(0.01)
    clip_grad_norm_([module.net.hidden[0].weight], 0.02)


CLIPPING = {
    "hook, windows": clipping(ByHook, accumulate_grad_batches=2),
    "two collections by norm": clipping(WithTags, modules.with_tags, ahead=(2 * STEPS - 4, 4, 0), **BY_NORM),
    "a frozen table": clipping(partial(_frozen, CountingModel), **BY_NORM),
    "a step after the closure": clipping(modules.StepsAfterClosure, **BY_NORM),
    "reads, windows": clipping(Reads, **BY_NORM, accumulate_grad_batches=2),
    "cut short": clipping(modules.CutsShort, ahead=None, **BY_NORM, accumulate_grad_batches=3, max_epochs=2),
    "a hook finds norms": clipping(partial(Acts, _log_norms)),
    "a hook changes dense gradients": clipping(partial(Acts, _add_noise)),
}
# on several ranks DDP does not reduce what was frozen when it was made, and Lightning allows no step without a loss
ON_ONE_RANK = {
    "frozen for a time, by value": clipping(partial(_frozen, FreezesBetween, "sgd"), **BY_VALUE),
    "steps without a loss": clipping(partial(modules.Skips, "sgd"), **BY_NORM),
    "frozen for a time, by norm": clipping(partial(_frozen, FreezesBetween, "sgd"), **BY_NORM),
    "tables in no optimizer, by value": clipping(OwnOptimizers, **BY_VALUE),
}


@pytest.mark.parametrize(("ranks", "cases"), [(2, CLIPPING), (1, ON_ONE_RANK)])
def test_in_all_ways_as_under_ddp(ranks: int, cases: dict[str, Case]) -> None:
    assert training.compared(ranks, cases, "ddp" if ranks > 1 else "auto", {}, **CLIPPED) == []


def test_without_overlap_as_under_ddp() -> None:
    """Check that without lookahead the exchange runs where the model waits for it, and predicts nothing."""
    never = (0, 2 * WINDOWS, 0)
    cases = {
        "windows": windows(ahead=never),
        "evaluation between steps": windows(modules.Evaluates, ahead=never),
        "two collections, clipped": clipping(WithTags, modules.with_tags, ahead=(0, 2 * STEPS, 0), **BY_NORM),
    }
    ranks = run_distributed(fit_all, 2, cases, "ddp", {"overlap": False})
    assert departures(cases, ranks, **ACCUMULATED) == []
    assert not any(run.warnings for runs in ranks for _, run in runs.values() if training.notices(run))


# -- refused


UNSETS_LIMIT = LambdaCallback(on_train_batch_end=lambda trainer, *_: setattr(trainer, "gradient_clip_val", None))


def _look_up_between(module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    module.net(batch["features"]).sum().backward()


class WithManaged(CountingModel):
    """Has other tables whose rows TorchRec exchanges."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.managed = managed_collection()


class SkipsSteps(CountingModel):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure)
        else:
            closure()


def _with_norm(module: L.LightningModule, optimizer: Any) -> None:
    parameters = list(module.parameters())
    clip_grads_with_norm_(parameters, 1.0, get_total_norm([p.grad for p in parameters if p.grad is not None]))


def refused(make: Any, *error: str, overlap: Any = None, **options: Any) -> Case:
    return Case(make, lambda: my_loader(STEPS), options, overlap=overlap or {}, error=["ValueError", *error])


def by_torch(act: Any, function: str = "clip_grad_norm_", *hook: str, **options: Any) -> Case:
    """Clips with torch's function, which would clip only the dense part, by a limit of 1."""
    return refused(partial(Acts, act, *hook), f"{function}(parameters, 1.0)", "gradient_clip_val", **options)


def later(make: Any, *error: str, **options: Any) -> Case:
    return refused(make, *error, accumulate_grad_batches=2, **options)


AFTER = "on_after_backward"
BETWEEN = partial(Acts, lambda module: module.clip_gradients(module.optimizers().optimizer), AFTER)
NORM = partial(Acts, lambda module, optimizer: module.clip_gradients(optimizer, 1.0))
VALUE = partial(Acts, lambda module, optimizer: module.clip_gradients(optimizer, 1.0, "value"))
LOOKS_UP = partial(Acts, _look_up_between, "on_train_batch_end")
SCHEDULER: dict[str, Any] = {"callbacks": lambda: [GradientAccumulationScheduler({1: 2})]}
REFUSED = {
    "norm": by_torch(lambda module, _: clip_grad_norm_(module.parameters(), 1.0)),
    "value": by_torch(lambda module, _: clip_grad_value_(module.parameters(), 1.0), "clip_grad_value_"),
    "with norm": by_torch(_with_norm, "clip_grads_with_norm_"),
    "a group": by_torch(lambda _, optimizer: clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0), **BY_NORM),
    "later": by_torch(lambda module: clip_grad_norm_(module.parameters(), 1.0), "clip_grad_norm_", AFTER, **BY_VALUE),
    "Lightning's, norm": refused(NORM, "gradient_clip_val=1.0", "'norm'"),
    "Lightning's, value": refused(VALUE, "gradient_clip_val=1.0", "'value'"),
    "Lightning's, without overlap": refused(NORM, "gradient_clip_val=1.0", overlap=PLAIN),
    "inside a window, norm": later(BETWEEN, "gradient_clip_val=0.05", **BY_NORM),
    "inside a window, value": later(BETWEEN, "gradient_clip_val=0.005", **BY_VALUE),
    "a limit that changes": refused(CountingModel, "gradient_clip_val=None", callbacks=lambda: [UNSETS_LIMIT], **BY_VALUE),
    "a lookup between steps": refused(LOOKS_UP, "'net.embeddings'", "outside of a training step"),
    "managed collisions": refused(WithManaged, "gradient_clip_val=0.05", "['managed']", **BY_NORM),
    "a hook without overlap": refused(ByHook, "ByHook.configure_gradient_clipping", "['net.embeddings']", overlap=PLAIN),
    "windows of managed collisions": later(WithManaged, "accumulate_grad_batches=2", "['managed']"),
    "windows without overlap": later(CountingModel, "accumulate_grad_batches=2", "['net.embeddings']", overlap=PLAIN),
    "windows later": refused(CountingModel, "GradientAccumulationScheduler", "net.embed", overlap=PLAIN, **SCHEDULER),
    "windows by hand": refused(SkipsSteps, "optimizer.step(closure)"),
}


def test_refused() -> None:
    assert not_refused(2, REFUSED) == []


def _torchs_own() -> list[Any]:
    functions = clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_
    before = [function.__closure__ and function.__closure__[0].cell_contents for function in functions]
    clipping(CountingModel, **BY_NORM).fit({})
    return [function.__closure__[0].cell_contents is one for function, one in zip(functions, before)]


def test_torchs_functions_are_their_own_again() -> None:
    assert run_distributed(_torchs_own, 1) == [[True] * 3]


# -- hot rows; on several nodes they are in the random cases


def _on_one_node() -> tuple[list[str], float]:
    messages: list[str] = []
    setup.rank_zero_info = messages.append
    run = Case(options={"max_epochs": 1}).fit({"hot_rows": 0.5})
    return messages, run.statistics["cross_node_bytes"]


def test_hot_rows_have_no_effect_on_one_node() -> None:
    for messages, crossed in run_distributed(_on_one_node, 2):
        assert sum("hot_rows=0.5 has no effect" in text and "num_nodes=1" in text for text in messages) == 1
        assert crossed == 0
