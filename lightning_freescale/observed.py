"""Lightning's DDP strategy with a timeline: what the bubble profiler sees of a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_freescale._lightning import DDPStrategy
from lightning_freescale.profiling.loader import ObservedLoader
from lightning_freescale.profiling.timeline import Timeline


class ObservedDDPStrategy(DDPStrategy):
    """Stamps stages and collectives on ``timeline``, once somebody has enabled it; the numbers are those of DDPStrategy."""

    def __init__(self, **ddp_options: Any) -> None:
        super().__init__(**ddp_options)
        self.timeline = Timeline()

    # -- stages

    @override
    def process_dataloader(self, dataloader: object) -> object:
        training = self.lightning_module is not None and self.lightning_module.trainer.training
        return ObservedLoader(dataloader, self.timeline) if training and self.timeline.enabled else dataloader

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        with self.timeline.span("data", "batch to device"):
            return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.timeline.span("compute", "forward"):
            return super().training_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        with self.timeline.span("compute", "backward"), ExitStack() as waiting:
            if self.timeline.enabled and isinstance(self.model, DistributedDataParallel):
                # runs when the gradients are there, just before DDP waits for its buckets
                def wait_begins() -> None:
                    waiting.enter_context(self.timeline.collective("dense gradients"))

                closure_loss.register_hook(lambda _: _after_backward(wait_begins))
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        with ExitStack() as after_closure:

            def timed() -> Any:
                result = closure()
                after_closure.enter_context(self.timeline.span("compute", "optimizer"))
                return result

            return super().optimizer_step(optimizer, timed, model, **kwargs)

    # -- collectives that block

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        with self.timeline.collective("reduce"):
            return super().reduce(tensor, group, reduce_op)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self.timeline.collective("barrier"):
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        with self.timeline.collective("broadcast"):
            return super().broadcast(obj, src)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        with self.timeline.collective("all-gather"):
            return super().all_gather(tensor, group, sync_grads)


def _after_backward(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)
