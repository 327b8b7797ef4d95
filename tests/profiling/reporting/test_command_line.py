"""``python -m lightning_freescale.profiling``."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_freescale.profiling.__main__ import main
from lightning_freescale.profiling.reporting import page
from lightning_freescale.profiling.reporting.document import read
from lightning_freescale.profiling.reporting.facts import Status
from tests.helpers.reports import full_report, run_of
from tests.helpers.shown_page import packed

DOCS = Path(__file__).parents[3] / "docs" / "report.md"


def _write(folder: Path, name: str, **run: Any) -> str:
    return str(run_of(**run).write(folder / name))


@pytest.fixture
def base(tmp_path: Path) -> str:
    return _write(tmp_path, "ddp.json", label="ddp")


@pytest.fixture
def other(tmp_path: Path) -> str:
    return _write(tmp_path, "freescale.json", wall=0.08, compute=0.0714)


def _refused(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(line)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err


def test_show_prints_what_the_report_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for report in (full_report(), full_report(status=Status(False, "KeyboardInterrupt", 5, 2)), run_of(count=0)):
        main(["show", str(report.write(tmp_path / "report.json"))])
        assert capsys.readouterr().out == f"{report}\n"


def test_compare(base: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    main(["compare", base, other, "--json", str(figures)])
    out, err = capsys.readouterr()
    (line,) = (line for line in out.splitlines() if line.startswith("freescale: "))
    assert "r = 71.3% of the base's b = 30.0% removed, speed-up 1.25x" in line, "always the three of them together"
    assert err == ""
    written = json.loads(figures.read_text())
    assert written["base"] == "ddp" and [run["label"] for run in written["runs"]] == ["freescale"]
    assert written["runs"][0]["speed_up"] == pytest.approx(1.25) and written["runs"][0]["base_bubble"] == pytest.approx(0.3)


def test_different_work_needs_force(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = _write(tmp_path, "other.json", model="SASRec", count=32)
    err = _refused(capsys, "compare", base, other)
    assert err.splitlines() == [
        "compare: the runs did different work:",
        "  model of ddp and freescale: 'HSTU' and 'SASRec'",
        "  samples per step of ddp and freescale: 64 and 32",
        "--force compares anyway",
    ]
    main(["compare", base, other, "--force"])
    out, err = capsys.readouterr()
    assert "speed-up 0.50x" in out
    assert err.splitlines()[0] == "compare: note: model of ddp and freescale: 'HSTU' and 'SASRec'"


def test_remarks_go_to_stderr_once(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = str(full_report(status=Status(False, "KeyboardInterrupt"), what_if=()).write(tmp_path / "cut.json"))
    unknown = [_write(tmp_path, f"{name}.json", label=name, count=0, device="cuda") for name in "xy"]
    main(["compare", *unknown, cut])
    out, err = capsys.readouterr()
    assert err.count("the samples of x are unknown") == 1 and "KeyboardInterrupt" in err and "'cuda' and 'cpu'" in err
    assert "note" not in out and len([line for line in out.splitlines() if line[:1] in "xy"]) >= 2


def test_runs_of_one_label_are_named_by_their_files(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [_write(tmp_path, f"{k}.json", label="same") for k in range(2)]
    main(["compare", base, *names])
    rows = capsys.readouterr().out.splitlines()[1:4]
    assert [row.split()[0] for row in rows] == ["ddp", *names]


def test_page(
    base: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[tuple[Path, list[dict[str, Any]]]] = []
    monkeypatch.setattr(page, "write_page", lambda path, documents: written.append((path, documents)))
    main(["page", base, other, "-o", str(tmp_path / "a.html")])
    main(["page", base, other, "-o", str(tmp_path / "b.html"), "--label", "before", "after"])
    assert [path.name for path, _ in written] == ["a.html", "b.html"]
    assert [[document["run"]["label"] for document in documents] for _, documents in written] == [
        ["ddp", "freescale"],
        ["before", "after"],
    ]
    assert written[0][1] == [read(base), read(other)]
    assert "b.html" in capsys.readouterr().out


def test_page_is_written(base: str, other: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    main(["page", base, other, "-o", str(path), "--label", "one of them", "the other"])
    assert [report["run"]["label"] for report in packed(path)[0]] == ["one of them", "the other"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["show", "NO_SUCH.json"], "show: [Errno 2] No such file or directory: "),
        (["show", "CUT.json"], "is not JSON, or was cut short"),
        (["show", "NEWER.json"], "version 2 is newer than this package reads (1): update lightning-freescale"),
        (["compare", "BASE.json"], "two reports or more, not 1"),
        (["compare", "BASE.json", "CUT.json"], "CUT.json is not JSON"),
        (["compare"], "required: REPORT.json"),
        (["page", "BASE.json"], "required: -o/--output"),
        (["page", "BASE.json", "-o", "p.html", "--label", "a", "b"], "--label a b: 2 names for 1 reports, pass one for each"),
        (["draw"], "invalid choice: 'draw'"),
    ],
)
def test_what_cannot_be_done_is_told(
    line: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    document = run_of().document()
    run_of().write("BASE.json")
    Path("CUT.json").write_text(json.dumps(document)[:300])
    Path("NEWER.json").write_text(json.dumps({**document, "version": 2}))
    assert message in _refused(capsys, *line)
    assert not Path("p.html").exists()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    out = capsys.readouterr().out
    assert "show" in out and "compare" in out and "page" in out
    for command, words in {"compare": "--force", "page": "--output", "show": "REPORT.json"}.items():
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0 and words in capsys.readouterr().out


def test_it_runs_as_a_module(base: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["profiling", "show", base])
    monkeypatch.delitem(sys.modules, "lightning_freescale.profiling.__main__")
    runpy.run_module("lightning_freescale.profiling", run_name="__main__")
    assert "bubble b = 30.0%" in capsys.readouterr().out


def test_the_example_of_the_docs_is_what_is_printed(base: str, other: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", base, other])
    assert capsys.readouterr().out in DOCS.read_text()
