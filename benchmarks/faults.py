"""Failures of a training on 2 to 4 ranks: each run has one fault, must end with a clear error, and must resume exactly.

Ranks are killed, stopped or terminated. They raise, hang or exit in each part of a step, of a checkpoint and of the set-up.
Disks are full, memory is short, two jobs write the same checkpoints, and checkpoints are damaged. The training then resumes
from the last checkpoint and must end bitwise like a training without a fault. The benchmark counts:

hangs            ranks still running ``--grace`` seconds after the fault, or after the timeout of the process group if the
                 ranks cannot notice the fault before
silent_losses    trainings that ended with other weights, resumed from before a complete save, or have no checkpoint left
mixtures         checkpoints with contents that no training has saved, among them those of two jobs
failed_reads     checkpoints that could not be read while two jobs replaced them
unnamed_errors   ranks without a fault that ended without an error that names a failed rank and a cause, ranks that lost their
                 own error, and errors of files without path and cause
partial_files    remaining files of saves that were not completed
orphans          remaining processes
shared_memory    remaining pieces of shared memory
not_resumed      trainings that did not resume from a whole checkpoint
unstruck         faults that did not occur

``--self-test`` runs trainings with these defects, and fails if one of them is not found.

``--append FILE`` adds the counts to those of an earlier result, which had another seed. For each defect, the result
has the upper limit of the one-sided 95 % confidence interval for its share of the runs: about 3 / n if none of n runs had it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parent))

import harness
from checkpoint_contents import alter
from fault_counts import Counts
from fault_kinds import CONTROLS, KINDS, ROOT_ONLY, SAVES_EVERY, Case, Fault, draw_case, draw_cases, kinds_here
from fault_ranks import Attempt, RankEnd, run_ranks
from fault_training import digest_of_state, histories, train

from lightning_freescale.checkpoint.conversion import read_checkpoint
from lightning_freescale.checkpoint.sharded_folder import materialized
from lightning_freescale.data import HistoryDataset

DEFECTS = ("hangs", "silent_losses", "mixtures", "failed_reads", "unnamed_errors", "partial_files")
DEFECTS += ("orphans", "shared_memory", "not_resumed", "unstruck")
ENDS = ("resumed", "went_on", "failed")
_CAUSE = re.compile(
    "injected fault|died|dead|killed|ended|left|lost|go(es|ne)|disconn|clos(ed|ing)|reset|time[sd]? ?out|stopped|not answer|"
    "no answer|SIGTERM|SIGINT|nan|could not|Error|Interrupt|memory",
    re.IGNORECASE,
)
_COMPLETE = re.compile(r"(step=\d+|last)(-v\d+)?\.ckpt")

Found = list[tuple[str, str]]
"""Which defect, and what was seen of it."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    drawn = enumerate(draw_cases(options.kinds, options.runs, options.seed))
    cases = [(number, case) for number, case in drawn if not options.only or number in options.only]
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    counts, missed, began, runs = Counts.new(options.kinds, options.grace), list[str](), time.monotonic(), 0
    print(
        f"{'run':>4} {'kind':<36} {'checkpoint':<10} {'ranks':>5} {'struck':<10} {'step':>4} {'ended after':>11}  found",
        flush=True,
    )
    try:
        for number, case in cases:
            if time.monotonic() - began > options.seconds:
                break
            found, seconds, how = run_case(case, folder / f"run{number}", folder, options.grace)
            counts.add(options.seed, number, case.kind, found, seconds, how)
            runs += 1
            _print(number, case, found, seconds, how)
            if case.finds and case.finds not in {defect for defect, _ in found}:
                missed.append(f"{case.kind} has {case.finds}, and they were not found")
            if not found or not options.keep:
                shutil.rmtree(folder / f"run{number}")
    finally:
        print(f"the files of the runs are in {folder}") if options.keep else shutil.rmtree(folder)
    where = harness.where()
    counts.parts.append({"seed": options.seed, "runs": runs, "commit": where["commit"], "date": where["date"]})
    print(f"{(time.monotonic() - began) / max(1, runs):.1f} s per run")
    _finish(counts, options)
    for text in missed:
        print(text, file=sys.stderr)
    if missed:
        sys.exit(1)


