"""Run a script as Python does, with a profiler in each of its fits: ``profiled_script.py FITS script|module NAME ...``.

``freescale profile run`` starts this file in a new interpreter and sets an environment variable, which the ranks that the
script starts inherit. Whenever a Trainer is made, Lightning asks :func:`callbacks_of_run`, an entry point of this package, for
further callbacks.

The file imports the standard library alone, so that it does not import torch before the script does. ``__main__`` and
``sys.argv`` are the script's own, so ranks that Lightning starts run the script without this file.
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
"""Holds in JSON ``options`` of the BubbleProfiler and ``fits``, the file to which every rank adds its number in every fit."""


def callbacks_of_run() -> list[Any]:
    """Return the callback that profiles a fit if the command runs this script; nothing otherwise."""
    if VARIABLE not in os.environ:
        return []
    from lightning_freescale.callbacks.added_profiler import AddedProfiler

    return [AddedProfiler(**json.loads(os.environ[VARIABLE]))]


def refuse_other_trainer() -> list[Any]:
    """Refuse the Trainer of ``pytorch_lightning`` if the command runs this script: its callbacks are of other classes.

    Raises:
        ValueError: the command runs this script.
    """
    if VARIABLE in os.environ:
        raise ValueError(
            "the script makes a Trainer of pytorch_lightning, the bubble profiler is a callback of lightning.pytorch: "
            "import lightning.pytorch as pl, and nothing of pytorch_lightning"
        )
    return []


def main() -> None:
    """Run the script and exit as it does, or with 2 if it succeeded but no Trainer has trained."""
    fits, kind, name, *arguments = sys.argv[1:]
    sys.argv = [name, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on; such a path does not begin with the script's folder
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
    """Run a file with ``sys.argv[0]`` as typed and an absolute ``__file__``, as Python does; runpy makes both the same."""
    path = os.path.abspath(name)
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))  # noqa: S102 (what the user asked for)


def _end_without_fit(name: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(
            f"freescale profile: {name} has ended, and nothing was profiled, because no Trainer of lightning.pytorch has begun "
            "a fit. A loop without a Trainer is profiled by lightning_freescale.profiling.StepProfiler",
            file=sys.stderr,
        )
    raise SystemExit(2)


if __name__ == "__main__":
    main()
