"""Fixtures of all tests."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import hypothesis
import pytest
from lightning_utilities.core import rank_zero

# ranks are forked from this process: what is imported here, each of them need not import
import lightning_freescale.callbacks
import lightning_freescale.checkpoint.unsharded
import lightning_freescale.datamodule
import lightning_freescale.embeddings.sharding
import lightning_freescale.fabric.loop_steps  # noqa: F401
from lightning_freescale import testing
from tests.helpers.leftovers import no_leftovers

pytest_plugins = ["tests.helpers.processor_time"]

hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Refuse a test module whose import makes this process look like a rank: every later Trainer would read it."""
    left = {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
    if left:
        raise pytest.UsageError(f"importing the tests set {sorted(left)}: import the module that does it inside of its test")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a thread of this package or the default process group behind."""
    with no_leftovers():
        yield


@pytest.fixture(autouse=True)
def environment_and_log_levels_restored() -> Iterator[None]:
    """Restore what scripts and Trainers set for the whole process, so that no test depends on the tests before it.

    An import of ``pytorch_lightning`` also replaces the logger that messages of ``lightning`` go to.
    """
    loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    levels = [(logger, logger.level, logger.disabled) for logger in loggers]
    with patch.dict(os.environ), patch.object(rank_zero, "log", rank_zero.log):
        yield
    for logger, level, disabled in levels:
        logger.setLevel(level)
        logger.disabled = disabled


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
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
