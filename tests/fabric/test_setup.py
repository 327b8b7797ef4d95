"""The modules and optimizers that fabric.setup accepts, their devices, and the errors for others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_freescale import FreeScaleDataModule, FreeScaleFabricStrategy
from lightning_freescale.balance import BalancedSampler
from lightning_freescale.data import BalancedDataLoader
from lightning_freescale.testing import run_distributed
from tests.fabric.test_parity import train
from tests.helpers.fabric_loop import assert_refused, fabric_for, loss_of, run_all, run_loop, set_up
from tests.helpers.recommender import OPTIMIZERS, Net, Samples, collate, fixed_loader


class Items(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.out = nn.Embedding(50, 8), nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.items(ids)).squeeze(-1)


def _plain_embedding(strategy: str, **options: Any) -> tuple[list[float], list[float]]:
    fabric = fabric_for(strategy, **options)
    torch.manual_seed(0)
    net = Items()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.5))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.3)
    draw = torch.Generator().manual_seed(fabric.global_rank)
    ids = [torch.randint(0, 50, (6,), generator=draw) for _ in range(8)]
    losses = []
    for batch in fabric.setup_dataloaders(DataLoader(ids, batch_size=None), use_distributed_sampler=False):
        loss = (model(batch) - 1).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    weight = fabric.strategy.full_weight("items") if "shard" in options else net.items.weight.detach()
    return losses, weight.sum(1).tolist()


def test_plain_embeddings_and_schedulers() -> None:
    plain = partial(_plain_embedding, "freescale")
    sharded, without_collections, ddp = run_all(2, partial(plain, shard=["items"]), plain, partial(_plain_embedding, "ddp"))
    for (losses, rows), (expected, whole) in zip(sharded, ddp):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert rows == pytest.approx(whole, rel=1e-5, abs=1e-6)
    assert without_collections == ddp


def _in_init_module() -> tuple[set[str], int]:
    fabric = fabric_for()
    with fabric.init_module():
        net = Net(device=torch.device("meta"))
    where = {parameter.device.type for parameter in net.hidden.parameters()}
    return where, len(run_loop(fabric, *set_up(fabric, steps=2, net=net)))


def test_tables_may_be_on_the_meta_device() -> None:
    assert run_distributed(_in_init_module, 2) == [({"cpu"}, 2)] * 2


def _compiled(compiles: bool) -> tuple[list[float], float]:
    fabric = fabric_for()
    torch.manual_seed(0)
    net = torch.compile(Net(), backend="eager") if compiles else Net()
    losses = run_loop(fabric, *set_up(fabric, steps=4, net=net))
    return losses, fabric.strategy.engine.statistics()["predicted_lookups"]


@pytest.mark.slow
def test_a_compiled_module_has_the_same_numbers() -> None:
    plain, compiled = run_all(2, partial(_compiled, False), partial(_compiled, True))
    assert compiled == plain
    assert len(set(plain[0][0])) == 4 and plain[0][1] > 0


# -- balanced data


def _balanced() -> dict[str, torch.Tensor]:
    """Run an SGD step of a global batch that the ranks share unequally."""
    fabric, data = fabric_for(), Samples(13)
    torch.manual_seed(0)
    net = Net()
    model, optimizer = fabric.setup(net, OPTIMIZERS["sgd"](net.parameters()))
    sampler = BalancedSampler(data.lengths, 13, num_replicas=fabric.world_size, rank=fabric.global_rank)
    for batch in fabric.setup_dataloaders(BalancedDataLoader.from_sampler(data, sampler, collate)):
        fabric.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return fabric.strategy.get_module_state_dict(model._forward_module)


def test_losses_of_unequal_batches_are_weighed() -> None:
    alone, shared = run_distributed(_balanced, 1)[0], run_distributed(_balanced, 2)[0]
    torch.manual_seed(0)
    initial = Net().state_dict()
    for name, weight in shared.items():
        torch.testing.assert_close(weight, alone[name], rtol=1e-6, atol=1e-7)
        assert not torch.equal(weight, initial[name])


# -- what is refused


def _set_up(fabric: Any, optimizers: Callable[[Net], list[Any]], device: str = "cpu") -> None:
    with torch.device(device):
        net = Net()
    fabric.setup(net, *optimizers(net))


def _apart(fabric: Any) -> None:
    net = Net()
    fabric.setup_module(net)
    fabric.setup_optimizers(OPTIMIZERS["sgd"](net.parameters()))


def _without_optimizer(fabric: Any) -> None:
    model = fabric.setup(Net())
    fabric.backward(loss_of(model, next(iter(fixed_loader(0, 1)))))


def _trained_before(net: Net) -> list[Any]:
    optimizer = OPTIMIZERS["adagrad"](net.parameters())
    loss_of(net, next(iter(fixed_loader(0, 1)))).backward()
    optimizer.step()
    return [optimizer]


def _load(fabric: Any, sampler: Any = None, **options: Any) -> None:
    data = Samples(16)
    module = FreeScaleDataModule(data, data.lengths, 8, collate_fn=collate, **options)
    sampler = sampler or module.sampler(fabric.global_rank, fabric.world_size)
    fabric.setup_dataloaders(BalancedDataLoader.from_sampler(data, sampler, collate))


def test_what_cannot_be_set_up_is_refused() -> None:
    def sgd(part: nn.Module) -> Any:
        return OPTIMIZERS["sgd"](part.parameters())

    assert_refused(
        {
            r"2 optimizers": lambda fabric: _set_up(fabric, lambda net: [sgd(part) for part in (net.embeddings, net.hidden)]),
            r"fabric\.setup\(model\)": lambda fabric: (set_up(fabric), set_up(fabric)),
            r"fabric\.setup_optimizers\(optimizer\).*fabric\.setup\(model, optimizer\)": _apart,
            r"fabric\.backward\(loss\).*fabric\.setup\(model, optimizer\)": _without_optimizer,
            r"Adagrad.* 1 updates": lambda fabric: _set_up(fabric, _trained_before),
            r"RMSprop.*'embeddings\.embeddings\.item\.weight'": lambda fabric: _set_up(
                fabric, lambda net: [torch.optim.RMSprop(net.parameters())]
            ),
            r"hidden\.0\.weight.*hidden\.2\.weight.*meta": lambda fabric: _set_up(fabric, lambda net: [sgd(net)], "meta"),
            r"micro_batches=": lambda fabric: _load(fabric, micro_batches=2),
            r"num_replicas=1,.* 2 ranks": lambda fabric: _load(fabric, BalancedSampler([1.0] * 16, 8, num_replicas=1, rank=0)),
            r"precision='bf16-true'": lambda fabric: set_up(fabric_for(precision="bf16-true")),
        }
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"target_bubble_reduction": 0.9}, "target_bubble_reduction="),
        ({"dedupe": True}, "dedupe=.* dedup="),
        ({"overlap": "torchrec", "clip_gradients": True}, "overlap='torchrec', clip_gradients=True"),
        ({"overlap": "tree"}, "overlap='tree'"),
        ({"hot_rows": 0.5, "overlap": "torchrec"}, r"hot_rows=0\.5.*overlap='torchrec'"),
        ({"wire": "bfloat16", "overlap": "torchrec"}, "wire='bfloat16'.*overlap='torchrec'"),
        ({"start_method": "spawn"}, "start_method='spawn'"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"FreeScaleFabricStrategy\({told}"):
        FreeScaleFabricStrategy(**options)


def test_bfloat16_by_autocast() -> None:
    mine, ddp = run_all(2, *(partial(train, strategy, precision="bf16-mixed") for strategy in ("freescale", "ddp")))
    assert mine[0]["losses"] == pytest.approx(ddp[0]["losses"], rel=1e-2)
