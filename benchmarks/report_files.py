"""Time that rank 0 needs at the end to write the files of a long run on many ranks.

The records are synthetic: each rank waits for data, computes in three stages and waits in six exchanges. The durations are
drawn for a few steps, which repeat under other numbers until the run is full. The benchmark times the work after the last
exchange of records: the report with its replays, report.json, report.html and trace.json.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import harness
import numpy as np

from lightning_freescale.profiling import RunInfo
from lightning_freescale.profiling.analysis.breakdown import arrivals_of, last_arrivals
from lightning_freescale.profiling.analysis.rank_window import RankWindow, window_of
from lightning_freescale.profiling.collection.history import History
from lightning_freescale.profiling.profiler import ReportFiles
from lightning_freescale.profiling.recording.records import Interval, ResolvedCollective, ResolvedStep
from lightning_freescale.profiling.reporting.document import Overhead, Status, WaitAttribution
from lightning_freescale.profiling.reporting.report import BubbleReport

EXCHANGES = 6
TRACED = 3200
"""Steps times ranks of a trace, as the profiler keeps them."""
STAGES = ("data", "forward", "forward", "forward", "backward", "backward", "backward", "optimizer")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--different", type=int, default=50, help="number of different steps (default: 50)")
    options = parser.parse_args()
    drawn = draw_steps(options.different, options.ranks)
    history = fill_history(drawn, options.steps)
    traced = drawn[: max(1, TRACED // options.ranks)]
    figures = {}
    with TemporaryDirectory() as folder:
        files = ReportFiles(Path(folder))

        def new_report() -> BubbleReport:
            report = history.build_report(Status(), WaitAttribution(True, 5e-5), Overhead(1e-4, 1e-4), traced)
            figures["report_s"] = time.perf_counter() - began
            return report

        began = time.perf_counter()
        files.write(new_report, traced)
        figures["seconds"] = time.perf_counter() - began
        figures |= {f"{name}_mb": path.stat().st_size / 1e6 for name, path in files.items()}
    print(f"{options.ranks} ranks x {options.steps} steps: all files {figures['seconds']:.2f} s, including")
    print(f"the report itself {figures['report_s']:.2f} s; " + ", ".join(f"{p} {figures[f'{p}_mb']:.1f} MB" for p in files))
    harness.finish(figures, options)


def draw_steps(steps: int, ranks: int) -> list[list[ResolvedStep]]:
    """Return steps of each rank, on one clock, without a gap between them."""
    random = np.random.default_rng(0)
    now, drawn = np.zeros(ranks), []
    for index in range(steps):
        began, spans, exchanges = now.copy(), [], []
        for place, kind in enumerate(STAGES):
            until = now + random.lognormal(-5, 0.5, ranks)
            spans.append((kind, now, until))
            now = until
            if 0 < place <= EXCHANGES:
                over = now.max() + random.lognormal(-7, 0.3)
                exchanges.append((f"exchange {place}", f"world:{index}.{place}", now, np.full(ranks, over)))
                now = np.full(ranks, over)
        drawn.append([_step_of(rank, index, began, now, spans, exchanges) for rank in range(ranks)])
    return drawn


def _step_of(rank: int, index: int, began: np.ndarray, ended: np.ndarray, spans: list, exchanges: list) -> ResolvedStep:
    stages = tuple(Interval(kind, kind, float(start[rank]), float(end[rank])) for kind, start, end in spans)
    seen = []
    for name, key, start, over in exchanges:
        at, end = float(start[rank]), float(over[rank])
        seen.append(ResolvedCollective(name, key, at, at, end, end, 1 << 20))
    return ResolvedStep(float(began[rank]), float(ended[rank]), index, 32, stages, tuple(seen))


def fill_history(drawn: list[list[ResolvedStep]], steps: int) -> History:
    """Return the drawn steps as a history of ``steps``, with the samples of each rank."""
    ranks = len(drawn[0])
    windows = _windows_of(drawn)
    run = RunInfo(label="made up", model="Model", parameters=10**6, world_size=ranks)
    history = History(run, steps, None)
    while history.added < steps:
        numbers = range(history.added, history.added + len(drawn))
        history.add_windows([RankWindow(**{**vars(window), "steps": list(numbers)}) for window in windows])
    return history


def _windows_of(drawn: list[list[ResolvedStep]]) -> list[RankWindow]:
    random = np.random.default_rng(1)
    latest = [last_arrivals([arrivals_of(step) for step in row]) for row in drawn]
    windows = []
    for rank in range(len(drawn[0])):
        steps = [row[rank] for row in drawn]
        last = [[arrivals[c.key].seconds for c in step.collectives] for step, arrivals in zip(steps, latest)]
        work = [(random.integers(1, 5000, 4).astype(float).tolist(), float(random.random())) for _ in steps]
        windows.append(window_of([replace(step, features=of, predicted=load) for step, (of, load) in zip(steps, work)], last))
    return windows


if __name__ == "__main__":
    main()
