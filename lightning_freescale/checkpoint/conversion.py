"""Convert checkpoints between a folder and one file, and compare two of them, in one process outside of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_freescale.checkpoint import sharded_folder, single_file
from lightning_freescale.checkpoint.deferred_tensors import Deferral, DeferredTensor
from lightning_freescale.checkpoint.reading import check, read
from lightning_freescale.checkpoint.spread_tensors import Piece, SpreadTensors
from lightning_freescale.checkpoint.stored_tensors import StoredTensor
from lightning_freescale.embeddings.row_order import RowOrder

_LARGE = 1 << 20
"""Bytes from which a matrix is a tensor of its own in a folder."""
_ROWS_AT_ONCE = 1 << 18


def read_checkpoint(path: Path, weights_only: bool = True) -> dict[str, Any]:
    """Return a checkpoint, a file or a folder, whose large tensors are read when they are used.

    Raises:
        ValueError: it is damaged, incomplete, or no checkpoint; or holds more than tensors and numbers, and ``weights_only``.
        OSError: it does not exist.
    """
    check(path, together=False)  # other ranks of a run may not call this function
    return read(path, weights_only)


def write_file(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a result of :func:`read_checkpoint`, or a part of it, to one file, one table after the other."""
    with single_file.replacing(path) as file:
        _save(checkpoint, file)


def write_folder(checkpoint: Mapping[str, Any], folder: Path) -> None:
    """Write a result of :func:`read_checkpoint` to a folder."""
    held: list[SpreadTensors] = []
    names: dict[int, DeferredTensor] = {}

    def deferred(whole: Tensor) -> Tensor:
        if whole.dim() != 2 or whole.nbytes < _LARGE:
            return whole
        address = whole.data_ptr()  # a table with two names is one tensor
        if address not in names:
            rows, columns = whole.shape
            place = slice(0, rows), slice(0, columns)
            piece = Piece((f"tensor {len(names)}",), (rows, columns), whole.dtype, place, RowOrder(rows))
            held.append(SpreadTensors([(piece, whole)], None, whole.device))
            names[address] = DeferredTensor.standing_for(piece.key, piece.shape, piece.dtype)
        return names[address]

    sharded_folder.write(pytree.tree_map_only(Tensor, deferred, dict(checkpoint)), folder, held, None)


def open_checkpoint(path: str | Path, weights_only: bool = True) -> IO[bytes]:
    """Open a checkpoint as one ordinary file, also a sharded one, for ``load_from_checkpoint`` of the plain module.

    Args:
        path: a file or a folder.
        weights_only: refuse a checkpoint that holds more than tensors and numbers, because reading it would run code.

    Returns:
        A file that is deleted when it is closed. It takes the size of a whole checkpoint on the disk of temporary files.

    Raises:
        ValueError: it is damaged, incomplete, or no checkpoint; or holds more than tensors and numbers, and ``weights_only``.
        OSError: it does not exist.
    """
    if not Path(path).is_dir():
        return open(path, "rb")
    file: Any = TemporaryFile()  # noqa: SIM115 (the caller closes it)
    _save(read_checkpoint(Path(path), weights_only), file)
    file.seek(0)
    return file


def changed_rows(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return the rows of tables that differ between two checkpoints, to update a server that has the old one.

    Args:
        old: a result of :func:`read_checkpoint`.
        new: a result for a later checkpoint of the same module.

    Returns:
        For each matrix in the state dict that differs, by its name: ``ids``, int64 of shape ``[changed]``, ascending, and
        ``rows`` of shape ``[changed, dim]``, as they are in the new one.

    Raises:
        ValueError: they are of different modules.
    """
    before, after = old["state_dict"], new["state_dict"]
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        raise ValueError(f"the checkpoints are of different modules: only one of them has {odd}")
    found = {}
    for name, later in after.items():
        if len(later.shape) != 2:
            continue
        if before[name].shape != later.shape:
            raise ValueError(f"{name} has shape {tuple(before[name].shape)} before and {tuple(later.shape)} after")
        if (changed := _changed(before[name], later)) is not None:
            found[name] = changed
    return found


def _changed(before: Tensor | StoredTensor, after: Tensor | StoredTensor) -> dict[str, Tensor] | None:
    ids, rows = [], []
    for here, earlier, later in _side_by_side(before, after):
        # compare bits, because NaN differs from itself
        differs = (earlier.view(torch.uint8) != later.view(torch.uint8)).any(dim=1)
        ids.append(here[differs])
        rows.append(later[differs])
    changed, order = torch.cat(ids).sort()
    return {"ids": changed, "rows": torch.cat(rows)[order]} if len(changed) else None


def _side_by_side(before: Tensor | StoredTensor, after: Tensor | StoredTensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield ids and the rows of both, part by part."""
    if isinstance(before, StoredTensor) and isinstance(after, StoredTensor) and before.order == after.order:
        for (ids, earlier), (_, later) in zip(before.rows(), after.rows()):
            yield ids, earlier, later
    elif isinstance(after, StoredTensor):
        whole = before.whole() if isinstance(before, StoredTensor) else before
        for ids, later in after.rows():
            yield ids, whole[ids], later
    elif isinstance(before, StoredTensor):
        for ids, later, earlier in _side_by_side(after, before):
            yield ids, earlier, later
    else:
        for ids in torch.arange(len(after)).split(_ROWS_AT_ONCE):
            yield ids, before[ids], after[ids]


def _save(checkpoint: Mapping[str, Any], file: IO[bytes]) -> None:
    stored = _FromFolder()
    single_file.save(pytree.tree_map_only(StoredTensor, stored.defer, dict(checkpoint)), file, stored)


class _FromFolder(Deferral):
    def __init__(self) -> None:
        super().__init__()
        self._stored: list[StoredTensor] = []
        self._known: dict[str, DeferredTensor] = {}

    def defer(self, stored: StoredTensor) -> DeferredTensor:
        """Return the placeholder of a tensor; a tensor with two names has one."""
        if stored.name not in self._known:
            self._stored.append(stored)
            self._known[stored.name] = self.stand_in((stored.name,), tuple(stored.shape), stored.dtype)
        return self._known[stored.name]

    @override
    def fetch(self, number: int) -> Tensor:
        return self._stored[number].whole()
