"""All measurements of one GPU by one command: ``python benchmarks/gpu/first_hour.py --out DIR``.

The command stops after 15 minutes (``--limit-minutes``), including unpacking. Each part is a process with its own limit. If it
exceeds the limit, its results so far count, and the next part runs. The most important parts run first:

numbers     strategy against plain TorchRec: all other results depend on correct numbers
two_ranks   transports against gloo, training against ddp, and a killed rank
host_time   waits and idle time of a step with overlap, with an inline exchange, and without overlap
contention  cost of a transfer for the compute beside it; the longest part
model       the step of the reference model; without a network between ranks it shows costs, and no gains
uneven      cost of transfers with parts of different lengths; between GPUs, also NCCL with its zero-CTA policy

two_ranks, contention and uneven need torch alone. Without a GPU, the parts run with small sizes or list what they skip.

The limits of all parts and of unpacking exceed 15 minutes together. If a machine is available for ten minutes per call, use two
calls with different folders, because a run removes the results of an earlier run in its folder::

    first_hour.py --parts numbers,two_ranks --limit-minutes 9 --out first
    first_hour.py --parts host_time,contention,model --limit-minutes 9 --out second

On several GPUs, run ``--parts uneven`` first.

DIR/summary.md and DIR/summary.json contain all results, also while a part runs. part_*.json are the files of the parts, and
log.txt is their output. The exit code is 1 if a part failed, exceeded its limit, did not run, or measured nothing although
--site was given.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path += [str(Path(__file__).parents[depth]) for depth in range(2)]

import harness
from hour_process import run_limited
from hour_summary import Summary

HERE = Path(__file__).parent
PARTS = {"numbers": 240, "two_ranks": 210, "host_time": 120, "contention": 180, "model": 180, "uneven": 180}  # seconds
UNPACKING = 180.0  # seconds that --site may take


class Stopped(Exception):  # noqa: N818 (says what happened)
    """Raised when a signal ends this process."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def main(arguments: Sequence[str] | None = None, scripts: Path = HERE) -> None:
    """Run the parts; ``scripts`` is the folder of their scripts."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in ("log.txt", *(f"part_{part}.{kind}" for part in PARTS for kind in ("json", "md"))):
        (options.out / name).unlink(missing_ok=True)  # otherwise the summary would contain results of an earlier run
    summary = Summary(options.out, options.parts)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        with tempfile.TemporaryDirectory(prefix="first_hour-") as folder:
            run_parts(summary, options, scripts, Path(folder) / "site")
    except Stopped as stopped:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        summary.cut_off(f"stopped by {stopped}")
        print(f"stopped by {stopped}: {options.out / 'summary.md'} contains the results so far", file=sys.stderr)
        sys.exit(128 + stopped.number)
    print(f"\n{summary.overview()}\n{options.out / 'summary.md'} contains all results", flush=True)
    harness.finish(summary.figures(), options)
    sys.exit(0 if summary.all_well else 1)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--out", type=Path, default=Path("first_hour"), metavar="DIR", help="folder of all files (default: first_hour)")
    add("--parts", default=",".join(PARTS), metavar="A,B", help=f"the parts to run (default: {','.join(PARTS)})")
    add("--quick", action="store_true", help="small sizes and few repeats")
    add("--site", type=Path, metavar="ARCHIVE", help="archive of benchmarks/gpu/pack.py with packages for the parts")
    add("--limit-minutes", type=float, default=15.0, metavar="N", help="time limit of the whole command (default: 15)")
    options = parser.parse_args(arguments)
    asked = options.parts.split(",")
    if unknown := [name for name in asked if name not in PARTS]:
        parser.error(f"--parts {options.parts}: {', '.join(unknown)!r} is not among {', '.join(PARTS)}")
    options.parts = [name for name in PARTS if name in asked]
    if options.limit_minutes <= 0:
        parser.error(f"--limit-minutes {options.limit_minutes:g}: give a positive number")
    if options.site is not None and not options.site.is_file():
        parser.error(f"--site {options.site}: there is no such file")
    return options


def run_parts(summary: Summary, options: argparse.Namespace, scripts: Path, site: Path) -> None:
    """Unpack to ``site``, which does not exist yet, and run the parts; keep the summary current."""
    deadline, log = time.monotonic() + 60 * options.limit_minutes, options.out / "log.txt"
    paths = []
    if options.site is not None:
        command = [str(scripts / "unpack_site.py"), str(options.site), str(site)]
        ended = run_limited(command, log, min(UNPACKING, deadline - time.monotonic()), [])
        summary.site(ended)
        paths = [str(site)] if ended.code == 0 else []  # some parts do not need the packages
        print(summary.of_site(), flush=True)
    for name in options.parts:
        left = deadline - time.monotonic()
        if left <= 0:
            summary.leave_out(name, f"the {options.limit_minutes:g} minutes were over")
            continue
        command = [str(scripts / f"part_{name}.py"), "--out", str(options.out), *(["--quick"] if options.quick else [])]
        summary.begin(name)
        ended = run_limited(command, log, min(PARTS[name], left), paths, each_second=summary.write)
        summary.end(name, ended)
        print(summary.page(name), flush=True)


def _stop(number: int, frame: object) -> None:
    raise Stopped(number)


if __name__ == "__main__":
    main()
