"""``freescale profile show``, ``compare`` and ``page``."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_freescale.command_line.profile import run
from lightning_freescale.profiling.reporting.document import Status, read
from tests.helpers.reports import full_report, run_of
from tests.helpers.shown_page import packed

main = partial(run, "profile")
DOCS = Path(__file__).parents[3] / "docs" / "report.md"


def _write(folder: Path, name: str, **run: Any) -> str:
    return str(run_of(**run).write(folder / name))


@pytest.fixture
def base(tmp_path: Path) -> str:
    return _write(tmp_path, "ddp.json", label="ddp")


@pytest.fixture
def other(tmp_path: Path) -> str:
    return _write(tmp_path, "freescale.json", wall=0.08, compute=0.0714)


def _refused(capsys: Any, *line: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(list(line))
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err


def test_show_prints_what_the_report_prints(tmp_path: Path, capsys: Any) -> None:
    for report in (full_report(), full_report(status=Status(False, "KeyboardInterrupt", 5, 2)), run_of(count=0)):
        path = str(report.write(tmp_path / "report.json"))
        main(["show", path])
        assert capsys.readouterr().out == f"{report}\n"
    main([])
    shown_text = capsys.readouterr().out
    assert all(command in shown_text for command in ("show", "compare", "page"))


def test_compare(base: str, other: str, tmp_path: Path, capsys: Any) -> None:
    figures = tmp_path / "figures.json"
    main(["compare", base, other, "--json", str(figures)])
    out, err = capsys.readouterr()
    assert err == "" and out in DOCS.read_text(), "it is the example of the documentation"
    (line,) = (line for line in out.splitlines() if line.startswith("freescale: "))
    assert all(figure in line for figure in ("71.3%", "30.0%", "1.25x")), "always the three of them together"
    written = json.loads(figures.read_text())
    assert written["base"] == "ddp" and [run["label"] for run in written["runs"]] == ["freescale"]
    assert written["runs"][0]["speed_up"] == pytest.approx(1.25) and written["runs"][0]["base_bubble"] == pytest.approx(0.3)


def test_different_work_needs_force(base: str, tmp_path: Path, capsys: Any) -> None:
    different = _write(tmp_path, "other.json", model="SASRec", count=32)
    named = ["model of ddp and freescale: 'HSTU' and 'SASRec'", "samples per step of ddp and freescale: 64 and 32"]
    err = _refused(capsys, "compare", base, different)
    assert [line.strip() for line in err.splitlines()[1:3]] == named and "--force" in err
    main(["compare", base, different, "--force"])
    out, err = capsys.readouterr()
    assert "speed-up 0.50x" in out
    assert [line.partition("note: ")[2] for line in err.splitlines()] == named


def test_remarks_go_to_stderr_once(tmp_path: Path, capsys: Any) -> None:
    cut = str(full_report(status=Status(False, "KeyboardInterrupt"), what_if=()).write(tmp_path / "cut.json"))
    unknown = [_write(tmp_path, f"{name}.json", label=name, count=0, device="cuda") for name in "xy"]
    main(["compare", *unknown, cut])
    out, err = capsys.readouterr()
    assert err.count("samples of x") == 1 and "KeyboardInterrupt" in err and "'cuda' and 'cpu'" in err
    assert "note" not in out and len([line for line in out.splitlines() if line[:1] in "xy"]) >= 2


def test_runs_of_one_label_are_named_by_their_files(base: str, tmp_path: Path, capsys: Any) -> None:
    names = [_write(tmp_path, f"{k}.json", label="same") for k in range(2)]
    main(["compare", base, *names])
    rows = capsys.readouterr().out.splitlines()[1:4]
    assert [row.split()[0] for row in rows] == ["ddp", *names]


def test_page(base: str, other: str, tmp_path: Path, capsys: Any) -> None:
    path, copy = tmp_path / "page.html", shutil.copy(base, tmp_path / "copy.json")
    for paths, labels in (([base, other], ["ddp", "freescale"]), ([base, copy], [base, str(copy)])):
        main(["page", *map(str, paths), "-o", str(path)])
        assert str(path) in capsys.readouterr().out
        shown = [report["run"] for report in packed(path)[0]]
        assert shown == [{**read(one)["run"], "label": label} for one, label in zip(paths, labels)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["show", "NO_SUCH.json"], "NO_SUCH.json"),
        (["show", "CUT.json"], "CUT.json is not JSON"),
        (["show", "NEWER.json"], "NEWER.json: version 2"),
        (["compare", "BASE.json"], "compare: "),
        (["compare", "BASE.json", "CUT.json"], "CUT.json is not JSON"),
        (["compare"], "REPORT.json"),
        (["page", "BASE.json"], "-o/--output"),
        (["page", "CUT.json", "-o", "p.html"], "CUT.json is not JSON"),
        (["draw"], "'draw'"),
    ],
)
def test_what_cannot_be_done_is_told(line: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    document = run_of().document()
    run_of().write("BASE.json")
    Path("CUT.json").write_text(json.dumps(document)[:300])
    Path("NEWER.json").write_text(json.dumps({**document, "version": 2}))
    assert message in _refused(capsys, *line)
    assert not Path("p.html").exists()
