"""FreeScaleStrategy(shard=...): plain nn.Embeddings in all that a Trainer does with them."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import assert_same, my_loader
from tests.helpers.plain_embeddings import ITEMS, KEYS, SHARDED, PlainBatches, PlainModel, plain_loader
from tests.helpers.recommender import DIM, Recommender, trainer

STEPS = 6


def _trainer(strategy: Any = None, **options: Any) -> Any:
    strategy = strategy or FreeScaleStrategy(shard=SHARDED)
    return trainer(strategy=strategy, devices=int(os.environ["WORLD_SIZE"]), **options)


def _state(fitting: Any) -> tuple[dict[str, Tensor], Any]:
    saved = fitting._checkpoint_connector.dump_checkpoint(weights_only=False)
    return saved["state_dict"], saved["optimizer_states"]


# -- checkpoints


WAYS = [["freescale"], ["ddp"], ["freescale", "freescale"], ["ddp", "freescale"], ["freescale", "ddp"]]


def _changes_over(path: Path, optimizer: str) -> list[Any]:
    """Two epochs at once, and one after the other under other strategies."""
    results = []
    for index, strategies in enumerate(WAYS):
        file, losses = None, []
        for epochs, name in zip([2] if len(strategies) == 1 else [1, 2], strategies):
            torch.manual_seed(0)
            module = PlainModel(optimizer)
            fitting = _trainer("ddp" if name == "ddp" else None, max_epochs=epochs)
            fitting.fit(module, plain_loader(STEPS), ckpt_path=file)
            losses += module.losses
            file = str(path / f"{index}.ckpt")
            fitting.save_checkpoint(file)
        results.append((losses, *_state(fitting)))
    return results


@pytest.mark.parametrize("optimizer", ["adagrad", pytest.param("sgd", marks=pytest.mark.slow)])
def test_a_checkpoint_is_that_of_the_plain_module(tmp_path: Path, optimizer: str) -> None:
    ranks = run_distributed(_changes_over, 2, tmp_path, optimizer)
    for whole, ddp, resumed, *changed in ranks:
        assert resumed[0] == whole[0]
        for losses, *_ in (*changed, ddp):
            assert losses == pytest.approx(whole[0], rel=1e-5)
    whole, ddp, resumed, *changed = ranks[0]
    assert_same(resumed[1:], whole[1:])
    for _, *state in (*changed, ddp):
        assert_same(state, [*whole[1:]], rtol=1e-5, atol=1e-6)
    plain = PlainModel(optimizer)
    for file in ("0.ckpt", "4.ckpt"):
        loaded = PlainModel.load_from_checkpoint(tmp_path / file)
        assert type(loaded.kind_emb) is nn.Embedding
        assert loaded.state_dict().keys() == plain.state_dict().keys()
    checkpoint = torch.load(tmp_path / "0.ckpt", weights_only=True)
    plain.load_state_dict(checkpoint["state_dict"], strict=True)
    plain.configure_optimizers().load_state_dict(checkpoint["optimizer_states"][0])
    assert not torch.equal(checkpoint["state_dict"][KEYS[0]], PlainModel().state_dict()[KEYS[0]])


# -- all entry points, and a second fit


def _everything() -> Any:
    torch.manual_seed(0)
    module, batches = PlainModel(), PlainBatches(2, int(os.environ["RANK"]))
    torch.manual_seed(0)
    plain = PlainModel()
    with torch.no_grad():
        expected = [plain.scores(batch) for batch in batches]
    found = _trainer().predict(module, plain_loader(2))
    assert_same(found, expected, rtol=1e-6, atol=1e-6)
    assert not any(row.requires_grad for row in found)
    results = [_trainer().validate(module, plain_loader(2), verbose=False)[0]["val"]]
    fitting = _trainer(max_epochs=2)
    fitting.fit(module, plain_loader(STEPS), plain_loader(2))
    results.append(float(fitting.callback_metrics["val"]))
    results += [_trainer().test(module, plain_loader(2), verbose=False)[0]["val"], *module.losses]
    again = _trainer(FreeScaleStrategy(), max_epochs=1)  # sharded it stays, whatever the next strategy says
    again.fit(module, plain_loader(STEPS))
    return results + module.losses, _state(again)[0]


def _everything_unsharded() -> Any:
    torch.manual_seed(0)
    module = PlainModel()
    results = [_trainer("ddp").validate(module, plain_loader(2), verbose=False)[0]["val"]]
    fitting = _trainer("ddp", max_epochs=2)
    fitting.fit(module, plain_loader(STEPS), plain_loader(2))
    results.append(float(fitting.callback_metrics["val"]))
    results += [_trainer("ddp").test(module, plain_loader(2), verbose=False)[0]["val"], *module.losses]
    again = _trainer("ddp", max_epochs=1)
    again.fit(module, plain_loader(STEPS))
    return results + module.losses, _state(again)[0]


def test_validation_prediction_and_a_second_fit() -> None:
    for (mine, weights), (ddp, expected) in zip(run_distributed(_everything, 2), run_distributed(_everything_unsharded, 2)):
        assert mine == pytest.approx(ddp, rel=1e-5)
        assert_same({key: value for key, value in weights.items() if key in expected}, weights)
        if KEYS[0] in weights:  # whole, on rank 0
            assert_same(weights, expected, rtol=1e-5, atol=1e-6)


# -- what the module in its place is like


class Looks(PlainModel):
    """Looks at its embeddings in all sorts of ways, where the strategy has set them up."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.seen = self.encoder.item_emb, {}

    def on_train_start(self) -> None:
        item = self.encoder.item_emb
        seen = self.seen
        seen["attributes"] = (item.num_embeddings, item.embedding_dim, item.padding_idx, repr(item))
        seen["same"] = self.again is item
        seen["names"] = [name for name, _ in self.named_parameters(remove_duplicate=False) if "emb" in name or "again" in name]
        seen["state"] = {key: type(value).__name__ for key, value in self.state_dict().items() if key in seen["names"]}
        torch.manual_seed(0)
        whole = Looks()
        for shape in ((), (0,), (3,), (2, 3), (2, 0, 3), (2, 3, 2)):
            for dtype in (torch.int32, torch.int64):
                ids = torch.randint(0, ITEMS, shape, dtype=dtype)
                found = item(ids)
                assert torch.equal(found, whole.encoder.item_emb(ids)) and found.shape == (*shape, DIM)
                found += 1
        ids = torch.randint(0, ITEMS, (3, 4)).T
        assert torch.equal(item(ids), whole.encoder.item_emb(ids))
        looks = {"weight": lambda: item.weight, "list": lambda: item([1]), "id": lambda: item(torch.tensor([77]))}
        for error, look in looks.items():
            try:
                look()
            except (RuntimeError, TypeError, ValueError) as raised:
                seen[error] = f"{type(raised).__name__}: {raised}"
        copies = [self.trainer.strategy.full_weight(path) for path in ("encoder.item_emb", "again.weight", "kind_emb")]
        assert torch.equal(copies[0], whole.encoder.item_emb.weight) and torch.equal(copies[1], copies[0])
        assert torch.equal(copies[2], whole.kind_emb.weight)
        try:
            self.trainer.strategy.full_weight("encoder.items")
        except ValueError as raised:
            seen["unknown"] = str(raised)


