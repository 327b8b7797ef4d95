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
import hour_process
import pytest
from hour_summary import Summary

SCRIPT = Path(first_hour.__file__)
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

def child():
    subprocess.Popen(["sleep", "300"])
    subprocess.Popen([sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '300'])"])
"""
WELL = "found([dict(size=1)]); (out / f'part_{name}.md').write_text('page'); print('said by', name)"
HANGS = "child(); found([dict(size=7)]); time.sleep(300)"


class Hour:
    """A folder of scripts in the parts' place."""

    def __init__(self, folder: Path) -> None:
        self.scripts, self.out = folder / "scripts", folder / "out"
        self.scripts.mkdir()
        for name in first_hour.PARTS:
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

    def wait_for(self, name: str) -> None:
        """Until the part has written what it has found."""
        deadline = time.monotonic() + 30
        while not (self.out / f"part_{name}.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    @property
    def started(self) -> list[Any]:
        return [json.loads(line) for line in (self.scripts / "started").read_text().splitlines()]

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
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


@pytest.fixture
def hour(tmp_path: Path) -> Hour:
    return Hour(tmp_path)


def test_parts_run_in_their_order_and_the_summary_keeps_up(hour: Hour) -> None:
    code, printed = hour.run("--quick")
    names = ["numbers", "two_ranks", "host_time", "contention", "model"]
    assert code == 0 and [name for name, *_ in hour.started] == names
    for at, (name, states, flags) in enumerate(hour.started):
        assert states == {each: "done" if k < at else "running" if k == at else "waiting" for k, each in enumerate(names)}, name
        assert flags == ["--out", str(hour.out), "--quick"]
    assert set(hour.states.values()) == {"done"}
    text = (hour.out / "summary.md").read_text()
    for name in names:
        assert f"## {name}\n" in text and f"## {name}\n" in printed and f"said by {name}" in (hour.out / "log.txt").read_text()
    assert len(list(hour.out.iterdir())) == 8  # few enough for machines that hand back only some


def test_some_parts_in_the_order_of_their_worth(hour: Hour) -> None:
    code, _ = hour.run("--parts", "model,numbers")
    assert code == 0 and [name for name, *_ in hour.started] == ["numbers", "model"]
    assert hour.states == {"numbers": "done", "model": "done"}


@pytest.mark.parametrize(
    "flags", [["--parts", "numbers,other"], ["--limit-minutes", "0"], ["--site", "/there/is/none"], ["--parts", ""]]
)
def test_refuses(hour: Hour, flags: list[str]) -> None:
    code, printed = hour.run(*flags)
    assert code == 2 and f"{flags[0]} {flags[1]}: " in printed and not (hour.scripts / "started").exists()


def test_a_part_that_hangs_is_killed_with_its_children(hour: Hour) -> None:
    hour.part("two_ranks", HANGS)
    code, printed = hour.run(limits={"two_ranks": 3})
    assert code == 1
    assert hour.states == dict.fromkeys(first_hour.PARTS, "done") | {"two_ranks": "ran over its limit"}
    assert hour.summary["parts"]["two_ranks"]["found"]["rows"] == [{"size": 7}]
    assert "ran over its limit: killed after" in printed


def test_children_of_a_part_that_has_ended_are_killed(hour: Hour) -> None:
    hour.part("numbers", "child(); " + WELL)
    assert hour.run("--parts", "numbers")[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("at", ["numbers", "host_time", "model"])
def test_cut_off_at_any_part(hour: Hour, number: signal.Signals, at: str) -> None:
    hour.part(at, HANGS)
    process = hour.start()
    hour.wait_for(at)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number and f"stopped by {number.name}" in printed
    assert hour.left_over() == []
    names = list(first_hour.PARTS)
    expected = ["done"] * names.index(at) + ["cut off"] + ["not run"] * (len(names) - names.index(at) - 1)
    assert list(hour.states.values()) == expected
    assert hour.summary["parts"][at]["found"]["rows"] == [{"size": 7}]
    assert f"cut off: stopped by {number.name}" in (hour.out / "summary.md").read_text()


def test_killed_without_warning(hour: Hour) -> None:
    """The summary was up to date within a second, and the part does not go on alone."""
    hour.part("two_ranks", HANGS.replace("child(); ", ""))
    process = hour.start()
    hour.wait_for("two_ranks")
    deadline = time.monotonic() + 30
    while hour.summary["parts"]["two_ranks"]["found"] is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=30)
    assert hour.left_over() == []
    assert hour.states["numbers"] == "done" and hour.states["two_ranks"] == "running"
    assert hour.summary["parts"]["two_ranks"]["found"]["rows"] == [{"size": 7}]


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("found([dict(size=1)], failed=[dict(what='sums', error='they are odd')]); sys.exit(1)", "- sums: they are odd"),
        ("found([dict(size=1)], failed=[dict(what='sums', error='they are odd')])", "- sums: they are odd"),
        ("found([dict(size=1)]); raise ZeroDivisionError('in the part')", "ZeroDivisionError: in the part"),
        ("sys.exit(0)", "exit code 0"),  # without a word of what it has found
        ("os.kill(os.getpid(), 11)", "exit code -11"),
    ],
)
def test_a_part_that_fails(hour: Hour, does: str, told: str) -> None:
    hour.part("numbers", does)
    code, printed = hour.run("--parts", "numbers,model")
    assert code == 1 and told in printed and told in (hour.out / "summary.md").read_text()
    assert hour.states == {"numbers": "failed", "model": "done"}


