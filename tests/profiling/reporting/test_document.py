"""The document: to JSON and back, and what is refused."""

from __future__ import annotations

import copy
import json
import os
import random
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from lightning_freescale.profiling.analysis.breakdown import PART_NAMES
from lightning_freescale.profiling.reporting.document import FORMAT, check, read, write
from lightning_freescale.profiling.reporting.facts import Overhead, WaitAttribution
from tests.helpers.reports import full_report, report_of, run_of, step

SCHEMA = json.loads(files("lightning_freescale.profiling.reporting").joinpath("schema.json").read_text())
VALIDATOR = Draft202012Validator(SCHEMA)
DOCS = Path(__file__).parents[3] / "docs" / "report.md"
Keys = tuple[Any, ...]


def _bare() -> dict[str, Any]:
    """Null or empty wherever a report may be."""
    return report_of(
        np.array([[step(2.0)]]), wait_attribution=WaitAttribution(True, 0.0), overhead=Overhead(0.0, 0.0)
    ).document()


def _nodes(value: Any, at: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    if at:
        yield at, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield from _nodes(child, (*at, key))


def _properties(rule: dict[str, Any], at: str = "", once: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every property of the schema by its path; ``once``: what is defined apart only where it comes first."""
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
    """The paths of a document as the schema has them; maps with free keys count as one."""
    free = ("run.versions", "imbalance.slow_ranks", "host_s")
    paths = ("".join("[]" if isinstance(key, int) else f".{key}" for key in at)[1:] for at, _ in _nodes(document))
    return {path for path in paths if not path.endswith("]") and not any(path.startswith(f"{name}.") for name in free)}


def _at(document: Any, path: Keys) -> Any:
    for key in path:
        document = document[key]
    return document


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return full_report().write(tmp_path / "runs" / "report.json")


# -- the schema


@pytest.mark.parametrize("document", [full_report().document(), _bare(), run_of().document()], ids=["full", "bare", "plain"])
def test_documents_follow_the_schema(document: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    VALIDATOR.validate(json.loads(json.dumps(document, allow_nan=False)))
    check(document)


def test_document_and_schema_have_the_same_properties() -> None:
    assert _names(full_report().document()) == {path for path, _ in _properties(SCHEMA)}


def test_every_property_is_described() -> None:
    for path, rule in _properties(SCHEMA):
        assert rule.get("description", "").endswith("."), path


def test_the_docs_have_every_property() -> None:
    rows = [f"| `{path}` | {rule['description']} |" for path, rule in _properties(SCHEMA, once=True)]
    text = DOCS.read_text()
    missing = [row for row in rows if row not in text]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("wrong", [{"x": 1}, [[["x"]]], "x", 1.5, True, None], ids=str)
def test_readers_refuse_what_the_schema_refuses(wrong: Any) -> None:
    """Wherever it stands."""
    good = full_report().document()
    for path, value in _nodes(good):
        if path[0] == "series" and len(path) > 2:
            continue  # by shape, below
        document = copy.deepcopy(good)
        _at(document, path[:-1])[path[-1]] = wrong
        assert VALIDATOR.is_valid(document) == _accepts(document), f"{path}: {wrong!r} in place of {value!r:.60}"


def test_readers_refuse_what_is_missing() -> None:
    good = full_report().document()
    for path, _ in _nodes(good):
        if isinstance(path[-1], int):
            continue
        document = copy.deepcopy(good)
        del _at(document, path[:-1])[path[-1]]
        assert VALIDATOR.is_valid(document) == _accepts(document), path


def _accepts(document: dict[str, Any]) -> bool:
    try:
        check(document)
    except ValueError:
        return False
    return True


# -- values


def test_figures_of_the_document() -> None:
    document = full_report().document()
    assert document["summary"]["bubble"] == 0.3 and document["summary"]["limit"] == pytest.approx(1 / 0.7)
    assert document["summary"]["samples"] == 96 and document["summary"]["samples_per_s"] == pytest.approx(320)
    assert document["status"] == {
        "complete": True,
        "reason": None,
        "steps": 3,
        "first_step": 5,
        "warmup": 0,
        "not_exchanged": 0,
    }
    assert [rank["score"] for rank in document["ranks"]] == [1.0, 1.31] and [rank["last"] for rank in document["ranks"]] == [
        0,
        1,
    ]
    assert document["imbalance"]["slow_ranks"] == {"1": 1.31} and document["imbalance"]["hardware_s"] == 0.0006
    assert document["overhead"] == {
        "total_s": 0.00012,
        "exchange_s": 8e-5,
        "stamps_s": 4e-5,
        "share": 0.0012,
    }
    waits = document["wait_attribution"]
    assert (waits["aligned"], waits["uncertainty_s"], waits["reason"]) == (True, 5e-5, None)
    assert waits["clock"]["syncs"] == 3 and document["what_if"][1]["note"].startswith("exchanges")


def test_every_rank_has_its_own_figures() -> None:
    rows = [step(2.0, forward=1.0), step(4.0, forward=1.0, transfer=3.0)]
    zero, one = report_of(np.array([rows])).document()["ranks"]
    assert (zero["rank"], zero["step_s"], zero["shares"]["forward"], zero["score"], zero["last"]) == (
        0,
        2.0,
        0.5,
        None,
        0,
    )
    assert (one["rank"], one["step_s"], one["shares"]["transfer"]) == (1, 4.0, 0.75)


def test_series_are_rounded_to_microseconds() -> None:
    rows = np.array([[step(2.0000006, forward=1.0), step(3.0)], [step(4.0), step(5.0)]])
    series = report_of(rows, np.array([[1, 2], [3, 4]])).document()["series"]
    assert series["step"] == [5, 6] and series["samples"] == [[1, 2], [3, 4]] and series["columns"] == list(PART_NAMES)
    assert [[rank[0] for rank in ranks] for ranks in series["breakdown_s"]] == [[2.000001, 3.0], [4.0, 5.0]]
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
    with pytest.raises(ValueError, match="not JSON compliant"):
        write({"bubble": value}, path)
    assert not list(tmp_path.iterdir())


# -- files


def test_there_and_back(file: Path) -> None:
    assert read(file) == full_report().document()
    assert [path.name for path in file.parent.iterdir()] == ["report.json"]


def test_a_write_that_fails_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = file.read_text()

    def broken(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="no space left"):
        run_of().write(file)
    assert file.read_text() == old and [path.name for path in file.parent.iterdir()] == ["report.json"]


def test_the_summary_stands_at_the_top(file: Path) -> None:
    lines = file.read_text().splitlines()
    order = [line.split('"')[1] for line in lines if line.startswith(' "')]
    assert order == list(SCHEMA["properties"])
    assert next(k for k, line in enumerate(lines) if "summary" in line) < 20


def test_rows_of_the_series_stand_in_a_line(tmp_path: Path) -> None:
    rows = np.array([[step(1.0, forward=0.5)] * 8] * 300)
    text = report_of(rows).write(tmp_path / "report.json").read_text()
    assert "[1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.0]" in text
    start = text.index('"series"')
    assert text.count("\n", start) < 300 * 12, "a line per rank and step, and a few more"
    assert len(text) - start < 300 * 8 * 70


def _laid_out(value: Any, indent: str = "") -> str:
    """The layout, said slowly: on a line what fits into it, or a list of plain values."""
    line = json.dumps(value, ensure_ascii=False)
    children = list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    nested = isinstance(value, dict) or any(isinstance(child, (dict, list)) for child in children)
    if not children or not nested or len(indent) + len(line) <= 128:
        return line
    deeper = indent + " "
    names = [f"{json.dumps(name, ensure_ascii=False)}: " for name in value] if isinstance(value, dict) else [""] * len(children)
    inner = ",\n".join(deeper + name + _laid_out(child, deeper) for name, child in zip(names, children))
    return f"{line[0]}\n{inner}\n{indent}{line[-1]}"


def _some_value(rng: random.Random, depth: int) -> Any:
    kind = rng.random() if depth else 0.0
    if kind < 0.25:
        return rng.choice([1, 2.5, 1e-6, None, True, "a], [b", "]], [[", "ü" * rng.randrange(60)])
    if kind < 0.4:
        return {f"key {k}": _some_value(rng, depth - 1) for k in range(rng.randrange(4))}
    if kind < 0.7:
        rows, cells = rng.randrange(1, 4), rng.randrange(20)
        return [[[rng.random() for _ in range(cells)] for _ in range(rows)] for _ in range(rng.randrange(4))]
    return [_some_value(rng, depth - 1) for _ in range(rng.randrange(5))]


def test_a_file_is_laid_out_the_same_however_it_is_made(tmp_path: Path) -> None:
    rng = random.Random(0)
    for value in (full_report().document(), _bare(), *(_some_value(rng, 4) for _ in range(1000))):
        assert _same_numbers(write(value, tmp_path / "value.json").read_text()) == _same_numbers(_laid_out(value) + "\n")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write({"rows": [[[1.0, value]], [[2.0, 3.0]]]}, tmp_path / "value.json")
    assert not list(tmp_path.iterdir())


def _same_numbers(text: str) -> str:
    """Of several ways to write a number, such as 1e-05 and 0.00001, Python's."""
    return re.sub(r"\d+\.?\d*(e[+-]?\d+)?", lambda number: repr(float(number[0])), text)


def test_layout_keeps_the_value(tmp_path: Path) -> None:
    for value in ({}, [], {"a": []}, {"a": [{"b": [1] * 90}, [[1] * 50] * 2], "c": {"d" * 90: "ü" * 90}}, [1, "x", None]):
        assert json.loads(write(value, tmp_path / "value.json").read_text(encoding="utf-8")) == value
    assert write({"für": 1}, tmp_path / "value.json").read_text(encoding="utf-8") == '{"für": 1}\n'


def _without(document: dict[str, Any], *path: Any) -> None:
    del _at(document, path[:-1])[path[-1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d.update(format="other"),
            "no bubble report: its format is 'other', not 'lightning_freescale.bubble_report'",
        ),
        (
            lambda d: d.update(version=2, series=None),
            r"version 2 is newer than this package reads \(1\): update lightning-freescale",
        ),
        (lambda d: d.update(version=0), "version is 0, not of const 1"),
        (lambda d: d.update(version="2"), "version is '2', not of type 'integer'"),
        (lambda d: _without(d, "summary"), "summary is missing"),
        (lambda d: _without(d, "ranks", 1, "shares", "hidden"), r"ranks\[1\].shares.hidden is missing"),
        (lambda d: d["summary"].update(bubble="x"), "summary.bubble is 'x', not of type 'number'"),
        (lambda d: d["summary"].update(bubble=True), "summary.bubble is True, not of type 'number'"),
        (lambda d: d["summary"].update(samples_per_s="x"), r"samples_per_s is 'x', not of type \['number', 'null'\]"),
        (lambda d: d["wait_attribution"].update(aligned="yes"), "wait_attribution.aligned is 'yes', not of type 'boolean'"),
        (
            lambda d: d["median_step"]["ranks"][0][1].__setitem__(0, "guess"),
            r"median_step.ranks\[0\]\[1\]\[0\] is 'guess', not of enum \['data', 'forward', ",
        ),
        (lambda d: d["median_step"]["ranks"][0][1].pop(), r"median_step.ranks\[0\]\[1\] is .*, not of minItems 4"),
        (lambda d: d["series"]["samples"][0].__setitem__(1, True), "series.samples holds bool values, not whole numbers"),
        (lambda d: d["series"]["breakdown_s"][0][1].__setitem__(3, "x"), "series.breakdown_s holds str values, not numbers"),
        (lambda d: d["series"]["columns"].reverse(), "series.columns is"),
        (lambda d: d["series"]["step"].pop(), r"series.step has the shape \(2,\), not \(3,\)"),
        (lambda d: d["series"]["samples"].pop(), r"series.samples has the shape \(2, 2\), not \(3, 2\)"),
        (lambda d: d["series"]["breakdown_s"][0][1].pop(), "series.breakdown_s has the shape of rows that differ in length"),
        (lambda d: d["ranks"].pop(), r"series.breakdown_s has the shape \(3, 2, 11\), not \(3, 1, 11\)"),
    ],
)
def test_wrong_documents_are_refused(change: Any, message: str, file: Path) -> None:
    document = full_report().document()
    change(document)
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message) as error:
        read(file)
    assert str(error.value).startswith(str(file))


def test_files_that_are_no_json_are_refused(file: Path) -> None:
    whole = file.read_text()
    for text in (whole[: len(whole) // 2], "", "page", whole.replace("0.3,", "NaN,", 1), whole.replace("0.3,", "Infinity,", 1)):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"report.json is not JSON, or was cut short: "):
            read(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cut short"):
        read(file)
    file.write_text("[1]")
    with pytest.raises(ValueError, match="its format is None"):
        read(file)
    with pytest.raises(FileNotFoundError):
        read(file.with_name("no_such_file.json"))


def test_what_is_new_in_this_version_may_be_there(file: Path) -> None:
    """Fields that only add to a document do not make it another version."""
    document = full_report().document()
    document["summary"]["more"] = {"x": 1}
    file.write_text(json.dumps(document))
    assert read(file)["summary"]["more"] == {"x": 1} and document["format"] == FORMAT
