"""Lightning's log, without the terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

from lightning.pytorch.utilities import rank_zero

_LOG = logging.getLogger(rank_zero.__name__)


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
