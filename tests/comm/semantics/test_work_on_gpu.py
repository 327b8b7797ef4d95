"""A future of tensors on a GPU, whose callbacks torch puts in order on streams: with a stand-in, as there is none here."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from lightning_freescale.comm.work import TransferWork
from tests.helpers.pretended_gpu import GPU, PretendedGPU


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")])
def test_a_future_knows_the_gpu_that_its_tensors_are_on(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    given: list[Any] = []
    future: Any = torch.futures.Future
    monkeypatch.setattr(torch.futures, "Future", lambda devices: given.append(devices) or future())
    done: Future[None] = Future()
    with PretendedGPU().active():
        results = [torch.ones(2, device=device)]
        told = TransferWork(done, results).get_future()
    done.set_result(None)
    assert told.value() is results and given == [[GPU] if device == GPU else []]
