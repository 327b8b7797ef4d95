"""The figures of a simulation that a report.json has measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from lightning_freescale.balance.calibration import fit_report, sums_of_lengths
from lightning_freescale.balance.validation import Floats
from lightning_freescale.profiling.reporting.document import read
from lightning_freescale.simulator import Catalogue, Quantity, TrainingLoad

_SAME = 0.05
"""Relative difference up to which two means or maxima of lengths count as equal."""


class MeasuredRun:
    """The run of a report.json.

    Attributes:
        lengths: History lengths as the run cut them, shape ``[samples]``; None if unknown.
        sizes: The known ones of the whole numbers ``batch_size``, ``rows`` and ``row_bytes`` of a :class:`TrainingLoad`.
        fits: True if the report holds the lengths of each step, so that compute can be fitted to them.
    """

    def __init__(self, path: Path) -> None:
        self._name, self._document = path.name, read(path)
        self._workload = self._document.get("workload") or dict.fromkeys(("lengths", "tables", "collision_rate"))
        known, tables = self._workload["lengths"], self._workload["tables"] or {}
        self.lengths: Floats | None = None if known is None else np.repeat(known["values"], known["counts"])
        self._ranks, self._reduced = self._document["run"]["world_size"], tables.get("reduced_bytes", 0)
        steps = self._document["status"]["steps"] * len(self._document["ranks"])
        sizes = {"batch_size": round(self._document["summary"]["samples"] / steps), **tables}
        units = {"batch_size": "", "rows": "", "row_bytes": "B"}
        self.sizes = {name: self._quantity(sizes[name], unit) for name, unit in units.items() if sizes.get(name)}
        self.fits = sums_of_lengths(self._document) is not None

    def check_lengths(self, name: str, lengths: Floats) -> None:
        """Raise a ValueError if the lengths of the file ``name`` are not those of the run."""
        if self.lengths is None:
            return
        theirs, ours = ((each.mean(), each.max()) for each in (lengths, self.lengths))
        if not np.allclose(theirs, ours, rtol=_SAME):
            raise ValueError(
                f"--lengths {name} has mean {theirs[0]:.4g} and maximum {theirs[1]:g}, but the run of {self._name} had mean "
                f"{ours[0]:.4g} and maximum {ours[1]:g}. Pass --max-length {ours[1]:g} if the run cuts longer histories, or "
                "leave out --lengths to use those of the run."
            )

    def costs(self, lengths: Floats, batch_size: int, attention: Quantity) -> dict[str, Quantity]:
        """Return compute by the fields of TrainingLoad, from a fit to the lengths of each step or from the mean step."""
        if self.fits:
            fit = fit_report(self._document).fit
            found = {"base": fit.base, **{name: getattr(fit.model, name) for name in ("linear", "quadratic", "constant")}}
            error = np.array([1 - fit.residual, 1 + fit.residual])
            return {name: self._quantity(value, "s", value * error) for name, value in found.items()}
        compute = replace(self._seconds("compute"), source=f"{self._name} and {attention.source}")
        size = self.sizes["batch_size"].value if "batch_size" in self.sizes else batch_size
        load = TrainingLoad.from_compute(int(size), lengths, compute, attention)
        return {"linear": load.linear, "quadratic": load.quadratic}

    def step(self) -> dict[str, Quantity]:
        """Return the other known parts of a step by the fields of TrainingLoad."""
        found = {"host": self._seconds("host_overhead", "data_wait")}
        moved = [each["moved_bytes"] for each in self._document["exchanges"] if each["name"] == "dense gradients"]
        if self._ranks > 1 and moved and moved[0] is not None:
            reduced = moved[0] * self._ranks / (2 * (self._ranks - 1))  # a ring moves each byte that often
            # without the gradients of tables, which the simulator shards
            found["dense_bytes"] = self._quantity(max(reduced - self._reduced, 0.0), "B")
        return found

    def catalogue(self, rows: int, mean_length: float) -> Catalogue:
        """Return the catalogue with ``rows`` rows and, if it was measured, the collision rate of the run."""
        rate = self._workload["collision_rate"]
        if rate is None or "batch_size" not in self.sizes:
            return Catalogue(rows)
        return Catalogue(rows).fitted(self._quantity(rate), self._ranks * self.sizes["batch_size"].value * mean_length)

    def _seconds(self, *parts: str) -> Quantity:
        """Return the time of parts of a step, as the mean over the ranks with their range."""
        ranks = np.array([rank["step_s"] * sum(map(rank["shares"].get, parts)) for rank in self._document["ranks"]])
        return self._quantity(float(ranks.mean()), "s", ranks)

    def _quantity(self, value: float, unit: str = "", ends: Floats | None = None) -> Quantity:
        """Return a measured quantity with the range of ``ends``."""
        low, high = (value, value) if ends is None else (min(ends.min(), value), max(ends.max(), value))
        return Quantity(value, "measured", float(low), float(high), unit, self._name)
