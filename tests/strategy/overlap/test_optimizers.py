"""Optimizers of tables equal "ddp" if every row is in every batch: Adam, options that change, and frozen tables."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_freescale.testing import run_distributed
from tests.helpers import overlap_modules as modules
from tests.helpers import overlap_training as training
from tests.helpers.overlap_training import PLAIN, Case, CountingModel, Run, departures, fit_all, not_refused
from tests.helpers.recommender import CATEGORIES, DIM, ITEMS, collate

SAMPLES, STEPS = 14, 6  # of a global batch
ADAM = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6}
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.3),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "rowwise_adagrad": partial(RowWiseAdagrad, lr=0.1),
    "adam": partial(torch.optim.Adam, **ADAM),
    "adamw": partial(torch.optim.AdamW, **ADAM, weight_decay=0.1),
}
CLOSE = {"losses": (1e-5, 1e-12), "weights": (1e-4, 1e-6), "states": (1e-4, 1e-7)}


def every_row_loader(steps: int) -> DataLoader:
    """Return this rank's batches. Some rank looks up every row in each, so torch's dense updates equal those of rows."""
    rank, share, batches = int(os.environ["RANK"]), SAMPLES // int(os.environ["WORLD_SIZE"]), []
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        items = torch.cat([torch.randperm(ITEMS, generator=draw), torch.randint(0, ITEMS, (20,), generator=draw)])
        categories = torch.cat([torch.randperm(CATEGORIES, generator=draw), torch.randint(0, CATEGORIES, (1,), generator=draw)])
        candidates, labels = torch.randint(0, ITEMS, (SAMPLES,), generator=draw), torch.rand(SAMPLES, generator=draw)
        columns = (torch.arange(SAMPLES), items.tensor_split(SAMPLES), candidates, categories, labels)
        samples = [dict(zip(("index", "history", "candidate", "category", "label"), each)) for each in zip(*columns)]
        batches.append(collate(samples[rank * share : (rank + 1) * share]))
    return DataLoader(batches, batch_size=None)


def every_row(make: Callable[[], Any], batches: int = STEPS, **rest: Any) -> Case:
    return Case(make, lambda: every_row_loader(batches), {"max_epochs": 1, **rest.pop("options", {})}, **rest)


class OfKind(CountingModel):
    def configure_optimizers(self) -> Any:
        return KINDS[self.optimizer](self.parameters())


class InGroups(CountingModel):
    def configure_optimizers(self) -> Any:
        item = [p for name, p in self.named_parameters() if "item" in name]
        return KINDS[self.optimizer]([{"params": item}, {"params": [p for p in self.parameters() if p is not item[0]]}])


CHANGES: dict[str, dict[str, Any]] = {
    "sgd": {"lr": lambda step: 0.3 / (1 + step)},
    "adagrad": {"lr": lambda step: 0.1 / (1 + step), "eps": lambda step: 0.02 * step},
    "rowwise_adagrad": {"lr": lambda step: 0.1 / (1 + step), "eps": lambda step: 0.02 * step},
    "adam": {"betas": lambda step: (0.9 - 0.1 * step, 0.999 - 0.05 * step), "eps": lambda step: 1e-8 + 0.02 * step},
    "adamw": {"betas": lambda step: (0.9 - 0.1 * step, 0.999 - 0.05 * step), "weight_decay": lambda step: 0.3 * step},
}


class Changes(InGroups):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for index, group in enumerate(self.trainer.optimizers[0].param_groups):
            group.update({name: change(max(batch_idx - index, 0)) for name, change in CHANGES[self.optimizer].items()})


CHANGING = {kind: every_row(partial(Changes, kind)) for kind in KINDS}
ADAMS = {
    "adam": every_row(partial(OfKind, "adam"), options={"max_epochs": 2}, ahead=(12 - 3, 3, 0)),
    **{f"{kind}, windows": every_row(partial(OfKind, kind), options={"accumulate_grad_batches": 4}) for kind in KINDS},
}


class Skips(modules.Skips, OfKind):
    """Has steps without a loss, which are not updates."""


@pytest.mark.parametrize(
    ("ranks", "way", "cases"),
    [
        (2, {}, CHANGING),
        (2, PLAIN, {kind: case for kind, case in CHANGING.items() if "adam" not in kind}),
        (2, {}, ADAMS),
        (1, {}, {"skips": every_row(partial(Skips, "adam"))}),
    ],
    ids=["options", "options without overlap", "adam", "steps without a loss"],
)
def test_as_under_ddp(ranks: int, way: dict[str, Any], cases: dict[str, Case]) -> None:
    assert training.compared(ranks, cases, "ddp", way, **CLOSE) == []


class SetsLate(OfKind):
    def __init__(self, hook: str) -> None:
        super().__init__("adagrad")
        self.hook, self.step = hook, 0

    def _set(self, hook: str) -> None:
        self.step += hook == "training_step"
        if hook == self.hook:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.02 * (1 + self.step % 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._set("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss: Any) -> None:
        self._set("on_before_backward")

    def on_after_backward(self) -> None:
        self._set("on_after_backward")


def test_options_that_the_step_itself_sets() -> None:
    cases = {hook: every_row(partial(SetsLate, hook)) for hook in ("training_step", "on_before_backward")}
    assert training.compared(2, cases, "ddp", {}, **CLOSE) == []
    error = ["ValueError", "parameter group 0", "after backward", "'lr'", "before backward"]
    assert not_refused(2, {"later": every_row(partial(SetsLate, "on_after_backward"), error=error, steps=1)}) == []


class Sets(InGroups):
    def __init__(self, kind: str, name: str, value: Any) -> None:
        super().__init__(kind)
        self.option = {name: value}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.trainer.optimizers[0].param_groups[1].update(self.option)


REFUSED = {
    f"{kind}, {name}": every_row(
        partial(Sets, kind, name, value),
        error=["ValueError: parameter group 1 of ", "'net.embeddings.embeddings.cat.weight'", name, repr(was), repr(value)],
        steps=3,
    )
    for kind, name, was, value in [
        ("sgd", "momentum", 0, 0.9),
        ("sgd", "weight_decay", 0, 0.1),
        ("adagrad", "lr_decay", 0, 0.1),
        ("rowwise_adagrad", "maximize", False, True),
        ("adam", "weight_decay", 0, 0.1),
        ("adamw", "amsgrad", False, True),
    ]
}


@pytest.mark.parametrize("way", [{}, PLAIN])
def test_what_tables_cannot_follow_is_refused_before_the_step(way: dict[str, Any]) -> None:
    assert not_refused(2, {name: case for name, case in REFUSED.items() if way == {} or "adam" not in name}, way) == []


# -- an optimizer of the tables' own


class InBackward(CountingModel):
    def __init__(self, **more: Any) -> None:
        super().__init__("adam")
        apply_optimizer_in_backward(torch.optim.Adam, self.net.embeddings.parameters(), {**ADAM, **more})

    def configure_optimizers(self) -> Any:
        return KINDS["adam"](self.net.hidden.parameters())


def _in_backward() -> dict[str, list[Run]]:
    return {"adam": [replace(Case(make).fit({}), states=[]) for make in (partial(OfKind, "adam"), InBackward)]}


def test_adam_in_backward_is_that_of_one_optimizer() -> None:
    assert departures({"adam": Case()}, run_distributed(_in_backward, 2)) == []


def test_arguments_that_are_not_followed_are_refused() -> None:
    cases = {
        name: every_row(partial(InBackward, **{name: True}), 2, error=["ValueError", f"Adam({name}=True)", "'net"])
        for name in ("amsgrad", "maximize")
    }
    assert not_refused(1, cases) == []


# -- tables that are frozen and unfrozen while training: as in the unsharded module, which one rank trains

LONGER, UNSHARDED, UNUSED = 7, "ddp_find_unused_parameters_true", {"find_unused_parameters": True}
ITEM, CAT = (f"net.embeddings.embeddings.{name}" for name in ("item", "cat"))
BEFORE_STEPS = {
    "one by one": {0: (CAT, False), 2: (ITEM, True), 3: (CAT, True), 5: (ITEM, False)},
    "together": {2: ("net.embeddings", True), 4: ("net", False), 5: ("net", True)},
}


def _without(module: Any, *paths: str) -> Any:
    for path in paths:
        module.get_submodule(path).requires_grad_(False)
    return module


class Freezes(OfKind):
    """Begins with some frozen tables, and freezes and unfreezes tables before some steps."""

    def __init__(self, kind: str, how: str) -> None:
        super().__init__(kind)
        self.how = how
        _without(self, ITEM if how == "one by one" else "net.embeddings")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx in BEFORE_STEPS[self.how]:
            path, trained = BEFORE_STEPS[self.how][batch_idx]
            self.get_submodule(path).requires_grad_(trained)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.requires_grad else loss.detach().requires_grad_()  # if all is frozen


class FreezesGroups(InGroups, Freezes):
    """Return a parameter group for each table."""


class Unfreezes(BaseFinetuning):
    """Freezes as Lightning's callback does: before training, with a group of its own from an epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net.embeddings)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net.embeddings, optimizer, lr=0.05)


