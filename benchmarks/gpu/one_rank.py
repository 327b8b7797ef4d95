"""One rank on this machine's GPU, or on its CPU: process group and Trainer of the parts of the first hour."""

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
_RENAMED = {  # names that BubbleProfiler replaces, which torch has had since 2.13, and what older releases call them
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
    """End the part if it cannot train here: skipped where a package is not installed, failed where one is and does not load."""
    with report.check("everything"):
        load()
        return
    report.end()


def load() -> None:
    """Import what a part trains with.

    Raises:
        Skip: a package is not there, or FBGEMM is the one for CPUs and there is a GPU.
        Exception: a package is there and does not import, such as a binary for another torch, in many ways.
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
            if error.name not in PACKAGES:  # a part of a package that is there, or what it needs: a broken installation
                raise
            raise Skip(f"{error.name} is not installed") from error
    if torch.cuda.is_available() and not torch._C._dispatch_has_kernel_for_dispatch_key(_OPERATOR, "CUDA"):
        raise Skip("fbgemm_gpu has no CUDA kernels, and there is a GPU: install fbgemm-gpu, and not fbgemm-gpu-cpu")


@contextmanager
def one_rank() -> Iterator[torch.device]:
    """A default process group of this process alone, with the backend that Lightning would take; yields the device.

    Inside a process group of one rank that stands already, that one is used.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    quiet()
    if dist.is_initialized():
        if dist.get_world_size() != 1:
            raise RuntimeError(f"the process group has {dist.get_world_size()} ranks: run the parts in a process of their own")
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
    """A Trainer of one device that writes nothing; its node is that of NODE_RANK, if ``num_nodes`` are several."""
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
    """What Lightning and TorchRec note about this machine is not what the parts are about."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
