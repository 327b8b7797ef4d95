"""Resumed runs: bitwise the uninterrupted run on the same ranks; every sample once on other numbers of ranks."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.checkpoint.run_state import lay_out_buckets, noting_order
from lightning_freescale.testing import RankFailed, run_distributed
from tests.checkpoint.fits import (
    EPOCHS,
    GLOBAL_BATCH,
    SAMPLES,
    STEPS,
    Fitted,
    SaveAt,
    Seen,
    Stream,
    assert_continued,
    fit,
    samples_by_step,
)
from tests.helpers.overlap_training import assert_same
from tests.helpers.recommender import OPTIMIZERS, REPEATS, Recommender, Samples, StopAt, collate, trainer


def at_epoch_end(path: Path) -> ModelCheckpoint:
    return ModelCheckpoint(path.parent, filename=path.stem, save_on_train_epoch_end=True, every_n_epochs=1)


class InAnotherOrder(Seen):
    """A model that uses its layers in another order than it has them. DDP then rearranges its buckets after the first step."""

    def __init__(self) -> None:
        super().__init__("sgd", dropout=0.0)
        self.last, self.first, self.wide = nn.Linear(256, 1), nn.Linear(1, 128), nn.Linear(128, 256)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        beside = self.last(self.wide(self.first(batch["label"][:, None]).relu()).relu())
        return loss + (beside - batch["label"][:, None]).square().mean()


ROWWISE, ADAM, ORDER = {"make": partial(Seen, "rowwise_adagrad")}, {"make": partial(Seen, "adam")}, {"make": InAnotherOrder}
WORKERS, SHARDED = {"num_workers": 2}, {"checkpoint": "sharded"}
NODES = {"devices": 1, "num_nodes": 3}
"""Between nodes, DDP has two buckets for the model with another order."""
RUNS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "adagrad": (2, 8, {}),
    "sharded buckets": (3, 4, ORDER | NODES | {"strategy": SHARDED}),
    "tokens": (2, 9, {"samples": 64, "batch_size": 4, "data": {"batch_tokens": 100, "balance": True}}),
    "buckets": (4, STEPS, ORDER),
    "rowwise": (1, 8, ROWWISE | {"data": WORKERS}),
    "adam": (3, STEPS, ADAM | {"data": WORKERS}),
    "sharded adagrad": (2, STEPS, {"data": WORKERS, "strategy": SHARDED}),
    "sharded adam": (1, 4, ADAM | {"strategy": SHARDED}),
    "sharded rowwise": (2, STEPS, ROWWISE | {"strategy": SHARDED}),
    "micro-batches": (3, 4, ORDER | NODES | {"data": {"micro_batches": 2}, "strategy": {"gradient_as_bucket_view": True}}),
    "split": (3, 4, ORDER | {"strategy": {"split_backward": True, "bucket_cap_mb": 0.001}}),
    "window": (3, 3, ORDER | {"accumulate_grad_batches": 2}),
    "unused": (3, 4, ORDER | {"strategy": {"overlap": False, "find_unused_parameters": True}}),
}
"""Ranks, after which step the run stops, options of the fit: pairs of optimizer, ranks, checkpoint, workers and stop.

