"""Private state of Lightning's DDPStrategy that a strategy built on it needs, under public names."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning.fabric.utilities import imports
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import nn
from typing_extensions import override

from lightning_freescale._lightning.fabric import GROUP_TIMEOUT
from lightning_freescale._lightning.rendezvous import create_for_attempt


class DDPBase(DDPStrategy):
    """DDPStrategy whose subclasses shard, wrap and revert the module by themselves, and so need what it was given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.group_timeout: timedelta = options.get("timeout") or GROUP_TIMEOUT

    @property
    def ddp_options(self) -> dict[str, Any]:
        """The options that go to ``DistributedDataParallel``."""
        return self._ddp_kwargs

    @property
    def default_group_timeout(self) -> timedelta | None:
        """Of the default group, and of what takes as long as set-up and saving do."""
        return self._timeout

    @override
    def setup_distributed(self) -> None:
        self.set_world_ranks()
        create_for_attempt(self.cluster_environment, self._get_process_group_backend(), self._timeout, self.root_device)
        super().setup_distributed()

    def apply_layer_sync(self, module: nn.Module) -> None:
        """Replace batch norms by synchronized ones, in place, if the Trainer was asked for that."""
        if self._layer_sync:
            self._layer_sync.apply(module)

    def revert_layer_sync(self, module: nn.Module) -> nn.Module:
        """Return the module with its own batch norms again."""
        return self._layer_sync.revert(module) if self._layer_sync else module

    def register_ddp_hooks(self) -> None:
        """Register the user's communication hook on ``self.model``, which is a DistributedDataParallel."""
        self._register_ddp_hooks()

    @property
    def unsupported_options(self) -> tuple[str, int | None]:
        """The options ``start_method`` and ``model_averaging_period``."""
        return self._start_method, self._model_averaging_period

    @override
    def _configure_launcher(self) -> None:
        """Leave out Lightning's launcher in a notebook, which it refuses even where it has nothing to start.

        Raises:
            RuntimeError: there is something to start.
        """
        super()._configure_launcher()
        if not imports._IS_INTERACTIVE:
            return
        ranks = self.num_processes * self.num_nodes
        assert self.cluster_environment is not None
        if ranks > 1 and not self.cluster_environment.creates_processes_externally:
            raise RuntimeError(
                f"strategy 'freescale' cannot start {ranks} ranks in a notebook or another interactive session: run a script, "
                "in a notebook by %%writefile train.py and !python train.py, or take Trainer(devices=1)"
            )
        self._launcher = None


def process_group_timeout(strategy: Strategy) -> timedelta | None:
    """Return the timeout of groups that are made beside the default one; None if the strategy has none of its own."""
    own: timedelta | None = getattr(strategy, "group_timeout", None)
    return own or getattr(strategy, "_timeout", None)
