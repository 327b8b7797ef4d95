"""Check a document against ``schema.json``, as far as that schema goes: no library is needed to read a report."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

FORMAT = "lightning_freescale.bubble_report"
VERSION = 1
_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "object": ("an object", (dict,)),
    "array": ("a list", (list,)),
    "string": ("text", (str,)),
    "integer": ("a whole number", (int,)),
    "number": ("a number", (int, float)),
    "boolean": ("true or false", (bool,)),
    "null": ("null", (type(None),)),
}


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    return json.loads(files(__package__).joinpath("schema.json").read_text(encoding="utf-8"))


def check(document: Any) -> None:
    """Refuse what is no document of this version.

    Raises:
        ValueError: names the first thing that is wrong.
    """
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise ValueError(f"no bubble report: its format is {found!r}, not {FORMAT!r}")
    version = document.get("version")
    if type(version) is int and version > VERSION:
        raise ValueError(f"version {version} is newer than this package reads ({VERSION}): update lightning-freescale")
    _check(document, schema(), "")
    _check_series(document)


def _check(value: Any, rule: dict[str, Any], at: str) -> None:
    if "$ref" in rule:
        rule = schema()["$defs"][rule["$ref"].rpartition("/")[2]]
    kinds = [rule["type"]] if isinstance(rule["type"], str) else rule["type"]
    if not any(_is(value, kind) for kind in kinds):
        raise ValueError(f"{at} is {value!r:.60}, not {' or '.join(_KINDS[kind][0] for kind in kinds)}")
    allowed = [rule["const"]] if "const" in rule else rule.get("enum", [value])
    if value not in allowed:
        raise ValueError(f"{at} is {value!r:.60}, not {' or '.join(map(repr, allowed))}")
    if isinstance(value, dict):
        _check_object(value, rule, f"{at}." if at else "")
    if isinstance(value, list):
        first = rule.get("prefixItems", [])
        for k, child in enumerate(value):
            _check(child, first[k] if k < len(first) else rule["items"], f"{at}[{k}]")


def _check_object(value: dict[str, Any], rule: dict[str, Any], at: str) -> None:
    for name in rule.get("required", ()):
        if name not in value:
            raise ValueError(f"{at}{name} is missing")
    for name, child in value.items():
        inner = rule.get("properties", {}).get(name, rule.get("additionalProperties"))
        if inner:  # what this version does not know is left alone
            _check(child, inner, f"{at}{name}")


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _KINDS[kind][1]) and (kind == "boolean" or not isinstance(value, bool))


def _check_series(document: dict[str, Any]) -> None:
    series = document["series"]
    rows = (document["status"]["steps"], len(document["ranks"]))
    expected = {"step": rows[:1], "microseconds": (*rows, len(series["columns"])), "samples": rows}
    for name, shape in expected.items():
        if (found := _shape(series[name])) != shape:
            raise ValueError(f"series.{name} has the shape {found}, not {shape}, which status.steps and the ranks ask for")


def _shape(rows: list[Any]) -> tuple[int, ...] | str:
    try:
        return np.shape(rows)
    except ValueError:
        return "of rows that differ in length"
