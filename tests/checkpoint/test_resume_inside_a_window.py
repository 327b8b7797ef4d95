"""Runs that resume while gradients are accumulated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

from lightning_freescale.checkpoint.run_state import restore_accumulated
from lightning_freescale.testing import run_distributed
from tests.checkpoint.fits import Fitted, Seen, fit
from tests.helpers.overlap_training import assert_same
from tests.helpers.recommender import Net


class SaveAfterBatches(L.Callback):
    """A callback that saves after batches of the first epoch, after the first only weights, and at the end of the epoch."""

    def __init__(self, path: str, after: tuple[int, ...]) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx + 1 in self.after:
            trainer.save_checkpoint(f"{self.path}{batch_idx + 1}", weights_only=batch_idx == 0)

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.current_epoch == 0 and self.after:
            trainer.save_checkpoint(f"{self.path}_epoch")


def _accumulate(
    path: str, after: tuple[int, ...] = (), resume: Any = None, window: int = 3, nodes: int = 1, **options: Any
) -> Fitted:
    """Run with windows of some batches and 8 batches per epoch."""
    saving, resumed = [SaveAfterBatches(path, after)], None if resume is None else f"{path}{resume}"
    options |= {"samples": 64 * nodes, "batch_size": 4, "accumulate_grad_batches": window, "num_nodes": nodes}
    return fit(callbacks=saving, resume=resumed, devices=dist.get_world_size() // nodes, **options)


def _held(path: str) -> bool:
    return "accumulated" in torch.load(path, weights_only=True).get("freescale", {})


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Fitted]]:
    """Return the path of the checkpoints of a run, by number of batches, and the results of the run."""
    path = str(tmp_path_factory.mktemp("accumulated") / "batch")
    return path, run_distributed(_accumulate, 2, path, (1, 3, 4, 5, 6, 8))


def _resumed(path: str) -> list[Fitted]:
    """Resume after batches 4, 5 and 6. Save the first checkpoint again before its window ends."""
    return [_accumulate(path, (5,), resume=4), *(_accumulate(path, resume=batch) for batch in (5, 6))]


def test_resume_inside_a_window_is_bitwise(accumulated: tuple[str, list[Fitted]]) -> None:
    """Check that gradients are saved only in an open window with the optimizer state."""
    path, whole = accumulated
    assert [after for after in (1, 3, 4, 5, 6, 8, "_epoch") if _held(f"{path}{after}")] == [4, 5]
    ranks = run_distributed(_resumed, 2, path)
    for straight, resumed in zip(whole, ranks):
        for after, found in zip((4, 5, 6), resumed):
            assert found.losses == straight.losses[after:]
    for found in ranks[0]:
        assert_same([found.weights, found.states], [whole[0].weights, whole[0].states])


HOT = {"hot_rows": 0.5, "rerank_every_n_steps": 1}


def _resume_on_two_nodes(path: str) -> list[Fitted]:
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), GROUP_RANK=str(rank // 2), LOCAL_WORLD_SIZE="2")
    whole = _accumulate(path, (5,), nodes=2, strategy=HOT)
    dist.barrier()
    return [whole, *(_accumulate(path, resume=5, nodes=2, strategy=how) for how in (HOT, {"hot_rows": 0}))]


@pytest.mark.slow
def test_resume_with_hot_rows(tmp_path: Path) -> None:
    """Check that no list of hot rows is needed. DDP's order of summation over 4 ranks changes after a resume."""
    for whole, *resumed in run_distributed(_resume_on_two_nodes, 4, str(tmp_path / "batch")):
        for found in resumed:
            assert found.losses == pytest.approx(whole.losses[5:], rel=1e-6)


class UsesAtFirst(Seen):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 3 == 2 else loss + self.bias.square().sum() + (self.global_rank + 1) * self.bias.sum()


def _resume_unused(path: str) -> list[dict[str, Any]]:
    options = {"make": UsesAtFirst, "strategy": {"find_unused_parameters": True}}
    return [_accumulate(path, (5,), **options).weights, _accumulate(path, resume=5, **options).weights]


def test_parameters_that_the_rest_of_the_window_does_not_use(tmp_path: Path) -> None:
    whole, resumed = run_distributed(_resume_unused, 2, str(tmp_path / "batch"))[0]
    assert whole["bias"] != 0
    assert_same(resumed, whole)


def _without(path: str, *parts: str) -> None:
    """Save the checkpoint after batch 5 without the accumulated gradients, or without the given parts of it."""
    if dist.get_rank() == 0:
        saved = torch.load(f"{path}5", weights_only=True)
        if parts:
            for mine in saved["freescale"]["accumulated"]:
                for kept in mine["tables"].values():
                    assert [kept.pop(part) for part in parts] == [[(1, 0), (1, 0)]]
        else:
            del saved["freescale"]["accumulated"]
        torch.save(saved, f"{path}_without")
    dist.barrier()


def _begin_anew(path: str) -> list[Fitted]:
    _without(path)
    return [_accumulate(path, resume=each, window=1) for each in (5, "_without")]


@pytest.mark.slow
def test_a_window_that_begins_with_the_resume_is_one_without_them(accumulated: tuple[str, list[Fitted]]) -> None:
    """Check that gradients are zero then, as for dense parameters, whose gradients Lightning sets to zero."""
    for found, expected in run_distributed(_begin_anew, 2, accumulated[0]):
        assert found.losses == expected.losses
        assert_same([found.weights, found.states], [expected.weights, expected.states])


class Stops(Seen):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = batch_idx == 4


class CutShort(Seen):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None


def _stop(path: str) -> list[str]:
    _accumulate(f"{path}_cut", (8,), make=CutShort)
    return _accumulate(path, make=Stops, save=f"{path}_stopped").warned


def test_a_fit_or_an_epoch_that_ended_in_a_window_has_lost_it(tmp_path: Path) -> None:
    path = str(tmp_path / "batch")
    warned, others = run_distributed(_stop, 2, path)
    assert [sum("Trainer(accumulate_grad_batches=3)" in each for each in of_rank) for of_rank in (warned, others)] == [1, 0]
    assert not _held(f"{path}_stopped") and not _held(f"{path}_cut_epoch")


def _error(path: str, resume: Any = 5, **strategy: Any) -> str:
    with pytest.raises(ValueError, match="between two") as error:
        _accumulate(path, resume=resume, strategy=strategy)
    return str(error.value)


def _on_one_owner() -> ShardingPlan:
    how = {"item": table_wise(rank=0, compute_kernel="fused"), "cat": table_wise(rank=1, compute_kernel="fused")}
    options = {"sharder": EmbeddingCollectionSharder(), "local_size": 2, "world_size": 2, "device_type": "cpu"}
    embeddings = Net(torch.device("meta")).embeddings
    return ShardingPlan({"net.embeddings": construct_module_sharding_plan(embeddings, how, **options)})


def _of_another_module() -> str:
    given, module = [{"dense": {"absent.weight": torch.ones(2)}, "tables": {"net.absent": {}}}], torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"absent\.weight.*net\.absent") as error:
        restore_accumulated(given, module, frozenset(), module, None)
    return str(error.value)


def test_gradients_of_other_ranks_or_parameters_are_refused(accumulated: tuple[str, list[Fitted]]) -> None:
    path, _ = accumulated
    for text in run_distributed(lambda: _error(path, plan=_on_one_owner()), 2):
        assert "'net.embeddings'" in text
    (text,) = run_distributed(_error, 1, path)
    assert "ranks=2" in text and "ranks=1" in text
    assert run_distributed(_of_another_module, 1)
