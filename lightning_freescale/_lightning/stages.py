"""The stages of a strategy's steps, on a timeline: what the bubble profiler sees of any strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from lightning_freescale._lightning.loops import Strategy
from lightning_freescale.profiling.recording.ddp import buffers_on, ddp_waits_on
from lightning_freescale.profiling.recording.loader import ObservedLoader
from lightning_freescale.profiling.recording.timeline import Timeline


@contextmanager
def stages_on(timeline: Timeline, strategy: Strategy) -> Iterator[None]:
    """Meanwhile a strategy stamps ``timeline``; what it computes stays the same.

    Seen are the training loader (if it is set up meanwhile), the batch's way to the device, forward, backward, DDP's wait for
    its gradients and buffers, and the optimizer.
    """
    stamped = {
        "process_dataloader": _loader(timeline, strategy),
        "batch_to_device": _batch_to_device(timeline, strategy),
        "training_step": _training_step(timeline, strategy),
        "backward": _backward(timeline, strategy),
        "optimizer_step": _optimizer_step(timeline, strategy),
    }
    own = {name: vars(strategy)[name] for name in stamped if name in vars(strategy)}
    vars(strategy).update(stamped)  # of the instance: the methods of its class stay
    try:
        yield
    finally:
        for name in stamped:
            vars(strategy).pop(name, None)
        vars(strategy).update(own)


def _batch_to_device(timeline: Timeline, strategy: Strategy) -> Callable[..., Any]:
    move = strategy.batch_to_device

    def stamped(*args: Any, **kwargs: Any) -> Any:
        with timeline.span("data", "batch to device"):
            return move(*args, **kwargs)

    return stamped


def _loader(timeline: Timeline, strategy: Strategy) -> Callable[[object], object]:
    process = strategy.process_dataloader

    def stamped(dataloader: object) -> object:
        module = strategy.lightning_module
        training = module is not None and module.trainer.training
        return process(ObservedLoader(dataloader, timeline) if training else dataloader)

    return stamped


def _training_step(timeline: Timeline, strategy: Strategy) -> Callable[..., Any]:
    step = strategy.training_step

    def stamped(*args: Any, **kwargs: Any) -> Any:
        with timeline.span("forward", "forward"), buffers_on(timeline, strategy.model):
            return step(*args, **kwargs)

    return stamped


def _backward(timeline: Timeline, strategy: Strategy) -> Callable[..., Tensor]:
    backward = strategy.backward

    def stamped(closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with timeline.span("backward", "backward"), ddp_waits_on(timeline, strategy.model, closure_loss):
            return backward(closure_loss, *args, **kwargs)

    return stamped


def _optimizer_step(timeline: Timeline, strategy: Strategy) -> Callable[..., Any]:
    step = strategy.optimizer_step

    def stamped(optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as after_closure:

            def timed() -> Any:
                after_closure.close()  # closures may run several times
                result = closure()
                after_closure.enter_context(timeline.span("optimizer", "optimizer"))
                return result

            return step(optimizer, timed, *args, **kwargs)

    return stamped
