"""``python -m lightning_freescale.profiling``: show, compare and render bubble reports."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lightning_freescale.profiling.reporting.compare import DifferentWorkError, compare, differences, remarks, table
from lightning_freescale.profiling.reporting.document import read
from lightning_freescale.profiling.reporting.text import summary


def main(arguments: Sequence[str] | None = None, program: str = "python -m lightning_freescale.profiling") -> None:
    """Run the command line; exit with code 2 and a message on invalid input."""
    run(new_parser(program), arguments)


def run(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> None:
    """Run the command that ``parser`` finds in the arguments; exit with code 2 and a message on invalid input."""
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return
    try:
        options.run(options)
    except (OSError, ValueError) as error:
        hint = "Pass --force to compare anyway\n" if isinstance(error, DifferentWorkError) else ""
        parser.exit(2, f"{options.command}: {error}\n{hint}")


def _compare(options: argparse.Namespace) -> None:
    documents = [read(path) for path in options.reports]
    labels = [document["run"]["label"] for document in documents]
    for path, document, label in zip(options.reports, documents, labels):
        document["run"]["label"] = label if labels.count(label) == 1 else str(path)
    compared = compare(documents, options.force)
    base, *others = documents
    notes = [line for other in others for line in (*differences(base, other), *remarks(base, other))]
    for line in dict.fromkeys(notes):
        print(f"compare: note: {line}", file=sys.stderr)
    print(table(base, compared))
    if options.json is not None:
        rows = {"base": base["run"]["label"], "runs": [asdict(one) for one in compared]}
        options.json.write_text(json.dumps(rows, indent=2, allow_nan=False) + "\n")


def _page(options: argparse.Namespace) -> None:
    from lightning_freescale.profiling.reporting.page import write_page

    documents = [read(path) for path in options.reports]
    labels = options.label or [document["run"]["label"] for document in documents]
    if len(labels) != len(documents):
        raise ValueError(
            f"--label {' '.join(labels)} has {len(labels)} names for {len(documents)} reports. Pass one per report"
        )
    for document, label in zip(documents, labels):
        document["run"]["label"] = label
    write_page(options.output, documents)
    print(f"wrote {options.output}")


def new_parser(program: str) -> argparse.ArgumentParser:
    """Return the parser with the name ``program``."""
    parser = argparse.ArgumentParser(program, description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    show = commands.add_parser("show", help="print a report as text")
    show.add_argument("report", type=Path, metavar="REPORT.json", help="file that the profiler has written")
    show.set_defaults(run=lambda options: print(summary(read(options.report))))

    against = commands.add_parser(
        "compare",
        help="compare runs with the first one",
        description="Compare each run with the first: the bubble b, the share r of the bubble that was removed per sample, the "
        "end-to-end speed-up, and the speed-up by r and b alone. Runs of different work exit with code 2.",
        epilog="example: python -m lightning_freescale.profiling compare ddp.json freescale.json",
    )
    against.add_argument("reports", type=Path, nargs="+", metavar="REPORT.json", help="the first run, then one or more others")
    against.add_argument("--force", action="store_true", help="also compare runs of different work")
    against.add_argument("--json", type=Path, metavar="FILE", help="file for the values")
    against.set_defaults(run=_compare)

    page = commands.add_parser(
        "page",
        help="write an HTML page",
        epilog="example: python -m lightning_freescale.profiling page ddp.json freescale.json -o bubbles.html",
    )
    page.add_argument("reports", type=Path, nargs="+", metavar="REPORT.json", help="one report, or several to compare")
    page.add_argument("-o", "--output", type=Path, required=True, metavar="PAGE.html", help="file to write")
    page.add_argument("--label", nargs="+", metavar="NAME", help="names of the runs, one per report (default: their labels)")
    page.set_defaults(run=_page)
    return parser


if __name__ == "__main__":
    main()
