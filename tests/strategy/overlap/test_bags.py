"""EmbeddingBagCollections whose rows travel ahead and are pooled where they are needed: as the unsharded module under "ddp"."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.bags import BagModel, bag_loader
from tests.helpers.overlap_training import EPOCHS, KNOWN, STEPS, Run, assert_same, fit
from tests.helpers.recommender import OPTIMIZERS

EXCHANGES = 4  # sequences, bags of two widths, weighted bags


def both(makes: list[Callable[[], BagModel]], strategy: dict[str, Any] | None = None, **options: Any) -> list[tuple[Run, Run]]:
    """Each module under "ddp" and under "freescale"."""
    runs = []
    for make in makes:
        for which in ("ddp_find_unused_parameters_true", FreeScaleStrategy(find_unused_parameters=True, **(strategy or {}))):
            torch.manual_seed(0)
            given = {name: option() if callable(option) else option for name, option in options.items()}
            validation = given.pop("validation", None)
            runs.append(fit(make(), bag_loader(STEPS), validation, **{"max_epochs": EPOCHS, "strategy": which, **given}))
    return [*zip(runs[::2], runs[1::2])]


def assert_as_ddp(ranks: list[list[tuple[Run, Run]]]) -> None:
    """Losses, weights and states are those of the unsharded module."""
    for pairs in ranks:
        for ddp, mine in pairs:
            assert mine.losses == pytest.approx(ddp.losses, rel=2e-6)
            assert max(ddp.losses) / min(ddp.losses) > 1.2, "the loss must move, or equality means nothing"
    for ddp, mine in ranks[0]:
        assert_same(mine.weights, ddp.weights, rtol=2e-6, atol=1e-6)
        states = [{k: v for k, v in state["state"].items() if v} for state in (mine.states[0], ddp.states[0])]
        assert_same(*states, rtol=2e-6, atol=1e-6)


def looked_ahead(predicted: int, unpredicted: int, mispredicted: int) -> tuple[int, ...]:
    return tuple(EXCHANGES * count for count in (predicted, unpredicted, mispredicted))


EVERY_OPTIMIZER = [partial(BagModel, name) for name in OPTIMIZERS]


@pytest.mark.parametrize(("ranks", "dedup"), [(2, True), (2, False), pytest.param(4, True, marks=pytest.mark.slow)])
def test_as_under_ddp(ranks: int, dedup: bool) -> None:
    results = run_distributed(both, ranks, EVERY_OPTIMIZER, {"dedup": dedup})
    assert_as_ddp(results)
    for pairs in results:
        for _, run in pairs:
            assert run.looked_ahead() == looked_ahead(*KNOWN)
            assert run.statistics["non_colliding_bytes"] > 0
