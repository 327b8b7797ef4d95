"""Compute that transfers may slow down: a matrix product, and the attention of HSTU over histories of many lengths."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from sm_free_plan import Plan
from torch import Tensor
from torch.nn import functional

Work = Callable[[], object]
BLOCK = 8  # histories of similar length that are padded together
QUEUEING = 100_000_000  # cycles, about 50 ms, that the GPU waits while the host queues the work


class Timing(NamedTuple):
    """Milliseconds of one piece of work, and start and end of the pieces in seconds of ``time.perf_counter``."""

    ms: float
    begin: float
    end: float


def works(plan: Plan) -> dict[str, Work]:
    """Return both by name."""
    return {"gemm": gemm(plan), "attention": attention(plan)}


def gemm(plan: Plan) -> Work:
    """Return a product of two square matrices."""
    left, right = _random(plan, 2, plan.gemm, plan.gemm)
    product = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=product)


def attention(plan: Plan) -> Work:
    """Return forward and backward of the attention, block by block."""
    lengths = histories(plan).reshape(-1, BLOCK)
    blocks = [_block(plan, own) for own in lengths]

    def both_ways() -> None:
        for block in blocks:
            torch.autograd.grad(attend(*block, longest=plan.longest), block, torch.ones_like(block[0]))

    return both_ways


def histories(plan: Plan) -> np.ndarray:
    """Return log-normal lengths, sorted."""
    drawn = np.random.RandomState(0).lognormal(np.log(plan.longest / 6), 0.8, plan.histories)
    return np.sort(drawn.clip(1, plan.longest).astype(int))


def attend(queries: Tensor, keys: Tensor, values: Tensor, gates: Tensor, *, longest: int) -> Tensor:
    """Return HSTU's causal attention, with SiLU in place of softmax; all shapes are ``[history, head, item, number]``.

    Padding needs no mask, because its keys are zero, and SiLU of zero is zero.
    """
    weights = functional.silu(queries @ keys.mT).tril() / longest
    return gates * functional.layer_norm(weights @ values, values.shape[-1:])


def timed(work: Work, times: int, stream: torch.cuda.Stream | None) -> Timing:
    """Time each of ``times`` pieces of work on ``stream``, or on the CPU."""
    if stream is None:
        begin = time.perf_counter()
        for _ in range(times):
            work()
        end = time.perf_counter()
        return Timing(1000 * (end - begin) / times, begin, end)
    return _timed_on(stream, work, times)


def _timed_on(stream: torch.cuda.Stream, work: Work, times: int) -> Timing:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(QUEUEING)  # so that a host that is busy with transfers does not slow down the launches
        first.record()
        for _ in range(times):
            work()
        last.record()
    first.synchronize()
    begin = time.perf_counter()
    last.synchronize()
    return Timing(first.elapsed_time(last) / times, begin, time.perf_counter())


def _block(plan: Plan, lengths: np.ndarray) -> tuple[Tensor, ...]:
    longest = int(lengths.max())
    drawn = _random(plan, 4, len(lengths), plan.heads, longest, plan.dim)
    real = torch.arange(longest) < torch.from_numpy(lengths)[:, None]
    drawn *= real[:, None, :, None].to(drawn.device)
    return tuple(part.clone().requires_grad_() for part in drawn)


def _random(plan: Plan, *shape: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(plan.device, torch.bfloat16 if plan.on_gpu else torch.float32)
