"""``python -m lightning_freescale.profile train.py ...``: run a Lightning script, or a module, and profile every fit."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from lightning_freescale.profile import VARIABLE, callbacks_of_run
from lightning_freescale.profiling.hanging.watch import check_options
from lightning_freescale.profiling.profiler import ProfilerOptions

DESCRIPTION = (
    "Runs a script as 'python train.py ...' does, whatever strategy and launcher it uses, and adds a BubbleProfiler to every "
    "Trainer that it makes, unless the script passes one itself. Options of the profiler stand before the script, its own "
    "arguments behind it."
)
EXAMPLE = "example: python -m lightning_freescale.profile --dirpath bubbles train.py --lr 0.1"
_RUN_SCRIPT = Path(__file__).with_name("run_script.py")
_HOOK = "lightning.pytorch.callbacks_factory"
"""The entry points that Lightning asks for callbacks."""
_COUNTS = {
    "every_n_steps": "how often the ranks exchange their records, and log",
    "warmup_steps": "first steps to leave out",
    "max_steps": "the report covers this many steps at most, the last ones",
    "trace_steps": "how many of the last steps go into the trace; 0 for no trace",
    "torch_profiler_steps": "run torch.profiler over this many steps",
}


def main(arguments: Sequence[str] | None = None, program: str = "python -m lightning_freescale.profile") -> None:
    """Run the command line of a ``program`` of this name, in place of this process; exits with 2 if it cannot."""
    parser = argparse.ArgumentParser(program, description=DESCRIPTION, epilog=EXAMPLE)
    add_options(parser)
    try:
        run(parser.parse_args(arguments))
    except ValueError as error:
        parser.exit(2, f"{program}: {error}\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what stands before the script, and the script with its arguments."""
    add, defaults = parser.add_argument, ProfilerOptions()
    add("--dirpath", type=Path, metavar="FOLDER", help="folder to write to; default: bubbles in the logger's folder")
    add("--label", metavar="NAME", help="name of the run in its report; default: the strategy's")
    for name, text in _COUNTS.items():
        option, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
        add(option, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    add("--live", action="store_true", help="show the bubble beside the progress bar")
    add(
        "--hang-timeout", type=seconds_or_auto, default="auto", metavar="SECONDS",
        help="without a step, until all ranks tell where they stand (default: auto, 20 median steps and at least 60 s)",
    )  # fmt: skip
    add("--no-log-files", dest="log_files", action="store_false", help="leave the report's files out of the Trainer's loggers")
    add("-m", dest="module", action="store_true", help="run a module, as python -m does")
    add("script", metavar="train.py", help="the script, or with -m the module's name")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the script")


def run(options: argparse.Namespace) -> None:
    """Run the script in place of this process.

    Raises:
        ValueError: an option does not fit, or there is no such script.
    """
    counts = {name: getattr(options, name) for name in _COUNTS}
    ProfilerOptions(**counts)
    check_options(options.hang_timeout, None)
    _check_script(options.script, options.module)
    if not any(found.value.startswith(f"{callbacks_of_run.__module__}:") for found in entry_points(group=_HOOK)):
        raise ValueError(
            f"the installed lightning-freescale has no entry point in {_HOOK!r}, by which Lightning would ask it for the "
            "profiler: install it again, a checkout by pip install -e ."
        )
    folder = options.dirpath and str(options.dirpath.absolute())  # the script may go elsewhere
    given = {name: getattr(options, name) for name in ("label", "live", "hang_timeout", "log_files")}
    given |= {"dirpath": folder, **counts}
    handle, fits = tempfile.mkstemp(prefix="freescale-profile-")
    os.close(handle)
    os.environ[VARIABLE] = json.dumps({"options": given, "fits": fits})
    kind = "module" if options.module else "script"
    # a fresh interpreter: this package has imported torch, which a script may set environment variables before
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # -O, -W, -X and so on, as multiprocessing
    command = [sys.executable, *flags, str(_RUN_SCRIPT), fits, kind, options.script, *options.arguments]
    os.execv(sys.executable, command)  # noqa: S606 (what the user asked for)


def seconds_or_auto(text: str) -> float | str:
    """Return what an argument says; its name is in argparse's error."""
    return text if text == "auto" else float(text)


def _check_script(script: str, module: bool) -> None:
    if not module:
        if not os.path.isfile(script):
            raise ValueError(f"there is no file {script!r}: pass the script, then its arguments; or -m and a module's name")
        return
    sys.path.insert(0, os.getcwd())
    if find_spec(script.partition(".")[0]) is None:  # what stands behind a dot cannot be found without importing its package
        raise ValueError(f"-m {script}: there is no such module in {os.getcwd()}, nor is one installed")


if __name__ == "__main__":
    main()
