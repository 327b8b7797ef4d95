"""Fits with a loss over all items of a table in shard=: all that a Trainer does, and uses that are refused."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.embeddings.overlap.row_updates import RowUpdates
from lightning_freescale.losses import catalogue_cross_entropy
from lightning_freescale.metrics import catalogue_ranks
from lightning_freescale.testing import run_distributed
from tests.checkpoint.test_resume_inside_a_window import SaveAfterBatches
from tests.helpers.catalogue_models import (
    CLOSE,
    DIM,
    ITEMS,
    LENGTH,
    OPTIMIZERS,
    SHARD,
    STEPS,
    NextItem,
    batches_of,
    case,
    loader,
    of,
)
from tests.helpers.fabric_loop import fabric_for
from tests.helpers.overlap_training import Case, assert_same, compared, continued, departures, fit, fit_all
from tests.helpers.recommender import REPEATS, trainer


class Tied(NextItem):
    """Its output layer has the weight of its embedding, and comes first."""

    def __init__(self, optimizer: str = "adagrad") -> None:
        super().__init__("last", optimizer)
        self.style = Tied.by_head
        emb = self.__dict__["_modules"].pop("item_emb")
        self.head = nn.Linear(DIM, ITEMS)
        self.item_emb, self.head.weight = emb, emb.weight

    def by_head(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(hidden).float()
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=0, reduction="sum")
        return loss / 9

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        hidden, targets = self.states(batch["items"][:, :-1]), batch["items"][:, -1]
        scores = self.head(hidden[:, -1])
        assert torch.cat([self.item_emb.weight, self.item_emb.weight[1:]]).shape == (2 * ITEMS - 1, DIM)
        scores.scatter_(1, batch["items"][:, :-1], -torch.inf)
        self.log("val_first", scores.topk(1).indices.float().mean(), sync_dist=True)
        self.losses.append(F.cross_entropy(scores[targets > 0], targets[targets > 0], reduction="sum").item())
        self.log("val_again", catalogue_cross_entropy(hidden[:, -1], self.item_emb, targets), sync_dist=True)


class TwoTables(NextItem):
    """Has another table, which is looked up first, and rows that are not known ahead."""

    def __init__(self, optimizer: str = "adagrad") -> None:
        super().__init__("linear", optimizer)
        self.place_emb = nn.Embedding(LENGTH, DIM)

    def states(self, items: Tensor) -> Tensor:
        rest = self.place_emb(torch.arange(items.shape[1])) + self.item_emb((items * 3 + 1) % ITEMS)
        return super().states(items) + rest


class OnlyTheHead(NextItem):
    def __init__(self) -> None:
        super().__init__("linear")
        self.dense = nn.Parameter(torch.randn(ITEMS, DIM))

    def states(self, items: Tensor) -> Tensor:
        return torch.tanh(self.hidden(self.dense[items]))


class Frozen(NextItem):
    def __init__(self) -> None:
        super().__init__("linear", "sgd")
        self.item_emb.weight.requires_grad_(False)


class FirstLater(NextItem):
    """Computes a loss over all items when rows are fetched ahead already, and not in every step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.trainer.global_step in (0, 1, 2, 4):
            loss = (self.states(batch["items"][:, :-1]) ** 2).sum() / 9
            self.losses.append(loss.item())
            return loss + 0.0 * self.bias.sum()
        return super().training_step(batch, batch_idx)


def with_options(**options: Any) -> Case:
    return case("linear", "sgd", options=options)  # Adagrad divides small gradients by themselves, and so their rounding


