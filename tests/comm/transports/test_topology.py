"""What a process tells the other ranks of its host and GPU."""

from __future__ import annotations

import pytest
import torch

from lightning_freescale.comm.options import TRANSPORTS
from lightning_freescale.comm.transports.topology import RankHardware
from lightning_freescale.testing import run_distributed
from tests.helpers.fake_cuda import pretend_cuda


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is looked at")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_without_cuda_only_the_host_is_looked_at(transport: str) -> None:
    here = RankHardware.from_this_process(transport)
    assert here.host and not here.gpu and not here.bindings


@pytest.mark.parametrize(("transport", "looked_at"), [("auto", False), ("host", False), ("native", False), ("peer", True)])
def test_a_gpu_that_is_not_in_use_is_looked_at_only_where_it_is_named(transport: str, looked_at: bool) -> None:
    """A process that computes on the CPU has a current device, too."""

    def run(initialized: bool) -> bool:
        pretend_cuda("a gpu", bound=False)
        torch.cuda.is_initialized = lambda: initialized
        return bool(RankHardware.from_this_process(transport).gpu)

    assert run_distributed(run, 1, True, init=False) == [True]
    assert run_distributed(run, 1, False, init=False) == [looked_at]


def test_lanes_that_need_no_link_do_not_look_for_one() -> None:
    def run(transport: str) -> tuple[str, int]:
        pretend_cuda("a gpu", visible=4, bound=False)
        here = RankHardware.from_this_process(transport)
        return here.gpu, here.visible

    assert [run_distributed(run, 1, name, init=False) for name in ("auto", "native")] == [[("a gpu", 4)], [("a gpu", 0)]]
