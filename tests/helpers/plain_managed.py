"""The loop that plain TorchRec users write for managed collisions: DistributedModelParallel, and DDP for the rest."""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder

from tests.helpers import plain_torchrec
from tests.helpers.managed_tables import ManagedBatches, ManagedNet


def _reset_on_cpu(kernel: Any, pruned_indices: torch.Tensor, logical_table_ids: torch.Tensor, **rest: Any) -> None:
    """What FBGEMM has for CUDA only: the row-wise states of some rows of one table become zero."""
    table = int(logical_table_ids[0])
    if kernel.optimizer is EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        kernel.momentum1_host[pruned_indices + int(kernel.momentum1_physical_offsets[table])] = 0


def train(net: ManagedNet, optimizer: str, batches: ManagedBatches) -> dict[str, Any]:
    """Losses, remapped ids, and the whole state dict and optimizer states (rank 0) after one pass over ``batches``."""
    setattr(SplitTableBatchedEmbeddingBagsCodegen, "reset_embedding_weight_momentum", _reset_on_cpu)  # noqa: B010
    parts: plain_torchrec.Parts = {
        "items": (net.items._embedding_module, ManagedCollisionEmbeddingCollectionSharder()),
        "categories": (net.categories, EmbeddingCollectionSharder()),
    }
    return {**plain_torchrec.train(net, optimizer, batches, parts), "remapped": net.remapped}
