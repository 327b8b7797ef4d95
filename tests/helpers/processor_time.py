"""Measure the processor time of every test case, with that of the processes it started and waited for.

``pytest --processor-time`` prints the total and the most expensive cases. ``--processor-time-file=FILE`` also writes all cases.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest

PROPERTY = "processor_seconds"
PRINTED = 25


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor-time", action="store_true", help="print the most expensive cases")
    parser.addoption("--processor-time-file", type=Path, metavar="FILE", help="write the processor time of all cases to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Collect the times where the reports of all workers arrive."""
    file = config.getoption("--processor-time-file")
    if (file or config.getoption("--processor-time")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_CostTable(file))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_BEGAN] = _seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, object, object]:
    """Attach the time to the report of the teardown, which is the last of a case."""
    if call.when == "teardown":
        item.user_properties.append((PROPERTY, round(_seconds() - item.stash[_BEGAN], 3)))
    return (yield)


def _seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


_BEGAN = pytest.StashKey[float]()


class _CostTable:
    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds.update({report.nodeid.split("@")[0]: value for name, value in report.user_properties if name == PROPERTY})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        costs = sorted(self._seconds.items(), key=lambda entry: -entry[1])
        terminalreporter.section("processor time")
        for case, seconds in costs[:PRINTED]:
            terminalreporter.write_line(f"{seconds:8.2f} s {case}")
        terminalreporter.write_line(f"{sum(self._seconds.values()):8.2f} s in {len(costs)} cases, child processes included")
        if self._file:
            self._file.write_text(_by_file(self._seconds))


def _by_file(seconds: dict[str, float]) -> str:
    """Return JSON with one line per test file, so that a change of few tests is a change of few lines."""
    files: dict[str, dict[str, float]] = {}
    for case, taken in sorted(seconds.items()):
        file, name = case.split("::", 1)
        files.setdefault(file, {})[name] = taken
    return "{\n" + ",\n".join(f"{json.dumps(file)}: {json.dumps(cases)}" for file, cases in files.items()) + "\n}\n"
