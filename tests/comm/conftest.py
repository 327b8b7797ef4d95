"""Fixtures for the tests of the process group."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.fake_gpu import end_streams


@pytest.fixture
def survivors(patient: None, tmp_path: Path) -> Callable[..., dict[int, Any]]:
    """A runner of a function on several ranks, some of which may die. It returns the results of the others by rank."""

    def run(fn: Callable[..., Any], size: int, *args: Any) -> dict[int, Any]:
        def told() -> None:
            answer = fn(*args)
            Path(tmp_path, f"rank{dist.get_rank()}").write_bytes(pickle.dumps(answer))

        try:
            run_distributed(told, size, timeout=60)
        except RankFailed as failed:
            if "Traceback" in str(failed) and "on purpose" not in str(failed):
                raise
        return {int(path.name[4:]): pickle.loads(path.read_bytes()) for path in sorted(tmp_path.glob("rank*"))}

    return run


@pytest.fixture(autouse=True)
def streams_ended() -> Iterator[None]:
    yield
    end_streams()
