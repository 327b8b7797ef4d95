"""A number with its origin (measured, assumed or predicted), range and source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args

Word = Literal["measured", "assumed", "predicted"]
WORDS = get_args(Word)
T = TypeVar("T")
_BYTES = ((1e-9, "GB"), (1e-6, "MB"), (1e-3, "kB"), (1.0, "B"))
_UNITS: dict[str, tuple[tuple[float, str], ...]] = {
    "s": ((1.0, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns")),
    "B": _BYTES,
    "B/s": tuple((factor, f"{unit}/s") for factor, unit in _BYTES),
}


@dataclass(frozen=True)
class Quantity:
    """A number with its origin, range and source.

    Attributes:
        value: The best known value.
        word: The origin of the value.
        low, high: Range of an assumption, spread of a measurement or interval of a prediction; ``value`` by default.
        unit: Unit, such as ``"s"``; empty for shares and ratios.
        source: Source of the value.

    Raises:
        ValueError: A number is not finite, the value is outside the range, or the word is unknown.
    """

    value: float
    word: Word
    low: float = math.nan
    high: float = math.nan
    unit: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for end in ("low", "high"):
            if math.isnan(getattr(self, end)):
                object.__setattr__(self, end, self.value)
        if self.word not in WORDS:
            raise ValueError(f"Quantity(word={self.word!r}): pass one of {WORDS}")
        if not (all(map(math.isfinite, (self.low, self.value, self.high))) and self.low <= self.value <= self.high):
            raise ValueError(
                f"Quantity(value={self.value}, low={self.low}, high={self.high}): pass finite numbers, low <= value <= high"
            )

    def at(self, share: float) -> float:
        """Return the number at a ``share``, 0 to 1, of the range: geometric if ``low`` is above 0, linear otherwise."""
        if self.low > 0:
            return float(self.low * (self.high / self.low) ** share)
        return self.low + (self.high - self.low) * share

    def __str__(self) -> str:
        choices = _UNITS.get(self.unit, ((1.0, self.unit),))
        factor, unit = next((each for each in choices if self.value * each[0] >= 1), choices[-1])
        numbers = (factor * number for number in (self.value, self.low, self.high))
        value, low, high = (f"{number:,.0f}" if number >= 1000 else f"{number:.3g}" for number in numbers)
        spread = f" ({low} - {high})" if self.low < self.high else ""
        return f"{value}{spread} {unit}".rstrip() + f", {self.word}" + (f": {self.source}" if self.source else "")


def assumed(value: float, low: float, high: float, unit: str = "", source: str = "") -> Quantity:
    """Return an assumption and its range."""
    return Quantity(value, "assumed", low, high, unit, source)


def quantities(holder: Any) -> dict[str, Quantity]:
    """Return the quantities among the fields of a dataclass and of the dataclasses in it, by field name."""
    found: dict[str, Quantity] = {}
    for field in fields(holder):
        value = getattr(holder, field.name)
        if isinstance(value, Quantity):
            found[field.name] = value
        elif hasattr(value, "__dataclass_fields__"):
            found |= quantities(value)
    return found


def pinned(holder: T, numbers: Mapping[str, float]) -> T:
    """Return a copy of a dataclass in which each quantity has the given number of its field as value and range."""
    changed: dict[str, Any] = {}
    for field in fields(holder):  # type: ignore[arg-type]
        value = getattr(holder, field.name)
        if isinstance(value, Quantity):
            changed[field.name] = replace(value, value=(chosen := numbers[field.name]), low=chosen, high=chosen)
        elif hasattr(value, "__dataclass_fields__"):
            changed[field.name] = pinned(value, numbers)
    return replace(holder, **changed)  # type: ignore[type-var]
