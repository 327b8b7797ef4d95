"""Steps in micro-batches are those of undivided steps, with losses of all kinds, or are refused; and micro_batches="auto"."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch import nn
from torch.utils.data import IterableDataset

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.balance import MicroBatches
from lightning_freescale.data import BalanceOptions
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.micro_batch_training import SIZE, Model, data, run
from tests.helpers.overlap_modules import AsksEarly
from tests.helpers.overlap_training import CountingModel, assert_same
from tests.helpers.plain_modules import profiler
from tests.helpers.recommender import Samples, collate, trainer

CLOSE = {"rel": 2e-5, "abs": 1e-6}


def assert_as_undivided(divided: dict[str, Any], whole: dict[str, Any], parts: int, saved: bool) -> None:
    for mine, other in zip(divided["ended"], whole["ended"], strict=True):
        assert mine[:2] == other[:2]
        assert mine[2:4] == pytest.approx(other[2:4], **CLOSE)
        assert {**mine[4], "total": 0, "largest": 0} == pytest.approx({**other[4], "total": 0, "largest": 0}, **CLOSE)
    assert divided["calls"] == whole["calls"]
    totals = [each["epoch"]["total"] for each in (divided, whole)]
    assert totals[0] == pytest.approx(parts * totals[1], rel=0.1)
    assert {**divided["epoch"], "total": 0} == pytest.approx({**whole["epoch"], "total": 0}, **CLOSE)
    assert divided["loops"] == whole["loops"]
    assert divided["schedule"] == whole["schedule"]
    assert divided["overlap"].steps == whole["overlap"].steps == whole["ended"][-1][0], "optimizer steps"
    assert divided["overlap"].tokens == pytest.approx(whole["overlap"].tokens)
    assert len({loss for _, _, loss, *_ in whole["ended"]}) > 3, "the loss must move, or equality means nothing"
    if saved:
        assert_same(divided["weights"], whole["weights"], rtol=1e-6, atol=1e-6)
    steps = Counter((step, index) for step, index, _ in divided["seen"])
    assert Counter(steps.values()).most_common(1)[0][0] == parts
    sizes: Counter[tuple[int, int]] = Counter()
    for step, index, size in divided["seen"]:
        sizes[step, index] += size
    assert sizes == Counter({(step, index): size for step, index, size in whole["seen"]})


def _against_undivided(mode: str, **fit: Any) -> list[dict[str, Any]]:
    options = {"balance": BalanceOptions(assignment_mode=mode), "loss_reduction": "sample_mean"}
    return [run(parts, FreeScaleStrategy(), data_options=options, **fit) for parts in (1, 2, 4)]


@pytest.mark.parametrize(
    ("mode", "fit"),
    [
        ("fixed", {"val_check_interval": 2}),
        pytest.param("slack", {"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
        pytest.param("free", {"gradient_clip_val": 0.05, "limit_train_batches": 4}, marks=pytest.mark.slow),
    ],
)
def test_as_undivided(mode: str, fit: dict[str, Any]) -> None:
    for rank, (whole, *divided) in enumerate(run_distributed(_against_undivided, 2, mode, **fit)):
        for parts, each in zip((2, 4), divided):
            assert_as_undivided(each, whole, parts, saved=rank == 0)


# -- other losses, and an optimizer that has state


class Sums(CountingModel):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        predicted = self.net(batch["features"])
        loss = 0.01 * nn.functional.mse_loss(predicted, batch["label"], reduction="sum")
        error = (predicted - batch["label"]).abs().mean().detach()
        self.log("loss", loss, on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("error", error, on_step=True, on_epoch=True)
        return {"loss": loss, "error": error}


class LearnsFromSome(CountingModel):
    """The loss is the mean over the targets; every other sample has one."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        has_target = batch["index"] % 2 == 0
        off = self.net(batch["features"])[has_target] - batch["label"][has_target]
        self.log("loss", off.square().mean(), on_step=True)
        return {"loss": off.square().mean(), "error": off.abs().mean().detach()}


