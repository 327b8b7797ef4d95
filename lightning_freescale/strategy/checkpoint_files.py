"""The checkpoints of the strategy as files: writing them, in the background or not, and reading them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from lightning_freescale._lightning.loops import Trainer, is_last, rank_zero_warn
from lightning_freescale._runtime.object_gather import gather_objects
from lightning_freescale._runtime.worker import WorkerThread

if TYPE_CHECKING:
    from lightning_freescale.checkpoint.spread_tensors import DeferredTensors


class CheckpointFiles:
    """Write checkpoints, in one file or in a folder, and read them.

    Args:
        kind: ``"single"``, ``"sharded"`` or ``"async"``, see :class:`.FreeScaleStrategy`.

    Attributes:
        training: whether steps are under way, beside which a checkpoint may be written.
        weights_only: whether checkpoints may hold tensors and numbers alone, where the call that reads one does not tell.
    """

    def __init__(self, kind: str) -> None:
        self._in_folder, self._in_background = kind != "single", kind == "async"
        self.training = False
        self.weights_only: bool | None = None
        self._group: ProcessGroup | None = None  # of all ranks, for what is on the CPU
        self._deferred: DeferredTensors | None = None  # while a checkpoint is saved
        self._thread = WorkerThread("freescale checkpoint")
        self._under_way: Future[Any] | None = None

    def set_up(self, timeout: timedelta | None) -> None:
        """Make the process group of folders, once. Collective."""
        if self._in_folder and self._group is None:
            self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))

    # -- saving

    @contextmanager
    def deferring(self, local: bool, filepath: Any, device: torch.device) -> Generator[None, None, None]:
        """While a checkpoint is saved to a local file, defer its tables until they are written.

        Raises:
            ValueError: a folder is to be written to a remote file system, or by a plugin.
        """
        if not local and self._in_folder:
            kind = "async" if self._in_background else "sharded"
            raise ValueError(
                f"FreeScaleStrategy(checkpoint={kind!r}) writes folders that all ranks see, by itself: {filepath} is remote, "
                "or a CheckpointIO writes it. Take a mounted path and no CheckpointIO, or checkpoint='single'"
            )
        if local:  # else a plugin writes whole tensors
            self._deferred = checkpoint_module("spread_tensors").DeferredTensors(device)
        try:
            yield
        finally:
            self._deferred = None

    def hold(self) -> dict[str, Any]:
        """Return how tables are held in a state dict: deferred, while a checkpoint is saved, else whole on rank 0."""
        return {} if self._deferred is None else {"hold": self._deferred.defer}

    def write(self, checkpoint: dict[str, Any], path: Path, parameters: Mapping[str, Tensor]) -> bool:
        """Write a checkpoint whose tables are deferred; False if they are not. Collective.

        Args:
            checkpoint: what is to be written.
            path: where.
            parameters: what this rank holds of the module's, live.

        Raises:
            OSError: it cannot be written, on the rank that writes a file.
            RuntimeError: the same on the others; or the one before it could not, in the background.
            ValueError: it would hold what is infinite or not a number; or the one before it, in the background.
        """
        self.finish()
        in_background = self._deferred is not None and self._in_background and self.training
        if not in_background:
            _refuse_non_finite(parameters.items(), path)
        if self._deferred is None:
            return False
        if not self._in_folder:
            checkpoint_module("single_file").write(checkpoint, path, self._deferred)
            return True
        spread = self._deferred.held
        if in_background:  # training changes all of it while it is written
            checkpoint = pytree.tree_map_only(Tensor, _copied, checkpoint)
            spread = [held.copied() for held in spread]
            of_tables = [(piece.key[0], value) for held in spread for piece, value in held.own]
            tables = {name for name, _ in of_tables}
            state = checkpoint["state_dict"]
            dense = [(name, state[name]) for name in parameters if name in state and name not in tables]
            self._under_way = self._thread.submit(self._write_folder, checkpoint, path, spread, dense + of_tables)
        else:
            self._write_folder(checkpoint, path, spread, [])
        return True

    def _write_folder(
        self, checkpoint: dict[str, Any], path: Path, spread: list[Any], copies: list[tuple[str, Tensor]]
    ) -> None:
        _refuse_non_finite(copies, path, self._group)
        checkpoint_module("sharded_folder").write(checkpoint, path, spread, self._group)

    def remove(self, remove: Callable[[], None]) -> None:
        """Remove a checkpoint; if another one is being written, when that is whole."""
        saved = self._under_way
        if saved is None:
            remove()
        else:
            self._thread.submit(lambda: None if saved.exception() else remove())

    def finish(self) -> None:
        """Wait until what is written in the background is whole.

        Raises:
            RuntimeError: it could not be written.
            ValueError: it would hold what is infinite or not a number.
        """
        saved, self._under_way = self._under_way, None
        if saved is not None:
            saved.result()

    def abandon(self) -> None:
        """Let go of what is written in the background: training has failed, and the others may be gone."""
        self._under_way, self.training = None, False

    # -- loading

    def read(self, path: Path, weights_only: bool | None, trainer: Trainer) -> dict[str, Any]:
        """Read a checkpoint: of tables, each rank reads its own rows when they are loaded. Collective.

        One that a ``ModelCheckpoint`` calls its last, and that is damaged, gives way to the newest whole one beside it.

        Raises:
            FileNotFoundError: it is not there.
            ValueError: it is damaged, or no checkpoint.
        """
        reading = checkpoint_module("conversion")
        try:
            reading.check(path, together=True)
        except ValueError as damage:
            earlier = reading.newest_whole_beside(path) if is_last(path, trainer) else None
            if earlier is None:
                raise
            rank_zero_warn(f"{damage}. This run resumes from {earlier}, the newest whole one beside it")
            path = earlier
        return cast(dict[str, Any], reading.read(path, weights_only))


def _refuse_non_finite(tensors: Iterable[tuple[str, Tensor]], path: Any, group: dist.ProcessGroup | None = None) -> None:
    """Refuse to save numbers that are infinite or none. Collective on ``group``, by default the default group.

    Args:
        tensors: what this rank holds, by name.
        path: of the checkpoint that would be written.
        group: of all ranks.

    Raises:
        ValueError: some rank holds such numbers; on every rank.
    """
    found = {name: None for of_rank in gather_objects(_non_finite(tensors), group) for name in of_rank}
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(
            f"the checkpoint {path} is not written: {', '.join([*found][:3])}{more} have values that are infinite or not a "
            "number. Earlier checkpoints are as they were: resume from one of them, with Trainer(detect_anomaly=True) to see "
            "where it begins"
        )


def _non_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    # both extremes of a tensor with one NaN are NaN
    extremes = ((name, torch.aminmax(t.detach())) for name, t in tensors if t.is_floating_point() and t.numel())
    return [name for name, (low, high) in extremes if not (low.isfinite() & high.isfinite())]


def _copied(tensor: Tensor) -> Tensor:
    return tensor if hasattr(tensor, "key") else tensor.detach().to("cpu", copy=True)


def checkpoint_module(name: str) -> ModuleType:
    """Return a module for checkpoints; it is imported where it is needed because it imports TorchRec."""
    return import_module(f"lightning_freescale.checkpoint.{name}")
