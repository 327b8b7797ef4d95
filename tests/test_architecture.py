"""The shape of the package: who imports whom, and whose private names are used where."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import grimp
import networkx
import pytest
import torch

PACKAGE = "lightning_freescale"
ROOT = Path(__file__).parents[1] / PACKAGE
FILES = sorted(ROOT.rglob("*.py"))

MAY_IMPORT = {
    "_runtime": set(),
    "_torchrec": set(),
    "_version": set(),
    "balance": {"_runtime"},
    "comm": {"_runtime"},
    "simulator": {"balance"},
    "profiling": {"_runtime", "_version"},
    "data": {"_runtime", "_torchrec", "balance", "comm"},
    "losses": set(),
    "metrics": set(),
    "embeddings": {"_runtime", "_torchrec", "comm", "losses"},
    "checkpoint": {"_runtime", "_version", "embeddings"},
    "_lightning": {"_runtime", "balance", "comm", "profiling"},
    "datamodule": {"_lightning", "balance", "data"},
    "callbacks": {"_lightning", "_runtime", "balance", "data", "profiling"},
    "training": {"_lightning", "_runtime", "balance", "comm", "embeddings", "profiling"},
    "strategy": {
        "_lightning",
        "_runtime",
        "balance",
        "checkpoint",
        "comm",
        "data",
        "datamodule",
        "embeddings",
        "profiling",
        "training",
    },
    "fabric": {"_lightning", "_runtime", "balance", "checkpoint", "embeddings", "training"},
    "command_line": {"_lightning", "balance", "callbacks", "checkpoint", "profiling", "simulator"},
    "__main__": {"command_line"},
    "testing": set(),
}
"""The packages and modules at the top level, each with those that it may import."""
LIGHTNING = {"_lightning"}
TORCHREC = {"_torchrec", "data", "embeddings", "training"}
"""Packages that import Lightning itself, and those that import TorchRec or FBGEMM."""
TORCHREC_PRIVATE = {"checkpoint", "embeddings"}


def top_level(module: str) -> str:
    """Return the package or module at the top level that a module belongs to; empty for the root."""
    return module.removeprefix(PACKAGE).lstrip(".").split(".")[0]


@cache
def imports() -> networkx.DiGraph:
    """Who imports whom, also inside functions and for type checkers alone."""
    graph = grimp.build_graph(PACKAGE, include_external_packages=True)
    return networkx.DiGraph((a, b) for a in graph.modules for b in graph.find_modules_directly_imported_by(a))


def test_no_circle_of_imports() -> None:
    assert [circle for circle in networkx.strongly_connected_components(imports()) if len(circle) > 1] == []


def test_packages_import_only_what_they_may() -> None:
    found = defaultdict(set)
    for importer, imported in imports().edges:
        if imported.startswith(PACKAGE) and top_level(importer) and top_level(imported) != top_level(importer):
            found[top_level(importer)].add(top_level(imported))
    names = {top_level(module) for module in imports() if module.startswith(f"{PACKAGE}.")}
    assert names == MAY_IMPORT.keys()
    assert {importer: extra for importer, imported in found.items() if (extra := imported - MAY_IMPORT[importer])} == {}


@pytest.mark.parametrize(
    ("libraries", "allowed"), [({"lightning", "pytorch_lightning"}, LIGHTNING), ({"torchrec", "fbgemm_gpu"}, TORCHREC)]
)
def test_libraries_are_imported_by_few_packages(libraries: set[str], allowed: set[str]) -> None:
    importers = {importer for importer, imported in imports().edges if imported in libraries}
    assert importers, "the graph does not know the library"
    assert {importer for importer in importers if top_level(importer) not in allowed} == set()


@cache
def private_names(library: str) -> frozenset[str]:
    spec = find_spec(library)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    definition = re.compile(r"(?:def |class |self\.)(_[A-Za-z]\w*)(?:\(|:| =)")
    sources = (path.read_text() for path in Path(spec.submodule_search_locations[0]).rglob("*.py"))
    return frozenset(name for source in sources for name in definition.findall(source))


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        else:
            continue
        if name.startswith("_") and not name.startswith("__"):
            yield name


def _foreign_private_names(tree: ast.AST) -> set[str]:
    """Private names that a file reads of an object or imports, torch's aside, and does not define itself."""
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("torch."):
            used |= {alias.name for alias in node.names}
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    return private - set(_defined(tree)) - set(dir(torch.Tensor)) - set(dir(torch.nn.Module()))


@pytest.mark.parametrize(
    ("library", "other", "allowed"),
    [("lightning.pytorch", "torchrec", LIGHTNING), ("torchrec", "lightning.pytorch", TORCHREC_PRIVATE)],
    ids=["Lightning", "TorchRec"],
)
def test_private_names_of_libraries_are_used_by_few_packages(library: str, other: str, allowed: set[str]) -> None:
    theirs = private_names(library) - private_names(other)
    assert theirs
    found = {}
    for path in FILES:
        where = path.relative_to(ROOT)
        names = _foreign_private_names(ast.parse(path.read_text())) & theirs
        if names and where.parts[0].removesuffix(".py") not in allowed:
            found[str(where)] = names
    assert found == {}


THREADS = {
    "_runtime/worker.py": "the thread works on the device of the one that starts it",
    "profiling/reporting/trace.py": "its Thread is a row of a trace",
}
"""Who starts threads, and why they do not work on the first GPU, which may be another rank's."""
_STARTS = {"Thread", "Timer", "ThreadPool", "ThreadPoolExecutor", "start_new_thread", "to_thread", "run_in_executor"}


def test_threads_work_on_the_ranks_own_device() -> None:
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if {name, *(base.split(".")[-1] for base in bases)} & _STARTS:
                found.add(str(path.relative_to(ROOT)))
    assert found == THREADS.keys()
