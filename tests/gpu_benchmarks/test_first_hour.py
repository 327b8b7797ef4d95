"""The driver of the parts, over small scripts in their place; and once over the parts themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import first_hour
import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(first_hour.__file__)
PARTS = list(first_hour.PARTS)
RUN = """
import sys
sys.path[:0] = [{folder!r}, {above!r}]
from pathlib import Path
import first_hour
first_hour.PARTS.update({limits!r})
first_hour.main(sys.argv[1:], scripts=Path({scripts!r}))
"""
BEGIN = """
import json, os, subprocess, sys, time
from pathlib import Path
out, name, here = Path(sys.argv[sys.argv.index("--out") + 1]), {name!r}, Path(__file__).parent
states = {{part: about["state"] for part, about in json.loads((out / "summary.json").read_text())["parts"].items()}}
with (here / "started").open("a") as started:
    started.write(json.dumps([name, states, sys.argv[1:]]) + "\\n")

def found(rows=(), skipped=(), failed=(), figures=()):
    content = dict(part=name, device="CPU", versions={{}}, commit="abc", rows=list(rows), skipped=list(skipped),
                   failed=list(failed), figures=dict(figures))
    (out / f"part_{{name}}.json").write_text(json.dumps(content))
"""
WELL = "found([dict(size=1)], figures=dict(speed=2.5)); print('said by', name)"
HANGS = "subprocess.Popen(['sleep', '300']); found([dict(size=7)]); time.sleep(300)"


class Hour:
    def __init__(self, folder: Path) -> None:
        self.scripts, self.out = folder / "scripts", folder / "out"
        self.scripts.mkdir()
        for name in PARTS:
            self.part(name, WELL)

    def part(self, name: str, does: str) -> None:
        (self.scripts / f"part_{name}.py").write_text(BEGIN.format(name=name) + does)

    def start(self, *flags: str, limits: dict[str, float] | None = None) -> subprocess.Popen:
        folder, above = str(SCRIPT.parent), str(SCRIPT.parents[1])
        code = RUN.format(folder=folder, above=above, limits=limits or {}, scripts=str(self.scripts))
        command = [sys.executable, "-c", code, "--out", str(self.out), *flags]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, *flags: str, limits: dict[str, float] | None = None) -> tuple[int, str]:
        process = self.start(*flags, limits=limits)
        printed, _ = process.communicate(timeout=60)
        assert self.left_over() == []
        return process.returncode, printed

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.out / "summary.json").read_text())

    @property
    def states(self) -> dict[str, str]:
        return {name: about["state"] for name, about in self.summary["parts"].items()}

    def left_over(self) -> list[int]:
        """Processes of the parts that are still there a moment later: what they start inherits their log."""
        deadline = time.monotonic() + 5
        while (found := _holding(self.out / "log.txt")) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found


def _holding(path: Path) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.readlink(entry) == str(path) for entry in folder.iterdir()):
                found.append(int(folder.parent.name))
        except OSError:  # the process has ended, or belongs to another user
            continue
    return found


@pytest.fixture
def hour(tmp_path: Path) -> Hour:
    return Hour(tmp_path)


def test_parts_run_in_their_order_and_the_summary_keeps_up(hour: Hour, tmp_path: Path) -> None:
    code, printed = hour.run("--quick", "--json", str(tmp_path / "f.json"), "--require", "numbers.speed>=2")
    assert code == 0
    started = [json.loads(line) for line in (hour.scripts / "started").read_text().splitlines()]
    assert [name for name, *_ in started] == PARTS
    for at, (name, states, flags) in enumerate(started):
        assert states == {each: "done" if k < at else "running" if k == at else "waiting" for k, each in enumerate(PARTS)}, name
        assert flags == ["--out", str(hour.out), "--quick"]
    assert set(hour.states.values()) == {"done"} and all(f"## {name}\n" in printed for name in PARTS)
    assert json.loads((tmp_path / "f.json").read_text())["figures"] == {f"{name}.speed": 2.5 for name in PARTS}
    assert hour.run("--parts", "model,numbers", "--require", "numbers.speed>=3")[0] == 1
    assert hour.states == {"numbers": "done", "model": "done"}, "the earlier run leaves nothing"
    assert hour.run("--parts", "numbers,other")[0] == hour.run("--limit-minutes", "0")[0] == 2


def test_every_failure_of_a_part_is_told_and_the_next_runs(hour: Hour) -> None:
    hour.part("numbers", "found([dict(size=1)], failed=[dict(what='sums', error='they are odd')])")
    hour.part("two_ranks", HANGS)
    hour.part("host_time", "sys.exit(0)")  # without a word of what it has found
    hour.part("contention", "os.kill(os.getpid(), 11)")
    hour.part("model", "found(skipped=[dict(what='all of it', why='no device')])")
    code, printed = hour.run(limits={"two_ranks": 3})
    assert code == 1 and "they are odd" in printed and "-11" in printed and "no device" in printed
    assert list(hour.states.values()) == ["failed", "ran over its limit", "failed", "failed", "skipped", "done"]
    assert hour.summary["parts"]["two_ranks"]["found"]["rows"] == [{"size": 7}]
    hour.part("numbers", HANGS)
    assert hour.run("--limit-minutes", "0.02")[0] == 1
    assert list(hour.states.values()) == ["ran over its limit"] + ["not run"] * 5


def test_cut_off_inside_a_part(hour: Hour) -> None:
    hour.part("host_time", HANGS)
    process, deadline = hour.start(), time.monotonic() + 30
    while not (hour.out / "summary.json").exists() or not hour.summary["parts"]["host_time"].get("found"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM and hour.left_over() == []
    assert list(hour.states.values()) == ["done", "done", "cut off", *["not run"] * 3]
    assert hour.summary["parts"]["host_time"]["found"]["rows"] == [{"size": 7}]


@pytest.mark.timeout(600)  # of a machine that others use
def test_without_a_gpu(tmp_path: Path) -> None:
    """The parts themselves: they do what a CPU can and tell what they leave out."""
    command = [sys.executable, str(SCRIPT), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert list(parts) == PARTS and len(list(tmp_path.rglob("*"))) == 9
    found = {name: about["found"] for name, about in parts.items()}
    assert all(about["skipped"] and not about["failed"] and about["rows"] and about["figures"] for about in found.values())
    assert all(row["ok"] for row in found["numbers"]["rows"]) and any(row["bitwise"] for row in found["numbers"]["rows"])
    rows = found["two_ranks"]["rows"]
    assert {row["transport"] for row in rows if row.get("equal to gloo")} == {"host", "native"}
    assert all(row["noticed after s"] < row["timeout s"] for row in rows if "noticed after s" in row)
    equality, *beside = found["contention"]["rows"]
    assert equality["collectives"] == equality["equal to gloo"] > 100 and {row["beside"] for row in beside} == {"host"}
    equality, *beside = found["uneven"]["rows"]
    assert equality["equal to gloo"] > 100 and {row["beside"] for row in beside} == {"host", "host_uneven"}
    threads = {(row["variant"], row["thread"]) for row in found["host_time"]["rows"] if "thread" in row}
    assert ("overlap", "engine") in threads and ("plain", "engine") not in threads
