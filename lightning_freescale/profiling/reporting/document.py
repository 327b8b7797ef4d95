"""The bubble report as a JSON document: the facts it states, and how to read, check and write one.

``schema.json`` describes its fields.
Text, page and comparison are made from the document alone: so they cannot disagree, and need nothing but the file.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from jsonschema import Draft202012Validator, ValidationError

from lightning_freescale._version import __version__  # a checkout on the path has no metadata that would say it

Document = dict[str, Any]
FORMAT = "lightning_freescale.bubble_report"
VERSION = 1


def _installed() -> dict[str, str]:
    found = {name: version(name) for name in ("torch", "lightning") if find_spec(name) is not None}
    return {"lightning_freescale": __version__, **found, "python": platform.python_version()}


@dataclass(frozen=True)
class RunInfo:
    """The run that a report is about.

    ``label`` names the run in comparisons; ``started`` is a time in ISO 8601; ``versions`` are of packages; ``assignment`` is
    how samples were assigned to the ranks, None if unknown; ``overlap`` is whether rows are exchanged while the model
    computes, ``"on"``, ``"off"`` or, where it was asked for in vain, ``"impossible"``; None without sharded tables;
    ``num_workers`` are the loader's on a rank, None if unknown; ``sharded_tables`` is whether TorchRec shards tables, None
    if unknown.
    """

    label: str
    model: str
    parameters: int
    world_size: int
    strategy: str = "a plain loop"
    device: str = "cpu"
    accumulate_grad_batches: int = 1
    assignment: str | None = field(default=None, kw_only=True)
    overlap: str | None = field(default=None, kw_only=True)
    num_workers: int | None = field(default=None, kw_only=True)
    sharded_tables: bool | None = field(default=None, kw_only=True)
    started: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    versions: Mapping[str, str] = field(default_factory=_installed)


@dataclass(frozen=True)
class Status:
    """How much of the run the report covers.

    Attributes:
        complete: the run came to its end.
        reason: why it did not.
        warmup: first steps left out.
        not_exchanged: steps done whose records the ranks could not exchange any more.
    """

    complete: bool = True
    reason: str | None = None
    warmup: int = 0
    not_exchanged: int = 0


@dataclass(frozen=True)
class WaitAttribution:
    """Whether waits for peers were divided into straggler wait and transfer, by when the ranks arrived.

    Attributes:
        aligned: the ranks' clocks were aligned, so arrivals can be compared; also if there is one rank.
        uncertainty: how far the turn from straggler wait to transfer may be off, in seconds.
        reason: why the clocks are not aligned, and so waits not divided.
        clock: how well the ranks' clocks were compared, as in the document; None if they were not.
    """

    aligned: bool
    uncertainty: float
    reason: str | None = None
    clock: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Overhead:
    """The profiler's own cost in seconds per step: the ranks' ``exchange`` of records, and ``stamps``."""

    exchange: float
    stamps: float

    @property
    def total(self) -> float:
        """Seconds per step of exchange and stamps together."""
        return self.exchange + self.stamps


@dataclass(frozen=True)
class ExchangeFigures:
    """The exchanges of one name, per step and as a mean over the ranks.

    Attributes:
        name: of the exchanges.
        per_step: how many a step has.
        straggler_wait: seconds waited for the last rank.
        transfer: seconds waited after that.
        hidden: seconds behind compute.
        moved: bytes that pass a rank's link; None if unknown.
        last: how often each rank was the last to arrive, over all steps.
        wait: seconds waited that could not be divided into the two.
    """

    name: str
    per_step: float
    straggler_wait: float
    transfer: float
    hidden: float
    moved: float | None
    last: tuple[int, ...]
    wait: float = 0.0


def read(path: str | Path) -> Document:
    """Read a document and check it.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no whole document of a version that this package reads; says what is wrong.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON, or was cut short: {error}") from error
    try:
        check(document)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return document


def write(document: Mapping[str, Any], path: str | Path) -> Path:
    """Write a document; a reader finds the old file or the whole new one. Makes the folder if there is none.

    Raises:
        OSError: the file cannot be written.
        ValueError: a figure is not finite.
    """
    return write_atomically(path, _lines(document))


