"""Write, check and read a checkpoint in a folder. Each rank writes and reads its part of the tables.

Writing is atomic. The folder has these files:

- ``meta.pt``: all entries except the tables, in the format of ``torch.load``;
- ``*.distcp`` and ``.metadata``: the tables, in the format of torch.distributed.checkpoint (DCP);
- ``freescale.json``: the size and checksum of each file. It is written last.

The rows of tables are in the order of their positions, as owners hold them, and not in the order of their ids. So a piece is
one block for any number of ranks.
"""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_freescale._runtime.error_text import error_text
from lightning_freescale._runtime.object_gather import together
from lightning_freescale._version import __version__
from lightning_freescale.checkpoint import partial_files, remote_files, single_file
from lightning_freescale.checkpoint.held_files import MANIFEST, OF_TORCH, HeldFiles
from lightning_freescale.checkpoint.remote_files import Location
from lightning_freescale.checkpoint.spread_tensors import DeferredTensor, Key, Piece, SpreadTensors
from lightning_freescale.embeddings.row_order import RowOrder

_META = "meta.pt"
_FORMAT = 1
_MARK = "lightning_freescale tensor: "
_READ_AT_ONCE = 1 << 20
LARGE = 1 << 20
"""The smallest tensor, in bytes, that stays in the folder until its values are used."""
_CHUNK_BYTES = 1 << 24
"""The number of bytes per write, because DCP copies parts of larger tensors."""
_IN_METADATA = {
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
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


def write(
    checkpoint: Mapping[str, Any], folder: Location, spread: list[SpreadTensors], group: dist.ProcessGroup | None
) -> None:
    """Write a checkpoint with this rank's pieces, ``spread``, of its deferred tensors. Collective on ``group``, a CPU group.

    In a local folder, the files are written beside ``folder`` and renamed to ``folder`` after they are complete and on the
    disk. All ranks must share the file system. If a rank cannot write, all ranks raise a RuntimeError.
    """
    rank, what = 0 if group is None else group.rank(), f"the checkpoint {folder} could not be written"
    stage: Path  # the folder in which this rank writes

    def begin() -> str:
        if isinstance(folder, str):
            return held.enter_context(remote_files.new_folder(folder))
        beside = partial_files.folder_of(held.enter_context(partial_files.claimed(folder)))
        beside.mkdir()
        return str(beside)

    def prepare() -> dict[str, Any]:
        nonlocal stage
        stage = held.enter_context(remote_files.staging(place))
        sums = {_META: _write_meta(checkpoint, stage / _META)} if rank == 0 else {}
        remote_files.send(stage, sums, place)
        return sums

    def look() -> None:
        if not remote_files.exists(remote_files.within(place, _META)):
            raise FileNotFoundError(
                f"this rank cannot see the folder {place}, which rank 0 has created. A sharded checkpoint needs a file system "
                "that all ranks share. Without one, use FreeScaleStrategy(checkpoint='single')."
            )

    def finish_files() -> dict[str, dict[str, int]]:
        remote_files.send(stage, sums, place)
        return sums

    def end() -> None:
        tensors = {_name_of(key): _described(each.piece(key)) for each in spread for key in each.keys}
        content = {"format": _FORMAT, "lightning_freescale": __version__, "tensors": tensors}
        content["files"] = {name: value for of_rank in files for name, value in of_rank.items()}
        if lost := sorted({name for of_rank in files for name in of_rank} - remote_files.names_in(place)):
            raise FileNotFoundError(f"No such file or directory: {lost[0]} in {place}. Another process has removed it")
        if isinstance(place, str):
            content["folder"] = place.rpartition("/")[2]
        with partial_files.SyncedFile(stage / MANIFEST) as file:
            file.write(json.dumps({**content, "crc32": _crc_of(content)}).encode())
        remote_files.publish(stage, place, folder)

    with ExitStack() as held:
        # rank 0 chooses the name, so ranks of two jobs never write into one folder
        name = together(begin if rank == 0 else None, what, group)[0]
        place = Path(name) if isinstance(folder, Path) else name
        meta = together(prepare, what, group)
        together(look, what, group)
        pieces = [piece for each in spread for piece in each.own]
        sums = write_pieces(stage, pieces, what, group, sync=isinstance(place, Path))
        files = meta + together(finish_files, what, group)
        together(end if rank == 0 else None, what, group)


def _write_meta(checkpoint: Mapping[str, Any], path: Path) -> dict[str, int]:
    marked = pytree.tree_map_only(DeferredTensor, lambda tensor: _MARK + _name_of(tensor.key), dict(checkpoint))
    with partial_files.naming(path), partial_files.SyncedFile(path) as file:
        summed = partial_files.SummedFile(file)
        torch.save(marked, summed)
    return summed.sums()


def write_pieces(
    folder: Path, pieces: Sequence[tuple[Piece, Tensor]], what: str, group: dist.ProcessGroup | None, sync: bool
) -> dict[str, dict[str, int]]:
    """Write this rank's pieces, and return the size and checksum of each file that this rank has written. Collective.

    ``sync`` waits until the files are on the disk. If a rank fails, all ranks raise ``what``, see :func:`.together`.
    """
    writer, files = dcp.FileSystemWriter(folder, sync_files=sync), _SummedFiles()
    writer.fs = files
    try:
        dcp.save({}, storage_writer=writer, planner=_SavePlanner(pieces), process_group=group, no_dist=group is None)
    except dcp.api.CheckpointException as error:
        errors = {rank: raised for rank, (raised, _) in error.failures.items()}
        mine = errors.get(0 if group is None else group.rank())
        if mine is not None and not isinstance(mine, Exception):  # such as KeyboardInterrupt
            raise mine from None
        failed = [f"rank {rank}: {error_text(raised)}" for rank, raised in sorted(errors.items())]
        raise RuntimeError(f"{what}: {'; '.join(failed)}") from mine
    return files.sums


def read(folder: HeldFiles, weights_only: bool | None) -> Any:
    """Read a checkpoint; tables and their states stay in the folder and are returned as :class:`.StoredTensor`."""
    described, pieces = _manifest(folder)["tensors"], StoredPieces(folder)

    def stored(leaf: str) -> Any:
        if not leaf.startswith(_MARK):
            return leaf
        name = leaf.removeprefix(_MARK)
        of = described[name]
        order = None if of["order"] is None else RowOrder(*of["order"])
        return StoredTensor(name, torch.Size(of["shape"]), getattr(torch, of["dtype"]), order, pieces)

    return pytree.tree_map_only(str, stored, single_file.read(folder / _META, weights_only))


def damage(folder: HeldFiles, rank: int, ranks: int) -> str:
    """Return a description of the damage to this rank's share of the files; empty if there is none.

    Raises:
        OSError: a file that is there could not be read.
    """
    try:
        files = sorted(_manifest(folder)["files"].items(), key=lambda item: -item[1]["bytes"])
        for name, expected in files[rank::ranks]:
            if not (folder / name).is_file():
                return f"the file {name} is missing"
            if (size := (folder / name).stat().st_size) != expected["bytes"]:
                return f"the file {name} has {size} bytes instead of {expected['bytes']}"
            if _crc_of_file(folder / name) != expected["crc32"]:
                return f"the file {name} has changed since it was written: its checksum differs"
    except ValueError as error:
        return str(error)
    return ""


def _manifest(folder: HeldFiles) -> dict[str, Any]:
    try:
        content = json.loads((folder / MANIFEST).read_text())
        expected = content.pop("crc32")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"its {MANIFEST} cannot be read ({error})") from error
    if content.get("format") != _FORMAT:
        raise ValueError(
            f"it has format {content.get('format')!r} of lightning-freescale {content.get('lightning_freescale')}, but version "
            f"{__version__} reads format {_FORMAT}. Resume with the other version, or consolidate the checkpoint with it"
        )
    if _crc_of(content) != expected:
        raise ValueError(f"its {MANIFEST} has changed since it was written: its checksum differs")
    return dict(content)


