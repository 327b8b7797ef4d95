"""The bubble profiler's access to Lightning: stages of a step on a timeline, loggers, and text in the progress bar."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from lightning.pytorch.utilities import rank_zero
from torch import Tensor

from lightning_freescale._lightning.loops import Callback, LoaderWrapper, Strategy, Trainer
from lightning_freescale._runtime.attributes import replaced
from lightning_freescale.profiling.recording.ddp_exchanges import buffers_on, ddp_waits_on
from lightning_freescale.profiling.recording.timeline import Timeline, batches_on

_LOG = logging.getLogger(rank_zero.__name__)
_MAIN = {
    "freescale/bubble/fraction",
    "freescale/bubble/compute_imbalance",
    "freescale/overlap/exposed_s",
    "freescale/overlap/hidden_s",
}
_PLANNED = "freescale/imbalance/epoch/balanced"  # the imbalance of a run that is not profiled


class ProfilerCallback(Callback):
    """A callback that measures the bubble. If ``verbose`` is True, loggers receive all scalars of the package."""

    verbose: bool | None = None


def log_scalars(trainer: Any, scalars: dict[str, float]) -> None:
    """Log bubble, imbalance, exposed and hidden seconds to the Trainer's loggers, and the other scalars if a profiler asks."""
    verbose = [callback.verbose for callback in trainer.callbacks if isinstance(callback, ProfilerCallback)]
    if not any(verbose):
        scalars = {name: each for name, each in scalars.items() if name in _MAIN or (name == _PLANNED and not verbose)}
    for logger in trainer.loggers if scalars else ():
        logger.log_metrics(scalars, step=trainer.global_step)


class ObservedLoader(LoaderWrapper):
    """An iterable of batches that records every ``next`` on the timeline."""

    def __init__(self, loader: Any, timeline: Timeline) -> None:
        super().__init__(loader, _timeline=timeline)

    def __iter__(self) -> Iterator[Any]:
        return batches_on(self._timeline, self._loader)


def stages_on(timeline: Timeline, strategy: Strategy) -> AbstractContextManager[None]:
    """Record the stages of a strategy's steps on ``timeline`` in the block, without changing results.

    The stages are the training loader (if it is set up inside the block), the copy of the batch to the device, forward,
    backward, DDP's waits for gradients and buffers, and the optimizer.
    """
    run_process_dataloader, run_batch_to_device = strategy.process_dataloader, strategy.batch_to_device
    run_training_step, run_backward, run_optimizer_step = strategy.training_step, strategy.backward, strategy.optimizer_step

    def process_dataloader(dataloader: object) -> object:
        module = strategy.lightning_module
        training = module is not None and module.trainer.training
        return run_process_dataloader(ObservedLoader(dataloader, timeline) if training else dataloader)

    def batch_to_device(*args: Any, **kwargs: Any) -> Any:
        with timeline.span("data", "batch to device"):
            return run_batch_to_device(*args, **kwargs)

    def training_step(*args: Any, **kwargs: Any) -> Any:
        with timeline.span("forward", "forward"), buffers_on(timeline, strategy.model):
            return run_training_step(*args, **kwargs)

    def backward(closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with timeline.span("backward", "backward"), ddp_waits_on(timeline, strategy.model, closure_loss):
            return run_backward(closure_loss, *args, **kwargs)

    def optimizer_step(optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as after_closure:

            def timed() -> Any:
                after_closure.close()  # closures may run several times
                result = closure()
                after_closure.enter_context(timeline.span("optimizer", "optimizer"))
                return result

            return run_optimizer_step(optimizer, timed, *args, **kwargs)

    # methods of the instance are replaced, so that any strategy can be measured and the Trainer's profiler stays the user's
    stamped = process_dataloader, batch_to_device, training_step, backward, optimizer_step
    return replaced(strategy, {method.__name__: method for method in stamped})


class ProgressLine:
    """A text among the metrics of the Trainer's progress bar; without effect if the Trainer has no bar.

    It is shown as ``bubble``, or as ``freescale/bubble`` if the user logs a metric called ``bubble``.
    """

    def __init__(self) -> None:
        self._text = ""

    @contextmanager
    def beside_bar(self, trainer: Trainer) -> Generator[None, None, None]:
        """Show the text in the Trainer's bar in the block. The bar's class and the logged metrics do not change."""
        bar: Any = trainer.progress_bar_callback
        self._text = ""
        if bar is None or not getattr(bar, "is_enabled", True):
            yield
            return
        run_get_metrics = bar.get_metrics

        def get_metrics(*args: Any, **kwargs: Any) -> dict[str, Any]:
            metrics = run_get_metrics(*args, **kwargs)
            if not self._text:
                return metrics
            return {**metrics, "freescale/bubble" if "bubble" in metrics else "bubble": self._text}

        # the bar has no public method to add a metric that is not a logged number
        with replaced(bar, {"get_metrics": get_metrics}):
            yield

    def show(self, text: str) -> None:
        """Replace the text. The bar shows it the next time it is drawn."""
        self._text = text


def log_but_on_terminal(text: str) -> None:
    """Log text that the terminal already shows to the handlers of Lightning's logger that are no terminal. For rank 0 only."""
    if not _LOG.isEnabledFor(logging.INFO):
        return
    record = _LOG.makeRecord(_LOG.name, logging.INFO, __file__, 0, text, (), None)
    for handler in _handlers(_LOG):
        if record.levelno >= handler.level and not _is_terminal(handler):
            handler.handle(record)


def _handlers(logger: logging.Logger | None) -> Iterator[logging.Handler]:
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def _is_terminal(handler: logging.Handler) -> bool:
    # the handler of rich has its stream in a console
    stream: Any = getattr(handler, "stream", None) or getattr(getattr(handler, "console", None), "file", None)
    return stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
