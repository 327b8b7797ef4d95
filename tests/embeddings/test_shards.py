"""What FBGEMM's kernels update with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    invokers,
)

from lightning_freescale.embeddings.optimizer import UpdateSettings
from lightning_freescale.embeddings.shards import prepare_kernel


class FakeAdam:
    """FBGEMM has Adam on GPUs alone; its module is the same up to the call of the kernel, of which this keeps the arguments."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        host = (3, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [host], optimizer=EmbOptimType.EXACT_ADAGRAD, pooling_mode=PoolingMode.NONE
        )
        self.module.optimizer = EmbOptimType.ADAM
        for name in ("dev", "host", "uvm", "offsets", "placements"):
            for state in ("momentum2", "row_counter"):
                setattr(self.module, f"{state}_{name}", getattr(self.module, f"momentum1_{name}"))
        patch.setattr(invokers.lookup_adam, "invoke", self._invoke)

    def _invoke(self, common: Any, arguments: Any, first: Any, second: Any, step: int, **_: Any) -> torch.Tensor:
        names = ("eps", "beta1", "beta2", "weight_decay")
        self.options = {"lr": common.learning_rate_tensor.item(), **{name: getattr(arguments, name) for name in names}}
        self.step = step
        return torch.zeros(1, 4)

    def look_up(self) -> None:
        """What a lookup in training and one in validation have in common."""
        self.module(indices=torch.tensor([1]), offsets=torch.tensor([0, 1]))


def test_adam_is_given_its_options_and_count_before_every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    adam = FakeAdam(monkeypatch)
    for step in (0, 1, 2, 7):
        options = {"lr": 0.5**step, "eps": 0.1 * step, "beta1": 0.5, "beta2": 0.25 * step, "weight_decay": 0.125 * step}
        for _ in range(2):
            adam.look_up()  # of validation, which FBGEMM counts as well
        prepare_kernel(adam.module, {"table": UpdateSettings(step, options)})
        adam.look_up()
        assert adam.step == step + 1
        assert adam.options == options


def test_options_that_are_left_out_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    adam = FakeAdam(monkeypatch)
    prepare_kernel(adam.module, {"table": UpdateSettings(0, {"lr": 0.25, "eps": 0.5})})
    prepare_kernel(adam.module, {"table": UpdateSettings(1)})
    adam.look_up()
    assert (adam.options["lr"], adam.options["eps"], adam.step) == (0.25, 0.5, 2)


def test_tables_of_one_kernel_have_one_count_and_are_frozen_together(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeAdam(monkeypatch).module
    with pytest.raises(ValueError, match=r"\['a', 'b'\] have seen \[3, 1\] updates, .* parameter groups of their own"):
        prepare_kernel(module, {"a": UpdateSettings(3), "b": UpdateSettings(1)})
    with pytest.raises(ValueError, match=r"\['b'\] are frozen .* and \['a'\] are not"):
        prepare_kernel(module, {"a": UpdateSettings(3), "b": UpdateSettings(3, frozen=True)})
    prepare_kernel(module, {"a": UpdateSettings(3, frozen=True), "b": UpdateSettings(3, frozen=True)})
    assert not any(parameter.requires_grad for parameter in module.parameters())
