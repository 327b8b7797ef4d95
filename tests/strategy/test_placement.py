"""FreeScaleStrategy(placement=...) changes which rank owns a row, no number, and nothing that the user sees."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import CountingModel, assert_same, my_loader
from tests.helpers.plain_embeddings import PlainModel, plain_loader
from tests.helpers.recommender import OPTIMIZERS, REPEATS, Samples, collate, trainer

STEPS, EPOCHS = 6, 2
ADAM = {**OPTIMIZERS, "adam": lambda params: torch.optim.Adam(params, lr=0.05)}


class Model(CountingModel):
    """Also knows Adam, and keeps which rows this rank holds."""

    def __init__(self, optimizer: str = "adagrad") -> None:
        super().__init__(optimizer)
        self.first_ids: dict[str, list[int]] = {}

    def configure_optimizers(self) -> Any:
        return ADAM[self.optimizer](self.parameters())

    def on_train_end(self) -> None:
        super().on_train_end()
        if isinstance(self.trainer.strategy, FreeScaleStrategy):
            self.first_ids = {shard.table.name: shard.ids[:3].tolist() for shard in self.trainer.strategy.tables.shards()}


def _fit(
    optimizer: str, strategy: Any, save: str | None = None, resume: str | None = None, epochs: int = EPOCHS
) -> dict[str, Any]:
    torch.manual_seed(0 if resume is None else 7)
    module = Model(optimizer)
    fitting = trainer(
        strategy=strategy,
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=epochs,
        val_check_interval=2,
        num_sanity_val_steps=1,
        callbacks=[] if save is None else [ModelCheckpoint(Path(save).parent, Path(save).stem, every_n_train_steps=7)],
        enable_checkpointing=save is not None,
    )
    data, validation = Samples(4 * STEPS * 2), Samples(4 * 2 * 2, seed=1)
    loader = FreeScaleDataModule(data, data.lengths, 4, val_dataset=validation, collate_fn=collate, balance=REPEATS)
    fitting.fit(module, loader, ckpt_path=resume)
    val = float(fitting.callback_metrics["val"]) if "val" in fitting.callback_metrics else None
    state = fitting._checkpoint_connector.dump_checkpoint(weights_only=False)
    found = {"losses": module.losses, "val": val, "weights": state["state_dict"], "states": state["optimizer_states"]}
    return {"seen": found, "first_ids": module.first_ids}


# -- numbers


def _train_in_all_ways(optimizer: str) -> dict[Any, dict[str, Any]]:
    ways = [(p, o, d) for p in ("blocks", "hash") for o, d in ((False, False), (True, False), (True, True))]
    if optimizer == "adam":  # FBGEMM has none on CPU
        ways = [way for way in ways if way[1]]
    runs = {way: _fit(optimizer, FreeScaleStrategy(**dict(zip(("placement", "overlap", "dedup"), way)))) for way in ways}
    return runs | {"ddp": _fit(optimizer, "ddp"), "default": _fit(optimizer, FreeScaleStrategy())}


@pytest.mark.parametrize(
    ("optimizer", "ranks"),
    [
        ("adagrad", 2),
        pytest.param("adam", 2, marks=pytest.mark.slow),
        pytest.param("rowwise_adagrad", 4, marks=pytest.mark.slow),
    ],
)
def test_placement_changes_no_number(optimizer: str, ranks: int) -> None:
    for rank, runs in enumerate(run_distributed(_train_in_all_ways, ranks, optimizer)):
        ddp, default = runs.pop("ddp")["seen"], runs.pop("default")
        exact = [run["seen"] for (_, _, dedup), run in runs.items() if not dedup]
        assert len(set(exact[0]["losses"])) > 1, "the loss must move, or equality means nothing"
        for other in exact[1:]:
            assert_same(other, exact[0])
        assert_same(runs["hash", True, True]["seen"], runs["blocks", True, True]["seen"])
        for found in (exact[-1], runs["hash", True, True]["seen"]) if optimizer != "adam" else ():  # lazy, unlike under ddp
            assert found["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
            assert found["val"] == pytest.approx(ddp["val"], rel=1e-5)
            if rank == 0:
                assert_same(found["weights"], ddp["weights"], rtol=1e-5, atol=1e-6)
                assert_same(found["states"], ddp["states"], rtol=1e-5, atol=1e-6)
        rows = -(-50 // ranks) * rank
        assert runs["blocks", True, True]["first_ids"]["item"] == [rows, rows + 1, rows + 2]
        hashed = runs["hash", True, True]["first_ids"]["item"]
        assert hashed == default["first_ids"]["item"], "the default"
        assert max(hashed) - min(hashed) > 50 // ranks


# -- checkpoints


def _save_and_resume(path: Path, optimizer: str) -> dict[str, dict[str, Any]]:
    strategies: dict[str, Callable[[], Any]] = {
        "hash": lambda: FreeScaleStrategy(placement="hash"),
        "blocks": lambda: FreeScaleStrategy(placement="blocks"),
        "ddp": lambda: "ddp",
    }
    runs = {}
    for name, strategy in strategies.items():
        runs[name] = _fit(optimizer, strategy(), save=str(path / f"{name}.ckpt"))
        torch.distributed.barrier()
    for saved, resumed in (("hash", "blocks"), ("blocks", "hash"), ("hash", "hash"), ("ddp", "hash"), ("hash", "ddp")):
        runs[f"{saved}, {resumed}"] = _fit(optimizer, strategies[resumed](), resume=str(path / f"{saved}.ckpt"))
    return {name: run["seen"] for name, run in runs.items()}


def _load(path: str, optimizer: str, strategy: dict[str, Any]) -> dict[str, Any]:
    """Return the state where a fit resumes and takes no step: the first epoch was the last."""
    return _fit(optimizer, FreeScaleStrategy(**strategy), resume=path, epochs=1)["seen"]


@pytest.mark.parametrize("optimizer", ["adagrad", pytest.param("rowwise_adagrad", marks=pytest.mark.slow)])
def test_a_checkpoint_is_that_of_the_plain_module(tmp_path: Path, optimizer: str) -> None:
    for runs in run_distributed(_save_and_resume, 2, tmp_path, optimizer):
        whole = runs["hash"]
        assert_same(runs["blocks"], whole)
        for name, run in runs.items():
            if "," in name and "ddp" not in name:
                assert_same(run, {**whole, "losses": whole["losses"][7:]})
            elif "," in name:
                assert run["losses"] == pytest.approx(whole["losses"][7:], rel=1e-5)
    hashed, blocks, ddp = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("hash", "blocks", "ddp"))
    for key in ("state_dict", "optimizer_states"):
        assert_same(hashed[key], blocks[key])
    assert_same(hashed["state_dict"], ddp["state_dict"], rtol=1e-5, atol=1e-6)
    assert_same(hashed["optimizer_states"][0]["state"], ddp["optimizer_states"][0]["state"], rtol=1e-5, atol=1e-6)


def test_a_checkpoint_loads_on_any_number_of_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "hash.ckpt")
    run_distributed(_fit, 2, "adam", FreeScaleStrategy(placement="hash"), save=path)
    saved = torch.load(path, weights_only=True)
    for ranks, placement in ((1, "hash"), (3, "hash"), (3, "blocks")):
        found = run_distributed(_load, ranks, path, "adam", {"placement": placement})[0]
        assert found["losses"] == []
        assert_same(found["weights"], saved["state_dict"])
        assert_same(found["states"], saved["optimizer_states"])


# -- one table's rows


def _written_and_read(shard: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The table as it was at first, and as a plain state dict has it that is loaded into the sharded module."""
    torch.manual_seed(0)
    module = PlainModel() if shard else Model()
    name = "encoder.item_emb" if shard else "net.embeddings.embeddings.item"
    whole = {key: value.detach().clone() for key, value in module.state_dict().items()}
    fitting = trainer(strategy=FreeScaleStrategy(shard=shard), devices=2)
    fitting.validate(module, plain_loader(2) if shard else my_loader(2), verbose=False)
    pairs = [(fitting.strategy.full_weight(name), whole[f"{name}.weight"])]
    other = {key: torch.arange(float(value.numel())).view(value.shape) for key, value in whole.items()}
    module.load_state_dict(other, strict=True)
    return [*pairs, (fitting.strategy.full_weight(name), other[f"{name}.weight"])]


