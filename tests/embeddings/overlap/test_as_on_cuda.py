"""What the engine does on CUDA alone gives the numbers of the CPU: on a pretended GPU, as there is none here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.embeddings.overlap.id_exchange import IdExchange
from lightning_freescale.embeddings.overlap.local_rows import CpuKernel, TableKernel
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.gpu_training import train
from tests.helpers.jagged import copy_of
from tests.helpers.pretended_gpu import GPU, PretendedGPU
from tests.helpers.sequences import OPTIMIZERS, Batch, NextIds, Run, batches, known

STEPS = 12


def _told(step: int, following: Batch | None) -> NextIds | None:
    """Copies, as they are on CUDA; in one step nothing, in one the ids of another batch."""
    if following is None or step == 3:
        return None if following is None else {}
    told = batches(dist.get_rank(), 1)[0] if step == 6 else following
    return {path: copy_of(each).to(following["labels"].device) for path, each in known(told).items()}


def _trained(on_gpu: bool, kind: str, **options: Any) -> tuple[Run, dict[str, int]]:
    calls: list[str] = []
    for owner, name in ((IdExchange, "_exchange_apart"), (TableKernel, "update"), (CpuKernel, "update")):
        _note_calls(owner, name, calls)
    run, waits = train(OPTIMIZERS[kind], batches(dist.get_rank(), STEPS), on_gpu=on_gpu, told=_told, **options)
    assert set(calls) == ({"IdExchange", "TableKernel"} if on_gpu else {"CpuKernel"}), "each takes its own way"
    return run, waits


def _note_calls(owner: type, name: str, calls: list[str]) -> None:
    function = vars(owner)[name]

    def noted(*args: Any) -> Any:
        calls.append(owner.__name__)
        return function(*args)

    setattr(owner, name, noted)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("rowwise_adagrad", {}),
        ("adagrad", {"dedup": True}),
        ("rowwise_adagrad", {"holds": True}),
        ("adagrad", {"dedup": True, "exchange": "two_level", "ranks_per_node": 2}),
        pytest.param("sgd", {}, marks=pytest.mark.slow),
        pytest.param("adagrad", {"holds": True, "dedup": True}, marks=pytest.mark.slow),
    ],
)
def test_the_numbers_are_those_of_the_cpu(kind: str, options: dict[str, Any]) -> None:
    ranks = 2 * options.get("ranks_per_node", 1)
    plain, pretended = (run_distributed(_trained, ranks, on_gpu, kind, **options) for on_gpu in (False, True))
    for (expected, none), (run, waits) in zip(plain, pretended):
        assert run.losses == expected.losses and len(set(run.losses)) > STEPS / 2
        for mine, theirs in ((run.tables, expected.tables), (run.dense, expected.dense)):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        for name in ("predicted_lookups", "unpredicted_lookups", "mispredicted_lookups", "colliding_bytes"):
            assert run.statistics[name] == expected.statistics[name]
        assert run.statistics["mispredicted_lookups"] > 0
        assert not none and {"freescale-items", "freescale-tags"} <= waits.keys()


def _mixes() -> None:
    update = TableKernel.update

    def update_with_ids_of_the_host(self: TableKernel, rows: Any, settings: Any) -> None:
        update(self, {index: (ids.cpu(), gradients) for index, (ids, gradients) in rows.items()}, settings)

    TableKernel.update = update_with_ids_of_the_host
    train(OPTIMIZERS["sgd"], batches(dist.get_rank(), 4), on_gpu=True)


def test_what_mixes_host_and_gpu_is_seen() -> None:
    with pytest.raises(RankFailed, match="expected all tensors to be on the same device"):
        run_distributed(_mixes, 1)


def test_a_pretended_gpu_is_as_a_real_one() -> None:
    """What torch does with tensors on a GPU and on the host."""
    gpu, host = PretendedGPU(), torch.arange(4.0)
    with gpu.active():
        there = host.to(GPU)
        assert there.is_cuda and there.device == GPU and not host.is_cuda and host.device.type == "cpu"
        for made in (
            there + 1,
            there[:2],
            there.long(),
            there.new_zeros(2),
            there.new_tensor([1.0]),
            torch.ones(2, device=GPU),
        ):
            assert made.is_cuda
        of_the_host = (there.cpu(), there.to("cpu"), there.new_zeros(2, device="cpu"), torch.ones(2))
        assert not any(each.is_cuda for each in of_the_host)
        assert (there * torch.tensor(2.0)).is_cuda, "a number of the host goes with all"
        assert there[torch.tensor([1, 0])].is_cuda, "numbers of the host may choose"
        for wrong in (lambda: there + host, lambda: host[there.long()], lambda: torch.cat([there, host])):
            with pytest.raises(RuntimeError, match="same device"):
                wrong()
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        there.tolist()
        host.copy_(there)
    assert gpu.waits == {"MainThread": 4} and not there.is_cuda
