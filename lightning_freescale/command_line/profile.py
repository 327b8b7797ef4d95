"""``freescale profile``: profile a Lightning script; show and compare bubble reports, and write them as a page."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from lightning_freescale.command_line.profiled_script import VARIABLE
from lightning_freescale.profiling.profiler import ProfilerOptions
from lightning_freescale.profiling.reporting.compare import DifferentWorkError, compare, differences, remarks, table
from lightning_freescale.profiling.reporting.document import Document, read
from lightning_freescale.profiling.reporting.page import write_page
from lightning_freescale.profiling.reporting.text import summary

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
    parser = _new_parser(command)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return
    try:
        options.run(options)
    except (OSError, ValueError) as error:
        hint = "Pass --force to compare anyway\n" if isinstance(error, DifferentWorkError) else ""
        parser.exit(2, f"{options.command}: {error}\n{hint}")


def _new_parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"freescale {command}", description=__doc__.partition(": ")[2], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add_parser = partial(commands.add_parser, allow_abbrev=False)

    show = add_parser("show", help="print a report as text")
    show.add_argument("report", type=Path, metavar="REPORT.json", help="file that the profiler has written")
    show.set_defaults(run=lambda options: print(summary(read(options.report))))

    against = add_parser(
        "compare",
        help="compare runs with the first one",
        description="Compare each run with the first: the bubble b, the share r of the bubble that was removed per sample, the "
        "end-to-end speed-up, and the speed-up by r and b alone. Runs of different work exit with code 2.",
        epilog="example: freescale profile compare ddp.json freescale.json",
    )
    against.add_argument("reports", type=Path, nargs="+", metavar="REPORT.json", help="the first run, then one or more others")
    against.add_argument("--force", action="store_true", help="also compare runs of different work")
    against.add_argument("--json", type=Path, metavar="FILE", help="file for the values")
    against.set_defaults(run=_compare)

    page = add_parser(
        "page",
        help="write an HTML page",
        epilog="example: freescale profile page ddp.json freescale.json -o bubbles.html",
    )
    page.add_argument("reports", type=Path, nargs="+", metavar="REPORT.json", help="one report, or several to compare")
    page.add_argument("-o", "--output", type=Path, required=True, metavar="PAGE.html", help="file to write")
    page.set_defaults(run=_page)

    example = f"example: freescale {command} run --dirpath bubbles train.py --lr 0.1"
    script = add_parser("run", help="run a Lightning script and profile it", description=_DESCRIPTION, epilog=example)
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


def _read_all(paths: list[Path]) -> list[Document]:
    """Return the documents. Runs with the same label get the paths of their files as labels."""
    documents = [read(path) for path in paths]
    labels = [document["run"]["label"] for document in documents]
    for path, document, label in zip(paths, documents, labels):
        document["run"]["label"] = label if labels.count(label) == 1 else str(path)
    return documents


def _page(options: argparse.Namespace) -> None:
    write_page(options.output, _read_all(options.reports))
    print(f"wrote {options.output}")


def _compare(options: argparse.Namespace) -> None:
    documents = _read_all(options.reports)
    compared = compare(documents, options.force)
    base, *others = documents
    notes = [line for other in others for line in (*differences(base, other), *remarks(base, other))]
    for line in dict.fromkeys(notes):
        print(f"compare: note: {line}", file=sys.stderr)
    print(table(base, compared))
    if options.json is not None:
        rows = {"base": base["run"]["label"], "runs": [asdict(one) for one in compared]}
        options.json.write_text(json.dumps(rows, indent=2, allow_nan=False) + "\n")


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
