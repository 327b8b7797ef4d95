"""Check that the tests notice defects: apply random mutations to the package, one at a time, and run the tests.

``python scripts/mutants.py covered.json mutants.json`` reads what ``scripts/covered_lines.py`` wrote. The tests that execute
the line of a mutant judge it, then the other tests of its package. A mutant changes one operator, condition, return value or
integer inside a function. Docstrings, annotations and messages stay. The seed decides which mutants there are; every package
has at least one.

The first tier runs first. The second tier runs where the first finds nothing. A failing test counts only if it passes on the
unchanged code. ``--old FOLDER OLD.json`` also runs the tests of another checkout on each mutant that survives both tiers.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lightning_freescale"
TIERS = {"make test": "not slow and not third_party", "make test-all": "slow and not third_party"}
KINDS = ("operator", "condition", "return value", "off by one")
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Add,
}
_SYMBOL = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.And: "and",
    ast.Or: "or",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Div: "/",
    ast.Mod: "%",
}


@dataclass
class Mutant:
    """A change of one line: ``before`` becomes ``after`` at ``column`` of ``line`` of ``file``."""

    kind: str
    file: str
    line: int
    column: int
    before: str
    after: str

    @property
    def package(self) -> str:
        """The name of the package's folder."""
        parts = Path(self.file).parts
        return parts[1] if len(parts) > 2 else "(top level)"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.before!r} -> {self.after!r}"