def _looks() -> Any:
    torch.manual_seed(0)
    module = Looks()
    fitting = _trainer(max_epochs=1, enable_model_summary=True)
    fitting.fit(module, plain_loader(STEPS))
    return module.seen, _state(fitting)[0]


def test_it_is_called_and_named_as_before() -> None:
    ranks = run_distributed(_looks, 2)
    for seen, _ in ranks:
        assert seen["attributes"] == (ITEMS, DIM, 0, "ShardedEmbedding(50, 8, padding_idx=0)")
        assert seen["same"]
        assert seen["names"] == ["encoder.item_emb.weight", "encoder.pos_emb.weight", "kind_emb.weight", "again.weight"]
        assert seen["state"] == {name: "Tensor" if "pos" in name else "ShardedTensor" for name in seen["names"]}
        assert "RuntimeError: encoder.item_emb.weight is sharded" in seen["weight"]
        assert "full_weight('encoder.item_emb')" in seen["weight"] and "FreeScaleStrategy(shard=...)" in seen["weight"]
        assert "TypeError: embedding 'encoder.item_emb' is given a list" in seen["list"]
        assert "id 77, but table 'encoder/item_emb' has num_embeddings=50" in seen["id"]
        assert "full_weight('encoder.items'): no sharded table" in seen["unknown"] and "'encoder.item_emb'?" in seen["unknown"]
    assert ranks[0][1].keys() == Looks().state_dict().keys()


class OfCollections(Recommender):
    def on_train_batch_end(self, *args: Any) -> None:
        self.full = self.trainer.strategy.full_weight("net.embeddings.embeddings.item")


def _full_weight() -> Any:
    torch.manual_seed(0)
    module = OfCollections("adagrad")
    fitting = _trainer(FreeScaleStrategy(), max_steps=3)
    fitting.fit(module, my_loader(3))
    return module.full, _state(fitting)[0].get("net.embeddings.embeddings.item.weight")


def test_full_weight_has_all_updates_on_every_rank() -> None:
    (full, saved), (other, _) = run_distributed(_full_weight, 2)
    assert torch.equal(full, saved) and torch.equal(other, saved)


# -- built on the meta device, frozen


class OnMeta(PlainModel):
    def __init__(self) -> None:
        super().__init__("adagrad")
        self.encoder.item_emb = nn.Embedding(ITEMS, DIM, padding_idx=ITEMS - 3, device="meta")
        self.kind_emb.requires_grad_(False)


