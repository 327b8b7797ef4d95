"""Checkpoints outside of a run, in one process: from a folder to one file and back, and what has changed between two."""

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
"""Bytes from which a matrix is a tensor of its own in a folder; what is smaller is not worth it."""
_ROWS_AT_ONCE = 1 << 18


def read_checkpoint(path: Path, weights_only: bool = True) -> dict[str, Any]:
    """Return a checkpoint, a file or a folder, whose large tensors are read where they are used.

    Raises:
        ValueError: it is damaged, incomplete, or no checkpoint; or holds more than tensors and numbers, and ``weights_only``.
        OSError: it is not there.
    """
    check(path, together=False)  # in a run, the other ranks may be elsewhere
    return read(path, weights_only)


def write_file(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write what :func:`read_checkpoint` returned, or a part of it, to one file, one table after the other."""
    with single_file.replacing(path) as file:
        _save(checkpoint, file)


def write_folder(checkpoint: Mapping[str, Any], folder: Path) -> None:
    """Write what :func:`read_checkpoint` returned from a file to a folder."""
    held: list[SpreadTensors] = []
    names: dict[int, DeferredTensor] = {}

    def deferred(whole: Tensor) -> Tensor:
        if whole.dim() != 2 or whole.nbytes < _LARGE:
            return whole
        address = whole.data_ptr()  # of a table that has two names there is one
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
        weights_only: refuse what is more than tensors and numbers, and would run code to be read.

    Returns:
        A file that is gone when it is closed; on the disk of temporary files it takes the room of a whole checkpoint.

    Raises:
        ValueError: it is damaged, incomplete, or no checkpoint; or holds more than tensors and numbers, and ``weights_only``.
        OSError: it is not there.
    """
    if not Path(path).is_dir():
        return open(path, "rb")
    file: Any = TemporaryFile()  # noqa: SIM115 (the caller closes it)
    _save(read_checkpoint(Path(path), weights_only), file)
    file.seek(0)
    return file


def changed_rows(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return the rows of tables that differ between two checkpoints, for who serves them and holds the old one.

    Args:
        old: what :func:`read_checkpoint` returned.
        new: the same, of a later checkpoint of the same module.

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
        # as bits: a row of NaN has not changed
        differs = (earlier.view(torch.uint8) != later.view(torch.uint8)).any(dim=1)
        ids.append(here[differs])
        rows.append(later[differs])
    changed, order = torch.cat(ids).sort()
    return {"ids": changed, "rows": torch.cat(rows)[order]} if len(changed) else None


def _side_by_side(before: Tensor | StoredTensor, after: Tensor | StoredTensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the ids of some rows, and these rows of either."""
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
        """Return what stands for a tensor; of one that has two names there is one."""
        if stored.name not in self._known:
            self._stored.append(stored)
            self._known[stored.name] = self.stand_in((stored.name,), tuple(stored.shape), stored.dtype)
        return self._known[stored.name]

    @override
    def fetch(self, number: int) -> Tensor:
        return self._stored[number].whole()
