"""What overlapping the exchange was worth, from the engine's totals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class OverlapReport:
    """Means per step, of one rank or over all.

    Attributes:
        steps: how many.
        collision_rate: share of the rows of a global batch that the batch before it updates as well.
        hidden_ms: time that exchanges took while training went on.
        exposed_ms: time that training waited for rows.
        tokens: ids looked up.
        rows: rows asked for, each once with dedup.
        plain_bytes: what plain TorchRec would have moved: each id, its row and its gradient.
        dedup_bytes: the same for each row once.
        ids_bytes: sent to agree on rows.
        colliding_bytes: rows and gradients sent that training waited for.
        non_colliding_bytes: rows and gradients sent behind compute.
        unknown: lookups whose ids nobody knew ahead.
        misses: lookups of other ids than were expected.
    """

    steps: int
    collision_rate: float
    hidden_ms: float
    exposed_ms: float
    tokens: float
    rows: float
    plain_bytes: float
    dedup_bytes: float
    ids_bytes: float
    colliding_bytes: float
    non_colliding_bytes: float
    unknown: float
    misses: float

    @classmethod
    def of(cls, totals: Mapping[str, float], before: Mapping[str, float] | None = None) -> OverlapReport | None:
        """From totals, or what they have grown by since ``before``; None if there was no step."""
        grown = {name: value - (before or {}).get(name, 0.0) for name, value in totals.items()}
        steps = grown["steps"]
        if not steps:
            return None
        served = grown["served_rows"]
        seconds = {"exposed_ms": grown["exposed_s"], "hidden_ms": max(0.0, grown["transfer_s"] - grown["exposed_s"])}
        others = {name: grown[name] / steps for name in cls.__annotations__ if name in grown and name != "steps"}
        milliseconds = {name: 1000 * value / steps for name, value in seconds.items()}
        rate = grown["colliding_served_rows"] / served if served else 0.0
        return cls(steps=int(steps), collision_rate=rate, **milliseconds, **others)

    def scalars(self) -> dict[str, float]:
        """For loggers."""
        return {f"freescale/overlap/{name}": value for name, value in vars(self).items() if name != "steps"}

    def __str__(self) -> str:
        moved = self.ids_bytes + self.colliding_bytes + self.non_colliding_bytes
        total = self.hidden_ms + self.exposed_ms
        hidden = self.hidden_ms / total if total else 0.0
        fallbacks = (self.unknown + self.misses) * self.steps
        return (
            f"embedding exchange: {hidden:.0%} of its {total:.1f} ms per step hidden, {self.exposed_ms:.1f} ms waited for; "
            f"collision rate {self.collision_rate:.0%}; {moved / 1e6:.3g} MB sent per step ({self.colliding_bytes / 1e6:.3g} "
            f"waited for), plain {self.plain_bytes / 1e6:.3g}; {fallbacks:.0f} lookups of unexpected ids"
        )
