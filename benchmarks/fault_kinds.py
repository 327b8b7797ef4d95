"""Faults of the runs of ``faults.py``: place, kind, ranks and time."""

from __future__ import annotations

import random
from dataclasses import dataclass

STEPS, SAVES_EVERY = 60, 10


@dataclass(frozen=True)
class Fault:
    """The fault of one attempt to train.

    Attributes:
        place: ``"signal"`` for a signal from outside, or a point of the training, see ``fault_training.py``.
        how: name of the signal, or of the failure.
        ranks: the ranks that fail.
        step: number of optimizer steps before the fault.
        delay: seconds between that step and a signal.
        seconds: time after which a stopped rank continues.
        stays: True if those ranks do not end by themselves.
    """

    place: str
    how: str
    ranks: tuple[int, ...]
    step: int
    delay: float
    seconds: float
    stays: bool


@dataclass(frozen=True)
class Case:
    """A training, the faults of its attempts, and the damage to its last checkpoint.

    Attributes:
        timeout: timeout of the process group, in seconds.
        workers: number of workers of each rank's loader.
        checkpoint: the argument ``FreeScaleStrategy(checkpoint=)``.
        detect_anomaly: the argument ``Trainer(detect_anomaly=)``.
        damage: damage to the last checkpoint: ``"truncated"``, ``"altered"``, or empty.
        finds: the defect that must be found, if the case tests the benchmark.
    """

    kind: str
    ranks: int
    faults: tuple[Fault, ...]
    timeout: float
    workers: int
    checkpoint: str
    detect_anomaly: bool
    damage: str
    finds: str


@dataclass(frozen=True)
class Kind:
    """The common properties of the cases of a kind; all others are drawn.

    Attributes:
        who: the ranks that fail: ``"any"`` one, the ``"first"``, one of the ``"others"``, ``"two"``, or ``"all"``.
        steps: the first and last step at which the fault may occur.
        after: the fault of the previous attempt: ``"killed"`` at a random step, or none.
    """

    place: str = "signal"
    how: str = "SIGKILL"
    who: str = "any"
    steps: tuple[int, int] = (12, 48)
    timeout: float = 30.0
    seconds: float = 0.0
    stays: bool = False
    workers: int | None = None
    checkpoint: str = ""
    detect_anomaly: bool = False
    after: str = ""
    damage: str = ""
    finds: str = ""


KINDS = {
    "killed": Kind(),
    "killed_rank_0": Kind(who="first"),
    "killed_before_the_first_checkpoint": Kind(steps=(1, 8)),
    "killed_two_at_once": Kind(who="two"),
    "killed_all": Kind(who="all"),
    "killed_twice": Kind(steps=(50, 56), after="killed"),
    "killed_in_step": Kind("step", "kill"),
    "killed_in_train_start": Kind("train_start", "kill", steps=(0, 0)),
    "killed_in_save": Kind("save", "kill"),
    "killed_while_writing": Kind("write", "kill", "first", checkpoint="single"),
    "killed_while_writing_its_part": Kind("write", "kill", checkpoint="sharded"),
    "killed_while_moving": Kind("move", "kill", "first"),
    "killed_while_loading": Kind("load", "kill", steps=(0, 0), after="killed"),
    "killed_in_train_end": Kind("train_end", "kill", steps=(0, 0)),
    "raised_in_step": Kind("step", "raise"),
    "raised_in_step_of_rank_0": Kind("step", "raise", "first"),
    "raised_in_callback": Kind("callback", "raise"),
    "raised_in_collate": Kind("collate", "raise", steps=(12, 36), workers=0),
    "raised_in_worker": Kind("sample", "raise", steps=(12, 36), workers=2),
    "raised_in_save": Kind("save", "raise"),
    "raised_in_load": Kind("load", "raise", steps=(0, 0), after="killed"),
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
    "killed_worker": Kind("sample", "kill", steps=(12, 36), workers=2),
    "hung_worker": Kind("sample", "hang", steps=(12, 36), workers=2, timeout=8, stays=True),
    "folder_removed": Kind("callback", "remove", "first"),
    "disk_full": Kind("write", "disk_full", "first", checkpoint="single"),
    "disk_full_for_its_part": Kind("write", "disk_full", checkpoint="sharded"),
    "nan_loss": Kind("loss", "nan", detect_anomaly=True),
    "last_truncated": Kind(damage="truncated"),
    "last_altered": Kind(damage="altered"),
}
"""What goes wrong in a campaign."""

CONTROLS = {
    "other_weights": Kind("weights", "other", finds="silent_losses"),
    "began_anew": Kind(steps=(20, 48), damage="hidden", finds="silent_losses"),
    "says_nothing": Kind("step", "raise", finds="unnamed_errors"),
    "does_not_end": Kind("step", "raise", timeout=5, finds="hangs"),
    "leaves_a_process": Kind("step", "leave_process", finds="orphans"),
    "leaves_memory": Kind("step", "leave_memory", finds="shared_memory"),
}
"""Runs with a defect that the campaign must find."""


def draw_cases(names: list[str], runs: int, seed: int) -> list[Case]:
    """Return ``runs`` cases: each kind once in a random order, before any kind is repeated."""
    draw, order = random.Random(seed), list[str]()
    while len(order) < runs:
        order += draw.sample(names, len(names))
    return [draw_case(name, draw) for name in order[:runs]]


def draw_case(name: str, draw: random.Random) -> Case:
    """Return a case of a kind."""
    kind = (KINDS | CONTROLS)[name]
    ranks = draw.choice((3, 4) if kind.who == "two" else (2, 2, 3, 4))
    some = {"any": range(ranks), "first": (0,), "others": range(1, ranks), "two": range(ranks), "all": range(ranks)}[kind.who]
    struck = sorted(draw.sample(list(some), {"two": 2, "all": ranks}.get(kind.who, 1)))
    delay = draw.uniform(0, 0.03)
    fault = Fault(kind.place, kind.how, tuple(struck), draw.randint(*kind.steps), delay, kind.seconds, kind.stays)
    before = (Fault("signal", "SIGKILL", (draw.randrange(ranks),), draw.randint(12, 45), delay, 0.0, False),)
    return Case(
        kind=name,
        ranks=ranks,
        faults=(before if kind.after else ()) + (fault,),
        timeout=kind.timeout,
        workers=draw.choice((0, 0, 2)) if kind.workers is None else kind.workers,
        checkpoint=kind.checkpoint or draw.choice(("single", "single", "sharded")),
        detect_anomaly=kind.detect_anomaly,
        damage=kind.damage,
        finds=kind.finds,
    )
