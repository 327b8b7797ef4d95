"""The description of a run and of the work of its steps for the profiler."""

from __future__ import annotations

from collections import UserDict, deque
from contextlib import nullcontext
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
from lightning_freescale.balance.simulate import summarize_lengths
from lightning_freescale.callbacks import workload as module
from lightning_freescale.callbacks.workload import describe_run, fit_costs, plan_of_step, samples_in, work_of_step, workload_of
from lightning_freescale.data import BalanceOptions
from lightning_freescale.data.map_style import Refit
from lightning_freescale.profiling.reporting.document import RunInfo
from lightning_freescale.testing import run_distributed
from tests.checkpoint.fits import Stream
from tests.helpers.recommender import Recommender, Samples, collate, trainer
from tests.strategy.test_padded_batches import COLLATE, LENGTHS, Histories, Padded


class Recorder(L.Callback):
    """Record the results of :func:`work_of_step` and :func:`plan_of_step` for every step, and its actual samples and plan.

    With ``refit`` the costs of the second epoch were fitted, and gave that model.
    """

    def __init__(self, *refit: CostModel) -> None:
        self.refit, self.recorded, self.seen = refit, [], {9: deque(), 1000: deque()}

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        for model in self.refit:
            trainer.datamodule.train.refits[1] = Refit(model, 1e5)  # as if the first epoch led to it

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        self.run = describe_run(trainer, module, None, torch_profiler_steps=3)
        self.workload, self.whole = (workload_of(trainer, module, seen, None) for seen in self.seen.values())

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        sampler: Any = trainer.train_dataloader.sampler
        plan = plan_of_step(trainer, batch_idx)
        found = sampler.step_plan(trainer.current_epoch, batch_idx).balance if self.refit else None
        work = work_of_step(trainer, batch, batch_idx)
        for most, seen in self.seen.items():
            cut = batch["features"]["history"].lengths().clamp(max=most)
            work_of_step(trainer, batch, batch_idx, lambda _, lengths=cut: lengths, seen)
        self.recorded.append((*work, batch["index"].tolist(), trainer.current_epoch, plan, found))


