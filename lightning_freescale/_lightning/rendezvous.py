"""How ranks meet, where Lightning's own way to create the default process group does not do."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection

from lightning_freescale.comm.faults.attempt_store import attempt_store, is_lent


def create_for_attempt(
    environment: ClusterEnvironment | None, backend: str, timeout: timedelta | None, device: torch.device
) -> None:
    """Create it in a store of this attempt alone, where torchrun lends one to all; else do nothing, Lightning creates it.

    Raises:
        RuntimeError: a rank did not come within the timeout.
    """
    if environment is None or dist.is_initialized() or not is_lent():
        return
    timeout, ranks = timeout or dist.default_pg_timeout, environment.world_size()
    store = attempt_store(environment.main_address, environment.main_port, environment.global_rank(), ranks, timeout)
    bound = None if device.type == "cpu" else device
    _init_dist_connection(environment, backend, store=store, timeout=timeout, device_id=bound)
