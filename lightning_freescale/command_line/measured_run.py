"""The figures of a simulation that a report.json has measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from lightning_freescale.balance.calibration import fit_report, sums_of_lengths
from lightning_freescale.balance.validation import Floats
from lightning_freescale.profiling.reporting.document import read
from lightning_freescale.simulator import Quantity


class MeasuredRun:
    """The run of a report.json.

    Attributes:
        lengths: History lengths as the run cut them, shape ``[samples]``; None if unknown.
        known: The known quantities by the fields of TrainingLoad, and ``rows``.
        ranks: Number of ranks.
        batch_size: Histories per rank and step; 0 if unknown.
        collision_rate: Collision rate of the steps; None if it or the number of lookups is unknown.
        lookups: Ids that all ranks look up in the mean step; 0 if unknown.
        compute: Compute of the mean step, to be divided by an assumption.
        fits: True if compute can be fitted to the lengths of each step.
    """

    def __init__(self, path: Path) -> None:
        self._name, self._document = path.name, (document := read(path))
        self.ranks, workload = document["run"]["world_size"], document.get("workload") or {}
        groups, tables, rate, lookups = map(workload.get, ("lengths", "tables", "collision_rate", "lookups"))
        self.lengths: Floats | None = None if groups is None else np.repeat(groups["values"], groups["counts"])
        self.fits = sums_of_lengths(document) is not None
        self.known = {"host": self._seconds("host_overhead", "data_wait")}
        self.compute = replace(self._seconds("compute"), source=f"{self._name} and --attention")
        self.batch_size = round(document["summary"]["samples"] / document["status"]["steps"] / len(document["ranks"]))
        self.lookups = float(lookups or 0)
        self.collision_rate = self._quantity(rate) if rate is not None and self.lookups else None
        if self.batch_size:
            self.known["batch_size"] = self._quantity(self.batch_size)
        if tables is not None:
            self.known |= {"rows": self._quantity(tables["rows"]), "row_bytes": self._quantity(tables["row_bytes"], "B")}
        # of DDP's last bucket, and of the buckets that backward hides
        buckets = ("dense gradients", "dense gradients (behind backward, at most)")
        moved = {each["name"]: each["moved_bytes"] for each in document["exchanges"] if each["name"] in buckets}
        if moved and self.ranks > 1:
            ring = self.ranks / (2 * (self.ranks - 1))  # a ring moves each byte 1 / ring times
            last, reduced = moved.get(buckets[0], 0.0) * ring, sum(moved.values()) * ring
            # the simulator shards the tables; earlier versions wrote no gradient_bytes
            share = 0.0 if tables is None else tables["reduced_bytes"] / max(tables.get("gradient_bytes", reduced), 1.0)
            self.known["dense_bytes"] = self._quantity(max(reduced * (1 - share), 0.0), "B")
            # the last bucket can contain gradients of tables, and not every report separates it from the others
            if share == 0 and buckets[1] in moved:
                self.known["last_bucket"] = self._quantity(last, "B")

    def costs(self) -> dict[str, Quantity]:
        """Return compute by the fields of TrainingLoad, from a fit to the lengths of each step."""
        fit = fit_report(self._document).fit
        found = {"base": fit.base, **{name: getattr(fit.model, name) for name in ("linear", "quadratic", "constant")}}
        error = np.array([1 - fit.residual, 1 + fit.residual])
        return {name: self._quantity(value, "s", value * error) for name, value in found.items()}

    def _seconds(self, *parts: str) -> Quantity:
        """Return the time of parts of a step, as the mean over the ranks with their range."""
        ranks = np.array([rank["step_s"] * sum(map(rank["shares"].get, parts)) for rank in self._document["ranks"]])
        return self._quantity(float(ranks.mean()), "s", ranks)

    def _quantity(self, value: float, unit: str = "", ends: Floats | None = None) -> Quantity:
        """Return a measured quantity with the range of ``ends``."""
        low, high = (value, value) if ends is None else (min(ends.min(), value), max(ends.max(), value))
        return Quantity(value, "measured", float(low), float(high), unit, self._name)
