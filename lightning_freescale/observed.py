"""The stages of a strategy's steps, on a timeline: what the bubble profiler sees of any strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale._lightning import Strategy
from lightning_freescale.profiling.recording.loader import ObservedLoader
from lightning_freescale.profiling.recording.timeline import Timeline


@contextmanager
def stages_on(timeline: Timeline, strategy: Strategy) -> Iterator[None]:
    """Meanwhile a strategy stamps ``timeline``; what it computes stays the same.

    Seen are the training loader (if it is set up meanwhile), the batch's way to the device, forward, backward, DDP's wait for
    its gradients, and the optimizer.
    """
    stamped = {
        "process_dataloader": _loader(timeline, strategy),
        "batch_to_device": _stage(strategy.batch_to_device, lambda: timeline.span("data", "batch to device")),
        "training_step": _stage(strategy.training_step, lambda: timeline.span("forward", "forward")),
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


def _stage(method: Callable[..., Any], span: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    def stamped(*args: Any, **kwargs: Any) -> Any:
        with span():
            return method(*args, **kwargs)

    return stamped


def _loader(timeline: Timeline, strategy: Strategy) -> Callable[[object], object]:
    process = strategy.process_dataloader

    def stamped(dataloader: object) -> object:
        module = strategy.lightning_module
        training = module is not None and module.trainer.training
        return process(ObservedLoader(dataloader, timeline) if training else dataloader)

    return stamped


def _backward(timeline: Timeline, strategy: Strategy) -> Callable[..., Tensor]:
    backward = strategy.backward

    def stamped(closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with timeline.span("backward", "backward"), ExitStack() as waiting:
            model = strategy.model
            if timeline.recording and isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
                closure_loss.register_hook(lambda _: _observe_wait(timeline, model, waiting))
            return backward(closure_loss, *args, **kwargs)

    return stamped


def _observe_wait(timeline: Timeline, model: DistributedDataParallel, waiting: ExitStack) -> None:
    """What a backward queues runs in order when all gradients are there: ours, DDP's wait for its buckets, what ours queues."""
    engine = torch.autograd.Variable._execution_engine

    def wait_begins() -> None:
        waiting.enter_context(timeline.collective("dense gradients", moved=_last_bucket(model)))
        engine.queue_callback(waiting.close)

    engine.queue_callback(wait_begins)


def _last_bucket(model: DistributedDataParallel) -> int:
    """Bytes that travel when nothing is left to compute: the others do so behind backward."""
    ignored = getattr(model, "parameters_to_ignore", ())
    trained = (p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored)
    whole = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    ranks = model.process_group.size()
    return 2 * min(whole, int(model.bucket_bytes_cap)) * (ranks - 1) // ranks


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
