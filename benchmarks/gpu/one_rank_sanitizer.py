"""torch's CUDA sanitizer in every thread that works: accesses to memory that no event and no wait puts in order.

torch's own switch enters its dispatch mode in one thread, and the first access that it finds ends the run. Here the package's
background threads have it, too, autograd takes it along from the thread that calls backward, and all that is found is kept.
The sanitizer knows from an operator's schema what it reads and writes, so it does not see what a kernel does beside that, nor
copies made through the CUDA driver. It knows memory by the address where a tensor begins. When a block is freed, torch's own
forgets the block's first address alone; here it forgets all addresses in it, which other streams may get next, and tensors
without elements, which have no address, are left out.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.cuda import _gpu_trace as traced
from torch.cuda import _sanitizer  # traces every allocation from here on, so whoever imports this is slowed down
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_freescale
from lightning_freescale._runtime.worker import WorkerThread

_CALLBACKS = {
    "_handle_event_creation": traced.EventCreationCallbacks,
    "_handle_event_deletion": traced.EventDeletionCallbacks,
    "_handle_event_record": traced.EventRecordCallbacks,
    "_handle_event_wait": traced.EventWaitCallbacks,
    "_handle_memory_allocation": traced.MemoryAllocationCallbacks,
    "_handle_memory_deallocation": traced.MemoryDeallocationCallbacks,
    "_handle_stream_creation": traced.StreamCreationCallbacks,
    "_handle_device_synchronization": traced.DeviceSynchronizationCallbacks,
    "_handle_stream_synchronization": traced.StreamSynchronizationCallbacks,
    "_handle_event_synchronization": traced.EventSynchronizationCallbacks,
}
_PACKAGE = Path(lightning_freescale.__file__).parent
_MOST = 5  # unordered accesses that are told in full


class Accesses:
    """What the sanitizer sees while :meth:`watched`, of one run: it knows nothing of what came before, for which it waits.

    Attributes:
        operators: how many, by the thread's name; those on the CPU count, too.
        unordered: how often two accesses are ordered by nothing, by the two operators and where the package called the later.
        told: the first of them as the sanitizer tells them, with both stacks.
        within: of the very first, both accesses and where in the package they were made.
    """

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        self.unordered: Counter[str] = Counter()
        self.told: list[str] = []
        self.within = ""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # else what still runs would be ordered by nothing that a new handler has seen
        self._blocks: defaultdict[int, set[int]] = defaultdict(set)  # the addresses that were accessed in each
        self._handler = _sanitizer.EventHandler()
        self._one_by_one = threading.RLock()  # reentrant: memory that is freed inside calls back
        for name, registry in _CALLBACKS.items():
            handle = getattr(self._handler, name)
            forgets = registry in (traced.MemoryAllocationCallbacks, traced.MemoryDeallocationCallbacks)
            registry.callback_list[:] = [partial(self._called_back, partial(self._forget, handle) if forgets else handle)]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch this thread, and the jobs that the package's background threads are given meanwhile."""
        submit = WorkerThread.submit

        def submit_watched(worker: WorkerThread, job: Callable[..., Any], *args: Any) -> Any:
            return submit(worker, partial(self._run, job), *args)

        WorkerThread.submit = submit_watched
        try:
            with _Mode(self):
                yield
        finally:
            WorkerThread.submit = submit

    def launched(self, operator: Any, arguments: Arguments) -> None:
        """Note one operator's accesses, on the current stream of its thread."""
        with self._one_by_one:
            self.operators[threading.current_thread().name] += 1
            written, read = arguments.dataptrs_written, arguments.dataptrs_read
            if not written and not read:
                return  # on the CPU
            for address, block in arguments.blocks.items():
                self._blocks[block].add(address)
            stream = torch.cuda.current_stream().cuda_stream
            found = self._handler._handle_kernel_launch(
                stream, read - written, written, arguments.outputs, operator._schema, arguments.tensor_aliases
            )
            for error in found:
                self.unordered[_short(error)] += 1
                self.within = self.within or _within(error)
                if len(self.told) < _MOST:
                    self.told.append(str(error))

    def _run(self, job: Callable[..., Any], *args: Any) -> Any:
        with _Mode(self):
            return job(*args)

    def _forget(self, handle: Callable[[int], None], block: int) -> None:
        for address in self._blocks.pop(block, ()):
            if address != block:
                self._handler.tensors_accessed.accesses.pop(address, None)
        handle(block)

    def _called_back(self, handle: Callable[..., None], *args: int) -> None:
        with self._one_by_one:
            handle(*args)


class Arguments(_sanitizer.ArgumentHandler):
    """What an operator reads and writes.

    Attributes:
        blocks: of each address, where the block of memory begins that it lies in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[int, int] = {}

    def _handle_argument(self, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            if value.numel() == 0:
                return
            self.blocks[value.data_ptr()] = value.untyped_storage().data_ptr()
        super()._handle_argument(value, *args, **kwargs)


class _Mode(TorchDispatchMode):
    """Of one thread: modes are not shared between threads."""

    def __init__(self, accesses: Accesses) -> None:
        super().__init__()
        self._accesses = accesses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.record_stream.default:
            return func(*args, **kwargs)
        factory = bool(_sanitizer.FACTORY_FUNCTION_REGEX.match(func._schema.name))
        arguments = Arguments()
        arguments.parse_inputs(func._schema, args, kwargs, is_factory=factory)
        outputs = func(*args, **kwargs)
        arguments.parse_outputs(func._schema, outputs, is_factory=factory)
        self._accesses.launched(func, arguments)
        return outputs


def race(device: torch.device) -> None:
    """Write on one stream and read on another without an event between: what a sanitizer that works must find."""
    other = torch.cuda.Stream(device)
    written = torch.zeros(1024, device=device)
    torch.cuda.synchronize(device)
    written.add_(1)
    with torch.cuda.stream(other):
        written.sum()
    torch.cuda.synchronize(device)


def _short(error: Any) -> str:
    later, earlier = error.current_access, error.previous_access
    frames = _frames(later)
    place = frames[-1].split()[0].rsplit("/", 1)[1] if frames else "outside of the package"
    return f"{later.operator.name} at {place} after {earlier.operator.name}"


def _within(error: Any) -> str:
    """Both accesses, each with where the package made it, the outermost call first."""
    lines = []
    for when, access in (("later", error.current_access), ("earlier", error.previous_access)):
        lines.append(f"{when}, on stream {access.stream}: {access.operator.name} {access.type} it, called at")
        lines += [f"  {frame}" for frame in _frames(access)] or ["  no line of the package"]
    return "\n".join(lines)


def _frames(access: Any) -> list[str]:
    return [
        f"{Path(frame.filename).relative_to(_PACKAGE.parent)}:{frame.lineno} in {frame.name}"
        for frame in access.stack_trace
        if Path(frame.filename).is_relative_to(_PACKAGE)
    ]
