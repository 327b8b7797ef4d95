"""What cannot work is refused at once, with what to pass instead."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch.distributed as dist

from lightning_freescale.comm import LaneOptions
from lightning_freescale.comm.options import MIN_PINNED_CHUNKS
from lightning_freescale.testing import run_distributed

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"transport": "pigeon"}, "transport='pigeon': pass one of 'auto', 'host'"),
    ({"chunk_bytes": 0}, "chunk_bytes=0: pass at least 1 byte"),
    ({"chunk_bytes": -5}, "chunk_bytes=-5: pass at least 1 byte"),
    ({"preempt_below_bytes": -1}, "preempt_below_bytes=-1: pass bytes, at least 0, or None"),
    ({"max_pause_seconds": -0.1}, "max_pause_seconds=-0.1: pass seconds, at least 0"),
    ({"nccl_ctas": 0}, "nccl_ctas=0: pass 1 to 64, or None"),
    ({"nccl_ctas": 65}, "nccl_ctas=65: pass 1 to 64, or None"),
    (
        {"chunk_bytes": 100, "pinned_bytes": 100 * MIN_PINNED_CHUNKS - 1},
        "pinned_bytes=1599: pass at least 16 chunks, 1600 bytes, or a smaller",
    ),
    ({"peer_bytes": 2**20 - 1}, "peer_bytes=1048575: pass at least 1048576 bytes"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_out_of_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        LaneOptions(**options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_bytes": 1, "pinned_bytes": MIN_PINNED_CHUNKS},
        {"preempt_below_bytes": 0, "max_pause_seconds": 0},
        {"priority": -7},
        *({"nccl_ctas": count} for count in (1, 64)),
        {"peer_bytes": 2**20},
        *({"transport": name} for name in ("auto", "host", "peer", "nccl-zero-cta", "two-level", "native")),
    ],
)
def test_the_ends_of_the_ranges_are_allowed(options: dict[str, Any]) -> None:
    made = LaneOptions(**options)
    assert all(getattr(made, name) == value for name, value in options.items())


def test_they_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        LaneOptions().priority = 1


def test_a_group_takes_no_other_options() -> None:
    def attempt() -> None:
        with pytest.raises(TypeError, match=r"pg_options=.*takes lightning_freescale.comm.LaneOptions"):
            dist.new_group(backend="freescale", pg_options={"priority": 3})

    run_distributed(attempt, 1)


def test_a_group_has_the_options_it_was_given() -> None:
    def options() -> tuple[Any, Any]:
        chosen = LaneOptions(priority=3, name="mine")
        return dist.new_group(backend="freescale", pg_options=chosen).options, dist.new_group(backend="freescale").options

    assert run_distributed(options, 1) == [(LaneOptions(priority=3, name="mine"), LaneOptions())]
