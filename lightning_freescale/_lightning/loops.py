"""Lightning's names that the package uses. Private ones stand here alone, each with its reason."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.apply_func import _TransferableDataType
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Callback as Callback
from lightning.pytorch import LightningDataModule as LightningDataModule
from lightning.pytorch import LightningModule as LightningModule
from lightning.pytorch import Trainer as Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler as GradientAccumulationScheduler
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks import StochasticWeightAveraging as StochasticWeightAveraging
from lightning.pytorch.loggers import Logger as Logger
from lightning.pytorch.loggers import MLFlowLogger as MLFlowLogger
from lightning.pytorch.loggers import TensorBoardLogger as TensorBoardLogger
from lightning.pytorch.loggers import WandbLogger as WandbLogger

# a loop of prediction takes the numbers of samples from this kind of sampler alone
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.plugins import MixedPrecision as MixedPrecision
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PyTorchProfiler as PyTorchProfiler
from lightning.pytorch.strategies import Strategy as Strategy
from lightning.pytorch.trainer.states import TrainerFn as TrainerFn
from lightning.pytorch.utilities import rank_zero_info as rank_zero_info
from lightning.pytorch.utilities import rank_zero_warn as rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden as is_overridden

from lightning_freescale.profiling.recording.observed_work import replaced

# moving optimizer states is part of every strategy's set-up, but has no public name
optimizers_to_device = _optimizers_to_device
# whatever Lightning moves to the device in a batch, anything with a method ``to``
Movable = _TransferableDataType


def _inside(around: Callable[[], Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def run_inside(*args: Any, **kwargs: Any) -> Any:
        with around():
            return method(*args, **kwargs)

    return run_inside


def around_validation(trainer: Trainer, around: Callable[[], Any]) -> AbstractContextManager[None]:
    """Let validation between training steps run inside the context ``around()``, its loaders' start included.

    The hooks begin later and end earlier than what it takes, so the loop's method is replaced on this instance.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    return replaced(loop, {"run": _inside(around, loop.run)})


@contextmanager
def after_evaluation_batches(trainer: Trainer, call: Callable[[], Any]) -> Generator[None, None, None]:
    """Call ``call`` when a loop of validation, test or prediction has run this rank's batches of a loader.

    The hooks come later: before them, a loop averages over ranks what the module has logged.
    """
    evaluating = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    ends = [(loop, "_store_dataloader_outputs") for loop in evaluating] + [(trainer.predict_loop, "on_run_end")]

    def run(loop: Any, method: Callable[[], Any]) -> Any:
        result = method()
        if loop.skip:  # this rank has no batches
            call()
        return result

    def end(method: Callable[[], Any]) -> Any:
        call()
        return method()

    with ExitStack() as stack:
        for loop, name in ends:
            methods = {"run": partial(run, loop, loop.run), name: partial(end, getattr(loop, name))}
            stack.enter_context(replaced(loop, methods))
        yield


def around_saving(trainer: Trainer, around: Callable[[], Any]) -> AbstractContextManager[None]:
    """Let the Trainer save checkpoints inside the context ``around()``, the other ranks' wait for the first one included."""
    return replaced(trainer, {"save_checkpoint": _inside(around, trainer.save_checkpoint)})


def before_batches(trainer: Trainer, begin: Callable[[], Any]) -> AbstractContextManager[None]:
    """Call ``begin`` where the loop turns to the batches of an epoch.

    ``on_train_epoch_start`` is not called for an epoch that a run resumes inside of.
    """
    loop = trainer.fit_loop
    advance = loop.advance

    def begin_and_advance() -> None:
        begin()
        advance()

    return replaced(loop, {"advance": begin_and_advance})


def leaves_transfer_alone(trainer: Trainer) -> bool:
    """Whether batches reach the device, and the step, as they come out of the loader, by Lightning's own means."""
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    parts = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    own = any(is_overridden(hook, part) for hook in hooks for part in parts)
    return not own and type(trainer.precision_plugin).convert_input is Precision.convert_input


def reload_train_loader(trainer: Trainer) -> None:
    """Make the fit loop ask for the training loader again although it has one; it has no public way to forget it."""
    trainer.fit_loop._combined_loader = None


def weights_only_of_run() -> bool | None:
    """Return ``weights_only`` of the Trainer's call that is being set up, as of ``trainer.fit(..., weights_only=False)``.

    The Trainer does not pass it on to a strategy that restores checkpoints after its set-up.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is Trainer._run.__code__:
            return cast("bool | None", frame.f_locals.get("weights_only"))
        frame = cast(Any, frame.f_back)
    return None


def ended_inside_epoch(trainer: Trainer) -> bool:
    """Whether the fit has come to its end, by ``max_steps``, ``max_time`` or ``should_stop``, with batches of its epoch left.

    Lightning counts that epoch as processed.
    """
    batches, epochs = trainer.fit_loop.epoch_loop.batch_progress, trainer.fit_loop.epoch_progress.current
    ended = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
    begun = epochs.ready > 0 and batches.current.ready > 0
    return ended and begun and cast(Any, epochs).processed == epochs.ready and not batches.is_last_batch


def reopen_epoch(loops: dict[str, Any], trainer: Trainer) -> None:
    """Make of the loops' state behind an epoch that the end of the fit has cut short what it was behind its last batch.

    So a run that resumes goes on inside that epoch. Lightning knows such a place by the counters that it raises afterwards.
    """
    fit: dict[str, Any] = loops["fit_loop"]
    for count in fit["epoch_progress"].values():
        count["processed"] = count["completed"] = count["ready"] - 1
    batches = fit["epoch_loop.batch_progress"]
    for name in ("current", "total"):
        batches[name]["completed"] = batches[name]["processed"] - 1
    if not trainer.fit_loop._should_accumulate():
        fit["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def command_line() -> Any:
    """Return Lightning's module ``cli``; it is imported where it is needed, because that takes long."""
    return import_module("lightning.pytorch.cli")


# -- checkpoints


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


# -- loaders


class LoaderWrapper:
    """Looks like the loader it wraps; subclasses say how it iterates.

    Args:
        loader: the loader.
        state_of: whose ``state_dict`` and ``load_state_dict`` to show instead of the loader's, if the loader has them.
        own: attributes of the wrapper itself; all others are set on the loader.
    """

    def __init__(self, loader: Any, state_of: Any = None, **own: Any) -> None:
        self.__dict__.update(_loader=loader, **own)
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            # in the instance: a runtime-checkable protocol does not look at __getattr__
            shown = loader if state_of is None else state_of
            self.__dict__.update(state_dict=shown.state_dict, load_state_dict=shown.load_state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # copy and pickle ask before there is a loader
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_loader"], name, value)  # Lightning sets worker_init_fn and resets _iterator

    def __len__(self) -> int:
        return len(self._loader)


class PredictionLoader(LoaderWrapper):
    """A loader whose batches a ``BasePredictionWriter`` gets together with the numbers of their samples.

    Args:
        loader: iterates over the samples that its ``sampler`` plans; a :class:`BalancedSampler` of one epoch.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, batch_sampler=_PlannedSamples(loader.sampler))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class _PlannedSamples(_IndexBatchSamplerWrapper):
    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    @property
    def seen_batch_indices(self) -> Any:  # type: ignore[override]
        return self

    def __len__(self) -> int:
        return len(self._sampler)

    def __getitem__(self, batch: int) -> list[int]:
        samples: list[int] = self._sampler.plan(self._sampler.epoch, batch)[self._sampler.rank].tolist()
        return samples
