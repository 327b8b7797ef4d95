"""Check lookups: raise for ids without a row, and warn if a table is looked up twice in a step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from lightning_freescale.embeddings.collections import Collection, Table
from lightning_freescale.embeddings.optimizer import TableOptimizer

_WITH_VARIABLE_BATCHES = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.ADAM)
_UNBOUNDED = torch.iinfo(torch.int64).max


def check_num_embeddings(collections: Sequence[Collection], needed: Mapping[str, int]) -> None:
    """Check before training that tables have enough rows for the number of different ids of each feature, ``needed``."""
    for table in (table for collection in collections if not collection.managed for table in collection.tables):
        for feature in table.features:
            if needed.get(feature, 0) > table.rows:
                raise ValueError(
                    f"the data has {needed[feature]} different ids of feature {feature!r}, but table {table.name!r} has "
                    f"num_embeddings={table.rows}. Use num_embeddings={needed[feature]} or more."
                )


def check_id_ranges(lookups: Iterable[tuple[str, Table, Tensor]]) -> None:
    """Check that tables have a row for each id, by feature, table and ids. The host waits for the device once."""
    given = [lookup for lookup in lookups if lookup[2].numel()]
    if not given:
        return
    bounds = torch.stack([bound for *_, ids in given for bound in torch.aminmax(ids)]).tolist()
    for (feature, table, ids), low, high in zip(given, bounds[::2], bounds[1::2]):
        if low < 0 or high >= table.rows:
            outside = ids[(ids < 0) | (ids >= table.rows)]
            raise ValueError(
                f"feature {feature!r} has id {outside[0].item()}, but table {table.name!r} has num_embeddings={table.rows}, "
                f"for ids 0 to {table.rows - 1}. Remap the ids or enlarge the table."
            )


class LookupChecks:
    """A forward pre-hook of a sharded collection that checks the ids of each lookup and counts the lookups of a step.

    Row-wise sharding would map an id beyond the table to a row of another table. On the CPU the check raises an error. On a GPU
    a device-side assertion fails, so that the host does not wait for the device (not tested on GPU).

    The hook warns once about a second lookup in a step if a table has a stateful optimizer. The backward of each lookup updates
    the table separately, while an unsharded module sums the gradients first. This is allowed, because plain TorchRec does the
    same.
    """

    def __init__(self, collection: Collection, optimizers: Mapping[str, TableOptimizer]) -> None:
        self.ids = not collection.managed  # managed collisions have a row for any id
        self.enabled = True  # the overlap engine disables the checks and checks lookups itself
        self._path, self._weighted = collection.path, collection.weighted
        self._tables = {feature: table for table in collection.tables for feature in table.features}
        self._limits: dict[tuple[str, ...], Tensor] = {}
        self._stateful = sorted({o.fused_class.__name__ for o in optimizers.values() if o.fused_class is not torch.optim.SGD})
        kinds = {o.fused_class for o in optimizers.values()}
        self._fixed = sorted(k.__name__ for k in kinds if optimizer_type_to_emb_opt_type(k) not in _WITH_VARIABLE_BATCHES)
        self.lookups = 0  # lookups with gradients in this step
        self._warned = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check a lookup before it runs."""
        if not self.enabled:
            return
        features: Any = args[0] if args else kwargs.get("features")
        if self._fixed and isinstance(features, KeyedJaggedTensor) and features.variable_stride_per_key():
            raise ValueError(
                f"collection {self._path!r}: TorchRec's exchange does not support features with variable batch sizes "
                f"(stride_per_key_per_rank) for tables with {', '.join(self._fixed)}. Use SGD, RowWiseAdagrad or Adam for "
                "these tables, or FreeScaleStrategy(overlap=True)."
            )
        if self.ids:
            self.check_ids(features)
        if self._weighted and torch.is_grad_enabled() and features.weights().requires_grad:
            raise ValueError(
                f"collection {self._path!r}: the weights of its ids need a gradient, for example those of a feature processor, "
                "but TorchRec's exchange computes none. Remove overlap='torchrec', or detach the weights."
            )
        self.lookups += torch.is_grad_enabled()
        if self.lookups > 1 and self._stateful and not self._warned:
            self._warned = True
            warnings.warn(
                f"collection {self._path!r} is looked up {self.lookups} times in one step. {', '.join(self._stateful)} updates "
                "its tables once per lookup, as in plain TorchRec, and not once per step. Look up all features in one call.",
                stacklevel=2,
            )

    def check_ids(self, features: Any) -> None:
        """Check the ids of one lookup; ignore features without a table in the collection."""
        if not isinstance(features, KeyedJaggedTensor):
            return
        if features.values().is_cuda:
            torch._assert_async(self.in_range(features).all())
            return
        known = [feature for feature in features.keys() if feature in self._tables]  # noqa: SIM118 (it is no dict)
        check_id_ranges((feature, self._tables[feature], features[feature].values()) for feature in known)

    def in_range(self, features: KeyedJaggedTensor) -> Tensor:
        """Return whether each id has a row, bool of shape ``[ids]``, without a copy from device to host."""
        keys, values = tuple(features.keys()), features.values()
        if keys not in self._limits:
            rows = [self._tables[key].rows if key in self._tables else _UNBOUNDED for key in keys]
            self._limits[keys] = torch.tensor(rows, device=values.device)
        per_key = features.lengths().view(len(keys), -1).sum(dim=1)  # a split of the values by feature would need the copy
        limit = torch.repeat_interleave(self._limits[keys], per_key, output_size=values.numel())
        return (values >= 0) & (values < limit)
