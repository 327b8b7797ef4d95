"""Bytes that a collective moves over a rank's link, of four ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.profiling.recording.observed_work import moved_bytes

FOUR = SimpleNamespace(size=lambda: 4)
SHARD = torch.zeros(8, dtype=torch.float64)  # 64 bytes
WHOLE = torch.zeros(4 * 8, dtype=torch.float64)

BYTES: dict[str, tuple[tuple[Any, ...], int | None]] = {
    "all_gather": (([SHARD] * 4, SHARD), 192),
    "all_gather_coalesced": (([[SHARD] * 4, [SHARD] * 4], [SHARD, SHARD]), 384),
    "all_gather_into_tensor": ((WHOLE, SHARD), 192),
    "all_gather_object": (([None] * 4, SHARD), None),
    "all_reduce": ((SHARD,), 96),
    "all_reduce_coalesced": (([SHARD, SHARD],), 192),
    "barrier": ((), 0),
    "broadcast": ((SHARD, 0), 64),
    "broadcast_object_list": (([SHARD], 0), None),
    "reduce": ((SHARD, 0), 64),
    "reduce_scatter": ((SHARD, [SHARD] * 4), 192),
}


def test_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {name: moved_bytes(name, given, {"async_op": False, "group": None}, FOUR) for name, (given, _) in BYTES.items()}
    assert found == {name: expected for name, (_, expected) in BYTES.items()}
    kwargs = {"output": torch.zeros(100), "input": torch.zeros(40), "output_split_sizes": [25] * 4}
    assert moved_bytes("all_to_all_single", (), kwargs, FOUR) == 300
    assert moved_bytes("gather", (torch.zeros(0),), {"gather_list": []}, FOUR) == 0
    assert moved_bytes("all_reduce", (SHARD,), {}, SimpleNamespace(size=lambda: 1)) == 0
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert moved_bytes("all_gather_into_tensor", (WHOLE, SHARD), {}, None) == 128, "of the world"