With three ranks and more, gloo adds an element's parts up in an order that depends on its place in the bucket.
"""
FAST, AT_EPOCH_END = ("adagrad", "sharded buckets"), ("buckets", "adam", "sharded adagrad")


@pytest.mark.parametrize("run", [pytest.param(run, marks=[] if run in FAST else pytest.mark.slow) for run in RUNS])
def test_resume_is_bitwise(run: str, tmp_path: Path) -> None:
    ranks, step, options = RUNS[run]
    path = tmp_path / "half.ckpt"
    epochs, saving = (1, at_epoch_end(path)) if run in AT_EPOCH_END else (EPOCHS, StopAt(step, str(path)))
    both = run_distributed(lambda: (fit(**options), fit(callbacks=[saving], max_epochs=epochs, **options)), ranks)
    whole, first = ([pair[part] for pair in both] for part in range(2))
    assert path.is_dir() == ("sharded" in run)
    second = run_distributed(fit, ranks, resume=path, **options)
    assert_continued(first, second, whole)
    assert first[0].steps == step and second[0].steps == whole[0].steps


# -- a fit that ended inside an epoch


class Stops(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, index: int) -> None:
        trainer.should_stop = trainer.should_stop or index + 1 == 3


STREAM = {"stream": Stream}
KINDS: dict[str, dict[str, Any]] = {
    "map-style": {},
    "stream": STREAM,
    "no overlap": {"strategy": {"overlap": False}},
    "workers": {"data": WORKERS},
    "accumulation": {"accumulate_grad_batches": 2},
    "micro-batches": {"data": {"micro_batches": 2}},
    "stream without overlap": STREAM | {"strategy": {"overlap": False}},
    "stream with workers": STREAM | {"data": WORKERS},
}
ENDED = [
    ("map-style", "max_steps", "hand"),
    ("map-style", "should_stop", "epoch"),
    ("stream", "max_steps", "epoch"),
    ("stream", "should_stop", "hand"),
    ("map-style", "max_steps", "epoch"),
    ("map-style", "should_stop", "hand"),
    ("no overlap", "max_steps", "hand"),
    ("workers", "should_stop", "epoch"),
    ("accumulation", "max_steps", "hand"),
    ("accumulation", "should_stop", "epoch"),
    ("micro-batches", "should_stop", "hand"),
    ("stream without overlap", "should_stop", "hand"),
    ("stream with workers", "max_steps", "epoch"),
]


@cache
def _uninterrupted(kind: str) -> list[Fitted]:
    return run_distributed(fit, 2, **KINDS[kind])


@pytest.mark.parametrize(
    ("kind", "ended_by", "saved_by"),
    [pytest.param(*case, marks=[] if k in (0, 2) else pytest.mark.slow) for k, case in enumerate(ENDED)],
)
def test_a_fit_that_ended_inside_an_epoch_goes_on_there(kind: str, ended_by: str, saved_by: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    callbacks = [*([at_epoch_end(path)] if saved_by == "epoch" else []), *([Stops()] if ended_by == "should_stop" else [])]
    limit = {"max_steps": 2 if kind == "accumulation" else 3} if ended_by == "max_steps" else {}
    first = run_distributed(fit, 2, callbacks=callbacks, save=path if saved_by == "hand" else None, **{**KINDS[kind], **limit})
    assert first[0].steps < STEPS
    assert_continued(first, run_distributed(fit, 2, resume=path, **KINDS[kind]), _uninterrupted(kind))


def _after_an_epochs_last_batch(folder: Path, **options: Any) -> list[list[int]]:
    """Return the samples of the first epoch, and those of the second in three fits: two by a resume and one in one go."""
    ends, inside = str(folder / "ends.ckpt"), str(folder / "inside.ckpt")
    now = {**options, "batch_size": options.pop("batch_size", GLOBAL_BATCH)}
    whole = fit(callbacks=[SaveAt(ends, STEPS)], **options)
    second = fit(callbacks=[StopAt(STEPS + 2, inside)], resume=ends, **now)
    third = fit(resume=inside, **now)
    if now["batch_size"] == GLOBAL_BATCH:
        assert second.losses + third.losses == whole.losses[STEPS:]
    parts = [whole.seen[:STEPS], second.seen + third.seen, fit(resume=ends, **now).seen]
    return [[sample for step in part for sample in step] for part in parts]


def _after_the_last_batch_in_all_ways(folder: Path) -> dict[str, list[list[int]]]:
    ways: dict[str, dict[str, Any]] = {"as before": {}, "smaller": {"batch_size": 6}, "larger": {"batch_size": 24}}
    ways |= {"stream": STREAM, "smaller stream": STREAM | {"batch_size": 6}, "steps": {"max_steps": 99, "batch_size": 6}}
    return {way: _after_an_epochs_last_batch(folder, **options) for way, options in ways.items()}


def test_a_checkpoint_of_an_epochs_last_batch_starts_the_next_epoch(tmp_path: Path) -> None:
    """Save before Lightning counts the last batch, resume with other batches, and resume again inside the second epoch."""
    found = run_distributed(_after_the_last_batch_in_all_ways, 1, tmp_path)[0]
    once = list(range(SAMPLES))
    assert {way: [sorted(part) == once for part in parts] for way, parts in found.items()} == {way: [True] * 3 for way in found}


# -- other numbers of ranks, other batches


class Plain(Seen):
    """A model without tables. Lightning then reads the checkpoint before the strategy's set-up."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__("sgd")
        self.net, self.fails = nn.Linear(1, 1), fails

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        if self.fails and len(self.seen) == 1:
            raise KeyError("the needle")
        self.seen.append(batch["index"].tolist())
        return self.net(batch["label"][:, None]).mean()


