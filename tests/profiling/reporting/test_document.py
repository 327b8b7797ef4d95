"""The document: to JSON and back, and what is refused."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from lightning_freescale.profiling.analysis.breakdown import PART_NAMES
from lightning_freescale.profiling.reporting.document import FORMAT, Overhead, WaitAttribution, check, read, write
from tests.helpers.reports import full_report, report_of, run_of, step

SCHEMA = json.loads(files("lightning_freescale.profiling.reporting").joinpath("schema.json").read_text())
VALIDATOR = Draft202012Validator(SCHEMA)
DOCS = Path(__file__).parents[3] / "docs" / "report.md"
Keys = tuple[Any, ...]


def _bare() -> dict[str, Any]:
    """Null or empty wherever a report may be."""
    waits, overhead = WaitAttribution(True, 0.0), Overhead(0.0, 0.0)
    return report_of(np.array([[step(2.0)]]), wait_attribution=waits, overhead=overhead).document()


def _nodes(value: Any, at: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    if at:
        yield at, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield from _nodes(child, (*at, key))


def _properties(rule: dict[str, Any], at: str = "", once: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every property of the schema with its path; ``once`` yields shared definitions only the first time."""
    if "$ref" in rule:
        if once and at != "summary.shares":
            return
        rule = SCHEMA["$defs"][rule["$ref"].rpartition("/")[2]]
    for name, inner in rule.get("properties", {}).items():
        path = f"{at}.{name}" if at else name
        yield path, inner
        yield from _properties(inner, path, once)
    if isinstance(rule.get("items"), dict):
        yield from _properties(rule["items"], f"{at}[]", once)


def _names(document: dict[str, Any]) -> set[str]:
    """Return the paths of a document as in the schema; maps with free keys count as one."""
    free = ("run.versions", "imbalance.slow_ranks", "host_s")
    paths = ("".join("[]" if isinstance(key, int) else f".{key}" for key in at)[1:] for at, _ in _nodes(document))
    return {path for path in paths if not path.endswith("]") and not any(path.startswith(f"{name}.") for name in free)}


def _changed(document: dict[str, Any], path: Keys, *value: Any) -> dict[str, Any]:
    """Return a copy with a value at the path, or without the value at the path."""
    made = at = copy.deepcopy(document)
    for key in path[:-1]:
        at = at[key]
    if value:
        at[path[-1]] = value[0]
    else:
        del at[path[-1]]
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return full_report().write(tmp_path / "runs" / "report.json")


def test_documents_follow_the_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    for document in (full_report().document(), _bare(), run_of().document()):
        VALIDATOR.validate(json.loads(json.dumps(document, allow_nan=False)))
        check(document)
    assert _names(full_report().document()) == {path for path, _ in _properties(SCHEMA)}


def test_every_property_has_a_description_and_the_docs_have_every_section() -> None:
    assert [path for path, rule in _properties(SCHEMA) if not rule.get("description", "").endswith(".")] == []
    text = DOCS.read_text()
    assert [name for name in SCHEMA["properties"] if f"`{name}`" not in text] == []


def test_figures_of_the_document() -> None:
    document = full_report().document()
    assert document["summary"]["bubble"] == 0.3 and document["summary"]["limit"] == pytest.approx(1 / 0.7)
    assert document["summary"]["samples"] == 96 and document["summary"]["samples_per_s"] == pytest.approx(320)
    status = {"complete": True, "reason": None, "steps": 3, "first_step": 5, "warmup": 0, "not_exchanged": 0}
    assert document["status"] == status
    assert [(rank["score"], rank["last"]) for rank in document["ranks"]] == [(1.0, 0), (1.31, 1)]
    assert document["imbalance"]["slow_ranks"] == {"1": 1.31} and document["imbalance"]["hardware_s"] == 0.0006
    assert document["overhead"] == {"total_s": 0.00012, "exchange_s": 8e-5, "stamps_s": 4e-5, "share": 0.0012}
    waits = document["wait_attribution"]
    assert (waits["aligned"], waits["uncertainty_s"], waits["reason"]) == (True, 5e-5, None)
    assert waits["clock"]["syncs"] == 3 and document["what_if"][1]["note"].startswith("exchanges")
    replay = document["replay"]
    assert (replay["steps"], replay["first_step"], replay["last_step"], replay["step_s"]) == (3, 5, 7, 0.1)