class OnlyTrainable(CountingModel):
    def configure_optimizers(self) -> Any:
        return KINDS[self.optimizer]([p for p in self.parameters() if p.requires_grad])


class Bags(OfKind):
    """Has a table on each of two ranks; the first is frozen until the third step, and both from the fifth on."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=ITEMS, embedding_dim=DIM, feature_names=[feature])
            for name, feature in (("item", "history"), ("other", "candidate"))
        ]
        self.net = nn.ModuleDict({"bags": EmbeddingBagCollection(tables=tables), "out": nn.Linear(2 * DIM, 1, bias=False)})
        self.net.bags.embedding_bags["item"].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.net.bags.embedding_bags["item"].requires_grad_(True)
        if batch_idx == 5:
            self.net.bags.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.net.out(self.net.bags(batch["features"]).values())[:, 0] - batch["label"]).square().mean()
        self.losses.append(loss.item())
        return loss


def frozen(make: Callable[..., Any], *arguments: Any, **rest: Any) -> Case:
    return every_row(partial(make, *arguments), LONGER, **rest)


FINETUNED = {"max_epochs": 2, "callbacks": lambda: [Unfreezes()]}
FUSED = ("sgd", "adagrad", "rowwise_adagrad")
OVERLAPPED = {
    **{f"{kind}, one by one": frozen(Freezes, kind, "one by one") for kind in KINDS},
    **{f"{kind}, together": frozen(Freezes, kind, "together") for kind in ("rowwise_adagrad", "adam")},
    "added to SGD": frozen(OnlyTrainable, "sgd", options=FINETUNED),
    "adagrad, unfrozen by the callback": frozen(OfKind, "adagrad", options=FINETUNED),
    "adam, unfrozen by the callback": frozen(OfKind, "adam", options=FINETUNED),
}
NOT_OVERLAPPED = {
    **{f"{kind}, one by one": frozen(FreezesGroups, kind, "one by one") for kind in FUSED},
    **{f"{kind}, bags": frozen(Bags, kind) for kind in ("sgd", "rowwise_adagrad")},
    "adagrad, together": frozen(Freezes, "adagrad", "together"),
    "added to SGD": OVERLAPPED["added to SGD"],
    "adagrad, unfrozen by the callback": OVERLAPPED["adagrad, unfrozen by the callback"],
}


@pytest.mark.parametrize(("way", "cases"), [({}, OVERLAPPED), (PLAIN, NOT_OVERLAPPED)], ids=["overlap", "plain"])
def test_a_table_moves_while_it_is_not_frozen(way: dict[str, Any], cases: dict[str, Case]) -> None:
    ranks, (alone,) = run_distributed(fit_all, 2, cases, {**UNUSED, **way}), run_distributed(fit_all, 1, cases, UNSHARDED)
    pairs = {}
    for name in cases:
        losses = [sum(each) / 2 for each in zip(*(runs[name][0].losses for runs in ranks))]
        pairs[name] = [alone[name][0], replace(ranks[0][name][0], losses=losses)]
    assert departures(cases, [pairs], **CLOSE) == []


# -- refused


class Stuck(Freezes):
    """Has tables without updates by their optimizer."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net.hidden.parameters()}, {"params": self.net.embeddings.parameters(), "lr_decay": 0.1}]
        return torch.optim.Adagrad(groups, lr=0.1)


