"""Adam and AdamW on tables on CPU: torch's numbers for the rows that a step touches."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.testing import run_distributed
from tests.checkpoint.test_resume import Seen, StopAt
from tests.helpers.overlap_training import CountingModel, Run, assert_same, fit
from tests.helpers.recommender import CATEGORIES, ITEMS, REPEATS, Recommender, Samples, collate, trainer

SAMPLES = 14  # of a global batch
SETTINGS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6}
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, **SETTINGS),
    "adamw": partial(torch.optim.AdamW, **SETTINGS, weight_decay=0.1),
}


class Steps(Dataset):
    """This rank's part of global batches; of ``full`` ones every row of both tables is in every batch."""

    def __init__(self, steps: int, full: bool) -> None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        share = SAMPLES // world
        self.batches = [collate(self._samples(step, full)[rank * share : (rank + 1) * share]) for step in range(steps)]

    @staticmethod
    def _samples(step: int, full: bool) -> list[dict[str, Any]]:
        draw = torch.Generator().manual_seed(step)
        count = ITEMS + 20 if full else 10
        items = torch.cat([torch.randperm(ITEMS, generator=draw), torch.randint(0, ITEMS, (20,), generator=draw)])
        categories = torch.cat([torch.randperm(CATEGORIES, generator=draw), torch.randint(0, CATEGORIES, (1,), generator=draw)])
        histories = items[:count].tensor_split(SAMPLES)
        return [
            {
                "index": index,
                "history": histories[index],
                "candidate": torch.randint(0, ITEMS if full else 5, (), generator=draw),
                "category": categories[index] if full else categories[index] % 5,
                "label": torch.rand((), generator=draw),
            }
            for index in range(SAMPLES)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.batches[index]


def _loader(steps: int, full: bool) -> DataLoader:
    return DataLoader(Steps(steps, full), batch_size=None)


def every_row_loader(steps: int) -> DataLoader:
    """This rank's batches, in each of which some rank looks up every row: there torch's dense updates are those of rows."""
    return _loader(steps, full=True)


def _tables(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for name, parameter in module.named_parameters() if "embeddings" in name]


def _rest(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for name, parameter in module.named_parameters() if "embeddings" not in name]


class WithAdam(CountingModel):
    """One optimizer over everything."""

    def configure_optimizers(self) -> Any:
        return KINDS[self.optimizer](self.parameters())


class InGroups(CountingModel):
    """Each table in a group of its own."""

    def configure_optimizers(self) -> Any:
        item, category = _tables(self)
        return KINDS[self.optimizer](
            [{"params": [item], "lr": 0.05}, {"params": _rest(self)}, {"params": [category], "betas": (0.7, 0.9)}]
        )


class InBackward(CountingModel):
    """An optimizer of its own for the tables."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        kind = KINDS[optimizer]
        apply_optimizer_in_backward(kind.func, _tables(self), dict(kind.keywords))

    def configure_optimizers(self) -> Any:
        return KINDS[self.optimizer](_rest(self))


def _fits(full: bool, chosen: list[tuple[Any, str]], strategy: str = "freescale", **options: Any) -> list[Run]:
    runs = []
    for make, kind in chosen:
        torch.manual_seed(0)
        runs.append(fit(make(kind), _loader(6, full), max_epochs=2, strategy=strategy, **options))
    return runs


ONE_OPTIMIZER = [(make, kind) for make in (WithAdam, InGroups) for kind in KINDS]


def _assert_close(mine: Run, other: Run) -> None:
    assert mine.losses == pytest.approx(other.losses, rel=1e-5)
    assert max(mine.losses) / min(mine.losses) > 1.2, "the loss must move, or equality means nothing"
    assert_same(mine.weights, other.weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), {"accumulate_grad_batches": 4}])
def test_as_torch_where_every_row_is_touched(options: dict[str, Any]) -> None:
    ddp, mine = (run_distributed(_fits, 2, True, ONE_OPTIMIZER, strategy, **options) for strategy in ("ddp", "freescale"))
    for rank in range(2):
        for run, expected in zip(mine[rank], ddp[rank]):
            assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    for run, expected in zip(mine[0], ddp[0]):
        _assert_close(run, expected)
        assert_same(run.states[0], expected.states[0], rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_as_one_rank_where_most_rows_are_not() -> None:
    chosen = [*ONE_OPTIMIZER, (InBackward, "adam")]
    two, alone = (run_distributed(_fits, world, False, chosen) for world in (2, 1))
    for first, second, whole in zip(*two, alone[0]):
        both = [(a + b) / 2 for a, b in zip(first.losses, second.losses)]
        assert both == pytest.approx(whole.losses, rel=1e-5)
        assert max(both) / min(both) > 1.1, "the loss must move, or equality means nothing"
        assert_same(first.weights, whole.weights, rtol=1e-4, atol=1e-6)
        assert first.looked_ahead() == (12 - 3, 3, 0)
    torch.manual_seed(0)
    initial = Recommender().state_dict()["net.embeddings.embeddings.item.weight"]
    moved = (two[0][0].weights["net.embeddings.embeddings.item.weight"] != initial).any(dim=1)
    assert 10 < moved.sum() < ITEMS, "rows that no batch holds stay as they are"
    single, applied = two[0][0], two[0][-1]
    assert applied.losses == single.losses
    assert_same(applied.weights, single.weights)


def _refused(arguments: dict[str, Any]) -> str:
    module = CountingModel()
    apply_optimizer_in_backward(torch.optim.Adam, _tables(module), {"lr": 0.1, **arguments})
    try:
        fit(module, _loader(2, True))
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("arguments", [{"amsgrad": True}, {"maximize": True}])
def test_arguments_that_are_not_followed_are_refused(arguments: dict[str, Any]) -> None:
    name = next(iter(arguments))
    assert f"Adam({name}=True), applied in backward to table 'net" in run_distributed(_refused, 1, arguments)[0]


# -- checkpoints


class SeenWithAdam(Seen):
    def configure_optimizers(self) -> Any:
        optimizer = KINDS[self.optimizer](self.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SeenInBackward(Seen):
    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        kind = KINDS[optimizer]
        apply_optimizer_in_backward(kind.func, _tables(self), dict(kind.keywords))

    def configure_optimizers(self) -> Any:
        return KINDS[self.optimizer](_rest(self))


def _resumes(path: Path, chosen: list[tuple[Any, str]]) -> list[tuple[list[float], Any, Any]]:
    """Without a stop, until the stop, and from there on."""
    results = []
    for index, (make, kind) in enumerate(chosen):
        file = str(path / f"{index}.ckpt")
        for seed, callbacks, resume in ((0, [], None), (0, [StopAt(10, file)], None), (7, [], file)):
            torch.manual_seed(seed)
            module, data = make(kind), Samples(64)
            loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=REPEATS)
            fitting = trainer(devices=2, max_epochs=2, callbacks=callbacks)
            fitting.fit(module, loader, ckpt_path=resume)
            state = fitting._checkpoint_connector.dump_checkpoint(weights_only=False)
            results.append((module.losses, state["state_dict"], state["optimizer_states"]))
    return results


@pytest.mark.slow
def test_resume_is_bitwise_and_the_file_is_that_of_the_plain_module(tmp_path: Path) -> None:
    chosen = [(SeenWithAdam, "adam"), (SeenWithAdam, "adamw"), (SeenInBackward, "adam")]
    ranks = run_distributed(_resumes, 2, tmp_path, chosen)
    for index, (make, kind) in enumerate(chosen):
        for results in ranks:
            whole, first, second = (losses for losses, _, _ in results[3 * index : 3 * index + 3])
            assert first + second == whole and len(first) == 10
        assert_same(ranks[0][3 * index + 2][1:], ranks[0][3 * index][1:])
        checkpoint = torch.load(tmp_path / f"{index}.ckpt", weights_only=True)
        Recommender().load_state_dict(checkpoint["state_dict"], strict=True)
        if make is SeenWithAdam:
            _assert_torchs(checkpoint["optimizer_states"][0], kind)


def _assert_torchs(state: dict[str, Any], kind: str) -> None:
    """Names, shapes and types are those that torch writes."""
    module, samples = Recommender(), Samples(8)
    optimizer = KINDS[kind](module.parameters())
    module.net(collate([samples[index] for index in range(8)])["features"]).sum().backward()
    optimizer.step()
    expected = optimizer.state_dict()
    assert state["state"].keys() == expected["state"].keys()
    for index, entries in expected["state"].items():
        assert state["state"][index].keys() == entries.keys()
        for name, tensor in entries.items():
            mine = state["state"][index][name]
            assert (mine.shape, mine.dtype) == (tensor.shape, tensor.dtype)
        assert state["state"][index]["step"] == 10
    optimizer.load_state_dict(state)


def _changes_strategy(path: Path, full: bool = True) -> list[list[Run]]:
    """A whole run under "ddp", and runs that change over in the middle."""
    torch.manual_seed(0)
    found = [[fit(WithAdam("adamw"), _loader(6, full), max_epochs=2, strategy="ddp")]]
    for index, (before, after) in enumerate([("freescale", "ddp"), ("ddp", "freescale")]):
        file = str(path / f"{index}.ckpt")
        torch.manual_seed(0)
        first = fit(WithAdam("adamw"), _loader(6, full), max_epochs=2, strategy=before, callbacks=[StopAt(6, file)])
        torch.manual_seed(7)
        second = fit(WithAdam("adamw"), _loader(6, full), max_epochs=2, strategy=after, ckpt_path=file)
        found.append([first, second])
    return found


@pytest.mark.slow
def test_from_freescale_to_ddp_and_back(tmp_path: Path) -> None:
    ranks = run_distributed(_changes_strategy, 2, tmp_path)
    for (whole,), *changed in ranks:
        for first, second in changed:
            assert len(second.losses) == 6
            assert first.losses + second.losses == pytest.approx(whole.losses, rel=1e-5)
    (whole,), *changed = ranks[0]
    for _, second in changed:
        assert_same(second.weights, whole.weights, rtol=1e-4, atol=1e-6)
        assert_same(second.states[0], whole.states[0], rtol=1e-4, atol=1e-7)


class SkipsSteps(WithAdam):
    """Some steps have no loss."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (2, 3) else loss


def test_a_step_without_a_loss_is_no_update() -> None:
    ((expected,), (mine,)) = (run_distributed(_fits, 1, True, [(SkipsSteps, "adam")], name)[0] for name in ("ddp", "freescale"))
    _assert_close(mine, expected)
    assert_same(mine.states[0], expected.states[0], rtol=1e-4, atol=1e-7)


class OnlyTables(InBackward):
    """An optimizer without state for the rest."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(_rest(self), lr=0.1)


def _goes_on(path: Path) -> tuple[list[float], list[float]]:
    """In one fit, and in two, of which the second one is saved and resumed."""
    torch.manual_seed(0)
    whole = fit(OnlyTables("adam"), _loader(6, True), max_epochs=3)
    torch.manual_seed(0)
    module = OnlyTables("adam")
    file = str(path / "second.ckpt")
    for callbacks in ([], [StopAt(6, file)]):
        fit(module, _loader(6, True), callbacks=callbacks)
    rest = fit(OnlyTables("adam"), _loader(6, True), ckpt_path=file, max_epochs=2)
    return whole.losses, module.losses + rest.losses


@pytest.mark.slow
def test_an_optimizer_in_backward_goes_on_in_the_next_fit(tmp_path: Path) -> None:
    whole, parts = run_distributed(_goes_on, 2, tmp_path)[0]
    assert parts == whole
