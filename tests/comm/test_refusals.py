"""Tensors that cannot be sent raise ValueError on their rank and an error on all others, and end the lane."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm import ProcessGroupFreeScaleOptions
from lightning_freescale.comm.options import MAX_CHUNK_BYTES, TRANSPORTS
from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import SOON, Outcome, everyone_sends, make_group, nothing_left, outcome

Call = Callable[[Any, bool], Any]


def _single(given: Tensor, out: Tensor | None = None, received: list[int] | None = None, sent: list[int] | None = None) -> Call:
    out = torch.empty_like(given) if out is None else out
    return lambda group, async_op: dist.all_to_all_single(out, given, received, sent, group, async_op)


def _listed(given: list[Tensor], out: list[Tensor]) -> Call:
    return lambda group, async_op: dist.all_to_all(out, given, group, async_op)


def _gathered(given: Tensor, out: list[Tensor]) -> Call:
    return lambda group, async_op: dist.all_gather(out, given, group, async_op)


def _into(given: Tensor, out: Tensor) -> Call:
    return lambda group, async_op: dist.all_gather_into_tensor(out, given, group, async_op)


def _raw(name: str, *lists: Any) -> Call:
    """Call a method of the group itself, which takes lists of lists."""
    return lambda group, async_op: getattr(group, name)(*lists).wait()


def _ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


def _parts(count: int) -> list[Tensor]:
    return [torch.ones(2) for _ in range(count)]


SPARSE, META, STRIDED = _ones(2).to_sparse(), torch.ones(4, device="meta"), _ones(4)[::2]
QUANTIZED = torch.quantize_per_tensor(_ones(4), 0.1, 0, torch.quint8)
SENT: dict[str, tuple[Call, str]] = {
    "sizes that miss rows": (_single(_ones(4), sent=[1, 1]), "input_split_sizes=[1, 1]"),
    "sizes of too many rows": (_single(_ones(4), received=[3, 3]), "output_split_sizes=[3, 3]"),
    "a size too few": (_single(_ones(4), received=[4]), "output_split_sizes=[4]"),
    "a negative size": (_single(_ones(4), sent=[-1, 5]), "input_split_sizes=[-1, 5]"),
    "rows that ranks cannot share": (_single(_ones(5)), "length 5"),
    "an own part of two sizes": (_single(_ones(4), _ones(5), [2, 3], [2, 2]), "12"),
    "two dtypes": (_raw("alltoall_base", _ones(4).int(), _ones(4), [], []), "torch.int32"),
    "a strided input": (_single(_ones(4, 2).T, _ones(2, 4)), "input"),
    "a quantized tensor": (_single(QUANTIZED, QUANTIZED), "torch.quint8"),
    "a sparse input": (_single(SPARSE, _ones(2)), "input"),
    "no memory": (_single(META, META), "meta"),
}
SENT_AS_LISTS: dict[str, tuple[Call, str]] = {
    "too few inputs": (_listed(_parts(1), _parts(2)), "1 input"),
    "too many outputs": (_listed(_parts(2), _parts(3)), "3 output"),
    "no tensors": (_listed([], []), "0 input"),
    "a sparse part": (_listed([SPARSE, *_parts(1)], _parts(2)), "sparse"),
    "parts of two dtypes": (_raw("alltoall", _parts(2), [_ones(2).int(), _ones(2)]), "torch.int32"),
}
GATHERED: dict[str, tuple[Call, str]] = {
    "too few to gather": (_gathered(_ones(2), _parts(1)), "1 output"),
    "no list to gather": (_raw("allgather", [], _parts(1)), "0 output"),
    "nothing to gather": (_raw("allgather", [[]], []), "0 input"),
    "two tensors to gather": (_raw("allgather", [_parts(2), _parts(2)], _parts(2)), "4 input"),
    "an own part that is larger": (_gathered(_ones(2), [_ones(2), _ones(3)]), "12"),
    "a strided tensor to gather": (_gathered(STRIDED, _parts(2)), "input"),
}
GATHERED_INTO: dict[str, tuple[Call, str]] = {
    "an output that ranks cannot share": (_into(_ones(2), _ones(5)), "length 5"),
    "an output for larger parts": (_into(_ones(2), _ones(6)), "12"),
}
REFUSED = {
    case: (name, sound, *refused)
    for name, sound, table in (
        ("all_to_all_single", _single(_ones(4)), SENT),
        ("all_to_all", _listed(_parts(2), _parts(2)), SENT_AS_LISTS),
        ("all_gather", _gathered(_ones(2), _parts(2)), GATHERED),
        ("all_gather_single", _into(_ones(2), _ones(4)), GATHERED_INTO),
    )
    for case, refused in table.items()
}


def _attempts(ranks: list[int] | None = None) -> dict[str, tuple[Outcome, Outcome]]:
    """Pass unsuitable tensors on the second rank of the group, and then suitable ones on the same lane."""
    with nothing_left():
        seen = {}
        for number, (case, (_, sound, refused, _)) in enumerate(REFUSED.items()):
            group = make_group(ranks=ranks)
            if ranks is None or dist.get_rank() in ranks:
                first = outcome(refused if group.rank() == 1 else sound, group, number % 2 == 0)
                seen[case] = first, outcome(everyone_sends, group, 3 if number % 3 else 100_000, number % 2 == 1)
                dist.destroy_process_group(group)
        del group
    return seen


@pytest.mark.parametrize(("size", "ranks"), [(2, None), pytest.param(3, [1, 2], marks=pytest.mark.slow)])
def test_one_rank_refuses_and_all_know_and_the_lane_ends(size: int, ranks: list[int] | None) -> None:
    results = run_distributed(_attempts, size, ranks, timeout=60)
    members = ranks or [0, 1]
    for rank in members:
        for case, (name, *_, word) in REFUSED.items():
            first, later = results[rank][case]
            assert first.kind == ("ValueError" if rank == members[1] else "DistBackendError"), (case, first)
            assert first.text.startswith(f"freescale {name}, lane 'rows': ") and word in first.text, (case, first)
            assert rank == members[1] or f"rank {members[1]} " in first.text, (case, first)
            assert later.kind == "DistBackendError" and word in later.text, (case, later)
            assert max(first.seconds, later.seconds) < SOON, case


def _two_refuse() -> Outcome:
    calls = [_single(_ones(7)), _single(_ones(6), sent=[6]), _single(_ones(6))]
    return outcome(calls[dist.get_rank()], make_group(), False)


def test_several_refuse_and_the_others_hear_of_each() -> None:
    first, second, third = run_distributed(_two_refuse, 3)
    assert [first.kind, second.kind, third.kind] == ["ValueError", "ValueError", "DistBackendError"]
    assert "rank 0 " in third.text and "rank 1 " in third.text


OUT_OF_RANGE: list[dict[str, Any]] = [
    {"transport": "pigeon"},
    {"chunk_bytes": 0},
    {"chunk_bytes": -5},
    {"chunk_bytes": MAX_CHUNK_BYTES + 1},
]
ALLOWED: list[dict[str, Any]] = [
    {"chunk_bytes": 1, "priority": -7},
    {"chunk_bytes": MAX_CHUNK_BYTES},
    *({"transport": name} for name in ("auto", "host", "peer", "nccl-zero-cta", "two-level", "native")),
]


@pytest.mark.parametrize("options", OUT_OF_RANGE, ids=str)
def test_out_of_range(options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"^{name}={re.escape(repr(value))}"):
        ProcessGroupFreeScaleOptions(**options)


def test_the_ends_of_the_ranges_are_allowed_and_options_do_not_change() -> None:
    for options in ALLOWED:
        made = ProcessGroupFreeScaleOptions(**options)
        assert all(getattr(made, name) == value for name, value in options.items())
    assert len(TRANSPORTS) == 6
    with pytest.raises(FrozenInstanceError):
        ProcessGroupFreeScaleOptions().priority = 1


def test_a_group_has_the_options_it_was_given_and_takes_no_others() -> None:
    def options() -> tuple[Any, Any]:
        with pytest.raises(TypeError, match=r"pg_options=.*ProcessGroupFreeScaleOptions"):
            dist.new_group(backend="freescale", pg_options={"priority": 3})
        chosen = ProcessGroupFreeScaleOptions(priority=3, name="mine")
        return dist.new_group(backend="freescale", pg_options=chosen).options, dist.new_group(backend="freescale").options

    assert run_distributed(options, 1) == [
        (ProcessGroupFreeScaleOptions(priority=3, name="mine"), ProcessGroupFreeScaleOptions())
    ]
