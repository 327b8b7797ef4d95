"""Counts of ``faults.py``: added to those of earlier seeds, and the shares that they support."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_kinds import KINDS, SAVES_EVERY, STEPS

CONFIDENCE = 0.95


@dataclass
class Counts:
    """The counts of a campaign.

    Attributes:
        definition: what a run is; counts of other definitions are not added.
        parts: the seed, number of runs and commit of each call of the benchmark.
        counts: number of runs, and of runs with each defect and each end.
        kinds: number of runs and the most seconds to the end, by kind of fault.
        found: seed, number and kind of each run with a defect, the defect, and its description.
    """

    definition: dict[str, Any]
    parts: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, dict[str, float]] = field(default_factory=dict)
    found: list[list[Any]] = field(default_factory=list)

    @classmethod
    def new(cls, kinds: list[str], grace: float) -> Counts:
        """Return counts of no runs."""
        return cls({"steps": STEPS, "saves_every": SAVES_EVERY, "grace": grace, "kinds": sorted(kinds)})

    @classmethod
    def read(cls, path: Path, expected: Counts, seed: int) -> Counts:
        """Return the counts in a result of the benchmark.

        Raises:
            ValueError: the file has counts of another definition, or of this seed.
        """
        written = json.loads(path.read_text())
        if written.get("definition") != expected.definition:
            raise ValueError(f"--append {path}: its runs have other kinds, steps or limits. Begin a new file with --json")
        if seed in [part["seed"] for part in written["parts"]]:
            raise ValueError(f"--append {path}: it has the runs of --seed {seed} already. Choose another seed")
        counts = Counter({name: round(value) for name, value in written["counts"].items()})
        return cls(written["definition"], written["parts"], counts, written["kinds"], written["found"])

    def add(self, seed: int, number: int, kind: str, found: list[tuple[str, str]], seconds: float, how: str) -> None:
        """Add a run."""
        self.counts.update({"runs": 1, how: 1, **dict.fromkeys({defect for defect, _ in found}, 1)})
        of_kind = self.kinds.setdefault(kind, {"runs": 0, "slowest_seconds": 0.0})
        of_kind["runs"] += 1
        of_kind["slowest_seconds"] = round(max(of_kind["slowest_seconds"], seconds), 1)
        self.found += [[seed, number, kind, defect, text[:300]] for defect, text in found]

    def add_earlier(self, other: Counts) -> None:
        """Add the runs of other seeds."""
        self.parts[:0], self.found[:0] = other.parts, other.found
        self.counts.update(other.counts)
        for kind, of_other in other.kinds.items():
            mine = self.kinds.setdefault(kind, {"runs": 0, "slowest_seconds": 0.0})
            mine["runs"] += of_other["runs"]
            mine["slowest_seconds"] = max(mine["slowest_seconds"], of_other["slowest_seconds"])

    def figures(self, defects: tuple[str, ...], ends: tuple[str, ...]) -> dict[str, float]:
        """Return the counts, the upper limits of the shares of runs with each defect, and the most seconds to the end.

        The limits are called ``DEFECT_at_most``. The seconds are those of all kinds, of the kinds that the ranks notice without
        a timeout, and of those during the start.
        """
        runs = self.counts["runs"]
        found = {name: float(self.counts[name]) for name in ("runs", *defects, *ends)}
        found |= {f"{name}_at_most": upper_limit(self.counts[name], runs) for name in defects}
        found["kinds"] = float(len(self.kinds))
        noticed = [name for name in self.kinds if name in KINDS and not KINDS[name].timeout]
        groups = {"": [*self.kinds], "noticed_": noticed, "start_": [name for name in noticed if KINDS[name].steps == (0, 0)]}
        return found | {f"slowest_{group}seconds": self._slowest(names) for group, names in groups.items()}

    def _slowest(self, kinds: list[str]) -> float:
        return max((self.kinds[name]["slowest_seconds"] for name in kinds), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """Return what a result has beside its figures."""
        return {"definition": self.definition, "parts": self.parts, "counts": dict(self.counts)} | {
            "kinds": dict(sorted(self.kinds.items())),
            "found": self.found,
        }


def upper_limit(found: int, runs: int) -> float:
    """Return the upper limit of the one-sided confidence interval (Clopper-Pearson) for the share of runs with a defect."""
    if found >= runs:
        return 1.0
    low, high = found / runs, 1.0
    for _ in range(60):
        share = (low + high) / 2
        at_most = sum(math.comb(runs, count) * share**count * (1 - share) ** (runs - count) for count in range(found + 1))
        low, high = (low, share) if at_most < 1 - CONFIDENCE else (share, high)
    return high
