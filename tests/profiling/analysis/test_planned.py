"""What the plans of the steps come to."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_freescale.profiling import PlannedStep
from lightning_freescale.profiling.analysis.planned import planned_balance

ONE = PlannedStep(1.4, 1.1, 1.0, tokens_unbalanced=1.5, tokens_balanced=1.2, tokens_fullest=0.7)
OTHER = PlannedStep(1.8, 1.5, 1.2, tokens_unbalanced=1.1, tokens_balanced=1.0, tokens_fullest=0.6, fitted=True)
COMPUTE = np.array([[1.0, 1.0], [4.0, 2.0]])


def test_steps_are_weighted_by_their_compute_as_the_measured_imbalance_is() -> None:
    found = planned_balance([ONE, OTHER], COMPUTE)
    assert found is not None
    assert (found.unbalanced, found.balanced, found.lower_bound) == pytest.approx((1.7, 1.4, 1.15))
    assert found.gap == pytest.approx(1.4 / 1.15 - 1)
    assert (found.tokens_unbalanced, found.tokens_balanced) == pytest.approx((1.2, 1.05))
    assert (found.tokens_fullest, found.fitted_steps, found.steps) == (0.7, 1, 2)


def test_without_compute_steps_count_alike() -> None:
    found = planned_balance([ONE, OTHER], np.zeros((2, 2)))
    assert found is not None and found.unbalanced == pytest.approx(1.6)


def test_what_is_not_known_of_a_step_is_not_known_of_all() -> None:
    assert planned_balance([ONE, None], COMPUTE) is None and planned_balance([], COMPUTE[:0]) is None
    drawn = planned_balance([ONE, PlannedStep(1.8, None, 1.2)], COMPUTE)
    assert drawn is not None and drawn.balanced is drawn.gap is drawn.tokens_unbalanced is None
    assert drawn.tokens_fullest == 0.7