def test_every_rank_has_its_own_figures_and_series_are_rounded_to_microseconds() -> None:
    rows = np.array([[step(2.0000006, forward=1.0), step(4.0, forward=1.0, transfer=3.0)], [step(2.0), step(4.0)]])
    document = report_of(rows, np.array([[1, 2], [3, 4]])).document()
    zero, one = document["ranks"]
    figures = (zero["rank"], zero["step_s"], zero["shares"]["forward"], zero["score"], zero["last"])
    assert figures == (0, pytest.approx(2.0), pytest.approx(0.25), None, 0)
    assert (one["rank"], one["step_s"], one["shares"]["transfer"]) == (1, 4.0, 0.375)
    series = document["series"]
    assert series["step"] == [5, 6] and series["samples"] == [[1, 2], [3, 4]] and series["columns"] == list(PART_NAMES)
    assert [[rank[0] for rank in ranks] for ranks in series["breakdown_s"]] == [[2.000001, 4.0], [2.0, 4.0]]
    assert series["breakdown_s"][0][0][2] == 1.0 and type(series["breakdown_s"][0][0][2]) is float


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_written(value: float, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for report, at in (
        (full_report(overhead=Overhead(value, 0.0)), "overhead.total_s"),
        (full_report(host={"hooks": np.float64(value)}), "host_s.hooks"),
        (full_report(parts=np.full((1, 2, len(PART_NAMES)), value)), "summary.bubble"),
        (full_report(device_idle={"steps": 3, "idle": [value], "compute": [], "other": []}), r"device_idle.idle\[0\]"),
    ):
        with pytest.raises(ValueError, match=f"{at} is (nan|inf)"), np.errstate(invalid="ignore"):
            report.write(path)
    for document in ({"bubble": value}, {"series": {"rows": [[[1.0, value]], [[2.0, 3.0]]]}}):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write(document, path)
    assert not list(tmp_path.iterdir())


def test_there_and_back(file: Path) -> None:
    document = full_report().document()
    assert read(file) == document and document["format"] == FORMAT
    top = [line.split('"')[1] for line in file.read_text().splitlines() if line.startswith(' "')]
    assert top == list(SCHEMA["properties"]), "the summary before the series"
    assert [path.name for path in file.parent.iterdir()] == ["report.json"]
    # fields that only add to a document do not make it another version
    document["summary"]["more"] = {"x": 1}
    file.write_text(json.dumps(document))
    assert read(file)["summary"]["more"] == {"x": 1}


def test_a_write_that_fails_leaves_the_old_file(file: Path, monkeypatch: Any) -> None:
    old = file.read_text()

    def broken(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="no space left"):
        run_of().write(file)
    assert file.read_text() == old and [path.name for path in file.parent.iterdir()] == ["report.json"]


def test_each_field_and_each_step_has_a_line(tmp_path: Path) -> None:
    for document in (full_report().document(), _bare()):
        text = write(document, tmp_path / "report.json").read_text(encoding="utf-8")
        assert json.loads(text) == document
        assert len(text.splitlines()) == 2 + len(document) + len(document["series"]) + sum(
            len(rows) - 1 for rows in document["series"].values() if rows and isinstance(rows[0], list)
        )


WRONG = [
    (("format",), "other", "'other'"),
    (("version",), 2, "version 2"),
    (("version",), 0, "version is 0"),
    (("version",), "2", "version is '2'"),
    (("summary", "bubble"), True, "summary.bubble is True"),
    (("median_step", "ranks", 0, 1, 0), "guess", r"median_step.ranks\[0\]\[1\]\[0\] is 'guess'.*'forward'"),
    (("series", "samples", 0, 1), True, "series.samples.* bool"),
    (("series", "breakdown_s", 0, 1, 3), "x", "series.breakdown_s.* str"),
    (("series", "columns"), [*reversed(PART_NAMES)], "series.columns is"),
    (("series",), None, "series is"),
]
LACKING = [
    (("summary",), "summary is missing"),
    (("ranks", 1, "shares", "hidden"), r"ranks\[1\].shares.hidden is missing"),
    (("median_step", "ranks", 0, 1, 3), r"median_step.ranks\[0\]\[1\] is .*minItems"),
    (("series", "step", 2), r"series.step .*\(2,\), not \(3,\)"),
    (("series", "samples", 2), r"series.samples .*\(2, 2\), not \(3, 2\)"),
    (("series", "breakdown_s", 0, 1, 3), "series.breakdown_s .*length"),
    (("series", "features", 0), r"series.features .*\(2, 2, 4\), not \(3, 2, 4\)"),
    (("ranks", 1), r"series.breakdown_s .*\(3, 2, 11\), not \(3, 1, 11\)"),
]


def test_wrong_documents_are_refused(file: Path) -> None:
    good = full_report().document()
    cases = [(path, (value,), message) for path, value, message in WRONG] + [(path, (), message) for path, message in LACKING]
    for path, value, message in cases:
        file.write_text(json.dumps(_changed(good, path, *value)))
        with pytest.raises(ValueError, match=message) as error:
            read(file)
        assert str(error.value).startswith(str(file))


def test_files_that_are_no_json_are_refused(file: Path) -> None:
    whole = file.read_text()
    for text in (whole[: len(whole) // 2], "", "page", whole.replace("0.3,", "NaN,", 1), whole.replace("0.3,", "Infinity,", 1)):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"report.json is not JSON"):
            read(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"report.json is not JSON"):
        read(file)
    file.write_text("[1]")
    with pytest.raises(ValueError, match="None"):
        read(file)
    with pytest.raises(FileNotFoundError):
        read(file.with_name("no_such_file.json"))
