"""The two flags of all benchmarks: ``--json`` writes the figures, and ``--require`` checks them."""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import re
import shutil
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

RESULTS = Path(__file__).resolve().parent / "results"
"""What is here is in the repository: figures of README and docs come from it, and it remembers."""
EARLIER = 50
"""Runs that a file there remembers beside the last one."""

_COMPARE = {"<=": operator.le, ">=": operator.ge}


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the two flags."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--json", type=Path, metavar="FILE", help="write the figures, machine and versions to FILE")
    result.add_argument(
        "--require", action="append", default=[], metavar="NAME<=VALUE", help="exit with 1 if a figure is out of range; also >="
    )
    return result


def finish(figures: dict[str, float], options: argparse.Namespace, **more: Any) -> None:
    """Write the figures, and ``more`` beside them, and check the required ones; exit with 1 if a check fails."""
    if options.json is not None:
        result = {"figures": figures, "measured_on": where()} | _remembered(options.json) | more
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    missed = [demand for demand in options.require if not _holds(demand, figures)]
    for demand in missed:
        print(f"out of range: {demand}", file=sys.stderr)
    if missed:
        sys.exit(1)


def finish_on_all_ranks(figures: dict[str, float], options: argparse.Namespace, **more: Any) -> NoReturn:
    """Call :func:`finish` on rank 0, and exit on all ranks with its code. Collective."""
    import torch.distributed as dist

    failed = [0]
    if dist.get_rank() == 0:
        try:
            finish(figures, options, **more)
        except SystemExit as stop:
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
            failed = [1]
    dist.broadcast_object_list(failed)
    dist.destroy_process_group()
    sys.exit(failed[0])


def where() -> dict[str, Any]:
    """Return machine, GPU if any, versions of installed packages, commit, day and command line."""
    packages = {name: version(name) for name in ("torch", "torchrec", "lightning", "numpy") if find_spec(name) is not None}
    machine = {"machine": platform.machine(), "processor": _processor(), "cores": _cores()} | _gpu()
    when = {"commit": _commit(), "date": date.today().isoformat(), "command": _command()}
    return machine | {"python": platform.python_version()} | packages | when


def memory_mb(process: int | str = "self") -> tuple[float, float]:
    """Return the private memory of a process (RssAnon) and that of its mapped files (RssFile), in MB."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    own, mapped = (int(status[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile"))
    return own, mapped


def _remembered(path: Path) -> dict[str, Any]:
    """Return the former runs of a file of :data:`RESULTS` as ``earlier``, newest first; empty for other and new files."""
    if path.resolve().parent != RESULTS or not path.exists():
        return {}
    last = json.loads(path.read_text())
    run = {name: last["measured_on"][name] for name in ("commit", "date", "processor", "command")}
    return {"earlier": [run | {"figures": last["figures"]}, *last.get("earlier", [])][:EARLIER]}


def _processor() -> str:
    """Return the name of the processor, if the system has it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return str(names[0]) if names else platform.processor() or "an unknown processor"


def _command() -> str:
    """Return the command as written in the repository, on netlab if it runs there; outside files by their names alone."""
    lab = os.environ.get("NETLAB_COMMAND", "")
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    script = sys.argv[0].rpartition("benchmarks/")[2]
    return " ".join([*([lab] if lab else []), "python", f"benchmarks/{script}", *words])


def _gpu() -> dict[str, str]:
    import torch

    return {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def _commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    folder = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=folder)
    changed = subprocess.run(["git", "status", "--porcelain", "--", "*.py"], capture_output=True, text=True, cwd=folder.parent)
    return (commit.stdout.strip() or "unknown") + ", changed" * bool(changed.stdout.strip())


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _holds(demand: str, figures: dict[str, float]) -> bool:
    match = re.fullmatch(r"\s*(\S+?)\s*(<=|>=)\s*(\S+)\s*", demand)
    if match is None or match[1] not in figures:
        sys.exit(f"--require {demand!r}: write NAME<=VALUE or NAME>=VALUE with a name of {sorted(figures)}")
    return bool(_COMPARE[match[2]](figures[match[1]], float(match[3])))
