"""EmbeddingBagCollections whose rows travel ahead and are pooled where they are needed: as the unsharded module under "ddp"."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embeddings.overlap import OverlapReport
from lightning_freescale.embeddings.overlap.bag_traffic import DECIDING_STEPS
from lightning_freescale.testing import run_distributed
from tests.helpers.bags import BagModel, BagSamples, Batch, OnlyBags, bag_loader, collate_bags
from tests.helpers.overlap_training import EPOCHS, KNOWN, STEPS, Run, assert_same, fit
from tests.helpers.recommender import trainer

EXCHANGES = 4  # sequences, bags of two widths, weighted bags


def both(makes: list[Callable[[], BagModel]], strategy: dict[str, Any] | None = None, **options: Any) -> list[tuple[Run, Run]]:
    """Each module under "ddp" and under "freescale"."""
    runs = []
    for make in makes:
        for which in ("ddp_find_unused_parameters_true", FreeScaleStrategy(find_unused_parameters=True, **(strategy or {}))):
            torch.manual_seed(0)
            given = {name: option() if callable(option) else option for name, option in options.items()}
            validation = given.pop("validation", None)
            runs.append(fit(make(), bag_loader(STEPS), validation, **{"max_epochs": EPOCHS, "strategy": which, **given}))
    return [*zip(runs[::2], runs[1::2])]


def assert_as_ddp(ranks: list[list[tuple[Run, Run]]]) -> None:
    """Losses, weights and states are those of the unsharded module."""
    for pairs in ranks:
        for ddp, mine in pairs:
            assert mine.losses == pytest.approx(ddp.losses, rel=2e-6, abs=1e-7)
            assert max(ddp.losses) / min(ddp.losses) > 1.2, "the loss must move, or equality means nothing"
    for ddp, mine in ranks[0]:
        assert_same(mine.weights, ddp.weights, rtol=2e-6, atol=1e-6)
        states = [{k: v for k, v in state["state"].items() if v} for state in (mine.states[0], ddp.states[0])]
        assert_same(*states, rtol=2e-6, atol=1e-6)


def looked_ahead(predicted: int, unpredicted: int, mispredicted: int) -> tuple[int, ...]:
    return tuple(EXCHANGES * count for count in (predicted, unpredicted, mispredicted))


EVERY_OPTIMIZER = [partial(BagModel, name) for name in ("sgd", "adagrad", "rowwise_adagrad")]


@pytest.mark.parametrize(("ranks", "dedup"), [(2, True), (2, False), pytest.param(4, True, marks=pytest.mark.slow)])
def test_as_under_ddp(ranks: int, dedup: bool) -> None:
    results = run_distributed(both, ranks, EVERY_OPTIMIZER, {"dedup": dedup})
    assert_as_ddp(results)
    for pairs in results:
        for _, run in pairs:
            assert run.looked_ahead() == looked_ahead(*KNOWN)
            assert run.statistics["non_colliding_bytes"] > 0
            assert run.statistics["steps"] == STEPS * EPOCHS, "however many exchanges a step has"


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2},
        {"validation": lambda: bag_loader(2, salt=7), "val_check_interval": 2},
    ],
)
def test_with_options_of_the_trainer(options: dict[str, Any]) -> None:
    results = run_distributed(both, 2, EVERY_OPTIMIZER[1:], **options)
    assert_as_ddp(results)
    for pairs in results:
        for _, run in pairs:
            assert run.looked_ahead() == looked_ahead(*KNOWN)


def test_without_clipping_the_numbers_are_others() -> None:
    clipped, plain = (
        run_distributed(both, 2, EVERY_OPTIMIZER[1:2], **options) for options in ({"gradient_clip_val": 0.05}, {})
    )
    assert clipped[0][0][1].losses != plain[0][0][1].losses


class Twice(BagModel):
    """Looks other bags up as well, and in every third step the first ones again."""

    def scores(self, batch: Batch) -> Tensor:
        ids = batch["bags"]
        others = KeyedJaggedTensor(ids.keys(), ids.values() * 5 % 3, lengths=ids.lengths())
        scores = super().scores(batch) + self.bags(others).values().mean(dim=1)
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls % 3 == 0:
            scores = scores + self.bags(ids).values().square().mean(dim=1)
        return scores


class Sometimes(BagModel):
    """Looks bags up in some steps, and in others the weighted ones alone."""

    def __init__(self) -> None:
        super().__init__("adagrad")
        self.calls = 0

    def scores(self, batch: Batch) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            return self.net(batch["features"])
        if self.calls % 3 == 1:
            return self.net(batch["features"]) + self.weighted(batch["weighted"]).values().mean(dim=1)
        return super().scores(batch)


class OnSomeRanks(BagModel):
    """The first rank looks weighted bags up in every step, the others in every second one."""

    def __init__(self) -> None:
        super().__init__("adagrad")
        self.calls = 0

    def scores(self, batch: Batch) -> Tensor:
        self.calls += 1
        scores = self.net(batch["features"])
        if self.calls % 2 and self.global_rank:
            return scores
        return scores + self.weighted(batch["weighted"]).values().mean(dim=1)


class Recomputes(BagModel):
    """Its bags are looked up again in backward."""

    def scores(self, batch: Batch) -> Tensor:
        return checkpoint(super().scores, batch, use_reentrant=False)


class LearnsWeights(BagModel):
    """Weights the bags by what a layer says of their ids."""

    def __init__(self) -> None:
        super().__init__("adagrad")
        self.weight_of = nn.Embedding(20, 1)

    def scores(self, batch: Batch) -> Tensor:
        ids = batch["weighted"]
        weights = self.weight_of(ids.values()).squeeze(1).exp()
        weighted = KeyedJaggedTensor(ids.keys(), ids.values(), weights, ids.lengths())
        return super().scores({**batch, "weighted": weighted})


def test_lookups_of_all_kinds() -> None:
    makes = [Twice, Sometimes, OnSomeRanks, Recomputes, LearnsWeights]
    results = run_distributed(both, 2, makes)
    assert_as_ddp(results)
    for pairs in results:
        for _, run in pairs[3:]:
            assert run.looked_ahead() == looked_ahead(*KNOWN), "the weights need not be known ahead"


class Computes(BagModel):
    """Its ids are known to a function, or to a trial run."""

    def scores(self, batch: Batch) -> Tensor:
        return super().scores({**batch, **computed(batch)})


def computed(batch: Batch) -> dict[str, KeyedJaggedTensor]:
    bags, weighted = batch["bags"], batch["weighted"]
    return {
        "bags": KeyedJaggedTensor(bags.keys(), bags.values() * 2 % 3, lengths=bags.lengths()),
        "weighted": KeyedJaggedTensor(weighted.keys(), weighted.values() * 3 % 10, weighted.weights() * 2, weighted.lengths()),
    }


@pytest.mark.parametrize("how", [{"ids_of": computed}, {"lookahead": "trial_run"}])
def test_ids_that_do_not_stand_in_the_batch(how: dict[str, Any]) -> None:
    results = run_distributed(both, 2, [Computes], how)
    assert_as_ddp(results)
    for pairs in results:
        predicted, _, mispredicted = pairs[0][1].looked_ahead()
        assert predicted >= EXCHANGES * KNOWN[0] and not mispredicted


class SavesAfterAnEpoch(L.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def _resumed(path: str) -> tuple[Run, Run]:
    runs = []
    for seed, options in ((0, {"callbacks": [SavesAfterAnEpoch(path)]}), (7, {"ckpt_path": path})):
        torch.manual_seed(seed)
        runs.append(fit(BagModel("adagrad"), bag_loader(STEPS), max_epochs=2, strategy="freescale", **options))
    return runs[0], runs[1]


def test_a_run_that_resumes(tmp_path: Path) -> None:
    results = run_distributed(_resumed, 2, str(tmp_path / "bags.ckpt"))
    for whole, rest in results:
        assert rest.losses == whole.losses[STEPS:]
    whole, rest = results[0]
    assert_same(rest.weights, whole.weights)
    assert_same(rest.states[0]["state"], whole.states[0]["state"])


def test_adam_on_cpu() -> None:
    """Torch's moves every row in every step, so that only the first one is alike; later ones are in the random cases."""
    for ddp, mine in (pairs[0] for pairs in run_distributed(both, 2, [partial(BagModel, "adam")])):
        assert mine.losses[:2] == pytest.approx(ddp.losses[:2], rel=2e-6)
        assert mine.looked_ahead() == looked_ahead(*KNOWN)


