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

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
METADATA = f"lightning_freescale-{lightning_freescale.__version__}.dist-info"
KINDS = {".css", ".html", ".js", ".py"}
"""Suffixes of what belongs in a package: code, and the parts of the report's page."""
ALSO = {"lightning_freescale/py.typed", "lightning_freescale/profiling/reporting/schema.json"}


def test_the_wheel_holds_the_package_alone(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    wheel = zipfile.ZipFile(next(tmp_path.iterdir()))
    packaged = {name for name in wheel.namelist() if not name.startswith(f"{METADATA}/")}
    assert {name.split("/")[0] for name in packaged} == {"lightning_freescale"}, "no tests, benchmarks or examples"
    assert sorted(name for name in packaged - ALSO if Path(name).suffix not in KINDS) == [], "no data"
    package = ROOT / "lightning_freescale"
    page = {path.relative_to(ROOT).as_posix() for path in package.rglob("page/*") if path.is_file()}
    assert any(name.endswith("/page.html") for name in page) and ALSO | page <= packaged
    modules = {path.relative_to(ROOT).as_posix() for path in package.rglob("*.py")}
    assert {name for name in packaged if name.endswith(".py")} == modules
    metadata = message_from_string(wheel.read(f"{METADATA}/METADATA").decode())
    assert metadata["Version"] == lightning_freescale.__version__ and metadata["License-Expression"] == "Apache-2.0"
    assert f"{METADATA}/licenses/LICENSE" in wheel.namelist()
    written = ConfigParser()
    written.read_string(wheel.read(f"{METADATA}/entry_points.txt").decode())
    assert {name: dict(section) for name, section in written.items() if name.endswith("callbacks_factory")} == {
        "lightning.pytorch.callbacks_factory": {"freescale": "lightning_freescale.profile:callbacks_of_run"},
        "pytorch_lightning.callbacks_factory": {"freescale": "lightning_freescale.profile:refuse_other_trainer"},
    }
