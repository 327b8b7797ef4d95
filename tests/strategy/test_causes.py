"""No rank hangs: where one fails, all end, and the error of every survivor names the failed rank and the cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torchrec import EmbeddingCollection

from lightning_freescale import BubbleProfiler, FreeScaleDataModule, FreeScaleFabricStrategy, FreeScaleStrategy
from lightning_freescale._lightning.ddp import process_group_timeout
from lightning_freescale.comm.rank_notices import RankNotices, notices_of_ranks
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers import recommender
from tests.helpers.fabric_loop import fabric_for
from tests.helpers.recommender import ActsInHook, Samples, collate, trainer

SECONDS = 15.0
"""Timeout of the groups; what ends sooner has not waited for it."""


def _raise(error: type[BaseException], text: str = "the needle") -> Callable[[], None]:
    def fail() -> None:
        raise error(text)

    return fail


def _terminate_twice() -> None:
    """Receive SIGTERM, and a second one when the report of the first to the other ranks begins."""
    report = RankNotices.tell_or_explain.__code__

    def terminate_again(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is report:
            sys.setprofile(None)
            ENDS["is terminated"]()

    sys.setprofile(terminate_again)
    ENDS["is terminated"]()


ENDS: dict[str, Callable[[], None]] = {
    "raises": _raise(KeyError),
    "raises a text that cannot be encoded": _raise(ValueError, "the needle \udcff\nin " + "hay" * 2_000_000),
    "is interrupted": _raise(KeyboardInterrupt),
    "exits": lambda: sys.exit("the needle"),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "is terminated": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "is terminated twice": _terminate_twice,
    "ends with 0": lambda: os._exit(0),
    "freezes": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleeps": lambda: time.sleep(1000),
}


TRAINER_STARTS = ("setup", "configure_model", "configure_optimizers", "init_fn", "on_fit_start")
FABRIC_STARTS = ("Fabric", "Fabric.setup")


class Fails(ActsInHook):
    """A rank ends in some way, the third time a hook is called, or in a hook before training."""

    def __init__(self, victim: int, hook: str, how: str) -> None:
        once = hook in (*TRAINER_STARTS, *FABRIC_STARTS, "on_train_start")
        super().__init__(hook, [victim], ENDS[how], at=1 if once else 3)
        tables = recommender.tables()
        for table in tables:
            table.init_fn = self.init_table
        self.net.embeddings = EmbeddingCollection(tables=tables, device=torch.device("meta"))

    def init_table(self, weight: torch.Tensor) -> None:
        if not weight.is_meta:
            self.pass_by("init_fn")
        nn.init.uniform_(weight)


class CannotTell(Fails):
    """A rank may fail where it is asked for the ids of the next step."""

    def embedding_ids(self, batch: dict[str, Any]) -> Any:
        self.pass_by("embedding_ids")
        return batch["features"]


def _fit(victim: int, hook: str, how: str, overlap: bool = True, seconds: float = SECONDS, profiled: bool = True) -> None:
    data, module = Samples(64), (CannotTell if hook == "embedding_ids" else Fails)(victim, hook, how)

    def collate_or_fail(samples: Any) -> Any:
        if module._trainer is not None:
            module.pass_by("collate")
        return collate(samples)

    failing = LambdaCallback(
        on_train_start=lambda *_: module.pass_by("on_train_start"), on_train_batch_end=lambda *_: module.pass_by("callback")
    )
    callbacks: list[L.Callback] = [failing, *([BubbleProfiler(tempfile.mkdtemp(), verbose=False)] if profiled else [])]
    strategy = FreeScaleStrategy(overlap=overlap, timeout=timedelta(seconds=seconds))
    run = trainer(strategy=strategy, devices=int(os.environ["WORLD_SIZE"]), callbacks=callbacks)
    run.fit(module, FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate_or_fail))


def _errors(size: int, *args: Any, timeout: float = 90.0, start: Callable[..., None] = _fit) -> dict[int, str]:
    with pytest.raises(RankFailed) as failure:
        run_distributed(start, size, *args, timeout=timeout, init=False)  # the strategy makes the default group
    parts = ("\n" + str(failure.value)).split("\nrank ")
    found: dict[int, str] = {}
    for part in parts[1:]:  # an error may have lines that begin so, too
        number, _, text = part.partition(": ")
        if number.isdigit() and (text.startswith(("Traceback", "died", "did not finish"))):
            found[int(number)] = text
        else:
            found[max(found)] += "\nrank " + part
    return found


ENDED = "rank 1 has ended"


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("hook", "how", "cause", "overlap"),
    [
        ("training_step", "raises", "KeyError: 'the needle'", True),
        ("callback", "raises a text that cannot be encoded", r"ValueError: the needle \udcff in hay", False),
        ("collate", "raises", "KeyError: 'the needle'", True),
        ("on_before_optimizer_step", "raises", "KeyError: 'the needle'", True),
        ("embedding_ids", "raises", "KeyError: 'the needle'", True),
        ("training_step", "is interrupted", "KeyboardInterrupt: the needle", False),
        ("callback", "exits", "SystemExit: the needle", True),
        ("training_step", "is killed", ENDED, True),
        pytest.param("callback", "ends with 0", ENDED, True, marks=pytest.mark.slow),
    ],
)
def test_survivors_name_rank_and_cause(hook: str, how: str, cause: str, overlap: bool) -> None:
    errors = _errors(3, 1, hook, how, overlap)
    assert set(errors) == {0, 1, 2}
    for survivor in (0, 2):
        assert (cause if cause == ENDED else f"rank 1 has failed first: {cause}") in errors[survivor], errors[survivor]
        assert len(errors[survivor]) < 50_000
        assert "rank 1 " in errors[survivor].rstrip().splitlines()[-1]
    assert cause == ENDED or cause[:20] in errors[1]
    assert hook != "embedding_ids" or "CannotTell.embedding_ids" in errors[1]


class FailsAgain(L.Callback):
    """A callback whose handling of an exception fails."""

    def on_exception(self, *_: Any) -> None:
        raise TypeError("another error")


def _fail_again(victim: int, hook: str) -> None:
    """Check after a failed fit that its groups and threads are closed, and that its objects have their own methods again."""
    data, again, failing = Samples(64), FailsAgain(), CSVLogger(tempfile.mkdtemp())
    failing.finalize = again.on_exception
    datamodule = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate)
    datamodule.on_exception = again.on_exception
    run = trainer(devices=2, callbacks=[again], logger=failing)
    try:
        run.fit(Fails(victim, hook, "raises"), datamodule)
    except BaseException:
        assert "on_exception" not in vars(again)
        assert not [thread.name for thread in threading.enumerate() if thread.name in ("freescale notices", "freescale watch")]
        raise


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("hook", ["configure_optimizers", pytest.param("training_step", marks=pytest.mark.slow)])
def test_an_error_in_on_exception_replaces_no_error_and_leaves_nothing_open(hook: str) -> None:
    errors = _errors(2, 1, hook, start=_fail_again)
    last = {rank: error.rstrip().splitlines()[-1] for rank, error in errors.items()}
    assert last[1] == "KeyError: 'the needle'"
    assert "rank 1 has failed first: KeyError: 'the needle'" in last[0]


def _start_with_fabric(victim: int, hook: str, how: str) -> None:
    """Start training under Lightning Fabric as a script does: Python reports errors that it does not catch."""
    fabric = fabric_for(timeout=timedelta(seconds=1000))
    module = Fails(victim, hook, how)
    try:
        module.pass_by("Fabric")
        fabric.setup(module.net, torch.optim.SGD(module.net.parameters(), lr=0.1))
        module.pass_by("Fabric.setup")
        fabric.barrier()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("start", "size", "victim", "hook", "how"),
    [
        (_fit, 3, 1, "on_train_start", "raises"),
        (_fit, 3, 1, "configure_model", "raises"),
        (_fit, 2, 1, "configure_optimizers", "is killed"),
        (_start_with_fabric, 3, 1, "init_fn", "raises"),
        *(
            pytest.param(start, size, victim, hook, how, marks=pytest.mark.slow)
            for start, hooks, ways in (
                (_fit, TRAINER_STARTS, ("raises", "is killed")),
                (_start_with_fabric, FABRIC_STARTS, ("raises", "is killed", "is terminated")),
            )
            for size, victim in ((2, 0), (3, 2))
            for hook in hooks
            for how in ways
        ),
    ],
)
def test_a_rank_that_fails_before_training_leaves_no_other_waiting(
    start: Callable[..., None], size: int, victim: int, hook: str, how: str
) -> None:
    options = (True, 1000.0, hook == "on_train_start") if start is _fit else ()
    errors = _errors(size, victim, hook, how, *options, start=start)
    cause = f"rank {victim} has failed first: KeyError: 'the needle'" if how == "raises" else f"rank {victim} has ended"
    for survivor in set(range(size)) - {victim}:
        assert cause in errors[survivor] or (victim == 0 and how != "raises" and STORE in errors[survivor]), errors[survivor]


def test_groups_beside_the_default_one_have_a_shorter_timeout_unless_one_is_given() -> None:
    five, other = timedelta(minutes=5), timedelta(seconds=7)
    for strategy in (FreeScaleStrategy, FreeScaleFabricStrategy):
        assert strategy().group_timeout == five
        assert strategy(timeout=other).group_timeout == other
    assert process_group_timeout(FreeScaleStrategy()) == five
    assert process_group_timeout(DDPStrategy(timeout=other)) == other


@pytest.mark.usefixtures("patient")
def test_the_rank_that_holds_the_store_stays_until_all_have_heard() -> None:
    errors = _errors(3, 0, "training_step", "raises")
    assert all("rank 0 has failed first: KeyError: 'the needle'" in errors[survivor] for survivor in (1, 2))


def _explain_late() -> tuple[str, float]:
    """Rank 2 fails, the others' collective with it; rank 1 has other things to do for a second before it asks why."""
    rank, notices = dist.get_rank(), notices_of_ranks(timedelta(seconds=SECONDS))
    assert notices is not None
    error: Exception = RuntimeError("Connection closed by peer")
    if rank == 2:
        error = KeyError("the needle")
    elif rank == 1:
        notices._jobs.put(lambda: time.sleep(1))
    notices.tell_or_explain(error)
    return str(error), time.monotonic()


