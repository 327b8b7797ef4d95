"""Exchanges of DDP: its wait for the last gradients, and those that backward hides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale.profiling.recording.ddp_exchanges import ddp_waits_on
from lightning_freescale.profiling.recording.records import Collective, StepRecord
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.testing import run_distributed

pytestmark = pytest.mark.xdist_group("timing")
SLOW = 0.3
WIDTH = 300
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class Layers(nn.Sequential):
    """Backward is slow between the second and the first of three layers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        x.register_hook(lambda _: time.sleep(SLOW))
        return self[2](self[1](x).relu()).square().mean()


def _trained(observed: bool, **options: Any) -> tuple[list[StepRecord], Sequence[Collective], list[Tensor]]:
    """``options`` of DDP, which has one bucket per layer by default."""
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(Layers(), **{"bucket_cap_mb": 0.3, **options})
    optimizer = torch.optim.Adam(model.parameters())
    timeline, records = Timeline(), []
    if observed:
        timeline.enable(torch.device("cpu"))
    for _ in range(4):
        timeline.open_step()
        loss = model(torch.randn(4, WIDTH))
        with timeline.span("backward", "backward"), ddp_waits_on(timeline, model, loss):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        records.append(timeline.close_step())
    assert not [p for p in model.parameters() if getattr(p, "_post_accumulate_grad_hooks", None)], "left on the parameters"
    return records, list(timeline.background), [p.detach().clone() for p in model.parameters()]


def _check_ddp() -> None:
    records, hidden, watched = _trained(True)
    for step, record in enumerate(records):
        (backward,), (wait,) = record.spans, record.collectives
        mine = [one for one in hidden if backward.start <= one.arrive <= backward.end]
        if step != 1:  # DDP puts its buckets in order after the first backward
            assert len(mine) == (step > 1)
        for one in mine:  # the first bucket is there before backward gets slow, the last one after
            assert one.arrive + SLOW <= wait.start <= wait.end <= one.done <= backward.end
            assert (one.moved, one.at_most) == (2 * LAYER_BYTES, True), "all buckets but the last"
        assert wait.name == "dense gradients" and (step < 2 or wait.moved == LAYER_BYTES)
    _, _, alone = _trained(False)
    assert all(torch.equal(one, other) for one, other in zip(watched, alone, strict=True))
    # buckets that DDP never puts in order, and one bucket, which is exchanged when backward is over
    for options in ({"find_unused_parameters": True}, {"bucket_cap_mb": 25}):
        records, hidden, _ = _trained(True, **options)
        assert not hidden, options
        waits = [(wait.name, wait.moved) for record in records for wait in record.collectives]
        assert waits == [("dense gradients", 3 * LAYER_BYTES)] * 4, (options, "the bytes of all buckets")


def test_what_backward_hides_and_what_it_waits_for() -> None:
    run_distributed(_check_ddp, 2)
