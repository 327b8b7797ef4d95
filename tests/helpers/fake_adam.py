"""FBGEMM's Adam, which is there on GPUs alone: its Python up to the call of the kernel, of which this keeps the arguments."""

from __future__ import annotations

from collections.abc import Sequence
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
from torch import Tensor

DIM = 4


class FakeAdam:
    """``features`` has the table of each of FBGEMM's features.

    Attributes:
        module: FBGEMM's.
        options: of the last call.
        step: of the last call.
        steps: of every call.
        ids: of the last call.
        offsets: where those of each feature begin, and the end.
        gradients: of these ids, once backward has been there.
    """

    def __init__(self, patch: pytest.MonkeyPatch, rows: Sequence[int] = (3,), features: Sequence[int] = (0,)) -> None:
        self.module: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [(count, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for count in rows],
            feature_table_map=list(features),
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            pooling_mode=PoolingMode.NONE,
        )
        self.module.optimizer = EmbOptimType.ADAM
        self.steps: list[int] = []
        for name in ("dev", "host", "uvm", "offsets", "placements"):
            for state in ("momentum2", "row_counter"):
                setattr(self.module, f"{state}_{name}", getattr(self.module, f"momentum1_{name}"))
        patch.setattr(invokers.lookup_adam, "invoke", self._invoke)

    def _invoke(self, common: Any, arguments: Any, first: Any, second: Any, step: int, **_: Any) -> Tensor:
        names = ("eps", "beta1", "beta2", "weight_decay")
        self.options = {"lr": common.learning_rate_tensor.item(), **{name: getattr(arguments, name) for name in names}}
        self.step = step
        self.steps.append(step)
        self.ids, self.offsets = common.indices.tolist(), common.offsets.tolist()
        result = torch.zeros(len(self.ids), DIM, requires_grad=True)
        result.register_hook(lambda gradient: setattr(self, "gradients", gradient))
        return result

    def look_up(self) -> None:
        """What a lookup in training and one in validation have in common."""
        features = len(self.module.feature_table_map)
        self.module(indices=torch.tensor([1]), offsets=torch.tensor([0] + features * [1]))
