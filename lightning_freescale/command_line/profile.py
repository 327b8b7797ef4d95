"""``freescale profile``: profile a Lightning script; show and compare bubble reports, and write them as a page."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from lightning_freescale.command_line.profiled_script import VARIABLE
from lightning_freescale.profiling.__main__ import new_parser as profiling_parser
from lightning_freescale.profiling.__main__ import run as run_command
from lightning_freescale.profiling.profiler import ProfilerOptions

_DESCRIPTION = (
    "Run a script as 'python train.py ...' does, with any strategy and launcher, and add a BubbleProfiler to each Trainer "
    "without one. Pass options of the profiler before the script, and arguments of the script after it."
)
_RUN_SCRIPT = Path(__file__).with_name("profiled_script.py")
_HOOK = "lightning.pytorch.callbacks_factory"
"""The group of entry points that return callbacks for each new Trainer."""
_COUNTS = {
    "every_n_steps": "steps between two exchanges of records between the ranks",
    "trace_steps": "number of last steps in the trace; 0 disables the trace",
    "torch_profiler_steps": "number of steps that torch.profiler records",
}


def run(command: str, arguments: list[str]) -> None:
    """Run the command; exit with status 2 and a message on errors."""
    run_command(_new_parser(command), arguments)


def _new_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of ``lightning_freescale.profiling`` with the additional command ``run``."""
    parser = profiling_parser(f"freescale {command}")
    parser.description = __doc__.partition(": ")[2]
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    example = f"example: freescale {command} run --dirpath bubbles train.py --lr 0.1"
    script = commands.add_parser("run", help="run a Lightning script and profile it", description=_DESCRIPTION, epilog=example)
    add, defaults = script.add_argument, ProfilerOptions()
    add("--dirpath", type=Path, metavar="FOLDER", help="folder for the files; default: bubbles in the logger's folder")
    for name, text in _COUNTS.items():
        option, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
        add(option, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    add("--verbose", action="store_const", const=True, help="print the whole report instead of the verdict and one table")
    add("-m", dest="module", action="store_true", help="run a module as python -m does")
    add("script", metavar="train.py", help="path of the script; with -m, name of the module")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    script.set_defaults(run=_run_script)
    return parser


def _run_script(options: argparse.Namespace) -> None:
    """Replace this process by one that runs the script."""
    counts = {name: getattr(options, name) for name in _COUNTS}
    ProfilerOptions(**counts)
    _check_script(options.script, options.module)
    if not any(found.name == "freescale" for found in entry_points(group=_HOOK)):
        raise ValueError(
            f"the installed lightning-freescale has no entry point in {_HOOK!r}, which adds the profiler to a Trainer. Install "
            "the package again; in a checkout with pip install -e ."
        )
    folder = options.dirpath and str(options.dirpath.absolute())  # the script may change its working directory
    handle, fits = tempfile.mkstemp(prefix="freescale-profile-")
    os.close(handle)
    os.environ[VARIABLE] = json.dumps({"options": {"dirpath": folder, "verbose": options.verbose, **counts}, "fits": fits})
    kind = "module" if options.module else "script"
    # a new interpreter, because a script may set environment variables before it imports torch
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # -O, -W, -X and so on, as in multiprocessing
    command = [sys.executable, *flags, str(_RUN_SCRIPT), fits, kind, options.script, *options.arguments]
    os.execv(sys.executable, command)  # noqa: S606 (the user passes the script)


def _check_script(script: str, module: bool) -> None:
    if not module:
        if not os.path.isfile(script):
            raise ValueError(f"the script {script!r} does not exist. Pass the path of a script, or -m and the name of a module")
        return
    sys.path.insert(0, os.getcwd())
    if find_spec(script.partition(".")[0]) is None:  # a submodule cannot be found without importing its package
        raise ValueError(f"-m {script}: the module is neither in {os.getcwd()} nor installed. Check its name")
