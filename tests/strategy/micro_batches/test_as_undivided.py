"""Steps in micro-batches are those of undivided steps, resumed and profiled too, or they are refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_freescale import BubbleProfiler, FreeScaleStrategy
from lightning_freescale.data import BalanceOptions
from lightning_freescale.testing import run_distributed
from tests.helpers.micro_batch_training import Model, Watching, data, run
from tests.helpers.overlap_training import assert_same
from tests.helpers.recommender import trainer


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
