"""One rank on the GPU of this machine, or on its CPU: process group and Trainer for the parts of the first hour."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from hour_report import Report, Skip

_OPERATOR = "fbgemm::jagged_to_padded_dense_forward"
PACKAGES = ("lightning", "torchrec", "fbgemm_gpu")
_OURS = ("lightning_freescale.strategy", "lightning_freescale.callbacks")
_RENAMED = {  # names that BubbleProfiler replaces, in torch 2.13 and newer, and in older releases
    "torch.distributed": {
        "all_gather_single": "all_gather_into_tensor",
        "reduce_scatter_single": "reduce_scatter_tensor",
    },
    "torch.distributed._functional_collectives": {
        "all_gather_single": "all_gather_tensor",
        "reduce_scatter_single": "reduce_scatter_tensor",
        "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
        "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    },
}


def demand(report: Report) -> None:
    """End the part if it cannot train here: skip it if a package is missing, and fail if an installed package does not load."""
    with report.check("everything"):
        load()
        return
    report.end()


def load() -> None:
    """Import the packages that a part trains with.

    Raises:
        Skip: a package is not installed, or FBGEMM is the build for CPUs and there is a GPU.
        Exception: an installed package does not import, for example a binary for another torch.
    """
    for module, names in _RENAMED.items():
        torch_module = importlib.import_module(module)
        for new, old in names.items():
            if not hasattr(torch_module, new):
                setattr(torch_module, new, getattr(torch_module, old))
    for name in (*PACKAGES, *_OURS):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in PACKAGES:  # a missing part or dependency of an installed package: a broken installation
                raise
            raise Skip(f"{error.name} is not installed") from error
    if torch.cuda.is_available() and not torch._C._dispatch_has_kernel_for_dispatch_key(_OPERATOR, "CUDA"):
        raise Skip("fbgemm_gpu has no CUDA kernels: install fbgemm-gpu instead of fbgemm-gpu-cpu")


@contextmanager
def one_rank() -> Iterator[torch.device]:
    """Create a default process group of this process alone, with Lightning's choice of backend; yield the device.

    An existing process group of one rank is used instead.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    quiet()
    if dist.is_initialized():
        if dist.get_world_size() != 1:
            raise RuntimeError(f"the process group has {dist.get_world_size()} ranks: run each part in a separate process")
        yield device
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it, and reads it once
    options: dict[str, Any] = {"backend": "gloo"}
    if on_gpu:
        torch.cuda.set_device(device)
        options = {"backend": "nccl", "device_id": device}
    dist.init_process_group(store=dist.TCPStore("127.0.0.1", 0, 1, is_master=True), rank=0, world_size=1, **options)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def trainer(device: torch.device, **options: Any) -> Any:
    """Return a Trainer of one device that writes nothing; its node is NODE_RANK if ``num_nodes`` is larger than 1."""
    import lightning as L
    from lightning.pytorch.plugins.environments import LightningEnvironment

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        # Lightning would otherwise look for clusters, and import an mpi4py whose MPI may be missing
        plugins=[LightningEnvironment()],
        **quiet,
        **options,
    )


def quiet() -> None:
    """Suppress notices of Lightning and TorchRec about this machine."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
