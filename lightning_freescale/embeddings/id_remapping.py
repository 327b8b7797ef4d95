"""The id remapping of managed-collision collections: this rank's shard of each table's map, and how a whole map is cut."""

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
    """This rank's shard of the map of one table.

    Attributes:
        table: the table's name.
        prefixes: what the map's tensors are called before their names in the whole module's state dict, once for each place
            that holds the collection.
        mc_module: TorchRec's module for the rows of this rank.
        ends: the first row of every rank, and the number of rows.
        rank: which of them is this rank's.
    """

    table: str
    prefixes: tuple[str, ...]
    mc_module: Any
    ends: tuple[int, ...]
    rank: int

    @property
    def rows(self) -> slice:
        """The rows of the table that this rank owns."""
        return slice(self.ends[self.rank], self.ends[self.rank + 1])

    def tensors(self) -> dict[str, Tensor]:
        """Return all that a checkpoint holds of it, by name: live, ``[rows, ...]`` of this rank except for the shared ones."""
        return {name: value.detach() for name, value in self.mc_module.state_dict().items()}

    def row_tensors(self) -> dict[str, Tensor]:
        """Return those of :meth:`tensors` that have one entry per row."""
        return {name: value for name, value in self.tensors().items() if name not in _SAME_EVERYWHERE}

    @torch.no_grad()
    def load(self, whole: Mapping[str, Tensor]) -> None:
        """Copy this rank's entries of a whole map; names that are missing are left alone.

        Raises:
            ValueError: the map cannot be cut for this number of ranks.
            RuntimeError: the map has another size than the table.
        """
        mine, entries = self.tensors(), self._own_entries(whole)
        for name in whole.keys() & mine.keys():
            if name == _SEGMENTS:  # those of this run: they say how the map is cut now
                continue
            source = whole[name]
            if name not in _SAME_EVERYWHERE:
                source = source[entries.to(source.device)]
            elif name == _BUCKETS and not torch.equal(source, mine[name].to(source.device)):
                raise ValueError(f"{self}: the checkpoint has {int(source)} buckets, total_num_buckets={int(mine[name])}")
            mine[name].copy_(source)
        set_input_history(self.mc_module, None)

    def __str__(self) -> str:
        return f"managed collisions of table {self.table!r} ({self.prefixes[0]})"

    def _own_entries(self, whole: Mapping[str, Tensor]) -> Tensor:
        """Return which entries are this rank's. Those of one rank keep their order, also if sorting has mixed the ranks'."""
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
                f"{self}: its ids were given rows by {before} ranks, and on {len(sizes)} ranks they would be looked for in "
                f"other rows. Use {before} ranks, or start with new tables"
            )
        return (owners == self.rank).nonzero().flatten()


def id_remappings(tables: ShardedTables) -> list[IdRemappingShard]:
    """Return this rank's shards of the maps of all managed-collision collections, in the same order on every rank."""
    return [shard for collection, module in tables.modules if collection.managed for shard in _shards(collection, module)]


def fill_id_remappings(collection: Collection, module: Any, original: Any) -> None:
    """Copy the maps of a managed-collision collection from ``original``: the unsharded one, or its earlier shards."""
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
    """Return to which rank TorchRec sends each id, by the kernel that sends them."""
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
