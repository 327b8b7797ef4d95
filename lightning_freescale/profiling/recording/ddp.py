"""What of DistributedDataParallel's own communication can be seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale.profiling.recording.timeline import Timeline


@contextmanager
def ddp_waits_on(timeline: Timeline, model: object, loss: Tensor) -> Iterator[None]:
    """Around the backward of ``loss``: DDP's wait for its last gradients is the collective ``dense gradients``.

    Does nothing if ``model`` is no DDP, or does not synchronize this time. What DDP hides behind backward is not seen.
    """
    with ExitStack() as waiting:
        if timeline.recording and isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
            loss.register_hook(lambda _: _observe(timeline, model, waiting))
        yield


@contextmanager
def buffers_on(timeline: Timeline, model: object) -> Iterator[None]:
    """Around a forward of DDP: its broadcast of the module's buffers is the collective ``buffers``."""
    if not timeline.recording or not isinstance(model, DistributedDataParallel) or not model.modules_buffers:
        yield
        return
    sync = model._sync_buffers  # DDP calls it where it needs it, and has no hook for it

    def stamped() -> None:
        with timeline.collective("buffers"):
            sync()

    vars(model)["_sync_buffers"] = stamped
    try:
        yield
    finally:
        del vars(model)["_sync_buffers"]


def _observe(timeline: Timeline, model: DistributedDataParallel, waiting: ExitStack) -> None:
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
