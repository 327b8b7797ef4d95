"""Lines that a callback shows beside the Trainer's progress bar, or writes to Lightning's log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities import rank_zero

from lightning_freescale._lightning.loops import Trainer
from lightning_freescale.profiling.recording.observed_work import replaced

_LOG = logging.getLogger(rank_zero.__name__)


class ProgressLine:
    """A text among the metrics of the Trainer's progress bar; nothing if the Trainer has no bar.

    Args:
        name: of the metric; a metric of the user's that has this name keeps it, and the text's becomes ``freescale/name``.
    """

    def __init__(self, name: str) -> None:
        self._name, self._text = name, ""

    @contextmanager
    def beside_bar(self, trainer: Trainer) -> Generator[None, None, None]:
        """Have the Trainer's bar show the text meanwhile; the bar's class and the logged metrics stay as they are."""
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
            return {**metrics, f"freescale/{self._name}" if self._name in metrics else self._name: self._text}

        # the bar asks itself for its metrics whenever it draws, and offers no other way to add one that is no logged number
        with replaced(bar, {"get_metrics": get_metrics}):
            yield

    def show(self, text: str) -> None:
        """Replace the text; the bar shows it when it is drawn next."""
        self._text = text


def log_but_on_terminal(text: str) -> None:
    """Log a line where Lightning's own go, but not to the terminal, for what is printed there anyway; call it on rank 0."""
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
    # rich's handler has its stream in a console
    stream: Any = getattr(handler, "stream", None) or getattr(getattr(handler, "console", None), "file", None)
    return stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
