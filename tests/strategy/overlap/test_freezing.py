"""Tables that are frozen and unfrozen while training: as in the unsharded module, which one rank trains under "ddp"."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.checkpoint.test_resume import StopAt
from tests.helpers.overlap_training import CountingModel, Run, assert_same, fit
from tests.helpers.recommender import DIM, ITEMS
from tests.strategy.overlap.test_adam import every_row_loader
from tests.strategy.overlap.test_options import KINDS

STEPS = 7
UNSHARDED = "ddp_find_unused_parameters_true"
Act = Callable[[Any], Any]


def _table(module: Any, name: str) -> torch.nn.Parameter:
    return module.net.embeddings.embeddings[name].weight


BEFORE_STEPS: dict[str, dict[int, Act]] = {
    "one by one": {
        0: lambda module: _table(module, "cat").requires_grad_(False),
        2: lambda module: _table(module, "item").requires_grad_(True),
        3: lambda module: _table(module, "cat").requires_grad_(True),
        5: lambda module: _table(module, "item").requires_grad_(False),
    },
    "together": {
        2: lambda module: module.net.embeddings.requires_grad_(True),
        4: lambda module: module.net.requires_grad_(False),
        5: lambda module: module.net.requires_grad_(True),
    },
}
FROZEN_AT_FIRST = {"one by one": ["item"], "together": ["item", "cat"]}


class Freezes(CountingModel):
    """Begins with some tables frozen; freezes and unfreezes before some steps."""

    def __init__(self, kind: str, how: str) -> None:
        super().__init__(kind)
        self.how = how
        for table in FROZEN_AT_FIRST[how]:
            _table(self, table).requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx in BEFORE_STEPS[self.how]:
            BEFORE_STEPS[self.how][batch_idx](self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.requires_grad else loss.detach().requires_grad_()  # as where all is frozen

    def configure_optimizers(self) -> Any:
        return KINDS[self.optimizer](self.parameters())


class InGroups(Freezes):
    """A group for each table."""

    def configure_optimizers(self) -> Any:
        tables = [_table(self, "item"), _table(self, "cat")]
        return KINDS[self.optimizer]([*({"params": [table]} for table in tables), {"params": self.net.hidden.parameters()}])


class Unfreezes(BaseFinetuning):
    """Lightning's way: frozen before training, a group of their own from an epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net.embeddings)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net.embeddings, optimizer, lr=0.05)


class OnlyTrainable(CountingModel):
    """Its optimizer holds what is not frozen when training begins."""

    def configure_optimizers(self) -> Any:
        return KINDS[self.optimizer]([p for p in self.parameters() if p.requires_grad])


class Everything(CountingModel):
    """Its optimizer holds what is frozen, too."""

    def configure_optimizers(self) -> Any:
        return KINDS[self.optimizer](self.parameters())


class Bags(CountingModel):
    """Each rank of two holds a table; the first is frozen until the third step, and both from the fifth on."""

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

    def configure_optimizers(self) -> Any:
        return KINDS[self.optimizer](self.parameters())


Case = tuple[type[CountingModel], tuple[Any, ...], dict[str, Any]]
FINETUNED: list[Case] = [
    (OnlyTrainable, ("sgd",), {"callbacks": Unfreezes, "max_epochs": 2}),
    (Everything, ("adagrad",), {"callbacks": Unfreezes, "max_epochs": 2}),
    (Everything, ("adam",), {"callbacks": Unfreezes, "max_epochs": 2}),
]


def _fits(cases: list[Case], options: dict[str, Any] | None) -> list[Run]:
    runs = []
    for make, arguments, given in cases:
        torch.manual_seed(0)
        callbacks = [given["callbacks"]()] if "callbacks" in given else []
        strategy = UNSHARDED if options is None else FreeScaleStrategy(find_unused_parameters=True, **options)
        module = make(*arguments)
        runs.append(fit(module, every_row_loader(STEPS), strategy=strategy, **{**given, "callbacks": callbacks}))
    return runs


def _assert_as_unsharded(ranks: list[list[Run]], alone: list[Run]) -> None:
    for index, expected in enumerate(alone):
        both = [sum(losses) / len(ranks) for losses in zip(*(runs[index].losses for runs in ranks))]
        assert both == pytest.approx(expected.losses, rel=1e-5)
        assert_same(ranks[0][index].weights, expected.weights, rtol=1e-4, atol=1e-6)
        for mine, theirs in zip(ranks[0][index].states, expected.states):
            assert [group["params"] for group in mine["param_groups"]] == [g["params"] for g in theirs["param_groups"]]
            assert_same(mine["state"], theirs["state"], rtol=1e-4, atol=1e-7)


OVERLAPPED: list[Case] = [(Freezes, (kind, how), {}) for kind in KINDS for how in BEFORE_STEPS]
PLAIN: list[Case] = [
    (make, (kind, how), {})
    for kind in ("sgd", "adagrad", "rowwise_adagrad")
    for make, how in ((InGroups, "one by one"), (Freezes, "together"))
] + [(Bags, (kind,), {}) for kind in ("sgd", "adagrad", "rowwise_adagrad")]


@pytest.mark.parametrize(("options", "cases"), [({}, OVERLAPPED), ({"overlap": False}, PLAIN)])
def test_a_table_moves_while_it_is_not_frozen(options: dict[str, Any], cases: list[Case]) -> None:
    _assert_as_unsharded(run_distributed(_fits, 2, cases, options), run_distributed(_fits, 1, cases, None)[0])


