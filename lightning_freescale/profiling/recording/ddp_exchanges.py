"""Record the exchanges that DistributedDataParallel runs itself, as far as they can be observed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale.profiling.recording.observed_work import over_link, replaced
from lightning_freescale.profiling.recording.records import Collective
from lightning_freescale.profiling.recording.timeline import Timeline

GRADIENTS = "dense gradients"


@contextmanager
def ddp_waits_on(timeline: Timeline, model: object, loss: Tensor) -> Generator[None, None, None]:
    """Record DDP's exchange of gradients, around the backward of ``loss``.

    Its wait for the last gradients is the collective ``dense gradients``. What it hides behind backward is an exchange of that
    name in the background, under way at most from the moment at which its first bucket was ready until it has all gradients:
    DDP does not say when each bucket arrived. It is seen once DDP has put its buckets in order, after the first backward, if
    there are two or more, and not with ``find_unused_parameters``, where it never does.

    Does nothing if ``model`` is no DDP, or does not synchronize this time. DDP's own reduction stays as it is.
    """
    with ExitStack() as around:
        # a DDP that reduces none of its parameters by itself has no logger, nor buckets
        if not isinstance(model, DistributedDataParallel) or getattr(model, "logger", None) is None:
            yield
            return
        if timeline.recording and model.require_backward_grad_sync:
            buckets = _buckets_of(model)
            first = around.enter_context(buckets.first_ready_on(timeline))
            # what a backward queues runs in order when all gradients are there: ours, DDP's wait for its buckets, what ours
            # queues; a communication hook would see more, but replace DDP's own reduction
            engine = torch.autograd.Variable._execution_engine
            waiting = around.enter_context(ExitStack())

            def wait_begins() -> None:
                waiting.enter_context(timeline.collective(GRADIENTS, moved=buckets.moved_last))
                engine.queue_callback(wait_ends)

            def wait_ends() -> None:
                waiting.close()
                if first and timeline.recording:
                    moved, done = buckets.moved_before_last, timeline.stamp()
                    timeline.background.append(Collective(GRADIENTS, "", first[0], done=done, moved=moved, at_most=True))

            loss.register_hook(lambda _: engine.queue_callback(wait_begins))
        yield


def buffers_on(timeline: Timeline, model: object) -> AbstractContextManager[None]:
    """Record DDP's broadcast of the module's buffers, around a forward of it, as the collective ``buffers``."""
    if not timeline.recording or not isinstance(model, DistributedDataParallel) or not model.modules_buffers:
        return nullcontext()
    sync = model._sync_buffers  # DDP calls it where it needs it, and has no hook for it

    def stamped() -> None:
        with timeline.collective("buffers"):
            sync()

    return replaced(model, {"_sync_buffers": stamped})


class _Buckets:
    """DDP's buckets, in the order in which it exchanges them.

    Attributes:
        in_order: whether DDP has put them in order, which it does once.
        moved_last: bytes over a rank's link when nothing is left to compute.
        moved_before_last: those of the buckets before, which are exchanged behind backward.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        data = model._get_ddp_logging_data()
        self.in_order = bool(data.get("has_rebuilt_buckets"))
        sizes = _numbers(data["rebuilt_bucket_sizes" if self.in_order else "bucket_sizes"], ",")
        ranks = model.process_group.size()
        self.moved_last = over_link("all_reduce", sizes[-1], ranks)
        self.moved_before_last = over_link("all_reduce", sum(sizes[:-1]), ranks)
        self._first: list[Tensor] = []
        if self.in_order and len(sizes) > 1:
            parameters, _ = model._build_params_for_reducer()
            first = _numbers(data["rebuilt_per_bucket_param_indices"].split(",")[0], " ")
            self._first = [parameters[index] for index in first]

    @contextmanager
    def first_ready_on(self, timeline: Timeline) -> Generator[Sequence[Any], None, None]:
        """Stamp, in a backward, the moment at which the first bucket has all its gradients; yield what will hold the stamp."""
        ready: list[Any] = []
        missing = {id(parameter) for parameter in self._first}

        def has_gradient(parameter: Tensor) -> None:
            missing.discard(id(parameter))
            if not missing and not ready:
                ready.append(timeline.stamp())

        # these run right before DDP's own, which begins with the exchange when the last of them is there
        hooks = [parameter.register_post_accumulate_grad_hook(has_gradient) for parameter in self._first]
        try:
            yield ready
        finally:
            for hook in hooks:
                hook.remove()


_BUCKETS: WeakKeyDictionary[DistributedDataParallel, _Buckets] = WeakKeyDictionary()


def _buckets_of(model: DistributedDataParallel) -> _Buckets:
    buckets = _BUCKETS.get(model)
    if buckets is None or not buckets.in_order:
        buckets = _BUCKETS[model] = _Buckets(model)
    return buckets


def _numbers(text: str, separator: str) -> list[int]:
    return [int(number) for number in text.split(separator) if number.strip()]
