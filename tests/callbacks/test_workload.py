"""What a run is and what its steps work on, as the profiler is told."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torchrec import KeyedJaggedTensor

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.balance import BalancedSampler, CostModel
from lightning_freescale.balance.cost import sample_features
from lightning_freescale.callbacks import workload as module
from lightning_freescale.callbacks.workload import describe_run, fit_costs, plan_of_step, samples_in, work_of_step
from lightning_freescale.data import BalanceOptions
from lightning_freescale.data.map_style import Refit
from lightning_freescale.testing import run_distributed
from tests.data.streaming.test_training import Stream
from tests.helpers.recommender import Recommender, Samples, collate, trainer


class Telling(L.Callback):
    """What :func:`work_of_step` says of every step, and which samples it really had."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.told.append((*work_of_step(trainer, batch, batch_idx), batch["index"].tolist()))


FREE = BalanceOptions(assignment_mode="free")


def _lengths(sample: dict[str, Any]) -> int:
    return len(sample["history"])


def _told(kind: str) -> list[Any]:
    data, telling = Samples(50), Telling()
    loaders = {
        "lengths": lambda: FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=FREE),
        "costs": lambda: FreeScaleDataModule(data, None, 4, cost=data.lengths.tolist(), collate_fn=collate, balance=FREE),
        "stream": lambda: FreeScaleDataModule(Stream(), _lengths, 4, collate_fn=collate, balance=FREE),
    }
    trainer(devices=2, max_epochs=2, callbacks=[telling]).fit(Recommender(), loaders[kind]())
    return telling.told


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lengths", "costs", "stream"])
def test_what_a_data_module_knows_of_its_steps(kind: str) -> None:
    lengths = Samples(50).lengths.numpy()
    ranks = run_distributed(_told, 2, kind)
    for count, features, planned, samples in (step for told in ranks for step in told):
        mine = lengths[samples]
        costs = mine if kind == "costs" else CostModel()(mine)
        expected = sample_features(mine).sum(axis=0) if kind == "lengths" else [len(mine), costs.sum(), 0, 0]
        assert count == len(samples)
        np.testing.assert_allclose(features, expected)
        assert planned == pytest.approx(costs.sum())
    assert len({len(samples) for told in ranks for *_, samples in told}) > 1, "counts differ, so each step needs its own"
    assert len(ranks[0]) == len(ranks[1]) >= 2 * (50 // 8)


class Planned(L.Callback):
    """What :func:`plan_of_step` says of every step, and the epoch."""

    def __init__(self, model: CostModel | None) -> None:
        self.told: list[Any] = []
        self._model = model

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        trainer.datamodule.train.refits[1] = Refit(self._model, 1e5)  # as if the first epoch led to it

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.told.append((trainer.current_epoch, batch_idx, plan_of_step(trainer, batch_idx)))


def _planned(balance: bool, model: CostModel | None) -> tuple[list[Any], list[Any]]:
    data, planned = Samples(48), Planned(model)
    options = BalanceOptions(calibrate=False, max_tokens_per_rank=1000) if balance else False
    module = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=options)
    trained = trainer(devices=2, max_epochs=2, callbacks=[planned])
    trained.fit(Recommender(), module)
    sampler: Any = trained.train_dataloader.sampler
    return planned.told, [sampler.step_plan(epoch, step).balance for epoch, step, _ in planned.told]


@pytest.mark.parametrize(("balance", "model"), [(True, CostModel()), (False, None)])
def test_what_the_plan_of_a_step_says_is_told_on_rank_zero(balance: bool, model: CostModel | None) -> None:
    """Of costs that are as given but for what a step takes besides them, too, it is said that they were fitted."""
    (told, balances), (others, _) = run_distributed(_planned, 2, balance, model)
    assert {plan for *_, plan in others} == {None} and len(told) == 12
    for (epoch, _, plan), found in zip(told, balances):
        expected = found.with_base(1e5 if epoch else 0.0, 2)
        assert (plan.unbalanced, plan.lower_bound) == pytest.approx((expected.unbalanced, expected.lower_bound))
        assert plan.balanced == (pytest.approx(expected.balanced) if balance else None)
        assert plan.tokens_unbalanced == found.tokens_unbalanced
        assert plan.tokens_balanced == (found.tokens_imbalance if balance else None)
        assert (plan.tokens_fullest is not None) == balance
        assert plan.fitted == (epoch == 1)


def _loader_of(loader: Any) -> Any:
    return SimpleNamespace(train_dataloader=loader, datamodule=None, is_global_zero=True)


def test_lengths_that_the_user_knows_come_first() -> None:
    lengths = {"lengths": torch.tensor([3, 4])}
    count, features, planned = work_of_step(_loader_of([1]), lengths, 0, lambda batch: batch["lengths"])
    assert (count, features.tolist(), planned) == (2, [2, 7, 25, 0], None)