@pytest.mark.parametrize("options", [{}, {"overlap": False}])
def test_finetuning_callbacks(options: dict[str, Any]) -> None:
    cases = FINETUNED if options == {} else FINETUNED[:2]
    _assert_as_unsharded(run_distributed(_fits, 2, cases, options), run_distributed(_fits, 1, cases, None)[0])


# -- refused


class Stuck(Freezes):
    """No update of a table follows its optimizer."""

    def configure_optimizers(self) -> Any:
        tables = [_table(self, "item"), _table(self, "cat")]
        return torch.optim.Adagrad([{"params": self.net.hidden.parameters()}, {"params": tables, "lr_decay": 0.1}], lr=0.1)


class OneOfTwo(Everything):
    """Freezes one table of two that FBGEMM updates together."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        _table(self, "item").requires_grad_(batch_idx < 3)


REFUSED: list[tuple[Case, dict[str, Any], str, int]] = [
    ((Stuck, ("adagrad", "together"), {}), {}, r"cat.weight' was set during training, but Adagrad\(lr_decay=0.1\)", 2),
    (
        (OnlyTrainable, ("adagrad",), {"callbacks": Unfreezes, "max_epochs": 2}),
        {},
        "parameter group 1 was added to Adagrad .* list the table in configure_optimizers",
        STEPS,
    ),
    (
        (OneOfTwo, ("adagrad",), {}),
        {"overlap": False},
        r"tables \['.*item.weight'\] are frozen .* and \['.*cat.weight'\] are not, but one kernel of FBGEMM",
        3,
    ),
    (
        (Freezes, ("sgd", "one by one"), {"accumulate_grad_batches": 3}),
        {},
        r"\['.*item.weight'\] were frozen or unfrozen \(requires_grad\) while gradients are accumulated",
        2,
    ),
]


def _refusals() -> list[tuple[str, int]]:
    found = []
    for (make, arguments, given), options, _, _ in REFUSED:
        module = make(*arguments)
        callbacks = [given["callbacks"]()] if "callbacks" in given else []
        strategy = FreeScaleStrategy(find_unused_parameters=True, **options)
        with pytest.raises(ValueError, match="table") as error:
            fit(module, every_row_loader(STEPS), strategy=strategy, **{**given, "callbacks": callbacks})
        found.append((str(error.value), len(module.losses)))
    return found


def test_what_cannot_be_followed_is_refused_before_the_step() -> None:
    for rank in run_distributed(_refusals, 2):
        for (told, done), (_, _, message, steps) in zip(rank, REFUSED):
            assert re.search(message, told), told
            assert done == steps


# -- checkpoints


def _changes_strategy(path: Path, kind: str, before: str, after: str) -> tuple[list[float], list[float], Run, Run]:
    """An epoch with frozen tables and two that unfreeze them, in one run of ``after``, and in two runs."""
    torch.manual_seed(0)
    options = {"max_epochs": 3, "limit_train_batches": 4}
    whole = fit(UnfreezesLate(kind), every_row_loader(STEPS), strategy=after, **options)
    torch.manual_seed(0)
    file = str(path / f"{kind}-{before}.ckpt")
    first = fit(UnfreezesLate(kind), every_row_loader(STEPS), strategy=before, callbacks=[StopAt(8, file)], **options)
    torch.manual_seed(7)
    second = fit(UnfreezesLate(kind), every_row_loader(STEPS), strategy=after, ckpt_path=file, **options)
    return whole.losses, first.losses + second.losses, whole, second


class UnfreezesLate(Everything):
    """Its item table is frozen in the first epoch, its other one in the first two."""

    def on_train_epoch_start(self) -> None:
        _table(self, "item").requires_grad_(self.current_epoch > 0)
        _table(self, "cat").requires_grad_(self.current_epoch > 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adagrad", "adam"])
def test_frozen_tables_go_on_from_a_checkpoint_of_either_strategy(kind: str, tmp_path: Path) -> None:
    sharded = "freescale_find_unused_parameters_true"
    for before, after in [(sharded, UNSHARDED), (UNSHARDED, sharded), (sharded, sharded)]:
        losses, parts, whole, second = run_distributed(_changes_strategy, 1, tmp_path, kind, before, after)[0]
        assert parts == pytest.approx(losses, rel=1e-5)
        assert_same(second.weights, whole.weights, rtol=1e-4, atol=1e-6)
        assert_same(second.states[0]["state"], whole.states[0]["state"], rtol=1e-4, atol=1e-7)


# -- the next fit


def _twice() -> tuple[list[bool], dict[str, Any], dict[str, Any]]:
    """What is frozen in the second fit of a module whose item table was frozen in the first, and its weights."""
    torch.manual_seed(0)
    module = Everything("adagrad")
    _table(module, "item").requires_grad_(False)
    first, second = (fit(module, every_row_loader(2), strategy="freescale") for _ in range(2))
    return [_table(module, name).requires_grad for name in ("item", "cat")], first.weights, second.weights


def test_a_frozen_table_is_frozen_in_the_next_fit() -> None:
    trained, first, second = run_distributed(_twice, 2)[0]
    assert trained == [False, True]
    item, cat = (f"net.embeddings.embeddings.{name}.weight" for name in ("item", "cat"))
    assert torch.equal(first[item], second[item])
    assert not torch.equal(first[cat], second[cat])
