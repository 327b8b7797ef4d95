"""TorchRec's modules around collections, and subclasses of collections, as under "ddp"."""

from __future__ import annotations

import torch

from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import EPOCHS, STEPS, departures, fit_all
from tests.helpers.torchrec_features import CLOSE
from tests.helpers.torchrec_modules import Around, around

PARTS = ("processed", "one", "tower", "towers", "own")
KNOWN, FIRST = 6, EPOCHS + 1
"""Collections whose ids are found in the batch, and lookups without a prediction of each of them."""
AHEAD = KNOWN * (STEPS * EPOCHS - FIRST), KNOWN * FIRST + STEPS * EPOCHS, 0


def test_collections_inside_modules_train_as_with_ddp() -> None:
    case = around(*PARTS, ahead=AHEAD)
    case.notice = "'one._embedding_bag_collection'"  # its dict of processors copies the ids, so they are not predicted
    ranks = run_distributed(fit_all, 2, {"around": case}, "ddp", {})
    assert departures({"around": case}, ranks, **CLOSE) == []
    initial, (_, run) = Around(*PARTS).state_dict(), ranks[0]["around"]
    positions = [key for key in run.weights if "position_weight" in key]
    assert run.weights.keys() == initial.keys() and len(positions) == 3
    assert not any(torch.equal(run.weights[key], initial[key]) for key in positions)
