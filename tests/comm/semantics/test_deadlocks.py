"""Collectives without end from one and from several threads: nothing hangs, nothing is lost."""

from __future__ import annotations

import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from lightning_freescale.testing import run_distributed
from tests.helpers.both_groups import SMALL, make_group

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import comm_stress


def _many(times: int) -> float:
    """The results die in gloo's thread, which needs the interpreter's lock for it, while the next are issued."""
    group = make_group()
    for _ in range(times):
        scattered = functional.reduce_scatter_tensor(torch.ones(2 * group.size()), "sum", 0, group)
        gathered = functional.all_gather_tensor(torch.ones(3), 0, group)
        scattered.wait()
        gathered.wait()
    return float(scattered.sum() + gathered.sum())


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_functional_collectives_do_not_deadlock() -> None:
    assert run_distributed(_many, 2, 3000, timeout=180) == [2 * 2 + 2 * 3] * 2


def _unwaited(times: int) -> float:
    """Functional results that nobody looks at."""
    group = make_group(**SMALL)
    for index in range(times):
        functional.all_to_all_single(torch.ones(600), None, None, group)
        functional.all_gather_into_tensor_coalesced([torch.ones(3), torch.ones(500)], group)
        functional.all_reduce(torch.ones(3), "sum", group)
        if index % 50 == 0:
            gc.collect()
    last = torch.zeros(600)
    dist.all_to_all_single(last, torch.ones(600), group=group)
    return float(last.sum())


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_results_that_nobody_waits_for_do_not_deadlock() -> None:
    assert run_distributed(_unwaited, 2, 200, timeout=180) == [600.0] * 2


def _threads() -> list[Any]:
    """A lane for every thread, all of them busy at once."""
    lanes = [make_group(priority=priority, **SMALL) for priority in (0, 1, 2)]
    sums: list[list[float]] = [[] for _ in lanes]

    def work(index: int) -> None:
        lane = lanes[index]
        for turn in range(60):
            out, given = torch.zeros(400), torch.full((400,), float(10 * index + turn))
            dist.all_to_all_single(out, given, group=lane)
            total = torch.full((2,), float(turn))
            dist.all_reduce(total, group=lane)
            sums[index].append(float(out.sum() + total.sum()))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(lanes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    return sums


@pytest.mark.timeout(200)
def test_every_thread_has_its_lane() -> None:
    expected = [[400.0 * (10 * index + turn) + 4 * turn for turn in range(60)] for index in range(3)]
    assert run_distributed(_threads, 2, timeout=180) == [expected] * 2


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_stress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "figures.json"
    flags = ["--ranks", "2", "--collectives", "600", "--seed", "3", "--json", str(written), "--require", "wrong<=0"]
    monkeypatch.setattr(sys, "argv", ["comm_stress.py", *flags])
    comm_stress.main()
    figures = json.loads(written.read_text())["figures"]
    assert figures["collectives"] == 600 and figures["wrong"] == 0
    counted = [value for name, value in figures.items() if name.startswith("kind_")]
    assert len(counted) >= 5 and min(counted) > 0 and sum(counted) == 600
    assert figures["megabytes"] > 1 and "wrong" in capsys.readouterr().out
