"""Measure which lines of the package each test executes, including rank processes and new interpreters.

``python scripts/covered_lines.py covered.json`` runs both tiers of tests under coverage.py. It prints the share of executed
lines by package and writes ``{"lines": {file: {line: [test, ...]}}, "statements": {file: count}}``. A test is a node id
without its parameters. A line that a new interpreter executes has the test ``""``. Further arguments go to pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lightning_freescale"
SETTINGS = """
[run]
parallel = true
source = {package}
data_file = {folder}/data
patch = subprocess, fork, _exit
concurrency = thread
disable_warnings = no-data-collected, module-not-measured, dynamic-conflict
"""
_VARIABLE = "COVERED_LINES_TEST"


def main() -> int:
    """Run the tests, print the share by package and write the lines; return pytest's exit code."""
    options, to_pytest = _parser().parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "settings"
        settings.write_text(SETTINGS.format(package=ROOT / PACKAGE, folder=folder))
        code = _run_tests(settings, to_pytest or ["-n", "2", "--dist", "loadgroup"])
        measured = coverage.Coverage(config_file=str(settings))
        measured.combine()
        result = _collect(measured)
    options.file.write_text(json.dumps(result) + "\n")
    for package, (executed, statements) in sorted(by_package(result).items()):
        print(f"{package:24} {executed:6} of {statements:6} lines, {executed / statements:7.2%}")
    return code


def by_package(result: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the executed and the existing lines of each package and of all."""
    counts: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for file, statements in result["statements"].items():
        parts = Path(file).parts
        for name in (parts[1] if len(parts) > 2 else "(top level)", "all"):
            executed, existing = counts[name]
            counts[name] = (executed + len(result["lines"].get(file, {})), existing + statements)
    return dict(counts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON file to write")
    return parser


def _run_tests(settings: Path, to_pytest: list[str]) -> int:
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-p", "covered_lines"]
    path = os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run([*command, *to_pytest], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}).returncode


def _collect(measured: coverage.Coverage) -> dict[str, Any]:
    data = measured.get_data()
    lines, statements = {}, {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        _, existing, *_ = measured.analysis2(str(path))
        contexts = data.contexts_by_lineno(str(path))
        file = str(path.relative_to(ROOT))
        statements[file] = len(existing)
        lines[file] = {line: sorted(contexts[line]) for line in existing if line in contexts}
    return {"lines": lines, "statements": statements}


# pytest loads this module as a plugin, in every worker


def pytest_configure() -> None:
    """Save what a rank executed before it sends its result: ``run_distributed`` kills the rank after that."""
    rank = testing._rank
    testing._rank = lambda call, *others: rank(partial(_call_and_save, call), *others)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    """Attribute the lines that follow to the test, in the processes that it forks too."""
    os.environ[_VARIABLE] = nodeid.split("[")[0].split("@")[0]
    _attribute()


def _attribute() -> None:
    running = coverage.Coverage.current()
    if running is not None and _VARIABLE in os.environ:
        running.switch_context(os.environ[_VARIABLE])


def _call_and_save(call: Callable[[], Any]) -> Any:
    try:
        return call()
    finally:
        running = coverage.Coverage.current()
        if running is not None:
            running.stop()
            running.save()


if __name__ == "__main__":
    sys.exit(main())
else:
    from lightning_freescale import testing

    os.register_at_fork(after_in_child=_attribute)
