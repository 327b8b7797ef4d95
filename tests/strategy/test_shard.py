"""FreeScaleStrategy(shard=...): plain nn.Embeddings in all that a Trainer does with them."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embeddings.collection_kinds import LARGE_EMBEDDING
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import Case, assert_same, compared, continued, departures
from tests.helpers.plain_embeddings import ITEMS, SHARDED, PlainModel, plain_loader
from tests.helpers.recommender import DIM, trainer

STEPS = 6
SHARD = {"shard": SHARDED}
CLOSE = {"losses": (1e-5, 1e-12), "weights": (1e-5, 1e-6), "states": (1e-5, 1e-6)}


def _trainer(strategy: Any = None, **options: Any) -> Any:
    strategy = strategy or FreeScaleStrategy(shard=SHARDED)
    return trainer(strategy=strategy, devices=int(os.environ["WORLD_SIZE"]), **options)


def whole_state(fitting: Any) -> dict[str, Tensor]:
    return fitting._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]


# -- checkpoints

ITEM_EMB = "encoder.item_emb.weight"
ADAGRAD = partial(PlainModel, "adagrad")
CHANGES: dict[str, tuple[Any, Any]] = {"resumed": (SHARD, SHARD), "to ddp": (SHARD, "ddp"), "from ddp": ("ddp", SHARD)}


def plain(make: Any = ADAGRAD, **rest: Any) -> Case:
    return Case(make, lambda: plain_loader(STEPS), notice=None, **rest)


def _changes_over(path: Path) -> dict[str, list[Any]]:
    return {name: continued(plain(), str(path / f"{name}.ckpt"), STEPS, *ways) for name, ways in CHANGES.items()}


def test_a_checkpoint_is_that_of_the_plain_module(tmp_path: Path) -> None:
    ranks = run_distributed(_changes_over, 2, tmp_path)
    assert departures({"resumed": plain()}, ranks) == []
    assert departures({"to ddp": plain(), "from ddp": plain()}, ranks, **CLOSE) == []
    loaded = PlainModel.load_from_checkpoint(tmp_path / "resumed.ckpt")
    assert type(loaded.kind_emb) is nn.Embedding
    assert_same(loaded.state_dict(), torch.load(tmp_path / "resumed.ckpt")["state_dict"])


def _everything(strategy: Any = None) -> Any:
    torch.manual_seed(0)
    module = PlainModel()
    predicted = _trainer(strategy).predict(module, plain_loader(2))
    assert not any(row.requires_grad for row in predicted)
    values = [_trainer(strategy).validate(module, plain_loader(2), verbose=False)[0]["val"]]
    fitting = _trainer(strategy, max_epochs=2)
    fitting.fit(module, plain_loader(STEPS), plain_loader(2))
    values.append(float(fitting.callback_metrics["val"]))
    values += [_trainer(strategy).test(module, plain_loader(2), verbose=False)[0]["val"], *module.losses]
    again = _trainer(strategy or FreeScaleStrategy(), max_epochs=1)  # it stays sharded, with any options of the next strategy
    again.fit(module, plain_loader(STEPS))
    return [*torch.cat(predicted).tolist(), *values, *module.losses], whole_state(again)


def test_all_stages_and_a_second_fit() -> None:
    ranks = run_distributed(lambda: (_everything(), _everything("ddp")), 2)
    for (mine, _), (ddp, _) in ranks:
        assert mine == pytest.approx(ddp, rel=1e-5, abs=1e-6)
    (_, weights), (_, expected) = ranks[0]
    assert_same(weights, expected, rtol=1e-5, atol=1e-6)


# -- what the module in its place is like


class Looks(PlainModel):
    """Looks at its embeddings in all sorts of ways, where the strategy has set them up."""

    def __init__(self) -> None:
        super().__init__("adagrad")
        self.again, self.seen = self.encoder.item_emb, {}

    def on_train_start(self) -> None:
        item, strategy = self.encoder.item_emb, self.trainer.strategy
        assert (item.num_embeddings, item.embedding_dim, item.padding_idx) == (ITEMS, DIM, 0) and self.again is item
        assert f"{ITEMS}, {DIM}, padding_idx=0" in repr(item)
        self.names = [name for name, _ in self.named_parameters(remove_duplicate=False) if "emb" in name or "again" in name]
        self.kinds = {key: type(value).__name__ for key, value in self.state_dict().items() if key in self.names}
        torch.manual_seed(0)
        whole = Looks()
        ids = [torch.randint(0, ITEMS, shape) for shape in ((), (0,), (3,), (2, 3), (2, 0, 3), (2, 3, 2))]
        for each in (*ids, ids[3].int(), ids[3].T):
            found = item(each)
            assert torch.equal(found, whole.encoder.item_emb(each)) and found.shape == (*each.shape, DIM)
            found += 1
        looks = {
            "weight": lambda: item.weight.square(),
            "list": lambda: item([1]),
            "id": lambda: item(torch.tensor([77])),
            "unknown": lambda: strategy.full_weight("encoder.items"),
        }
        for error, look in looks.items():
            with pytest.raises((RuntimeError, TypeError, ValueError)) as raised:
                look()
            self.seen[error] = str(raised.value)
        for path, embedding in (("encoder.item_emb", whole.again), ("again.weight", whole.again), ("kind_emb", whole.kind_emb)):
            assert torch.equal(strategy.full_weight(path), embedding.weight)

    def on_train_batch_end(self, *args: Any) -> None:
        self.full = self.trainer.strategy.full_weight("encoder.item_emb")


def _looks() -> Any:
    torch.manual_seed(0)
    module = Looks()
    fitting = _trainer(max_epochs=1, enable_model_summary=True)
    fitting.fit(module, plain_loader(STEPS))
    return module.names, module.kinds, module.seen, module.full, whole_state(fitting)


def test_it_is_called_and_named_as_before() -> None:
    ranks = run_distributed(_looks, 2)
    for names, kinds, seen, full, _ in ranks:
        assert names == ["encoder.item_emb.weight", "encoder.pos_emb.weight", "kind_emb.weight", "again.weight"]
        assert kinds == {name: "Tensor" if "pos" in name else "ShardedTensor" for name in names}
        for look, facts in {
            "weight": ("encoder.item_emb.weight", "full_weight('encoder.item_emb')", "shard="),
            "list": ("'encoder.item_emb'", "list"),
            "id": ("id 77", "'encoder/item_emb'", "num_embeddings=50"),
            "unknown": ("full_weight('encoder.items')", "'encoder.item_emb'?"),
        }.items():
            assert all(fact in seen[look] for fact in facts)
        assert torch.equal(full, ranks[0][4]["encoder.item_emb.weight"]), "all updates are in it, on every rank"
    assert ranks[0][4].keys() == Looks().state_dict().keys()


class Regularized(PlainModel):
    """Adds a norm of its parameters to the loss, or of those that a list has kept since it was made."""

    def __init__(self, of_list: bool) -> None:
        super().__init__("adagrad")
        self.kept = [self.encoder.item_emb.weight] if of_list else []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kept = self.kept or self.parameters()
        return super().training_step(batch, batch_idx) + sum(weight.square().sum() for weight in kept)


def _regularized(of_list: bool) -> str:
    with pytest.raises(ValueError, match="sharded table") as raised:
        _trainer(max_epochs=1).fit(Regularized(of_list), plain_loader(STEPS))
    return str(raised.value)


@pytest.mark.parametrize(("of_list", "what"), [(False, "this rank's part"), (True, "the unsharded weight")])
def test_a_loss_of_a_sharded_weight_is_refused_on_every_rank(of_list: bool, what: str) -> None:
    for error in run_distributed(_regularized, 2, of_list):
        assert all(part in error for part in (what, "weight_decay=", "full_weight", "shard=", "_emb.weight'"))


class OnMeta(PlainModel):
    def __init__(self) -> None:
        super().__init__("adagrad")
        self.encoder.item_emb = nn.Embedding(ITEMS, DIM, padding_idx=ITEMS - 3, device="meta")
        self.kind_emb.requires_grad_(False)
        self.bag = nn.EmbeddingBag(ITEMS, DIM, device="meta")


def _on_meta() -> Any:
    torch.manual_seed(0)
    module, states = OnMeta(), []
    before = module.kind_emb.weight.clone()
    for options in ({"max_steps": 0}, {}):
        fitting = _trainer(FreeScaleStrategy(shard=[*SHARDED, "bag"]), **options)
        fitting.fit(module, plain_loader(STEPS))
        states.append(whole_state(fitting))
    return before, *states


def test_on_the_meta_device_it_is_drawn_as_torch_draws_it() -> None:
    before, initial, after = run_distributed(_on_meta, 2)[0]
    drawn = initial[ITEM_EMB]
    assert not drawn[ITEMS - 3].any() and (drawn.abs().sum(dim=1) > 0).sum() == ITEMS - 1
    assert all(0.8 < values.std() < 1.2 for values in (drawn[: ITEMS - 3], initial["bag.weight"]))
    assert not torch.equal(drawn[:10], drawn[25:35])
    assert not torch.equal(after[ITEM_EMB], drawn)
    assert torch.equal(after["kind_emb.weight"], before), "a frozen one does not move"


class Computes(PlainModel):
    def scores(self, batch: dict[str, Tensor]) -> Tensor:
        return super().scores({**batch, "items": batch["items"] * 3 % ITEMS})


def ids_of(batch: dict[str, Tensor]) -> Tensor:
    return batch["items"] * 3 % ITEMS


class Tells(Computes):
    def embedding_ids(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"encoder.item_emb": ids_of(batch)}


ONCE = {"max_epochs": 1}
NEXT_IDS = {
    "in the batch": plain(options=ONCE, ahead=(2 * (STEPS - 2), 4, 0)),
    "computed": plain(Computes, options=ONCE, ahead=(STEPS - 2, STEPS + 2, 0)),
    "by the module": plain(Tells, options=ONCE, ahead=(STEPS - 1 + STEPS - 2, 3, 0)),
    "by a function": plain(
        Computes, options=ONCE, ahead=(STEPS - 1, 1, 0), overlap={"shard": ["encoder.item_emb"], "ids_of": ids_of}
    ),
}


def test_the_next_ids_are_found() -> None:
    assert compared(2, NEXT_IDS, "ddp", SHARD, **CLOSE) == []


# -- which embeddings are sharded, and what is refused


class Large(PlainModel):
    """With tables as ``shard="auto"`` takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.word_emb = nn.Embedding(LARGE_EMBEDDING // 8, 8)
        self.renorm_emb = nn.Embedding(LARGE_EMBEDDING // 4, 4, max_norm=1.0).requires_grad_(False)

    def scores(self, batch: dict[str, Tensor]) -> Tensor:
        return super().scores(batch) + self.word_emb(batch["kind"]).sum(dim=1)


class WithMomentum(PlainModel):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Tied(PlainModel):
    def scores(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.encoder(batch["items"]) @ self.kind_emb.weight.T).logsumexp(dim=1)


def _messages(caplog: pytest.LogCaptureFixture, make: Any, shard: Any) -> tuple[str, list[str]]:
    """Return what is said, the error with it, and which embeddings the module has afterwards."""
    caplog.clear()
    module, error = make(), ""
    try:
        _trainer(FreeScaleStrategy(shard=shard)).fit(module, plain_loader(2))
    except (ValueError, TypeError, RuntimeError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    return caplog.text + error, sorted(type(each).__name__ for each in module.modules() if "Embedding" in type(each).__name__)


def test_large_embeddings_are_named_or_taken(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    given = [(Large, ["word_emb"]), (Large, "auto"), (PlainModel, "auto"), (Large, None)]
    ((named, auto, none, left),) = run_distributed(lambda: [_messages(caplog, *each) for each in given], 1)
    assert "replicated on every rank" not in named[0] and "shard='auto'" not in named[0]
    assert "shards 'word_emb' (125000 x 8)" in auto[0] and "'renorm_emb' has max_norm=1.0" in auto[0]
    assert named[1] == auto[1] == [*["Embedding"] * 4, "ShardedEmbedding"]
    assert f"shard='auto' finds no plain embedding with {LARGE_EMBEDDING}" in none[0]
    assert left[0].count("'word_emb' (125000 x 8)") == 1 and "shard=['word_emb']" in left[0]
    assert set(left[1]) == {"Embedding"}


def test_refused(caplog: pytest.LogCaptureFixture) -> None:
    given = [(WithMomentum, SHARDED), (PlainModel, ["kind_embs"]), (Tied, SHARDED)]
    for momentum, unknown, tied in run_distributed(lambda: [_messages(caplog, *each) for each in given], 2):
        assert "ValueError" in momentum[0] and "momentum=0.9" in momentum[0] and "'encoder.item_emb.weight'" in momentum[0]
        assert "'kind_embs'" in unknown[0] and "'kind_emb'?" in unknown[0]
        assert momentum[1] == unknown[1] == ["Embedding"] * 3, "the module is as it was"
        assert "kind_emb.weight" in tied[0] and "full_weight('kind_emb')" in tied[0] and "logsumexp" in tied[0]