def _pairs() -> dict[str, list[dict[str, Any]]]:
    free = {"loss_reduction": "sum", "balance": BalanceOptions(assignment_mode="free")}
    some = {"loss_reduction": "target_mean", "target_counts": torch.arange(SIZE) % 2 == 0, "drop_last": True}
    short, whole = {"limit_train_batches": 4, "max_epochs": 1}, {"data_options": {"drop_last": True}}
    return {
        "sum": [run(parts, FreeScaleStrategy(), lambda: Sums("sgd"), free) for parts in (1, 3)],
        "some": [run(parts, FreeScaleStrategy(), lambda: LearnsFromSome("sgd"), some, **short) for parts in (1, 8)],
        "ddp": [run(parts, way, lambda: Model("adagrad"), **whole) for parts, way in ((1, "ddp"), (4, FreeScaleStrategy()))],
    }


def test_other_losses_and_as_under_ddp() -> None:
    for rank, pairs in enumerate(run_distributed(_pairs, 2)):
        for name, (whole, divided) in pairs.items():
            losses = [[ended[2] for ended in each["ended"]] for each in (divided, whole)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-4 if name == "ddp" else 2e-5), name
            if rank == 0 and name == "ddp":
                assert_same(divided["weights"], whole["weights"], rtol=1e-4, atol=1e-6)
                assert_same(divided["optimizer"][0]["state"], whole["optimizer"][0]["state"], rtol=1e-4, atol=1e-6)
            elif rank == 0:
                assert_same(divided["weights"], whole["weights"], rtol=1e-6, atol=1e-6)
        # nothing is known before the first step, nor of the first micro-batch of an epoch
        counted = [pairs["ddp"][1]["statistics"][f"{how}predicted_lookups"] for how in ("un", "mis")]
        assert counted == [3, 0], "every other micro-batch is known ahead"
        whole, divided = pairs["sum"]
        assert divided["epoch"] == pytest.approx(whole["epoch"], rel=2e-5)
        for mine, other in zip(divided["ended"], whole["ended"]):
            assert mine[3] == pytest.approx(other[3], rel=2e-5)
            assert mine[4] == pytest.approx(other[4], rel=2e-5) and {"loss_step", "error_step"} <= mine[4].keys()
        whole, divided = pairs["some"]
        assert len(divided["ended"]) == 4
        assert divided["statistics"]["predicted_lookups"] > whole["statistics"]["predicted_lookups"], "it was cut"


# -- parts without a loss


class SkipsParts(Model):
    """Returns no loss for some parts: the first, the last, one between, all of a step; or one of 0 instead."""

    def __init__(self, zero: bool, ranks: tuple[int, ...] = (0,), steps: tuple[int, ...] = (1, 2, 3, 4)) -> None:
        super().__init__("adagrad")
        self.zero, self.ranks, self.steps = zero, ranks, steps

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        part = sum(seen[:2] == self.seen[-1][:2] for seen in self.seen) - 1
        parts = {1: [0], 2: [2], 3: [1], 4: [0, 1, 2]}
        skipped = batch_idx in self.steps and self.global_rank in self.ranks and part in parts[batch_idx]
        if skipped and self.zero:
            return {**output, "loss": 0 * output["loss"]}
        return None if skipped else output


def test_a_part_without_a_loss_counts_0_on_one_rank() -> None:
    skipped, zero = (run_distributed(run, 1, 3, "freescale", partial(SkipsParts, each))[0] for each in (False, True))
    assert skipped["seen"] == zero["seen"]
    assert_same(skipped["weights"], zero["weights"], rtol=1e-6, atol=1e-7)
    whole_steps = [ended for ended in zip(skipped["ended"], zero["ended"]) if ended[0][1] != 4]
    assert [mine[2] for mine, _ in whole_steps] == pytest.approx([other[2] for _, other in whole_steps], rel=1e-6)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("parts", "message"),
    [(3, "training_step returned None for micro-batch 1 of 3"), (1, "RuntimeError: Skipping the `training_step`")],
)
def test_a_part_without_a_loss_is_refused_on_several_ranks(parts: int, message: str) -> None:
    with pytest.raises(RankFailed) as failure:
        run_distributed(run, 2, parts, FreeScaleStrategy(), lambda: SkipsParts(False, (1,), (1,)), timeout=60)
    text = str(failure.value)
    assert message in text.partition("rank 1: ")[2]
    assert text.startswith("rank 0: ") and "did not finish" not in text, "the other rank ends as well"


