"""What a profile leaves in its folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_freescale.profiling.recording.records import ResolvedStep
from lightning_freescale.profiling.reporting.page import write_page
from lightning_freescale.profiling.reporting.report import BubbleReport
from lightning_freescale.profiling.reporting.trace import write_trace

_REFRESHING = 0.002
"""Share of the run that writing the report again and again may take."""


class Files(dict[str, Path]):
    """``report.json``, ``report.html`` and ``trace.json``, by ``"report"``, ``"page"`` and ``"trace"`` once they are written.

    Args:
        folder: made when the first is written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._ended = self._took = 0.0

    def write(self, report: BubbleReport, traced: Sequence[Sequence[ResolvedStep]], kineto: Sequence[Any] = ()) -> None:
        """All of them; no trace without steps."""
        self["report"] = report.write(self.folder / "report.json")
        self["page"] = write_page(self.folder / "report.html", [report.document()])
        if traced:
            self["trace"] = write_trace(self.folder / "trace.json", traced, kineto)

    def refresh(self, report: Callable[[], BubbleReport]) -> None:
        """The report alone, in case the run is killed; as often as costs next to nothing."""
        began = time.perf_counter()
        if began - self._ended < self._took / _REFRESHING:
            return
        self["report"] = report().write(self.folder / "report.json")
        self._ended = time.perf_counter()
        self._took = self._ended - began
