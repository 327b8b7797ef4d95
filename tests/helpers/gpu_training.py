"""Trains the sequence model with the overlap engine as on CUDA: on a pretended GPU, with streams that are clocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.embeddings.overlap.exchange_worker import ExchangeWorker
from lightning_freescale.embeddings.overlap.local_rows import TableKernel
from lightning_freescale.embeddings.shards import ShardedTables, kernels
from tests.helpers.pretended_gpu import GPU, PretendedGPU
from tests.helpers.sequences import Batch, NextIds, Run, result_of, sharded
from tests.helpers.stream_clocks import Accesses, install

Modes = Callable[[], AbstractContextManager[Any]]
NextIdsOf = Callable[[int, Batch | None], NextIds | None]


class KernelOnGPU:
    """FBGEMM's module, as :class:`TableKernel` calls it, on the CPU, without torch's modes: in its C++ they end the process."""

    def __init__(self, module: Any, gpu: PretendedGPU, accesses: Accesses) -> None:
        self._module, self._gpu, self._accesses = module, gpu, accesses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, indices: Tensor, offsets: Tensor) -> KernelOnGPU:
        self._ids = indices, offsets
        return self

    def backward(self, gradients: Tensor) -> None:
        given, tables = [*self._ids, gradients], _memory_of(self._module)
        if not all(map(self._gpu.holds, given + tables)):
            raise RuntimeError("FBGEMM: expected all tensors to be on the same device")
        self._accesses.add("update", given, tables, [])
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.enable_grad():
            self._module(*self._ids).backward(gradients)


def put_on_gpu(gpu: PretendedGPU, model: nn.Module, tables: ShardedTables) -> None:
    """Let the model and all that TorchRec's kernels hold be on the GPU."""
    tables.device = GPU
    gpu.take(*model.parameters(), *model.buffers())
    for _, module in tables.modules:
        for kernel in kernels(module):
            gpu.take(*_memory_of(kernel.emb_module))


def _memory_of(module: Any) -> list[Tensor]:
    held = [each for each in vars(module).values() if isinstance(each, Tensor)]
    return [*held, *module.parameters(), *module.buffers(), *module.split_embedding_weights()]


def enter_in_jobs(modes: Modes) -> None:
    """Run every job of the engine's threads in ``modes``, in this process for good: torch's modes are those of one thread."""
    run = ExchangeWorker._run_in_order

    def run_inside(*args: Any) -> Any:
        with modes():
            return run(*args)

    ExchangeWorker._run_in_order = run_inside


def train(
    optimizer: TableOptimizer,
    data: Sequence[Batch],
    *,
    on_gpu: bool,
    dedup: bool = False,
    holds: bool = False,
    told: NextIdsOf,
    watches: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
    accesses: Accesses | None = None,
    **options: Any,
) -> tuple[Run, dict[str, int]]:
    """Train; with the run goes how often the host would have waited for the GPU, by thread.

    Args:
        optimizer: of the tables.
        data: of this rank.
        on_gpu: whether to pretend.
        dedup: as :class:`OverlapEngine`.
        holds: clip the gradients.
        told: which ids the engine is told of the next batch.
        watches: modes that watch the pretended GPU, on the training thread and the engine's.
        accesses: of the streams.
        **options: others of :class:`OverlapEngine`.
    """
    with sharded(optimizer) as (model, ddp, tables, dense):
        gpu, accesses = PretendedGPU(), accesses or Accesses()

        def modes() -> AbstractContextManager[Any]:
            stack = ExitStack()
            for each in (*watches, gpu.active):
                stack.enter_context(each())
            return stack

        if on_gpu:
            put_on_gpu(gpu, model, tables)
            install(accesses)
            enter_in_jobs(modes)
        inside: Modes = modes if on_gpu else nullcontext
        with gpu.active() if on_gpu else nullcontext():  # what is made now is kept for good
            batches = [{name: each.to(GPU) for name, each in batch.items()} for batch in data] if on_gpu else data
            engine = OverlapEngine(tables, dedup=dedup, hold_gradients=holds, transport="native", **options)
            for kernel in _kernels_of(engine) if on_gpu else ():
                kernel.module = KernelOnGPU(kernel.module, gpu, accesses)
        losses = []
        for step, (batch, following) in enumerate(zip(batches, [*batches[1:], None])):
            with inside():
                engine.begin_step(told(step, following))
                dense.zero_grad()
                loss = ddp(batch)
                loss.backward()
                engine.end_backward()
                if holds:
                    _clip(engine)
                losses.append(loss.item())
            dense.step()  # outside: Adam takes another order of operations on CUDA
        with inside():
            engine.drain()
            statistics = engine.statistics()
            engine.close()
        run = result_of(model, tables, losses)
        run.statistics = statistics
        return run, dict(gpu.waits)


def _kernels_of(engine: OverlapEngine) -> list[TableKernel]:
    return [kernel for collection in engine.collections.values() for kernel in collection._local.kernels]


def _clip(engine: OverlapEngine) -> None:
    norm = engine.square_sum().sqrt()
    engine.scale_gradients(torch.clamp(1.0 / (norm + 1e-6), max=1.0).float())
    engine.clamp_gradients(0.01)
    engine.apply_gradients()