# -- hooks and embedding_ids get micro-batches one by one


class Hooks(Model):
    """Changes the batches that come out of the loader, on their way and when their step begins; and returns their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert not isinstance(batch, MicroBatches)
        moved = dict(batch)
        batch.clear()
        batch["moved"] = moved
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        assert not isinstance(batch, MicroBatches)
        return batch["moved"]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for part in batch.batches if isinstance(batch, MicroBatches) else [batch]:
            part["label"] += 1  # of the tensor that the loader has made

    def embedding_ids(self, batch: Any) -> Any:
        assert "moved" not in batch and float(batch["label"].max()) < 1, "it is asked before hooks change the batch"
        self.asked += 1
        return batch["features"]


def _one_by_one() -> tuple[dict[str, float], int, int]:
    hooks = Hooks()
    return run(3, FreeScaleStrategy(), lambda: hooks)["statistics"], hooks.asked, len(hooks.seen)


def test_hooks_and_embedding_ids_see_micro_batches_one_by_one() -> None:
    for counted, asked, parts in run_distributed(_one_by_one, 2):
        assert counted["unpredicted_lookups"] == 2, "the first of each epoch"
        assert counted["mispredicted_lookups"] == 0
        assert asked == parts - 2, "it is asked once for each other one"


# -- profiled, refused


def _profiled(folder: str) -> Any:
    found = []
    for parts in (1, 3):
        profiling = profiler(f"{folder}/{parts}", every_n_steps=2, lengths_fn=lambda batch: batch["label"])
        run(parts, FreeScaleStrategy(), callbacks=[profiling], data_options={"drop_last": True})
        found.append(profiling.report)
    return [None if report is None else [len(report.steps), report.samples_per_s * report.step_s] for report in found]


def test_a_profiled_step_is_the_whole_step(tmp_path: Any) -> None:
    whole, divided = run_distributed(_profiled, 2, str(tmp_path))[0]
    assert whole == pytest.approx(divided)
    assert whole[1] == pytest.approx(16)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [(FreeScaleStrategy(overlap="torchrec"), r"\['net.embeddings'\]"), ("ddp", "strategy='freescale'")],
)
def test_refused(strategy: Any, message: str) -> None:
    with pytest.raises(RankFailed, match=rf"ValueError: .*micro_batches.*{message}"):
        run_distributed(run, 1, 2, strategy)
    with pytest.raises(ValueError, match="micro_batches=9, batch_size=8"):
        data(9)


# -- micro_batches="auto" decides once, is one where nothing is overlapped, and follows any loader

PLAIN = FreeScaleStrategy(overlap="torchrec")


def _auto() -> Any:
    module = Model()
    fitting = trainer(devices=2, strategy="freescale", max_epochs=30)
    module_data = data("auto", batch_size=4)
    fitting.fit(module, datamodule=module_data)
    counts = Counter(step for step, *_ in module.seen)
    again = data("auto", batch_size=4)
    again.load_state_dict(module_data.state_dict())
    return module_data.train.micro_batches.chosen, [counts[step] for step in sorted(counts)], again.train.micro_batches.chosen


@pytest.mark.slow
def test_auto_decides_once_and_alike() -> None:
    found = run_distributed(_auto, 2)
    (chosen, counts, resumed), other = found
    assert found[0] == other
    assert chosen in (1, 2, 4)
    assert set(counts[:40]) == {1, 2, 4}, "they take turns"
    assert set(counts[-40:]) <= {chosen, min(chosen, 3)}
    assert resumed == chosen


class Plain(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.seen.append((self.trainer.global_step, batch_idx, len(batch["label"])))
        return self.net(batch["label"][:, None]).square().mean()


class AsksForTheLoader(AsksEarly, Model):
    """In ``configure_optimizers``, which comes before it is known what is overlapped, and before a checkpoint is read."""


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        samples = Samples(SIZE)
        return (samples[index] for index in range(SIZE))


def _stream(**options: Any) -> FreeScaleDataModule:
    given = {"batch_size": 8, "collate_fn": collate, "micro_batches": "auto", **options}
    return FreeScaleDataModule(Stream(), lambda sample: len(sample["history"]), **given)


def _goes_on_without_exchange(caplog: Any, folder: str, make: Any, make_data: Any, strategy: Any) -> Any:
    """Resume, as far as its checkpoint says, a run that has found 4 micro-batches the quickest."""
    keep = ModelCheckpoint(folder, every_n_train_steps=2, filename="two_steps")
    fitting = trainer(devices=1, strategy="freescale", max_steps=3, callbacks=[keep], enable_checkpointing=True)
    fitting.fit(make(), datamodule=make_data())
    saved = torch.load(keep.best_model_path, weights_only=False)
    saved["FreeScaleDataModule"]["micro_batches"] = 4
    torch.save(saved, f"{folder}/chose_four.ckpt")
    module, module_data = make(), make_data()
    fitting = trainer(devices=1, strategy=strategy, max_steps=5)
    with caplog.at_level(logging.INFO):
        fitting.fit(module, datamodule=module_data, ckpt_path=f"{folder}/chose_four.ckpt")
    per_step = Counter(step for step, *_ in module.seen)
    return module_data.train.micro_batches.chosen, per_step, module_data.state_dict()["micro_batches"], caplog.text


@pytest.mark.parametrize(
    ("make", "make_data", "strategy"),
    [
        (AsksForTheLoader, partial(data, "auto"), PLAIN),
        (Plain, partial(data, "auto", val_dataset=None, balance=BalanceOptions(padding="none")), "freescale"),
        (Model, _stream, PLAIN),
        (AsksForTheLoader, _stream, PLAIN),
    ],
)
def test_a_checkpoint_that_chose_four_goes_on_where_nothing_is_overlapped(
    caplog: pytest.LogCaptureFixture, tmp_path: Any, make: Any, make_data: Any, strategy: Any
) -> None:
    found = run_distributed(_goes_on_without_exchange, 1, caplog, str(tmp_path), make, make_data, strategy)
    ((chosen, per_step, saved, messages),) = found
    assert chosen == 1
    assert per_step == {2: 1, 3: 1, 4: 1}
    assert saved == 4, "what was measured stays, for a run that overlaps again"
    assert "FreeScaleDataModule(micro_batches='auto'): 1, " in messages


def _loader_alone(strategy: Any, make_data: Any, epochs: int) -> Any:
    module, loader = Model(), make_data(batch_size=4, drop_last=True).train_dataloader()
    trainer(devices=1, strategy=strategy, max_epochs=epochs).fit(module, loader)
    counts = Counter(step for step, *_ in module.seen)
    return loader.sampler.micro_batches.chosen, set(counts.values()), [counts[step] for step in sorted(counts)][-20:]


@pytest.mark.slow
@pytest.mark.parametrize("make_data", [_stream, partial(data, "auto")])
def test_auto_follows_a_loader_without_its_data_module(make_data: Any) -> None:
    ((chosen, tried, at_the_end),) = run_distributed(_loader_alone, 1, FreeScaleStrategy(), make_data, 40)
    assert chosen in (1, 2, 4)
    assert tried == {1, 2, 4}
    assert set(at_the_end) == {chosen}
    assert run_distributed(_loader_alone, 1, PLAIN, make_data, 2)[0][:2] == (1, {1})


# -- a callback that trains for a while inside of a fit, and restores everything


class Found(CountingModel):
    lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


def _finds_a_rate() -> list[dict[str, Any]]:
    runs = []
    for strategy, micro_batches in (("ddp", 1), ("freescale", 1), ("freescale", 2)):
        finder = LearningRateFinder(min_lr=0.01, max_lr=1.0, num_training_steps=4, early_stop_threshold=None)
        runs.append(run(micro_batches, strategy, Found, callbacks=[finder]))
    return runs


def test_a_fit_within_a_fit_is_that_of_ddp() -> None:
    ddp, *mine = run_distributed(_finds_a_rate, 2)[0]
    assert len(ddp["ended"]) > 4
    for each in mine:
        assert [step[:2] for step in each["ended"]] == [step[:2] for step in ddp["ended"]]
        assert_same(each["weights"], ddp["weights"], rtol=1e-5, atol=1e-6)
        assert_same(each["optimizer"], ddp["optimizer"], rtol=1e-5, atol=1e-7)
