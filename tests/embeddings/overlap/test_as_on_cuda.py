"""What the engine does on CUDA alone, on a pretended GPU, as there is none here.

The numbers are those of the CPU, events order all that streams share, and no operation is one that torch documents as
nondeterministic on CUDA.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.embeddings.overlap.id_exchange import IdExchange
from lightning_freescale.embeddings.overlap.local_rows import CpuKernel, TableKernel
from lightning_freescale.embeddings.overlap.row_requests import RowRequest
from lightning_freescale.embeddings.overlap.transport import Transport
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.gpu_training import train
from tests.helpers.jagged import copy_of
from tests.helpers.nondeterministic import WatchDeterminism
from tests.helpers.pretended_gpu import GPU
from tests.helpers.sequences import OPTIMIZERS, Batch, NextIds, Run, batches, differences, known
from tests.helpers.stream_clocks import Accesses, ClockStream, Watch

STEPS = 10


class Watched:
    """A run on the pretended GPU, and what was seen of it."""

    def __init__(self, kind: str, steps: int = STEPS, **options: Any) -> None:
        self.nondeterministic: set[str] = set()
        self.listed: list[str] = []
        self.accesses = Accesses()
        watches = [partial(WatchDeterminism, self.nondeterministic, self.listed), partial(Watch, self.accesses)]
        exchange = Transport.exchange

        def exchange_watched(transport: Transport, received: Any, message: Any, *args: Any, **kwargs: Any) -> None:
            exchange(transport, received, message, *args, **kwargs)
            self.accesses.add("exchange", [message], [received], [])

        Transport.exchange = exchange_watched
        self.run, self.waits = train(
            OPTIMIZERS[kind],
            batches(dist.get_rank(), steps),
            on_gpu=True,
            told=_told,
            watches=watches,
            accesses=self.accesses,
            **options,
        )


def _told(step: int, following: Batch | None) -> NextIds | None:
    """Copies, as they are on CUDA; in one step nothing, in one the ids of another batch."""
    if following is None or step == 3:
        return None if following is None else {}
    told = batches(dist.get_rank(), 1)[0] if step == 6 else following
    return {path: copy_of(each).to(following["labels"].device) for path, each in known(told).items()}


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
    plain, none = train(OPTIMIZERS[kind], batches(dist.get_rank(), STEPS), on_gpu=False, told=_told, **options)
    assert set(calls) == {"CpuKernel"} and not none
    calls.clear()
    watched = Watched(kind, **options)
    assert set(calls) == {"IdExchange", "TableKernel"}, "the GPU takes its own way"
    names = ("predicted_lookups", "unpredicted_lookups", "mispredicted_lookups", "colliding_bytes")
    found = {
        "differences": differences(watched.run, plain),
        "counted otherwise": [name for name in names if watched.run.statistics[name] != plain.statistics[name]],
        "nondeterministic": [*watched.nondeterministic],
        "unordered": [*watched.accesses.unordered],
        "unrecorded": [*watched.accesses.unrecorded],
    }
    assert "index_put_" in watched.listed and watched.accesses.seen > 100 * STEPS, "it has looked at something"
    assert {"freescale-items", "freescale-tags"} <= watched.waits.keys()
    return plain, found


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("rowwise_adagrad", {}),
        ("adagrad", {"dedup": True, "holds": True}),
        ("adagrad", {"dedup": True, "holds": True, "exchange": "two_level", "ranks_per_node": 2}),
        pytest.param("rowwise_adagrad", {"holds": True}, marks=pytest.mark.slow),
        pytest.param("sgd", {"dedup": True}, marks=pytest.mark.slow),
        pytest.param("adagrad", {"dedup": True, "exchange": "two_level", "ranks_per_node": 2}, marks=pytest.mark.slow),
    ],
)
def test_numbers_order_of_streams_and_determinism(kind: str, options: dict[str, Any]) -> None:
    for plain, found in run_distributed(_both, 2 * options.get("ranks_per_node", 1), kind, options):
        assert len(set(plain.losses)) > STEPS / 2 and plain.statistics["mispredicted_lookups"] > 0
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


def _with_ids_of_the_host() -> None:
    update = TableKernel.update

    def update_with_ids_of_the_host(self: TableKernel, rows: Any, settings: Any) -> None:
        update(self, {index: (ids.cpu(), gradients) for index, (ids, gradients) in rows.items()}, settings)

    TableKernel.update = update_with_ids_of_the_host
    Watched("sgd", 4)


def _faults() -> tuple[set[str], set[str]]:
    """Events that order nothing, and gradients that a GPU would add in any order."""

    def sum_per_row(self: RowRequest, gradient: Tensor) -> Tensor:
        rows = torch.empty_like(self.order)
        rows[self.order] = torch.searchsorted(self.first, torch.arange(len(self.order), device=GPU), right=True).int() - 1
        return gradient.new_zeros(len(self.rows), gradient.shape[1]).index_add_(0, rows, gradient)

    RowRequest.sum_per_row, ClockStream.events_count = sum_per_row, False
    watched = Watched("adagrad", dedup=True)
    return watched.nondeterministic, watched.accesses.unordered


def test_the_checks_find_faults() -> None:
    with pytest.raises(RankFailed, match="expected all tensors to be on the same device"):
        run_distributed(_with_ids_of_the_host, 1)
    for nondeterministic, unordered in run_distributed(_faults, 2):
        assert [text.split(" at ")[0] for text in nondeterministic] == ["index_add_"]
        assert len(unordered) > 10


def test_the_check_of_determinism_knows_the_forms() -> None:
    found: set[str] = set()
    target, twice = torch.zeros(3), torch.tensor([1, 1])
    with WatchDeterminism(found, []):
        target[twice] = torch.tensor([2.0, 2.0])
        target[twice] = 5.0
        torch.arange(3).cumsum(0), torch.bincount(twice)
        assert not found, "whichever value stays, it is the same"
        target[twice] = torch.tensor([2.0, 3.0])
        torch.ones(3).cumsum(0), torch.bincount(twice, torch.ones(2))
    assert {text.split(" at ")[0] for text in found} == {"index_put_", "cumsum", "bincount"}