def check(document: Any) -> None:
    """Refuse what is no document of this version.

    Raises:
        ValueError: names a place, what stands there and what should.
    """
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise ValueError(f"no bubble report: its format is {found!r}, not {FORMAT!r}")
    version = document.get("version")
    if type(version) is int and version > VERSION:
        raise ValueError(f"version {version} is newer than this package reads ({VERSION}): update lightning-freescale")
    wrong = next(_validator().iter_errors(_without_rows(document)), None)
    if wrong is not None:
        raise ValueError(_place_and_fix(wrong))
    _check_rows(document)


@cache
def _validator() -> Draft202012Validator:
    return Draft202012Validator(json.loads(files(__package__).joinpath("schema.json").read_text(encoding="utf-8")))


def _without_rows(document: Document) -> Document:
    """Leave the rows of the series to :func:`_check_rows`: a validator takes half a minute over those of a long run."""
    series = document.get("series")
    if not isinstance(series, dict):
        return document
    emptied: Document = {name: [] for name in ("samples", "breakdown_s", "features") if isinstance(series.get(name), list)}
    return {**document, "series": {**series, **emptied}}


def _place_and_fix(wrong: ValidationError) -> str:
    place, rule = wrong.json_path[2:], wrong.validator_value
    if wrong.validator == "required":
        missing = next(name for name in rule if name not in wrong.instance)
        return f"{place}{'.' * bool(place)}{missing} is missing"
    return f"{place} is {wrong.instance!r:.60}, not of {wrong.validator} {rule!r}"


def _check_rows(document: Document) -> None:
    """The rows of the series are numbers, as many as there are steps, ranks and columns, which a schema cannot say."""
    series = document["series"]
    steps, ranks = document["status"]["steps"], len(document["ranks"])
    expected: dict[str, tuple[int, ...]] = {"step": (steps,), "breakdown_s": (steps, ranks, len(series["columns"]))}
    expected["samples"] = (steps, ranks)
    if series.get("features") is not None:
        expected["features"] = (steps, ranks, *np.shape(series["features"][0][0]))
    for name, shape in expected.items():
        if (found := _shape(series[name])) != shape:
            raise ValueError(f"series.{name} has the shape {found}, not {shape}, which status.steps and the ranks ask for")
        cells = series[name]
        for _ in shape[1:]:
            cells = chain.from_iterable(cells)
        kinds = {int, float} if name in ("breakdown_s", "features") else {int}
        if unfit := {type(cell) for cell in cells} - kinds:
            raise ValueError(f"series.{name} holds {unfit.pop().__name__} values, not {'whole ' * (len(kinds) == 1)}numbers")


def _shape(rows: list[Any]) -> tuple[int, ...] | str:
    try:
        return np.shape(rows)
    except ValueError:
        return "of rows that differ in length"


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each field, and for each step of the series: ``json.dumps(indent=...)`` gives every number a line."""
    separator = "{\n "
    for name, value in document.items():
        yield separator + f"{_line(name)}: "
        yield from _series(value) if name == "series" and isinstance(value, dict) else (_line(value),)
        separator = ",\n "
    yield "\n}\n"


def _series(series: Mapping[str, Any]) -> Iterator[str]:
    separator = "{\n  "
    for name, steps in series.items():
        yield separator + f"{_line(name)}: "
        if steps and isinstance(steps[0], list):
            yield "[" + ",\n   ".join(_numbers(step) for step in steps) + "]"
        else:
            yield _line(steps)
        separator = ",\n  "
    yield "}"


def _numbers(rows: list[Any]) -> str:
    text = orjson.dumps(rows).decode()  # a long run has half a million rows, for which json takes ten times as long
    if "null" in text:  # which orjson writes for what is not finite
        raise ValueError("series holds a number that is not JSON compliant")
    return text


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def write_atomically(path: str | Path, content: Iterable[str] | bytes) -> Path:
    """Write text or bytes to ``path`` so that a reader finds the old file or the whole new one, and make its folder.

    Raises:
        OSError: the file cannot be written; the old one stays, and nothing is left beside it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if isinstance(content, bytes):
            unfinished.write_bytes(content)
        else:
            with unfinished.open("w", encoding="utf-8") as file:
                file.writelines(content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path
