"""What a rank runs on, as the other ranks need to know it."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_log = logging.getLogger(__name__)
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class RankHardware:
    """One rank's host, GPU and libraries.

    Attributes:
        host: its name.
        boot: id of the host's last boot, which tells hosts of the same name apart.
        gpu: UUID of the current CUDA device; empty without CUDA.
        place: index and PCI bus id of that device, for errors.
        capability: of the device, e.g. ``"9.0"``.
        links: UUIDs of the devices that it reaches over NVLink.
        shares: whether several ranks may use one GPU (``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1``).
        bindings: whether the package cuda-bindings can be imported.
        driver: highest CUDA version of the driver, as 1000 * major + 10 * minor; 0 if unknown.
        torch: its version.
        nccl: version of NCCL; empty without.
        zero_cta: whether torch offers NCCL's zero-CTA policy.
    """

    host: str
    boot: str = ""
    gpu: str = ""
    place: str = ""
    capability: str = ""
    links: tuple[str, ...] = ()
    shares: bool = False
    bindings: bool = False
    driver: int = 0
    torch: str = torch.__version__
    nccl: tuple[int, ...] = ()
    zero_cta: bool = False

    @staticmethod
    def here(cuda: bool = True) -> RankHardware:
        """Of this process; without its GPU, unless ``cuda``. Not tested on GPU."""
        host, boot = socket.gethostname(), _BOOT.read_text().strip() if _BOOT.exists() else ""
        if not cuda or not torch.cuda.is_available():
            return RankHardware(host, boot)
        device, bindings = torch.cuda.current_device(), cuda_bindings()
        properties = torch.cuda.get_device_properties(device)
        return RankHardware(
            host,
            boot,
            gpu=_uuid(device),
            place=f"cuda:{device}, PCI bus {getattr(properties, 'pci_bus_id', 'unknown')}",
            capability=f"{properties.major}.{properties.minor}",
            links=tuple(_uuid(other) for other in _linked(device)),
            shares=os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1",
            bindings=bindings is not None,
            driver=int(bindings.cuDriverGetVersion()[1]) if bindings is not None else 0,
            nccl=tuple(torch.cuda.nccl.version()[:3]) if dist.is_nccl_available() else (),
            zero_cta=hasattr(getattr(dist, "ProcessGroupNCCL", None), "NCCL_CTA_POLICY_ZERO"),
        )


def cuda_bindings() -> Any:
    """The module ``cuda.bindings.driver`` of the package cuda-bindings; None if it cannot be imported."""
    try:
        return import_module("cuda.bindings.driver")
    except ImportError:
        return None


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _linked(device: int) -> list[int]:
    """Visible devices whose memory this one can write over NVLink."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

    try:
        lanes = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix[device]
    except RuntimeError as error:
        _log.warning("NVLink could not be looked for: %s", error)
        return []
    others = [other for other in range(torch.cuda.device_count()) if other != device]
    return [other for other in others if lanes[other] > 0 and torch.cuda.can_device_access_peer(device, other)]
