"""Ranks that fail one after the other, each at its own pace."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

import pytest

from lightning_freescale import testing


def every_rank_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """``run_distributed`` waits for all ranks until its timeout, not only for moments after the first one has failed.

    A test that says that each rank ends by itself then needs no machine on which it does so in moments.
    """
    monkeypatch.setattr(testing, "_collect", _collect)


def _collect(ends: list[Connection], ranks: list[Any], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    answers = [_answer(end, process, deadline, timeout) for end, process in zip(ends, ranks)]
    if all(ok for ok, _ in answers):
        return [value for _, value in answers]
    raise testing.RankFailed("\n".join(f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok))


def _answer(end: Connection, process: Any, deadline: float, timeout: float) -> tuple[bool, Any]:
    if not end.poll(max(0.0, deadline - time.monotonic())):
        return False, f"did not finish within {timeout:g} s"
    try:
        return end.recv()
    except EOFError:
        process.join()
        return False, f"died with exit code {process.exitcode}"
