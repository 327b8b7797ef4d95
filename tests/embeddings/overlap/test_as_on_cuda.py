"""Code of the engine for CUDA only, on a simulated GPU.

The numbers are those of the CPU, events order all that streams share, and no operation is one that torch documents as
nondeterministic on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.embeddings.overlap.id_exchange import IdExchange
from lightning_freescale.embeddings.overlap.local_rows import CpuKernel, TableKernel
from lightning_freescale.embeddings.overlap.transport import ExchangeWorker, RowTransport
from lightning_freescale.embeddings.shards import ShardedTables, kernels
from lightning_freescale.testing import run_distributed
from tests.helpers.hot_rows import HOT
from tests.helpers.jagged import copy_of
from tests.helpers.pretended_gpu import GPU, PretendedGPU
from tests.helpers.sequences import OPTIMIZERS, Batch, NextIds, Run, batches, differences, known, result_of, sharded
from tests.helpers.stream_clocks import Accesses, ClockStream, Watch, install

STEPS = 8
UNORDERED = ("index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce", "put", "embedding_dense_backward")
"""Operations that are nondeterministic on CUDA. Others are where they sum floats."""


class Operations(Accesses):
    """A simulated GPU that also records nondeterministic operations."""

    def __init__(self) -> None:
        super().__init__()
        self.nondeterministic: set[str] = set()

    def add(self, what: str, read: list[Tensor], written: list[Tensor], made: list[Tensor]) -> None:
        super().add(what, read, written, made)
        sums = what in ("cumsum", "bincount") and any(each.is_floating_point() for each in read)
        if sums or what.removesuffix("_") in UNORDERED:
            self.nondeterministic.add(what)


class KernelOnGPU:
    """FBGEMM's module as :class:`TableKernel` calls it, on the CPU. Torch's modes are off: they end the process in C++."""

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


def _memory_of(module: Any) -> list[Tensor]:
    held = [each for each in vars(module).values() if isinstance(each, Tensor)]
    return [*held, *module.parameters(), *module.buffers(), *module.split_embedding_weights()]


class Watched:
    """A simulated GPU with streams that are clocks, for the rest of this process, and what its modes observe."""

    def __init__(self, model: nn.Module, tables: ShardedTables) -> None:
        self.accesses, self.gpu = Operations(), PretendedGPU()
        tables.device = GPU
        self.gpu.take(*model.parameters(), *model.buffers())
        for _, module in tables.modules:
            for kernel in kernels(module):
                self.gpu.take(*_memory_of(kernel.emb_module))
        install(self.accesses)
        exchange, run = RowTransport.exchange, ExchangeWorker._run_in_order

        def exchange_watched(transport: RowTransport, received: Any, message: Any, *args: Any, **kwargs: Any) -> None:
            exchange(transport, received, message, *args, **kwargs)
            self.accesses.add("exchange", [message], [received], [])

        def run_inside(*args: Any) -> Any:  # torch's modes belong to one thread
            with self.modes():
                return run(*args)

        RowTransport.exchange, ExchangeWorker._run_in_order = exchange_watched, run_inside

    @contextmanager
    def modes(self) -> Iterator[None]:
        with Watch(self.accesses), self.gpu.active():
            yield


def _train(kind: str, *, on_gpu: bool, holds: bool = False, **options: Any) -> tuple[Run, Watched | None]:
    """Train the sequence model; ``holds`` clips the gradients."""
    data = batches(dist.get_rank(), STEPS)
    with sharded(OPTIMIZERS[kind]) as (model, ddp, tables, dense):
        watched = Watched(model, tables) if on_gpu else None
        with nullcontext() if watched is None else watched.gpu.active():  # objects created now are kept
            if watched is not None:
                data = [{name: each.to(GPU) for name, each in batch.items()} for batch in data]
            engine = OverlapEngine(tables, hold_gradients=holds, transport="native", **options)
            for collection in engine.collections.values() if watched is not None else ():
                for kernel in collection.local.kernels:
                    kernel.module = KernelOnGPU(kernel.module, watched.gpu, watched.accesses)
        inside, losses = nullcontext if watched is None else watched.modes, []
        for step, (batch, following) in enumerate(zip(data, [*data[1:], None])):
            with inside():
                engine.begin_step(_upcoming(step, following))
                dense.zero_grad()
                loss = ddp(batch)
                loss.backward()
                engine.end_backward()
                if holds:
                    norm = engine.square_sum().sqrt()
                    engine.scale_gradients(torch.clamp(1.0 / (norm + 1e-6), max=1.0).float())
                    engine.clamp_gradients(0.01)
                    engine.apply_gradients()
                losses.append(loss.item())
            dense.step()  # outside: Adam orders its operations differently on CUDA
        with inside():
            engine.drain()
            statistics = engine.statistics()
            engine.close()
        run = result_of(model, tables, losses)
        run.statistics = statistics
        return run, watched


def _upcoming(step: int, following: Batch | None) -> NextIds | None:
    """Return copies, as on CUDA: one step has no ids, and one step has the ids of another batch."""
    if following is None or step == 3:
        return None if following is None else {}
    upcoming = batches(dist.get_rank(), 1)[0] if step == 6 else following
    return {path: copy_of(each).to(following["labels"].device) for path, each in known(upcoming).items()}


def _note_calls(owner: type, name: str, calls: list[str]) -> None:
    function = vars(owner)[name]

    def noted(*args: Any) -> Any:
        calls.append(owner.__name__)
        return function(*args)

    setattr(owner, name, noted)


def _both(kind: str, options: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    calls: list[str] = []
    for owner, name in ((IdExchange, "_exchange_apart"), (TableKernel, "update"), (CpuKernel, "update")):
        _note_calls(owner, name, calls)
    plain, _ = _train(kind, on_gpu=False, **options)
    assert set(calls) == {"CpuKernel"}
    calls.clear()
    run, watched = _train(kind, on_gpu=True, **options)
    assert set(calls) == {"IdExchange", "TableKernel"}, "the GPU takes its own way"
    names = ("predicted_lookups", "unpredicted_lookups", "mispredicted_lookups", "colliding_bytes")
    found = {
        "differences": differences(run, plain),
        "counted otherwise": [name for name in names if run.statistics[name] != plain.statistics[name]],
        "nondeterministic": [*watched.accesses.nondeterministic],
        "unordered": [*watched.accesses.unordered],
        "unrecorded": [*watched.accesses.unrecorded],
    }
    assert watched.accesses.seen > 100 * STEPS, "it has looked at something"
    assert {"freescale-items", "freescale-tags"} <= watched.gpu.waits.keys()
    return plain, found


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("rowwise_adagrad", {}),
        ("adagrad", {"dedup": True, "holds": True}),
        ("adagrad", {**HOT, "holds": True}),
        pytest.param("rowwise_adagrad", {"holds": True}, marks=pytest.mark.slow),
        pytest.param("sgd", {"dedup": True}, marks=pytest.mark.slow),
        pytest.param("adagrad", HOT, marks=pytest.mark.slow),
    ],
)
def test_numbers_order_of_streams_and_determinism(kind: str, options: dict[str, Any]) -> None:
    for plain, found in run_distributed(_both, 2 * options.get("ranks_per_node", 1), kind, options):
        assert len(set(plain.losses)) > STEPS / 2 and plain.statistics["mispredicted_lookups"] > 0
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


def _faults() -> tuple[int, set[str]]:
    """Test events that order nothing, and a nondeterministic operation."""
    ClockStream.events_count = False
    accesses = _train("adagrad", on_gpu=True, dedup=True)[1].accesses
    with Watch(accesses):
        torch.zeros(2).index_add_(0, torch.tensor([1, 1]), torch.ones(2)).cumsum(0)
    return len(accesses.unordered), accesses.nondeterministic


def test_the_checks_find_faults() -> None:
    for unordered, nondeterministic in run_distributed(_faults, 2):
        assert unordered > 10 and nondeterministic == {"index_add_", "cumsum"}
