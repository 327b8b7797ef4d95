"""A run that resumes where gradients are being accumulated goes on as if it had not stopped."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.checkpoint.accumulated_gradients import restore_accumulated
from lightning_freescale.testing import run_distributed
from tests.checkpoint.test_resume import Seen
from tests.helpers.overlap_training import assert_same
from tests.helpers.recommender import REPEATS, Net, Samples, collate, trainer


class SaveAfterBatches(L.Callback):
    """Saves after some batches of the first epoch."""

    def __init__(self, path: str, after: tuple[int, ...]) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx + 1 in self.after:
            trainer.save_checkpoint(f"{self.path}{batch_idx + 1}", weights_only=batch_idx == 0)

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(f"{self.path}_epoch")


class CutShort(Seen):
    """Its epochs end after 5 batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None


def _accumulate(
    path: str,
    after: tuple[int, ...] = (),
    resume: Any = None,
    make: type[Seen] = Seen,
    ranks: int = 2,
    window: int = 3,
    stop: bool = False,
    nodes: int = 1,
    **options: Any,
) -> tuple[list[float], dict[str, Any], Any]:
    """Losses, weights and optimizer states of a run with windows of some batches; 8 batches an epoch."""
    torch.manual_seed(0 if resume is None else 7)
    module, data = make("adagrad"), Samples(64 * nodes)
    loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=REPEATS)
    strategy, save = FreeScaleStrategy(**options), SaveAfterBatches(path, after)
    ways = {"devices": ranks, "num_nodes": nodes, "accumulate_grad_batches": window}
    fit = trainer(strategy=strategy, max_epochs=2, callbacks=[save], **ways)
    fit.fit(module, loader, ckpt_path=None if resume is None else f"{path}{resume}")
    if stop:
        fit.save_checkpoint(f"{path}_stopped")
    state = fit._checkpoint_connector.dump_checkpoint(weights_only=False)
    return module.losses, state["state_dict"], state["optimizer_states"]


def _resume_accumulating(path: str) -> list[tuple[list[float], dict[str, Any], Any]]:
    whole = _accumulate(path, (4, 5, 6))
    # saved again where it has resumed, before the window ends
    return [whole, _accumulate(path, (5,), resume=4), *(_accumulate(path, resume=batch) for batch in (5, 6))]


def test_resume_inside_a_window_is_bitwise(tmp_path: Path) -> None:
    ranks = run_distributed(_resume_accumulating, 2, str(tmp_path / "batch"))
    for whole, *resumed in ranks:
        for after, (losses, *_) in zip((4, 5, 6), resumed):
            assert losses == whole[0][after:]
    for mine in ranks[0][1:]:
        assert_same(mine[1:], ranks[0][0][1:])


