"""The JSON document of a bubble report: its parts, and functions that read, check and write it.

``schema.json`` describes its fields. Text, page and comparison use only the document, so they agree and need no other file.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from lightning_freescale._version import __version__  # a checkout on the path has no metadata

Document = dict[str, Any]
FORMAT = "lightning_freescale.bubble_report"
VERSION = 1


def _installed() -> dict[str, str]:
    found = {name: version(name) for name in ("torch", "lightning") if find_spec(name) is not None}
    return {"lightning_freescale": __version__, **found, "python": platform.python_version()}


@dataclass(frozen=True)
class RunInfo:
    """Description of a run.

    Attributes:
        label: name of the run in comparisons.
        model: class of the model.
        parameters: number of parameters, embedding tables included.
        world_size: number of ranks.
        strategy: name of the strategy.
        device: device of the ranks.
        accumulate_grad_batches: number of batches per optimizer step.
        assignment: assignment of samples to ranks; None if unknown.
        overlap: overlap of the embedding exchange: ``"on"``, ``"off"``, or ``"impossible"`` if it was requested in vain; None
            without sharded tables.
        num_workers: number of loader workers of a rank; None if unknown.
        sharded_tables: True if TorchRec shards tables; None if unknown.
        options: other options in force, by name; ``lengths`` if the lengths of the samples are known.
        rejected: values of options that were measured and did not help, by name.
        started: start of training in ISO 8601.
        versions: versions of packages by name.
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
    options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    rejected: Mapping[str, Sequence[Any]] = field(default_factory=dict, kw_only=True)
    started: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    versions: Mapping[str, str] = field(default_factory=_installed)


@dataclass(frozen=True)
class Status:
    """Fields of ``status`` in the document, which ``schema.json`` describes."""

    complete: bool = True
    reason: str | None = None
    warmup: int = 0
    not_exchanged: int = 0


@dataclass(frozen=True)
class WaitAttribution:
    """Fields of ``wait_attribution`` in the document; ``uncertainty`` in seconds."""

    aligned: bool
    uncertainty: float
    reason: str | None = None
    clock: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Overhead:
    """The cost of the profiler in seconds per step: the ``exchange`` of records, and ``stamps``."""

    exchange: float
    stamps: float

    @property
    def total(self) -> float:
        """The sum of both in seconds per step."""
        return self.exchange + self.stamps


@dataclass(frozen=True)
class ExchangeFigures:
    """An entry of ``exchanges`` in the document: the exchanges of one name, per step and as means over the ranks."""

    name: str
    per_step: float
    straggler_wait_s: float
    transfer_s: float
    hidden_s: float
    moved_bytes: float | None
    last: tuple[int, ...]
    wait_s: float = 0.0


def read(path: str | Path) -> Document:
    """Read a document and check it.

    Raises:
        OSError: the file cannot be read.
        ValueError: the content is no valid document of a supported version.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON, or was truncated: {error}") from error
    try:
        check(document)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return document


def write(document: Mapping[str, Any], path: str | Path) -> Path:
    """Write a document atomically, and create its folder.

    Raises:
        OSError: the file cannot be written.
        ValueError: a number is not finite.
    """
    return write_atomically(path, _lines(document))


def check(document: Any) -> None:
    """Check that a value is a document of this version.

    Raises:
        ValueError: it is not. The message has the field, its value and the rule.
    """
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise ValueError(f"the document has format {found!r} and is no bubble report, whose format is {FORMAT!r}")
    version = document.get("version")
    if type(version) is int and version > VERSION:
        raise ValueError(f"version {version} is newer than the supported version {VERSION}. Update lightning-freescale")
    wrong = next(_validator().iter_errors(_without_rows(document)), None)
    if wrong is not None:
        raise ValueError(_place_and_fix(wrong))
    _check_rows(document)


@cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator  # imported late because the import takes 40 ms, and every run would wait for it

    return Draft202012Validator(json.loads(files(__package__).joinpath("schema.json").read_text(encoding="utf-8")))


def _without_rows(document: Document) -> Document:
    """Return the document without the rows of the series, which take a validator half a minute for a long run."""
    series = document.get("series")
    if not isinstance(series, dict):
        return document
    emptied: Document = {name: [] for name in ("samples", "breakdown_s", "features") if isinstance(series.get(name), list)}
    return {**document, "series": {**series, **emptied}}


def _place_and_fix(wrong: Any) -> str:
    place, rule = wrong.json_path[2:], wrong.validator_value
    if wrong.validator == "required":
        missing = next(name for name in rule if name not in wrong.instance)
        return f"{place}{'.' * bool(place)}{missing} is missing"
    return f"{place} is {wrong.instance!r:.60}, not of {wrong.validator} {rule!r}"


def _check_rows(document: Document) -> None:
    """Check that the rows of the series are numbers by step, rank and column, which a schema cannot express."""
    series = document["series"]
    steps, ranks = document["status"]["steps"], len(document["ranks"])
    expected: dict[str, tuple[int, ...]] = {"step": (steps,), "breakdown_s": (steps, ranks, len(series["columns"]))}
    expected["samples"] = (steps, ranks)
    if series.get("features") is not None:
        expected["features"] = (steps, ranks, *np.shape(series["features"][0][0]))
    for name, shape in expected.items():
        if (found := _shape(series[name])) != shape:
            raise ValueError(f"series.{name} has the shape {found}, not {shape}, which status.steps and the ranks require")
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
    """Yield a line for each field and each step of the series; ``json.dumps(indent=...)`` writes a line for every number."""
    separator = "{\n "
    for name, value in document.items():
        yield f"{separator}{_line(name)}: "
        if name == "series" and isinstance(value, dict):
            yield "{" + ",".join(f"\n  {_line(key)}: {_rows(rows)}" for key, rows in value.items()) + "}"
        else:
            yield _line(value)
        separator = ",\n "
    yield "\n}\n"


def _rows(steps: list[Any]) -> str:
    if not steps or not isinstance(steps[0], list):
        return _line(steps)
    text = ",\n   ".join(orjson.dumps(rows).decode() for rows in steps)  # json takes ten times as long
    if "null" in text:  # orjson writes it for numbers that are not finite
        raise ValueError("series has a number that is not JSON compliant")
    return f"[{text}]"


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def write_atomically(path: str | Path, content: Iterable[str] | bytes) -> Path:
    """Write text or bytes to ``path`` and create its folder. A reader finds the old file or the complete new one.

    Raises:
        OSError: the file cannot be written. The old file stays, and no temporary file remains.
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
