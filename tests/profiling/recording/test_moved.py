"""Bytes over a rank's link, of four ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.profiling.recording.moved import moved_bytes

RANKS = 4
FOUR = SimpleNamespace(size=lambda: RANKS)
ROW = torch.zeros(8, dtype=torch.float64)  # 64 bytes
WHOLE = torch.zeros(RANKS * 8, dtype=torch.float64)
ROWS = [ROW] * RANKS

CALLS: dict[str, tuple[tuple[Any, ...], int | None]] = {
    "all_gather": ((ROWS, ROW), 192),
    "all_gather_into_tensor": ((WHOLE, ROW), 192),
    "all_gather_object": (([None] * RANKS, ROW), None),
    "all_reduce": ((ROW,), 96),
    "all_to_all": ((ROWS, ROWS), 192),
    "all_to_all_single": ((WHOLE, WHOLE), 192),
    "barrier": ((), 0),
    "broadcast": ((ROW, 0), 64),
    "broadcast_object_list": (([ROW], 0), None),
    "gather": ((ROW, ROWS), 192),
    "gather_object": ((ROW, None), None),
    "reduce": ((ROW, 0), 64),
    "reduce_scatter": ((ROW, ROWS), 192),
    "reduce_scatter_tensor": ((ROW, WHOLE), 192),
    "scatter": ((ROW, ROWS, 0), 192),
    "scatter_object_list": (([None], [ROW], 0), None),
}


@pytest.mark.parametrize("name", CALLS)
def test_bytes_of(name: str) -> None:
    arguments, expected = CALLS[name]
    assert moved_bytes(name, arguments, {"async_op": False, "group": None}, FOUR) == expected


def test_uneven_splits_and_keywords() -> None:
    kwargs = {"output": torch.zeros(100), "input": torch.zeros(40), "output_split_sizes": [25] * 4}
    assert moved_bytes("all_to_all_single", (), kwargs, FOUR) == 300
    assert moved_bytes("gather", (torch.zeros(0),), {"gather_list": []}, FOUR) == 0


def test_one_rank_moves_nothing() -> None:
    assert moved_bytes("all_reduce", (ROW,), {}, SimpleNamespace(size=lambda: 1)) == 0


def test_without_a_group_it_is_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert moved_bytes("all_gather_into_tensor", (WHOLE, ROW), {}, None) == 128
