"""Bags, overlapped and left to TorchRec: the numbers of the unsharded module under "ddp"."""

from __future__ import annotations

import io
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embeddings.overlap import OverlapReport
from lightning_freescale.embeddings.overlap.bag_traffic import DECIDING_STEPS
from lightning_freescale.testing import run_distributed
from tests.helpers.bags import BagModel, BagSamples, Batch, OnlyBags, bag_loader, collate_bags
from tests.helpers.overlap_training import EPOCHS, GIVEN, KNOWN, STEPS, Case, Run, departures, fit_all
from tests.helpers.recommender import trainer

EXCHANGES = 4  # sequences, bags of two widths, weighted bags
AHEAD = tuple(EXCHANGES * count for count in KNOWN)
DDP, UNUSED = "ddp_find_unused_parameters_true", {"find_unused_parameters": True}
CLOSE = {"losses": (2e-6, 1e-7), "weights": (2e-6, 1e-6), "states": (2e-6, 1e-6), "moves": 1.2}


def bags(make: Any, ahead: Any = AHEAD, overlap: Any = None, validation: Any = None, notice: str = "", **options: Any) -> Case:
    return Case(make, lambda: bag_loader(STEPS), options, overlap or {}, validation, ahead=ahead, notice=notice)


class Twice(BagModel):
    def scores(self, batch: Batch) -> Tensor:
        ids = batch["bags"]
        others = KeyedJaggedTensor(ids.keys(), ids.values() * 5 % 3, lengths=ids.lengths())
        return super().scores(batch) + self.bags(others).values().mean(dim=1)


class OnSomeRanks(BagModel):
    """The first rank looks weighted bags up in every step, the others in every second one."""

    calls = 0

    def scores(self, batch: Batch) -> Tensor:
        self.calls += 1
        looked_up = self.calls % 2 == 0 or self.global_rank == 0
        return self.net(batch["features"]) + (self.weighted(batch["weighted"]).values().mean(dim=1) if looked_up else 0)


class LearnsWeights(BagModel):
    """Weights the bags by a layer's values of their ids."""

    def __init__(self) -> None:
        super().__init__("adagrad")
        self.weight_of = nn.Embedding(20, 1)

    def scores(self, batch: Batch) -> Tensor:
        ids = batch["weighted"]
        weights = self.weight_of(ids.values()).squeeze(1).exp()
        weighted = KeyedJaggedTensor(ids.keys(), ids.values(), weights, ids.lengths())
        return super().scores({**batch, "weighted": weighted})


class Computes(BagModel):
    """Its ids are known to a function."""

    def scores(self, batch: Batch) -> Tensor:
        return super().scores({**batch, **computed(batch)})


def computed(batch: Batch) -> dict[str, KeyedJaggedTensor]:
    bags, weighted = batch["bags"], batch["weighted"]
    return {
        "bags": KeyedJaggedTensor(bags.keys(), bags.values() * 2 % 3, lengths=bags.lengths()),
        "weighted": KeyedJaggedTensor(weighted.keys(), weighted.values() * 3 % 10, weighted.weights() * 2, weighted.lengths()),
    }


BY_VALUE = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2}
IN_TIER_2 = [(2, False), (4, True)]
OPTIMIZERS = {name: bags(partial(BagModel, name)) for name in ("sgd", "adagrad", "rowwise_adagrad")}
OTHERS = {
    "windows": bags(BagModel, accumulate_grad_batches=2),
    "by norm": bags(partial(BagModel, "rowwise_adagrad"), gradient_clip_val=0.05),
    "windows by value": bags(BagModel, overlap={"dedup": False}, **BY_VALUE),
    "validation": bags(partial(BagModel, "rowwise_adagrad"), validation=lambda: bag_loader(2, salt=7), val_check_interval=2),
    "twice": bags(Twice, None, notice="'bags'"),
    "on some ranks": bags(OnSomeRanks, None),
    "weights that are learned": bags(LearnsWeights),  # they need not be known ahead
    "a function": bags(Computes, (3 * GIVEN[0] + KNOWN[0], 3 * GIVEN[1] + KNOWN[1], 0), {"ids_of": computed}),
}


@pytest.mark.parametrize(("ranks", "dedup"), [(2, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in IN_TIER_2)])
def test_as_under_ddp(ranks: int, dedup: bool) -> None:
    results = run_distributed(fit_all, ranks, OPTIMIZERS, DDP, {**UNUSED, "dedup": dedup})
    assert departures(OPTIMIZERS, results, **CLOSE) == []
    for runs in results:
        for _, run in runs.values():
            assert run.statistics["non_colliding_bytes"] > 0
            assert run.statistics["steps"] == STEPS * EPOCHS, "for any number of exchanges in a step"


def test_in_all_ways_as_under_ddp() -> None:
    results = run_distributed(fit_all, 2, OTHERS, DDP, UNUSED)
    assert departures(OTHERS, results, **CLOSE) == []
    clipped, plain = (results[0][name][0].weights for name in ("by norm", "validation"))
    assert all((plain[name] - clipped[name]).abs().max() > 1e-4 for name in plain if "bags" in name), "nothing was clipped"


# -- long bags


