"""A tensor that cannot be sent is a ValueError where it is, an error everywhere else, and no harm to the next collective."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import SOON, TIMEOUT, Outcome, everyone_sends, make_group, nothing_left, outcome

Call = Callable[[Any, bool], Any]


def _single(given: Tensor, out: Tensor | None = None, received: list[int] | None = None, sent: list[int] | None = None) -> Call:
    out = torch.empty_like(given) if out is None else out
    return lambda group, async_op: dist.all_to_all_single(out, given, received, sent, group, async_op)


def _listed(given: list[Tensor], out: list[Tensor]) -> Call:
    return lambda group, async_op: dist.all_to_all(out, given, group, async_op)


def _gathered(given: Tensor, out: list[Tensor]) -> Call:
    return lambda group, async_op: dist.all_gather(out, given, group, async_op)


def _gathered_into(given: Tensor, out: Tensor) -> Call:
    return lambda group, async_op: dist.all_gather_into_tensor(out, given, group, async_op)


def _raw(name: str, *lists: Any) -> Call:
    """A method of the group itself, which takes lists of lists."""
    return lambda group, async_op: getattr(group, name)(*lists).wait()


def _parts(count: int) -> list[Tensor]:
    return [torch.ones(2) for _ in range(count)]


SOUND: dict[str, Callable[[int], Call]] = {
    "all_to_all_single": lambda n: _single(torch.ones(2 * n)),
    "all_to_all": lambda n: _listed(_parts(n), _parts(n)),
    "all_gather": lambda n: _gathered(torch.ones(2), _parts(n)),
    "all_gather_single": lambda n: _gathered_into(torch.ones(2), torch.empty(2 * n)),
}
SCALES = {"scale": 0.1, "zero_point": 0, "dtype": torch.quint8}
REFUSED: dict[str, tuple[str, Callable[[int], Call], str]] = {
    "sizes that miss rows": ("all_to_all_single", lambda n: _single(torch.ones(2 * n), sent=[1] * n), "input_split_sizes="),
    "sizes of too many rows": ("all_to_all_single", lambda n: _single(torch.ones(2 * n), None, [3] * n), "output_split_sizes="),
    "a size too few": ("all_to_all_single", lambda n: _single(torch.ones(2 * n), None, [2 * n], None), "one size per rank"),
    "a negative size": (
        "all_to_all_single",
        lambda n: _single(torch.ones(2 * n), sent=[-1, 2 * n + 1] + [0] * (n - 2)),
        "none negative",
    ),
    "rows that cannot be shared": ("all_to_all_single", lambda n: _single(torch.ones(2 * n + 1)), "cannot share equally"),
    "an own part of two sizes": (
        "all_to_all_single",
        lambda n: _single(torch.ones(2 * n), torch.empty(2 * n + 1), [2, 3] + [2] * (n - 2), [2] * n),
        "",
    ),
    "a strided input": ("all_to_all_single", lambda n: _single(torch.ones(2 * n, 2).T, torch.ones(2, 2 * n)), "contiguous"),
    "a strided output": ("all_to_all_single", lambda n: _single(torch.ones(2 * n), torch.ones(4 * n)[::2]), "contiguous"),
    "a quantized tensor": (
        "all_to_all_single",
        lambda n: _single(torch.quantize_per_tensor(torch.ones(2 * n), **SCALES)),
        "dtype torch.quint8, which cannot be sent",
    ),
    "a sparse input": ("all_to_all_single", lambda n: _single(torch.ones(2 * n).to_sparse(), torch.ones(2 * n)), "sparse"),
    "a sparse output": ("all_to_all_single", lambda n: _single(torch.ones(2 * n), torch.ones(2 * n).to_sparse()), "sparse"),
    "tensors without memory": ("all_to_all_single", lambda n: _single(torch.ones(2 * n, device="meta")), "on meta"),
    "a tensor without memory": (
        "all_to_all_single",
        lambda n: _single(torch.ones(2 * n), torch.ones(2 * n, device="meta")),
        "on meta",
    ),
    "too few inputs": ("all_to_all", lambda n: _listed(_parts(n - 1), _parts(n)), "input tensors for"),
    "too many outputs": ("all_to_all", lambda n: _listed(_parts(n), _parts(n + 1)), "output tensors for"),
    "no tensors": ("all_to_all", lambda n: _listed([], []), "0 input tensors for"),
    "a sparse part": ("all_to_all", lambda n: _listed([torch.ones(2).to_sparse(), *_parts(n - 1)], _parts(n)), "sparse"),
    "a strided part": ("all_to_all", lambda n: _listed(_parts(n), [torch.ones(4)[::2], *_parts(n - 1)]), "contiguous"),
    "too few to gather": ("all_gather", lambda n: _gathered(torch.ones(2), _parts(n - 1)), "output tensors for"),
    "none to gather": ("all_gather", lambda n: _gathered(torch.ones(2), []), "0 output tensors for"),
    "an own part that is larger": (
        "all_gather",
        lambda n: _gathered(torch.ones(2), [torch.ones(2), torch.ones(3), *_parts(n - 2)]),
        "",
    ),
    "lists of no tensors": ("all_gather", lambda n: _raw("allgather", [], []), "0 lists of outputs for 0 inputs"),
    "no list to gather": ("all_gather", lambda n: _raw("allgather", [], [torch.ones(2)]), "0 lists of outputs for 1 inputs"),
    "nothing to gather": ("all_gather", lambda n: _raw("allgather", [[]], []), "1 lists of outputs for 0 inputs"),
    "two tensors to gather": (
        "all_gather",
        lambda n: _raw("allgather", [_parts(n), _parts(n)], _parts(2)),
        "2 lists of outputs for 2 inputs",
    ),
    "no lists at all": ("all_gather", lambda n: _raw("allgather_coalesced", [], []), "lists of [] outputs"),
    "lists for nothing": ("all_gather", lambda n: _raw("allgather_coalesced", [[]] * n, []), "and 0 inputs"),
    "lists of nothing": (
        "all_gather",
        lambda n: _raw("allgather_coalesced", [[]] * n, _parts(1)),
        "ranks and 1 inputs",
    ),
    "a list too few": ("all_gather", lambda n: _raw("allgather_coalesced", [_parts(1)] * (n - 1), _parts(1)), "] outputs"),
    "no outputs to gather into": (
        "all_gather_single",
        lambda n: _raw("allgather_into_tensor_coalesced", [], _parts(1)),
        "0 outputs for 1 inputs",
    ),
    "no pairs to gather": (
        "all_gather_single",
        lambda n: _raw("allgather_into_tensor_coalesced", [], []),
        "0 outputs for 0 inputs",
    ),
    "a strided tensor to gather": ("all_gather", lambda n: _gathered(torch.ones(4)[::2], _parts(n)), "contiguous"),
    "room that cannot be shared": (
        "all_gather_single",
        lambda n: _gathered_into(torch.ones(2), torch.empty(2 * n + 1)),
        "cannot share equally",
    ),
    "room for larger parts": ("all_gather_single", lambda n: _gathered_into(torch.ones(2), torch.empty(3 * n)), ""),
    "strided room": ("all_gather_single", lambda n: _gathered_into(torch.ones(2), torch.empty(4 * n)[::2]), "contiguous"),
    "sparse room": ("all_gather_single", lambda n: _gathered_into(torch.ones(2), torch.ones(2 * n).to_sparse()), "sparse"),
}


def _attempts(case: str, ranks: list[int] | None = None) -> list[Outcome] | None:
    """A sync and an async call, each on a group of its own."""
    with nothing_left():
        groups = [make_group(ranks=ranks), make_group(ranks=ranks)]
        if ranks is not None and dist.get_rank() not in ranks:
            return None
        name, refused, _ = REFUSED[case]
        call = (refused if dist.get_rank() == 1 else SOUND[name])(groups[0].size())
        attempts = [outcome(call, group, async_op) for group, async_op in zip(groups, (False, True))]
        for group in groups:
            dist.destroy_process_group(group)
        del groups, group
    return attempts


def _assert_refused(case: str, rank: int, attempts: list[Outcome]) -> None:
    name, _, words = REFUSED[case]
    assert len(attempts) == 2
    for failed in attempts:
        assert failed.kind == ("ValueError" if rank == 1 else "DistBackendError"), failed
        assert failed.text.startswith(f"freescale {name}, lane 'rows': " + "rank 1 cannot take part: " * (rank != 1))
        assert words in failed.text
        assert failed.seconds < SOON


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", REFUSED)
def test_one_rank_refuses_and_all_know(case: str, size: int) -> None:
    for rank, attempts in enumerate(run_distributed(_attempts, size, case, timeout=60)):
        _assert_refused(case, rank, attempts)


LISTS = [case for case, (_, _, words) in REFUSED.items() if words.endswith(("inputs", "outputs", "tensors for"))]


def _refused_by_gloo() -> dict[str, str]:
    said = {}
    for case in LISTS:
        gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT))
        said[case] = outcome(REFUSED[case][1](gloo.size()), gloo, False).kind
    return said


def test_gloo_refuses_the_same_lists() -> None:
    for said in run_distributed(_refused_by_gloo, 2, timeout=60):
        assert len(said) == 15 and all(said.values()), said


def _goes_on(rows: int) -> list[Outcome]:
    """One refusal, then sound calls, on one group."""
    group = make_group()
    call = _single(torch.ones(7), sent=[7]) if dist.get_rank() == 1 else _single(torch.ones(rows * group.size()))
    return [outcome(call, group, True), *(outcome(everyone_sends, group, rows, async_op) for async_op in (False, True))]


@pytest.mark.parametrize("rows", [3, 100_000])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_refusal_ends_the_lane(size: int, rows: int) -> None:
    for attempts in run_distributed(_goes_on, size, rows, timeout=60):
        first, *later = attempts
        assert "input_split_sizes=[7]" in first.text
        for failed in later:
            assert failed.kind == "DistBackendError" and "input_split_sizes=[7]" in failed.text and failed.seconds < SOON


def test_a_subgroup_names_the_global_rank() -> None:
    outside, *inside = run_distributed(_attempts, 3, "a quantized tensor", [1, 2], timeout=60)
    assert outside is None
    for rank, attempts in enumerate(inside, 1):
        _assert_refused("a quantized tensor", rank, attempts)


def _all_refuse() -> Outcome:
    group, rank = make_group(), dist.get_rank()
    calls = [_single(torch.ones(7)), _single(torch.ones(6), sent=[6]), _single(torch.ones(6))]
    return outcome(calls[rank], group, False)


def test_several_refuse_and_the_others_hear_of_each() -> None:
    first, second, third = run_distributed(_all_refuse, 3)
    assert [first.kind, second.kind, third.kind] == ["ValueError", "ValueError", "DistBackendError"]
    assert "rank 0 cannot take part" in third.text and "rank 1 cannot take part" in third.text


def _let_go() -> bool:
    gc.disable()
    group = make_group()
    cannot = torch.ones(2, device="meta" if dist.get_rank() else "cpu")
    assert outcome(_single(cannot), group, False).kind
    dist.destroy_process_group(group)
    alive = weakref.ref(group)
    del group
    return alive() is None


def test_a_group_that_refused_is_let_go_without_the_garbage_collector() -> None:
    assert run_distributed(_let_go, 2) == [True, True]


def _alone() -> list[str]:
    calls = [_single(torch.ones(2), torch.empty(3)), _gathered_into(torch.ones(3), torch.empty(2)), _single(torch.ones(2))]
    return [outcome(call, make_group(chunk_bytes=4), False).kind for call in calls]


def test_a_rank_alone_refuses_to_send_itself_another_size() -> None:
    assert run_distributed(_alone, 1) == [["ValueError", "ValueError", ""]]
