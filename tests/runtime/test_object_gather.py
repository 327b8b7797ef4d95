"""Values that ranks exchange arrive unchanged and run no code."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lightning_freescale
from lightning_freescale._runtime.object_gather import (
    gather_bytes,
    gather_objects,
    gather_on_first_rank,
)
from lightning_freescale.testing import RankFailed, run_distributed

PACKAGE = Path(lightning_freescale.__file__).parent
SAMPLES, OWN_PICKLERS = "data/streaming/steps.py", {"checkpoint/single_file.py", "checkpoint/sharded_folder.py"}
"""The modules that unpickle samples of any class, that pickle as torch does, or that read with a list of names."""


class RunsWhenRead:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def _value(rank: int) -> Any:
    numbers = {"b": True, "none": None, "big": 2**100 + rank, "text": "x" * (1000 * rank), 3: (1.5, float("inf"))}
    arrays = [np.arange(3) + rank, np.float64(0.5), np.array([True]), np.arange(2, dtype=np.float32)]
    return {**numbers, "arrays": arrays, "tensor": torch.arange(4) + rank, "dtype": torch.bfloat16}


def _same(mine: Any, other: Any) -> bool:
    return torch.equal(mine.pop("tensor"), other.pop("tensor")) and str(mine) == str(other)


def _gathered() -> tuple[list[bool], list[bool], list[bytes]]:
    rank = dist.get_rank()
    everywhere, on_first = gather_objects(_value(rank)), gather_on_first_rank(_value(rank))
    same = ([_same(one, _value(k)) for k, one in enumerate(found)] for found in (everywhere, on_first))
    return *same, gather_bytes(b"ab\0" * (1 + rank), only_first=True)


def test_values_arrive_as_they_were() -> None:
    first, *others = run_distributed(_gathered, 3)
    assert first == ([True] * 3, [True] * 3, [b"ab\0" * k for k in (1, 2, 3)])
    assert others == [([True] * 3, [], [])] * 2


def test_what_would_run_code_is_refused_on_every_rank_and_not_run(tmp_path: Path) -> None:
    made = tmp_path / "made"

    def refused() -> str:
        with pytest.raises(ValueError, match=r"(?s)rank 1 .*mkdir") as error:
            gather_objects(RunsWhenRead(made) if dist.get_rank() else 1)
        return str(error.value)

    first, second = run_distributed(refused, 2)
    assert first == second and not made.exists()
    assert "weights_only" not in first, "torch advises to run the code"
    with pytest.raises(RankFailed, match=r"(?s)rank 1 .*mkdir"):
        run_distributed(lambda: gather_on_first_rank(RunsWhenRead(made) if dist.get_rank() else 1), 2)
    assert not made.exists()


_PICKLING = {"all_gather_object", "gather_object", *(f"{n}_object_list" for n in ("broadcast", "recv", "scatter", "send"))}
"""The collectives of torch that pickle."""


def _calls(path: Path) -> set[str]:
    found = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return {getattr(call, "attr", getattr(call, "id", "")) for call in found}


def test_nothing_else_of_ours_pickles_between_ranks() -> None:
    sources = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    assert {name for name, path in sources.items() if _calls(path) & _PICKLING} == set()
    imports = {name for name, path in sources.items() if "\nimport pickle\n" in path.read_text()}
    assert imports == {SAMPLES, *OWN_PICKLERS}
