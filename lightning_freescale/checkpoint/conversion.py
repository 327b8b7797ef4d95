"""Read checkpoints, check that they are complete, convert them between a folder and one file, and compare them."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryFile
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_freescale._runtime.error_text import a, error_text
from lightning_freescale._runtime.object_gather import gather_objects, together
from lightning_freescale.checkpoint import other_programs, remote_files, sharded_folder, single_file
from lightning_freescale.checkpoint.held_files import MANIFEST, VERSION, WHOLE
from lightning_freescale.checkpoint.remote_files import Location, files_of
from lightning_freescale.checkpoint.sharded_folder import StoredTensor
from lightning_freescale.checkpoint.spread_tensors import Deferral, DeferredTensor, Piece, SpreadTensors
from lightning_freescale.embeddings.row_order import RowOrder

_ROWS_AT_ONCE = 1 << 18
_MISSING = "it does not exist"
_UNREADABLE = "unreadable: "
_ATTEMPTS = 20

T = TypeVar("T")


class Opened:
    """A checkpoint whose files are held open, so that another job can replace it before and while it is read."""

    def __init__(self, path: Location) -> None:
        self.path, self._files = path, files_of(path)
        self.identity, self.is_folder = self._files.identity, self._files.is_folder
        self.is_sharded = self.is_folder and (self._files / MANIFEST).is_file()

    @property
    def file(self) -> Path:
        """The path of the open file, valid in this process, of a checkpoint in one file."""
        return self._files / WHOLE

    def damage(self, rank: int, ranks: int) -> str:
        """Return a description of the damage to this rank's share of the contents; empty if there is none."""
        if self.is_folder:
            return sharded_folder.damage(self._files, rank, ranks) if self.is_sharded else other_programs.damage(self._files)
        return single_file.damage(self.file, rank, ranks)

    def read(self, weights_only: bool | None) -> Any:
        """Return the contents; large tensors are read when they are used."""
        if self.is_folder:
            return sharded_folder.read(self._files, weights_only) if self.is_sharded else other_programs.read(self._files)
        return single_file.read(self.file, weights_only)


def opened(path: Any, *, together: bool) -> Opened:
    """Open a checkpoint, and check by its checksums that it is complete.

    If ``together``, the call is collective: all ranks open the same contents, each checks a share, and all raise.

    Raises:
        ValueError: it is damaged or incomplete.
        OSError: it does not exist, or a rank cannot read it.
    """
    path = remote_files.located(path)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if together and dist.is_initialized() else (1, 0)
    for attempt in range(_ATTEMPTS):
        checkpoint = _tried(lambda: Opened(path))
        mine = checkpoint.identity if isinstance(checkpoint, Opened) else checkpoint
        identities = [mine] if ranks == 1 else gather_objects(mine)
        if len(set(identities)) == 1 or any(str(each).startswith(_UNREADABLE) for each in identities):
            break
        time.sleep(0.01 * attempt)  # another job has replaced the checkpoint meanwhile
    reason = checkpoint if isinstance(checkpoint, str) else _tried(lambda: checkpoint.damage(rank, ranks))
    if not reason and mine != identities[0]:
        reason = "it reads other contents than rank 0. Another job writes this checkpoint, or the hosts share no file system"
    reasons = [reason] if ranks == 1 else gather_objects(reason)
    _refuse(path, reasons)
    assert isinstance(checkpoint, Opened)
    return checkpoint


def _refuse(path: Location, reasons: list[str]) -> None:
    if set(reasons) == {_MISSING}:
        raise FileNotFoundError(f"the checkpoint {path} does not exist")
    found = {reason: rank for rank, reason in reversed(list(enumerate(reasons))) if reason}
    unreadable = {reason.removeprefix(_UNREADABLE): found[reason] for reason in found if reason.startswith(_UNREADABLE)}
    listed = "; ".join(f"rank {rank}: {reason}" for reason, rank in (unreadable or found).items())
    if unreadable:
        raise OSError(f"the checkpoint {path} could not be read: {listed}. Nothing was loaded.")
    if found:
        raise ValueError(
            f"the checkpoint {path} is damaged or incomplete ({listed}). Nothing was loaded. Resume from an earlier checkpoint."
        )


def _tried(do: Callable[[], T]) -> T | str:
    try:
        return do()
    except (FileNotFoundError, NotADirectoryError):
        return _MISSING
    except Exception as error:  # file systems raise errors of many types
        full = isinstance(error, OSError) and error.errno == errno.EMFILE
        advice = ". Raise ulimit -n above the number of files of the checkpoint, which stay open" if full else ""
        return f"{_UNREADABLE}{error_text(error)}{advice}"


def newest_other_checkpoint(path: Any) -> Opened | None:
    """Open the newest other complete checkpoint in the folder of ``path``; return None if there is none. Collective."""
    group = dist.group.WORLD  # None in a process without other ranks
    find = partial(remote_files.others_beside, path) if group is None or group.rank() == 0 else None
    for other in together(find, f"the other checkpoints beside {path} could not be listed", group)[0]:
        with suppress(ValueError, OSError):
            return opened(other, together=True)
    return None


