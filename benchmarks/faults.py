"""Failures of a training on 2 to 4 ranks: each run has one fault, must end with a clear error, and must resume exactly.

Ranks are killed, stopped or terminated. They raise, hang or exit in each part of a step and of a checkpoint. Checkpoints are
damaged. The training then resumes from the last checkpoint and must end bitwise like a training without a fault. The benchmark
counts:

hangs            ranks still running after the timeout of the process group and ``--grace``
silent_losses    trainings that ended with other weights, began anew beside a whole checkpoint, or have no checkpoint left
unnamed_errors   ranks without a fault that ended without an error that names a failed rank and a cause
orphans          remaining processes
shared_memory    remaining pieces of shared memory
not_resumed      trainings that did not resume from a whole checkpoint
unstruck         faults that did not occur

``--self-test`` runs trainings with one of these defects each, and fails if one of them is not found.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parent))

import harness
from fault_kinds import CONTROLS, KINDS, SAVES_EVERY, Case, Fault, draw_case, draw_cases
from fault_ranks import Attempt, run_ranks
from fault_training import histories, train

from lightning_freescale.data import HistoryDataset

DEFECTS = ("hangs", "silent_losses", "unnamed_errors", "orphans", "shared_memory", "not_resumed", "unstruck")
_CAUSE = re.compile(
    "injected fault|died|dead|killed|ended|left|lost|go(es|ne)|disconn|clos(ed|ing)|reset|time[sd]? ?out|stopped|not answer|"
    "no answer|SIGTERM|SIGINT|nan|could not|OSError|Interrupt",
    re.IGNORECASE,
)
_DAMAGED = "is damaged or incomplete"

Found = list[tuple[str, str]]
"""Which defect, and what was seen of it."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    cases = draw_cases(options.kinds, options.runs, options.seed)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    counts, missed, slowest, began = Counter[str](), list[str](), 0.0, time.monotonic()
    print(f"{'run':>4} {'kind':<36} {'ranks':>5} {'struck':<10} {'step':>4} {'ended after':>11}  found", flush=True)
    try:
        for number, case in enumerate(cases):
            if time.monotonic() - began > options.seconds:
                break
            found, seconds, how = run_case(case, folder / f"run{number}", folder, options.grace)
            counts.update({"runs": 1, how: 1, **dict.fromkeys({defect for defect, _ in found}, 1)})
            slowest = max(slowest, seconds)
            step, struck = case.faults[-1].step, ", ".join(map(str, case.faults[-1].ranks))
            row = f"{number:>4} {case.kind:<36} {case.ranks:>5} {struck:<10} {step:>4} {seconds:>9.1f} s  {how}"
            print(row, flush=True)
            for defect, text in found:
                print(f"     {defect}: {text}", flush=True)
            if case.finds and case.finds not in {defect for defect, _ in found}:
                missed.append(f"{case.kind} has {case.finds}, and they were not found")
            if not found or not options.keep:
                shutil.rmtree(folder / f"run{number}")
    finally:
        print(f"the files of the runs are in {folder}") if options.keep else shutil.rmtree(folder)
    ways = ("resumed", "went_on", "refused", "failed")
    figures = {name: float(counts[name]) for name in ("runs", *DEFECTS, *ways)} | {"slowest_seconds": slowest}
    print(", ".join(f"{name} {figures[name]:.0f}" for name in ("runs", *DEFECTS)))
    for text in missed:
        print(text, file=sys.stderr)
    harness.finish(figures, options)
    if missed:
        sys.exit(1)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--runs", type=int, help="number of runs (default: each kind twice)")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help=f"kinds of failure: {', '.join(KINDS)} (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after that time")
    parser.add_argument(
        "--grace", type=float, default=30.0, help="seconds beyond the timeout that a rank may take (default: 30)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the output and files of runs with a defect")
    parser.add_argument("--self-test", action="store_true", help="run trainings with a defect, which must be found")
    options = parser.parse_args(arguments)
    known = CONTROLS if options.self_test else KINDS
    options.kinds = options.kinds or list(known)
    if unknown := [name for name in options.kinds if name not in known]:
        parser.error(f"--kinds {' '.join(unknown)}: choose from {', '.join(known)}")
    if options.runs is None:
        options.runs = len(options.kinds) * (1 if options.self_test else 2)
    if options.runs < 1:
        parser.error(f"--runs {options.runs}: at least 1")
    return options


def run_case(case: Case, folder: Path, references: Path, grace: float) -> tuple[Found, float, str]:
    """Return the defects, the seconds that the other ranks took to end after the fault, and how the training continued."""
    expected = _reference(case.ranks, references)
    found, seconds, resume = Found(), 0.0, None
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    for fault in case.faults:
        attempt = _attempt(case, fault, folder, resume, grace)
        found += defects(fault, attempt, expected)
        seconds = max([seconds, *(end.seconds for rank, end in enumerate(attempt.ends) if rank not in fault.ranks)])
        resume = "last"
    if all(end.result is not None for end in attempt.ends):
        return found, seconds, "went_on"
    had = max(attempt.steps, *(fault.step for fault in case.faults)) > SAVES_EVERY and case.faults[-1].how != "remove"
    if had and not any(map(_is_whole, checkpoints.glob("*.ckpt"))):
        return [*found, ("silent_losses", "no checkpoint is whole")], seconds, "failed"
    _damage(checkpoints, case.damage)
    how, resumed = "resumed", _attempt(case, None, folder, "last", grace)
    if case.damage in ("truncated", "altered") and all(_DAMAGED in end.error for end in resumed.ends):
        newest = max((path for path in checkpoints.glob("step=*.ckpt") if _is_whole(path)), key=_step)
        how, resumed = "refused", _attempt(case, None, folder, str(newest), grace)
    if errors := [f"rank {rank}: {end.error[-300:]}" for rank, end in enumerate(resumed.ends) if end.result is None]:
        return [*found, ("not_resumed", "; ".join(errors))], seconds, "failed"
    found += _losses(resumed, expected)
    if had and any(end.result is not None and end.result["first_step"] == 0 for end in resumed.ends):
        found.append(("silent_losses", "a checkpoint was whole, and the training began anew"))
    return found, seconds, how


def _attempt(case: Case, fault: Fault | None, folder: Path, resume: str | None, grace: float) -> Attempt:
    samples = _samples()
    return run_ranks(
        lambda rank, progress: train(case, fault, samples, folder, rank, progress, resume),
        case.ranks,
        fault,
        folder,
        case.timeout + grace,
    )


@cache
def _samples() -> HistoryDataset:
    return histories()


@cache
def _reference(ranks: int, folder: Path) -> list[str]:
    """Return the final state of each rank without a fault.

    Raises:
        RuntimeError: a rank has failed.
    """
    case, place = (
        replace(draw_case("killed", Random(0)), ranks=ranks, workers=0, checkpoint="single"),
        folder / f"reference{ranks}",
    )
    (place / "checkpoints").mkdir(parents=True)
    ends = _attempt(case, None, place, None, grace=0.0).ends
    shutil.rmtree(place)
    if errors := [end.error for end in ends if end.result is None]:
        raise RuntimeError(f"{ranks} ranks without a fault ended with {errors}")
    return [end.result["digest"] for end in ends if end.result is not None]


def defects(fault: Fault, attempt: Attempt, expected: list[str]) -> Found:
    """Return the defects of an attempt with a fault."""
    found = [("hangs", f"rank {rank} was still there") for rank, end in enumerate(attempt.ends) if end.code is None]
    if not attempt.struck:
        found.append(("unstruck", f"{fault.place}, {fault.how} at step {fault.step} of rank {fault.ranks}"))
    found += [("orphans", name) for name in attempt.processes] + [("shared_memory", name) for name in attempt.memory]
    for rank, end in enumerate(attempt.ends):
        if rank in fault.ranks or end.code is None or end.result is not None:
            continue
        if end.code == 0:
            found.append(("silent_losses", f"rank {rank} left with 0 in the middle"))
        elif not (_named(end.error) & set(fault.ranks) and _CAUSE.search(end.error)):
            found.append(("unnamed_errors", f"rank {rank}: {end.error.strip()[:300] or f'none, code {end.code}'}"))
    return found + _losses(attempt, expected)


def _named(error: str) -> set[int]:
    """Return the ranks that an error names."""
    found = re.findall(r"\branks?\b(?:\W|dict_keys)*(\d+(?:(?:,| and|, and) \d+)*)", error, re.IGNORECASE)
    return {int(number) for listed in found for number in re.findall(r"\d+", listed)}


def _losses(attempt: Attempt, expected: list[str]) -> Found:
    other = [rank for rank, end in enumerate(attempt.ends) if end.result is not None and end.result["digest"] != expected[rank]]
    return [("silent_losses", f"ranks {other} ended otherwise than without the fault")] if other else []


def _is_whole(checkpoint: Path) -> bool:
    if checkpoint.is_dir():
        return (checkpoint / "freescale.json").is_file()
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False


def _step(checkpoint: Path) -> int:
    return int(checkpoint.stem.partition("=")[2])


def _damage(checkpoints: Path, how: str) -> None:
    """Damage the last checkpoint according to :attr:`Case.damage`."""
    if not how:
        return
    if how == "hidden":
        checkpoints.rename(checkpoints.with_name("hidden"))
        return
    last = checkpoints / "last.ckpt"
    files = [last] if last.is_file() else [path for path in last.iterdir() if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    size = largest.stat().st_size
    with open(largest, "r+b") as file:
        if how == "truncated":
            file.truncate(size // 2)
        else:
            file.seek(size // 2)
            byte = file.read(1)[0]
            file.seek(size // 2)
            file.write(bytes([byte ^ 1]))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *received: sys.exit("received SIGTERM"))  # which also ends the ranks
    main()
