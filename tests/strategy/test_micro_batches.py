"""Steps in micro-batches: the numbers, the hooks and the checkpoints of undivided steps."""

from __future__ import annotations

import io
import logging
import os
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import IterableDataset
from torchrec import KeyedJaggedTensor

from lightning_freescale import BubbleProfiler, FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.balance import MicroBatches
from lightning_freescale.data import BalanceOptions
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.overlap_training import CountingModel, assert_same
from tests.helpers.recommender import CATEGORIES, OPTIMIZERS, REPEATS, Samples, collate, trainer

SIZE = 90


def data(micro_batches: Any = 1, **options: Any) -> FreeScaleDataModule:
    """Histories of very different lengths; the last step is short."""
    samples = Samples(SIZE)
    given = {"batch_size": 8, "collate_fn": collate, "val_dataset": Samples(9, seed=1), **options}
    return FreeScaleDataModule(samples, samples.lengths, micro_batches=micro_batches, **{"balance": REPEATS, **given})


class Model(CountingModel):
    """Logs in every way, and follows a learning rate that changes with every step."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.seen: list[Any] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        self.seen.append((self.trainer.global_step, batch_idx, len(batch["label"])))
        predicted = self.net(batch["features"])
        loss = nn.functional.mse_loss(predicted, batch["label"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", predicted.abs().max(), on_step=True, on_epoch=False, reduce_fx="max")
        return {"loss": loss, "error": (predicted - batch["label"]).abs().mean().detach()}

    def on_after_backward(self) -> None:
        self.log("total", torch.ones(()), on_step=False, on_epoch=True, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watching(Callback):
    """What callbacks see of every step."""

    def __init__(self) -> None:
        self.ended: list[Any] = []
        self.calls: Counter[str] = Counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        shown = {name: float(value) for name, value in trainer.callback_metrics.items() if not name.startswith("val")}
        loss, error = (float(outputs.get(name, 0)) for name in ("loss", "error"))
        self.ended.append((trainer.global_step, batch_idx, loss, error, shown))

    def on_before_zero_grad(self, *args: Any) -> None:
        self.calls["zero_grad"] += 1

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.calls["step"] += 1


def run(micro_batches: Any, strategy: Any, make: Any = Model, data_options: Any = None, **options: Any) -> dict[str, Any]:
    """Fit on the ranks of ``run_distributed``; return what there is to compare."""
    torch.manual_seed(0)
    module, watching = make(), Watching()
    callbacks = [watching, *options.pop("callbacks", [])]
    fitting = trainer(
        devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, callbacks=callbacks, **{"max_epochs": 2, **options}
    )
    fitting.fit(module, datamodule=data(micro_batches, **(data_options or {})))
    state = fitting._checkpoint_connector.dump_checkpoint(weights_only=False)
    return {
        "weights": state["state_dict"],
        "optimizer": state["optimizer_states"],
        "schedule": state["lr_schedulers"],
        "loops": state["loops"],
        "ended": watching.ended,
        "calls": watching.calls,
        "epoch": {name: float(value) for name, value in fitting.callback_metrics.items()},
        "seen": module.seen if isinstance(module, Model) else None,
        "statistics": module.statistics,
        "overlap": getattr(fitting.strategy, "overlap_report", None),
    }


def assert_as_undivided(divided: dict[str, Any], whole: dict[str, Any], parts: int, saved: bool = True) -> None:
    close = {"rel": 2e-5, "abs": 1e-6}
    for mine, other in zip(divided["ended"], whole["ended"], strict=True):
        assert mine[:2] == other[:2]
        assert mine[2:4] == pytest.approx(other[2:4], **close)
        del mine[4]["largest"], other[4]["largest"]
        assert {**mine[4], "total": 0} == pytest.approx({**other[4], "total": 0}, **close)
    assert divided["calls"] == whole["calls"]
    assert divided["epoch"].pop("total") == pytest.approx(parts * whole["epoch"].pop("total"), rel=0.1)
    assert divided["epoch"] == pytest.approx(whole["epoch"], **close)
    assert divided["loops"] == whole["loops"]
    assert divided["schedule"] == whole["schedule"]
    assert divided["overlap"].steps == whole["overlap"].steps == whole["ended"][-1][0], "optimizer steps"
    assert divided["overlap"].tokens == pytest.approx(whole["overlap"].tokens)
    assert len({loss for _, _, loss, *_ in whole["ended"]}) > 3, "the loss must move, or equality means nothing"
    if saved:
        assert_same(divided["weights"], whole["weights"], rtol=1e-6, atol=1e-6)


def _against_undivided(options: dict[str, Any], **fit: Any) -> list[dict[str, Any]]:
    mode = {"balance": BalanceOptions(assignment_mode=options.get("mode", "fixed"))}
    mode |= {"loss_reduction": options.get("loss_reduction", "sample_mean")}
    whole = run(1, FreeScaleStrategy(), data_options=mode, **fit)
    return [whole, *(run(parts, FreeScaleStrategy(), data_options=mode, **fit) for parts in (2, 4))]


@pytest.mark.parametrize(
    ("options", "fit"),
    [
        ({}, {"val_check_interval": 2}),
        ({"mode": "slack"}, {"accumulate_grad_batches": 2}),
        pytest.param({"mode": "free"}, {"gradient_clip_val": 0.05, "limit_train_batches": 4}, marks=pytest.mark.slow),
    ],
)
def test_as_undivided(options: dict[str, Any], fit: dict[str, Any]) -> None:
    ranks = run_distributed(_against_undivided, 2, options, **fit)
    for rank, (whole, *divided) in enumerate(ranks):
        for parts, each in zip((2, 4), divided):
            whole["ended"] = [(*entry[:4], dict(entry[4], largest=0)) for entry in whole["ended"]]
            epoch = dict(whole["epoch"])
            assert_as_undivided(each, {**whole, "epoch": epoch}, parts, saved=rank == 0)
            steps = Counter((step, index) for step, index, _ in each["seen"])
            assert Counter(steps.values()).most_common(1)[0][0] == parts
            sizes = Counter()
            for step, index, size in each["seen"]:
                sizes[step, index] += size
            assert sizes == Counter({(step, index): size for step, index, size in whole["seen"]})


def _ddp_against_divided() -> list[Any]:
    make, fit = lambda: Model("adagrad"), {"data_options": {"drop_last": True}}
    return [run(1, "ddp", make, **fit), run(4, FreeScaleStrategy(), make, **fit)]


def test_as_under_ddp_with_an_optimizer_that_has_state() -> None:
    for rank, (ddp, divided) in enumerate(run_distributed(_ddp_against_divided, 2)):
        assert [entry[2] for entry in divided["ended"]] == pytest.approx([entry[2] for entry in ddp["ended"]], rel=1e-4)
        if rank == 0:
            assert_same(divided["weights"], ddp["weights"], rtol=1e-4, atol=1e-6)
            assert_same(divided["optimizer"][0]["state"], ddp["optimizer"][0]["state"], rtol=1e-4, atol=1e-6)


def _predicted() -> Any:
    return run(4, FreeScaleStrategy(), Model)["statistics"]


def test_every_micro_batch_is_known_ahead() -> None:
    for counted in run_distributed(_predicted, 2):
        # nothing is known before the first step, nor of the first micro-batch of an epoch
        assert counted["unpredicted_lookups"] == 3
        assert counted["mispredicted_lookups"] == 0


class HooksAndIds(Model):
    """Moves the batch by itself, and tells ids of batches as they come out of the loader."""

    def __init__(self) -> None:
        super().__init__()
        self.told = 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert not isinstance(batch, MicroBatches)
        return {"moved": batch}

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        assert not isinstance(batch, MicroBatches)
        return batch["moved"]

    def embedding_ids(self, batch: Any) -> Any:
        self.told += 1
        return batch["features"]


class HooksInPlace(HooksAndIds):
    """Changes the very batches that come out of the loader, on their way and when their step begins."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        moved = dict(batch)
        batch.clear()
        batch["moved"] = moved
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for part in batch.batches if isinstance(batch, MicroBatches) else [batch]:
            part["label"] += 1  # of the tensor that the loader has made

    def embedding_ids(self, batch: Any) -> Any:
        assert "moved" not in batch and float(batch["label"].max()) < 1, "it is asked before hooks change the batch"
        return super().embedding_ids(batch)


