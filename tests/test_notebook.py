"""The notebook of the quick start, run without Jupyter: ``%%writefile`` saves, ``!`` runs, all else is one process's Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, blocks

AS_SCRIPT = """
import subprocess

def run(command):
    print(subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout)
"""


@pytest.mark.slow
def test_the_notebook_trains_and_shows_where_the_time_went(tmp_path: Path) -> None:
    content = json.loads((ROOT / "examples" / "quick_start.ipynb").read_text())
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    (quick_start,) = (block.text for block in blocks(DOCS / "quick_start.md") if block.title == "quick_start.py")
    assert f"%%writefile quick_start.py\n{quick_start}" == "".join(cells[0]["source"]) + "\n"
    script = AS_SCRIPT
    for cell in cells:
        source = "".join(cell["source"])
        first, _, rest = source.partition("\n")
        if first.startswith("%%writefile "):
            (tmp_path / first.split()[1]).write_text(f"{rest}\n")
        elif source.startswith("!"):
            script += f"run({source[1:]!r})\n"
        else:
            assert "\n!" not in source and "%" not in first, f"this test does not run it: {source}"
            script += f"{source}\n"
    (tmp_path / "notebook.py").write_text(script)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path, "MPLBACKEND": "agg"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 120}
    found = subprocess.run([sys.executable, "notebook.py"], **options)
    assert found.returncode == 0, found.stderr[-2000:]
    assert all(said in found.stdout for said in ("loss: 0.0", "rank 0: ", "rank 1: ", "bubble: "))
