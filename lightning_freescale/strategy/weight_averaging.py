"""Weight averages of a module with sharded tables: each rank averages its own rows without communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_freescale.checkpoint.unsharded import loaded_module_state, loaded_state, module_state_dict
from lightning_freescale.embeddings.shards import Shard, ShardedTables

if TYPE_CHECKING:
    from lightning_freescale.strategy.checkpointing import UnshardedCheckpointStrategy

_CACHED = "fused_uvm_caching"
_CURRENT = "current_model_state"


def unfit_for_averages(tables: ShardedTables) -> dict[str, str]:
    """Return the paths of collections whose newest rows are not in the memory of their tables, each with the reason."""
    plans = {collection.path: module.freescale_sharding.plan for collection, module in tables.modules}
    cached = [path for path, plan in plans.items() if any(table.compute_kernel == _CACHED for table in plan.values())]
    return dict.fromkeys(cached, f"compute_kernel={_CACHED!r} keeps newer rows in a cache. Use 'fused' or 'fused_uvm'")


class ShardAverages:
    """The averages of one callback: ``module``, with dense parameters and this rank's rows. ``name`` is unique in a folder."""

    def __init__(self, strategy: UnshardedCheckpointStrategy, tables: ShardedTables, name: str, device: torch.device) -> None:
        assert strategy.lightning_module is not None
        self.strategy, self._tables, self._name = strategy, tables, name
        self._live: nn.Module = strategy.lightning_module
        copies: dict[int, Any] = {id(sharded): _AveragedCollection(sharded, device) for _, sharded in tables.modules}
        self.module = deepcopy(self._live, copies).to(device)

    def unsharded(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state dict of ``module`` with whole tables. Collective."""
        hold = self.strategy.files.hold()
        return module_state_dict(self._tables, state, **hold, shards=self._shards(), kind=(self._name,))

    def load(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint with this rank's shards in place of its tables."""
        found, names = dict(checkpoint), self._tables.state_dict_keys()
        held = {name: value for name, value in self.module.state_dict().items() if name in names}
        found["state_dict"] = loaded_state(self._live, self._tables, self._shards(), checkpoint["state_dict"], held)
        if _CURRENT in checkpoint:
            found[_CURRENT] = loaded_module_state(self._live, self._tables, checkpoint[_CURRENT])
        return found

    def _shards(self) -> Iterator[Shard]:
        live, averages = dict(self._live.named_parameters()), dict(self.module.named_parameters())
        for shard in self._tables.shards():
            # a parameter contains all shards of its table, one after the other
            whole, average = live[shard.table.key], averages[shard.table.key].detach()
            first = shard.weight.storage_offset() - whole.storage_offset()
            weight = average.as_strided(shard.weight.shape, shard.weight.stride(), first)
            yield replace(shard, weight=weight, state={})


class _AveragedCollection(nn.Module):
    """A module with the parameters of a sharded collection, as its substitute in the average."""

    def __init__(self, sharded: nn.Module, device: torch.device) -> None:
        super().__init__()
        for name, live in sharded.named_parameters():
            *path, last = name.split(".")
            holder: nn.Module = self
            for part in path:
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            copied = live.detach().to(device, copy=True)
            holder.register_parameter(last, nn.Parameter(copied, requires_grad=live.requires_grad))