def _hooks(make: Any) -> Any:
    made = []
    found = run(3, FreeScaleStrategy(), lambda: made.append(make()) or made[0])
    return found["statistics"], made[0].told, len(made[0].seen)


@pytest.mark.parametrize("make", [HooksAndIds, HooksInPlace])
def test_hooks_and_told_ids_see_micro_batches_one_by_one(make: Any) -> None:
    for counted, told, parts in run_distributed(_hooks, 2, make):
        assert counted["unpredicted_lookups"] == 2, "the first of each epoch"
        assert counted["mispredicted_lookups"] == 0
        assert told == parts - 2, "it is asked once for each other one"


class ComputesIds(Model):
    """Makes its ids in the step, of a batch that a hook changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts: list[int] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch["shift"] = batch.get("shift", 0) + 1
        return batch

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.shifts.append(batch["shift"])
        given = batch["features"]
        ids = (5 * given.values() + batch["shift"]) % CATEGORIES
        computed = KeyedJaggedTensor(given.keys(), ids, lengths=given.lengths())
        return super().training_step({**batch, "features": computed}, batch_idx)


def _computes_ids() -> Any:
    made = []
    found = run(3, FreeScaleStrategy(lookahead="trial_run"), lambda: made.append(ComputesIds()) or made[0])
    return found["statistics"], made[0].shifts


def test_a_trial_run_gets_the_micro_batch_that_the_step_will_get() -> None:
    for counted, shifts in run_distributed(_computes_ids, 2):
        assert set(shifts) == {1}
        assert counted["mispredicted_lookups"] == 0
        assert counted["predicted_lookups"] > counted["unpredicted_lookups"]


class Sums(CountingModel):
    """The loss is a sum."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        predicted = self.net(batch["features"])
        loss = 0.01 * nn.functional.mse_loss(predicted, batch["label"], reduction="sum")
        error = (predicted - batch["label"]).abs().mean().detach()
        self.log("loss", loss, on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("error", error, on_step=True, on_epoch=True)
        return {"loss": loss, "error": error}


def _summed() -> list[dict[str, Any]]:
    options = {"loss_reduction": "sum", "balance": BalanceOptions(assignment_mode="free")}
    return [run(parts, FreeScaleStrategy(), lambda: Sums("sgd"), data_options=options) for parts in (1, 3)]


def test_a_loss_that_is_a_sum_and_means_beside_it() -> None:
    for rank, (whole, divided) in enumerate(run_distributed(_summed, 2)):
        for mine, other in zip(divided["ended"], whole["ended"], strict=True):
            assert mine[2:4] == pytest.approx(other[2:4], rel=2e-5)
            assert mine[4] == pytest.approx(other[4], rel=2e-5) and {"loss_step", "error_step"} <= mine[4].keys()
        assert divided["epoch"] == pytest.approx(whole["epoch"], rel=2e-5)
        if rank == 0:
            assert_same(divided["weights"], whole["weights"], rtol=1e-6, atol=1e-6)


class LearnsFromSome(CountingModel):
    """The loss is the mean over the targets; every other sample has one."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        has_target = batch["index"] % 2 == 0
        off = self.net(batch["features"])[has_target] - batch["label"][has_target]
        self.log("loss", off.square().mean(), on_step=True)
        return {"loss": off.square().mean(), "error": off.abs().mean().detach()}


def _learns_from_some() -> list[dict[str, Any]]:
    options = {"loss_reduction": "target_mean", "target_counts": torch.arange(SIZE) % 2 == 0, "drop_last": True}
    make, fit = lambda: LearnsFromSome("sgd"), {"limit_train_batches": 4, "max_epochs": 1}
    return [run(parts, FreeScaleStrategy(), make, data_options=options, **fit) for parts in (1, 8)]


def test_no_part_is_without_a_target() -> None:
    for rank, (whole, divided) in enumerate(run_distributed(_learns_from_some, 2)):
        losses = [ended[2] for ended in divided["ended"]]
        assert losses == pytest.approx([ended[2] for ended in whole["ended"]], rel=2e-5) and len(losses) == 4
        assert divided["statistics"]["predicted_lookups"] > whole["statistics"]["predicted_lookups"], "it was cut"
        if rank == 0:
            assert_same(divided["weights"], whole["weights"], rtol=1e-6, atol=1e-6)


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


def _skips(zero: bool) -> dict[str, Any]:
    return run(3, FreeScaleStrategy(), lambda: SkipsParts(zero))


def test_a_part_without_a_loss_counts_0_on_one_rank() -> None:
    (skipped,), (zero,) = (run_distributed(_skips, 1, zero) for zero in (False, True))
    assert skipped["seen"] == zero["seen"]
    assert_same(skipped["weights"], zero["weights"], rtol=1e-6, atol=1e-7)
    whole_steps = [ended for ended in zip(skipped["ended"], zero["ended"]) if ended[0][1] != 4]
    assert [mine[2] for mine, _ in whole_steps] == pytest.approx([other[2] for _, other in whole_steps], rel=1e-6)


def _skips_on_one_rank(parts: int, step: int) -> None:
    run(parts, FreeScaleStrategy(), lambda: SkipsParts(False, (1,), (step,)))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("parts", "step", "message"),
    [
        (3, 1, "training_step returned None for micro-batch 1 of 3, which on several ranks"),
        (3, 2, "training_step returned None for micro-batch 3 of 3, which on several ranks"),
        (1, 1, "RuntimeError: Skipping the `training_step`"),
    ],
)
def test_a_part_without_a_loss_is_refused_on_several_ranks(parts: int, step: int, message: str) -> None:
    with pytest.raises(RankFailed) as failure:
        run_distributed(_skips_on_one_rank, 2, parts, step, timeout=60)
    text = str(failure.value)
    assert message in text.partition("rank 1: ")[2]
    assert parts == 1 or "use FreeScaleDataModule(micro_batches=1)" in text
    assert text.startswith("rank 0: ") and "did not finish" not in text, "the other rank ends as well"


def _resumed(folder: str) -> list[Any]:
    keep = lambda: [ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")]  # noqa: E731
    whole = run(4, FreeScaleStrategy(), callbacks=keep(), enable_checkpointing=True)
    torch.manual_seed(0)
    module, watching = Model(), Watching()
    again = trainer(devices=2, strategy="freescale", max_epochs=2, callbacks=[watching])
    again.fit(module, datamodule=data(4), ckpt_path=f"{folder}/step=3.ckpt")
    return [whole["ended"], watching.ended]


def test_a_resumed_run_goes_on_bitwise(tmp_path: Any) -> None:
    for ended, resumed in run_distributed(_resumed, 2, str(tmp_path)):
        assert [entry[:4] for entry in resumed] == [entry[:4] for entry in ended[3:]]


def _profiled(folder: str) -> Any:
    found = []
    for parts in (1, 3):
        profiler = BubbleProfiler(
            f"{folder}/{parts}", every_n_steps=2, warmup_steps=1, verbose=False, lengths_fn=lambda batch: batch["label"]
        )
        run(parts, FreeScaleStrategy(), callbacks=[profiler], data_options={"drop_last": True})
        found.append(profiler.report)
    return [None if report is None else [len(report.steps), report.samples_per_s * report.step_s] for report in found]


def test_a_profiled_step_is_the_whole_step(tmp_path: Any) -> None:
    whole, divided = run_distributed(_profiled, 2, str(tmp_path))[0]
    assert whole == pytest.approx(divided)
    assert whole[1] == pytest.approx(16)


def _auto(folder: str) -> Any:
    module = Model()
    fitting = trainer(devices=2, strategy="freescale", max_epochs=30, logger=CSVLogger(folder), log_every_n_steps=1)
    module_data = data("auto", batch_size=4)
    fitting.fit(module, datamodule=module_data)
    schedule = module_data.train.micro_batches
    counts = Counter(step for step, *_ in module.seen)
    state = module_data.state_dict()
    again = data("auto", batch_size=4)
    again.load_state_dict(state)
    return schedule.chosen, [counts[step] for step in sorted(counts)], again.train.micro_batches.chosen


def test_auto_decides_once_and_alike(tmp_path: Any) -> None:
    found = run_distributed(_auto, 2, str(tmp_path))
    (chosen, counts, resumed), other = found
    assert found[0] == other
    assert chosen in (1, 2, 4)
    assert set(counts[:40]) == {1, 2, 4}, "they take turns"
    assert set(counts[-40:]) <= {chosen, min(chosen, 3)}
    assert resumed == chosen


def _auto_without_exchange() -> Any:
    chosen = []
    for strategy in (FreeScaleStrategy(overlap=False),):
        module_data = data("auto")
        trainer(devices=2, strategy=strategy, max_epochs=1).fit(Model(), datamodule=module_data)
        chosen.append(module_data.train.micro_batches.chosen)
    return chosen


def test_auto_is_one_where_nothing_is_overlapped() -> None:
    assert run_distributed(_auto_without_exchange, 2) == [[1], [1]]


class Plain(Model):
    """Has no embedding collection."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.seen.append((self.trainer.global_step, batch_idx, len(batch["label"])))
        return self.net(batch["label"][:, None]).square().mean()


class AsksForTheLoader(Model):
    """In ``configure_optimizers``, which comes before anybody knows what is overlapped, and before a checkpoint is read."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


class Stream(IterableDataset):
    """The samples, as they come."""

    def __iter__(self) -> Any:
        samples = Samples(SIZE)
        return (samples[index] for index in range(SIZE))


def _stream(**options: Any) -> FreeScaleDataModule:
    given = {"batch_size": 8, "collate_fn": collate, "micro_batches": "auto", **options}
    return FreeScaleDataModule(Stream(), lambda sample: len(sample["history"]), **given)


def _chose_four(path: str, make: Any, make_data: Any) -> None:
    """Write the checkpoint of a run that has found 4 micro-batches the quickest."""
    keep = ModelCheckpoint(os.path.dirname(path), every_n_train_steps=2, filename="two_steps")
    fitting = trainer(devices=1, strategy="freescale", max_steps=3, callbacks=[keep], enable_checkpointing=True)
    fitting.fit(make(), datamodule=make_data())
    saved = torch.load(keep.best_model_path, weights_only=False)
    saved["FreeScaleDataModule"]["micro_batches"] = 4
    torch.save(saved, path)


def _goes_on_without_exchange(path: str, make: Any, make_data: Any, strategy: Any) -> Any:
    _chose_four(path, make, make_data)
    told = io.StringIO()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(logging.StreamHandler(told))
    module, module_data = make(), make_data()
    fitting = trainer(devices=1, strategy=strategy, max_steps=5)
    fitting.fit(module, datamodule=module_data, ckpt_path=path)
    per_step = Counter(step for step, *_ in module.seen)
    return module_data.train.micro_batches.chosen, per_step, module_data.state_dict()["micro_batches"], told.getvalue()


@pytest.mark.parametrize(
    ("make", "make_data", "strategy"),
    [
        (Model, partial(data, "auto"), FreeScaleStrategy(overlap=False)),
        (AsksForTheLoader, partial(data, "auto"), FreeScaleStrategy(overlap=False)),
        (Plain, partial(data, "auto", val_dataset=None), "freescale"),
        (Model, _stream, FreeScaleStrategy(overlap=False)),
        (AsksForTheLoader, _stream, FreeScaleStrategy(overlap=False)),
    ],
)
def test_a_checkpoint_that_chose_four_goes_on_where_nothing_is_overlapped(
    tmp_path: Any, make: Any, make_data: Any, strategy: Any
) -> None:
    path = str(tmp_path / "chose_four.ckpt")
    ((chosen, per_step, saved, told),) = run_distributed(_goes_on_without_exchange, 1, path, make, make_data, strategy)
    assert chosen == 1
    assert per_step == {2: 1, 3: 1, 4: 1}
    assert saved == 4, "what was measured stays, for a run that overlaps again"
    assert "FreeScaleDataModule(micro_batches='auto'): 1, because " in told
    assert "not 4 as measured in the run that wrote the checkpoint" in told


def _loader_alone(strategy: Any, make_data: Any) -> Any:
    module, loader = Model(), make_data(batch_size=4, drop_last=True).train_dataloader()
    trainer(devices=1, strategy=strategy, max_epochs=40).fit(module, loader)
    counts = Counter(step for step, *_ in module.seen)
    return loader.sampler.micro_batches.chosen, set(counts.values()), [counts[step] for step in sorted(counts)][-20:]


@pytest.mark.parametrize(
    "make_data", [partial(data, "auto", batch_size=4, drop_last=True), partial(_stream, batch_size=4, drop_last=True)]
)
def test_auto_follows_a_loader_without_its_data_module(make_data: Any) -> None:
    ((chosen, tried, at_the_end),) = run_distributed(_loader_alone, 1, FreeScaleStrategy(), make_data)
    assert chosen in (1, 2, 4)
    assert tried == {1, 2, 4}
    assert set(at_the_end) == {chosen}
    assert run_distributed(_loader_alone, 1, FreeScaleStrategy(overlap=False), make_data)[0][:2] == (1, {1})


def _refused(strategy: Any) -> str:
    try:
        run(2, strategy)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_refused() -> None:
    (message,) = run_distributed(_refused, 1, FreeScaleStrategy(overlap=False))
    assert "FreeScaleDataModule(micro_batches=...): collections ['net.embeddings'] are updated during backward" in message
    assert message.endswith("Use micro_batches=1")
    (message,) = run_distributed(_refused, 1, "ddp")
    assert "needs Trainer(strategy='freescale')" in message
    with pytest.raises(ValueError, match=r"micro_batches=9, batch_size=8\): pass 'auto', or a number from 1 to batch_size"):
        data(9)
