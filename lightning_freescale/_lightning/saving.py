"""What a strategy must know of how Lightning saves checkpoints, and has no hook for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden


def around_save_checkpoint(trainer: Trainer, around: Callable[[Any], AbstractContextManager[None]]) -> None:
    """Let ``trainer.save_checkpoint(path)`` run inside the context ``around(path)``, also the collection of what is saved.

    The strategy is asked for states before it learns that they are to be saved, so the method is replaced on this instance.
    """
    if "save_checkpoint" in vars(trainer):
        return
    save = trainer.save_checkpoint

    def save_inside(filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        with around(filepath):
            save(filepath, weights_only, storage_options)

    trainer.save_checkpoint = save_inside  # type: ignore[method-assign]


def is_local(checkpoint_io: CheckpointIO, path: Any) -> bool:
    """Whether checkpoints are ordinary files of this host, and not given to a plugin or to a remote file system."""
    return type(checkpoint_io) is TorchCheckpointIO and isinstance(url_to_fs(str(path))[0], LocalFileSystem)


def is_last(path: Path, trainer: Trainer) -> bool:
    """Whether ``ckpt_path="last"`` may have led to this checkpoint: it is named as what a ``ModelCheckpoint`` saves last."""
    savers = (each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint))
    return any(path.name.startswith(saver.CHECKPOINT_NAME_LAST) for saver in savers)


def warn_of_what_is_missing(checkpoint: Mapping[str, Any], key: str, trainer: Trainer) -> None:
    """Warn where a fit resumes from a checkpoint without the data module's state, or without the strategy's own, by its key."""
    if trainer.state.fn != TrainerFn.FITTING or "optimizer_states" not in checkpoint:
        return
    data: Any = getattr(trainer, "datamodule", None)
    if data is not None and is_overridden("state_dict", data) and type(data).__qualname__ not in checkpoint:
        rank_zero_warn(
            f"the checkpoint has no state of {type(data).__qualname__}: this run's data starts at the beginning of an epoch, "
            "also if the checkpoint was written inside of one, so that samples may come twice"
        )
    if key not in checkpoint:
        rank_zero_warn(
            "the checkpoint was not written by strategy 'freescale': dropout and other random draws go on from this run's seed"
        )
