"""The files that a profiled run leaves in its folder."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_freescale.profiling.recording.records import ResolvedStep
from lightning_freescale.profiling.reporting.document import write
from lightning_freescale.profiling.reporting.page import write_page
from lightning_freescale.profiling.reporting.report import BubbleReport
from lightning_freescale.profiling.reporting.trace import write_trace

_REFRESH_SHARE = 0.002
"""Share of the run that writing the report again and again may take."""


class ReportFiles(dict[str, Path]):
    """``report.json``, ``report.html`` and ``trace.json``, by ``"report"``, ``"page"`` and ``"trace"`` once they are written.

    A file that cannot be written is a warning, not the end of a training run.

    Args:
        folder: where.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._refreshed_at = self._refresh_s = 0.0
        self._final = False
        self._lock = threading.Lock()  # the thread aside refreshes while the training thread may write the last report

    def window(self, rank: int) -> Path:
        """Where a rank leaves what torch.profiler writes; alone in their folder, all of which other tools read."""
        return self.folder / "torch_profiler" / f"rank_{rank}.json.gz"

    def problem(self) -> str | None:
        """Make the folder, without windows of an earlier run, which may have had more ranks.

        Returns:
            why nothing can be written there; None if files can.
        """
        probe = self.folder / ".writable"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
            for earlier in self.window(0).parent.glob("rank_*.json.gz"):
                earlier.unlink()
        except OSError as error:
            return f"the profiler cannot write to dirpath={str(self.folder)!r}: {error}; pass another one"
        return None

    def write(
        self, new_report: Callable[[], BubbleReport], traced: Sequence[Sequence[ResolvedStep]], kineto: Sequence[Any] = ()
    ) -> BubbleReport:
        """Make the last report and write all files; no trace without steps."""
        with _collector_paused():
            report = new_report()
            with self._writing():
                self._final = True
                document = report.document()
                self["report"] = write(document, self.folder / "report.json")
                self["page"] = write_page(self.folder / "report.html", [document])
                if traced:
                    aligned = report.wait_attribution.aligned
                    self["trace"] = write_trace(self.folder / "trace.json", traced, kineto, aligned=aligned)
        return report

    def refresh(self, new_report: Callable[[], BubbleReport]) -> None:
        """Write the report alone, in case the run is killed; as often as costs next to nothing."""
        began = time.perf_counter()
        if began - self._refreshed_at < self._refresh_s / _REFRESH_SHARE:
            return
        with self._writing():
            if not self._final:
                self["report"] = new_report().write(self.folder / "report.json")
        self._refreshed_at = time.perf_counter()
        self._refresh_s = self._refreshed_at - began

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except OSError as error:
                warnings.warn(f"the profiler could not write its files to {self.folder}: {error}", stacklevel=2)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Looking again and again through millions of new lists, none of them garbage, took a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
