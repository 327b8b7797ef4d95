"""If ranks call different collectives, or pass tensors that do not fit, all ranks get an error, and the lane ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm.collectives.handshake import Header, _check_header
from lightning_freescale.comm.transports.transport import Transfer
from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import (
    CALLS,
    CHUNK,
    LONG,
    SHORT,
    Outcome,
    all_to_all,
    assert_ended,
    exchange,
    make_group,
    nothing_left,
    outcome,
)

Survivors = Callable[..., dict[int, Any]]
TIMEOUT = 1.5


def _gather_on_rank_1(group: Any, async_op: bool) -> Any:
    parts = [torch.empty(SHORT) for _ in range(group.size())]
    if group.rank() == 1:
        return dist.all_gather(parts, parts[0], group, async_op)
    return all_to_all(group, async_op=async_op)


def _int_on_rank_1(call: Callable[..., Any], group: Any, async_op: bool) -> Any:
    return call(group, dtype=torch.int32 if group.rank() == 1 else torch.float32)


def _one_way(one: int, other: int, group: Any, async_op: bool) -> Any:
    """Send ``one`` bytes from rank 0 to rank 1, which expects ``other`` bytes."""
    n, rank = group.size(), group.rank()
    sent, expected = ([length * (rank == of and peer == 1 - of) for peer in range(n)] for of, length in ((0, one), (1, other)))
    tensors = (torch.empty(sum(sizes), dtype=torch.uint8) for sizes in (expected, sent))
    return dist.all_to_all_single(*tensors, expected, sent, group, async_op)


def _misfit(part: int, group: Any, async_op: bool) -> Any:
    return all_to_all(group, part, missing=1, async_op=async_op)


def _overflow(part: int, group: Any, async_op: bool) -> None:
    """Send one element more from rank 1 than the slots hold."""
    exchange(group, part + (group.rank() == 1), part)


def _left_out_by_rank_0(group: Any, async_op: bool) -> None:
    exchange(group, 0 if group.rank() == 0 else SHORT)


# the actions of the ranks, the words of the error, and the ranks whose first call fails
DISAGREEMENTS: dict[str, tuple[Callable[[Any, bool], Any], Sequence[str], Sequence[int], dict[str, Any]]] = {
    "short parts do not fit": (partial(_misfit, 9), ("9", "8"), (0, 1), {}),
    "long parts do not fit": (partial(_misfit, LONG), (str(LONG), str(LONG - 1)), (0, 1), {}),
    "one row where none is expected": (partial(_one_way, 1, 0), ("1",), (0, 1), {}),
    **{
        f"{one} and {other} bytes, whose tags are alike": (partial(_one_way, one, other), (str(one), str(other)), (0, 1), {})
        for one, other in [(2_605_024, 952), (952, 2_605_024), (2**20 + 1000, 1000), (3 * 2**20, 2**20)]
    },
    "another collective": (_gather_on_rank_1, ("all_gather",), (0, 1), {}),
    "another dtype": (partial(_int_on_rank_1, all_to_all), ("torch.int32",), (0, 1), {}),
    "another dtype in an exchange": (partial(_int_on_rank_1, exchange), ("torch.int32",), (0, 1), {}),
    **{
        f"{part} bytes too long for their slots, {transport}": (
            *(partial(_overflow, part), ("rank 1", str(part + 1), str(part)), (0, 2)),
            {"transport": transport},
        )
        for part in (SHORT, LONG)
        for transport in ("auto", "native")
    },
    "left out of an exchange on one side": (_left_out_by_rank_0, ("exchange",), (1,), {"timeout": TIMEOUT}),
}


def _disagree(async_op: bool) -> dict[str, list[Outcome]]:
    seen = {}
    for case, (act, _, _, options) in DISAGREEMENTS.items():
        with nothing_left():
            group = make_group(chunk_bytes=CHUNK if "tags" not in case else 2**20, **options)
            seen[case] = [outcome(act, group, async_op)]
            again = [exchange] * 2 if "exchange" in case or "slots" in case else CALLS.values()
            seen[case] += [outcome(call, group) for call in again]
            dist.barrier()  # so that no error comes from a destroyed group
            dist.destroy_process_group(group)
            del group
    return seen


@pytest.mark.parametrize(("size", "async_op"), [(2, True), pytest.param(3, False, marks=pytest.mark.slow)])
def test_ranks_that_do_not_agree_all_fail_and_the_lane_ends(size: int, async_op: bool) -> None:
    for rank, seen in enumerate(run_distributed(_disagree, size, async_op, timeout=100)):
        for case, (_, words, at_once, _) in DISAGREEMENTS.items():
            assert_ended(seen[case], *words, late=rank not in at_once)
            assert rank or at_once[0] != 0 or "rank 1 " in seen[case][0].text, seen[case]


def test_tensors_on_cpu_and_gpu_are_not_one_collective() -> None:
    nothing = [torch.empty(0, dtype=torch.uint8)] * 2
    transfer = Transfer("all_gather", nothing, nothing, 0, torch.device("cpu"), timedelta(seconds=1), 0)
    with pytest.raises(dist.DistBackendError, match=r"rank 1 .*CUDA.*CPU"):
        _check_header(transfer, Header("all_gather", 0, 0, 0, 0, on_gpu=True), 1, 1)


def _misuse() -> dict[str, list[Outcome]]:
    two, seen = torch.ones(2), {}
    wrong: dict[str, tuple[Any, ...]] = {
        "gets=[2]": (torch.empty(2), two, [2], [2, 0]),
        "own rank 1": (torch.empty(2), two, [2, 0], [1, 1]),
        "gives=[3, -1]": (torch.empty(2), two, [2, 0], [3, -1]),
        "length 3": (torch.empty(3), two, [2, 0], [2, 0]),
        "(2, 1)": (torch.empty(2, 1), two, [2, 0], [2, 0]),
        "received=": (torch.empty(4)[::2], two, [2, 0], [2, 0]),
        "meta": (torch.empty(2), torch.ones(2, device="meta"), [2, 0], [2, 0]),
        "complex64": (torch.empty(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64).conj(), [2, 0], [2, 0]),
        "negated": (torch.empty(2), torch.ones(2, dtype=torch.complex64).conj().imag, [2, 0], [2, 0]),
        "torch.int32": (torch.empty(2), torch.ones(2, dtype=torch.int32), [2, 0], [2, 0]),
    }
    for case, arguments in wrong.items():
        group = make_group()
        exchange(group)
        arguments = arguments if group.rank() == 1 else (two, two.clone(), [0, 2], [0, 2])
        seen[case] = [outcome(group.exchange, *arguments), outcome(exchange, group)]
    return seen


def test_a_wrong_argument_of_an_exchange_is_an_error_on_every_rank() -> None:
    other, own = run_distributed(_misuse, 2, timeout=60)
    for case, (first, after) in own.items():
        assert first.kind == "ValueError" and after.kind == "DistBackendError", case
        word = "send=" if case == "negated" else case
        assert all(word in each.text for each in (first, after, *other[case])), (case, first, other[case])
        assert all(each.kind == "DistBackendError" and "rank 1" in each.text for each in other[case]), case
