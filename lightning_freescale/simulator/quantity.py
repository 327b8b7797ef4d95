"""A number with its origin (measured, assumed or predicted), range and source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args

Word = Literal["measured", "assumed", "predicted"]
WORDS = get_args(Word)
T = TypeVar("T")


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
        spread = f" ({self.low:.4g} - {self.high:.4g})" if self.low < self.high else ""
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.value:.4g}{spread}{unit}, {self.word}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


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
