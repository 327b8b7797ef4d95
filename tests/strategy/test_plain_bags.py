"""FreeScaleStrategy(shard=...): plain nn.EmbeddingBags as under "ddp"."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import EPOCHS, STEPS, continued, departures, fit_all
from tests.helpers.torchrec_features import CLOSE
from tests.helpers.torchrec_modules import PLAIN_BAGS, SHARD, Bags


def test_plain_bags_train_as_with_ddp() -> None:
    steps, first, known = STEPS * EPOCHS, EPOCHS + 1, 7  # lookups of a step whose ids are in the batch; `late` converts its ids
    cases = {"bags": replace(PLAIN_BAGS, ahead=(known * (steps - first), known * first + steps, 0), notice="'late'")}
    ranks = run_distributed(fit_all, 2, cases, "ddp", SHARD)
    assert departures(cases, ranks, **CLOSE) == []
    initial, weights = Bags().state_dict(), ranks[0]["bags"][1].weights
    assert weights.keys() == initial.keys()
    assert [key for key in weights if torch.equal(weights[key], initial[key])] == ["late.weight"]


def _changes_over(path: Path) -> dict[str, list[Any]]:
    ways = {"to ddp": (SHARD, "ddp"), "from ddp": ("ddp", SHARD)}
    return {name: continued(PLAIN_BAGS, str(path / name), STEPS, *way) for name, way in ways.items()}


@pytest.mark.slow
def test_a_checkpoint_is_that_of_plain_bags(tmp_path: Path) -> None:
    ranks = run_distributed(_changes_over, 2, tmp_path)
    assert departures(dict.fromkeys(ranks[0], PLAIN_BAGS), ranks, **CLOSE) == []
