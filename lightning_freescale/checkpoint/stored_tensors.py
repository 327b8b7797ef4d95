"""Write and read the tensors of a sharded checkpoint with torch.distributed.checkpoint (DCP). Each rank handles its pieces.

Rows are stored in the order of their positions, as owners hold them, and not in the order of their ids. So a piece is one
block for any number of ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_freescale.checkpoint.spread_tensors import Key, Piece
from lightning_freescale.embeddings.row_order import RowOrder

_CHUNK_BYTES = 1 << 24
"""The number of bytes per write, because DCP copies parts of larger tensors, and per read of rows in another order."""
_IN_METADATA = {
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}
"""The names that DCP's pickled metadata may contain, by module. Dtypes of torch are allowed, too."""


def name_of(key: Key) -> str:
    """Return the name of a tensor in a folder."""
    return "/".join(key)


def write_pieces(folder: Path, pieces: Sequence[tuple[Piece, Tensor]], group: dist.ProcessGroup | None) -> None:
    """Write this rank's pieces. Collective on ``group``, a group for tensors on the CPU, or None for one rank."""
    writer, planner = dcp.FileSystemWriter(folder), _SavePlanner(pieces)
    dcp.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


class StoredPieces:
    """The tensors in a folder, by name."""

    def __init__(self, folder: Path) -> None:
        self._reader = dcp.FileSystemReader(folder)
        with open(folder / ".metadata", "rb") as file:
            self._metadata: Metadata = _MetadataUnpickler(file).load()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def read(self, name: str, place: tuple[slice, ...], into: Tensor) -> None:
        """Read a block of a tensor into ``into``, which has the block's shape."""
        if into.numel():
            planner = _LoadPlanner(name, place, into)
            planner.set_up_planner({}, self._metadata)
            self._reader.read_data(planner.create_local_plan(), planner).wait()


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint that stays in the folder until its values are used."""

    name: str
    shape: torch.Size  # shape of the whole tensor
    dtype: torch.dtype
    order: RowOrder | None  # order of the rows in the folder; None for a tensor without rows
    pieces: StoredPieces  # all tensors in the folder

    def read(self, place: tuple[slice, ...], order: RowOrder, into: Tensor) -> None:
        """Read the rows at positions ``place[0]`` of ``order`` and the columns ``place[1:]`` into ``into``."""
        place += tuple(slice(0, size) for size in self.shape[len(place) :])
        into = into.view([part.stop - part.start for part in place])
        if order == self.order:
            self.pieces.read(self.name, place, into)
            return
        first, last = place[0].start, place[0].stop
        for ids, rows in self.rows(place[1:]):
            positions = order.positions(ids)
            mine = (positions >= first) & (positions < last)
            into[positions[mine] - first] = rows[mine].to(into.device)

    def whole(self) -> Tensor:
        """Return the whole tensor, with rows in the order of ids."""
        found = torch.empty(self.shape, dtype=self.dtype)
        if self.order is None:
            self.pieces.read(self.name, tuple(slice(0, size) for size in self.shape), found)
            return found
        for ids, rows in self.rows():
            found[ids] = rows
        return found

    def rows(self, columns: tuple[slice, ...] | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of the ids and their rows, in the order of the folder."""
        assert self.order is not None
        columns = tuple(slice(0, size) for size in self.shape[1:]) if columns is None else columns
        widths = [column.stop - column.start for column in columns]
        most = max(1, _CHUNK_BYTES // (prod(widths) * self.dtype.itemsize))
        for start in range(0, self.shape[0], most):
            stop = min(start + most, self.shape[0])
            rows = torch.empty(stop - start, *widths, dtype=self.dtype)
            self.pieces.read(self.name, (slice(start, stop), *columns), rows)
            yield self.order.ids(start, stop), rows


def materialized(tree: Any) -> Any:
    """Return a nested state with the values of its stored tensors."""
    return pytree.tree_map_only(StoredTensor, StoredTensor.whole, tree)


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, pieces: Sequence[tuple[Piece, Tensor]]) -> None:
        super().__init__(flatten_state_dict=False)
        self._values: dict[MetadataIndex, Tensor] = {}
        self._items: list[WriteItem] = []
        for piece, value in pieces:
            self._add(piece, value.detach())

    def _add(self, piece: Piece, value: Tensor) -> None:
        place = piece.place or tuple(slice(0, size) for size in piece.shape)
        place += tuple(slice(0, size) for size in piece.shape[len(place) :])
        if not value.numel():
            return
        value = value.view([part.stop - part.start for part in place])
        rows = max(1, _CHUNK_BYTES * len(value) // value.nbytes) if place else 1
        for start, chunk in enumerate(value.split(rows)) if place else [(0, value)]:
            offsets = torch.Size([part.start + start * rows * (not axis) for axis, part in enumerate(place)])
            index = MetadataIndex(name_of(piece.key), offsets)
            written = TensorWriteData(
                ChunkStorageMetadata(offsets, chunk.size()), TensorProperties.create_from_tensor(chunk), torch.Size(piece.shape)
            )
            self._values[index] = chunk
            self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=written))

    @override
    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    @override
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._values[index]


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, name: str, place: tuple[slice, ...], into: Tensor) -> None:
        super().__init__(flatten_state_dict=False)
        self._name, self._place, self._into = name, place, into

    @override
    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored: Any = self.metadata.state_dict_metadata[self._name]
        offsets = torch.Size([part.start for part in self._place])
        wanted = ChunkStorageMetadata(offsets, torch.Size([part.stop - part.start for part in self._place]))
        return LoadPlan(create_read_items_for_chunk_list(self._name, stored, [wanted]))

    @override
    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._into


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that loads only the classes of DCP's metadata."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _IN_METADATA.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the metadata contains {module}.{name}, which is not allowed")
