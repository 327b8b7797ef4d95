"""The wheel holds the package and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email import message_from_string
from pathlib import Path

import pytest

import lightning_freescale

ROOT = Path(__file__).parents[1]
METADATA = f"lightning_freescale-{lightning_freescale.__version__}.dist-info"
KINDS = {".css", ".html", ".js", ".py"}
"""Suffixes of what belongs in a package: code, and the parts of the report's page."""
ALSO = {"lightning_freescale/py.typed", "lightning_freescale/profiling/reporting/schema.json"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    assert built.name == f"lightning_freescale-{lightning_freescale.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(built)


def _packaged(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if not name.startswith(f"{METADATA}/")}


def test_holds_the_package_alone(wheel: zipfile.ZipFile) -> None:
    packaged = _packaged(wheel)
    assert {name.split("/")[0] for name in packaged} == {"lightning_freescale"}, "no tests, benchmarks or examples"
    assert sorted(name for name in packaged - ALSO if Path(name).suffix not in KINDS) == [], "no data"


def test_holds_what_is_read_at_run_time(wheel: zipfile.ZipFile) -> None:
    page = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lightning_freescale").rglob("page/*") if path.is_file()}
    assert any(name.endswith("/page.html") for name in page)
    assert ALSO | page <= _packaged(wheel)


def test_holds_every_module(wheel: zipfile.ZipFile) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lightning_freescale").rglob("*.py")}
    assert {name for name in _packaged(wheel) if name.endswith(".py")} == modules


def test_metadata_has_version_and_license(wheel: zipfile.ZipFile) -> None:
    metadata = message_from_string(wheel.read(f"{METADATA}/METADATA").decode())
    assert metadata["Version"] == lightning_freescale.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"{METADATA}/licenses/LICENSE" in wheel.namelist()


def test_lightning_finds_what_adds_the_profiler(wheel: zipfile.ZipFile) -> None:
    written = ConfigParser()
    written.read_string(wheel.read(f"{METADATA}/entry_points.txt").decode())
    hooks = {name: dict(section) for name, section in written.items() if name.endswith("callbacks_factory")}
    assert hooks == {
        "lightning.pytorch.callbacks_factory": {"freescale": "lightning_freescale.profile:callbacks_of_run"},
        "pytorch_lightning.callbacks_factory": {"freescale": "lightning_freescale.profile:refuse_other_trainer"},
    }