def read(checkpoint: Opened, weights_only: bool | None) -> dict[str, Any]:
    """Read a checkpoint of the Trainer or of another program; large tensors are read when they are used."""
    path = checkpoint.path
    try:
        found = checkpoint.read(weights_only)
        if not isinstance(found, dict):
            raise ValueError(f"{path} contains {a(type(found))}. Pass a checkpoint or a state dict.")
        if VERSION not in found and not checkpoint.is_sharded:
            found = other_programs.as_checkpoint(found, path, checkpoint.is_folder)
        if "state_dict" not in found:
            raise ValueError(f"{path} is not a checkpoint of the Trainer: it has no state_dict.")
    except UnpicklingError as error:
        if "ShardedTensor" in str(error):
            raise ValueError(
                f"{path} was written by torch.save on one rank, which has only its own rows of a ShardedTensor. Save with "
                "torch.distributed.checkpoint.save, which writes the rows of all ranks."
            ) from error
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} contains other objects than tensors and numbers ({reason}). Reading them may run code. If you trust the "
            "file, use trainer.fit(..., weights_only=False), torch.serialization.add_safe_globals with its classes, or --trust "
            "on the command line."
        ) from error
    return found


def read_checkpoint(path: Any, weights_only: bool = True) -> dict[str, Any]:
    """Check and read a checkpoint, a file or a folder; large tensors are read when they are used.

    Raises:
        ValueError: it is damaged, incomplete or not a checkpoint, or ``weights_only`` is set and it contains other objects.
        OSError: it does not exist.
    """
    return read(opened(path, together=False), weights_only)  # other ranks of a run may not call this function


def write_file(checkpoint: Mapping[str, Any], path: Location) -> None:
    """Write a result of :func:`read_checkpoint`, or a part of it, to one file, table by table."""
    with remote_files.replacing(path) as file:
        _save(checkpoint, file)


def write_folder(checkpoint: Mapping[str, Any], folder: Location) -> None:
    """Write a result of :func:`read_checkpoint` to a folder."""
    held: list[SpreadTensors] = []
    names: dict[int, DeferredTensor] = {}

    def deferred(whole: Tensor) -> Tensor:
        if whole.dim() != 2 or whole.nbytes < sharded_folder.LARGE:
            return whole
        address = whole.data_ptr()  # a table with two names is one tensor
        if address not in names:
            rows, columns = whole.shape
            place = slice(0, rows), slice(0, columns)
            piece = Piece((f"tensor {len(names)}",), (rows, columns), whole.dtype, place, RowOrder(rows))
            held.append(SpreadTensors([(piece, whole)], None, whole.device))
            names[address] = DeferredTensor.placeholder(piece.key, piece.shape, piece.dtype)
        return names[address]

    whole = sharded_folder.materialized(dict(checkpoint))
    sharded_folder.write(pytree.tree_map_only(Tensor, deferred, whole), folder, held, None)


def open_checkpoint(path: str | Path, weights_only: bool = True) -> IO[bytes]:
    """Open a single or sharded checkpoint as one ordinary file, for ``load_from_checkpoint`` of the plain module.

    Args:
        path: a file or a folder.
        weights_only: whether to refuse a checkpoint that contains other objects than tensors and numbers. Reading such a
            checkpoint may run code.

    Returns:
        A file that is deleted when it is closed. It needs the disk space of a whole checkpoint for temporary files.

    Raises:
        ValueError: it is damaged, incomplete or not a checkpoint, or ``weights_only`` is set and it contains other objects.
        OSError: it does not exist.
    """
    checkpoint = opened(path, together=False)
    if not checkpoint.is_folder:
        return open(checkpoint.file, "rb")
    file: Any = TemporaryFile()  # noqa: SIM115 (the caller closes it)
    _save(read(checkpoint, weights_only), file)
    file.seek(0)
    return file


def changed_rows(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return the table rows that differ between two checkpoints, to update a server that has the old ones.

    Args:
        old: a result of :func:`read_checkpoint`.
        new: the result for a later checkpoint of the same module.

    Returns:
        For each matrix of the state dict that differs, by name: ``ids``, int64 of shape ``[changed]``, ascending, and ``rows``
        of the new checkpoint, shape ``[changed, dim]``.

    Raises:
        ValueError: the checkpoints have different modules.
    """
    before, after = old["state_dict"], new["state_dict"]
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        raise ValueError(f"the checkpoints have different modules: only one of them has {odd}")
    found = {}
    for name, later in after.items():
        if len(later.shape) != 2:
            continue
        if before[name].shape != later.shape:
            raise ValueError(
                f"the checkpoints have different modules: {name} has shape {tuple(before[name].shape)} in the first and "
                f"{tuple(later.shape)} in the second"
            )
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
    """Yield parts of the ids with the rows of both tensors."""
    if isinstance(before, StoredTensor) and isinstance(after, StoredTensor) and before.order == after.order:
        bounds = before.bounds() | after.bounds()  # folders of different numbers of ranks have different parts
        for (ids, earlier), (_, later) in zip(before.rows(bounds=bounds), after.rows(bounds=bounds), strict=True):
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


def _save(checkpoint: Mapping[str, Any], file: Any) -> None:
    stored = _FromFolder()
    single_file.save(pytree.tree_map_only(StoredTensor, stored.defer, dict(checkpoint)), file, stored)


class _FromFolder(Deferral):
    def __init__(self) -> None:
        super().__init__()
        self._stored: list[StoredTensor] = []
        self._known: dict[str, DeferredTensor] = {}

    def defer(self, stored: StoredTensor) -> DeferredTensor:
        if stored.name not in self._known:  # a tensor with two names has one placeholder
            self._stored.append(stored)
            self._known[stored.name] = self.new_placeholder((stored.name,), tuple(stored.shape), stored.dtype)
        return self._known[stored.name]

    @override
    def fetch(self, number: int) -> Tensor:
        return self._stored[number].whole()
