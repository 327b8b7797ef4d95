"""Cost models: the form, and the fit to measured times."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_freescale.balance import CostModel


def test_cost_model() -> None:
    np.testing.assert_allclose(CostModel(2, 3, 4)([0, 1, 2]), [2, 9, 24])
    model = CostModel.from_config(dim=256, layers=3)
    assert model.linear / model.quadratic == 5 * 256
    with pytest.raises(ValueError, match="linear=-1"):
        CostModel(linear=-1)
    with pytest.raises(ValueError, match="dim=0"):
        CostModel.from_config(dim=0)