def main() -> None:
    """Judge every mutant and write the table."""
    options = _parser().parse_args()
    covered = json.loads(options.covered.read_text())
    mutants = draw(options.count, options.seed)
    if options.list:
        print("\n".join(map(str, mutants)))
        return
    old = (Path(options.old[0]).resolve(), json.loads(Path(options.old[1]).read_text())) if options.old else None
    with ThreadPoolExecutor(options.workers) as pool:
        rows = list(pool.map(lambda mutant: _judge(mutant, covered, old), mutants))
    options.file.write_text(f'{{"seed": {options.seed}, "mutants": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n")
    for judged_by in ("make test", "make test-all", "old", "nothing"):
        print(f"found by {judged_by}: {sum(row['found_by'] == judged_by for row in rows)} of {len(rows)}")


def draw(count: int, seed: int) -> list[Mutant]:
    """Return ``count`` mutants: one for each package, the others by the packages' size; all kinds are equally likely."""
    generator = random.Random(seed)
    found = [mutant for path in sorted((ROOT / PACKAGE).rglob("*.py")) for mutant in _mutants_of(path.relative_to(ROOT))]
    by_package = defaultdict(list)
    for mutant in found:
        by_package[mutant.package].append(mutant)
    drawn: list[Mutant] = []
    for package in [*sorted(by_package), *generator.choices([mutant.package for mutant in found], k=count - len(by_package))]:
        kind = generator.choice(KINDS)
        left = [mutant for mutant in by_package[package] if mutant not in drawn]
        drawn.append(generator.choice([mutant for mutant in left if mutant.kind == kind] or left))
    return sorted(drawn, key=lambda mutant: (mutant.file, mutant.line))


def _mutants_of(file: Path) -> Iterator[Mutant]:
    text = (ROOT / file).read_text()
    tree = ast.parse(text)
    skipped = set(_unmutated(tree))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {node: None for function in functions for statement in function.body for node in ast.walk(statement)}
    for node in inside:
        if node not in skipped:
            yield from _changes(node, str(file), text)


def _unmutated(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield annotations, messages of errors and default texts: a change there is no defect of behaviour."""
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            arguments = node.args
            parts = [node.returns, *(a.annotation for a in [*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs])]
        elif isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)):
            parts = [node]
        for part in parts:
            if part is not None:
                yield from ast.walk(part)


def _changes(node: ast.AST, file: str, text: str) -> Iterator[Mutant]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _SWAPPED:
        yield from _operator(node.left, node.comparators[0], node.ops[0], file, text)
    elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
        yield from _operator(node.values[0], node.values[1], node.op, file, text)
    elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED and not isinstance(node.left, ast.Constant):
        yield from _operator(node.left, node.right, node.op, file, text)
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield from _replaced("condition", node.test, "not ({})", file, text)
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
        yield from _replaced("return value", node.value, str(not node.value.value), file, text)
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield from _replaced("return value", node.value, "None", file, text)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield from _replaced("off by one", node, "({} + 1)", file, text)


def _operator(left: ast.expr, right: ast.expr, operator: ast.AST, file: str, text: str) -> Iterator[Mutant]:
    if left.end_lineno != right.lineno or left.end_col_offset is None:
        return
    between = text.splitlines()[right.lineno - 1].encode()[left.end_col_offset : right.col_offset].decode()
    before = _SYMBOL[type(operator)]
    match = re.search(rf"(?<![\w<>=!*/]){re.escape(before)}(?![\w<>=*/])", between)
    if match is not None:
        column = left.end_col_offset + len(between[: match.start()].encode())
        yield Mutant("operator", file, right.lineno, column, before, _SYMBOL[_SWAPPED[type(operator)]])


def _replaced(kind: str, node: ast.expr, form: str, file: str, text: str) -> Iterator[Mutant]:
    before = ast.get_source_segment(text, node)
    if before is not None and node.lineno == node.end_lineno:
        yield Mutant(kind, file, node.lineno, node.col_offset, before, form.format(before))


def _judge(mutant: Mutant, covered: dict[str, Any], old: tuple[Path, dict[str, Any]] | None) -> dict[str, Any]:
    found_by, test = "nothing", ""
    for name, marks in TIERS.items():
        test = _failing_test(mutant, ROOT, covered, marks)
        if test:
            found_by = name
            break
    if not test and old is not None:
        test = _failing_test(mutant, *old, "not third_party")
        found_by = "old" if test else "nothing"
    print(f"{found_by:14} {mutant} {test}", flush=True)
    return asdict(mutant) | {"package": mutant.package, "found_by": found_by, "test": test}


def _failing_test(mutant: Mutant, checkout: Path, covered: dict[str, Any], marks: str) -> str:
    """Return the first test that fails because of the mutant, or an empty text."""
    existing = _tests(checkout)
    executing = {test for test in covered["lines"].get(mutant.file, {}).get(str(mutant.line), []) if test in existing}
    of_package = {test for test in existing if _is_in_tests_of(mutant.package, test)}
    return _first_failing(mutant, checkout, sorted(executing), marks) or _first_failing(
        mutant, checkout, sorted(of_package - executing), marks
    )


def _first_failing(mutant: Mutant, checkout: Path, chosen: list[str], marks: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git", ".venv*", ".*_cache", "results"))
        path = copy / mutant.file
        unchanged = path.read_text()
        for _ in range(3):  # a test that also fails on the unchanged code says nothing, and is left out
            path.write_text(_mutated(unchanged, mutant))
            failed = _run(copy, chosen, marks)
            if not failed:
                return ""
            path.write_text(unchanged)
            if failed.startswith("(") or not _run(copy, [failed], marks):
                return failed
            chosen = [test for test in chosen if test != failed.split("[")[0]]
    return ""


def _mutated(text: str, mutant: Mutant) -> str:
    lines = text.splitlines(keepends=True)
    line, before = lines[mutant.line - 1].encode(), mutant.before.encode()
    end = mutant.column + len(before)
    assert line[mutant.column : end] == before, mutant
    lines[mutant.line - 1] = (line[: mutant.column] + mutant.after.encode() + line[end:]).decode()
    return "".join(lines)


@cache
def _tests(checkout: Path) -> frozenset[str]:
    """Return the node ids of a checkout's tests, without parameters."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not third_party"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    return frozenset(line.split("[")[0] for line in done.stdout.splitlines() if "::" in line)


def _is_in_tests_of(package: str, test: str) -> bool:
    folders = Path(test.split("::")[0]).parts[1:-1]
    return folders[0] == package.lstrip("_") if folders else package == "(top level)"


def _run(copy: Path, tests: list[str], marks: str) -> str:
    """Run tests until one fails and return it."""
    if not tests:
        return ""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-rfE",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "-o",
        "timeout=120",
        "-m",
        marks,
    ]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run([*command, *tests], cwd=copy, env=environment, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return "(time limit)"
    if done.returncode in (0, 5):
        return ""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::\S+|\S+)", done.stdout, re.MULTILINE)
    return (
        failed[0] if failed else "(time limit)" if "Timeout" in done.stdout + done.stderr else f"(exit code {done.returncode})"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("covered", type=Path, help="what scripts/covered_lines.py wrote")
    parser.add_argument("file", type=Path, nargs="?", help="JSON file to write")
    parser.add_argument("--count", type=int, default=60, help="number of mutants, default 60")
    parser.add_argument("--seed", type=int, default=0, help="which mutants, default 0")
    parser.add_argument("--workers", type=int, default=2, help="mutants judged at once, default 2")
    parser.add_argument("--old", nargs=2, metavar=("FOLDER", "OLD.json"), help="another checkout and its covered lines")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    return parser


if __name__ == "__main__":
    main()