class OneOfTwo(OfKind):
    """Freezes one of two tables that FBGEMM updates together."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.get_submodule(ITEM).requires_grad_(batch_idx < 3)


REFUSED_TO_FREEZE = {
    "lr_decay": frozen(Stuck, "adagrad", "together", error=["cat.weight'", "requires_grad", "Adagrad(lr_decay=0.1)"], steps=2),
    "added to Adagrad": frozen(
        OnlyTrainable, "adagrad", options=FINETUNED, error=["group 1", "Adagrad", "'net.embeddings"], steps=LONGER
    ),
    "one of two": frozen(OneOfTwo, "adagrad", overlap=PLAIN, error=["item.weight']", "cat.weight']"], steps=3),
    "in a window": frozen(
        Freezes, "sgd", "one by one", options={"accumulate_grad_batches": 3}, error=["item.weight']", "requires_grad"], steps=2
    ),
}


def test_what_cannot_be_followed_is_refused_before_the_step() -> None:
    assert not_refused(2, REFUSED_TO_FREEZE, UNUSED) == []


# -- checkpoints


class UnfreezesLate(OfKind):
    """Freezes the item table in the first epoch, and the other one in the first two."""

    def on_train_epoch_start(self) -> None:
        self.get_submodule(ITEM).requires_grad_(self.current_epoch > 0)
        self.get_submodule(CAT).requires_grad_(self.current_epoch > 1)


def _changes_strategy(case: Case, path: Path) -> dict[str, list[Run]]:
    changes = {"to ddp": (UNUSED, UNSHARDED), "from ddp": (UNSHARDED, UNUSED), "resumed": (UNUSED, UNUSED)}
    return {name: training.continued(case, str(path / f"{name}.ckpt"), 8, *ways) for name, ways in changes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adagrad", "adam"])
def test_frozen_tables_go_on_from_a_checkpoint_of_either_strategy(kind: str, tmp_path: Path) -> None:
    case = frozen(UnfreezesLate, kind, options={"max_epochs": 3, "limit_train_batches": 4})
    (runs,) = run_distributed(_changes_strategy, 1, case, tmp_path)
    assert departures(dict.fromkeys(runs, case), [runs], **CLOSE) == []
