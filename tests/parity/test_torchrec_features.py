"""Each feature of TorchRec is that of the unsharded module or of plain TorchRec, or is refused by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from torchrec_features import FEATURES

from tests.helpers.torchrec_features import outcome

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str) -> None:
    found, error = outcome(FEATURES[name]), FEATURES[name].case.error
    assert found.startswith("refused: ") if error else found == "equal"
    assert all(part in found for part in error), found
