"""What DDP exchanges itself: its wait for the last gradients, and what it hides behind backward."""

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

SLOW = 0.3
WIDTH = 300
"""Of layers with 361,200 bytes of parameters each."""


class SlowBackward(torch.autograd.Function):
    """Takes ``SLOW`` seconds on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(SLOW)
        return gradient


class Layers(nn.Module):
    """Three layers; backward is slow between the second and the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        x = SlowBackward.apply(first(x))
        for layer in others:
            x = layer(x).relu()
        return x.square().mean()


def _trained(observed: bool, steps: int = 4, **options: Any) -> tuple[list[StepRecord], Sequence[Collective], list[Tensor]]:
    """``options`` of DDP, which has one bucket per layer."""
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(Layers(), **{"bucket_cap_mb": 0.3, **options})
    optimizer = torch.optim.Adam(model.parameters())
    timeline, records = Timeline(), []
    if observed:
        timeline.enable(torch.device("cpu"))
    for _ in range(steps):
        timeline.open_step()
        loss = model(torch.randn(4, WIDTH))
        with timeline.span("backward", "backward"), ddp_waits_on(timeline, model, loss):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        records.append(timeline.close_step())
    hooks = [p for p in model.parameters() if getattr(p, "_post_accumulate_grad_hooks", None)]
    assert not hooks, "nothing is left on the parameters"
    return records, list(timeline.background), [p.detach().clone() for p in model.parameters()]


def _seen(**options: Any) -> list[dict[str, Any]]:
    records, hidden, _ = _trained(True, **options)
    steps = []
    for record in records:
        (backward,), (wait,) = record.spans, record.collectives
        mine = [one for one in hidden if backward.start <= one.arrive <= backward.end]
        steps.append(
            {
                "before the end": [(one.done - one.arrive, wait.start - one.arrive, one.moved, one.at_most) for one in mine],
                "wait": (wait.name, wait.moved),
            }
        )
    return steps


def test_what_is_hidden_behind_backward_is_seen_once_the_buckets_are_in_order() -> None:
    """The first bucket is there before backward gets slow, the last one after."""
    layer = 4 * (WIDTH * WIDTH + WIDTH)
    for steps in run_distributed(_seen, 2):
        assert not steps[0]["before the end"]
        for step in steps[2:]:
            ((under_way, before_wait, moved, at_most),) = step["before the end"]
            assert SLOW <= before_wait <= under_way < 2 * SLOW
            assert (moved, at_most) == (2 * layer, True), "all buckets but the last"
            assert step["wait"] == ("dense gradients", layer)


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"bucket_cap_mb": 25, "steps": 3}], ids=str)
def test_nothing_is_made_up(options: dict[str, Any]) -> None:
    """Buckets that DDP never puts in order, and one bucket, which is exchanged when backward is over."""
    for steps in run_distributed(_seen, 2, **options):
        hidden = [one for step in steps for one in step["before the end"]]
        assert not hidden
        assert {step["wait"][0] for step in steps} == {"dense gradients"}


def test_numbers_do_not_change() -> None:
    for ranks in zip(run_distributed(_trained, 3, True, 3), run_distributed(_trained, 3, False, 3)):
        (_, seen, watched), (_, nothing, alone) = ranks
        assert seen and not nothing
        assert all(torch.equal(one, other) for one, other in zip(watched, alone))