# -- long bags


class LongBags(BagModel):
    """Notes when TorchRec has taken bags over."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(self.trainer.strategy, FreeScaleStrategy):
            self.statistics = {**self.statistics, f"plain at {self.trainer.global_step}": len(plain_of(self.trainer))}

    def on_train_end(self) -> None:
        left = self.statistics
        super().on_train_end()
        self.statistics = {**self.statistics, **left}


def plain_of(trainer: Any) -> dict[str, str]:
    return trainer.strategy.overlap_controller.engine.plain


def long_bags(options: dict[str, Any], optimizer: str = "adagrad") -> tuple[Run, Run, list[str]]:
    """Under "ddp" and "freescale", with what is said of them."""
    steps, runs, told = DECIDING_STEPS + 4, [], []
    for strategy in ("ddp", "freescale"):
        torch.manual_seed(0)
        with infos() as said:
            loader = bag_loader(steps, longest=60, samples=2)
            runs.append(fit(LongBags(optimizer), loader, bag_loader(2), strategy=strategy, max_epochs=2, **options))
        told = [text for text in said if "is not overlapped" in text]
    return runs[0], runs[1], told


@contextmanager
def infos() -> Iterator[list[str]]:
    """What the package tells rank 0."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_long_bags_are_left_to_torchrec(optimizer: str) -> None:
    results = run_distributed(long_bags, 2, {}, optimizer)
    assert_as_ddp([[(ddp, mine)] for ddp, mine, _ in results])
    for _, run, _ in results:
        assert run.statistics[f"plain at {DECIDING_STEPS + 1}"] == 0
        assert run.statistics[f"plain at {DECIDING_STEPS + 2}"] == 1, "the weighted ones are short"
        assert run.looked_ahead()[0] > 2 * (2 * DECIDING_STEPS), "the others go on"
    (told,) = results[0][2]
    assert "the exchange of 'bags' is not overlapped" in told and "The fewer bytes decide" in told
    assert results[1][2] == []


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}])
def test_long_bags_that_torchrec_could_not_train_are_overlapped(options: dict[str, Any]) -> None:
    results = run_distributed(long_bags, 2, options)
    assert_as_ddp([[(ddp, mine)] for ddp, mine, _ in results])
    assert all(not told for *_, told in results)