def _name_of(key: Key) -> str:
    return "/".join(key)


def _described(piece: Piece) -> dict[str, Any]:
    order = piece.order and list(astuple(piece.order))
    return {"shape": list(piece.shape), "dtype": str(piece.dtype).removeprefix("torch."), "order": order}


def _crc_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _crc_of_file(path: Path) -> int:
    found = 0
    with open(path, "rb") as file:
        while part := file.read(_READ_AT_ONCE):
            found = zlib.crc32(part, found)
    return found


class StoredPieces:
    """The tensors in a folder, by name."""

    def __init__(self, folder: HeldFiles) -> None:
        self._reader = dcp.FileSystemReader(".")
        self._reader.fs = folder
        with open(folder / OF_TORCH, "rb") as file:
            self.metadata: Metadata = _MetadataUnpickler(file).load()
        self.tensors: dict[str, Any] = self.metadata.state_dict_metadata
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=True)

    def read(self, name: str, place: tuple[slice, ...], into: Tensor) -> None:
        """Read a block of a tensor into ``into``, which has the block's shape."""
        if into.numel():
            place = place[: len(self.tensors[name].size)]  # a row-wise state of TorchRec has no columns
            planner = _LoadPlanner(name, place, into.view([part.stop - part.start for part in place]))
            planner.set_up_planner({}, self.metadata)
            try:
                self._reader.read_data(planner.create_local_plan(), planner).wait()
            except (OSError, MemoryError):
                raise
            except Exception as error:  # torch raises errors of many types, and their texts may advise to run code
                raise ValueError(f"the checkpoint is damaged: {name} cannot be read ({type(error).__name__})") from error


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
            into[positions[mine] - first] = rows[mine].to(into)

    def whole(self) -> Tensor:
        """Return the whole tensor, with rows in the order of ids."""
        found = torch.empty(self.shape, dtype=self.dtype)
        if self.order is None:
            self.pieces.read(self.name, tuple(slice(0, size) for size in self.shape), found)
            return found
        for ids, rows in self.rows():
            found[ids] = rows
        return found

    def bounds(self) -> set[int]:
        """Return the first rows of the parts in the files, and the number of rows. DCP reads a part as a whole."""
        return {self.shape[0], *(chunk.offsets[0] for chunk in self.pieces.tensors[self.name].chunks)}

    def rows(
        self, columns: tuple[slice, ...] | None = None, bounds: Iterable[int] | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of the ids and their rows, in the order of the folder, by default in the parts of the files."""
        assert self.order is not None
        columns = tuple(slice(0, size) for size in self.shape[1:]) if columns is None else columns
        widths = [column.stop - column.start for column in columns]
        for start, stop in pairwise(sorted(self.bounds() if bounds is None else bounds)):
            rows = torch.empty(stop - start, *widths, dtype=self.dtype)
            self.pieces.read(self.name, (slice(start, stop), *columns), rows)
            yield self.order.ids(start, stop), rows


def materialized(tree: Any) -> Any:
    """Return a nested state with the values of its stored tensors."""
    return pytree.tree_map_only(StoredTensor, StoredTensor.whole, tree)


class _SummedFiles(FileSystem):
    """The files of DCP, which sums those that it writes, by name."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, int]] = {}

    @contextmanager
    @override
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with partial_files.naming(path), super().create_stream(path, mode) as stream:
            file = partial_files.SummedFile(stream)
            yield file
        self.sums[Path(path).name] = file.sums()

    @override
    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, pieces: Sequence[tuple[Piece, Tensor]]) -> None:
        super().__init__(flatten_state_dict=False)
        self._values: dict[MetadataIndex, Tensor] = {}
        self._items: list[WriteItem] = []
        for piece, value in pieces:
            self._add(piece, value.detach())

    def _add(self, piece: Piece, value: Tensor) -> None:
        place = piece.place + tuple(slice(0, size) for size in piece.shape[len(piece.place) :])
        if not value.numel():
            return
        value = value.view([part.stop - part.start for part in place])
        rows = max(1, _CHUNK_BYTES * len(value) // value.nbytes) if place else 1
        for start, chunk in enumerate(value.split(rows)) if place else [(0, value)]:
            offsets = torch.Size([part.start + start * rows * (not axis) for axis, part in enumerate(place)])
            index = MetadataIndex(_name_of(piece.key), offsets)
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