CASES = {
    "tied head": of(Tied),
    "tied head, adam": of(lambda: Tied("adam")),
    "validated": of(Tied, validation=loader, options={"val_check_interval": 2}),
    "windows": with_options(accumulate_grad_batches=2),
    "clipped by norm": with_options(gradient_clip_val=0.05),
    "clipped by value": with_options(gradient_clip_val=0.005, gradient_clip_algorithm="value"),
    "windows, clipped": with_options(accumulate_grad_batches=2, gradient_clip_val=0.05),
    "two tables": of(TwoTables, overlap={"shard": ["item_emb", "place_emb"]}),
    "only the head": of(OnlyTheHead),
    "frozen": of(Frozen),
    "later": of(lambda: FirstLater("linear", "sgd"), options={"max_epochs": 2}),
    "later, windows": of(lambda: FirstLater("linear", "sgd"), options={"max_epochs": 2, "accumulate_grad_batches": 2}),
    "split backward": case("linear", overlap={"split_backward": True}),
    "no overlap": case("linear", overlap={"overlap": False}),
    "without dedup": case("linear", overlap={"dedup": False}),
}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_as_under_ddp(ranks: int) -> None:
    assert compared(ranks, CASES, "ddp", SHARD, **CLOSE) == []


def _with_slow_updates(cases: dict[str, Case]) -> dict[str, list[Any]]:
    for name in ("take", "apply_held"):
        update = getattr(RowUpdates, name)
        setattr(RowUpdates, name, lambda *given, update=update, **options: (time.sleep(0.02), update(*given, **options)))
    return fit_all(cases, "ddp", SHARD)


def test_the_loss_sees_all_updates_of_the_steps_before() -> None:
    cases = {name: CASES[name] for name in ("later", "only the head")}
    assert departures(cases, run_distributed(_with_slow_updates, 2, cases), **CLOSE) == []


def _changes_over(path: Path, optimizer: str) -> dict[str, list[Any]]:
    case = of(lambda: Tied(optimizer), options={"max_epochs": 2})
    ways = {"resumed": (SHARD, SHARD), "to ddp": (SHARD, "ddp"), "from ddp": ("ddp", SHARD)}
    return {name: continued(case, str(path / f"{name}.ckpt"), STEPS, *each) for name, each in ways.items()}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_checkpoints_are_those_of_the_whole_weight(tmp_path: Path, optimizer: str) -> None:
    ranks = run_distributed(_changes_over, 2, tmp_path, optimizer)
    cases = dict.fromkeys(ranks[0], of(Tied))
    assert departures(cases, ranks, **CLOSE) == []
    loaded = Tied.load_from_checkpoint(tmp_path / "resumed.ckpt")
    assert loaded.head.weight is loaded.item_emb.weight
    state = torch.load(tmp_path / "resumed.ckpt")["state_dict"]
    assert state.keys() == Tied().state_dict().keys() and torch.equal(state["head.weight"], state["item_emb.weight"])


