"""Trains the sequence model with the overlap engine as on CUDA: on a pretended GPU, with streams that are clocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.embeddings.overlap.exchange_worker import ExchangeWorker
from lightning_freescale.embeddings.shards import ShardedTables, kernels
from tests.helpers.pretended_gpu import GPU, PretendedGPU
from tests.helpers.sequences import Batch, NextIds, Run, known, result_of, sharded
from tests.helpers.stream_clocks import Accesses, install

Modes = Callable[[], AbstractContextManager[Any]]
NextIdsOf = Callable[[int, Batch | None], NextIds | None]


def put_on_gpu(gpu: PretendedGPU, model: nn.Module, tables: ShardedTables) -> None:
    """Let the model and all that TorchRec's kernels hold be on the GPU."""
    tables.device = GPU
    gpu.take(*model.parameters(), *model.buffers())
    for _, module in tables.modules:
        for kernel in kernels(module):
            held = vars(kernel.emb_module).values()
            gpu.take(
                *kernel.emb_module.parameters(), *kernel.emb_module.buffers(), *kernel.emb_module.split_embedding_weights()
            )
            gpu.take(*(each for each in held if isinstance(each, Tensor)))


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
    told: NextIdsOf = lambda step, following: known(following),
    watches: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
    accesses: Accesses | None = None,
) -> tuple[Run, dict[str, int]]:
    """Train; with the run goes how often the host would have waited for the GPU, by thread.

    Args:
        optimizer: of the tables.
        data: of this rank.
        on_gpu: whether to pretend.
        dedup: as :class:`OverlapEngine`.
        holds: clip the gradients.
        told: which ids the engine is told of the next batch.
        watches: modes that watch, too, on the training thread and the engine's.
        accesses: of the streams.
    """
    with sharded(optimizer) as (model, ddp, tables, dense):
        gpu = PretendedGPU()

        def modes() -> AbstractContextManager[Any]:
            stack = ExitStack()
            for each in (*watches, gpu.active) if on_gpu else watches:
                stack.enter_context(each())
            return stack

        if on_gpu:
            put_on_gpu(gpu, model, tables)
            install(accesses or Accesses())
        if on_gpu or watches:
            enter_in_jobs(modes)
        inside: Modes = modes if on_gpu or watches else nullcontext
        with gpu.active() if on_gpu else nullcontext():  # what is made now is kept for good
            batches = [{name: each.to(GPU) for name, each in batch.items()} for batch in data] if on_gpu else data
            engine = OverlapEngine(tables, dedup=dedup, hold_gradients=holds, transport="native")
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


def _clip(engine: OverlapEngine) -> None:
    norm = engine.square_sum().sqrt()
    engine.scale_gradients(torch.clamp(1.0 / (norm + 1e-6), max=1.0).float())
    engine.clamp_gradients(0.01)
    engine.apply_gradients()
