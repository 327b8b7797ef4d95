"""DDPStrategy whose ranks stop at the same batch, and whose errors name the cause and the fix."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_freescale._lightning.ddp import DDPBase
from lightning_freescale._lightning.loops import Trainer
from lightning_freescale._lightning.stop_points import SIGTERMException, StopPoints, ending_at_sigterm, with_reason
from lightning_freescale.comm.rank_notices import RankNotices, notices_of_ranks
from lightning_freescale.strategy.validation import refuse_several_optimizers, refuse_unequal_shapes


class TrainerDDP(DDPBase):
    """DDPStrategy that stops all ranks together and reports the first failure of a rank to the others."""

    def __init__(self, **ddp_options: Any) -> None:
        super().__init__(**ddp_options)
        self._notices: RankNotices | None = None
        self._stop_points: StopPoints | None = None
        self._in_run = False

    @property
    def trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._notices = notices_of_ranks(self.group_timeout)  # before a hook of the user can fail
        self._in_run = True
        self.at_teardown.callback(self._leave_run)
        self.at_teardown.enter_context(ending_at_sigterm(self.trainer))

    def set_up_stopping(self, trainer: Trainer) -> None:
        """Stop all ranks at the same batch after a signal. Call it on every rank."""
        if (notices := self._notices) is None:
            return
        self._stop_points = StopPoints(trainer, notices)
        self.at_teardown.enter_context(self._stop_points.running())

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            refuse_several_optimizers(error, trainer.lightning_module)
            raise

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        # Lightning truncates the mean of integers, such as the numbers of samples that weight what the ranks have logged
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and str(reduce_op).lower() in ("avg", "mean"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        refuse_unequal_shapes(tensor, group)
        return super().all_gather(tensor, group, sync_grads)

    @override
    def ended_by(self, error: BaseException) -> BaseException:
        """Report the error to the other ranks, and add its reason, which may be on another rank.

        If a rank received SIGTERM, the exception is a SIGTERMException on every rank.
        """
        notices = self._notices
        if isinstance(error, SIGTERMException) and not error.args and (notices is None or notices.why):
            why = f"rank {self.global_rank} received SIGTERM" if notices is None else notices.why
            return with_reason(error, f"{why}: all ranks stop here")
        cause = "" if notices is None else notices.tell_or_explain(error)
        if cause and notices is not None and notices.failed_with == SIGTERMException.__name__:
            return with_reason(SIGTERMException(), cause)
        return error

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._notices is not None and not isinstance(exception, SIGTERMException):
            self._notices.tell_or_explain(exception)  # if another launcher than ours has started this process
        exception.args = tuple(_renamed(argument) for argument in exception.args)
        _print_reason(exception)

    @contextmanager
    def reporting(self, during: str) -> Generator[None, None, None]:
        """Report an error in the block to the other ranks, also outside of a run. Collective.

        ``during`` says what this rank was doing.
        """
        outside = not self._in_run
        if outside:
            self._notices = notices_of_ranks(self.group_timeout)
        try:
            with ending_at_sigterm(self.trainer):  # without effect while Lightning handles it
                yield
        except BaseException as error:
            error.during = during  # type: ignore[attr-defined]
            reason = self.ended_by(error) if outside else error
            if outside:
                _print_reason(reason)
            if reason is error:
                raise
            raise reason from error
        finally:
            if outside:
                self._leave_run()

    def look_for_notices(self) -> None:
        """Read the notices of other ranks before a collective that a failed rank would never join."""
        if self._notices is not None:
            self._notices.look()

    def stop_after_training(self) -> None:
        """Stop after the last batch of training if all ranks stop there."""
        self.look_for_notices()
        if self._stop_points is not None:
            self._stop_points.end_training()

    def _leave_run(self) -> None:
        if self._notices is not None:
            self._notices.close()
        self._notices, self._stop_points, self._in_run = None, None, False


def _print_reason(ended: BaseException) -> None:
    if isinstance(ended, SIGTERMException):  # Python prints no text of an exception that has an exit status
        print(ended, file=sys.stderr, flush=True)


def _renamed(text: Any) -> Any:
    """Replace the names of DDPStrategy in one of Lightning's messages by those of this strategy."""
    if not isinstance(text, str):
        return text
    return text.replace("'ddp_find_unused_parameters", "'freescale_find_unused_parameters").replace(
        "DDPStrategy(find_unused", "FreeScaleStrategy(find_unused"
    )