def _on_two_nodes(way: str, path: Path | None = None, save: int | None = None, resume: int | None = None) -> Any:
    """Two ranks of each node, with hot rows; windows of two batches."""
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), GROUP_RANK=str(rank // 2), LOCAL_WORLD_SIZE="2")
    strategy = "ddp" if way == "ddp" else FreeScaleStrategy(shard=["item_emb"], hot_rows=0.5, rerank_every_n_steps=1)
    torch.manual_seed(0)
    saving = [SaveAfterBatches(f"{path}/", () if save is None else (save,))]
    options = {"devices": 2, "num_nodes": 2, "accumulate_grad_batches": 2, "max_epochs": 1, "callbacks": saving}
    made, start = NextItem("linear", "sgd"), resume or 0
    batches = batches_of(rank)  # Lightning begins them anew where it resumes
    loader = DataLoader(batches[start:] + batches[:start], batch_size=None)
    return fit(made, loader, strategy=strategy, ckpt_path=None if resume is None else f"{path}/{resume}", **options)


def _with_hot_rows(path: Path) -> Any:
    return [_on_two_nodes("ddp"), _on_two_nodes("freescale", path, save=3), _on_two_nodes("freescale", path, resume=3)]


def test_hot_rows_and_a_resume_inside_a_window(tmp_path: Path) -> None:
    for ddp, whole, resumed in run_distributed(_with_hot_rows, 4, tmp_path):
        assert whole.losses == pytest.approx(ddp.losses, rel=1e-5)
        assert resumed.losses == pytest.approx(whole.losses[3:], rel=1e-6)
        assert_same(resumed.weights, whole.weights, rtol=1e-5, atol=1e-6)


class OfTorchRec(NextItem):
    """A module with an EmbeddingCollection. One of its tables has the items."""

    def __init__(self) -> None:
        super().__init__("ours")
        del self.item_emb
        shapes = {"again": (ITEMS, "item"), "item": (ITEMS, "item"), "other": (7, "other")}
        tables = [
            EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[feature])
            for name, (rows, feature) in shapes.items()
        ]
        self.ec = EmbeddingCollection(tables=tables)
        self.style = OfTorchRec.of_table

    def states(self, items: Tensor) -> Tensor:
        flat = items.reshape(-1)
        lengths = torch.tensor([len(flat), len(flat)])
        found = self.ec(KeyedJaggedTensor(["item", "other"], torch.cat([flat, flat % 7]), lengths=lengths))
        rows = found["item@item"].values() + found["item@again"].values() + found["other"].values()
        return torch.tanh(self.hidden(rows.view(*items.shape, DIM)))

    def of_table(self, hidden: Tensor, targets: Tensor) -> Tensor:
        options: Any = {"ignore_index": 0, "reduction": "sum"}
        return catalogue_cross_entropy(hidden, self.ec.embeddings["item"], targets, self.bias, **options) / 9


def test_a_table_of_torchrec() -> None:
    assert compared(2, {"of TorchRec": of(OfTorchRec)}, "ddp", {}, **CLOSE) == []


