"""The buckets in which DDP reduces dense gradients between nodes, for the Trainer and Fabric, and the results under them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from lightning_freescale.training.setup import _bucket_size, wrap_dense
from tests.helpers.fabric_loop import run_loop, set_up
from tests.helpers.overlap_training import Case, CountingModel, departures, fit_all
from tests.helpers.recommender import DIM, Net

OURS = [["4.bias", "4.weight", "2.bias", "2.weight"], ["0.bias", "0.weight"]]
"""A bucket is complete with a third of the gradients, or 64 KiB. The second and the first layer have as much."""
ONE = [[name for bucket in OURS for name in bucket]]
WAYS: dict[str, tuple[dict[str, Any], list[list[str]]]] = {
    "default": ({}, OURS),
    "split": ({"split_backward": True}, OURS),
    "view": ({"gradient_as_bucket_view": True}, OURS),
    "unused": ({"find_unused_parameters": True}, [["2.bias", "4.weight", "4.bias"], ["2.weight"], ["0.weight", "0.bias"]]),
    "user": ({"bucket_cap_mb": 25}, ONE),
    "torch": ({"bucket_cap_mb": None}, ONE),
    "static": ({"static_graph": True}, ONE),
}


class Wide(CountingModel):
    """Keeps the names of the parameters in each of DDP's buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.net.hidden = _hidden()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def on_train_end(self) -> None:
        super().on_train_end()
        if isinstance(self.trainer.strategy, FreeScaleStrategy):
            self.statistics = _buckets(self.trainer.strategy.model)


def _hidden() -> nn.Module:
    return nn.Sequential(nn.Linear(2 * DIM, 1024), nn.Tanh(), nn.Linear(1024, 32), nn.Tanh(), nn.Linear(32, DIM))


def _buckets(model: Any) -> list[list[str]]:
    names = {p.data_ptr(): name.split("hidden.")[1] for name, p in model.module.named_parameters() if "hidden." in name}
    return [[names[p.data_ptr()] for p in bucket.parameters()] for bucket in model.reducer._get_zeros_like_grad_buckets()]


def _in_fabric(**places: int) -> list[list[str]]:
    net = Net()
    net.hidden = _hidden()
    fabric = Fabric(accelerator="cpu", strategy="freescale", **places)
    fabric.launch()
    model, *rest = set_up(fabric, steps=3, net=net)
    run_loop(fabric, model, *rest)
    fabric.strategy.teardown()
    return _buckets(model._forward_module)


def _fits() -> tuple[Any, ...]:
    rank, ranks = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    on_one_node = _in_fabric(devices=ranks)
    os.environ.update(LOCAL_RANK="0", GROUP_RANK=rank, LOCAL_WORLD_SIZE="1")
    on_nodes: dict[str, Any] = {"devices": 1, "num_nodes": ranks}
    cases = {"wide": Case(Wide, options=on_nodes | {"max_epochs": 1})}
    return fit_all(cases, "ddp", *(way for way, _ in WAYS.values())), _in_fabric(**on_nodes), on_one_node


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_buckets_of_a_third_of_the_gradients_with_the_results_of_ddp(ranks: int) -> None:
    found = run_distributed(_fits, ranks)
    close = {"losses": (1e-5, 0.0), "weights": (1e-5, 1e-6), "states": (1e-5, 1e-6)}
    assert departures({"wide": Case(notice=None)}, [fits for fits, *_ in found], **close) == []
    for fits, *in_fabric in found:
        buckets = {name: run.statistics for name, run in zip(WAYS, fits["wide"][1:], strict=True)}
        assert buckets == {name: expected for name, (_, expected) in WAYS.items()}
        assert in_fabric == [OURS, ONE]


def _between_nodes(**options: Any) -> Any:
    return SimpleNamespace(num_nodes=2, ddp_options=options)


def _compiled() -> None:
    layers = [layer for _ in range(16) for layer in (nn.Linear(128, 128), nn.Tanh())]  # a third of the gradients: 0.34 MiB
    for inside in (True, False):
        torch._dynamo.reset()
        net: Any = nn.Sequential(*layers)
        model = wrap_dense(torch.compile(net, backend="eager") if inside else net, (), None, _between_nodes())
        assert isinstance(model, DistributedDataParallel)
        run: Any = model if inside else torch.compile(model, backend="eager")
        for _ in range(2):
            run(torch.ones(2, 128)).sum().backward()
        buckets = [len(bucket.parameters()) for bucket in model.reducer._get_zeros_like_grad_buckets()]
        assert buckets == [12, 12, 8], "the reducer has the strategy's size"


def test_compiled_models_keep_the_buckets() -> None:
    run_distributed(_compiled, 2)


def test_torchs_sizes_stay_for_large_models_and_on_other_devices() -> None:
    for mib, device, expected in ((60, "cpu", {"bucket_cap_mb": 20}), (75, "cpu", {}), (60, "meta", {})):
        assert _bucket_size([torch.empty(mib, 2**18, device=device)], _between_nodes()) == expected, (mib, device)