@pytest.mark.xdist_group("timing")
@pytest.mark.usefixtures("patient")
def test_the_rank_that_holds_the_store_stays_until_all_have_heard_of_another_one() -> None:
    (first, first_left), (second, second_left), _ = run_distributed(_explain_late, 3)
    assert all("rank 2 has failed first: KeyError: 'the needle'" in error for error in (first, second))
    assert first_left > second_left - 0.5


STORE = "the ranks' store, which is in rank 0"


@pytest.mark.usefixtures("patient")
def test_the_store_is_lost_with_its_rank() -> None:
    assert STORE in _errors(2, 0, "training_step", "is killed")[1]


@pytest.mark.parametrize(
    ("victim", "how", "facts", "overlap"),
    [
        (1, "freezes", ("rank 1 does not answer", "rank 0 in ", "< forward (recommender.py:"), False),
        (0, "freezes", (STORE, "frozen"), True),
        (1, "sleeps", ("rank 1 in <lambda> (test_causes.py:",), True),
    ],
)
def test_a_rank_that_waits_in_vain_ends_after_the_timeout_and_says_for_which(
    victim: int, how: str, facts: tuple[str, ...], overlap: bool
) -> None:
    errors = _errors(2, victim, "training_step", how, overlap, 3.0, timeout=60)
    assert set(errors) == {1 - victim}
    for fact in facts:
        assert fact in errors[1 - victim]


# -- Lightning's own launcher

SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.strategy.test_causes import Fails
from tests.helpers.recommender import Samples, collate, trainer
from lightning_freescale import FreeScaleDataModule
data = Samples(64)
trainer(devices=2).fit(Fails(1, "training_step", "is killed"), FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate))
"""


@pytest.mark.slow
def test_lightnings_own_launcher_ends(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(SCRIPT.format(root=str(Path(__file__).parents[2])))
    assert subprocess.run([sys.executable, "fit.py"], capture_output=True, timeout=90, cwd=tmp_path).returncode != 0
