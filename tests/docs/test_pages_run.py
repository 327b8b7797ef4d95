"""All code blocks of all pages and docstrings run.

The quick start, the tutorial and the how-to pages run as they are: titled blocks are saved, commands are run, and other Python
runs as a script. A text block after a command is its output, except for measured figures and line breaks. The other pages show
excerpts. The scripts in ``excerpts/`` run them.
"""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, RUN, blocks, save_files

pytestmark = pytest.mark.slow

LANGUAGES = {"python", "bash", "text", "sbatch"}
"""The languages of blocks. An sbatch file is saved and not run, because the tests have no SLURM."""

NEEDS_OTHERS = {"ray", "other_trainers"}
"""The pages about packages that make test-third-party installs. Its tests run the scripts of these pages."""
EXCERPTS = sorted(script.stem for script in (Path(__file__).parent / "excerpts").glob("[a-z]*.py"))


def _run(command: list[str], folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path, "COLUMNS": "200", "MPLBACKEND": "agg"}
    found = subprocess.run(command, cwd=folder, env=os.environ | quiet, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, f"{command}: {found.stdout[-2000:]}\n{found.stderr[-4000:]}"
    return f"{found.stdout}\n{found.stderr}"


def _follow(page: Path, folder: Path) -> None:
    """Save and run the blocks in order, in a folder with the files of the quick start and the tutorial."""
    for earlier in ("quick_start.md", "tutorial.md"):
        save_files(DOCS / earlier, folder)
    printed = ""
    for number, block in enumerate(blocks(page)):
        assert block.language in LANGUAGES, f"{page.name}: the tests cannot run a block of {block.language!r}"
        if block.title:
            (folder / block.title).write_text(block.text)
        elif block.language == "python":
            (folder / f"block_{number}.py").write_text(block.text)
            printed = _run([sys.executable, f"block_{number}.py"], folder)
        elif block.language == "bash":
            printed = _run(["bash", "-euo", "pipefail", "-c", block.text], folder)
        elif block.language == "text":
            assert _unsaid(block.text, printed) == [], f"{page.name}: not printed:\n{printed[-6000:]}"


MEASURED = re.compile(r"^(Verdict|Why|Next|Also):|^(rank \d+|all|ddp|freescale|micro_batches|sharded) +\d|\bms\b|of the time\b")
"""Lines whose figures depend on the machine. Of the first three, also the words do."""
NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"


def _unsaid(shown: str, printed: str) -> list[str]:
    """Return the lines of a page that were not printed to their end; an indented line continues the one before.

    Line breaks may differ, and figures by 1 %. Of measured lines, only the beginning up to the first figure is compared, of a
    verdict only the first word, and a second cause may be missing.
    """
    unsaid, lines = [], [" ".join(line.split()) for line in _joined(printed)]
    for line in _joined(shown):
        if MEASURED.search(line):
            beginning = re.split(rf"(?<=^Verdict:)|(?<=^Why:)|(?<=^Next:)|\s*{NUMBER}", line, maxsplit=1)[0]
            said = beginning in printed or beginning.startswith("Also:")
        else:
            figures = [float(figure) for figure in re.findall(NUMBER, line)]
            pattern = f"({NUMBER})".join(re.escape(text) for text in re.split(NUMBER, " ".join(line.split())))
            found = [match.groups() for each in lines if (match := re.search(f"{pattern}$", each))]
            said = any([float(figure) for figure in each] == pytest.approx(figures, rel=0.01) for each in found)
        unsaid += [] if said else [line]
    return unsaid


def _joined(text: str) -> list[str]:
    return re.sub(r"\n  (?=\S)", " ", text).splitlines()


def _with_marks(page: Path) -> object:
    return pytest.param(page, id=page.stem, marks=[pytest.mark.third_party] if page.stem in NEEDS_OTHERS else [])


@pytest.mark.parametrize("page", [_with_marks(page) for page in RUN])
def test_blocks_print_the_output_on_the_page(page: Path, tmp_path: Path) -> None:
    _follow(page, tmp_path)


@pytest.mark.parametrize("script", EXCERPTS)
def test_every_excerpt_runs(script: str, tmp_path: Path) -> None:
    save_files(DOCS / "quick_start.md", tmp_path)
    assert "every block was run" in _run([sys.executable, "-m", f"tests.docs.excerpts.{script}"], tmp_path)


def test_no_page_with_code_is_left_out() -> None:
    code = [str(page.relative_to(ROOT)) for page in PAGES if page not in RUN and any(block.language for block in blocks(page))]
    scripts = "".join(script.read_text() for script in (Path(__file__).parent / "excerpts").glob("[a-z]*.py"))
    assert sorted(code) == sorted(set(re.findall(r'Excerpts\("([^"]+)"\)', scripts)))


def test_missing_output_is_noticed() -> None:
    printed = "bubble b = 31.0%: removing\n  it all\nrank 0  12.0%\nVerdict: No relevant cause\nloss: 0.0739\nsent 3 ms"
    assert _unsaid("bubble b = 31.01%: removing it\n  all\nrank 0  50%\nVerdict: this\nloss: 0.074\nsent 4 ms", printed) == []
    wrong = [
        "bubble b = 37.8%: removing it all",
        "bubble b = 31.0%: removing",
        "loss: 0.073",
        "loss: [0.0739",
        "Next:    that",
        "got 3 ms",
    ]
    assert [_unsaid(line, printed) for line in wrong] == [[line] for line in wrong]


def test_examples_in_docstrings_give_their_results() -> None:
    files = [file for file in (ROOT / "lightning_freescale").rglob("*.py") if ">>>" in file.read_text()]
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    results = {module: doctest.testmod(import_module(module)) for module in modules}
    assert [module for module, result in results.items() if result.failed or not result.attempted] == []
    assert modules


AS_SCRIPT = """
import subprocess

def run(command):
    print(subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout)
"""


def test_the_notebook_trains_and_shows_where_the_time_went(tmp_path: Path) -> None:
    """Run the notebook without Jupyter: ``%%writefile`` saves, ``!`` runs, and other cells are the Python of one process."""
    content = json.loads((ROOT / "examples" / "quick_start.ipynb").read_text())
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    (quick_start,) = (block.text for block in blocks(DOCS / "quick_start.md") if block.title == "quick_start.py")
    assert f"%%writefile quick_start.py\n{quick_start}" == "".join(cells[0]["source"]) + "\n"
    script = AS_SCRIPT
    for source in ("".join(cell["source"]) for cell in cells):
        first, _, rest = source.partition("\n")
        if first.startswith("%%writefile "):
            (tmp_path / first.split()[1]).write_text(f"{rest}\n")
        elif source.startswith("!"):
            script += f"run({source[1:]!r})\n"
        else:
            assert "\n!" not in source and "%" not in first, f"this test does not run it: {source}"
            script += f"{source}\n"
    (tmp_path / "notebook.py").write_text(script)
    printed = _run([sys.executable, "notebook.py"], tmp_path)
    assert all(said in printed for said in ("loss: 0.0", "rank 0: ", "rank 1: ", "bubble: "))
