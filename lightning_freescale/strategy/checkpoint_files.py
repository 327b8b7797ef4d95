"""Checkpoint files of the strategy: write them, also in the background, and read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from lightning_freescale._lightning.ddp import new_gloo_group
from lightning_freescale._lightning.loops import Trainer, is_last, rank_zero_warn
from lightning_freescale._runtime.attributes import replaced
from lightning_freescale._runtime.object_gather import gather_objects
from lightning_freescale._runtime.worker import WorkerThread
from lightning_freescale.checkpoint import conversion, sharded_folder, single_file
from lightning_freescale.checkpoint.held_files import MANIFEST
from lightning_freescale.checkpoint.remote_files import located
from lightning_freescale.checkpoint.spread_tensors import DeferredTensors


class CheckpointFiles:
    """Writes checkpoints to a file or to a folder, and reads them. ``kind`` is ``"single"``, ``"sharded"`` or ``"async"``."""

    def __init__(self, kind: str) -> None:
        self._in_folder, self._in_background = kind != "single", kind == "async"
        self.training = False  # whether training is running, beside which a checkpoint can be written
        self.weights_only: bool | None = None  # the default for calls that read a checkpoint
        self._group: ProcessGroup | None = None  # of all ranks, for data on the CPU
        self._deferred: DeferredTensors | None = None  # while a checkpoint is saved
        self._thread = WorkerThread("freescale checkpoint")
        self._pending: Future[Any] | None = None
        self._removals: list[Future[Any]] = []  # that follow the pending write

    def set_up(self, timeout: timedelta) -> None:
        """Create the process group for the folders of a run. Collective. After the run, folders use the default group."""
        if self._in_folder:
            self._group = new_gloo_group(timeout)

    # -- saving

    def deferring(self, plugin: bool, filepath: Any) -> AbstractContextManager[None]:
        """Defer the tables of a checkpoint in the block until they are written, unless a ``plugin`` writes it."""
        if plugin and self._in_folder:
            kind = "async" if self._in_background else "sharded"
            raise ValueError(
                f"FreeScaleStrategy(checkpoint={kind!r}) writes the folder {filepath} itself, but the strategy has a "
                "CheckpointIO. Use no CheckpointIO, or checkpoint='single'"
            )
        # a plugin writes whole tensors
        deferred = None if plugin else DeferredTensors(f"the checkpoint {filepath} could not be written")
        return replaced(self, {"_deferred": deferred})

    def hold(self) -> dict[str, Any]:
        """Return the option that defers the tables of a state dict while a checkpoint is saved; otherwise an empty dict."""
        return {} if self._deferred is None else {"hold": self._deferred.defer}

    def write(self, checkpoint: dict[str, Any], path: Any, parameters: Mapping[str, Tensor]) -> bool:
        """Write a checkpoint if its tables are deferred, and return whether they are. Collective.

        ``parameters`` are this rank's dense and sharded parameters. An error of the previous write in the background is raised
        here. If a rank cannot write, all ranks raise a RuntimeError.
        """
        self.finish()
        in_background = self._deferred is not None and self._in_background and self.training
        if not in_background:
            _refuse_non_finite(parameters.items(), path, None if self._deferred is None else self._deferred.group)
        if self._deferred is None:
            return False
        path = located(path)
        if not self._in_folder:
            single_file.write(checkpoint, path, self._deferred)
            return True
        spread = self._deferred.held
        if in_background:  # training changes the values while they are written
            checkpoint = pytree.tree_map_only(Tensor, _copied, checkpoint)
            spread = [held.copied() for held in spread]
            of_tables = [(piece.key[0], value) for held in spread for piece, value in held.own]
            tables = {name for name, _ in of_tables}
            state = checkpoint["state_dict"]
            dense = [(name, state[name]) for name in parameters if name in state and name not in tables]
            self._pending = self._thread.submit(_write_folder, checkpoint, path, spread, dense + of_tables, self._group)
        else:
            sharded_folder.write(checkpoint, path, spread, self._group or dist.group.WORLD)
        return True

    def remove(self, remove: Callable[[], None]) -> None:
        """Remove a checkpoint, after a pending write is complete."""
        saved = self._pending
        if saved is None:
            remove()
        else:
            self._removals.append(self._thread.submit(lambda: None if saved.exception() else remove()))

    def finish(self) -> None:
        """Wait for a pending write, and raise its RuntimeError, or its ValueError for non-finite values."""
        saved, self._pending = self._pending, None
        removals, self._removals = self._removals, []
        if saved is not None:
            saved.result()
        for error in filter(None, (removal.exception() for removal in removals)):  # on rank 0 only: the others go on
            rank_zero_warn(f"an earlier checkpoint could not be removed: {error}. Remove it yourself")

    def abandon(self) -> None:
        """Do not wait for a pending write, because training has failed and other ranks may have exited."""
        pending, self._pending, self._removals, self.training = self._pending, None, [], False
        if pending is not None:  # the thread and the group end with the write
            if not pending.done():
                rank_zero_warn(
                    "the last checkpoint is incomplete: training failed while it was written in the background. Earlier "
                    "checkpoints are unchanged. With checkpoint='sharded', a save is complete before training continues"
                )
            thread, self._thread = self._thread, WorkerThread(self._thread.name)
            group, self._group = self._group, None
            thread.submit(dist.destroy_process_group, group)
            thread.stop(timeout=0)

    def tear_down(self) -> None:
        self._thread.stop()
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)

    # -- loading

    def read(self, path: Any, weights_only: bool | None, trainer: Trainer) -> dict[str, Any]:
        """Read a checkpoint. Each rank reads its own rows of the tables later, when they are loaded. Collective.

        If the last checkpoint of a ``ModelCheckpoint`` is damaged, read the newest complete one in the same folder instead.
        """
        path = str(path).removesuffix(f"/{MANIFEST}")  # "last" finds the manifest of a folder on another file system
        try:
            found = conversion.opened(path, together=True)
        except ValueError as damage:
            newest = conversion.newest_other_checkpoint(path) if is_last(path, trainer) else None
            if newest is None:
                raise
            found = newest
            rank_zero_warn(f"{damage}. This run resumes from {found.path}, the newest complete checkpoint in the same folder")
        return conversion.read(found, weights_only)


def _write_folder(
    checkpoint: dict[str, Any], path: Any, spread: list[Any], copies: list[tuple[str, Tensor]], group: ProcessGroup | None
) -> None:
    _refuse_non_finite(copies, path, group)
    sharded_folder.write(checkpoint, path, spread, group)


def _refuse_non_finite(tensors: Iterable[tuple[str, Tensor]], path: Any, group: dist.ProcessGroup | None) -> None:
    """Raise a ValueError on every rank if the named tensors of a rank have non-finite values. Collective on ``group``."""
    # both extremes of a tensor with one NaN are NaN
    extremes = ((name, torch.aminmax(t.detach())) for name, t in tensors if t.is_floating_point() and t.numel())
    mine = [name for name, (low, high) in extremes if not (low.isfinite() & high.isfinite())]
    found = dict.fromkeys(name for of_rank in gather_objects(mine, group) for name in of_rank)
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(
            f"the checkpoint {path} is not written: {', '.join([*found][:3])}{more} have values that are infinite or not a "
            "number. Earlier checkpoints are unchanged. Resume from one of them with Trainer(detect_anomaly=True) to find the "
            "cause"
        )


def _copied(tensor: Tensor) -> Tensor:
    return tensor if hasattr(tensor, "key") else tensor.detach().to("cpu", copy=True)