class Ranked(OfTorchRec):
    """Ranks targets among the items of both kinds of table; many scores are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.item_emb, self.losses = nn.Embedding(ITEMS, DIM), []
        with torch.no_grad():
            for weight in (self.item_emb.weight, self.ec.embeddings["item"].weight):
                weight.copy_(torch.randint(-1, 2, (ITEMS, DIM)))
        self.found: list[list[int]] = []

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        draw = torch.Generator().manual_seed(batch_idx)
        hidden = torch.randint(-1, 2, (len(batch["items"]), DIM), generator=draw).float()
        targets, seen = batch["items"][:, -1], batch["items"][:, :-1]
        for table in (self.item_emb, self.item_emb.weight, self.ec.embeddings["item"]):
            for known in (None, torch.where(seen > 3, seen, -1)):
                self.found.append(catalogue_ranks(hidden, table, targets, known).tolist())
        self.found.append(catalogue_ranks(hidden, self.item_emb.weight[1:], targets - 1, seen - 1).tolist())
        for table in (self.item_emb, self.ec.embeddings["item"]):
            self.found.append(catalogue_ranks(hidden, table, targets, seen, self.bias).tolist())


def _ranked(way: str) -> list[list[int]]:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model, strategy = Ranked(), "ddp" if way == "ddp" else FreeScaleStrategy(shard=["item_emb"])
    batches = [batch for batch in batches_of(rank, 2 + 2 * rank) if int(batch["items"][:, -1].min())]
    trainer(strategy=strategy, devices=ranks).validate(model, DataLoader(batches, batch_size=None), verbose=False)
    return model.found


@pytest.mark.parametrize("ranks", [1, 3])
def test_places_are_those_among_the_whole_scores(ranks: int) -> None:
    for whole, sharded in run_distributed(lambda: (_ranked("ddp"), _ranked("shard")), ranks):
        assert sharded == whole
        assert len({place for places in whole for place in places}) > 10


class Sequences(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"items": torch.randint(1, ITEMS, (LENGTH,), generator=torch.Generator().manual_seed(index))}


def _in_parts(parts: int) -> Any:
    torch.manual_seed(0)
    data = FreeScaleDataModule(Sequences(), [LENGTH] * 40, batch_size=8, micro_batches=parts, **REPEATS)
    return fit(NextItem("last", "sgd"), data, strategy=FreeScaleStrategy(shard=["item_emb"]), max_epochs=2).weights


def test_micro_batches() -> None:
    whole, parts = run_distributed(lambda: [_in_parts(parts) for parts in (1, 2)], 2)[0]
    assert_same(parts, whole, rtol=1e-4, atol=1e-6)


def _short(way: str) -> list[float]:
    strategy = "ddp" if way == "ddp" else FreeScaleStrategy(shard=["item_emb"])
    torch.manual_seed(0)
    return fit(Tied("sgd"), loader(), strategy=strategy, precision="bf16-mixed", max_epochs=2).losses


def test_in_bf16_mixed() -> None:
    for whole, sharded in run_distributed(lambda: (_short("ddp"), _short("shard")), 2):
        assert sharded == pytest.approx(whole, rel=2e-2) and sharded != whole


def _by_fabric(strategy: Any) -> list[float]:
    fabric = fabric_for(**({"strategy": "ddp"} if strategy == "ddp" else SHARD))
    torch.manual_seed(0)
    model = Tied()
    wrapped, optimizer = fabric.setup(model, OPTIMIZERS["adagrad"](model.parameters()))
    wrapped.mark_forward_method("training_step")
    losses = []
    for batch in fabric.setup_dataloaders(loader(), use_distributed_sampler=False):
        loss = wrapped.training_step(batch, 0)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_loop_over_fabric() -> None:
    for whole, sharded in run_distributed(lambda: (_by_fabric("ddp"), _by_fabric("freescale")), 2):
        assert sharded == pytest.approx(whole, rel=1e-5)


def test_no_row_is_fetched_ahead() -> None:
    for run in run_distributed(lambda: case("linear").fit(SHARD), 2):
        assert run.statistics["predicted_lookups"] > 0 and run.statistics["colliding_bytes"] > 0
        assert run.statistics["non_colliding_bytes"] == 0, "every row changes in every step"


# -- what is refused


def _errors() -> dict[str, str]:
    looks: dict[str, Callable[[NextItem, Tensor, Tensor], Any]] = {
        "softmax": lambda m, h, t: (h @ m.item_emb.weight.T).softmax(-1),
        "cat": lambda m, h, t: torch.cat([m.item_emb.weight, h[0]]),
        "norm": lambda m, h, t: m.item_emb.weight.norm(),
        "argmax": lambda m, h, t: (h @ m.item_emb.weight.T).argmax(-1),
        "cross_entropy(weight=...)": lambda m, h, t: F.cross_entropy(
            (h @ m.item_emb.weight.T).flatten(0, 1), t.reshape(-1), torch.ones(ITEMS)
        ),
        "matmul": lambda m, h, t: m.item_emb.weight @ h[0].T,
        "__setitem__": lambda m, h, t: (h @ m.item_emb.weight.T).__setitem__((..., 0), -1.0),
    }
    found = {}
    for name, look in looks.items():
        model = NextItem("last")
        model.style = look
        try:
            fit(model, loader(), strategy=FreeScaleStrategy(shard=["item_emb"]))
        except RuntimeError as error:
            found[name] = str(error)
    for name, strategy in {
        "overlap='torchrec'": FreeScaleStrategy(shard=["item_emb"], overlap="torchrec"),
    }.items():
        try:
            fit(NextItem("last"), loader(), strategy=strategy)
        except ValueError as error:
            found[name] = str(error)
    return found


def test_other_uses_are_refused_by_name() -> None:
    for found in run_distributed(_errors, 2):
        assert len(found) == 8, found.keys()
        for name, error in found.items():
            assert all(part in error for part in (name, "item_emb", "full_weight", "shard=")), error
            assert len(error) < 500, error
