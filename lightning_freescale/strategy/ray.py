"""The strategy for workers of Ray Train. The import needs Ray Train."""

from __future__ import annotations

from lightning_freescale.strategy.freescale import FreeScaleStrategy

try:
    import ray.train
    from ray.train.lightning import RayDDPStrategy
except ImportError as error:
    raise ImportError(
        f"lightning_freescale.strategy.ray needs Ray Train ({error}). Run pip install 'lightning-freescale[ray]'"
    ) from error


class RayFreeScaleStrategy(FreeScaleStrategy, RayDDPStrategy):
    """:class:`FreeScaleStrategy` on Ray's workers, for a Trainer with the plugin ``RayLightningEnvironment()``.

    It has the same options. Ray chooses the devices and the number of ranks. The default process group is Ray's, with the
    backend and the timeout of ``ray.train.torch.TorchConfig``. ``timeout=`` applies to the groups that the strategy creates.
    """

    @property
    def num_processes(self) -> int:
        """The number of ranks on this node. Lightning knows only the device of this worker."""
        return int(ray.train.get_context().get_local_world_size())

    @property
    def num_nodes(self) -> int:
        """The number of nodes, each with as many ranks as this one."""
        return int(ray.train.get_context().get_world_size()) // self.num_processes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        """Raise a ValueError if the user's ``Trainer(num_nodes=...)`` differs from Ray's number."""
        if num_nodes not in (1, self.num_nodes):
            raise ValueError(
                f"Trainer(num_nodes={num_nodes}) with RayFreeScaleStrategy: Ray has placed the workers on {self.num_nodes} "
                "node(s). Remove num_nodes"
            )
