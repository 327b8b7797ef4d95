"""Device meshes and DTensors on a freescale default group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_freescale.comm.process_group import FreeScaleGroup
from lightning_freescale.testing import run_distributed
from tests.helpers.both_groups import TIMEOUT, differs

LAYOUTS = [Shard(0), Shard(1), Replicate()]


def _numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _redistributed(backend: str) -> list[Any]:
    dist.init_process_group(backend, timeout=TIMEOUT)
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    assert isinstance(mesh.get_group(), FreeScaleGroup) == (backend == "freescale")
    told: list[Any] = []
    for rows in (4 * size, 4 * size + 1, 120):  # also what does not divide
        whole = _numbers(rows, 2 * size + 1)
        for before in LAYOUTS:
            for after in LAYOUTS:
                moved = distribute_tensor(whole, mesh, [before]).redistribute(mesh, [after])
                told += [moved.to_local(), moved.full_tensor()]
        part = DTensor.from_local(_numbers(rows, 3, seed=dist.get_rank()), mesh, [Partial()])
        told += [part.redistribute(mesh, [after]).to_local() for after in LAYOUTS]
    leaf = distribute_tensor(_numbers(4 * size, 6 * size), mesh, [Shard(0)]).requires_grad_()
    (leaf * 2).redistribute(mesh, [Shard(1)]).square().sum().full_tensor().backward()
    return [_plain(one) for one in (*told, leaf.grad.to_local())]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(tensor.tolist()).reshape(tensor.shape)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_redistribution_is_that_of_gloo(size: int) -> None:
    mine, gloo = (run_distributed(_redistributed, size, backend, init=False, timeout=60) for backend in ("freescale", "gloo"))
    assert [differs(*pair) for pair in zip(mine, gloo)] == [""] * size
    assert len({str(rank[2]) for rank in gloo}) == size, "the ranks must hold different parts, or equality means nothing"


def _two_dimensions(backend: str) -> list[Any]:
    dist.init_process_group(backend, timeout=TIMEOUT)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "cards"))
    told: list[Any] = []
    for name in ("hosts", "cards"):
        group = mesh.get_group(name)
        assert isinstance(group, FreeScaleGroup) == (backend == "freescale") and group.size() == 2
        out = torch.zeros(2, dtype=torch.int64)
        dist.all_to_all_single(out, torch.full((2,), dist.get_rank()), group=group)
        told.append(out)
    whole = _numbers(10, 9)
    layouts = [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Replicate()), (Replicate(), Shard(0))]
    for before in layouts:
        for after in layouts:
            told.append(_plain(distribute_tensor(whole, mesh, before).redistribute(mesh, after).to_local()))
    return told


def test_a_mesh_of_two_dimensions_is_that_of_gloo() -> None:
    mine, gloo = (run_distributed(_two_dimensions, 4, backend, init=False, timeout=60) for backend in ("freescale", "gloo"))
    assert [differs(*pair) for pair in zip(mine, gloo)] == [""] * 4
    assert [rank[:2] for rank in torch.stack([torch.stack(rank[:2]) for rank in mine]).tolist()] == [
        [[0, 2], [0, 1]],
        [[1, 3], [0, 1]],
        [[0, 2], [2, 3]],
        [[1, 3], [2, 3]],
    ]


def _sharded(backend: str) -> Any:
    """FSDP on a mesh of the default group."""
    dist.init_process_group(backend, timeout=TIMEOUT)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(9, 31), torch.nn.Tanh(), torch.nn.Linear(31, 5))
    for layer in (*net[::2], net):
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(4):
        optimizer.zero_grad()
        loss = net(_numbers(6, 9, seed=10 * step + dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [_plain(parameter.full_tensor()) for parameter in net.parameters()]


@pytest.mark.parametrize("size", [2, 3])
def test_fsdp_is_that_of_gloo(size: int) -> None:
    mine, gloo = (run_distributed(_sharded, size, backend, init=False, timeout=60) for backend in ("freescale", "gloo"))
    assert [differs(*pair) for pair in zip(mine, gloo)] == [""] * size
    assert len(set(gloo[0][0])) == 4, "the loss must move, or equality means nothing"
