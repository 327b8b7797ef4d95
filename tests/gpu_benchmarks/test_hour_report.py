"""What a part has found is on disk at every moment, and its exit code says whether anything failed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hour_report import Report, Skip, markdown


def read(out: Path) -> dict[str, Any]:
    return json.loads((out / "part_x.json").read_text())


def test_every_entry_is_on_disk_at_once(tmp_path: Path) -> None:
    report = Report("x", tmp_path / "new")
    assert read(tmp_path / "new")["rows"] == []
    report.row(size=1, rate=2.5)
    assert read(tmp_path / "new")["rows"] == [{"size": 1, "rate": 2.5}]
    report.skip("peer", "no device")
    assert read(tmp_path / "new")["skipped"] == [{"what": "peer", "why": "no device"}]
    report.figure("rate", 2.5)
    assert read(tmp_path / "new")["figures"] == {"rate": 2.5}
    report.fail("equal", "it is not")
    found = read(tmp_path / "new")
    assert found["failed"] == [{"what": "equal", "error": "it is not"}]
    assert found["part"] == "x" and found["device"] == "CPU" and "torch" in found["versions"] and found["commit"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["part_x.json"]


def _strict(text: str) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_said_in_strict_json(tmp_path: Path, odd: float) -> None:
    report = Report("x", tmp_path)
    report.row(what="one", against="other", off=odd, size=2.0)
    report.figure("off", odd)
    report.row(what="next", off=1.0)
    found = _strict((tmp_path / "part_x.json").read_text())
    assert found["rows"] == [{"what": "one", "against": "other", "off": None, "size": 2.0}, {"what": "next", "off": 1.0}]
    assert found["failed"] == [
        {"what": "one, other", "error": f"not finite: {{'off': {odd}}}"},
        {"what": "off", "error": f"not finite: {odd}"},
    ]
    assert not found["figures"]


def test_a_check_that_raises_has_failed_and_the_next_is_made(tmp_path: Path) -> None:
    report = Report("x", tmp_path)
    with report.check("first"):
        raise ZeroDivisionError("by zero")
    with report.check("second"):
        raise Skip("not here")
    found = read(tmp_path)
    assert found["failed"][0]["what"] == "first" and "ZeroDivisionError: by zero" in found["failed"][0]["error"]
    assert found["skipped"] == [{"what": "second", "why": "not here"}]


def test_another_process_speaks_until_it_fails(tmp_path: Path) -> None:
    def said() -> Iterator[tuple[str, dict]]:
        yield "row", {"size": 1}
        assert read(tmp_path)["rows"] == [{"size": 1}]
        yield "figure", {"name": "size", "value": 1.0}
        raise TimeoutError("too long")

    Report("x", tmp_path).take("the process", said())
    found = read(tmp_path)
    assert found["figures"] == {"size": 1.0} and found["failed"][0]["what"] == "the process"


@pytest.mark.parametrize("fails", [True, False])
def test_exit_code(tmp_path: Path, fails: bool, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("x", tmp_path)
    report.skip("something", "no device")
    if fails:
        report.fail("something", "wrong")
    with pytest.raises(SystemExit) as ended:
        report.end()
    assert ended.value.code == int(fails)
    assert (tmp_path / "part_x.md").read_text() in capsys.readouterr().out


def test_tables() -> None:
    rows = [{"a": 1, "b": 0.123456}, {"c": "x|y"}, {"a": True, "b": None}]
    failed = [{"what": "sums", "error": "Traceback\n  there\nValueError: odd"}]
    text = markdown(
        {
            "part": "x",
            "device": "CPU",
            "versions": {"torch": "2"},
            "commit": "abc",
            "rows": rows,
            "skipped": [],
            "failed": failed,
        }
    )
    assert "| a | b |\n| --- | --- |\n| 1 | 0.1235 |\n| True |  |\n" in text
    assert "| c |\n| --- |\n| x\\|y |" in text
    assert "CPU; torch 2; commit abc" in text and "- sums: ValueError: odd" in text
