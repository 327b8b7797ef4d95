"""Batches go to the device once, as soon as their ids are needed: on CPU with stand-ins for its memory and streams."""

from __future__ import annotations

from typing import Any

import torch

from lightning_freescale.strategy.early_copy import EarlyCopy
from lightning_freescale.testing import run_distributed
from tests.helpers.fabric_loop import fabric_for, run_loop, set_up, whole
from tests.helpers.stream_clocks import Accesses, install
from tests.strategy.test_early_copy import CPU, Device

STEPS = 6


def _train(early: bool) -> dict[str, Any]:
    fabric = fabric_for()
    model, optimizer, loader = set_up(fabric, steps=STEPS)
    sources = [batch["features"].values().data_ptr() for batch in loader.dataset.batches]
    device = None
    if early:
        install(Accesses())
        device = Device()
        fabric.strategy._steps.early_copy = EarlyCopy(CPU)
    losses = run_loop(fabric, model, optimizer, loader)
    copied = [] if device is None else [device.copied[source] for source in sources]
    statistics = fabric.strategy._steps.engine.statistics()
    return {"losses": losses, "copied": copied, "statistics": statistics, **whole(fabric, model, optimizer)}


def test_a_batch_goes_to_the_device_once_and_gives_the_same_numbers() -> None:
    expected, found = (run_distributed(_train, 2, early) for early in (False, True))
    for plain, early in zip(expected, found):
        assert early["losses"] == plain["losses"]
        for name, weight in plain["weights"].items():
            assert torch.equal(early["weights"][name], weight), name
        assert early["statistics"]["mispredicted_lookups"] == 0 and early["statistics"]["predicted_lookups"] > 0
        assert early["copied"][1:] == [1] * (STEPS - 1)
