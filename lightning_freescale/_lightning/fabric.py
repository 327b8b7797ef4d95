"""Private state of Lightning Fabric's DDPStrategy that a strategy built on it needs, under public names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from typing_extensions import override

from lightning_freescale._lightning.rendezvous import create_for_attempt

GROUP_TIMEOUT = timedelta(minutes=5)
"""Of the groups that we make beside the default one, where the user sets none. They wait for a step; the default group, which
waits for slow set-up and saving as well, has Lightning's."""


class FabricDDPBase(DDPStrategy):
    """Fabric's DDPStrategy whose subclasses shard and wrap the module by themselves, and so need what it was given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.group_timeout: timedelta = options.get("timeout") or GROUP_TIMEOUT

    @property
    def ddp_options(self) -> dict[str, Any]:
        """The options that go to ``DistributedDataParallel``."""
        return self._ddp_kwargs

    @property
    def start_method(self) -> str:
        """How processes are started."""
        return self._start_method

    @property
    def ddp_device_ids(self) -> list[int] | None:
        """What DDP is told of the device."""
        return self._determine_ddp_device_ids()

    @property
    def updates_unscaled(self) -> bool:
        """Whether the precision leaves losses, gradients and parameters as they are: float32, or bfloat16 by autocast."""
        precision = self.precision
        scales = isinstance(precision, MixedPrecision) and precision.scaler is not None
        return precision.precision in ("32-true", "bf16-mixed") and not scales

    @override
    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        create_for_attempt(self.cluster_environment, self._get_process_group_backend(), self._timeout, self.root_device)
        super()._setup_distributed()

    def block_backward_sync(self, blocked: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
        """Have ``fabric.no_backward_sync`` enter ``blocked(module)``, with the module as DDP has wrapped it."""
        self._backward_sync_control = _Blocked(blocked)


class _Blocked(_BackwardSyncControl):
    def __init__(self, blocked: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
        self._blocked = blocked

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._blocked(module) if enabled else nullcontext()
