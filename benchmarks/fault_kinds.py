"""Faults of the runs of ``faults.py``: place, kind, ranks and time."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

STEPS, SAVES_EVERY = 24, 6


@dataclass(frozen=True)
class Fault:
    """The fault of one attempt to train.

    Attributes:
        place: ``"signal"`` for a signal from outside, a point of the training, or a part of it, see ``fault_points.py``.
        how: name of the signal, or of the failure.
        ranks: the ranks that fail.
        step: number of optimizer steps before the fault.
        at: a random number in [0, 1), for example for the call of a part of the training at which the fault occurs.
        delay: seconds between that step and a signal.
        seconds: time after which a stopped rank continues.
        again: seconds after which a signal is sent a second time; 0 for once.
        stays: True if those ranks do not end by themselves.
    """

    place: str
    how: str
    ranks: tuple[int, ...]
    step: int
    at: float = 0.0
    delay: float = 0.0
    seconds: float = 0.0
    again: float = 0.0
    stays: bool = False


@dataclass(frozen=True)
class Case:
    """A training, the faults of its attempts, and the damage to its last checkpoint.

    Attributes:
        ranks: number of ranks of each job.
        jobs: number of trainings, which write the same checkpoints at the same time.
        waits: timeout of the process group for which the ranks have to wait, in seconds; 0 if they notice the fault before.
        workers: number of workers of each rank's loader.
        checkpoint: the argument ``FreeScaleStrategy(checkpoint=)``.
        detect_anomaly: the argument ``Trainer(detect_anomaly=)``.
        damage: damage to the last checkpoint: ``"truncated"``, ``"altered"``, ``"flipped"``, or empty.
        at: a random number in [0, 1), the place of a flipped bit.
        says: an expression that the last error of each rank of the first job must match; empty for none.
        finds: the defect that must be found, if the case tests the benchmark.
    """

    kind: str
    ranks: int
    jobs: int
    faults: tuple[Fault, ...]
    waits: float
    workers: int
    checkpoint: str
    detect_anomaly: bool
    damage: str
    at: float
    says: str
    finds: str


@dataclass(frozen=True)
class Kind:
    """The common properties of the cases of a kind; all others are drawn.

    Attributes:
        who: the ranks that fail: ``"any"`` one, the ``"first"``, one of the ``"others"``, ``"two"``, or ``"all"``.
        steps: the first and last step at which the fault may occur.
        timeout: timeout of the process group for which the ranks have to wait; 0 if they notice the fault before.
        again: whether the signal is sent twice.
        after: the fault of the previous attempt: ``"killed"`` at a random step, or none.
    """

    place: str = "signal"
    how: str = "SIGKILL"
    who: str = "any"
    steps: tuple[int, int] = (8, 20)
    timeout: float = 0.0
    seconds: float = 0.0
    again: bool = False
    stays: bool = False
    workers: int | None = None
    checkpoint: str = ""
    detect_anomaly: bool = False
    after: str = ""
    damage: str = ""
    says: str = ""
    finds: str = ""
    jobs: int = 1


_NO_SPACE, _TOO_LARGE, _READ_ONLY = (
    rf"(?s)checkpoints.*{cause}|{cause}.*checkpoints" for cause in ("No space left", "File too large", "Read-only file system")
)
_NO_MEMORY = "(?i)memory|allocate"
_HOOKS = ("configure_model", "configure_optimizers", "module_setup", "data_setup", "callback_setup", "table")
_PARTS = {
    "starting": {"steps": (0, 0)},
    "loading": {"steps": (0, 0), "after": "killed"},
    "saving": {"steps": (1, 17)},
}
_FAILURES = {
    "raised": {"how": "raise"},
    "killed": {"how": "kill"},
    "out_of_memory": {"how": "memory_error"},
    "terminated": {"how": "SIGTERM"},
    "interrupted": {"how": "SIGINT"},
    "interrupted_all": {"how": "SIGINT", "who": "all"},
    "interrupted_all_twice": {"how": "SIGINT", "who": "all", "again": True},
}


KINDS = {
    "killed": Kind(),
    "killed_rank_0": Kind(who="first"),
    "killed_before_the_first_checkpoint": Kind(steps=(1, 5)),
    "killed_two_at_once": Kind(who="two"),
    "killed_all": Kind(who="all"),
    "killed_twice": Kind(steps=(20, 22), after="killed"),
    "killed_in_step": Kind("step", "kill"),
    "killed_in_train_start": Kind("train_start", "kill", steps=(0, 0)),
    "killed_in_hook_of_save": Kind("save", "kill"),
    "killed_while_writing": Kind("write", "kill", "first", checkpoint="single"),
    "killed_while_writing_its_part": Kind("write", "kill", checkpoint="sharded"),
    "killed_while_moving": Kind("move", "kill", "first"),
    "killed_in_hook_of_load": Kind("load", "kill", steps=(0, 0), after="killed"),
    "killed_in_train_end": Kind("train_end", "kill", steps=(0, 0)),
    "raised_in_step": Kind("step", "raise"),
    "raised_in_step_of_rank_0": Kind("step", "raise", "first"),
    "raised_in_callback": Kind("callback", "raise"),
    "raised_in_collate": Kind("collate", "raise", steps=(7, 14), workers=0),
    "raised_in_worker": Kind("sample", "raise", steps=(7, 14), workers=2),
    "raised_in_hook_of_save": Kind("save", "raise"),
    "raised_in_hook_of_load": Kind("load", "raise", steps=(0, 0), after="killed"),
    "raised_before_optimizer_step": Kind("before_optimizer_step", "raise"),
    "raised_in_train_start": Kind("train_start", "raise", steps=(0, 0)),
    "raised_in_train_end": Kind("train_end", "raise", steps=(0, 0)),
    "memory_error": Kind("step", "memory_error"),
    "interrupted_in_step": Kind("step", "interrupt"),
    "left_with_3": Kind("step", "exit"),
    "left_with_0": Kind("step", "exit_0"),
    "terminated": Kind(how="SIGTERM"),
    "terminated_rank_0": Kind(how="SIGTERM", who="first"),
    "terminated_all": Kind(how="SIGTERM", who="all"),
    "interrupted": Kind(how="SIGINT"),
    "interrupted_all": Kind(how="SIGINT", who="all"),
    "stopped": Kind(how="SIGSTOP", who="others", timeout=8, seconds=20),
    "stopped_rank_0": Kind(how="SIGSTOP", who="first", timeout=8, seconds=20),
    "stopped_for_moments": Kind(how="SIGSTOP", timeout=12, seconds=3),
    "hung_in_step": Kind("step", "hang", timeout=8, stays=True),
    "killed_worker": Kind("sample", "kill", steps=(7, 14), workers=2),
    "hung_worker": Kind("sample", "hang", steps=(7, 14), workers=2, timeout=8, stays=True),
    "folder_removed": Kind("callback", "remove", "first"),
    "file_too_large": Kind("write", "limit", "first", checkpoint="single", says=_TOO_LARGE),
    "file_too_large_for_its_part": Kind("write", "limit", checkpoint="sharded", says=_TOO_LARGE),
    "disk_full": Kind("disk", "fill", "all", says=_NO_SPACE),
    "disk_read_only": Kind("disk", "protect", "all", says=_READ_ONLY),
    "no_memory_for_saving": Kind("save", "limit_memory", workers=0, says=_NO_MEMORY),
    "no_memory_for_saving_on_rank_0": Kind("save", "limit_memory", "first", workers=0, says=_NO_MEMORY),
    "nan_loss": Kind("loss", "nan", detect_anomaly=True),
    "last_truncated": Kind(damage="truncated"),
    "last_altered": Kind(damage="altered"),
    "last_flipped": Kind(damage="flipped", checkpoint="single"),
    "last_flipped_in_a_folder": Kind(damage="flipped", checkpoint="sharded"),
    "raised_without_encoding": Kind("step", "raise_unencodable"),
    "raised_without_encoding_in_save": Kind("save", "raise_unencodable"),
    "raised_megabytes": Kind("step", "raise_megabytes"),
    "raised_megabytes_in_setup": Kind("module_setup", "raise_megabytes", steps=(0, 0)),
    "interrupted_twice": Kind(how="SIGINT", again=True),
    "interrupted_all_twice": Kind(how="SIGINT", who="all", again=True),
    "two_jobs": Kind(how="SIGCONT", timeout=60, workers=0, jobs=2),
    "two_jobs_first_killed": Kind(how="SIGKILL", who="all", timeout=60, workers=0, jobs=2),
    **{f"raised_in_{hook}": Kind(hook, "raise", steps=(0, 0)) for hook in _HOOKS},
    **{f"killed_in_{hook}": Kind(hook, "kill", steps=(0, 0)) for hook in _HOOKS},
    **{f"{name}_while_{part}": Kind(part, **more, **how) for name, how in _FAILURES.items() for part, more in _PARTS.items()},
}
"""What goes wrong in a campaign."""
ROOT_ONLY = ("disk_full", "disk_read_only")
"""Kinds that mount a file system."""

CONTROLS = {
    "other_weights": Kind("weights", "other", finds="silent_losses"),
    "began_anew": Kind(steps=(14, 20), damage="hidden", finds="silent_losses"),
    "says_nothing": Kind("step", "raise", finds="unnamed_errors"),
    "does_not_end": Kind("step", "raise", finds="hangs"),
    "leaves_a_process": Kind("step", "leave_process", finds="orphans"),
    "leaves_memory": Kind("step", "leave_memory", finds="shared_memory"),
    "leaves_a_part": Kind("step", "leave_part", finds="partial_files"),
    "waits_while_starting": Kind("configure_optimizers", "raise", steps=(0, 0), finds="hangs"),
    "mixes_jobs": Kind(how="SIGCONT", timeout=60, workers=0, checkpoint="single", jobs=2, finds="mixtures"),
    "loses_the_text": Kind("step", "raise", finds="unnamed_errors"),
    "hides_the_path": Kind("write", "limit", "first", checkpoint="single", says=_TOO_LARGE, finds="unnamed_errors"),
}
"""Runs with a defect that the campaign must find."""


def draw_cases(names: list[str], runs: int, seed: int) -> list[Case]:
    """Return ``runs`` cases: each kind once in a random order, before any kind is repeated."""
    draw, order = random.Random(seed), list[str]()
    while len(order) < runs:
        order += draw.sample(names, len(names))
    return [draw_case(name, draw) for name in order[:runs]]


def kinds_here() -> list[str]:
    """Return the kinds that this user may run."""
    return [name for name in KINDS if name not in ROOT_ONLY or os.geteuid() == 0]


def draw_case(name: str, draw: random.Random) -> Case:
    """Return a case of a kind."""
    kind = (KINDS | CONTROLS)[name]
    ranks = 2 if kind.jobs > 1 else draw.choice((3, 4) if kind.who == "two" else (2, 2, 2, 3, 4))
    some = {"any": range(ranks), "first": (0,), "others": range(1, ranks), "two": range(ranks), "all": range(ranks)}[kind.who]
    struck = tuple(sorted(draw.sample(list(some), {"two": 2, "all": ranks}.get(kind.who, 1))))
    step, at, delay, again = draw.randint(*kind.steps), draw.random(), draw.uniform(0, 0.03), draw.uniform(0.001, 0.3)
    fault = Fault(kind.place, kind.how, struck, step, at, delay, kind.seconds, again if kind.again else 0.0, kind.stays)
    before = (Fault("signal", "SIGKILL", (draw.randrange(ranks),), draw.randint(8, 16), delay=delay),)
    return Case(
        kind=name,
        ranks=ranks,
        jobs=kind.jobs,
        faults=(before if kind.after else ()) + (fault,),
        waits=kind.timeout,
        workers=draw.choice((0, 0, 2)) if kind.workers is None else kind.workers,
        checkpoint=kind.checkpoint or draw.choice(("single", "sharded", "async")),
        detect_anomaly=kind.detect_anomaly,
        damage=kind.damage,
        at=draw.random(),
        says=kind.says,
        finds=kind.finds,
    )