def test_a_plain_loader_tells_samples_alone() -> None:
    for loader in ([1], torch.utils.data.DataLoader(Samples(8), batch_size=4), None):
        assert plan_of_step(_loader_of(loader), 0) is None
        assert work_of_step(_loader_of(loader), {"x": torch.zeros(4, 2)}, 0) == (4, None, None)


def _jagged(samples: int) -> KeyedJaggedTensor:
    lengths = torch.ones(2 * samples, dtype=torch.int32)
    return KeyedJaggedTensor(keys=["a", "b"], values=torch.zeros(2 * samples), lengths=lengths)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(5, 3), 5),
        ({"x": torch.zeros(4, 3), "y": torch.zeros(4), "name": "four"}, 4),
        ([torch.zeros(4), (torch.zeros(4, 1), None)], 4),
        ({"x": torch.zeros(4), "scale": torch.tensor(2.0), "seed": 7}, 4),
        ({"x": torch.zeros(4), "y": torch.zeros(3)}, 0),
        ({"scale": torch.tensor(2.0)}, 0),
        ({}, 0),
        (None, 0),
        ({"features": _jagged(6)}, 6),
        ({"features": _jagged(6), "label": torch.zeros(6)}, 6),
        ({"features": _jagged(6), "label": torch.zeros(5)}, 0),
        ((_jagged(6).to_dict()["a"].lengths(), _jagged(6)), 6),
    ],
)
def test_samples_in_a_batch(batch: Any, samples: int) -> None:
    assert samples_in(batch) == samples


@dataclass(slots=True)
class Record:
    """A batch, or a sample, of one's own."""

    x: torch.Tensor
    others: Any = None


ROWS = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ([ROWS, torch.zeros(4)], 4),
        ((ROWS, torch.zeros(4)), 4),
        (Record(ROWS), 4),
        (Record(ROWS, {"y": [Record(torch.zeros(4))], "k": UserDict(z=torch.zeros(4, 2))}), 4),
        ({"x": [ROWS, (ROWS, {"y": ROWS})]}, 4),
        (UserDict(x=ROWS, y=torch.zeros(4)), 4),
        (Record(ROWS, torch.zeros(3)), 0),
        ([torch.zeros(3)] * 8, 8),
        ([torch.zeros(n) for n in (3, 1, 4, 1, 5, 9, 2, 6)], 8),
        ([Record(torch.zeros(n)) for n in (3, 1, 4, 1, 5, 9, 2, 6)], 8),
        ([torch.zeros(8, 2), torch.zeros(8)], 8),
        ([torch.zeros(8, 2)] * 8, 8),
        ([torch.zeros(3), torch.zeros(2)], 0),
    ],
)
def test_samples_in_a_batch_of_eight_at_most(batch: Any, samples: int) -> None:
    """A list of eight tensors is one of samples, one of two is one of fields."""
    assert samples_in(batch, 8) == samples


def _batches_of(collate_fn: Any, **options: Any) -> list[int]:
    loader = torch.utils.data.DataLoader(torch.arange(40.0).reshape(10, 4), batch_size=4, collate_fn=collate_fn, **options)
    return [work_of_step(_loader_of(loader), batch, index)[0] for index, batch in enumerate(loader)]


@pytest.mark.parametrize(
    "collate_fn",
    [
        None,
        list,
        lambda rows: [torch.stack(rows), torch.stack(rows)[:, 0]],
        lambda rows: {"x": rows},
        lambda rows: torch.cat(rows),
        lambda rows: ([len(row) for row in rows], "no tensor"),
    ],
    ids=["stacked", "list of tensors", "pair of tensors", "dict of lists", "end to end", "no tensor"],
)
def test_what_the_sampler_has_drawn_counts(collate_fn: Any) -> None:
    assert _batches_of(collate_fn) == [4, 4, 2]
    assert _batches_of(collate_fn, drop_last=True) == [4, 4]


def test_a_stream_or_a_sampler_of_ones_own_leaves_the_batch_to_count() -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(torch.arange(40.0).reshape(10, 4))

    loader = torch.utils.data.DataLoader(Stream(), batch_size=4, collate_fn=list)
    assert [work_of_step(_loader_of(loader), batch, index)[0] for index, batch in enumerate(loader)][:2] == [4, 4]
    own = torch.utils.data.DataLoader(range(6), batch_sampler=[[0, 1, 2, 3], [4, 5]])
    assert [work_of_step(_loader_of(own), batch, index)[0] for index, batch in enumerate(own)] == [4, 2]


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (3, "of shape ()"),
        (None, "None"),
        ([], "of shape (0,)"),
        ([[1.0, 2.0]], "of shape (1, 2)"),
        ([3.0, float("nan")], "nan in it"),
        ([3.0, -2.0], "-2.0 in it"),
        ([3.0, float("inf")], "inf in it"),
        (["a", "b"], "no numbers"),
        ([[1.0], [1.0, 2.0]], "no numbers"),
        (torch.ones(2, device="meta"), "on meta"),
    ],
)
def test_what_are_no_lengths_is_refused_by_the_name_of_the_function(returned: Any, named: str) -> None:
    with pytest.raises(ValueError, match=r"lengths_fn.*return the history length of every sample") as caught:
        work_of_step(_loader_of(None), torch.ones(2, 4), 0, lambda batch: returned)
    assert named in str(caught.value)


