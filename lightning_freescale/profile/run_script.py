"""Run a script as Python does, then see whether anything was profiled: ``run_script.py FITS script|module NAME ...``.

The standard library alone: what the script imports and how is left to the script. ``__main__`` and ``sys.argv`` are its own, so
ranks that Lightning starts run it without this file.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType
from zipfile import is_zipfile


def main() -> None:
    """Exits as the script does; with 2 if that was well but no Trainer has trained."""
    fits, kind, name, *arguments = sys.argv[1:]
    sys.argv = [name, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # there from Python 3.11 on; nothing stands first in the path then
        sys.path[0] = os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(name))
    try:
        _run(kind, name)
        if not os.path.getsize(fits):
            _end_without_fit(name)
    finally:
        os.unlink(fits)


def _run(kind: str, name: str) -> None:
    try:
        if kind == "module":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        elif is_zipfile(name):
            runpy.run_path(name, run_name="__main__")
        else:
            _run_file(name)
    except SystemExit as stopped:
        if stopped.code not in (None, 0):
            raise


def _run_file(name: str) -> None:
    """With ``sys.argv[0]`` as it was typed and an absolute ``__file__``, as under Python; runpy makes both the same."""
    path = os.path.abspath(name)
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))  # noqa: S102 (what the user asked for)


def _end_without_fit(name: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(
            f"lightning_freescale.profile: {name} has ended, and nothing was profiled, because no Trainer of lightning.pytorch "
            "has begun a fit. A loop without a Trainer is profiled by lightning_freescale.profiling.StepProfiler",
            file=sys.stderr,
        )
    raise SystemExit(2)


if __name__ == "__main__":
    main()
