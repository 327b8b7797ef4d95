"""Arguments of FreeScaleDataModule, whose constructor refuses invalid ones by name, and its loaders."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser, class_from_function
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import Dataset, IterableDataset

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.balance import BalancedSampler, BlockShuffle, CostModel
from lightning_freescale.data import BalancedDataLoader, BalanceOptions
from tests.helpers.recommender import Samples, collate

DATA = Samples(8)
LENGTHS = {"lengths": DATA.lengths}
TOKENS = {"lengths": [3] * 8, "batch_tokens": 9}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)


def _balance(**options: Any) -> dict[str, Any]:
    return {"balance": BalanceOptions(**options)}


REFUSED: list[tuple[Callable[[], dict[str, Any]], list[str]]] = [
    (dict, ["lengths=None"]),
    (lambda: {"lengths": [1, 2]}, ["lengths", "(2,)", "[8]"]),
    (lambda: {"lengths": [1, 2, 3, 4, 5, 6, 7, -8]}, ["lengths[7] is -8.0"]),
    (lambda: {"cost": [1.0] * 7}, ["cost", "(7,)"]),
    (lambda: {**LENGTHS, "cost": "cost"}, ["cost='cost'", "'auto', a function, or the costs"]),
    (lambda: {**LENGTHS, "cost": lambda lengths: -lengths}, ["cost(lengths)[0] is -"]),
    (lambda: {**LENGTHS, "target_counts": [1.0] * 8}, ["target_counts=", "'target_mean'", "'sample_mean'"]),
    (lambda: {"lengths": [1.0], "cost": [1.0] * 8}, ["lengths", "(1,)"]),
    (lambda: {"cost": lambda sample: float("inf")}, ["cost(sample)[0] is inf"]),
    (lambda: {"lengths": lambda sample: -1}, ["lengths(sample)[0] is -1"]),
    (lambda: {**LENGTHS, "batch_size": 0}, ["batch_size=0"]),
    (lambda: {**LENGTHS, "loss_reduction": "mean"}, ["loss_reduction='mean'"]),
    (lambda: {"cost": [1.0] * 8, "loss_reduction": "target_mean"}, ["'target_mean'", "target_counts="]),
    (lambda: {**LENGTHS, "balance": {"assignment_mode": "slack"}}, ["balance={'assignment_mode': 'slack'}"]),
    (lambda: {**LENGTHS, **_balance(tokens=[1.0])}, ["tokens", "(1,)"]),
    (lambda: {**LENGTHS, "cost": CostModel(unique=1.0)}, ["unique=1.0", "unique="]),
    (lambda: {**LENGTHS, "batch_sampler": [[0]]}, ["batch_sampler=..."]),
    (lambda: {**LENGTHS, "generator": torch.Generator()}, ["generator=..."]),
    (lambda: {**TOKENS, "batch_tokens": 2}, ["per_rank=2", "sample 0", "3"]),
    (lambda: {**TOKENS, "batch_tokens": -1}, ["per_rank=-1"]),
    (lambda: {**TOKENS, "lengths": None, "cost": [1.0] * 8}, ["batch_tokens=9", "lengths="]),
    (lambda: {**TOKENS, "drop_last": True}, ["drop_last=...", "batch_tokens="]),
    (lambda: {**TOKENS, "balance": False}, ["balance=False", "batch_tokens="]),
    (lambda: {**TOKENS, "shuffle": BlockShuffle([8])}, ["shuffle=BlockShuffle", "batch_tokens="]),
    (lambda: {**TOKENS, **_balance(assignment_mode="fixed")}, ["assignment_mode=...", "batch_tokens="]),
    (lambda: {**TOKENS, **_balance(max_tokens_per_rank=9)}, ["max_tokens_per_rank=...", "batch_tokens="]),
    (lambda: {**TOKENS, "micro_batches": 9}, ["micro_batches", "9", "8"]),
    (lambda: {"train_dataset": [], "lengths": []}, ["train_dataset=list", "empty"]),
    (lambda: {"train_dataset": iter([1]), "lengths": [1]}, ["train_dataset=list_iterator", "map-style"]),
]
REFUSED_WITH_A_STREAM: list[tuple[Callable[[], dict[str, Any]], list[str]]] = [
    (lambda: {"lengths": [1.0]}, ["lengths=list"]),
    (lambda: {"lengths": None}, ["lengths=None"]),
    (lambda: {"cost": [1.0]}, ["cost=list"]),
    (lambda: _balance(tokens=[1.0]), ["tokens=...", "IterableDataset"]),
    (lambda: {"seed": 1}, ["seed=..."]),
    (lambda: {"shuffle": False}, ["shuffle=..."]),
    (lambda: {"pin_memory": True}, ["pin_memory=...", "num_workers="]),
    (lambda: {"loss_reduction": "target_mean", "target_counts": [1.0]}, ["target_counts=[1.0]"]),
    (lambda: _balance(assignment_mode="best"), ["assignment_mode='best'"]),
]
CASES = [(DATA, *case) for case in REFUSED] + [(Stream(), *case) for case in REFUSED_WITH_A_STREAM]


@pytest.mark.parametrize(("dataset", "arguments", "facts"), CASES, ids=[" ".join(facts) for *_, facts in CASES])
def test_the_error_names_the_argument_and_its_value(
    dataset: Any, arguments: Callable[[], dict[str, Any]], facts: list[str]
) -> None:
    of_stream = {"lengths": float} if isinstance(dataset, Stream) else {}
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the facts follow)
        FreeScaleDataModule(**{"train_dataset": dataset, **of_stream, **arguments()})
    assert [fact for fact in facts if fact not in str(refused.value)] == []


def test_options_of_torchs_loader_reach_every_loader() -> None:
    options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 3, "multiprocessing_context": "fork"}
    data = FreeScaleDataModule(DATA, DATA.lengths, 2, collate_fn=collate, val_dataset=DATA, **options)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert (loader.num_workers, loader.prefetch_factor) == (1, 3)
        assert sorted(i for batch in loader for i in batch["index"].tolist()) == list(range(8))
    with pytest.raises(TypeError, match="num_worker="):
        FreeScaleDataModule(DATA, DATA.lengths, num_worker=2)


def test_steps_cut_by_tokens_or_cost() -> None:
    costs = _balance(tokens=CostModel()([3, 2]))
    for budget, ranks, steps, options in ((4, 2, 1, {}), (4, 1, 2, {}), (10_000, 2, 1, costs), (1_000, 1, 2, costs)):
        data = FreeScaleDataModule(range(2), [3, 2], batch_tokens=budget, micro_batches="auto", **options)
        assert len(data.sampler(0, ranks)) == steps and data.train.assignment_mode == "free"
        assert data.train.micro_batches.candidates == [1, 2, 4, 8]


def test_an_accumulation_schedule_that_does_not_change_is_a_window() -> None:
    """Schedule accumulation although the Trainer has ``accumulate_grad_batches=1`` before its first epoch."""
    schedules = [([], 3), ([{0: 4}], 4), ([{0: 4, 2: 4}], 4), ([{0: 4}, {0: 4}], 4)]
    for given, window in [*schedules, ([{0: 4}, {1: 4}], 1), ([{0: 1, 1: 4}], 1), ([{1: 4}], 1)]:
        data = FreeScaleDataModule(list(range(32)), np.arange(1.0, 33), 4)
        callbacks = [GradientAccumulationScheduler(schedule) for schedule in given]
        trainer = SimpleNamespace(callbacks=callbacks, global_rank=0, world_size=2, current_epoch=0, limit_train_batches=1.0)
        trainer.accumulate_grad_batches = 1 if given else 3
        trainer.strategy = SimpleNamespace(root_device=SimpleNamespace(type="cpu"))
        data.trainer = trainer
        assert data.train_dataloader().sampler.window == window, given


# -- in YAML


INTERACTIONS: Any = class_from_function(FreeScaleDataModule.from_interactions)
PARQUET: Any = class_from_function(FreeScaleDataModule.from_parquet)


def _from_yaml(made_by: Any, text: str) -> FreeScaleDataModule:
    """Return the data module that LightningCLI creates from a ``data:`` section."""
    parser: Any = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(made_by, "data")
    config = parser.parse_string(f"data: {{{text}}}")
    return getattr(parser, "instantiate", parser.instantiate_classes)(config).data


def test_options_are_sections_of_yaml(tmp_path: Any) -> None:
    table = pa.table({"user": [1] * 6 + [2] * 5, "item": [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0], "time": list(range(11))})
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    source = f"source: {tmp_path / 'rows.parquet'}"
    text = "balance: {assignment_mode: slack, tokens: [3, 4], max_tokens_per_rank: 5}"
    options = _from_yaml(INTERACTIONS, f"{source}, {text}")._arguments.options
    assert (options.assignment_mode, options.tokens, options.max_tokens_per_rank) == ("slack", [3, 4], 5)
    for balance in (True, False):
        text = f"balance: {str(balance).lower()}, num_workers: 2, prefetch_factor: 3, batch_size: 1"
        data = _from_yaml(INTERACTIONS, f"{source}, {text}")
        loader = data.train_dataloader()
        assert data.sampler(0, 2).balance_steps is balance
        assert (loader.num_workers, loader.prefetch_factor) == (2, 3)
    for text, fact in (
        ("num_worker: 2", "num_worker"),
        ("batch_sampler: 2", "batch_sampler"),
        ("balance: {mode: slack}", "mode"),
        ("balance: {assignment_mode: slak}", "slak"),
    ):
        with pytest.raises((ArgumentError, ValueError), match=fact):
            _from_yaml(INTERACTIONS, f"{source}, {text}")
    table = pa.table({"user": [1, 2], "item": [[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0]], "time": [list(range(6)), list(range(5))]})
    pa.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=1)
    text = f"source: {tmp_path}/*.parquet, row_group_window: 1, batch_size: 1, balance: {{assignment_mode: slack}}"
    data = _from_yaml(PARQUET, text)
    assert data.sampler(0, 2).blocks.window == 1 and data._arguments.options.assignment_mode == "slack"


# -- the loader that follows a planned sampler


class Noise(Dataset):
    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))


def _epoch(epoch: int, rank: int = 0, workers: int = 1) -> list[list[float]]:
    sampler = BalancedSampler([1.0] * 8, 2, num_replicas=2, rank=rank)
    sampler.set_epoch(epoch)
    return [batch.tolist() for batch in BalancedDataLoader.from_sampler(Noise(), sampler, num_workers=workers)]


def test_workers_draw_anew_in_every_epoch_and_on_every_rank_and_leave_the_global_state_alone() -> None:
    torch.manual_seed(1)
    first, again, next_epoch, other_rank = _epoch(0), _epoch(0), _epoch(1), _epoch(0, rank=1)
    assert first == again != next_epoch and first != other_rank
    for workers in (0, 1):
        torch.manual_seed(1)
        expected = [float(torch.rand(())) for _ in range(5)]
        torch.manual_seed(1)
        drawn = [value for batch in _epoch(0, workers=workers) for value in batch]
        assert (drawn == expected[:4]) == (workers == 0)
        assert float(torch.rand(())) == expected[0 if workers else 4]


def test_batches_for_a_gpu_are_pinned_unless_said_otherwise() -> None:
    sampler = BalancedSampler([1.0] * 8, 2, num_replicas=2, rank=0)
    made = [
        BalancedDataLoader.from_sampler(Noise(), sampler, for_gpu=for_gpu, **options)
        for for_gpu, options in ((True, {}), (False, {}), (True, {"pin_memory": False}))
    ]
    assert [loader.pin_memory for loader in made] == [True, False, False]


def test_a_window_is_for_several_ranks_and_ends_where_the_trainer_does() -> None:
    data = FreeScaleDataModule(list(range(48)), list(range(1, 49)), batch_size=2)
    data.trainer = L.Trainer(accumulate_grad_batches=4, limit_train_batches=6, logger=False, enable_progress_bar=False)
    drawn = [data.sampler(0, 1).global_batch(0, step).tolist() for step in range(24)]
    alone = data.train_dataloader().sampler
    assert [alone.global_batch(0, step).tolist() for step in range(24)] == drawn, "a single rank waits for no other rank"
    data._rank_and_world_size = lambda: (0, 2)
    shared = data.train_dataloader().sampler
    assert [shared.batches.begun_window(0, batches) for batches in (3, 4, 5, 7)] == [(0, 4), (4, 0), (4, 2), (7, 0)]


def test_progress_of_numpy_numbers_is_plain() -> None:
    data = FreeScaleDataModule(list(range(48)), list(range(1, 49)), batch_size=np.int64(2), seed=np.int64(3))
    data.train.resumed_sampler(0, 2, 0, accumulated=4)
    stream = io.BytesIO()
    torch.save(data.train.state_dict(0, 3, 2), stream)
    stream.seek(0)
    state = torch.load(stream, weights_only=True)
    assert (state["batch_size"], state["seed"], state["window"]) == (2, 3, [0, 4])


def test_a_module_can_be_pickled_once_its_functions_have_been_read() -> None:
    data = FreeScaleDataModule(
        Samples(),
        lengths=lambda sample: 1.0,
        cost=lambda lengths: lengths,
        target_counts=lambda sample: 2.0,
        loss_reduction="target_mean",
    )
    again = pickle.loads(pickle.dumps(data))
    assert again.train.costs.tolist() == data.train.costs.tolist()
