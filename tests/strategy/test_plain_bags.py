"""FreeScaleStrategy(shard=...): plain nn.EmbeddingBags as under "ddp"."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import EPOCHS, STEPS, continued, departures, fit_all
from tests.helpers.torchrec_features import CLOSE
from tests.helpers.torchrec_modules import PLAIN_BAGS, SHARD, Bags


def _fits(path: Path) -> dict[str, list[Any]]:
    to_ddp = continued(PLAIN_BAGS, str(path / "bags.ckpt"), STEPS, SHARD, "ddp")
    return fit_all({"bags": PLAIN_BAGS}, "ddp", SHARD) | {"to ddp": to_ddp}


def test_plain_bags_train_as_with_ddp(tmp_path: Path) -> None:
    ranks = run_distributed(_fits, 2, tmp_path)
    steps, first, known = STEPS * EPOCHS, EPOCHS + 1, 7  # lookups of a step whose ids are in the batch; `late` converts its ids
    cases = dict.fromkeys(ranks[0], PLAIN_BAGS)
    cases["bags"] = replace(PLAIN_BAGS, ahead=(known * (steps - first), known * first + steps, 0), notice="'late'")
    assert departures(cases, ranks, **CLOSE) == []
    initial, weights = Bags().state_dict(), ranks[0]["bags"][1].weights
    assert [key for key in weights if torch.equal(weights[key], initial[key])] == ["late.weight"]