def only_bags() -> OverlapReport | None:
    """The report of a fit in which nothing was overlapped any more in the end."""
    rank, samples = int(os.environ["RANK"]), BagSamples(400)
    batches = [collate_bags([samples[20 * step + index] for index in range(4 + rank)]) for step in range(DECIDING_STEPS + 5)]
    fitting = trainer(devices=2)
    fitting.fit(OnlyBags(), DataLoader(batches, batch_size=None))
    return fitting.strategy.overlap_report


def test_the_report_has_what_was_measured_before_all_bags_were_left() -> None:
    one, other = run_distributed(only_bags, 2)
    assert one is not None and one == other, "means over all ranks, which have other numbers of samples"
    assert one.steps == DECIDING_STEPS + 1 and one.rows > 0 and one.non_colliding_bytes > 0


def fit_with_target(module: L.LightningModule, loader: Any, resume: str | None = None, **options: Any) -> tuple[Any, list[str]]:
    """What the autopilot has found in one epoch, and what it tells."""
    strategy = FreeScaleStrategy(target_bubble_reduction=0.5)
    with infos() as said:
        trainer(devices=2, strategy=strategy, **options).fit(module, loader, ckpt_path=resume)
    return strategy.chosen_settings, [text for text in said if "target_bubble_reduction" in text]


def all_left_under_the_autopilot() -> tuple[Any, list[str]]:
    samples = BagSamples(400)
    batches = [collate_bags([samples[20 * step + index] for index in range(4)]) for step in range(DECIDING_STEPS + 5)]
    return fit_with_target(OnlyBags(), DataLoader(batches, batch_size=None))


def test_nothing_is_chosen_when_all_bags_were_left() -> None:
    (found, told), (other, _) = run_distributed(all_left_under_the_autopilot, 2)
    assert found == other and found["kept"] == {} and found["frozen"]
    first, last = (text.removeprefix("FreeScaleStrategy(target_bubble_reduction=0.5): ") for text in told)
    assert first.startswith("chooses split_backward")
    assert last == "there is nothing to choose from, because no exchange is overlapped any more"


def some_left_under_the_autopilot(folder: str) -> list[tuple[Any, list[str]]]:
    """Of a whole run, and of one that resumes behind the step in which bags were left."""
    steps = DECIDING_STEPS + 6
    keep = ModelCheckpoint(folder, every_n_train_steps=DECIDING_STEPS + 3, save_top_k=-1, filename="kept")
    loader = lambda: bag_loader(steps, longest=60, samples=2)  # noqa: E731
    whole = fit_with_target(LongBags(), loader(), callbacks=[keep], enable_checkpointing=True)
    return [whole, fit_with_target(LongBags(), loader(), resume=f"{folder}/kept.ckpt")]


def test_the_autopilot_measures_anew_when_bags_are_left(tmp_path: Path) -> None:
    whole, resumed = zip(*run_distributed(some_left_under_the_autopilot, 2, str(tmp_path)))
    for found, _ in (*whole, *resumed):
        assert found["overlapped"] == ["net.embeddings", "weighted"] and not found["frozen"]
    anew = [text for text in whole[0][1] if "begins anew" in text]
    # in the batch after the one that was counted last, and each one's numbers begin with 0
    assert len(anew) == 1 and f"begins anew from step {DECIDING_STEPS + 2} of epoch 0 on" in anew[0]
    assert not any("begins anew" in text for text in resumed[0][1]), "what it has measured was without these bags"
