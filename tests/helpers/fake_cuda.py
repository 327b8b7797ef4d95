"""A process that takes itself for one with GPUs: what torch tells of them, and an NCCL that only counts."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from lightning_freescale.comm.transports import topology


class FakeNccl(dist.ProcessGroupGloo):
    """Stands in for ``ProcessGroupNCCL``: made alone, as NCCL's; it connects when torch asks for it, and runs nothing."""

    Options = SimpleNamespace
    made: list[FakeNccl] = []
    connected: list[torch.device] = []

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        alone = dist.ProcessGroupGloo._Options()
        alone._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)]
        alone._timeout = options._timeout
        super().__init__(dist.HashStore(), rank, size, alone)
        FakeNccl.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        FakeNccl.connected.append(device)


def pretend_cuda(gpu: str, visible: int = 8, bound: bool = True) -> None:
    """Let this process see a GPU of that UUID; ``bound``: the default group is bound to it, as Lightning's. For good."""
    properties = SimpleNamespace(uuid=gpu, pci_bus_id=1)
    for name, value in {"is_available": True, "is_initialized": True, "current_device": 0, "device_count": visible}.items():
        setattr(torch.cuda, name, lambda value=value: value)
    torch.cuda.get_device_properties = lambda device: properties
    torch.cuda.set_device = lambda device: None
    topology._linked_devices = lambda device: []
    topology.import_cuda_bindings = lambda: None
    dist.is_nccl_available = lambda: True
    torch.cuda.nccl.version = lambda: (2, 29, 7)
    dist.ProcessGroupNCCL = FakeNccl
    if bound:
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)


def messages_of(logger: str) -> list[str]:
    """What is logged there from now on."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger(logger).addHandler(handler)
    logging.getLogger(logger).setLevel(logging.INFO)
    return told


def cuda_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor that says it is on a GPU; it has no memory.

    Only ranks may call this. From then on torch counts a GPU in the process: autograd starts a thread for it, and processes
    that are forked later cannot run a backward.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(*shape, dtype=dtype, device="cuda")
