"""Models that pad their batches: the strategy finds it out, plans for it, and the gradient does not change."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.balance import CostModel
from lightning_freescale.data import BalanceOptions
from lightning_freescale.testing import run_distributed
from tests.checkpoint.fits import SaveAt
from tests.helpers.recommender import trainer

ITEMS, CAP, SAMPLES = 50, 40, 131
DRAWN = np.random.RandomState(0).lognormal(3, 1, SAMPLES).astype(int) + 1
LENGTHS = np.minimum(DRAWN, CAP)


class Histories(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(np.random.RandomState(index).randint(1, ITEMS, LENGTHS[index]))


def _pad(samples: list[Tensor], to: int = 0) -> Tensor:
    rows = pad_sequence(samples, batch_first=True)
    return nn.functional.pad(rows, (0, max(0, to - rows.shape[1])))


COLLATE = {"batch": _pad, "fixed": partial(_pad, to=CAP), "none": lambda samples: (torch.cat(samples), len(samples))}


class Padded(L.LightningModule):
    """The mean over all targets of a loss that depends on the items before them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items, self.score = nn.Embedding(ITEMS, 4, padding_idx=0), nn.Linear(4, 1)
        self.shapes: list[tuple[int, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = batch if isinstance(batch, Tensor) else batch[0][None]
        self.shapes.append(tuple(rows.shape))
        return (self.score(self.items(rows).tanh()) - 1).square()[rows != 0].mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def _fit(
    collate: str = "batch",
    epochs: int = 2,
    checkpoint: str | None = None,
    callbacks: Sequence[Any] = (),
    lengths: Any = LENGTHS,
    batch_size: int = 8,
    **options: Any,
) -> dict[str, Any]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    given = {"loss_reduction": "target_mean", "target_counts": LENGTHS, "cost": CostModel(), **options}
    data = FreeScaleDataModule(Histories(), lengths, batch_size, collate_fn=COLLATE[collate], seed=3, **given)
    model, fitted = Padded(), trainer(devices=2, max_epochs=epochs, callbacks=list(callbacks))
    fitted.fit(model, data, ckpt_path=checkpoint)
    weights = {name: each.detach().clone() for name, each in model.state_dict().items()}
    found = {"weights": weights, "shapes": model.shapes, "padding": data.train.padding, "planned": data.train.plans_padding}
    found["sorted"] = data.train.resumed_sampler(0, 2, epochs).is_padded(epochs, 0)
    return {
        **found,
        "messages": "\n".join(messages),
        "mode": data.train.assignment_mode,
        "keeps": data.train.keeps_equal_counts,
        "chosen": data.train.micro_batches.chosen,
    }


CASES: dict[str, dict[str, Any]] = {
    "found out": {"balance": BalanceOptions()},
    "from the first step on": {"balance": BalanceOptions(padding="batch")},
    "in micro-batches": {"balance": BalanceOptions(padding="batch"), "micro_batches": 3},
    "found out in micro-batches": {"balance": BalanceOptions(), "micro_batches": 2},
    "at bounded counts": {"balance": BalanceOptions(assignment_mode="slack")},
    "never": {"balance": BalanceOptions(padding="none")},
    "calibrated": {"cost": "auto"},
}


def _cases() -> dict[str, dict[str, Any]]:
    return {"as drawn": _fit(balance=False), **{name: _fit(**options) for name, options in CASES.items()}}


def test_the_gradient_stays_and_samples_of_a_length_come_together() -> None:
    ranks = run_distributed(_cases, 2, timeout=240)
    for found in ranks:
        expected = found.pop("as drawn")
        for name, case in found.items():
            for weight, value in case["weights"].items():
                torch.testing.assert_close(value, expected["weights"][weight], rtol=1e-5, atol=1e-6, msg=f"{name}: {weight}")
            assert (case["padding"], case["planned"]) == (("none", False) if name == "never" else ("batch", True)), name
            assert case["mode"] == ("slack" if "bounded" in name else "fixed" if name == "never" else "free"), name
    first, second = (found["from the first step on"]["shapes"] for found in ranks)
    computed = [max(a * b, c * d) for (a, b), (c, d) in zip(first, second)]
    assert sum(computed) < 0.8 * len(computed) * 8 * CAP and max(computed) <= 8 * CAP
    messages = ranks[0]["found out"]["messages"]
    parted = [name for name, case in ranks[0].items() if "With micro_batches=" in case["messages"]]
    assert "from the first step on" in parted and not [name for name in parted if "micro-batches" in name]
    assert (
        "padded to their longest sample" in messages
        and "of the computed tokens" in messages
        and ranks[1]["found out"]["messages"] == ""
    )


def _others() -> dict[str, dict[str, Any]]:
    options: dict[str, Any] = {"balance": BalanceOptions(), "epochs": 1}
    return {
        "fixed": _fit("fixed", **options),
        "said": _fit("fixed", balance=BalanceOptions(padding="fixed"), epochs=1),
        "wrong": _fit("batch", balance=BalanceOptions(padding="fixed"), epochs=2),
        "none": _fit("none", **options),
        "auto": _fit(micro_batches="auto", **options),
        "cut": _fit(lengths=DRAWN, batch_size=24, micro_batches=3, balance=BalanceOptions(), epochs=5),
        "settled": _fit("none", micro_batches="auto", balance=BalanceOptions(padding="none"), epochs=1),
        "alike": _fit(balance=BalanceOptions(assignment_mode="zigzag"), epochs=1),
        "drawn": _fit("none", balance=False, epochs=1),
    }


def test_other_batches_are_balanced_as_before() -> None:
    for rank, found in enumerate(run_distributed(_others, 2, timeout=240)):
        assert found["fixed"]["padding"] == "fixed" and not found["fixed"]["planned"]
        assert {shape[0] for shape in found["fixed"]["shapes"][:-2]} == {8}, "equal counts"
        assert not found["fixed"]["sorted"] and found["cut"]["sorted"]
        assert found["cut"]["padding"] == "batch", "though the longest sample of every batch is cut to one length"
        assert found["none"]["padding"] == "none" and not found["none"]["planned"] and not found["alike"]["planned"]
        assert (found["auto"]["chosen"], found["settled"]["chosen"]) == (None, 1), "more can help only where batches are padded"
        if rank == 0:
            messages = found["fixed"]["messages"]
            assert f"every batch is padded to {CAP}" in messages and "times fewer tokens" in messages
            assert f"every batch is padded to {CAP}" in found["said"]["messages"]
            assert "do not have one length" in found["wrong"]["messages"] and found["wrong"]["padding"] == "fixed"
            assert "padded" not in found["none"]["messages"] and "the plan ignores padding" in found["alike"]["messages"]
        for weight, value in found["none"]["weights"].items():
            torch.testing.assert_close(value, found["drawn"]["weights"][weight], rtol=1e-5, atol=1e-6)


DEAR = np.where(np.arange(SAMPLES) % 16 == 0, 5.0, 1.0)
"""Costs with one expensive sample. With equal counts, its rank is above the mean."""


def _with_dear_samples() -> dict[str, dict[str, Any]]:
    options: dict[str, Any] = {"collate": "none", "cost": DEAR, "epochs": 1}
    return {
        "as drawn": _fit(**options, balance=False),
        "found out": _fit(**options, balance=BalanceOptions()),
        "said": _fit(**options, balance=BalanceOptions(padding="none")),
        "no lengths": _fit(**options, lengths=None, balance=BalanceOptions()),
        "given": _fit(**options, balance=BalanceOptions(assignment_mode="fixed")),
        "in parts": _fit(**options, balance=BalanceOptions(padding="none"), micro_batches=2),
        "unweighted": _fit(**options, balance=BalanceOptions(), loss_reduction="unweighted", target_counts=None),
        "alike": _fit("none", cost=np.ones(SAMPLES), epochs=1, balance=BalanceOptions()),
    }


def test_jagged_batches_have_unequal_counts_where_that_lowers_the_bound() -> None:
    ranks = run_distributed(_with_dear_samples, 2, timeout=240)
    for found in ranks:
        modes = {name: case["mode"] for name, case in found.items() if name != "as drawn"}
        chosen = dict.fromkeys(("found out", "said", "no lengths"), "slack")
        assert modes == {**chosen, **dict.fromkeys(("given", "in parts", "unweighted", "alike"), "fixed")}
        assert [name for name, case in found.items() if case["keeps"]] == ["in parts", "alike"]
        for name in chosen:
            for weight, value in found[name]["weights"].items():
                expected = found["as drawn"]["weights"][weight]
                torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6, msg=f"{name}: {weight}")
    messages = {name: case["messages"] for name, case in ranks[0].items()}
    assert (
        "unequal numbers of samples (assignment_mode='slack')" in messages["found out"] and "from step 0 on" in messages["said"]
    )
    assert "the ranks get equal numbers of samples (assignment_mode='fixed')" in messages["alike"]
    assert not any("numbers of samples" in messages[name] for name in ("as drawn", "given", "in parts", "unweighted"))
    assert not any("numbers of samples" in case["messages"] for case in ranks[1].values()), "rank 0 alone says it"


def _stopped_and_resumed(collate: str, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    # not "auto", whose costs come from measured times and differ from run to run
    path, cost = f"{folder}/stopped.ckpt", DEAR if collate == "none" else CostModel()
    whole = _fit(collate, balance=BalanceOptions(), cost=cost, callbacks=[SaveAt(path, 7)])
    return whole, _fit(collate, checkpoint=path, cost=cost, balance=BalanceOptions())


@pytest.mark.parametrize("collate", ["batch", "fixed", "none"])
def test_a_resumed_run_plans_as_the_one_before_to_the_bit(collate: str, tmp_path: Path) -> None:
    for whole, resumed in run_distributed(_stopped_and_resumed, 2, collate, str(tmp_path)):
        assert resumed["shapes"] == whole["shapes"][7:] and resumed["padding"] == whole["padding"] == collate
        assert resumed["mode"] == whole["mode"]
        for name, value in resumed["weights"].items():
            assert torch.equal(value, whole["weights"][name]), name


def test_a_checkpoint_does_not_overrule_what_is_given() -> None:
    found = FreeScaleDataModule(Histories(), LENGTHS, 8, balance=BalanceOptions(padding="batch"))
    given = FreeScaleDataModule(Histories(), LENGTHS, 8, balance=BalanceOptions(padding="none"))
    given.train.load_state_dict(found.train.state_dict(1, 0, 2), 0, 2)
    assert not given.train.plans_padding and not given.train.resumed_sampler(0, 2, 1).is_padded(1, 0)


@pytest.mark.parametrize(("padded", "chosen"), [(False, "slack"), (True, "free")])
def test_a_checkpoint_does_not_overrule_the_counts_that_are_given(padded: bool, chosen: str) -> None:
    before = FreeScaleDataModule(Histories(), LENGTHS, 8, balance=BalanceOptions())
    before.train.pad_from(0, 3, padded=padded, assignment_mode=chosen)
    before.train.padding = "batch" if padded else "none"
    for mode, expected in (("fixed", "fixed"), ("auto", chosen)):
        data = FreeScaleDataModule(Histories(), LENGTHS, 8, balance=BalanceOptions(assignment_mode=mode))
        data.train.load_state_dict(before.train.state_dict(1, 0, 2), 0, 2)
        sampler = data.train.resumed_sampler(0, 2, 1)
        assert data.train.assignment_mode == expected and data.train.plans_padding == padded
        assert sampler.options_in(1, 0)["assignment_mode"] == expected and sampler.is_padded(1, 0) == padded


@pytest.mark.parametrize(
    ("options", "given", "named"),
    [
        ({"padding": "longest"}, {}, "padding='longest'"),
        ({"padding": "batch", "assignment_mode": "zigzag"}, {}, "zigzag"),
        ({"padding": "batch"}, {"batch_tokens": 500}, "batch_tokens"),
    ],
)
def test_what_does_not_go_with_padding_is_refused(options: dict[str, Any], given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        FreeScaleDataModule(Histories(), LENGTHS, 8, balance=BalanceOptions(**options), **given)


def test_another_strategy_is_refused_as_it_weighs_no_loss() -> None:
    data = FreeScaleDataModule(Histories(), LENGTHS, 8, collate_fn=_pad, balance=BalanceOptions(padding="batch"))
    data.trainer = trainer(devices=2, strategy="ddp")
    with pytest.raises(ValueError, match="freescale"):
        data.train_dataloader()


@pytest.mark.parametrize(("padding", "mode"), [("none", "slack"), ("batch", "free")])
def test_a_checkpoint_goes_on_under_another_strategy_as_drawn_for_it(padding: Any, mode: str) -> None:
    """Resume with a strategy that does not weight losses: choices are made again, or left out."""
    plan: dict[str, Any] = {"padded": padding == "batch", "assignment_mode": mode}
    before, data = (FreeScaleDataModule(Histories(), LENGTHS, 8, collate_fn=_pad, balance=BalanceOptions()) for _ in range(2))
    before.train.pad_from(0, 3, **plan)
    before.train.padding = padding
    data.train.load_state_dict(before.train.state_dict(1, 0, 2), 0, 2)
    assert data.train.assignment_mode == mode
    data.trainer = trainer(devices=2, strategy="ddp")
    data.train_dataloader()
    assert (data.train.assignment_mode, data.train.padding, data.train.plans_padding) == ("fixed", "auto", False)


class Sized(Histories):
    lengths = LENGTHS


class Evaluated(Padded):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.shapes.append(tuple(batch.shape))
        scores = (self.score(self.items(batch).tanh()).squeeze(-1) * (batch != 0)).sum(dim=1) / (batch != 0).sum(dim=1)
        self.log("score", scores.mean(), sync_dist=True, batch_size=len(batch))

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (batch != 0).sum(dim=1)


def _evaluated(ranks: int, path: Any) -> dict[str, Any]:
    sets = dict.fromkeys(("val_dataset", "test_dataset", "predict_dataset"), Sized())
    found: dict[str, Any] = {}
    for padding in ("none", "batch", "auto"):
        data, again = (
            FreeScaleDataModule(Histories(), LENGTHS, 8, collate_fn=_pad, balance=BalanceOptions(padding=padding), **sets)
            for _ in range(2)
        )
        model, fitted = Evaluated(), trainer(devices=ranks, max_epochs=1)
        logged = [evaluate(model, data, verbose=False) for evaluate in (fitted.validate, fitted.test)]
        found[padding] = {"logged": logged, "shapes": model.shapes, "predicted": torch.cat(fitted.predict(model, data))}
    fitted.fit(model, data)
    fitted.save_checkpoint(path)
    found["in a fit"], model.shapes = model.shapes, []
    fitted.validate(model, again, ckpt_path=path, verbose=False)
    return {**found, "from a checkpoint": model.shapes}


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_groups_samples_and_logs_the_same(ranks: int, tmp_path: Any) -> None:
    for found in run_distributed(_evaluated, ranks, ranks, tmp_path / "last.ckpt", timeout=240):
        grouped, before, batches = found["batch"], found["none"], len(found["from a checkpoint"])
        for ours, theirs in zip(grouped["logged"], before["logged"], strict=True):
            assert list(ours[0].values()) == pytest.approx(list(theirs[0].values()), rel=1e-6)
        assert sum(a * b for a, b in grouped["shapes"]) < 0.85 * sum(a * b for a, b in before["shapes"])
        assert grouped["shapes"][:batches] == found["from a checkpoint"] == found["in a fit"][-batches:]
        assert found["auto"]["shapes"][:batches] == before["shapes"][:batches], "padding is unknown before a fit"
        assert torch.equal(grouped["predicted"], before["predicted"])
