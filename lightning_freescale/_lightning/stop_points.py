"""Lets a SIGTERM, or SLURM's signal to requeue, stop all ranks at the same point of Lightning's loops.

Lightning's handler broadcasts from rank 0 wherever the signal finds the process, and its loops leave as soon as their own rank
has the signal: a rank that alone has it waits for the others in a collective that they do not make. And its handler of SLURM's
signal saves a checkpoint there, which takes all ranks.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException as SIGTERMException

from lightning_freescale._lightning.loops import Trainer
from lightning_freescale.profiling.recording.observed_work import replaced

_REQUEUE = "requeue"


class StopPoints:
    """The points between batches at which all ranks stop after one has had a signal.

    Args:
        trainer: whose loops stop there, by SIGTERMException, as they do for a single rank.
        request: called in the signal handler: all ranks are to stop, and why.
        stops_at: passes a point; returns whether all ranks stop there.
        why: returns why they do.
    """

    def __init__(
        self,
        trainer: Trainer,
        request: Callable[[str], None],
        stops_at: Callable[[tuple[int, int]], bool],
        why: Callable[[], str],
    ) -> None:
        self._trainer, self._request, self._stops_at, self._why = trainer, request, stops_at, why
        self._step = self._batch = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replace what Lightning does; its handler is registered after the strategy is set up, so enter this before."""
        connector: Any = self._trainer._signal_connector
        loop: Any = self._trainer.fit_loop.epoch_loop
        advance, notified = loop.advance, False

        def notify(signum: int, _: Any) -> None:
            nonlocal notified
            launcher = self._trainer.strategy.launcher
            if launcher is not None and not notified:
                launcher.kill(signum)  # the processes that this one has started
            notified = True
            self._request(f"rank {self._trainer.global_rank} was told to stop, by SIGTERM")

        def notify_of_requeue(signum: int, _: Any) -> None:
            self._request(_REQUEUE)

        def advance_or_stop(data_fetcher: Any) -> None:
            self._step, self._batch = self._step + 1, 0
            self.stop_here()
            advance(data_fetcher)

        handlers = {"_sigterm_notifier_fn": notify, "_slurm_sigusr_handler_fn": notify_of_requeue}
        methods: dict[str, Any] = {"advance": advance_or_stop}
        if hasattr(loop, "_broadcast_sigterm_tensor"):  # not in every version: a broadcast before each batch
            methods["_broadcast_sigterm_tensor"] = lambda: None
        with replaced(connector, handlers), replaced(loop, methods):
            yield

    def begin_evaluation(self) -> None:
        """Note that validation, test or prediction begins; ranks may have unequally many batches of it."""
        self._step, self._batch = self._step + 1, 0

    def note_evaluation_batch(self) -> None:
        """At a batch of validation or test, have the loop stop after it if all ranks do."""
        self._batch += 1
        # what is to be saved for the job that goes on is saved between batches of training
        if self._stops_at((self._step, self._batch)) and self._why() != _REQUEUE:
            self._set_received()

    def stop_at_prediction_batch(self) -> None:
        """As :meth:`stop_here`."""
        self._batch += 1
        self.stop_here()

    def end_training(self) -> None:
        """As :meth:`stop_here`, once training has ended."""
        self._step, self._batch = self._step + 1, 0
        self.stop_here()

    def stop_here(self) -> None:
        """Raise SIGTERMException if all ranks stop here, after a checkpoint for SLURM's requeueing if that is why."""
        if self._stops_at((self._step, self._batch)):
            self._set_received()
            if self._why() == _REQUEUE:
                connector: Any = self._trainer._signal_connector
                type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, None)  # saves, and requeues on rank 0
            raise SIGTERMException

    def explain(self, stopped: SIGTERMException) -> None:
        """Have what has stopped the ranks say why; with a text a process ends with status 1, as one that is not done should."""
        if self._why() and self._why() != _REQUEUE:
            stopped.code = f"{self._why()}: all ranks stop here"
            stopped.args = (stopped.code,)

    def _set_received(self) -> None:
        self._trainer._signal_connector.received_sigterm = True


def telling_failures(trainer: Trainer, tell: Callable[[BaseException], None]) -> AbstractContextManager[None]:
    """Have ``tell`` know what ends the fit loop before callbacks do.

    They may save a checkpoint, which waits for ranks that do not know yet that this one has failed.
    """
    loop: Any = trainer.fit_loop
    run = loop.run

    def run_and_tell() -> Any:
        try:
            return run()
        except BaseException as error:
            tell(error)
            raise

    return replaced(loop, {"run": run_and_tell})
