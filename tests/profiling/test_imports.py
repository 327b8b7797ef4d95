"""The profiler knows torch and numpy, but no Lightning, TorchRec or other room but what all may import: any loop can use it."""

from __future__ import annotations

import ast
from pathlib import Path

import lightning_freescale.profiling

OWN = tuple(f"lightning_freescale.{name}" for name in ("profiling", "_code_place", "_objects", "_version", "_worker"))


def _imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add(node.module or "")
    return found


def test_the_profiler_imports_no_other_room() -> None:
    files = sorted(Path(lightning_freescale.profiling.__file__).parent.rglob("*.py"))
    assert len(files) > 20
    for path in files:
        others = {name for name in _imported(path) if name.startswith(("lightning", "torchrec", "fbgemm"))}
        assert not {name for name in others if not name.startswith(OWN)}, path
