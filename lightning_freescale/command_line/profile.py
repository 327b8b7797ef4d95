"""``freescale profile``: profile a Lightning script; show bubble reports, compare them, make a page of them."""

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
    "Runs a script as 'python train.py ...' does, whatever strategy and launcher it uses, and adds a BubbleProfiler to every "
    "Trainer that it makes, unless the script passes one itself. Options of the profiler stand before the script, its own "
    "arguments after it."
)
_RUN_SCRIPT = Path(__file__).with_name("profiled_script.py")
_HOOK = "lightning.pytorch.callbacks_factory"
"""The entry points that Lightning asks for callbacks."""
_COUNTS = {
    "every_n_steps": "how often the ranks exchange their records, and log",
    "trace_steps": "how many of the last steps go into the trace; 0 for no trace",
    "torch_profiler_steps": "run torch.profiler over this many steps",
}


def run(command: str, arguments: list[str]) -> None:
    """Run the command; exits with 2 and an error message if it cannot."""
    run_command(_new_parser(command), arguments)


def _new_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of ``lightning_freescale.profiling``, with ``run`` among its commands."""
    parser = profiling_parser(f"freescale {command}")
    parser.description = __doc__.partition(": ")[2]
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    example = f"example: freescale {command} run --dirpath bubbles train.py --lr 0.1"
    script = commands.add_parser("run", help="run a Lightning script and profile it", description=_DESCRIPTION, epilog=example)
    add, defaults = script.add_argument, ProfilerOptions()
    add("--dirpath", type=Path, metavar="FOLDER", help="folder to write to; default: bubbles in the logger's folder")
    for name, text in _COUNTS.items():
        option, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
        add(option, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    add("--verbose", action="store_const", const=True, help="print the whole report instead of the verdict and one table")
    add("-m", dest="module", action="store_true", help="run a module, as python -m does")
    add("script", metavar="train.py", help="the script, or with -m the module's name")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the script")
    script.set_defaults(run=_run_script)
    return parser


def _run_script(options: argparse.Namespace) -> None:
    """Run the script in place of this process."""
    counts = {name: getattr(options, name) for name in _COUNTS}
    ProfilerOptions(**counts)
    _check_script(options.script, options.module)
    if not any(found.name == "freescale" for found in entry_points(group=_HOOK)):
        raise ValueError(
            f"the installed lightning-freescale has no entry point in {_HOOK!r}, by which Lightning would ask it for the "
            "profiler: install it again, a checkout by pip install -e ."
        )
    folder = options.dirpath and str(options.dirpath.absolute())  # the script may change its working directory
    handle, fits = tempfile.mkstemp(prefix="freescale-profile-")
    os.close(handle)
    os.environ[VARIABLE] = json.dumps({"options": {"dirpath": folder, "verbose": options.verbose, **counts}, "fits": fits})
    kind = "module" if options.module else "script"
    # a fresh interpreter: this package has imported torch, which a script may set environment variables before
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # -O, -W, -X and so on, as multiprocessing
    command = [sys.executable, *flags, str(_RUN_SCRIPT), fits, kind, options.script, *options.arguments]
    os.execv(sys.executable, command)  # noqa: S606 (what the user asked for)


def _check_script(script: str, module: bool) -> None:
    if not module:
        if not os.path.isfile(script):
            raise ValueError(f"there is no file {script!r}: pass the script, then its arguments; or -m and a module's name")
        return
    sys.path.insert(0, os.getcwd())
    if find_spec(script.partition(".")[0]) is None:  # a submodule cannot be found without importing its package
        raise ValueError(f"-m {script}: there is no such module in {os.getcwd()}, nor is one installed")
