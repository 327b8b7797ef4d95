"""Two ranks on one GPU: what is said where NCCL refuses them, and the way out."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import Recommender, Samples, collate, trainer

_NCCL_SAYS = (
    "NCCL error in: ProcessGroupNCCL.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.29.7\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 1a000"
)


@pytest.mark.parametrize(
    ("text", "told"), [(_NCCL_SAYS, r'process_group_backend="gloo"'), ("the store is gone", "the store is gone")]
)
def test_nccl_on_a_shared_gpu_is_told_with_its_way_out(text: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(strategy: Any) -> None:
        raise dist.DistBackendError(text)

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(L.pytorch.strategies.DDPStrategy, "setup_environment", fail)
    strategy = FreeScaleStrategy(parallel_devices=[torch.device("cpu")], cluster_environment=LightningEnvironment())
    with pytest.raises(RuntimeError, match=told):
        strategy.setup_environment()


def _fit_over(backend: str | None) -> list[float]:
    torch.manual_seed(0)
    module, data = Recommender("adagrad"), Samples(32)
    trainer(devices=2, strategy=FreeScaleStrategy(process_group_backend=backend)).fit(
        module, FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate)
    )
    assert dist.get_backend(module.trainer.strategy.tables.group) == "freescale"
    return module.losses


def test_trains_over_gloo_where_that_is_named() -> None:
    named, default = (run_distributed(_fit_over, 2, backend) for backend in ("gloo", None))
    assert named == default