def _print(number: int, case: Case, found: Found, seconds: float, how: str) -> None:
    step, struck = case.faults[-1].step, ", ".join(map(str, case.faults[-1].ranks))
    row = f"{number:>4} {case.kind:<36} {case.checkpoint:<10} {case.ranks:>5} {struck:<10} {step:>4} {seconds:>9.1f} s  {how}"
    print(row, flush=True)
    for defect, text in found:
        print(f"     {defect}: {text}", flush=True)


def _finish(counts: Counts, options: argparse.Namespace) -> None:
    """Print and write the counts of this call and of those to which they are added."""
    if options.append is not None:  # read now, because another call may have added its runs
        counts.add_earlier(Counts.read(options.append, Counts.new(options.kinds, options.grace), options.seed))
    figures, more = counts.figures(DEFECTS, ENDS), counts.as_json()
    for name in DEFECTS:
        print(f"{name} {figures[name]:.0f} of {figures['runs']:.0f} runs, at most {figures[f'{name}_at_most']:.2%}")
    if options.append is not None:
        more["earlier"] = json.loads(options.append.read_text()).get("earlier", [])
        options.json = options.append
    harness.finish(figures, options, **more)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--runs", type=int, help="number of runs (default: each kind twice)")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help=f"kinds of failure: {', '.join(KINDS)} (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after that time")
    parser.add_argument(
        "--grace", type=float, default=15.0, help="seconds that a rank may take, beyond a timeout if one applies (default: 15)"
    )
    parser.add_argument(
        "--append", type=Path, metavar="FILE", help="add the counts to those in FILE, a result with other seeds"
    )
    parser.add_argument("--only", type=int, nargs="+", metavar="RUN", help="repeat only these runs of a seed")
    parser.add_argument("--keep", action="store_true", help="keep the output and files of runs with a defect")
    parser.add_argument("--self-test", action="store_true", help="run trainings with a defect, which must be found")
    options = parser.parse_args(arguments)
    known = CONTROLS if options.self_test else KINDS
    options.kinds = options.kinds or (list(known) if options.self_test else kinds_here())
    if unknown := [name for name in options.kinds if name not in known]:
        parser.error(f"--kinds {' '.join(unknown)}: choose from {', '.join(known)}")
    if options.runs is None:
        options.runs = len(options.kinds) * (1 if options.self_test else 2)
    if options.runs < 1:
        parser.error(f"--runs {options.runs}: at least 1")
    if options.append is not None:
        try:
            Counts.read(options.append, Counts.new(options.kinds, options.grace), options.seed)
        except ValueError as error:
            parser.error(str(error))
    return options


def run_case(case: Case, folder: Path, references: Path, grace: float) -> tuple[Found, float, str]:
    """Return the defects, the seconds that the other ranks took to end after the fault, and how the training continued."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    with _mounted(case, disk) as repair:
        found, seconds, how = _run_case(case, folder, disk / "checkpoints", references, grace, repair)
    return list(dict.fromkeys(found)), seconds, how


def _run_case(
    case: Case, folder: Path, checkpoints: Path, references: Path, grace: float, repair: Callable[[], None]
) -> tuple[Found, float, str]:
    checkpoints.mkdir()
    known = [_reference(case.ranks, job, references) for job in range(case.jobs)]
    expected = [end for of_job in known for end in of_job.ends]
    found, seconds, steps, resume, job = Found(), 0.0, 0, None, 0
    for fault in case.faults:
        attempt = _attempt(case, fault, folder, checkpoints, resume, grace, watch=_reader(case, checkpoints, known, found))
        found += defects(case, fault, attempt, expected)
        others = [end for rank, end in enumerate(attempt.ends) if rank not in fault.ranks]
        seconds = max(seconds, *(end.seconds for end in others or attempt.ends))
        steps, resume = max(steps, attempt.steps), "last"
    repair()
    if case.jobs > 1:
        jobs = {path.name: _job_of(path, known, found) for path in checkpoints.glob("*.ckpt")}
        job = jobs.get("last.ckpt") or 0
    if all(end.result is not None for end in attempt.ends):
        return found + _partial(checkpoints), seconds, "went_on"
    # the save of the last step may be incomplete, and one in the background until the next
    saved = 0 if case.faults[-1].how == "remove" else (steps - 1) // SAVES_EVERY - (case.checkpoint == "async")
    left = [*checkpoints.glob("*.ckpt")]
    if not any(map(_is_whole, left)):
        if saved > 0:
            return [*found, ("silent_losses", "no checkpoint is whole")], seconds, "failed"
        if left and case.faults[-1].how == "remove":  # the fault has removed a part of the only checkpoint
            return found, seconds, "failed"
    if not _damage(checkpoints, case):
        found.append(("unstruck", "no save was complete before the fault, so there is no last checkpoint to damage"))
    resumed = _attempt(replace(case, jobs=1), None, folder, checkpoints, "last", grace, job)
    if errors := [f"rank {rank}: {end.error[-2000:]}" for rank, end in enumerate(resumed.ends) if end.result is None]:
        return [*found, ("not_resumed", "; ".join(errors))], seconds, "failed"
    found += _losses(resumed, known[job].ends) + _partial(checkpoints)
    first = min(end.result["first_step"] for end in resumed.ends if end.result is not None)
    if 0 <= first < saved * SAVES_EVERY and case.jobs == 1:
        found.append(("silent_losses", f"step {saved * SAVES_EVERY} was saved, and the training resumed from step {first}"))
    return found, seconds, "resumed"


@contextmanager
def _mounted(case: Case, folder: Path) -> Iterator[Callable[[], None]]:
    """Mount a small disk for some kinds of faults. Yield a function that repairs it."""
    if case.kind not in ROOT_ONLY:
        yield lambda: None
        return

    def repair() -> None:
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
        (folder / "filler").unlink(missing_ok=True)

    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], check=True)
    try:
        yield repair
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def _attempt(
    case: Case,
    fault: Fault | None,
    folder: Path,
    checkpoints: Path,
    resume: str | None,
    grace: float,
    job: int = 0,
    watch: Callable[[], None] = lambda: None,
) -> Attempt:
    samples = _samples()
    return run_ranks(
        lambda number, progress: train(case, fault, samples, checkpoints, number, progress, resume, job + number // case.ranks),
        case.ranks,
        fault,
        folder,
        max(case.waits, 0.0 if fault is None else fault.seconds) + grace,
        case.jobs,
        watch,
    )


def _reader(case: Case, checkpoints: Path, known: list[Reference], found: Found) -> Callable[[], None]:
    """Return a function that reads one of the checkpoints of two jobs, each time another."""
    turn = iter(range(sys.maxsize))

    def read() -> None:
        if paths := sorted(checkpoints.glob("*.ckpt")):
            _job_of(paths[next(turn) % len(paths)], known, found)

    return read if case.jobs > 1 else lambda: None


def _job_of(path: Path, known: list[Reference], found: Found) -> int | None:
    """Return the job that wrote a checkpoint, and add to ``found`` if it is not of one job as a whole."""
    try:
        content = digest_of_state(materialized(read_checkpoint(path, weights_only=False)))
    except Exception as error:
        found.append(("failed_reads", f"{path.name}: {type(error).__name__}: {error}"))
        return None
    jobs = [job for job, of_job in enumerate(known) if content in of_job.saved]
    if not jobs:
        found.append(("mixtures", f"no job has saved what {path.name} contains"))
    return jobs[0] if jobs else None


def _partial(checkpoints: Path) -> Found:
    return [("partial_files", path.name) for path in checkpoints.iterdir() if not _COMPLETE.fullmatch(path.name)]


@cache
def _samples() -> HistoryDataset:
    return histories()


@dataclass(frozen=True)
class Reference:
    """A training without a fault.

    Attributes:
        ends: a checksum of the final state of each rank.
        saved: those of its checkpoints.
    """

    ends: list[str]
    saved: set[str]


@cache
def _reference(ranks: int, job: int, folder: Path) -> Reference:
    """Return a training without a fault.

    Raises:
        RuntimeError: a rank has failed.
    """
    place = folder / f"reference{ranks}_{job}"
    place.mkdir(parents=True)
    case = replace(draw_case("killed", Random(0)), ranks=ranks, workers=0, checkpoint="single")
    ends = _attempt(case, None, place, place, None, 0.0, job).ends
    if errors := [end.error for end in ends if end.result is None]:
        raise RuntimeError(f"{ranks} ranks without a fault ended with {errors}")
    saved = {digest_of_state(read_checkpoint(path, weights_only=False)) for path in place.glob("*.ckpt")}
    shutil.rmtree(place)
    return Reference([end.result["digest"] for end in ends if end.result is not None], saved)


def defects(case: Case, fault: Fault, attempt: Attempt, expected: list[str]) -> Found:
    """Return the defects of an attempt with a fault."""
    found = [
        ("hangs", f"rank {rank} was still there: {end.error[:1500]}")
        for rank, end in enumerate(attempt.ends)
        if end.code is None
    ]
    if not attempt.struck:
        found.append(("unstruck", f"{fault.place}, {fault.how} at step {fault.step} of rank {fault.ranks}"))
    found += [("orphans", name) for name in attempt.processes] + [("shared_memory", name) for name in attempt.memory]
    for rank, end in enumerate(attempt.ends):
        if end.code is None or end.result is not None:
            continue
        if end.code == 0 and rank not in fault.ranks:
            found.append(("silent_losses", f"rank {rank} left with 0 in the middle"))
        elif not _is_clear(case, fault, rank, end):
            found.append(("unnamed_errors", f"rank {rank}: {end.error.strip()[:400] or f'none, code {end.code}'}"))
    return found + _losses(attempt, expected)


def _is_clear(case: Case, fault: Fault, rank: int, end: RankEnd) -> bool:
    if rank >= case.ranks:  # another job may refuse to replace what this job writes
        return "checkpoints" in end.decisive
    if fault is case.faults[-1] and case.says and not re.search(case.says, end.decisive):
        return False
    if rank in fault.ranks:  # its own error must not be replaced by another
        return not fault.how.startswith(("raise", "memory_error")) or "injected fault" in end.error
    return bool(_named(end.error) & set(fault.ranks) and _CAUSE.search(end.error))


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


def _damage(checkpoints: Path, case: Case) -> bool:
    """Damage the last checkpoint according to :attr:`Case.damage`. Return False if there is none."""
    last = checkpoints / "last.ckpt"
    if not case.damage:
        return True
    if case.damage == "hidden":
        checkpoints.rename(checkpoints.with_name("hidden"))
        checkpoints.mkdir()
        return True
    if not last.exists():
        return False
    files = [last] if last.is_file() else sorted(path for path in last.iterdir() if path.is_file())
    largest = max(files, key=lambda path: path.stat().st_size)
    size = largest.stat().st_size
    if case.damage == "truncated":
        os.truncate(largest, size // 2)
    elif case.damage == "altered":
        alter(largest, size // 2, 1)
    else:  # half of the flips hit the directory at the end of a single file
        file, part = files[int(case.at * len(files))], case.at * 1024 % 1
        size, first = file.stat().st_size, max(0, file.stat().st_size - 4096) if case.at < 0.5 and last.is_file() else 0
        alter(file, first + int(part * (size - first)), 1 << int(case.at * 8192) % 8)
    return True


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *received: sys.exit("received SIGTERM"))  # which also ends the ranks
    main()