@pytest.mark.parametrize("returned", [[3, 1], torch.tensor([3, 1]), np.array([3.0, 1.0])])
def test_lengths_may_be_of_any_kind(returned: Any) -> None:
    count, features, _ = work_of_step(_loader_of(None), torch.ones(2, 4), 0, lambda batch: returned)
    assert count == 2 and features.tolist() == [2, 4, 10, 0]


def test_what_a_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = SimpleNamespace(strategy=DDPStrategy(), world_size=8, accumulate_grad_batches=3, train_dataloader=None)
    fit.strategy.parallel_devices = [torch.device("cpu")]
    found = describe_run(fit, Recommender(), None)
    weights = sum(parameter.numel() for parameter in Recommender().parameters())
    assert (found.model, found.parameters, found.world_size, found.device) == ("Recommender", weights, 8, "cpu")
    assert (found.label, found.strategy, found.accumulate_grad_batches) == ("DDPStrategy", "DDPStrategy", 3)
    assert found.assignment is None
    for options, assignment in (({}, "fixed"), ({"assignment_mode": "slack"}, "slack"), ({"balance": False}, "as drawn")):
        sampler = BalancedSampler([1.0, 2.0], 1, num_replicas=2, rank=0, **options)
        fit.train_dataloader = SimpleNamespace(sampler=sampler)
        assert describe_run(fit, Recommender(), None).assignment == assignment
    fit.strategy.strategy_name = "ours"
    assert (describe_run(fit, Recommender(), None).label, describe_run(fit, Recommender(), "mine").label) == ("ours", "mine")
    assert describe_run(fit, Recommender(), "mine").strategy == "ours"
    assert not found.sharded_tables
    monkeypatch.setattr("torchrec.distributed.types.ShardedModule", torch.nn.Linear)
    assert not describe_run(fit, torch.nn.Identity(), None).sharded_tables
    assert describe_run(fit, torch.nn.Sequential(torch.nn.Linear(1, 1)), None).sharded_tables, "as users wrap it"
    fit.strategy.tables = SimpleNamespace(modules=[], tables=[])
    fit.strategy.overlap = False
    assert describe_run(fit, torch.nn.Identity(), None).sharded_tables
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    fit.strategy.parallel_devices = [torch.device("cuda", 3)]
    assert describe_run(fit, Recommender(), "mine").device == "GPU 3"


class Describing(L.Callback):
    """What the run is said to be once training has begun."""

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.run = describe_run(trainer, module, None)


def _described(strategy: Any, model: Any) -> tuple[int, str | None]:
    describing = Describing()
    data = FreeScaleDataModule(Samples(16), Samples(16).lengths, 4, collate_fn=collate)
    trainer(devices=2, strategy=strategy, callbacks=[describing]).fit(model(), data)
    return describing.run.parameters, describing.run.overlap


class WithPlainTable(Recommender):
    """One of its tables is an ``nn.Embedding``."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.nn.Embedding(31, 8)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + self.plain(batch["index"] % 31).mean()


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_sharded_tables_count_whole(overlap: str) -> None:
    """Else a run could not be compared with one under another strategy."""
    whole = sum(parameter.numel() for parameter in WithPlainTable().parameters())
    strategy = FreeScaleStrategy(shard=["plain"], overlap=overlap == "on")
    assert run_distributed(_described, 2, strategy, WithPlainTable) == [(whole, overlap)] * 2


def _work(steps: int, ranks: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Steps of 16 samples on every rank; a sample takes 1 ms and 0.1 ms per token, the last rank half as much again."""
    lengths = np.random.default_rng(seed).integers(1, 100, (steps, ranks, 16))
    features = sample_features(lengths).sum(axis=2)
    slowness = np.where(np.arange(ranks) == ranks - 1, 1.5, 1.0)
    return features, (1e-3 * features[..., 0] + 1e-4 * features[..., 1]) * slowness


def test_costs_are_fitted_to_compute() -> None:
    features, compute = _work(60, 3)
    expected, slowness = fit_costs(features, compute)
    assert slowness == pytest.approx([1, 1, 1.5], rel=1e-2)
    np.testing.assert_allclose(expected * slowness, compute, rtol=2e-2)


def test_nothing_is_fitted_to_little_or_to_steps_without_compute() -> None:
    features, compute = _work(5, 2)
    assert fit_costs(features[:4], compute[:4]) is None
    assert fit_costs(features, compute) is not None
    compute[2, 1] = 0
    assert fit_costs(features, compute) is None


def test_the_last_steps_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FITTED", 90)
    features, compute = _work(60, 3)
    compute[:30] *= 7  # while something else was running
    expected, slowness = fit_costs(features, compute)
    assert expected.shape == (60, 3)
    np.testing.assert_allclose((expected * slowness)[30:], compute[30:], rtol=2e-2)