def test_a_part_without_a_script_fails(hour: Hour) -> None:
    (hour.scripts / "part_model.py").unlink()
    assert hour.run("--parts", "model")[0] == 1 and hour.states == {"model": "failed"}


def test_what_cannot_be_done_is_no_failure(hour: Hour) -> None:
    hour.part("numbers", "found(skipped=[dict(what='all of it', why='no device')])")
    code, printed = hour.run("--parts", "numbers")
    assert code == 0 and hour.states == {"numbers": "skipped"} and "- all of it: no device" in printed


def test_the_time_of_all_parts_is_limited(hour: Hour) -> None:
    hour.part("numbers", HANGS)
    code, _ = hour.run("--limit-minutes", "0.02")
    assert code == 1 and list(hour.states.values()) == ["ran over its limit"] + ["not run"] * 4


def test_an_earlier_run_leaves_nothing(hour: Hour) -> None:
    hour.run("--parts", "numbers,model")
    hour.run("--parts", "numbers")
    assert {path.name for path in hour.out.iterdir()} == {"part_numbers.json", "summary.json", "summary.md", "log.txt"}
    assert "model" not in (hour.out / "log.txt").read_text()


UNPACK = """
import sys, pathlib
target = pathlib.Path(sys.argv[2])
target.mkdir()  # an error if it is there
(target / "brought.py").write_text(f"by = {sys.argv[1]!r}")
"""


def test_packages_come_first(hour: Hour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / "brought.py").write_text("by = 'somebody else'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "usual"))
    archive = tmp_path / "archive"
    archive.write_text("")
    (hour.scripts / "unpack_site.py").write_text(UNPACK)
    hour.part("numbers", f"import brought; assert brought.by == {str(archive)!r}; {WELL}")
    code, printed = hour.run("--parts", "numbers", "--site", str(archive))
    assert code == 0 and "## site\n\ndone" in printed and hour.summary["site"]["state"] == "done"


def test_packages_for_nothing_are_a_failure(hour: Hour, tmp_path: Path) -> None:
    """A part that skips everything although it was given what it needs has told nothing: exit 0 would hide that."""
    (tmp_path / "archive").write_text("")
    (hour.scripts / "unpack_site.py").write_text(UNPACK)
    hour.part("numbers", "found(skipped=[dict(what='everything', why='torchrec does not import')])")
    code, printed = hour.run("--parts", "numbers,model", "--site", str(tmp_path / "archive"))
    assert code == 1 and hour.states == {"numbers": "failed", "model": "done"}
    assert "nothing was measured, although packages were given by --site" in printed
    assert "- everything: torchrec does not import" in printed


def test_packages_that_cannot_be_unpacked(hour: Hour, tmp_path: Path) -> None:
    """Some parts need none of them."""
    archive = tmp_path / "archive"
    archive.write_text("")
    (hour.scripts / "unpack_site.py").write_text("raise EOFError('half an archive')")
    code, printed = hour.run("--parts", "numbers", "--site", str(archive))
    assert code == 1 and "EOFError: half an archive" in printed and hour.states == {"numbers": "done"}


@pytest.mark.parametrize(("demand", "code"), [("numbers.speed>=2", 0), ("numbers.speed>=3", 1), ("numbers.other>=3", 1)])
def test_figures_can_be_required(hour: Hour, tmp_path: Path, demand: str, code: int) -> None:
    hour.part("numbers", "found([dict(size=1)], figures=dict(speed=2.5))")
    assert hour.run("--parts", "numbers", "--require", demand)[0] == code


@pytest.mark.slow
def test_figures_are_written(hour: Hour, tmp_path: Path) -> None:
    hour.part("numbers", "found([dict(size=1)], figures=dict(speed=2.5))")
    assert hour.run("--parts", "numbers", "--json", str(tmp_path / "figures.json"))[0] == 0
    assert json.loads((tmp_path / "figures.json").read_text())["figures"] == {"numbers.speed": 2.5}


@pytest.mark.slow
@pytest.mark.timeout(600)  # of a machine that others use
def test_without_a_gpu(tmp_path: Path) -> None:
    """The parts themselves: they do what a CPU can and tell what they leave out."""
    command = [sys.executable, str(SCRIPT), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert list(parts) == list(first_hour.PARTS)
    assert all(about["state"] in ("done", "skipped") and not about["found"]["failed"] for about in parts.values())
    assert all(about["found"]["skipped"] for about in parts.values())
    assert "Skipped:" in done.stdout and "- peer" in done.stdout
    assert len(list(tmp_path.rglob("*"))) == 8


def test_a_script_that_cannot_be_killed_is_left(
    hour: Hour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A driver may hold a process inside the kernel: the hour goes on without it, and says so."""
    (tmp_path / "sleeps.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    monkeypatch.setattr(hour_process.os, "killpg", lambda group, number: None)
    monkeypatch.setattr(hour_process, "ENDING", 0.2)
    ran = hour_process.run_limited([str(tmp_path / "sleeps.py")], tmp_path / "log.txt", 3.0, [])
    number = int(ran.printed.split()[-1])
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)
    assert ran.code is None and ran.stuck and ran.seconds < 30
    assert f"process {number} could not be killed within 0.2 s" in capsys.readouterr().err
    hour.out.mkdir()
    summary = Summary(hour.out, ["model"])
    summary.end("model", ran)
    assert "ran over its limit: it could not be killed after" in summary.page("model") and not summary.all_well