def test_tables_are_read_and_written_in_the_order_of_the_module() -> None:
    for pairs in run_distributed(lambda: [*_written_and_read(None), *_written_and_read(["encoder.item_emb"])], 2):
        for found, expected in pairs:
            assert_same(found, expected)


# -- refusals


class Wrong(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            batch["features"].values()[0] = 77
        return super().training_step(batch, batch_idx)


def _error_of_wrong_id(overlap: bool) -> str:
    with pytest.raises(ValueError, match="id 77") as error:
        trainer(strategy=FreeScaleStrategy(overlap=overlap), devices=2).fit(Wrong(), my_loader(STEPS))
    return str(error.value)


@pytest.mark.parametrize("overlap", [True, False])
def test_errors_name_the_id_that_the_user_gave(overlap: bool) -> None:
    for text in run_distributed(_error_of_wrong_id, 2, overlap):
        assert all(fact in text for fact in ("'history'", "id 77", "table 'item'", "num_embeddings=50"))


def _fit_again() -> None:
    torch.manual_seed(0)
    module = Model()
    trainer(strategy=FreeScaleStrategy(placement="blocks"), devices=2).fit(module, my_loader(2))
    trainer(strategy=FreeScaleStrategy(placement="hash"), devices=2).validate(module, my_loader(2), verbose=False)
    with pytest.raises(ValueError, match="placement='blocks'"):
        trainer(strategy=FreeScaleStrategy(placement="hash"), devices=2).fit(module, my_loader(2))


def test_a_second_fit_cannot_place_rows_anew() -> None:
    run_distributed(_fit_again, 2)
