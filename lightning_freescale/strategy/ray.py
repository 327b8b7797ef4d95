"""The strategy for workers that Ray Train has started; importing it needs Ray Train."""

from __future__ import annotations

from lightning_freescale.strategy.freescale import FreeScaleStrategy

try:
    import ray.train
    from ray.train.lightning import RayDDPStrategy
except ImportError as error:
    raise ImportError(
        f"lightning_freescale.strategy.ray needs Ray Train ({error}): pip install 'lightning-freescale[ray]'"
    ) from error


class RayFreeScaleStrategy(FreeScaleStrategy, RayDDPStrategy):
    """:class:`FreeScaleStrategy` on Ray's workers, for a Trainer with the plugin ``RayLightningEnvironment()``.

    It takes the same options. Which device a rank has, and how many ranks there are, Ray says; the default process group is
    Ray's, with the backend and the timeout of ``ray.train.torch.TorchConfig``. ``timeout=`` is that of the groups that the
    strategy makes for its exchanges.
    """

    @property
    def num_processes(self) -> int:
        """Ranks on this node; Lightning knows this worker's device alone."""
        return int(ray.train.get_context().get_local_world_size())

    @property
    def num_nodes(self) -> int:
        """Nodes, each with as many ranks as this one."""
        return int(ray.train.get_context().get_world_size()) // self.num_processes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        """Take what the Trainer says, which is 1 unless the user has set it.

        Raises:
            ValueError: the Trainer has another number than Ray.
        """
        if num_nodes not in (1, self.num_nodes):
            raise ValueError(
                f"Trainer(num_nodes={num_nodes}) with RayFreeScaleStrategy, whose workers are on {self.num_nodes} node(s): "
                "leave num_nodes out, Ray says it"
            )
