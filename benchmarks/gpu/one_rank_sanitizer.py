"""torch's CUDA sanitizer in all working threads: it finds accesses to memory that no event and no wait orders.

torch's own switch enters its dispatch mode in one thread, and the first unordered access ends the run. This module enables the
mode in the background threads of the package too, autograd inherits it from the thread that calls backward, and all unordered
accesses are recorded.

The sanitizer derives reads and writes from the schema of an operator. It does not see other accesses of a kernel, or copies
through the CUDA driver. It identifies memory by the address where a tensor begins. If a block is freed, torch's sanitizer
forgets only the first address of the block. This module forgets all addresses in it, because other streams may receive them.
It omits tensors without elements, which have no address.
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
from torch.cuda import _sanitizer  # traces every allocation from here on, so importing this module slows the process down
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
_MOST = 5  # unordered accesses that are printed in full


class Accesses:
    """The accesses that the sanitizer sees during :meth:`watched`, which first waits for all earlier work.

    Attributes:
        operators: number of operators by the thread's name, including those on the CPU.
        unordered: number of unordered pairs of accesses, by the two operators and the place in the package of the later one.
        texts: the sanitizer's text of the first pairs, with both stacks.
        within: both accesses of the first pair, and their places in the package.
    """

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        self.unordered: Counter[str] = Counter()
        self.texts: list[str] = []
        self.within = ""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # otherwise pending work would seem unordered to a new handler
        self._blocks: defaultdict[int, set[int]] = defaultdict(set)  # the addresses that were accessed in each
        self._handler = _sanitizer.EventHandler()
        self._one_by_one = threading.RLock()  # reentrant, because freed memory calls back inside
        for name, registry in _CALLBACKS.items():
            handle = getattr(self._handler, name)
            forgets = registry in (traced.MemoryAllocationCallbacks, traced.MemoryDeallocationCallbacks)
            registry.callback_list[:] = [partial(self._called_back, partial(self._forget, handle) if forgets else handle)]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch this thread, and the jobs of the package's background threads in the meantime."""
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
        """Record the accesses of one operator on the current stream of its thread."""
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
                if len(self.texts) < _MOST:
                    self.texts.append(str(error))

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
    """The reads and writes of an operator.

    Attributes:
        blocks: for each address, the start of its block of memory.
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
    """The dispatch mode of one thread; modes are not shared between threads."""

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
    """Write on one stream and read on another without an event in between, which a working sanitizer must find."""
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
    """Return both accesses with their places in the package, the outermost call first."""
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
