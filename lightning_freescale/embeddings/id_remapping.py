"""The id maps of collections with managed collisions: this rank's shard of each map, and the division of a whole map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_freescale.embeddings.collections import Collection
from lightning_freescale.embeddings.managed_collision import get_input_history, mc_modules, set_input_history
from lightning_freescale.embeddings.shards import ShardedTables

_FREE = torch.iinfo(torch.int64).max
_SEGMENTS, _BUCKETS = "_output_segments_tensor", "_hash_zch_bucket"
_SAME_EVERYWHERE = (_SEGMENTS, _BUCKETS, "_current_iter_tensor")


@dataclass(frozen=True)
class IdRemappingShard:
    """This rank's shard of the id map of one table."""

    table: str  # name of the table
    prefixes: tuple[str, ...]  # prefixes in the whole module's state dict, one for each path of the collection
    mc_module: Any  # TorchRec's module for the rows of this rank
    ends: tuple[int, ...]  # first row of every rank, followed by the number of rows
    rank: int  # index of this rank

    @property
    def rows(self) -> slice:
        """The rows of the table that this rank owns."""
        return slice(self.ends[self.rank], self.ends[self.rank + 1])

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors of a checkpoint by name: ``[rows, ...]`` of this rank, or identical on all ranks."""
        return {name: value.detach() for name, value in self.mc_module.state_dict().items()}

    def row_tensors(self) -> dict[str, Tensor]:
        """Return the :meth:`tensors` with one entry per row."""
        return {name: value for name, value in self.tensors().items() if name not in _SAME_EVERYWHERE}

    @torch.no_grad()
    def load(self, whole: Mapping[str, Tensor]) -> None:
        """Copy this rank's entries of a whole map. Tensors that are missing in ``whole`` do not change."""
        mine, entries = self.tensors(), self._own_entries(whole)
        for name in whole.keys() & mine.keys():
            if name == _SEGMENTS:  # describes the division of the map in this run
                continue
            source = whole[name]
            if name not in _SAME_EVERYWHERE:
                source = source[entries.to(source.device)]
            elif name == _BUCKETS and not torch.equal(source, mine[name].to(source.device)):
                raise ValueError(
                    f"{self}: the checkpoint has {int(source)} buckets, but the module has "
                    f"total_num_buckets={int(mine[name])}. Use the same number of buckets."
                )
            mine[name].copy_(source)
        set_input_history(self.mc_module, None)

    def __str__(self) -> str:
        return f"managed collisions of table {self.table!r} ({self.prefixes[0]})"

    def _own_entries(self, whole: Mapping[str, Tensor]) -> Tensor:
        """Return the indices of this rank's entries, in their order in the whole map."""
        for name in self.row_tensors():
            if name in whole and len(whole[name]) != self.ends[-1]:
                raise RuntimeError(f"size mismatch for {self}: {name} has {len(whole[name])} rows, not {self.ends[-1]}")
        if not {"_mch_remapped_ids_mapping", "_mch_sorted_raw_ids"} <= whole.keys():
            return torch.arange(self.rows.start, self.rows.stop)
        slots, ids = whole["_mch_remapped_ids_mapping"].cpu(), whole["_mch_sorted_raw_ids"].cpu()
        owners = torch.bucketize(slots, torch.tensor(self.ends[1:]), right=True)
        taken = ids != _FREE
        sizes = [end - start for start, end in pairwise(self.ends)]
        fits = torch.bincount(owners, minlength=len(sizes)).tolist() == sizes
        if not fits or not torch.equal(owners[taken], _ranks_of(ids[taken], self.mc_module, len(sizes))):
            before = int((whole[_SEGMENTS] >= 0).sum()) - 1 if _SEGMENTS in whole else "another number of"
            raise ValueError(
                f"{self}: the ids were assigned to rows on {before} ranks. On {len(sizes)} ranks they would be looked up in "
                f"other rows. Use {before} ranks, or start with new tables."
            )
        return (owners == self.rank).nonzero().flatten()


def id_remappings(tables: ShardedTables) -> list[IdRemappingShard]:
    """Return this rank's shards of all id maps, in the same order on every rank."""
    return [shard for collection, module in tables.modules if collection.managed for shard in _shards(collection, module)]


def fill_id_remappings(collection: Collection, module: Any, original: Any) -> None:
    """Copy the id maps of a collection from ``original``, the unsharded module or the module of an earlier sharding."""
    for shard in _shards(collection, module):
        source = mc_modules(original)[shard.table]
        values = {name: value.detach() for name, value in source.state_dict().items()}
        if hasattr(original, "freescale_sharding"):
            for name, value in shard.tensors().items():
                value.copy_(values[name])
            set_input_history(shard.mc_module, get_input_history(source))
        else:
            shard.load({name: value for name, value in values.items() if not value.is_meta})


def _shards(collection: Collection, module: Any) -> list[IdRemappingShard]:
    found, rank = [], module._env.rank
    for table, mc_module in sorted(mc_modules(module).items()):
        prefixes = collection.names(f"_managed_collision_collection._managed_collision_modules.{table}.")
        placed = module.freescale_sharding.plan[table].sharding_spec.shards
        ends = (*(shard.shard_offsets[0] for shard in placed), placed[-1].shard_offsets[0] + placed[-1].shard_sizes[0])
        found.append(IdRemappingShard(table, prefixes, mc_module, ends, rank))
    return found


def _ranks_of(ids: Tensor, mc_module: nn.Module, ranks: int) -> Tensor:
    """Return the rank to which TorchRec sends each id, computed with TorchRec's kernel."""
    size, blocks = mc_module.input_size(), mc_module.buckets()  # type: ignore[operator]
    lengths, *_, place = torch.ops.fbgemm.block_bucketize_sparse_features(
        torch.tensor([len(ids)]),
        ids,
        bucketize_pos=False,
        sequence=True,
        block_sizes=torch.tensor([-(-size // blocks)]),
        my_size=ranks,
        total_num_blocks=torch.tensor([blocks]),
        keep_orig_idx=True,
    )
    return torch.repeat_interleave(torch.arange(ranks), lengths)[place]