class WithPlainTable(Recommender):
    """A module with an ``nn.Embedding`` as one of its tables."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.nn.Embedding(31, 8)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + self.plain(batch["index"] % 31).mean()


def _lengths(sample: dict[str, Any]) -> int:
    return len(sample["history"])


def test_what_a_data_module_knows_of_its_steps() -> None:
    """Report costs as fitted also if only the base of a step was fitted."""
    free, data, planned = BalanceOptions(assignment_mode="free"), Samples(50), Samples(48)
    limited = BalanceOptions(max_tokens_per_rank=1000)
    loaders = {
        "lengths": lambda: FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=free),
        "costs": lambda: FreeScaleDataModule(data, None, 4, cost=data.lengths.tolist(), collate_fn=collate, balance=free),
        "stream": lambda: FreeScaleDataModule(Stream(50), _lengths, 4, collate_fn=collate, balance=free),
        "balanced": lambda: FreeScaleDataModule(planned, planned.lengths, 4, collate_fn=collate, balance=limited),
        "as drawn": lambda: FreeScaleDataModule(planned, planned.lengths, 4, collate_fn=collate, balance=False),
    }
    refits: dict[str, tuple[Any, ...]] = {"balanced": (CostModel(),), "as drawn": (CostModel(),)}

    def run() -> dict[str, Any]:
        found = {}
        for name, loader in loaders.items():
            recorder = Recorder(*refits.get(name, ()))
            trainer(devices=2, max_epochs=2, callbacks=[recorder]).fit(Recommender(), loader())
            found[name], found[f"run of {name}"] = recorder.recorded, recorder.run
            found[f"{name} workload"], found[f"uncut {name}"] = (
                recorder.workload,
                (len(recorder.seen[1000]), recorder.whole["lengths"]),
            )
        for overlap in (True, False):
            recorder, strategy = Recorder(), FreeScaleStrategy(shard=["plain"], overlap=overlap)
            small = FreeScaleDataModule(Samples(16), Samples(16).lengths, 4, collate_fn=collate)
            trainer(devices=2, strategy=strategy, callbacks=[recorder]).fit(WithPlainTable(), small)
            found["on" if overlap else "off"], found["tables"] = recorder.run, recorder.workload["tables"]
        return found

    ranks = run_distributed(run, 2)
    assignments = {"lengths": "free", "costs": "free", "stream": "free", "balanced": "slack", "as drawn": "as drawn"}
    assert {name: ranks[1][f"run of {name}"].assignment for name in loaders} == assignments
    runs = {name: run for name, run in ranks[0].items() if isinstance(run, RunInfo)}
    fitted = ["run of lengths", "run of balanced", "on", "off"]
    for name, run in runs.items():
        known = {"lengths": True} if name not in ("run of costs", "run of stream") else {}
        assert run.options == {"torch_profiler_steps": 3, **known, **({"cost": "auto"} if name in fitted else {})}, name
    assert not any(run.rejected for run in runs.values()), "unequal numbers help wherever they were compared"
    for name in ("lengths", "costs", "stream"):
        lengths, recorded = data.lengths.numpy(), [rank[name] for rank in ranks]
        for count, features, cost, samples, *_ in (step for of_rank in recorded for step in of_rank):
            mine = lengths[samples]
            costs = mine if name == "costs" else CostModel()(mine)
            expected = sample_features(mine).sum(axis=0) if name == "lengths" else [len(mine), costs.sum(), 0, 0]
            assert count == len(samples), name
            np.testing.assert_allclose(features, expected, err_msg=name)
            assert cost == pytest.approx(costs.sum()), name
        assert len({len(step[3]) for of_rank in recorded for step in of_rank}) > 1, "counts differ, so each step needs its own"
        assert len(recorded[0]) == len(recorded[1]) >= 2 * (50 // 8)
    for name in ("balanced", "as drawn"):
        assert {plan for *_, plan, _ in ranks[1][name]} == {None} and len(ranks[0][name]) == 12
        for *_, epoch, plan, found in ranks[0][name]:
            expected = found.with_base(1e5 if epoch else 0.0, 2)
            assert (plan.unbalanced, plan.lower_bound) == pytest.approx((expected.unbalanced, expected.lower_bound))
            balanced = name == "balanced"
            assert plan.balanced == (pytest.approx(expected.balanced) if balanced else None)
            assert plan.tokens_unbalanced == found.tokens_unbalanced
            assert plan.tokens_balanced == (found.tokens_imbalance if balanced else None)
            assert (plan.tokens_fullest is not None) == balanced and plan.fitted == (epoch == 1)
    workloads = {name.removesuffix(" workload"): of_run for name, of_run in ranks[0].items() if name.endswith(" workload")}
    assert {name for name, of_run in workloads.items() if of_run["lengths"]} == {"lengths", "balanced", "as drawn"}
    cut = np.minimum(data.lengths.numpy(), 9)  # where the run cut
    assert workloads["lengths"]["lengths"] == summarize_lengths(cut) and data.lengths.max() > 9
    # no step of rank 0 shows that the run cuts samples
    assert ranks[0]["uncut lengths"] == (0, summarize_lengths(data.lengths.numpy()))
    assert ranks[0]["uncut balanced"] == ranks[0]["uncut as drawn"] == (0, summarize_lengths(planned.lengths.numpy()))
    assert ranks[0]["tables"] == {"rows": 50 + 13 + 31, "row_bytes": 3 * 8 * 4, "reduced_bytes": 0, "gradient_bytes": 0}
    whole = sum(parameter.numel() for parameter in WithPlainTable().parameters())
    for overlap in ("on", "off"):  # sharded tables count whole, or the run could not be compared with others
        assert {(rank[overlap].parameters, rank[overlap].overlap) for rank in ranks} == {(whole, overlap)}


PADDED: dict[str, tuple[str, dict[str, Any]]] = {
    "batch, planned": ("batch", {"cost": CostModel()}),
    "batch": ("batch", {"balance": False}),
    "batch in micro-batches": ("batch", {"balance": False, "micro_batches": 2}),
    "fixed": ("fixed", {"cost": CostModel()}),
    "jagged": ("none", {"cost": CostModel()}),
}


class PaddingRecorder(L.Callback):
    """A callback that records the plan of every step, and the tokens and padding of this rank."""

    def __init__(self) -> None:
        self.recorded: list[tuple[Any, int, int, int]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        parts = getattr(batch, "batches", [batch])
        rows = [part if isinstance(part, torch.Tensor) else part[0] for part in parts]
        padding = sum(int((each == 0).sum()) for each in rows)
        self.recorded.append((plan_of_step(trainer, batch_idx), padding, sum(each.numel() for each in rows), len(rows)))


def test_the_share_of_padding_is_that_of_the_batches() -> None:
    def run() -> dict[str, Any]:
        found = {}
        for name, (kind, options) in PADDED.items():
            recorder = PaddingRecorder()
            data = FreeScaleDataModule(Histories(), LENGTHS, 8, collate_fn=COLLATE[kind], seed=3, **options)
            trainer(devices=2, max_epochs=2, callbacks=[recorder]).fit(Padded(), data)
            found[name] = recorder.recorded
        return found

    ranks = run_distributed(run, 2, timeout=240)
    for name in PADDED:
        first, second = (rank[name] for rank in ranks)
        known = [step for step in zip(first, second) if step[0][0].padding is not None]
        kinds = {plan.padded for (plan, *_), _ in known}
        assert len(known) >= (0 if name == "jagged" else 8), name
        assert kinds <= {"batch", "batch, planned"} if name == "batch, planned" else kinds <= {name.split(" in ")[0]}, name
        assert (name == "jagged") == (not known) and all(plan is None for plan, *_ in second), name
        for (plan, *own, parts), (_, *other, _) in known:
            padding, tokens = own if parts > 1 else np.add(own, other)
            assert plan.padding == pytest.approx(padding / tokens), name


def _loader_of(loader: Any) -> Any:
    return SimpleNamespace(train_dataloader=loader, datamodule=None, is_global_zero=True)


def test_a_plain_loader_tells_samples_alone() -> None:
    for loader in ([1], torch.utils.data.DataLoader(Samples(8), batch_size=4), None):
        assert plan_of_step(_loader_of(loader), 0) is None
        assert work_of_step(_loader_of(loader), {"x": torch.zeros(4, 2)}, 0) == (4, None, None)


@dataclass(slots=True)
class Record:
    """A batch or sample of a class of the user."""

    x: torch.Tensor
    others: Any = None


FOUR, PAIR, SIZES = torch.zeros(4), torch.zeros(8, 2), (3, 1, 4, 1, 5, 9, 2, 6)
ONES = torch.ones(12, dtype=torch.int32)
JAGGED = KeyedJaggedTensor(keys=["a", "b"], values=torch.zeros(12), lengths=ONES)  # six samples
BATCHES = [  # and its samples if the batch size is not known, and if it is 8
    (torch.zeros(5, 3), 5, 5),
    ({"x": torch.zeros(4, 3), "y": FOUR, "name": "four"}, 4, 4),
    ([FOUR, (torch.zeros(4, 1), None)], 4, 4),
    ({"x": FOUR, "scale": torch.tensor(2.0), "seed": 7}, 4, 4),
    ({"x": FOUR, "y": torch.zeros(3)}, 0, 0),
    ({"scale": torch.tensor(2.0)}, 0, 0),
    (None, 0, 0),
    ({"features": JAGGED, "label": torch.zeros(6)}, 6, 6),
    ({"features": JAGGED, "label": torch.zeros(5)}, 0, 0),
    ((JAGGED.to_dict()["a"].lengths(), JAGGED), 6, 6),
    (Record(FOUR, {"y": [Record(FOUR)], "k": UserDict(z=torch.zeros(4, 2))}), 4, 4),
    (Record(FOUR, torch.zeros(3)), 0, 0),
    (UserDict(x=FOUR, y=FOUR), 4, 4),
    # a list of eight tensors is one of samples, one of two is one of fields
    ([torch.zeros(3)] * 8, 3, 8),
    ([torch.zeros(n) for n in SIZES], 0, 8),
    ([Record(torch.zeros(n)) for n in SIZES], 0, 8),
    ([PAIR, torch.zeros(8)], 8, 8),
    ([PAIR] * 8, 8, 8),
    ([torch.zeros(3), torch.zeros(2)], 0, 0),
]


def test_samples_in_a_batch() -> None:
    found = [(samples_in(batch), samples_in(batch, 8)) for batch, *_ in BATCHES]
    assert found == [(unknown, known) for _, unknown, known in BATCHES]


def _batches_of(collate_fn: Any, data: Any = None, **options: Any) -> list[int]:
    rows = torch.arange(40.0).reshape(10, 4) if data is None else data
    loader = torch.utils.data.DataLoader(rows, collate_fn=collate_fn, **{"batch_size": 4, **options})
    return [work_of_step(_loader_of(loader), batch, index)[0] for index, batch in enumerate(loader)]


def test_what_the_sampler_has_drawn_counts() -> None:
    for collate_fn in (
        None,
        list,
        lambda rows: [torch.stack(rows), torch.stack(rows)[:, 0]],
        lambda rows: {"x": rows},
        lambda rows: torch.cat(rows),
        lambda rows: ([len(row) for row in rows], "no tensor"),
    ):
        assert _batches_of(collate_fn) == [4, 4, 2]
        assert _batches_of(collate_fn, drop_last=True) == [4, 4]


def test_a_stream_or_a_sampler_of_ones_own_leaves_the_batch_to_count() -> None:
    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(torch.arange(40.0).reshape(10, 4))

    assert _batches_of(list, Rows())[:2] == [4, 4]
    assert _batches_of(None, range(6), batch_size=1, batch_sampler=[[0, 1, 2, 3], [4, 5]]) == [4, 2]


def test_lengths_that_the_user_knows_come_first() -> None:
    for returned in ([3, 4], torch.tensor([3, 4]), np.array([3.0, 4.0])):
        count, features, planned = work_of_step(_loader_of([1]), {"lengths": returned}, 0, lambda batch: batch["lengths"])
        assert (count, features.tolist(), planned) == (2, [2, 7, 25, 0], None)


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (3, "()"),
        (None, "None"),
        ([], "(0,)"),
        ([[1.0, 2.0]], "(1, 2)"),
        ([3.0, float("nan")], "contains nan"),
        ([3.0, -2.0], "contains -2.0"),
        ([3.0, float("inf")], "contains inf"),
        (["a", "b"], "'a'"),
        ([[1.0], [1.0, 2.0]], "[[1.0], [1.0, 2.0]]"),
        (torch.ones(2, device="meta"), "a tensor on meta, which numpy cannot convert"),
    ],
)
def test_what_are_no_lengths_is_refused_by_the_name_of_the_function(returned: Any, named: str) -> None:
    with pytest.raises(ValueError, match="lengths_fn") as caught:
        work_of_step(_loader_of(None), torch.ones(2, 4), 0, lambda batch: returned)
    assert named in str(caught.value)


def test_what_a_run_is(monkeypatch: Any) -> None:
    fit = SimpleNamespace(strategy=DDPStrategy(), world_size=8, accumulate_grad_batches=3, train_dataloader=None)
    fit.strategy.parallel_devices = [torch.device("cpu")]
    found = describe_run(fit, Recommender(), None)
    weights = sum(parameter.numel() for parameter in Recommender().parameters())
    assert (found.model, found.parameters, found.world_size, found.device) == ("Recommender", weights, 8, "cpu")
    assert (found.label, found.strategy, found.accumulate_grad_batches) == ("DDPStrategy", "DDPStrategy", 3)
    assert found.assignment is None and found.num_workers is None
    tables = torch.nn.ModuleList(torch.nn.Embedding(rows, 8) for rows in (9, 40, 3))
    seen = [np.array([3.0, 5.0]), np.array([3.0])]
    tables[0].requires_grad_(False)
    small = {"rows": 49, "row_bytes": 64, "reduced_bytes": 40 * 32, "gradient_bytes": 43 * 32}
    workload = {"lengths": {"values": [3.0, 5.0], "counts": [2, 1]}, "tables": small, "lookups": 800.0}
    tables.append(torch.nn.Embedding(40, 8))
    tables[3].weight = tables[1].weight  # tied
    overlap = SimpleNamespace(collision_rate=0.25, tokens=100.0)
    for parts, rate in ((3, None), (1, 0.25)):  # only the first of several parts collides
        fit.accumulate_grad_batches = parts
        assert workload_of(fit, tables, seen, overlap) == {**workload, "collision_rate": rate}
    for options, assignment in (({}, "fixed"), ({"assignment_mode": "slack"}, "slack"), ({"balance": False}, "as drawn")):
        sampler = BalancedSampler([1.0, 2.0], 1, num_replicas=2, rank=0, **options)
        fit.train_dataloader = SimpleNamespace(sampler=sampler)
        assert describe_run(fit, Recommender(), None).assignment == assignment
        assert workload_of(fit, torch.nn.Identity(), seen, None)["lengths"] is None, "rank 0 has longer ones than the others"
    fit.strategy.strategy_name = "ours"
    ours, mine = (describe_run(fit, Recommender(), label) for label in (None, "mine"))
    assert (ours.label, mine.label, mine.strategy) == ("ours", "mine", "ours")
    assert not found.sharded_tables
    monkeypatch.setattr("torchrec.distributed.types.ShardedModule", torch.nn.Linear)
    assert not describe_run(fit, torch.nn.Identity(), None).sharded_tables
    assert describe_run(fit, torch.nn.Sequential(torch.nn.Linear(1, 1)), None).sharded_tables, "as users wrap it"
    fit.strategy.tables, fit.strategy.overlap = SimpleNamespace(shown_whole=nullcontext), False
    assert describe_run(fit, torch.nn.Identity(), None).sharded_tables
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    fit.strategy.parallel_devices = [torch.device("cuda", 3)]
    assert describe_run(fit, Recommender(), "mine").device == "GPU 3"


def _work(steps: int, ranks: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Fit steps of 16 samples per rank. A sample takes 1 ms plus 0.1 ms per token; the last rank is slower by half."""
    lengths = np.random.default_rng(seed).integers(1, 100, (steps, ranks, 16))
    features = sample_features(lengths).sum(axis=2)
    slowness = np.where(np.arange(ranks) == ranks - 1, 1.5, 1.0)
    return features, (1e-3 * features[..., 0] + 1e-4 * features[..., 1]) * slowness


def test_costs_are_fitted_to_the_compute_of_the_last_steps(monkeypatch: Any) -> None:
    features, compute = _work(60, 3)
    expected, slowness = fit_costs(features, compute)
    assert slowness == pytest.approx([1, 1, 1.5], rel=1e-2)
    np.testing.assert_allclose(expected * slowness, compute, rtol=2e-2)
    monkeypatch.setattr(module, "_FITTED", 90)
    compute[:30] *= 7  # while something else was running
    expected, slowness = fit_costs(features, compute)
    assert expected.shape == (60, 3)
    np.testing.assert_allclose((expected * slowness)[30:], compute[30:], rtol=2e-2)


def test_nothing_is_fitted_to_little_or_to_steps_without_compute() -> None:
    features, compute = _work(5, 2)
    assert fit_costs(features[:4], compute[:4]) is None
    assert fit_costs(features, compute) is not None
    compute[2, 1] = 0
    assert fit_costs(features, compute) is None
