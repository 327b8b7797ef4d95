"""The exchange is hidden; gradients are accumulated and clipped as under "ddp"; what would differ is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_freescale.testing import RankFailed, run_distributed
from tests.fabric.test_parity import _close, _train
from tests.helpers.fabric_loop import fabric_for, loss_of, run_loop, set_up, whole
from tests.helpers.recommender import fixed_loader

STEPS = 12


def _overlap(**options: Any) -> dict[str, Any]:
    fabric = fabric_for(**options)
    model, optimizer, loader = set_up(fabric, steps=STEPS)
    losses = run_loop(fabric, model, optimizer, loader)
    statistics = fabric.strategy._steps.engine.statistics()
    report = fabric.strategy.finish_overlap()
    return {"losses": losses, "statistics": statistics, "steps": report.steps, **whole(fabric, model, optimizer)}


def test_ids_of_the_next_batch_are_known() -> None:
    for run in run_distributed(_overlap, 2):
        assert run["steps"] == STEPS
        assert run["statistics"]["predicted_lookups"] >= STEPS - 2
        assert run["statistics"]["mispredicted_lookups"] == 0


def _ids_of(batch: dict[str, Any]) -> Any:
    return batch["features"]


def test_ids_are_told_and_backward_is_split() -> None:
    split = run_distributed(_overlap, 2, ids_of=_ids_of, split_backward=True)
    plain = run_distributed(_overlap, 2)
    assert split[0]["statistics"]["predicted_lookups"] >= STEPS - 1, "already in the second step"
    assert split[0]["losses"] == plain[0]["losses"]
    for name, weight in plain[0]["weights"].items():
        assert torch.equal(split[0]["weights"][name], weight), name


def test_accumulated_as_under_ddp() -> None:
    mine, ddp = (run_distributed(_train, 2, strategy, accumulate=3) for strategy in ("freescale", "ddp"))
    _close(mine, ddp)


def _by_norm(fabric: Any, model: Any, optimizer: Any) -> None:
    norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.05)))


def _by_value(fabric: Any, model: Any, optimizer: Any) -> None:
    fabric.clip_gradients(model, optimizer, clip_val=0.002)


norms: list[float] = []


def _clipped(strategy: str, clip: Callable[..., None], **options: Any) -> dict[str, Any]:
    norms.clear()
    fabric = fabric_for(strategy, **options)
    model, optimizer, loader = set_up(fabric, "sgd", STEPS)
    losses = run_loop(fabric, model, optimizer, loader, clip=lambda *given: clip(fabric, *given))
    return {"losses": losses, "norms": list(norms), **whole(fabric, model, optimizer)}


@pytest.mark.parametrize("clip", [_by_norm, _by_value])
def test_clipped_as_under_ddp(clip: Callable[..., None]) -> None:
    mine = run_distributed(_clipped, 2, "freescale", clip, clip_gradients=True)
    ddp, free = run_distributed(_clipped, 2, "ddp", clip), run_distributed(_train, 2, "ddp", "sgd")
    _close(mine, ddp)
    assert mine[0]["norms"] == pytest.approx(ddp[0]["norms"], rel=1e-5)
    assert mine[0]["losses"] != pytest.approx(free[0]["losses"], rel=1e-4), "something must have been clipped"


def _restarted(strategy: str) -> dict[str, Any]:
    """What has been accumulated is dropped by zero_grad, as for a bad batch."""
    fabric = fabric_for(strategy)
    model, optimizer, loader = set_up(fabric, "adagrad", STEPS)
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
    return {"losses": losses, **whole(fabric, model, optimizer)}


def test_accumulated_gradients_are_dropped_as_under_ddp() -> None:
    _close(*(run_distributed(_restarted, 2, strategy) for strategy in ("freescale", "ddp")))


def _evaluated(strategy: str) -> dict[str, Any]:
    """Validation between steps, two epochs, a forward that leads to no step."""
    fabric = fabric_for(strategy)
    model, optimizer, loader = set_up(fabric, "adagrad", STEPS // 2)
    losses, seen = [], []
    for _ in range(2):
        for index, batch in enumerate(loader):
            if index == 2:
                optimizer.step()  # of no gradients
            if index == 3:
                with torch.no_grad():
                    seen.append(float(loss_of(model, batch)))
            if index == 4:
                loss_of(model, batch)
            loss = loss_of(model, batch)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses, "seen": seen, **whole(fabric, model, optimizer)}


def test_other_loops_as_under_ddp() -> None:
    mine, ddp = (run_distributed(_evaluated, 2, strategy) for strategy in ("freescale", "ddp"))
    _close(mine, ddp)
    assert mine[0]["seen"] == pytest.approx(ddp[0]["seen"], rel=1e-5)


# -- what is refused


def _twice(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
    loss = loss_of(model, batch)
    fabric.backward(loss, retain_graph=True)
    fabric.backward(loss)


def _skipped(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
    fabric.backward(loss_of(model, batch))
    loss_of(model, batch)


def _not_zeroed(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
    for _ in range(2):
        fabric.backward(loss_of(model, batch))
        optimizer.step()


def _step_of_accumulated(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
    with fabric.no_backward_sync(model):
        fabric.backward(loss_of(model, batch))
    optimizer.step()


def _half_inside(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
    loss = loss_of(model, batch)
    with fabric.no_backward_sync(model):
        fabric.backward(loss)


def _changed(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
    with fabric.no_backward_sync(model):
        fabric.backward(loss_of(model, batch))
    for parameter in model.hidden.parameters():
        parameter.grad.mul_(0.5)
    fabric.backward(loss_of(model, batch))


def _unexpected_clipping(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
    fabric.backward(loss_of(model, batch))
    fabric.clip_gradients(model, optimizer, max_norm=1.0)


def _torchs_clipping(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
    fabric.backward(loss_of(model, batch))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _uneven(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
    loader = fabric.setup_dataloaders(fixed_loader(0, 3 + fabric.global_rank), use_distributed_sampler=False)
    run_loop(fabric, model, optimizer, loader)
    fabric.strategy.drain()


def _step(misuse: Callable[..., None]) -> None:
    fabric = fabric_for()
    model, optimizer, loader = set_up(fabric, steps=2)
    misuse(fabric, model, optimizer, next(iter(loader)))


REFUSED = {
    _twice: r"a second fabric.backward\(loss\) without optimizer.step\(\)",
    _skipped: r"model\(...\) between fabric.backward\(loss\) and optimizer.step\(\)",
    _not_zeroed: r"the dense gradients are still those of the last optimizer.step\(\)",
    _step_of_accumulated: r"optimizer.step\(\) after a backward within fabric.no_backward_sync",
    _half_inside: r"were not both inside fabric.no_backward_sync",
    _changed: r"the dense gradients that wait for optimizer.step\(\) were changed",
    _unexpected_clipping: r"pass FreeScaleFabricStrategy\(clip_gradients=True\)|Pass FreeScaleFabricStrategy",
    _uneven: r"have no batch after step 3, others have",
    _torchs_clipping: r"sees the gradients of the dense part alone.*Call fabric.clip_gradients",
}


@pytest.mark.parametrize("misuse", REFUSED, ids=lambda misuse: misuse.__name__)
def test_what_would_give_other_numbers_is_refused(misuse: Callable[..., None]) -> None:
    with pytest.raises(RankFailed, match=REFUSED[misuse]):
        run_distributed(_step, 2, misuse)


def _unknown_loader() -> tuple[list[float], float, list[str]]:
    """Batches that no loader of Fabric's hands out: exact, without overlap."""
    fabric = fabric_for()
    model, optimizer, _ = set_up(fabric)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = run_loop(fabric, model, optimizer, fixed_loader(fabric.global_rank, STEPS).dataset.batches[:4])
    told = [str(each.message) for each in caught if "Iterate over fabric.setup_dataloaders(loader)" in str(each.message)]
    return losses, fabric.strategy._steps.engine.statistics()["predicted_lookups"], told


def test_batches_of_other_loaders_are_exact_and_told() -> None:
    runs = run_distributed(_unknown_loader, 2)
    expected = run_distributed(_train, 2)
    for (losses, predicted, _), run in zip(runs, expected):
        assert losses == run["losses"][:4]
        assert predicted == 0
    assert [bool(told) for *_, told in runs] == [True, False], "rank 0 tells"
