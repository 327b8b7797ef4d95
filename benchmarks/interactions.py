"""Time to read and group interactions, and their peak memory beyond the columns.

Users, items and times have 64 bits and are drawn at random, users in no order. Each case runs in a separate process. The peak
is the resident memory that Linux reports, so it includes the result and all memory that Arrow and numpy keep. The columns of a
table exist before and are not counted. For a file, the bytes of three such columns are subtracted.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import harness
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from lightning_freescale.data import read_interactions

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "table": ("arrow", {}),
    "table_sort": ("arrow", {"order": "sort"}),
    "parquet": ("parquet", {}),
    "csv": ("csv", {}),
    "csv_sort": ("csv", {"order": "sort"}),
    "csv_strings": ("strings.csv", {}),
    "dat": ("dat", {"user": 0, "item": 1, "time": 2}),
}
"""The file of a case, and how it is read."""


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000, help="interactions (default: 20 million)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    figures = {}
    print(f"{options.rows} rows, columns of {24 * options.rows / 2**20:.0f} MiB")
    print(f"{'case':<12}  {'seconds':>7}  {'processor seconds':>17}  {'peak beyond columns / columns':>29}")
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases:
            kind, arguments = CASES[case]
            path = Path(folder) / f"rows.{kind}"
            _in_process(_write, path, options.rows, arguments.get("order") == "sort")
            seconds, busy, ratio = _in_process(_measure, path, options.rows, arguments)
            figures |= {f"{case}_seconds": seconds, f"{case}_processor_seconds": busy, f"{case}_peak_ratio": ratio}
            print(f"{case:<12}  {seconds:7.2f}  {busy:17.2f}  {ratio:29.2f}", flush=True)
            path.unlink()
    harness.finish(figures, options)


def _in_process(function: Any, *arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def _write(path: Path, rows: int, shuffle_times: bool) -> None:
    """Write users like those of ml-20m, with popular items and one interaction per second."""
    random = np.random.default_rng(0)
    users, items = random.integers(0, 138_493, rows), random.zipf(1.3, rows) % 27_000
    times = 1_000_000_000 + np.arange(rows)
    if shuffle_times:
        random.shuffle(times)
    table = pa.table({"user": users, "item": items, "time": times})
    if path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".parquet":
        pa.parquet.write_table(table, path)
    elif path.suffix == ".dat":
        bare = path.with_suffix(".bare")
        pa.csv.write_csv(table, bare, pa.csv.WriteOptions(include_header=False))
        with bare.open("rb") as file, path.open("wb") as out:
            while block := file.read(1 << 24):
                out.write(block.replace(b",", b"::"))
        bare.unlink()
    else:
        if "strings" in path.name:
            names = [pa.compute.binary_join_element_wise("id", table[name].cast(pa.string()), "") for name in ("user", "item")]
            table = pa.table([*names, table["time"]], names=table.column_names)
        pa.csv.write_csv(table, path)


def _measure(path: Path, rows: int, arguments: dict[str, Any]) -> tuple[float, float, float]:
    """Return seconds, processor seconds, and the peak of resident memory beyond the columns, as a share of their size."""
    source: Any = path
    if path.suffix == ".arrow":
        with pa.OSFile(str(path)) as file:
            source = pa.ipc.open_file(file).read_all()
    read_interactions(pa.table({"user": [1], "item": [1], "time": [1]}))  # load all that the first call imports
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    held, began, busy = _resident("VmRSS"), time.perf_counter(), time.process_time()
    read_interactions(source, **arguments)
    seconds, busy, columns = time.perf_counter() - began, time.process_time() - busy, 24 * rows
    return seconds, busy, (_resident("VmHWM") - held) / columns - (source is path)


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        sys.exit("reading how much memory is held needs Linux")
    return 1024 * int(found[1])


if __name__ == "__main__":
    main()