def _on_meta() -> Any:
    torch.manual_seed(0)
    module = OnMeta()
    before = {"kind": module.kind_emb.weight.clone()}
    fitting = _trainer(max_steps=0)
    fitting.fit(module, plain_loader(STEPS))
    initial = _state(fitting)[0]
    again = _trainer()
    again.fit(module, plain_loader(STEPS))
    return before, initial, _state(again)[0]


def test_on_the_meta_device_it_is_drawn_as_torch_draws_it() -> None:
    before, initial, after = run_distributed(_on_meta, 2)[0]
    drawn = initial["encoder.item_emb.weight"]
    assert not drawn[ITEMS - 3].any() and (drawn.abs().sum(dim=1) > 0).sum() == ITEMS - 1
    assert 0.8 < drawn[: ITEMS - 3].std() < 1.2
    assert not torch.equal(drawn[:10], drawn[25:35])
    assert not torch.equal(after["encoder.item_emb.weight"], drawn)
    assert torch.equal(after["kind_emb.weight"], before["kind"]), "a frozen one does not move"


# -- Adam


def _global_batch(step: int, world: int) -> dict[str, Tensor]:
    parts = [PlainBatches(STEPS, rank)[step] for rank in range(world)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class WithAdam(PlainModel):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02, betas=(0.8, 0.95))


def _with_adam() -> Any:
    torch.manual_seed(0)
    module = WithAdam()
    fitting = _trainer()
    fitting.fit(module, plain_loader(STEPS))
    return module.losses, _state(fitting)[0]


def _undo_rows(module: Any, optimizer: Any, batch: dict[str, Tensor], before: Any) -> None:
    """Torch's Adam moves every row; put those back that no id of the batch names, and their moments."""
    for index, (name, weight) in enumerate(module.named_parameters()):
        if name in KEYS:
            others = torch.ones(len(weight), dtype=torch.bool)
            others[batch["items" if name == KEYS[0] else "kind"].long().flatten()] = False
            weight.data[others] = before[0][name][others]
            for moment in ("exp_avg", "exp_avg_sq"):
                optimizer.state[weight][moment][others] = before[1][index][moment][others] if before[1] else 0.0


@pytest.mark.parametrize("world", [1, 2])
def test_adam_is_that_of_the_rows_looked_up(world: int) -> None:
    torch.manual_seed(0)
    module, losses = WithAdam(), []
    optimizer = module.configure_optimizers()
    for step in range(STEPS):
        batch = _global_batch(step, world)
        loss = nn.functional.mse_loss(module.scores(batch) / DIM, batch["label"])
        optimizer.zero_grad()
        loss.backward()
        before = copy.deepcopy((module.state_dict(), optimizer.state_dict()["state"]))
        optimizer.step()
        _undo_rows(module, optimizer, batch, before)
        losses.append(loss.item())
    ranks = run_distributed(_with_adam, world)
    mean = [sum(of_ranks) / world for of_ranks in zip(*(mine for mine, _ in ranks))]
    assert mean == pytest.approx(losses, rel=1e-5)
    assert max(losses) / min(losses) > 1.2, "the loss must move, or equality means nothing"
    assert_same(ranks[0][1], module.state_dict(), rtol=1e-4, atol=1e-6)


# -- what the next ids are


class Computes(PlainModel):
    """Its item ids stand nowhere in the batch."""

    def scores(self, batch: dict[str, Tensor]) -> Tensor:
        return super().scores({**batch, "items": batch["items"] * 3 % ITEMS})


class Tells(Computes):
    def embedding_ids(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"encoder.item_emb": batch["items"] * 3 % ITEMS}


def tell(batch: dict[str, Tensor]) -> Tensor:
    return batch["items"] * 3 % ITEMS


def _looked_ahead(make: Any, **options: Any) -> tuple[list[int], list[list[float]]]:
    losses = []
    for strategy in ("ddp", FreeScaleStrategy(**{"shard": SHARDED, **options})):
        torch.manual_seed(0)
        module = make()
        _trainer(strategy).fit(module, plain_loader(STEPS))
        losses.append(module.losses)
    return [int(module.statistics[f"{how}predicted_lookups"]) for how in ("", "un", "mis")], losses


@pytest.mark.parametrize(
    ("make", "options", "known"),
    [
        (PlainModel, {}, 2 * (STEPS - 2)),
        (Computes, {}, STEPS - 2),
        (Tells, {}, STEPS - 1 + STEPS - 2),
        (Computes, {"shard": ["encoder.item_emb"], "ids_of": tell}, STEPS - 1),
        (Computes, {"lookahead": "trial_run"}, 2 * (STEPS - 2)),
    ],
)
def test_the_next_ids_are_found_or_told(make: Any, options: dict[str, Any], known: int) -> None:
    for counts, (ddp, mine) in run_distributed(_looked_ahead, 2, make, **options):
        assert counts[0] == known and counts[2] == 0
        assert mine == pytest.approx(ddp, rel=1e-5)
