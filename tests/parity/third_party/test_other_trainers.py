"""The scripts of the page about trainers of other packages, under "ddp" and under "freescale"."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, save_files


@pytest.mark.third_party
@pytest.mark.parametrize("package", ["replay", "rectools"])
def test_its_own_trainer_reports_equal_losses(package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    save_files(DOCS / "how_to" / "other_trainers.md", tmp_path)
    printed = {}
    for strategy in ("ddp", "freescale"):
        command = [sys.executable, f"train_{package}.py", strategy]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        printed[strategy] = re.findall(r"^(?:loss|recommended): .*$", done.stdout, re.MULTILINE)
    (ddp, *others), (mine, *my_others) = printed["ddp"], printed["freescale"]
    assert float(mine.split()[1]) == pytest.approx(float(ddp.split()[1]), rel=1e-6)
    assert others == my_others
