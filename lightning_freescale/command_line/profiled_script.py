"""Run a script as Python does and profile each of its fits: ``profiled_script.py FITS script|module NAME ...``.

``freescale profile run`` starts this file in a new interpreter and sets an environment variable. The ranks that the script
starts inherit the variable. Each new Trainer calls :func:`callbacks_of_run`, an entry point of this package, which returns the
profiler.

The file imports only the standard library, so that the script is the first to import torch. ``__main__`` and ``sys.argv`` are
those of the script, so ranks that Lightning starts run the script without this file.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any
from zipfile import is_zipfile

VARIABLE = "LIGHTNING_FREESCALE_PROFILE"
"""The name of the environment variable with the arguments of ``AddedProfiler`` in JSON."""


def callbacks_of_run() -> list[Any]:
    """Return the callback that profiles each fit if the command runs this script; otherwise an empty list."""
    if VARIABLE not in os.environ:
        return []
    from lightning_freescale.callbacks.bubble_profiler import AddedProfiler

    return [AddedProfiler(**json.loads(os.environ[VARIABLE]))]


def refuse_other_trainer() -> list[Any]:
    """Raise a ValueError for a Trainer of ``pytorch_lightning`` if the command runs this script."""
    if VARIABLE in os.environ:
        raise ValueError(
            "freescale profile: the script creates a Trainer of pytorch_lightning. The profiler only supports the Trainer of "
            "lightning.pytorch. Replace all imports of pytorch_lightning, for example by import lightning.pytorch as pl"
        )
    return []


def main() -> None:
    """Run the script and exit with its status, or with 2 if the script succeeded without a fit."""
    fits, kind, name, *arguments = sys.argv[1:]
    sys.argv = [name, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11; a safe path has no script folder
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
    """Run a file with ``sys.argv[0]`` as typed and an absolute ``__file__``. runpy would set both to the same path."""
    path = os.path.abspath(name)
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))  # noqa: S102 (the user passes the script)


def _end_without_fit(name: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(
            f"freescale profile: {name} ended without a fit of a Trainer of lightning.pytorch, so nothing was profiled. To "
            "profile a loop without a Trainer, use lightning_freescale.profiling.StepProfiler",
            file=sys.stderr,
        )
    raise SystemExit(2)


if __name__ == "__main__":
    main()
