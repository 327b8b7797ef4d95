"""The stages of a strategy's steps, on a timeline: what the bubble profiler sees of any strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor

from lightning_freescale._lightning.loops import LoaderWrapper, Strategy
from lightning_freescale.profiling.recording.ddp_exchanges import buffers_on, ddp_waits_on
from lightning_freescale.profiling.recording.observed_work import replaced
from lightning_freescale.profiling.recording.timeline import Timeline, batches_on


class ObservedLoader(LoaderWrapper):
    """Any iterable of batches, with every ``next`` on the timeline."""

    def __init__(self, loader: Any, timeline: Timeline) -> None:
        super().__init__(loader, _timeline=timeline)

    def __iter__(self) -> Iterator[Any]:
        return batches_on(self._timeline, self._loader)


def stages_on(timeline: Timeline, strategy: Strategy) -> AbstractContextManager[None]:
    """Have a strategy stamp ``timeline`` meanwhile; what it computes stays the same.

    Seen are the training loader (if it is set up meanwhile), the batch's way to the device, forward, backward, DDP's wait for
    its gradients and buffers, and the optimizer.
    """
    run_process_dataloader, run_batch_to_device = strategy.process_dataloader, strategy.batch_to_device
    run_training_step, run_backward, run_optimizer_step = strategy.training_step, strategy.backward, strategy.optimizer_step

    def process_dataloader(dataloader: object) -> object:
        module = strategy.lightning_module
        training = module is not None and module.trainer.training
        return run_process_dataloader(ObservedLoader(dataloader, timeline) if training else dataloader)

    def batch_to_device(*args: Any, **kwargs: Any) -> Any:
        with timeline.span("data", "batch to device"):
            return run_batch_to_device(*args, **kwargs)

    def training_step(*args: Any, **kwargs: Any) -> Any:
        with timeline.span("forward", "forward"), buffers_on(timeline, strategy.model):
            return run_training_step(*args, **kwargs)

    def backward(closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with timeline.span("backward", "backward"), ddp_waits_on(timeline, strategy.model, closure_loss):
            return run_backward(closure_loss, *args, **kwargs)

    def optimizer_step(optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as after_closure:

            def timed() -> Any:
                after_closure.close()  # closures may run several times
                result = closure()
                after_closure.enter_context(timeline.span("optimizer", "optimizer"))
                return result

            return run_optimizer_step(optimizer, timed, *args, **kwargs)

    # methods of this instance, whose class stays as it is: a run can be measured before a strategy of ours is adopted, and the
    # Trainer's profiler slot stays the user's
    stamped = process_dataloader, batch_to_device, training_step, backward, optimizer_step
    return replaced(strategy, {method.__name__: method for method in stamped})
