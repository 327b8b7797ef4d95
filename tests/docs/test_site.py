"""The site builds without a warning and shows every public name."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import DOCS, ROOT

MISSING = [name for name in ("mkdocs", "material", "mkdocstrings") if find_spec(name) is None]
ROOMS = ["", ".balance", ".data", ".profiling", ".comm", ".simulator", ".testing"]


def _public(module: ModuleType) -> set[str]:
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    return set(getattr(module, "__all__", [name for name in own if not name.startswith("_")]))


def test_every_public_name_has_a_place_on_the_site() -> None:
    pages = [page.read_text() for page in (DOCS / "api").glob("*.md")]
    shown = re.findall(r"^::: lightning_freescale\.(?:\w+\.)?(\w+)$", "\n".join(pages), re.MULTILINE)
    public = set().union(*(_public(import_module(f"lightning_freescale{room}")) for room in ROOMS))
    public.add("RayFreeScaleStrategy")  # its room needs Ray
    assert public > {"FreeScaleStrategy", "assign", "LaneOptions", "run_distributed", "RankFailed"}
    assert sorted(shown) == sorted(public)


def _make_docs(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """With this interpreter; ``-o``: it is set up already."""
    given = {"BIN": str(Path(sys.executable).parent), "SITE": str(folder), **variables}
    command = ["make", "-o", "setup", "docs", *(f"{name}={value}" for name, value in given.items())]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed, the extra docs has them: {', '.join(MISSING)}")
def test_the_site_builds(tmp_path: Path) -> None:
    made = _make_docs(tmp_path)
    assert made.returncode == 0, made.stdout + made.stderr
    strategy = (tmp_path / "api" / "index.html").read_text()
    assert 'id="lightning_freescale.FreeScaleStrategy"' in strategy and "split_backward" in strategy
    assert ":class:`" not in strategy, "roles are links"
    assert (tmp_path / "index.html").exists() and (tmp_path / "repository" / "examples" / "sasrec.py").exists()


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed, the extra docs has them: {', '.join(MISSING)}")
def test_a_warning_is_an_error(tmp_path: Path) -> None:
    config = tmp_path / "mkdocs.yml"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nowhere](nowhere.md)\n")
    config.write_text("site_name: broken\n")
    made = _make_docs(tmp_path / "site", CONFIG=str(config))
    assert made.returncode != 0 and "nowhere.md" in made.stdout + made.stderr
