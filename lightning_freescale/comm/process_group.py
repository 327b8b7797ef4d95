"""A process group that tells a timeline when this rank arrives at a collective and when it waits for one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

BACKEND = "freescale_observed"

_OBSERVED = (
    *("broadcast", "reduce", "gather", "scatter", "allreduce", "allreduce_coalesced"),
    *("allgather", "allgather_coalesced", "all_gather_single", "_allgather_base", "all_gather_single_coalesced"),
    *("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_single_coalesced"),
    *("alltoall", "all_to_all_single", "alltoall_base"),
)
_NOT_OBSERVED = ("send", "recv", "recv_anysource", "barrier", "monitored_barrier")


class Observer(Protocol):
    """What the group needs of a timeline."""

    def arrive(self, name: str) -> Any:
        """This rank has issued its part of a collective."""

    def waiting(self, collective: Any) -> AbstractContextManager[None]:
        """Around this rank's wait for its result."""


class ObservedWork(dist.Work):
    """A Work whose wait is observed."""

    def __init__(self, work: dist.Work, observer: Observer, collective: Any) -> None:
        super().__init__()
        self._work, self._observer, self._collective = work, observer, collective

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the collective."""
        with self._observer.waiting(self._collective):
            return self._work.wait(timeout)

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether it is done without error."""
        return self._work.is_success()

    def exception(self) -> Any:
        """Its error, if any."""
        return self._work.exception()

    def get_future(self) -> torch.futures.Future[Any]:
        """Its future."""
        return self._work.get_future()

    def result(self) -> Any:
        """Its tensors."""
        return self._work.result()

    def synchronize(self) -> None:
        """Make the current stream wait for it."""
        self._work.synchronize()


class ObservedProcessGroup(dist.ProcessGroup):
    """Delegates every collective to a native group of gloo (CPU) and NCCL (CUDA; not tested on GPU).

    Every method is delegated explicitly: one that falls through to the C++ base class would run while holding the GIL, which
    deadlocks with gloo's own thread.
    """

    def __init__(self, options: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the two-argument constructor is the one that Python may subclass
        self.observer: Observer | None = None
        self._inner = dist.ProcessGroup(options.store, rank, size)
        kinds = dist.ProcessGroup.BackendType
        natives = [(torch.device("cpu"), kinds.GLOO, _gloo(options, rank, size))]
        if torch.cuda.is_available():
            natives.append((torch.device("cuda"), kinds.NCCL, _nccl(options, rank, size)))
        for group in (self._inner, self):  # also on the outer one: names and lookups of backends go there
            group._set_default_backend(natives[-1][1])
            for device, kind, native in natives:
                group._register_backend(device, kind, native)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """The registered name."""
        return BACKEND

    def shutdown(self) -> None:
        """Close the native groups."""
        self._inner.shutdown()


def observed_group(observer: Observer, timeout: timedelta | None) -> dist.ProcessGroup:
    """A group of all ranks whose collectives ``observer`` sees. Collective."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    group = dist.new_group(backend=BACKEND, timeout=timeout)
    group.observer = observer
    return group


def _create(options: Any, backend_options: Any = None) -> ObservedProcessGroup:
    return ObservedProcessGroup(options, options.group_rank, options.group_size)


def _named(native: Any, options: Any) -> Any:
    native.options.global_ranks_in_group = options.global_ranks_in_group
    native.options.group_name = options.group_id
    native._set_sequence_number_for_group()
    return native


def _gloo(options: Any, rank: int, size: int) -> Any:
    store = dist.PrefixStore("gloo", options.store)
    return _named(dist.ProcessGroupGloo(store, rank, size, timeout=options.timeout), options)


def _nccl(options: Any, rank: int, size: int) -> Any:
    native = dist.ProcessGroupNCCL.Options()
    native._timeout = options.timeout
    return _named(dist.ProcessGroupNCCL(dist.PrefixStore("nccl", options.store), rank, size, native), options)


def _delegate(name: str, observed: bool) -> Callable[..., Any]:
    def method(self: ObservedProcessGroup, *args: Any, **kwargs: Any) -> Any:
        collective = self.observer.arrive(name) if observed and self.observer is not None else None
        work = getattr(self._inner, name)(*args, **kwargs)
        return work if collective is None else ObservedWork(work, self.observer, collective)  # type: ignore[arg-type]

    method.__name__ = name
    return method


for _name in (*_OBSERVED, *_NOT_OBSERVED):
    setattr(ObservedProcessGroup, _name, _delegate(_name, _name in _OBSERVED))
