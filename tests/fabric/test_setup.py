"""What fabric.setup takes, where it builds it, and what it refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_freescale import BalanceOptions, FreeScaleDataModule, FreeScaleFabricStrategy
from lightning_freescale.balance import BalancedSampler
from lightning_freescale.data import BalancedDataLoader
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.fabric_loop import fabric_for, loss_of, run_loop, set_up
from tests.helpers.recommender import OPTIMIZERS, Net, Samples, collate, fixed_loader


class Items(nn.Module):
    """A plain ``nn.Embedding``, and no collection."""

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
    mine = run_distributed(_plain_embedding, 2, "freescale", shard=["items"])
    for (losses, rows), (expected, whole) in zip(mine, run_distributed(_plain_embedding, 2, "ddp")):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert rows == pytest.approx(whole, rel=1e-5, abs=1e-6)


def test_without_collections_it_is_ddp() -> None:
    assert run_distributed(_plain_embedding, 2, "freescale") == run_distributed(_plain_embedding, 2, "ddp")


def _in_init_module() -> tuple[str, set[str]]:
    fabric = fabric_for()
    with fabric.init_module():
        net = Net(device=torch.device("meta"))
    where = {parameter.device.type for parameter in net.hidden.parameters()}
    model, optimizer, loader = set_up(fabric, steps=2, net=net)
    assert len(run_loop(fabric, model, optimizer, loader)) == 2
    return loader.batch_size, where


def test_tables_may_be_on_the_meta_device() -> None:
    assert run_distributed(_in_init_module, 2) == [(None, {"cpu"})] * 2


def _compiled(compiles: bool) -> tuple[list[float], float]:
    fabric = fabric_for()
    torch.manual_seed(0)
    net = Net()
    compiled = torch.compile(net, backend="eager") if compiles else net
    model, optimizer = fabric.setup(compiled, OPTIMIZERS["adagrad"](net.parameters()))
    loader = fabric.setup_dataloaders(fixed_loader(fabric.global_rank, 4), use_distributed_sampler=False)
    losses = run_loop(fabric, model, optimizer, loader)
    return losses, fabric.strategy._steps.engine.statistics()["predicted_lookups"]


@pytest.mark.slow
def test_a_compiled_module_has_the_same_numbers() -> None:
    compiled, plain = (run_distributed(_compiled, 2, compiles) for compiles in (True, False))
    assert compiled == plain
    assert len(set(plain[0][0])) == 4 and plain[0][1] > 0


# -- balanced data


def _balanced(strategy: str, how: str) -> dict[str, torch.Tensor]:
    """One SGD step of a global batch that the ranks share unequally."""
    fabric = fabric_for(strategy)
    torch.manual_seed(0)
    net, data = Net(), Samples(13)
    model, optimizer = fabric.setup(net, OPTIMIZERS["sgd"](net.parameters()))
    if how == "data module":
        sampler = FreeScaleDataModule(data, data.lengths, 13, collate_fn=collate).sampler(fabric.global_rank, fabric.world_size)
    else:
        sampler = BalancedSampler(data.lengths, 13, num_replicas=fabric.world_size, rank=fabric.global_rank)
    for batch in fabric.setup_dataloaders(BalancedDataLoader.from_sampler(data, sampler, collate)):
        fabric.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return fabric.strategy.get_module_state_dict(model._forward_module)


@pytest.mark.parametrize("how", ["data module", "sampler"])
def test_losses_of_unequal_batches_are_weighed(how: str) -> None:
    shared = run_distributed(_balanced, 2, "freescale", how)[0]
    alone = run_distributed(_balanced, 1, "freescale", "sampler")[0]
    torch.manual_seed(0)
    initial = Net().state_dict()
    for name, weight in shared.items():
        torch.testing.assert_close(weight, alone[name], rtol=1e-6, atol=1e-7)
        assert not torch.equal(weight, initial[name])


# -- what is refused


def _two_optimizers(fabric: Any) -> None:
    net = Net()
    fabric.setup(net, *(OPTIMIZERS["sgd"](part.parameters()) for part in (net.embeddings, net.hidden)))


def _twice(fabric: Any) -> None:
    for _ in range(2):
        set_up(fabric)


def _apart(fabric: Any) -> None:
    net = Net()
    fabric.setup_module(net)
    fabric.setup_optimizers(OPTIMIZERS["sgd"](net.parameters()))


def _without_optimizer(fabric: Any) -> None:
    model = fabric.setup(Net())
    fabric.backward(loss_of(model, next(iter(fixed_loader(0, 1)))))


def _trained_before(fabric: Any) -> None:
    net = Net()
    optimizer = OPTIMIZERS["adagrad"](net.parameters())
    loss_of(net, next(iter(fixed_loader(0, 1)))).backward()
    optimizer.step()
    fabric.setup(net, optimizer)


def _unknown_optimizer(fabric: Any) -> None:
    net = Net()
    fabric.setup(net, torch.optim.RMSprop(net.parameters()))


def _meta(fabric: Any) -> None:
    with torch.device("meta"):
        net = Net()
    fabric.setup(net, OPTIMIZERS["sgd"](net.parameters()))


def _load(fabric: Any, **options: Any) -> None:
    data = Samples(16)
    module = FreeScaleDataModule(data, data.lengths, 8, collate_fn=collate, **options)
    sampler = module.sampler(fabric.global_rank, fabric.world_size)
    fabric.setup_dataloaders(BalancedDataLoader.from_sampler(data, sampler, collate))


def _micro_batches(fabric: Any) -> None:
    _load(fabric, micro_batches=2)


def _calibrating(fabric: Any) -> None:
    _load(fabric, balance=BalanceOptions(calibrate=True))


def _other_ranks(fabric: Any) -> None:
    data = Samples(16)
    fabric.setup_dataloaders(FreeScaleDataModule(data, data.lengths, 8, collate_fn=collate).train_dataloader())


REFUSED = {
    _two_optimizers: r"with 2 optimizers: pass one, with a parameter group",
    _twice: r"a module with embedding collections was set up before",
    _apart: r"Call model, optimizer = fabric.setup\(model, optimizer\), in place of both",
    _without_optimizer: r"set up without its optimizer",
    _trained_before: r"Adagrad has done 1 updates of embedding tables before they are sharded",
    _unknown_optimizer: r"RMSprop holds the embedding table 'embeddings.embeddings.item.weight'",
    _meta: r"parameters \['hidden.0.weight', 'hidden.2.weight'\] are on the meta device",
    _micro_batches: r"FreeScaleDataModule\(micro_batches=...\) needs Trainer",
    _calibrating: r"BalanceOptions\(calibrate=True\) needs Trainer",
    _other_ranks: r"plans for num_replicas=1, Fabric has 2 ranks: .*data.sampler\(fabric.global_rank, fabric.world_size\)",
}


def _refused(misuse: Callable[[Any], None]) -> None:
    misuse(fabric_for())


@pytest.mark.parametrize("misuse", REFUSED, ids=lambda misuse: misuse.__name__)
def test_what_cannot_be_set_up_is_refused(misuse: Callable[[Any], None]) -> None:
    with pytest.raises(RankFailed, match=REFUSED[misuse]):
        run_distributed(_refused, 2, misuse)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"target_bubble_reduction": 0.9}, r"FreeScaleFabricStrategy\(target_bubble_reduction=...\) is not there in Fabric"),
        ({"lookahead": "trial_run"}, r"FreeScaleFabricStrategy\(lookahead=...\) is not there in Fabric: .*ids_of="),
        ({"clip": "all"}, r"clip_gradients=True"),
        ({"dedupe": True}, r"FreeScaleFabricStrategy\(dedupe=...\): there is no such option, did you mean dedup="),
        ({"overlap": False, "clip_gradients": True}, r"FreeScaleFabricStrategy\(overlap=False, clip_gradients=True\)"),
        ({"placement": "random"}, r"FreeScaleFabricStrategy\(placement='random'\)"),
        ({"start_method": "spawn"}, r"FreeScaleFabricStrategy\(start_method='spawn'\)"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        FreeScaleFabricStrategy(**options)


def _half_precision() -> None:
    set_up(fabric_for(precision="bf16-true"))


def test_other_precisions_are_refused() -> None:
    with pytest.raises(RankFailed, match=r"Fabric\(precision='bf16-true'\): the tables take part in"):
        run_distributed(_half_precision, 2)


def _bfloat16(strategy: str) -> list[float]:
    fabric = fabric_for(strategy, precision="bf16-mixed")
    return run_loop(fabric, *set_up(fabric))


def test_bfloat16_by_autocast() -> None:
    mine, ddp = (run_distributed(_bfloat16, 2, strategy) for strategy in ("freescale", "ddp"))
    assert mine[0] == pytest.approx(ddp[0], rel=1e-2)
