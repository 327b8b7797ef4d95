"""The notebook of the quick start, run without Jupyter: ``%%writefile`` saves, ``!`` runs, all else is one process's Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, ROOT, blocks

NOTEBOOK = ROOT / "examples" / "quick_start.ipynb"
AS_SCRIPT = """
import subprocess

def run(command):
    print(subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout)
"""


def _cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def _script(folder: Path) -> str:
    """All cells as one script; the files that they write are saved."""
    script = AS_SCRIPT
    for cell in _cells():
        source = "".join(cell["source"])
        first, _, rest = source.partition("\n")
        if first.startswith("%%writefile "):
            (folder / first.split()[1]).write_text(f"{rest}\n")
        elif source.startswith("!"):
            script += f"run({source[1:]!r})\n"
        else:
            assert "\n!" not in source and "%" not in first, f"nobody runs this here: {source}"
            script += f"{source}\n"
    return script


@pytest.mark.slow
def test_the_notebook_trains_and_shows_where_the_time_went(tmp_path: Path) -> None:
    (tmp_path / "notebook.py").write_text(_script(tmp_path))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path, "MPLBACKEND": "agg"}
    command = [sys.executable, "notebook.py"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-2000:]
    for said in ("embedding exchange:", "loss: 0.0", "rank 0: ", "rank 1: ", "bubble: "):
        assert said in found.stdout


def test_the_notebook_has_the_quick_start_and_no_outputs() -> None:
    (script,) = (block.text for block in blocks(DOCS / "quick_start.md") if block.title == "quick_start.py")
    assert f"%%writefile quick_start.py\n{script}" == "".join(_cells()[0]["source"]) + "\n"
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in _cells())
