"""Write, check and read a checkpoint in a folder. Each rank writes and reads its part of the tables.

Writing is atomic. The folder has these files:

- ``meta.pt``: all entries except the tables, in the format of ``torch.load``;
- ``*.distcp`` and ``.metadata``: the tables, in the format of torch.distributed.checkpoint;
- ``freescale.json``: the size and checksum of each file. It is written last.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from lightning_freescale._runtime.object_gather import gather_objects
from lightning_freescale._version import __version__
from lightning_freescale.checkpoint import single_file
from lightning_freescale.checkpoint.spread_tensors import DeferredTensor, SpreadTensors
from lightning_freescale.checkpoint.stored_tensors import StoredPieces, StoredTensor, name_of, write_pieces
from lightning_freescale.embeddings.row_order import RowOrder

MANIFEST, _META = "freescale.json", "meta.pt"
_FORMAT = 1
_MARK = "lightning_freescale tensor: "
_READ_AT_ONCE = 1 << 20

T = TypeVar("T")


def write(checkpoint: Mapping[str, Any], folder: Path, spread: list[SpreadTensors], group: dist.ProcessGroup | None) -> None:
    """Write a checkpoint with this rank's pieces, ``spread``, of its deferred tensors. Collective on ``group``, a CPU group.

    The files are written beside ``folder`` and renamed to ``folder`` after they are complete and on the disk. All ranks must
    share the file system. If a rank cannot write, all ranks raise a RuntimeError.
    """
    rank, beside = 0 if group is None else group.rank(), folder.with_name(f".{folder.name}.part")
    what = f"the checkpoint {folder} could not be written"

    def begin() -> None:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)

    def write_meta() -> None:
        marked = pytree.tree_map_only(DeferredTensor, lambda tensor: _MARK + name_of(tensor.key), dict(checkpoint))
        with single_file.replacing(beside / _META) as file:
            torch.save(marked, file)

    def look() -> None:
        if not beside.is_dir():
            raise FileNotFoundError(
                f"this rank cannot see the folder {beside}, which rank 0 has created. A sharded checkpoint needs a file system "
                "that all ranks share. Without one, use FreeScaleStrategy(checkpoint='single')."
            )

    def end(files: list[dict[str, Any]]) -> None:
        tensors = {name_of(key): _described(held, key) for held in spread for key in held.keys}
        content = {"format": _FORMAT, "lightning_freescale": __version__, "tensors": tensors}
        content["files"] = {name: value for of_rank in files for name, value in of_rank.items()}
        with single_file.replacing(beside / MANIFEST) as file:
            file.write(json.dumps({**content, "crc32": _crc_of(content)}).encode())
        single_file.take_place(beside, folder)
        single_file.sync_folder(folder.parent)

    _together(begin if rank == 0 else None, what, group)
    _together(look, what, group)
    write_pieces(beside, [piece for held in spread for piece in held.own], group)
    _together(write_meta if rank == 0 else None, what, group)
    files = _together(lambda: _sums(beside, rank), what, group)
    _together((lambda: end(files)) if rank == 0 else None, what, group)


def read(folder: Path, weights_only: bool | None) -> Any:
    """Read a checkpoint; tables and their states stay in the folder and are returned as :class:`.StoredTensor`."""
    described, pieces = _manifest(folder)["tensors"], StoredPieces(folder)

    def stored(leaf: str) -> Any:
        if not leaf.startswith(_MARK):
            return leaf
        name = leaf.removeprefix(_MARK)
        of = described[name]
        order = None if of["order"] is None else RowOrder(*of["order"])
        return StoredTensor(name, torch.Size(of["shape"]), getattr(torch, of["dtype"]), order, pieces)

    found = single_file.read(folder / _META, weights_only)
    return pytree.tree_map_only(str, stored, found)


def damage(folder: Path, rank: int, ranks: int) -> str:
    """Return a description of the damage to this rank's share of the files; empty if there is none."""
    try:
        files = sorted(_manifest(folder)["files"].items(), key=lambda item: -item[1]["bytes"])
        for name, expected in files[rank::ranks]:
            if not (folder / name).is_file():
                return f"the file {name} is missing"
            if (size := (folder / name).stat().st_size) != expected["bytes"]:
                return f"the file {name} has {size} bytes instead of {expected['bytes']}"
            if _crc_of_file(folder / name) != expected["crc32"]:
                return f"the file {name} has changed since it was written: its checksum differs"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"it has no {MANIFEST}. It is not a sharded checkpoint of strategy 'freescale', or it is incomplete")
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


def _described(held: SpreadTensors, key: tuple[str, ...]) -> dict[str, Any]:
    piece = held.piece(key)
    order = piece.order and [piece.order.rows, piece.order.multiplier, piece.order.offset]
    return {"shape": list(piece.shape), "dtype": str(piece.dtype).removeprefix("torch."), "order": order}


def _sums(folder: Path, rank: int) -> dict[str, Any]:
    """Return the size and checksum of this rank's files."""
    names = [path.name for path in folder.iterdir() if path.name.startswith(f"__{rank}_")]
    names += [".metadata", _META] if rank == 0 else []
    return {name: {"bytes": (folder / name).stat().st_size, "crc32": _crc_of_file(folder / name)} for name in sorted(names)}


def _crc_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _crc_of_file(path: Path) -> int:
    found = 0
    with open(path, "rb") as file:
        while part := file.read(_READ_AT_ONCE):
            found = zlib.crc32(part, found)
    return found


def _together(do: Callable[[], T] | None, what: str, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the results of ``do`` on all ranks; raise on every rank if ``do`` raised on one. Collective."""
    done, error = None, None
    try:
        done = None if do is None else do()
    except (OSError, RuntimeError) as raised:
        error = raised
    mine = done, error and f"{type(error).__name__}: {error}"
    found = [mine] if group is None else gather_objects(mine, group)
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text]
    if failed:
        raise RuntimeError(f"{what}: {'; '.join(failed)}") from error
    return [done for done, _ in found]
