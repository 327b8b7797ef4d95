"""Stop points: a SIGTERM, or SLURM's signal to requeue, stops all ranks at the same point of Lightning's loops.

Lightning's own handler broadcasts from rank 0 wherever the signal interrupts the process, and a loop ends as soon as its rank
has the signal. If only one rank gets the signal, it waits forever in a collective. Lightning's handler of SLURM's signal saves
a checkpoint inside the handler, which needs all ranks.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException as SIGTERMException

from lightning_freescale._lightning.loops import Trainer
from lightning_freescale._runtime.attributes import replaced
from lightning_freescale.comm.rank_notices import RankNotices

_REQUEUE = "received SLURM's signal to requeue"


class StopPoints:
    """The points between batches at which all ranks stop by SIGTERMException after one rank got a signal."""

    def __init__(self, trainer: Trainer, notices: RankNotices) -> None:
        self._trainer, self._notices = trainer, notices
        self._step = self._batch = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replace Lightning's handlers and checks. Enter this before Lightning registers its handler, after strategy set-up."""
        connector: Any = self._trainer._signal_connector
        loop: Any = self._trainer.fit_loop.epoch_loop
        advance, notified = loop.advance, False

        def notify(signum: int, _: Any) -> None:
            nonlocal notified
            launcher = self._trainer.strategy.launcher
            if launcher is not None and not notified:
                launcher.kill(signum)  # the processes that this process has started
            notified = True
            self._notices.request_stop(f"rank {self._trainer.global_rank} received SIGTERM")

        requeue = f"rank {self._trainer.global_rank} {_REQUEUE}"

        def advance_or_stop(data_fetcher: Any) -> None:
            self._step, self._batch = self._step + 1, 0
            self.stop_here()
            advance(data_fetcher)

        handlers = {"_sigterm_notifier_fn": notify, "_slurm_sigusr_handler_fn": lambda *_: self._notices.request_stop(requeue)}
        methods: dict[str, Any] = {"advance": advance_or_stop}
        if hasattr(loop, "_broadcast_sigterm_tensor"):  # some versions broadcast before each batch
            methods["_broadcast_sigterm_tensor"] = lambda: None
        strategy, evaluation = self._trainer.strategy, {}
        for stage in ("validation", "test", "predict"):
            start, step = f"on_{stage}_start", f"{stage}_step"
            evaluation[start] = partial(self._begin_evaluation, getattr(strategy, start))
            evaluation[step] = partial(self._evaluate_batch, getattr(strategy, step), stage == "predict")
        with replaced(connector, handlers), replaced(loop, methods), replaced(strategy, evaluation):
            yield

    def _begin_evaluation(self, begin: Callable[[], None]) -> None:
        begin()
        self._step, self._batch = self._step + 1, 0  # ranks may have different numbers of batches

    def _evaluate_batch(self, evaluate: Callable[..., Any], predicts: bool, *args: Any, **kwargs: Any) -> Any:
        self._batch += 1
        if predicts:
            self.stop_here()
        # validation and test stop after the batch. The checkpoint for requeueing is saved between batches of training
        elif self._notices.stops_at((self._step, self._batch)) and not self._is_for_requeue:
            self._trainer._signal_connector.received_sigterm = True
        return evaluate(*args, **kwargs)

    @property
    def _is_for_requeue(self) -> bool:
        return self._notices.why.endswith(_REQUEUE)

    def end_training(self) -> None:
        """Pass the end of training, see :meth:`stop_here`."""
        self._step, self._batch = self._step + 1, 0
        self.stop_here()

    def stop_here(self) -> None:
        """Raise SIGTERMException if all ranks stop here. Save a checkpoint first if the reason is SLURM's requeueing."""
        if self._notices.stops_at((self._step, self._batch)):
            self._trainer._signal_connector.received_sigterm = True
            if self._is_for_requeue:
                connector: Any = self._trainer._signal_connector
                type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, None)  # saves, and requeues on rank 0
            raise SIGTERMException


@contextmanager
def ending_at_sigterm(trainer: Trainer) -> Iterator[None]:
    """End this rank at once if it receives SIGTERM before Lightning registers its handler.

    Ranks have no common points during set-up, where they could stop together, and nothing to save. A handler of the user stays.
    """
    connector: Any = trainer._signal_connector
    register = connector.register_signal_handlers

    def end(signum: int, _: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would interrupt the report to the other ranks
        connector.received_sigterm = True
        if (launcher := trainer.strategy.launcher) is not None:
            launcher.kill(signum)  # the processes that this process has started
        raise with_reason(SIGTERMException(), f"rank {trainer.global_rank} received SIGTERM")

    def restore_default() -> None:
        if signal.getsignal(signal.SIGTERM) in (end, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def restore_and_register() -> None:
        restore_default()
        register()

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        with replaced(connector, {"register_signal_handlers": restore_and_register}):
            yield
    finally:
        restore_default()


def with_reason(stopped: SIGTERMException, why: str) -> SIGTERMException:
    """Set the text of the exception, and the exit status by which schedulers recognize a preemption."""
    stopped.args, stopped.code = (why,), 128 + signal.SIGTERM
    return stopped
