"""Make a virtual environment that runs the project: ``python3 scripts/setup_environment.py .venv``.

A second argument, ``torch214`` (the default) or ``torch213``, chooses torch, and the FBGEMM and TorchRec that fit it: the extra
of that name in pyproject.toml.

TorchRec asks for FBGEMM's CUDA build and for an old torchmetrics, and FBGEMM's CUDA and CPU builds write the same folder. So
without a CUDA GPU the CPU build goes first and TorchRec follows without its dependencies; with one, pip resolves everything.
Versions come from pyproject.toml alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("cli", "test", "lint", "docs")
SET = ("torch", "fbgemm-gpu", "torchrec")


def main(folder: Path, torch_extra: str) -> None:
    """Create ``folder`` and install into it."""
    extras = (*EXTRAS, torch_extra)
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        sys.exit(f"Python {sys.version.split()[0]} does not fit: use 3.10 to 3.13, for example make setup PYTHON=python3.11")
    sets = re.findall(r"^(torch\d+) = ", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if torch_extra not in sets:
        sys.exit(f"{torch_extra!r} chooses no torch: pass {' or '.join(sets)}, for example make setup TORCH={sets[0]}")
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    if _has_cuda_gpu():
        _pip(python, "-e", f"{ROOT}[{','.join(extras)}]")
    else:
        _install_for_cpu(python, extras)
    print(f"ready: {folder}")


def _has_cuda_gpu() -> bool:
    command = shutil.which("nvidia-smi")
    return command is not None and subprocess.run([command, "-L"], capture_output=True).returncode == 0


def _install_for_cpu(python: Path, extras: tuple[str, ...]) -> None:
    _pip(python, "--no-deps", "-e", str(ROOT))
    ours = _requirements(python, "lightning-freescale", extras)
    torch, fbgemm, torchrec = ([r for r in ours if _name(r) == name] for name in SET)
    _pip(python, *torch)
    _pip(python, *(r.replace("fbgemm-gpu", "fbgemm-gpu-cpu") for r in fbgemm))
    _pip(python, "--no-deps", *torchrec)
    theirs = [r for r in _requirements(python, "torchrec") if _name(r) not in ("fbgemm-gpu", "torchmetrics")]
    rest = [r for r in ours if _name(r) not in SET]
    _pip(python, *torch, *rest, *theirs, "torchmetrics")


def _requirements(python: Path, package: str, extras: tuple[str, ...] = ()) -> list[str]:
    """Return the requirements of a package and of its extras, without markers."""
    code = f"import importlib.metadata as m; print('\\n'.join(m.requires({package!r}) or []))"
    lines = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.splitlines()
    wanted = [line for line in lines if "extra ==" not in line or any(f"'{extra}'" in line for extra in extras)]
    return [line.split(";")[0].strip() for line in wanted]


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower()


def _pip(python: Path, *arguments: str) -> None:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True, env=environment)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".venv").absolute(), sys.argv[2] if len(sys.argv) > 2 else "torch214")
