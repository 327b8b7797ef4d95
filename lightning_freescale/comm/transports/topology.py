"""The hardware of the ranks of a group: which ranks share a host, and which have a fast link between their GPUs."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_freescale.comm.transports.cuda_driver import import_cuda_bindings

_log = logging.getLogger(__name__)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class RankHardware:
    """The host, GPU and libraries of one rank, as the other ranks need to know them."""

    host: str
    boot: str = ""  # id of the host's last boot, which distinguishes hosts of the same name
    gpu: str = ""  # UUID of the current CUDA device; empty without CUDA
    place: str = ""  # index and PCI bus id of that device, for errors
    visible: int = 0  # number of CUDA devices that the process sees
    links: Sequence[str] = ()  # UUIDs of the devices that it reaches over NVLink
    shares: bool = False  # several ranks may use one GPU (TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1)
    bindings: bool = False  # the package cuda-bindings can be imported
    driver: int = 0  # highest CUDA version of the driver, as 1000 * major + 10 * minor; 0 if unknown
    nccl: Sequence[int] = ()  # version of NCCL; empty without
    zero_cta: bool = False  # torch offers NCCL's zero-CTA policy

    @staticmethod
    def from_this_process(transport: str) -> RankHardware:
        """Return the hardware of this process, as far as the transport needs it. Not tested with several GPUs.

        Transports between GPUs need all of it. For the others, the GPU counts only if the process uses CUDA: a process that
        computes on the CPU should not initialize CUDA, and its current device means nothing.
        """
        host, boot = socket.gethostname(), _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        used = torch.cuda.is_initialized() if transport in ("auto", "host", "native") else True
        if not used or not torch.cuda.is_available():
            return RankHardware(host, boot)
        device = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(device)
        place = f"cuda:{device}, PCI bus {getattr(properties, 'pci_bus_id', 'unknown')}"
        if transport in ("host", "native"):
            return RankHardware(host, boot, gpu=_uuid(device), place=place)
        bindings = import_cuda_bindings()
        return RankHardware(
            host,
            boot,
            gpu=_uuid(device),
            place=place,
            visible=torch.cuda.device_count(),
            links=tuple(_uuid(other) for other in _linked_devices(device)),
            shares=os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1",
            bindings=bindings is not None,
            driver=int(bindings.cuDriverGetVersion()[1]) if bindings is not None else 0,
            nccl=tuple(torch.cuda.nccl.version()[:3]) if dist.is_nccl_available() else (),
            zero_cta=hasattr(getattr(dist, "ProcessGroupNCCL", None), "NCCL_CTA_POLICY_ZERO"),
        )


@dataclass(frozen=True)
class Topology:
    """The hardware of every rank of a group."""

    hardware: tuple[RankHardware, ...]
    ranks: tuple[int, ...]  # the global ranks, for errors

    @property
    def size(self) -> int:
        return len(self.hardware)

    @property
    def hosts(self) -> dict[tuple[str, str], list[int]]:
        """The ranks of each host in the group, by the name and boot id of the host."""
        found: dict[tuple[str, str], list[int]] = {}
        for rank, hardware in enumerate(self.hardware):
            found.setdefault((hardware.host, hardware.boot), []).append(rank)
        return found

    @property
    def one_host(self) -> bool:
        return len(self.hosts) == 1

    def find_unlinked(self, ranks: Sequence[int]) -> str:
        """Name the first two of these ranks that are not in one NVLink domain of one host, and why; empty if all are."""
        return next((gap for pair in combinations(ranks, 2) if (gap := self._gap(*pair))), "")

    def find_shared_gpu(self) -> str:
        """Name the first two ranks that use the same GPU; empty if none do."""
        first: dict[str, int] = {}
        for rank, hardware in enumerate(self.hardware):
            if hardware.gpu and first.setdefault(hardware.gpu, rank) != rank:
                return f"ranks {self.ranks[first[hardware.gpu]]} and {self.ranks[rank]} share a GPU"
        return ""

    def find_alone(self) -> str:
        """Name the ranks of a host that see only their own GPU, so that links are unknown; empty if there are none."""
        for ranks in self.hosts.values():
            blind = [rank for rank in ranks if self.hardware[rank].gpu and self.hardware[rank].visible == 1]
            if blind and len({self.hardware[rank].gpu for rank in ranks}) > 1:
                return f"{self._names(blind)} of {self.hardware[blind[0]].host}"
        return ""

    def find_lacking(self, attribute: str) -> str:
        """Name the ranks on which an attribute of the hardware is empty; empty if there are none."""
        found = [rank for rank, hardware in enumerate(self.hardware) if not getattr(hardware, attribute)]
        return self._names(found) if found else ""

    def _gap(self, a: int, b: int) -> str:
        one, other, names = self.hardware[a], self.hardware[b], f"ranks {self.ranks[a]} and {self.ranks[b]}"
        if (one.host, one.boot) != (other.host, other.boot):
            return f"{names} are on hosts {one.host} and {other.host}"
        if one.gpu == other.gpu:
            return "" if one.shares and other.shares else f"{names} both use {one.place} of {one.host}"
        if one.gpu in other.links and other.gpu in one.links:
            return ""
        return f"no NVLink was found between {names} ({one.place} and {other.place} of {one.host})"

    def _names(self, ranks: Sequence[int]) -> str:
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(str(self.ranks[rank]) for rank in ranks)}"


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _linked_devices(device: int) -> list[int]:
    """Return the visible devices whose memory this device can write over NVLink."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

    try:
        link_counts = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix[device]
    except RuntimeError as error:
        _log.warning("the search for NVLink failed: %s", error)
        return []
    others = [other for other in range(torch.cuda.device_count()) if other != device]
    return [other for other in others if link_counts[other] > 0 and torch.cuda.can_device_access_peer(device, other)]
