"""Correctness of the process group, and the work of the GPU in an exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from hour_report import Skip
from sm_free_plan import Plan
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
)
BY_COPY_ENGINE = ("Memcpy HtoD", "Memcpy DtoH", "Memcpy PtoP")  # as the profiler names them
SPLITS = {  # rows that rank r sends to rank p
    "even": ((3, 3), (3, 3)),
    "uneven": ((5, 1), (2, 7)),
    "one way": ((0, 4), (0, 0)),
    "own alone": ((2, 0), (0, 3)),
    "empty": ((0, 0), (0, 0)),
    "large": ((1000, 400_000), (300_001, 7)),
}
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since and before torch 2.13
Splits = list[int] | None
Collective = Callable[[Tensor, dist.ProcessGroup | None], Tensor]


def equality(plan: Plan, group: dist.ProcessGroup) -> tuple[int, list[str]]:
    """Return the number of cases, and those that differ from gloo on any rank. Collective."""
    mine, cases = [], list(_cases())
    for name, values, collective in cases:
        found, expected = collective(late(values, plan.on_gpu), group), collective(values, None)
        if found.device.type != plan.device or found.dtype != expected.dtype or not torch.equal(found.cpu(), expected):
            mine.append(name)
    everyones: list[list[str]] = [[], []]
    dist.all_gather_object(everyones, mine)
    return len(cases), sorted({name for names in everyones for name in names})


def kernels(step: Callable[[], object]) -> tuple[int, str]:
    """Return the kernels of one step, and all work of the GPU in it; nothing else may run.

    A memset counts, and so does a copy within the device, because a kernel may perform either.
    """
    events = _device_events(step)
    shown = ", ".join(f"{count} x {name[:60]}" for name, count in sorted(events.items())) or "nothing"
    return sum(count for name, count in events.items() if not name.startswith(BY_COPY_ENGINE)), shown


def proof(plan: Plan, work: Callable[[], object], name: str, step: Callable[[], int]) -> tuple[int, str]:
    """Return the number of ``kernels`` of the step.

    Raises:
        Skip: the profiler does not see the kernels of ``work``, or no copies of the host transport, so it proves nothing.
    """
    if not plan.on_gpu:
        raise Skip("no CUDA device, so no kernels to count")
    count, shown = kernels(work)
    if not count:
        raise Skip(f"the profiler sees no kernel of a matrix product but {shown}: CUPTI does not work here")
    count, shown = kernels(step)
    if name == "host" and not all(copy in shown for copy in ("Memcpy DtoH", "Memcpy HtoD")):
        raise Skip(f"the profiler does not see both copies of the host transport but {shown}")
    return count, shown


def _cases() -> Iterator[tuple[str, Tensor, Collective]]:
    rank = dist.get_rank()
    for dtype, (name, splits) in product(DTYPES, SPLITS.items()):
        received = [row[rank] for row in splits]
        collective = partial(_all_to_all, sent=list(splits[rank]), received=received)
        yield f"all-to-all, {name}, {dtype}", _values(sum(splits[rank]), dtype), collective
    for dtype in DTYPES:
        yield f"all-to-all without splits, {dtype}", _values(6, dtype), partial(_all_to_all, sent=None, received=None)
    for dtype, rows, gather in product(DTYPES, (0, 5, 100_000), (_all_gather, _all_gather_into_tensor)):
        yield f"{gather.__name__[1:]} of {rows} rows, {dtype}", _values(rows, dtype), gather


def _values(rows: int, dtype: torch.dtype) -> Tensor:
    """Return different numbers on each rank."""
    numbers = torch.arange(3 * rows).reshape(rows, 3) + 50 * dist.get_rank() + 1
    return (numbers % (2 if dtype == torch.bool else 119)).to(dtype)


def late(values: Tensor, on_gpu: bool) -> Tensor:
    """Return a tensor on the device that pending work writes; a transport that does not wait for it sends zeros."""
    if not on_gpu:
        return values.clone()
    given, written = torch.zeros_like(values, device="cuda"), values.cuda()
    torch.cuda._sleep(2_000_000)
    return given.copy_(written)


def _all_to_all(values: Tensor, group: dist.ProcessGroup | None, sent: Splits, received: Splits) -> Tensor:
    out = values.new_zeros(len(values) if received is None else sum(received), values.shape[1])
    work = dist.all_to_all_single(out, values, received, sent, group=group, async_op=True)
    work.wait()
    return out


def _all_gather(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    out = [torch.zeros_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(out, values, group=group)
    return torch.cat(out)


def _all_gather_into_tensor(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    out = values.new_zeros(dist.get_world_size() * len(values), values.shape[1])
    _gather_into(out, values, group=group)
    return out


def _device_events(step: Callable[[], object]) -> Counter[str]:
    for _ in range(2):  # a profiler that starts for the first time misses events
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            step()
            torch.cuda.synchronize()
    events = [event for event in recorded.events() if event.device_type == DeviceType.CUDA]
    return Counter(event.name for event in events if not event.is_user_annotation)
