"""Fabric(strategy="freescale") against "ddp" of the unsharded module, and against the loop of plain TorchRec."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import plain_torchrec
from tests.helpers.fabric_loop import assert_refused, fabric_for, loss_of, run_all, run_loop, set_up, whole
from tests.helpers.recommender import Net, RankBatches, fixed_loader

STEPS = 12


def train(
    strategy: str = "freescale", optimizer: str = "adagrad", loop: Callable[..., list[float]] = run_loop, **options: Any
) -> dict[str, Any]:
    """Return losses, complete weights and optimizer states. ``options`` are those of FreeScaleFabricStrategy."""
    fabric = fabric_for(strategy, **options)
    model, updates, loader = set_up(fabric, optimizer, STEPS)
    losses = loop(fabric, model, updates, loader)
    return {"losses": losses, **whole(fabric, model, updates)}


def _by_hand(optimizer: str) -> dict[str, Any]:
    torch.manual_seed(0)
    return plain_torchrec.train(Net(), optimizer, RankBatches(int(os.environ["RANK"]), STEPS))


def test_bitwise_equal_to_plain_torchrec() -> None:
    mine, plain = run_all(3, partial(train, dedup=False), partial(_by_hand, "adagrad"))
    for rank in range(3):
        assert mine[rank]["losses"] == plain[rank]["losses"]
    assert len(set(mine[0]["losses"])) == STEPS
    for name, weight in plain[0]["weights"].items():
        assert torch.equal(mine[0]["weights"][name], weight), name
    for index, table in enumerate(("item", "cat")):
        state = mine[0]["optimizer"]["state"][index]["sum"]
        assert torch.equal(state.flatten(), plain[0]["states"][f"{table}.momentum1"].flatten())


def _clipped_by_norm(fabric: Any, model: Any, optimizer: Any, loader: Any) -> list[float]:
    norms: list[float] = []

    def clip(*given: Any) -> None:
        norms.append(float(fabric.clip_gradients(*given, max_norm=0.05)))

    return [*run_loop(fabric, model, optimizer, loader, clip=clip), *norms]


def _clipped_by_value(fabric: Any, *given: Any) -> list[float]:
    return run_loop(fabric, *given, clip=partial(fabric.clip_gradients, clip_val=0.002))


def _restarted(fabric: Any, model: Any, optimizer: Any, loader: Any) -> list[float]:
    """Drop accumulated gradients by zero_grad, as for a bad batch."""
    losses = []
    for index, batch in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            loss = loss_of(model, batch)
            fabric.backward(loss)
        if index == 4:
            optimizer.zero_grad()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _evaluated(fabric: Any, model: Any, optimizer: Any, loader: Any) -> list[float]:
    """Train with validation between steps, two epochs, a step without gradients, and a forward without a step."""
    losses = []
    for _ in range(2):
        for index, batch in enumerate(loader):
            if index == 2:
                optimizer.step()
            if index == 3:
                with torch.no_grad():
                    losses.append(float(loss_of(model, batch)))
            if index == 4:
                loss_of(model, batch)
            loss = loss_of(model, batch)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("loop", "optimizer", "options"),
    [
        (run_loop, "adagrad", {}),
        (run_loop, "sgd", {"overlap": False}),
        (partial(run_loop, accumulate=3), "adagrad", {}),
        (_clipped_by_norm, "sgd", {"clip_gradients": True}),
        (_clipped_by_value, "sgd", {"clip_gradients": True}),
        (_restarted, "adagrad", {}),
        (_evaluated, "adagrad", {}),
    ],
    ids=["plain", "without overlap", "accumulated", "norm", "value", "restarted", "evaluated"],
)
def test_same_as_ddp(loop: Callable[..., list[float]], optimizer: str, options: dict[str, Any]) -> None:
    mine, ddp, plain = run_all(
        2,
        partial(train, "freescale", optimizer, loop, **options),
        partial(train, "ddp", optimizer, loop),
        partial(train, "ddp", optimizer),
    )
    assert len(set(mine[0]["losses"])) >= STEPS, "the loss must move, or equality means nothing"
    assert (mine[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-4)) == (loop is run_loop)
    for one, other in zip(mine, ddp):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-5)
    for name, weight in ddp[0]["weights"].items():
        torch.testing.assert_close(mine[0]["weights"][name], weight, rtol=1e-6, atol=1e-6, msg=name)
    assert mine[0]["optimizer"]["state"].keys() == ddp[0]["optimizer"]["state"].keys()


# -- steps: the exchange is hidden; a loop that would give other numbers than under "ddp" is refused


def _overlap(**options: Any) -> dict[str, Any]:
    fabric = fabric_for(**options)
    model, optimizer, loader = set_up(fabric, steps=STEPS)
    losses = run_loop(fabric, model, optimizer, loader)
    statistics = fabric.strategy.engine.statistics()
    report = fabric.strategy.finish_overlap()
    return {"losses": losses, "statistics": statistics, "steps": report.steps, **whole(fabric, model, optimizer)}


def _ids_of(batch: dict[str, Any]) -> Any:
    return batch["features"]


def test_ids_of_the_next_batch_are_known_or_told_and_backward_is_split() -> None:
    plain, split = run_all(2, _overlap, partial(_overlap, ids_of=_ids_of, split_backward=True))
    for run in plain:
        assert run["steps"] == STEPS
        assert run["statistics"]["predicted_lookups"] >= STEPS - 2
        assert run["statistics"]["mispredicted_lookups"] == 0
    assert split[0]["statistics"]["predicted_lookups"] >= STEPS - 1, "already in the second step"
    assert split[0]["losses"] == plain[0]["losses"]
    for name, weight in plain[0]["weights"].items():
        assert torch.equal(split[0]["weights"][name], weight), name


def _unknown_loader() -> tuple[list[float], float, bool]:
    """Check batches from no loader of Fabric, which are exact and without overlap."""
    fabric = fabric_for()
    model, optimizer, _ = set_up(fabric)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = run_loop(fabric, model, optimizer, fixed_loader(fabric.global_rank, STEPS).dataset.batches[:4])
    told = any("fabric.setup_dataloaders(loader)" in str(each.message) for each in caught)
    return losses, fabric.strategy.engine.statistics()["predicted_lookups"], told


def test_batches_of_other_loaders_are_exact_and_told() -> None:
    found, expected = run_all(2, _unknown_loader, train)
    for (losses, predicted, _), run in zip(found, expected):
        assert losses == run["losses"][:4]
        assert predicted == 0
    assert [told for *_, told in found] == [True, False], "rank 0 tells"


# -- what is refused


def _do(actions: str) -> Callable[[Any], None]:
    """Return a loop over Fabric with these actions. Actions in brackets are within ``no_backward_sync``."""

    def loop(fabric: Any) -> None:
        model, optimizer, loader = set_up(fabric, steps=2)
        batch, losses = next(iter(loader)), []
        do = {
            "forward": lambda: losses.append(loss_of(model, batch)),
            "backward": lambda: fabric.backward(losses[-1], retain_graph=True),
            "step": optimizer.step,
            "change": lambda: [parameter.grad.mul_(0.5) for parameter in model.hidden.parameters()],
            "clip": lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0),
            "torch's-clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        }
        for action in actions.split():
            with fabric.no_backward_sync(model, enabled=action.startswith("(")):
                do[action.strip("()")]()

    return loop


def _uneven(fabric: Any) -> None:
    model, optimizer, _ = set_up(fabric, steps=2)
    loader = fabric.setup_dataloaders(fixed_loader(0, 3 + fabric.global_rank), use_distributed_sampler=False)
    run_loop(fabric, model, optimizer, loader)
    fabric.strategy.drain()


def test_what_would_give_other_numbers_is_refused() -> None:
    assert_refused(
        {
            r"fabric\.backward\(loss\) was called twice": _do("forward backward backward"),
            r"model\(\.\.\.\) was called between": _do("forward backward forward"),
            r"optimizer\.zero_grad\(\) after": _do("forward backward step forward backward"),
            r"optimizer\.step\(\) follows": _do("(forward) (backward) step"),
            r"both inside": _do("forward (backward)"),
            r"were changed": _do("(forward) (backward) change forward backward"),
            r"FreeScaleFabricStrategy\(clip_gradients=True\)": _do("forward backward clip"),
            r"fabric\.clip_gradients": _do("forward backward torch's-clip"),
            r"step 3": _uneven,  # the last: it leaves the ranks out of step
        }
    )


def _goes_on_after_a_failed_backward() -> int:
    fabric = fabric_for()
    model, optimizer, loader = set_up(fabric, steps=2)
    trained = 0
    for batch in loader:
        loss = loss_of(model, batch)
        with pytest.raises(RuntimeError, match="does not require grad"):
            fabric.backward(loss.detach())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        trained += 1
    return trained


def test_a_loop_goes_on_after_a_backward_that_failed() -> None:
    assert run_all(2, _goes_on_after_a_failed_backward) == [(2, 2)]
