"""The maps from ids to rows of managed-collision collections: this rank's part of them, and how whole ones are cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_freescale.embeddings.collections import Collection
from lightning_freescale.embeddings.managed_collision import managers
from lightning_freescale.embeddings.pending_ids import get_pending, set_pending
from lightning_freescale.embeddings.shards import ShardedTables

_FREE = torch.iinfo(torch.int64).max
_SEGMENTS, _BUCKETS = "_output_segments_tensor", "_hash_zch_bucket"
_SAME_EVERYWHERE = (_SEGMENTS, _BUCKETS, "_current_iter_tensor")


@dataclass(frozen=True)
class IdRemapping:
    """The map of one table.

    Attributes:
        table: the table's name.
        keys: where the state dict of the whole module has its tensors: a prefix for each place that holds the collection.
        manager: TorchRec's module for the rows of this rank.
        ends: the first row of every rank, and the number of rows.
        rank: which of them is this rank's.
    """

    table: str
    keys: tuple[str, ...]
    manager: Any
    ends: tuple[int, ...]
    rank: int

    @property
    def rows(self) -> slice:
        """The rows of this rank."""
        return slice(self.ends[self.rank], self.ends[self.rank + 1])

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds of it, by name: live, ``[rows, ...]`` of this rank except for the shared ones."""
        return {name: value.detach() for name, value in self.manager.state_dict().items()}

    def cut(self) -> list[str]:
        """Names of the tensors that have one entry per row."""
        return [name for name in self.tensors() if name not in _SAME_EVERYWHERE]

    @torch.no_grad()
    def load(self, whole: Mapping[str, Tensor]) -> None:
        """Take this rank's part of a whole map; names that are missing are left alone.

        Raises:
            ValueError: the map cannot be cut for this number of ranks, or has another size.
        """
        mine, part = self.tensors(), self._part(whole)
        for name in whole.keys() & mine.keys():
            if name == _SEGMENTS:  # those of this run: they say how the map is cut now
                continue
            source = whole[name]
            if name not in _SAME_EVERYWHERE:
                source = source[part.to(source.device)]
            elif name == _BUCKETS and not torch.equal(source, mine[name].to(source.device)):
                raise ValueError(
                    f"{self._named}: the checkpoint has {int(source)} buckets, total_num_buckets={int(mine[name])}"
                )
            mine[name].copy_(source)
        set_pending(self.manager, None)

    @property
    def _named(self) -> str:
        return f"managed collisions of table {self.table!r} ({self.keys[0]})"

    def _part(self, whole: Mapping[str, Tensor]) -> Tensor:
        """Which entries are this rank's. Entries of one rank keep their order, also if sorting has mixed the ranks'."""
        for name in self.cut():
            if name in whole and len(whole[name]) != self.ends[-1]:
                raise RuntimeError(f"size mismatch for {self._named}: {name} has {len(whole[name])} rows, not {self.ends[-1]}")
        if not {"_mch_remapped_ids_mapping", "_mch_sorted_raw_ids"} <= whole.keys():
            return torch.arange(self.rows.start, self.rows.stop)
        slots, ids = whole["_mch_remapped_ids_mapping"].cpu(), whole["_mch_sorted_raw_ids"].cpu()
        owners = torch.bucketize(slots, torch.tensor(self.ends[1:]), right=True)
        taken = ids != _FREE
        sizes = [end - start for start, end in pairwise(self.ends)]
        fits = torch.bincount(owners, minlength=len(sizes)).tolist() == sizes
        if not fits or not torch.equal(owners[taken], _ranks_of(ids[taken], self.manager, len(sizes))):
            before = int((whole[_SEGMENTS] >= 0).sum()) - 1 if _SEGMENTS in whole else "another number of"
            raise ValueError(
                f"{self._named}: its ids were given rows by {before} ranks, and on {len(sizes)} ranks they would be looked for "
                f"in other rows. Use {before} ranks, or start with new tables"
            )
        return (owners == self.rank).nonzero().flatten()


def id_maps(tables: ShardedTables) -> list[IdRemapping]:
    """The maps of all managed-collision collections, in the same order on every rank."""
    return [found for collection, module in tables.modules if collection.managed for found in _maps_of(collection, module)]


def held_by_torchrec(tables: ShardedTables) -> list[str]:
    """Names of parameters and buffers of managed-collision collections, all of which DDP must leave alone."""
    found = []
    for collection, module in tables.modules:
        if collection.managed:
            tensors = [*module.named_parameters(), *module.named_buffers()]
            found += [f"{collection.path}.{name}" if collection.path else name for name, _ in tensors]
    return found


def fill_maps(tables: ShardedTables, sources: Mapping[str, Any]) -> None:
    """Take the maps from the collections that were sharded, or from their earlier shards, by the collections' paths."""
    for collection, module in tables.modules:
        for target in _maps_of(collection, module) if collection.managed else []:
            source = managers(sources[collection.path])[target.table]
            values = {name: value.detach() for name, value in source.state_dict().items()}
            if hasattr(sources[collection.path], "freescale"):
                for name, value in target.tensors().items():
                    value.copy_(values[name])
                set_pending(target.manager, get_pending(source))
            else:
                target.load({name: value for name, value in values.items() if not value.is_meta})


def _maps_of(collection: Collection, module: Any) -> list[IdRemapping]:
    found, rank = [], module._env.rank
    for name, manager in sorted(managers(module).items()):
        inner = f"_managed_collision_collection._managed_collision_modules.{name}."
        keys = tuple(f"{path}.{inner}" if path else inner for path in (collection.path, *collection.aliases))
        shards = module.freescale.plan[name].sharding_spec.shards
        ends = (*(shard.shard_offsets[0] for shard in shards), shards[-1].shard_offsets[0] + shards[-1].shard_sizes[0])
        found.append(IdRemapping(name, keys, manager, ends, rank))
    return found


def _ranks_of(ids: Tensor, manager: nn.Module, ranks: int) -> Tensor:
    """To which rank TorchRec sends each id, by the kernel that sends them."""
    size, blocks = manager.input_size(), manager.buckets()  # type: ignore[operator]
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