TOKENS = {"samples": 64, "data": {"batch_tokens": 100, "balance": True}}
OTHERS: dict[str, tuple[int, int, int, dict[str, Any], dict[str, Any]]] = {
    "more ranks": (2, 3, 4, {}, {}),
    "another budget": (2, 2, 3, TOKENS, {"data": {"batch_tokens": 70, "balance": True}}),
    "fewer ranks": (3, 2, 8, {"data": WORKERS}, {}),
    "one rank, a smaller batch": (2, 1, 12, {}, {"batch_size": 3}),
    "larger steps without tables": (1, 1, 25, {"make": Plain, "samples": 80}, {"batch_size": 16}),
}
"""The ranks before and after, the steps before the stop, the options of both fits, and the options that change."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=[] if k < 2 else pytest.mark.slow) for k, case in enumerate(OTHERS)])
def test_resume_on_other_ranks_or_with_other_batches_has_every_sample_once(case: str, tmp_path: Path) -> None:
    then, now, stop_at, options, changed = OTHERS[case]
    path, before = str(tmp_path / "half.ckpt"), {"samples": 70, "batch_size": 4, **options}
    after = before | changed
    first = run_distributed(fit, then, callbacks=[StopAt(stop_at, path)], **before)
    second = run_distributed(fit, now, resume=path, **after)
    done, rest, size = samples_by_step(first), samples_by_step(second), after["samples"]
    assert len(done) == stop_at
    seen = [sample for step in done + rest for sample in step]
    for epoch in range(EPOCHS):
        assert sorted(seen[size * epoch : size * (epoch + 1)]) == list(range(size))
    assert len(seen) == size * EPOCHS
    if "data" not in after or "batch_tokens" not in after["data"]:
        full = now * after["batch_size"]
        assert max(map(len, rest)) < full + now and sum(len(step) != full for step in rest) <= EPOCHS
    warned = [text for text in second[0].warned if "random states" in text]
    assert len(warned) == (then != now) and all(f"{then} ranks" in text and str(now) in text for text in warned)


@pytest.mark.slow
def test_the_number_of_ranks_changes_twice(tmp_path: Path) -> None:
    """Resume from two ranks on three in the first epoch, and on one in the second, with the same global batches."""
    paths, make = [tmp_path / "a.ckpt", tmp_path / "b.ckpt"], partial(Seen, "rowwise_adagrad", 0.0)
    whole = run_distributed(fit, 2, make)
    on_two = run_distributed(fit, 2, make, strategy=SHARDED, callbacks=[StopAt(4, str(paths[0]))])
    on_three = run_distributed(fit, 3, make, resume=paths[0], callbacks=[StopAt(9, str(paths[1]))])
    on_one = run_distributed(fit, 1, make, resume=paths[1])
    steps = [sorted(step) for run in (on_two, on_three, on_one) for step in samples_by_step(run)]
    assert steps == [sorted(step) for step in samples_by_step(whole)]
    assert_same(on_one[0].weights, whole[0].weights, rtol=1e-6, atol=1e-6)
    assert_same(on_one[0].states[0]["state"], whole[0].states[0]["state"], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_what_would_lose_samples_inside_an_epoch_is_refused(tmp_path: Path) -> None:
    by_budget = str(tmp_path / "budget.ckpt")
    run_distributed(fit, 2, callbacks=[StopAt(3, by_budget)], batch_size=4, **TOKENS)
    with pytest.raises(RankFailed, match=r"ValueError: .*budget"):
        run_distributed(fit, 2, resume=by_budget, samples=64, batch_size=4)


def _resume_twice(path: str) -> tuple[list[int], bool]:
    """Return the samples of a resume after a failed resume, and whether a new fit has its own order after both."""
    fit(Plain, callbacks=[StopAt(2, path)], samples=80, batch_size=16)
    data = Samples(80)
    loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, seed=5, **REPEATS)
    with pytest.raises(KeyError, match="the needle"):
        trainer(devices=1, max_epochs=2).fit(Plain(fails=True), loader, ckpt_path=path)
    module, anew = Plain(), Plain()
    trainer(devices=1, max_epochs=2).fit(module, loader, ckpt_path=path)
    trainer(devices=1, max_epochs=1).fit(anew, loader)
    expected = fit(Plain, max_epochs=1, samples=80, batch_size=4, data={"seed": 5}).seen
    return [sample for step in module.seen for sample in step], anew.seen == expected


@pytest.mark.slow
def test_a_failed_fit_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    resumed, own_order = run_distributed(_resume_twice, 1, str(tmp_path / "half.ckpt"))[0]
    assert len(resumed) == 48 + 80 and sorted(resumed[48:]) == list(range(80))
    assert own_order


# -- the plain module and other strategies


def _halves(optimizer: str, folder: Path) -> list[Fitted]:
    make = partial(Seen, optimizer, 0.0)
    return [fit(make, strategy=name, callbacks=[StopAt(8, f"{folder}/{name}.ckpt")]) for name in ("freescale", "ddp")]


def _goes_on(optimizer: str, path: str) -> list[list[float]]:
    return [fit(partial(Seen, optimizer, 0.0), strategy=name, resume=path).losses for name in ("freescale", "ddp")]


@pytest.mark.parametrize("optimizer", [pytest.param(one, marks=[pytest.mark.slow] * (one != "adagrad")) for one in OPTIMIZERS])
def test_checkpoints_are_those_of_the_plain_module(optimizer: str, tmp_path: Path) -> None:
    """Load the checkpoint strictly into the unsharded module and its optimizer, and train on under "ddp" and "freescale"."""
    folder = tmp_path / "new"
    mine, _ = run_distributed(_halves, 2, optimizer, folder)[0]
    assert sorted(entry.name for entry in folder.iterdir()) == ["ddp.ckpt", "freescale.ckpt"]
    checkpoint = torch.load(folder / "freescale.ckpt", weights_only=True)
    assert all(type(value) is torch.Tensor for value in checkpoint["state_dict"].values())
    module = Recommender(optimizer)
    module.load_state_dict(checkpoint["state_dict"], strict=True)
    assert_same(dict(module.state_dict()), dict(mine.weights))
    module.configure_optimizers().load_state_dict(checkpoint["optimizer_states"][0])
    for name in ("freescale", "ddp"):
        for ours, ddp in run_distributed(_goes_on, 2, optimizer, str(folder / f"{name}.ckpt")):
            assert len(ours) == STEPS * EPOCHS - 8 and ours == pytest.approx(ddp, rel=1e-5), name


def _fit_then_test(path: str) -> float:
    """Return the loss of a checkpoint from inside an epoch in a test with other batches; save after a fit and a test."""
    fit(callbacks=[StopAt(8, f"{path}.half")])
    data = Samples(64)
    loader = FreeScaleDataModule(data, data.lengths, 8, collate_fn=collate, test_dataset=Samples(32), **REPEATS)
    loss = trainer(devices=2).test(Recommender("adagrad"), loader, ckpt_path=f"{path}.half", verbose=False)[0]["test"]
    module, run = Seen(), trainer(devices=2)
    run.fit(module, loader)
    run.save_checkpoint(f"{path}.fit")
    run.test(module, loader, verbose=False)
    run.save_checkpoint(f"{path}.test")
    return loss


@pytest.mark.slow
def test_a_test_reads_a_checkpoint_and_keeps_the_optimizer_states(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    losses = run_distributed(_fit_then_test, 2, path)
    module, samples = Recommender("adagrad"), Samples(32)
    module.load_state_dict(torch.load(f"{path}.half", weights_only=True)["state_dict"])
    batch = collate([samples[index] for index in range(32)])
    expected = nn.functional.mse_loss(module.net(batch["features"]), batch["label"]).item()
    assert losses == pytest.approx([expected] * 2, rel=1e-5)
    assert_same(*(torch.load(f"{path}.{stage}", weights_only=True)["optimizer_states"][0] for stage in ("fit", "test")))


class Shared(Recommender):
    """A model that has its net, and so its tables, under a second name."""

    def __init__(self) -> None:
        super().__init__("adagrad")
        self.tower = self.net


@pytest.mark.slow
def test_tables_with_two_names(tmp_path: Path) -> None:
    path = str(tmp_path / "shared.ckpt")
    run_distributed(lambda: (fit(Shared, max_epochs=1, save=path), fit(Shared, resume=path))[0].losses, 2)
    state = torch.load(path, weights_only=True)["state_dict"]
    Shared().load_state_dict(state, strict=True)
    name = "embeddings.embeddings.item.weight"
    assert torch.equal(state[f"net.{name}"], state[f"tower.{name}"])


class Grows(L.Callback):
    """A model that adds a parameter group during training, like Lightning's finetuning callbacks."""

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_parameter_groups_added_later_are_saved() -> None:
    found = run_distributed(fit, 2, partial(Recommender, "adagrad"), callbacks=[Grows()], max_epochs=1, samples=24)[0]
    assert [len(group["params"]) for group in found.states[0]["param_groups"]] == [4, 1]