class LongBags(BagModel):
    """Notes when TorchRec has taken bags over."""

    def __init__(self, optimizer: str = "adagrad") -> None:
        super().__init__(optimizer)
        self.plain: list[int] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        controller = getattr(self.trainer.strategy, "overlap_controller", None)
        self.plain.append(-1 if controller is None else len(controller.engine.plain))

    def on_fit_end(self) -> None:
        self.statistics["plain"] = self.plain


def long_loader(steps: int) -> DataLoader:
    """Batches whose bags are fewer bytes than their rows."""
    return bag_loader(steps, longest=60, samples=2)


def long_bags(optimizer: str = "adagrad", **options: Any) -> Case:
    return Case(partial(LongBags, optimizer), lambda: long_loader(DECIDING_STEPS + 4), options, {}, lambda: bag_loader(2))


LEFT = {name: long_bags(name) for name in ("sgd", "adagrad", "rowwise_adagrad")}
KEPT = {"windows": long_bags(accumulate_grad_batches=2), "clipped": long_bags(gradient_clip_val=0.05)}


def _messages() -> io.StringIO:
    said = io.StringIO()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(logging.StreamHandler(said))
    return said


def _long(cases: dict[str, Case]) -> tuple[dict[str, list[Run]], str]:
    said = _messages()
    return fit_all(cases, "ddp", {}), said.getvalue()


SHORTER = {"adagrad": LEFT["adagrad"], "windows": KEPT["windows"]}


@pytest.mark.parametrize("cases", [SHORTER, pytest.param({**LEFT, **KEPT}, marks=pytest.mark.slow)])
def test_long_bags_are_left_to_torchrec_where_it_could_train_them(cases: dict[str, Case]) -> None:
    results = run_distributed(_long, 2, cases)
    assert departures(cases, [runs for runs, _ in results], **CLOSE) == []
    for rank, (runs, messages) in enumerate(results):
        for name, (_, run) in runs.items():
            plain = run.statistics["plain"]
            left = len(plain) - DECIDING_STEPS - 1 if name in LEFT else 0
            assert plain == [0] * (len(plain) - left) + [1] * left, "the weighted ones are short"
            assert run.looked_ahead()[0] > 2 * (2 * DECIDING_STEPS), "the others go on"
        assert sum("'bags'" in line for line in messages.splitlines()) == (0 if rank else len(LEFT.keys() & cases))


def only_long(samples: int) -> DataLoader:
    data = BagSamples(400)
    batches = [collate_bags([data[20 * step + index] for index in range(samples)]) for step in range(DECIDING_STEPS + 5)]
    return DataLoader(batches, batch_size=None)


def _only_bags() -> OverlapReport | None:
    """The report of a fit in which nothing was overlapped any more in the end."""
    fitting = trainer(devices=2)
    fitting.fit(OnlyBags(), only_long(4 + int(os.environ["RANK"])))
    return fitting.strategy.overlap_report


def test_the_report_has_what_was_measured_before_all_bags_were_left() -> None:
    one, other = run_distributed(_only_bags, 2)
    assert one is not None and one == other, "means over all ranks, which have other numbers of samples"
    assert one.steps == DECIDING_STEPS + 1 and one.rows > 0 and one.non_colliding_bytes > 0


def _with_target(module: Any, loader: Any, resume: str | None = None, **options: Any) -> tuple[Any, list[str]]:
    """What the autopilot has found in one epoch, and its messages."""
    strategy, said = FreeScaleStrategy(target_bubble_reduction=0.5), _messages()
    trainer(devices=2, strategy=strategy, **options).fit(module, loader, ckpt_path=resume)
    return strategy.chosen_settings, [text for text in said.getvalue().splitlines() if "target_bubble_reduction" in text]


def _under_the_autopilot(folder: str) -> list[tuple[Any, list[str]]]:
    """Where all bags are left; where some are; and where that run goes on behind the step in which they were."""
    keep = ModelCheckpoint(folder, every_n_train_steps=DECIDING_STEPS + 3, save_top_k=-1, filename="kept")
    steps = DECIDING_STEPS + 6
    return [
        _with_target(OnlyBags(), only_long(4)),
        _with_target(LongBags(), long_loader(steps), callbacks=[keep], enable_checkpointing=True),
        _with_target(LongBags(), long_loader(steps), resume=f"{folder}/kept.ckpt"),
    ]


def test_the_autopilot_measures_anew_when_bags_are_left(tmp_path: Path) -> None:
    ranks = run_distributed(_under_the_autopilot, 2, str(tmp_path))
    (alone, messages_alone), (_, messages), (_, messages_again) = ranks[0]
    assert [found for found, _ in ranks[1]] == [found for found, _ in ranks[0]]
    assert alone["kept"] == {} and alone["frozen"]
    assert len(messages_alone) == 2 and "split_backward" in messages_alone[0], "there is nothing to choose from in the end"
    for found, _ in ranks[0][1:]:
        assert found["overlapped"] == ["net.embeddings", "weighted"] and not found["frozen"]
    # in the batch after the one that was counted last, and each one's numbers begin with 0
    assert sum(f"step {DECIDING_STEPS + 2} of epoch 0" in text for text in messages) == 1
    assert not any("of epoch" in text for text in messages_again), "what it has measured was without these bags"
