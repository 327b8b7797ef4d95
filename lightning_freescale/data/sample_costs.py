"""The costs of the samples of a map-style data set, as given or by the models that are fitted during training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance import CostModel
from lightning_freescale.balance.cost import sample_features
from lightning_freescale.balance.validation import non_negative
from lightning_freescale.data.options import DataArguments


@dataclass(frozen=True)
class Refit:
    """The result of a calibration.

    Attributes:
        model: cost model for the plan.
        base: time of a rank's step besides its samples, in the units of ``model``.
    """

    model: CostModel = field(default_factory=CostModel)  # of cost="auto" before the first calibration
    base: float = 0.0


class SampleCosts:
    """The costs of the samples of a map-style data set.

    Attributes:
        lengths: history lengths, shape ``[samples]``, or None.
        costs: given costs, shape ``[samples]``.
        calibrates: whether to fit costs during training.
        refits: results of calibrations, by the first epoch that uses them.
        costs_are_final: whether calibration has ended.
    """

    def __init__(self, given: DataArguments, lengths: NDArray[np.float64] | None, cost: Any, size: int) -> None:
        self.calibrates = given.balances and given.has_auto_cost and lengths is not None
        self._given = given
        self.lengths = lengths
        self.costs = self._given_costs(cost, size)
        self.refits: dict[int, Refit] = {}
        self.costs_are_final = False
        self._units: dict[CostModel, float] = {}

    def costs_by(self, cost: Callable[..., Any], samples: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Return the costs of ``samples``, or of all samples, by another function of the lengths."""
        known = self._lengths_of(samples)
        return non_negative("cost(lengths)", cost(known), len(known))

    def features(self, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return :func:`sample_features` of ``samples``."""
        return sample_features(self._lengths_of(samples))

    def base_in(self, epoch: int) -> float:
        """Return the time of a rank's step besides its samples, in the units of the given costs; 0 if unknown."""
        refit = self._refit_in(epoch)
        return 0.0 if refit is None else refit.base * self._units_of(refit.model)

    @property
    def newest_refit(self) -> Refit:
        """The result of the last calibration."""
        return self.refits[max(self.refits)] if self.refits else Refit()

    def costs_fact(self, epoch: int) -> str:
        """Return a hash of the costs in the plan of an epoch."""
        refit = self._refit_in(epoch)
        costs = self.costs if refit is None else self.refitted_costs(refit.model)
        return hashlib.sha256(costs.tobytes()).hexdigest()

    def refitted_costs(self, model: CostModel) -> NDArray[np.float64]:
        """Return the costs by a fitted model, in the units of the given costs."""
        return self.costs_by(model) * self._units_of(model)

    def load_refits(self, state: dict[str, Any], same_ranks: bool) -> None:
        """Load the results in a checkpoint, unless :meth:`refuses_refits`."""
        if state["refits"] and self.lengths is None:
            raise ValueError("the checkpoint's costs were fitted to lengths. Pass lengths= to FreeScaleDataModule to resume it")
        self.refits = {}
        if self.refuses_refits(state):
            return
        for epoch, values in state["refits"].items():
            self.refits[epoch] = Refit(CostModel(**values["model"]), values["base"])
        self.costs_are_final = state["costs_are_final"] and same_ranks

    def refuses_refits(self, state: dict[str, Any]) -> bool:
        """Return whether the given costs take precedence over those that the checkpoint's run has fitted."""
        return bool(state["refits"]) and not self._given.has_auto_cost

    def _given_costs(self, cost: Any, size: int) -> NDArray[np.float64]:
        if isinstance(cost, str) and not self._given.has_auto_cost:
            raise ValueError(f"FreeScaleDataModule(cost={cost!r}): pass 'auto', a function, or the costs")
        if not isinstance(cost, str) and not callable(cost):
            return non_negative("cost", cost, size)
        if self.lengths is not None:
            return self.costs_by(CostModel() if isinstance(cost, str) else cost)
        raise ValueError(
            "FreeScaleDataModule(lengths=None) cannot balance. Pass lengths=, the history length of every sample, or cost=, a "
            "function of a sample or the costs"
        )

    def _units_of(self, model: CostModel) -> float:
        """Return the factor from the units of a fitted model to those of the given costs."""
        if model not in self._units:
            fitted = float(self.costs_by(model).sum())
            self._units[model] = float(self.costs.sum()) / fitted if fitted else 1.0
        return self._units[model]

    def _refit_in(self, epoch: int) -> Refit | None:
        return self.refits.get(max((start for start in self.refits if start <= epoch), default=-1))

    def _lengths_of(self, samples: NDArray[np.int64] | None) -> NDArray[np.float64]:
        assert self.lengths is not None
        return self.lengths if samples is None else self.lengths[samples]