# -- the order of DDP's buckets


def _noted(hooked: bool, **options: Any) -> tuple[list[str], bool, bool, Any]:
    """Return the noted order of two backwards, and whether buckets are arranged by it and by the order of another module."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used_last, self.used_first = nn.Linear(2, 1), nn.Linear(1, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used_last(self.used_first(x)).sum()

    model, order = DistributedDataParallel(Model(), **options), []
    if hooked:
        model.register_comm_hook(None, allreduce_hook)
    with model.no_sync(), noting_order(model, order):
        model(torch.ones(1, 1)).backward()
    assert order == [], "nothing is reduced"
    for _ in range(2):
        loss = model(torch.ones(1, 1))
        with noting_order(model, order):
            loss.backward()
    model.zero_grad()
    laid_out = lay_out_buckets(model, order), lay_out_buckets(model, ["another.weight"])
    return order, *laid_out, model.module.used_first.weight.grad


def test_the_first_backward_that_is_reduced_is_noted_where_buckets_change() -> None:
    order, laid_out, by_another, gradient = run_distributed(_noted, 2, hooked=False)[0]
    assert [name.split(".")[0] for name in order] == ["used_last"] * 2 + ["used_first"] * 2
    assert laid_out and not by_another and gradient is None
    for options in ({"hooked": True}, {"hooked": False, "find_unused_parameters": True}):
        assert run_distributed(_noted, 2, **options)[0][:3] == ([], False, False), options