def _resume_on_two_nodes(path: str) -> tuple[Any, Any, Any]:
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), GROUP_RANK=str(rank // 2), LOCAL_WORLD_SIZE="2")
    whole = _accumulate(path, (5,), nodes=2, exchange="two_level")
    torch.distributed.barrier()
    resumed = (_accumulate(path, resume=5, nodes=2, exchange=exchange) for exchange in ("two_level", "flat"))
    return whole, *resumed


@pytest.mark.slow
def test_resume_in_two_levels(tmp_path: Path) -> None:
    """Also in the other exchange: what an owner keeps is the same. DDP adds 4 ranks up in another order after a resume."""
    for whole, *resumed in run_distributed(_resume_on_two_nodes, 4, str(tmp_path / "batch")):
        for losses, *_ in resumed:
            assert losses == pytest.approx(whole[0][5:], rel=1e-6)


class UsesAtFirst(Seen):
    """The last batch of a window does not use its bias."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 3 == 2 else loss + self.bias.square().sum() + (self.global_rank + 1) * self.bias.sum()


def _resume_unused(path: str) -> list[dict[str, Any]]:
    options = {"make": UsesAtFirst, "find_unused_parameters": True}
    return [_accumulate(path, (5,), **options)[1], _accumulate(path, resume=5, **options)[1]]


def test_parameters_that_the_rest_of_the_window_does_not_use(tmp_path: Path) -> None:
    whole, resumed = run_distributed(_resume_unused, 2, str(tmp_path / "batch"))[0]
    assert whole["bias"] != 0
    assert_same(resumed, whole)


def _begin_anew(path: str) -> tuple[Any, Any]:
    _accumulate(path, (5,))
    if torch.distributed.get_rank() == 0:
        saved = torch.load(f"{path}5", weights_only=True)
        del saved["freescale"]["accumulated"]
        torch.save(saved, f"{path}_without")
    torch.distributed.barrier()
    return _accumulate(path, resume=5, window=1), _accumulate(path, resume="_without", window=1)


def test_a_window_that_begins_with_the_resume_is_one_without_them(tmp_path: Path) -> None:
    """As for the dense part, whose gradients Lightning sets to zero then."""
    for found, expected in run_distributed(_begin_anew, 2, str(tmp_path / "batch")):
        assert_same(found, expected)


class Stops(Seen):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = batch_idx == 4


def _save_after_a_stop(path: str) -> tuple[list[str], bool]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _accumulate(path, make=Stops, stop=True)
    told = [str(one.message) for one in caught if "holds no accumulated gradients" in str(one.message)]
    return told, "accumulated" in torch.load(f"{path}_stopped", weights_only=True)["freescale"]


def test_a_checkpoint_after_a_fit_that_ended_in_a_window_says_what_it_lacks(tmp_path: Path) -> None:
    (told, held), (others, _) = run_distributed(_save_after_a_stop, 2, str(tmp_path / "batch"))
    assert len(told) == 1 and "Trainer(accumulate_grad_batches=3)" in told[0]
    assert not held and others == []


def _of_another_module() -> str:
    given = [{"dense": {"gone.weight": torch.ones(2)}, "tables": {"net.gone": {}}}]
    module = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="between two optimizer steps") as error:
        restore_accumulated(given, module, frozenset(), module, None)
    return str(error.value)


def test_gradients_of_what_is_not_there_are_refused() -> None:
    assert "accumulated gradients of ['gone.weight', 'net.gone']" in run_distributed(_of_another_module, 1)[0]


def _error(path: str, ranks: int, resume: Any = 5, **options: Any) -> str:
    with pytest.raises(ValueError, match=r"between two (optimizer steps|batches of an optimizer step)") as error:
        _accumulate(path, resume=resume, ranks=ranks, **options)
    return str(error.value)


def _resume_of_before(path: str) -> list[Any]:
    whole = _accumulate(path, (5,), placement="blocks")
    if torch.distributed.get_rank() == 0:
        saved = torch.load(f"{path}5", weights_only=True)
        for mine in saved["freescale"]["accumulated"]:
            for kept in mine["tables"].values():
                assert kept.pop("row_orders") == [(1, 0), (1, 0)]
        torch.save(saved, f"{path}_before")
    torch.distributed.barrier()
    return [whole, _accumulate(path, resume="_before", placement="blocks"), _error(path, 2, "_before")]


def test_files_from_before_rows_were_hashed_have_them_in_blocks(tmp_path: Path) -> None:
    for whole, resumed, error in run_distributed(_resume_of_before, 2, str(tmp_path / "batch")):
        assert resumed[0] == whole[0][5:]
        assert_same(resumed[1:], whole[1:])
        assert "'net.embeddings' is sharded otherwise" in error


def _windows(path: str) -> list[bool]:
    _accumulate(path, (1, 3, 5, 6, 8))
    _accumulate(path := f"{path}_short", make=CutShort)
    files = [*(path.removesuffix("_short") + str(after) for after in (1, 3, 5, 6, 8)), f"{path}_epoch"]
    return ["accumulated" in torch.load(each, weights_only=True).get("freescale", {}) for each in files]


def test_only_an_open_window_is_saved(tmp_path: Path) -> None:
    """Not with weights alone, after an optimizer step, nor where the epoch ends and Lightning forgets what was accumulated."""
    none = [False, False, True, False, False, False]
    assert run_distributed(_windows, 2, str(tmp_path / "batch")) == [none] * 2


def _on_one_owner() -> ShardingPlan:
    how = {"item": table_wise(rank=0, compute_kernel="fused"), "cat": table_wise(rank=1, compute_kernel="fused")}
    sharder = EmbeddingCollectionSharder()
    return ShardingPlan(
        {
            "net.embeddings": construct_module_sharding_plan(
                Net(torch.device("meta")).embeddings, how, sharder=sharder, local_size=2, world_size=2, device_type="cpu"
            )
        }
    )


def _on_other_owners(path: str) -> list[str]:
    _accumulate(path, (5,))
    return [_error(path, 2, plan=_on_one_owner()), _error(path, 2, placement="blocks")]


def test_gradients_that_belong_to_other_ranks_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "batch")
    for texts in run_distributed(_on_other_owners, 2, path):
        for text in texts:
            assert "'net.embeddings' is sharded otherwise" in text
    (text,) = run_distributed(_error, 1, path, 1)
    assert "ranks=2, this run has ranks=1" in text and "made at the end of an optimizer step" in text
