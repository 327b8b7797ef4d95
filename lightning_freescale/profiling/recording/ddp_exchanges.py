"""Record the exchanges that DistributedDataParallel runs itself, as far as they can be observed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale._runtime.attributes import replaced
from lightning_freescale.profiling.recording.observed_work import over_link
from lightning_freescale.profiling.recording.records import Collective
from lightning_freescale.profiling.recording.timeline import Timeline

GRADIENTS = "dense gradients"


@contextmanager
def ddp_waits_on(timeline: Timeline, model: object, loss: Tensor) -> Generator[None, None, None]:
    """Record DDP's exchange of gradients during the backward of ``loss``, if ``model`` is a DDP that synchronizes.

    The wait for the last gradients is the collective ``dense gradients``. The exchange that backward hides is a background
    exchange of the same name. Its time is an upper bound, from the first ready bucket to the last gradient, because DDP does
    not report when a bucket arrived. It is recorded once DDP has ordered its buckets, after the first backward, if there are
    two or more. With ``find_unused_parameters``, DDP never orders them. If no background exchange is recorded, the bytes of all
    buckets belong to the collective. DDP's own reduction does not change.
    """
    with ExitStack() as around:
        # a DDP that reduces no parameter itself has neither a logger nor buckets
        if not isinstance(model, DistributedDataParallel) or getattr(model, "logger", None) is None:
            yield
            return
        if timeline.recording and model.require_backward_grad_sync:
            buckets = _BUCKETS.get(model)
            if buckets is None or not buckets.in_order:
                buckets = _BUCKETS[model] = _Buckets(model)
            first = around.enter_context(buckets.first_ready_on(timeline))
            # callbacks that a backward queues run in order after all gradients: wait_begins, DDP's wait for its buckets, and
            # wait_ends, which wait_begins queues; a communication hook would observe more, but replace DDP's own reduction
            engine = torch.autograd.Variable._execution_engine
            waiting = around.enter_context(ExitStack())

            def wait_begins() -> None:
                moved = buckets.moved_last + (0 if first else buckets.moved_before_last)
                waiting.enter_context(timeline.collective(GRADIENTS, moved=moved))
                engine.queue_callback(wait_ends)

            def wait_ends() -> None:
                waiting.close()
                if first and timeline.recording:
                    moved, done = buckets.moved_before_last, timeline.stamp()
                    timeline.background.append(Collective(GRADIENTS, "", first[0], done=done, moved=moved, at_most=True))

            loss.register_hook(lambda _: engine.queue_callback(wait_begins))
        yield


def buffers_on(timeline: Timeline, model: object) -> AbstractContextManager[None]:
    """Record DDP's broadcast of the module's buffers during a forward as the collective ``buffers``."""
    if not timeline.recording or not isinstance(model, DistributedDataParallel) or not model.modules_buffers:
        return nullcontext()
    sync = model._sync_buffers  # DDP has no hook for it

    def stamped() -> None:
        with timeline.collective("buffers"):
            sync()

    return replaced(model, {"_sync_buffers": stamped})


class _Buckets:
    """The bytes over a rank's link of DDP's last bucket, which no compute hides, and of the buckets before it.

    ``in_order`` is True once DDP has ordered its buckets, which it does once.
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
        """Stamp the moment at which the first bucket has all its gradients; yield the list that then holds the stamp."""
        ready: list[Any] = []
        missing = {id(parameter) for parameter in self._first}

        def has_gradient(parameter: Tensor) -> None:
            missing.discard(id(parameter))
            if not missing and not ready:
                ready.append(timeline.stamp())

        # these hooks run right before DDP's own, which starts the exchange after the last gradient of the bucket
        with ExitStack() as hooks:
            for parameter in self._first:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(has_gradient))
            yield ready


_BUCKETS: WeakKeyDictionary[DistributedDataParallel, _Buckets] = WeakKeyDictionary()


def _numbers(text: str, separator: str) -> list[int]:
    return [int(number) for number in text.split(separator) if number.strip()]
