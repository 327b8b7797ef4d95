"""Share of the lines for CUDA that the tests execute without a GPU, by stand-ins.

    python benchmarks/cuda_lines.py --require "share>=0.9"

A CUDA line is behind a condition that only a CUDA device, or a tensor on one, meets: the branch of an ``if``, the statements
after one that returns, or an arm of ``a if condition else b``. Lines of the functions that cuda_code.py lists, with a reason,
are CUDA lines too. An executed line shows that its Python is correct and that the test's numbers are right. It does not show
that the kernels of a GPU do the same.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import harness
from cuda_code import PACKAGE, ROOT, find_cuda_lines, package_files

TESTS = (
    "tests/callbacks/test_workload.py",
    "tests/checkpoint/test_random_state.py",
    "tests/comm/test_auto_transport.py",
    "tests/comm/test_exchange.py",
    "tests/comm/test_native.py",
    "tests/comm/semantics/test_work.py",
    "tests/comm/transports",
    "tests/embeddings/lookahead/test_kjt_snapshot.py",
    "tests/embeddings/overlap/test_as_on_cuda.py",
    "tests/embeddings/overlap/test_table_kernel.py",
    "tests/embeddings/test_id_checks.py",
    "tests/embeddings/test_planning.py",
    "tests/profiling/recording/test_timeline.py",
    "tests/profiling/reporting/test_kineto.py",
    "tests/strategy/test_early_copy.py",
    "tests/runtime/test_worker.py",
)
"""The tests that claim to run CUDA lines."""

ARM = 1_000_000
"""Added to the line of an arm of ``a if condition else b``, so that it counts apart from the line that contains it."""


class _ArmsApart(SourceFileLoader):
    """Compiles a module with the CUDA arms of its conditional expressions on separate lines."""

    def get_code(self, fullname: str) -> Any:
        tree = ast.parse(self.get_data(self.path))
        for arm in find_cuda_lines(str(Path(self.path).relative_to(ROOT / PACKAGE)), tree).arms:
            for node in ast.walk(arm):
                if hasattr(node, "lineno"):
                    node.lineno, node.end_lineno = arm.lineno % ARM + ARM, (arm.end_lineno or 0) % ARM + ARM
        return compile(tree, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Loads the package through this compiler."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.split(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _ArmsApart(spec.loader.name, spec.loader.path)
        return spec


def executed_lines(tests: Iterable[str]) -> dict[str, set[int]]:
    """Run tests, and return the executed lines of each file of the package, over all ranks."""
    import coverage
    import pytest

    sys.meta_path.insert(0, _Finder())
    sys.path.insert(0, str(ROOT))
    with TemporaryDirectory() as folder:
        data_file = str(Path(folder) / "data")
        measured = coverage.Coverage(data_file, data_suffix=True, source=[str(ROOT / PACKAGE)], concurrency=["thread"])
        measured.start()
        try:
            from lightning_freescale import testing

            rank = testing._rank

            def measured_rank(call: Any, *args: Any) -> None:
                def call_and_save() -> Any:
                    try:
                        return call()
                    finally:  # a finished rank is killed
                        measured.stop()
                        measured.save()

                rank(call_and_save, *args)

            testing._rank = measured_rank
            failed = pytest.main(
                ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *(str(ROOT / test) for test in tests)]
            )
        finally:
            measured.stop()
            measured.save()
        if failed:
            sys.exit("tests failed, so no lines were counted")
        together = coverage.CoverageData(data_file)
        for path in Path(folder).glob("data.*"):
            part = coverage.CoverageData(str(path))
            part.read()
            together.update(part)
        return {path: set(together.lines(path) or ()) for path in together.measured_files()}


def main() -> None:
    """Print the table and the share of all."""
    options = harness.parser(__doc__).parse_args()
    executed, total, reached, figures = executed_lines(TESTS), 0, 0, {}
    print(f"\n{'file':<44}{'CUDA lines':>12}{'executed':>10}  missing")
    for name, path in package_files():
        tree = ast.parse(path.read_text())
        found, ran = find_cuda_lines(name, tree), executed.get(str(path), set())
        starts = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt) and not _is_docstring(node)}
        lines = {line for line in starts if found.holds(line)} | {arm.lineno + ARM for arm in found.arms}
        missing = sorted(lines - ran, key=lambda line: line % ARM)
        if not lines:
            continue
        total, reached = total + len(lines), reached + len(lines) - len(missing)
        figures[name] = 1 - len(missing) / len(lines)
        shown = ", ".join(f"{line % ARM}{' (an arm)' if line > ARM else ''}" for line in missing)
        print(f"{name:<44}{len(lines):>12}{len(lines) - len(missing):>10}  {shown}")
    figures |= {"lines": total, "share": reached / total}
    print(f"{'all':<44}{total:>12}{reached:>10}  {reached / total:.1%} executed")
    harness.finish(figures, options)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


if __name__ == "__main__":
    main()
