"""Lightning's names that the package uses. Only this module uses private names of loops and loaders, each with its reason."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any, cast

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.apply_func import _TransferableDataType
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Callback as Callback
from lightning.pytorch import LightningDataModule as LightningDataModule
from lightning.pytorch import LightningModule as LightningModule
from lightning.pytorch import Trainer as Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler as GradientAccumulationScheduler
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning, ModelSummary
from lightning.pytorch.callbacks import StochasticWeightAveraging as StochasticWeightAveraging
from lightning.pytorch.loggers import Logger as Logger
from lightning.pytorch.loggers import MLFlowLogger as MLFlowLogger
from lightning.pytorch.loggers import TensorBoardLogger as TensorBoardLogger
from lightning.pytorch.loggers import WandbLogger as WandbLogger

# the prediction loop reads sample numbers only from this type of sampler
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.plugins import MixedPrecision as MixedPrecision
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PyTorchProfiler as PyTorchProfiler
from lightning.pytorch.strategies import Strategy as Strategy
from lightning.pytorch.trainer.states import TrainerFn as TrainerFn
from lightning.pytorch.utilities import rank_zero_info as rank_zero_info
from lightning.pytorch.utilities import rank_zero_warn as rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden as is_overridden

from lightning_freescale._runtime.attributes import replaced

# moving optimizer states is part of every strategy's set-up, but has no public name
optimizers_to_device = _optimizers_to_device
# the type of everything in a batch that Lightning moves to the device: objects with a method ``to``
Movable = _TransferableDataType


def _inside(around: Callable[[], Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def run_inside(*args: Any, **kwargs: Any) -> Any:
        with around():
            return method(*args, **kwargs)

    return run_inside


def around_validation(trainer: Trainer, around: Callable[[], Any]) -> AbstractContextManager[None]:
    """Run validation between training steps inside the context ``around()``, including the start of its loaders.

    The hooks cover only a part of it, so the method of the loop is replaced on the instance.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    return replaced(loop, {"run": _inside(around, loop.run)})


@contextmanager
def after_evaluation_batches(trainer: Trainer, call: Callable[[], Any]) -> Generator[None, None, None]:
    """Call ``call`` when a loop for validation, test or prediction has run this rank's batches of a loader.

    The hooks are too late, because the loop averages logged values over ranks before them.
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
    """Save checkpoints inside the context ``around()``, including the other ranks' wait for rank 0."""
    return replaced(trainer, {"save_checkpoint": _inside(around, trainer.save_checkpoint)})


def around_summaries(trainer: Trainer, around: Callable[[], Any]) -> ExitStack:
    """Let the callbacks of type ``ModelSummary`` count parameters inside the context ``around()``."""
    stack = ExitStack()
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(each, ModelSummary):
            stack.enter_context(replaced(each, {"on_fit_start": _inside(around, each.on_fit_start)}))
    return stack


def before_batches(trainer: Trainer, begin: Callable[[], Any]) -> AbstractContextManager[None]:
    """Call ``begin`` before the batches of an epoch.

    ``on_train_epoch_start`` is not called if a run resumes inside the epoch.
    """
    loop = trainer.fit_loop
    advance = loop.advance

    def begin_and_advance() -> None:
        begin()
        advance()

    return replaced(loop, {"advance": begin_and_advance})


def leaves_transfer_alone(trainer: Trainer) -> bool:
    """Return True if Lightning alone moves batches to the device, and no hook or plugin changes them on the way."""
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    parts = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    own = any(is_overridden(hook, part) for hook in hooks for part in parts)
    return not own and type(trainer.precision_plugin).convert_input is Precision.convert_input


def reload_train_loader(trainer: Trainer) -> None:
    """Make the fit loop read the training loader again. There is no public way to drop the current one."""
    trainer.fit_loop._combined_loader = None


def weights_only_of_run() -> bool | None:
    """Return ``weights_only`` of the current call, such as ``trainer.fit(..., weights_only=False)``.

    The Trainer does not pass it to a strategy that restores checkpoints after set-up, so it is read from the stack frame.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is Trainer._run.__code__:
            return cast("bool | None", frame.f_locals.get("weights_only"))
        frame = cast(Any, frame.f_back)
    return None


def ended_inside_epoch(trainer: Trainer) -> bool:
    """Return True if ``max_steps``, ``max_time`` or ``should_stop`` has ended the fit inside an epoch.

    Lightning counts that epoch as processed.
    """
    batches, epochs = trainer.fit_loop.epoch_loop.batch_progress, trainer.fit_loop.epoch_progress.current
    ended = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
    begun = epochs.ready > 0 and batches.current.ready > 0
    return ended and begun and cast(Any, epochs).processed == epochs.ready and not batches.is_last_batch


def reopen_epoch(loops: dict[str, Any], trainer: Trainer) -> None:
    """Reset the saved state of the loops to the last batch of an epoch that the end of the fit has cut short.

    A run that resumes then continues inside that epoch. Lightning recognises such a state by counters that it increments later.
    """
    fit: dict[str, Any] = loops["fit_loop"]
    for count in fit["epoch_progress"].values():
        count["processed"] = count["completed"] = count["ready"] - 1
    batches = fit["epoch_loop.batch_progress"]
    for name in ("current", "total"):
        batches[name]["completed"] = batches[name]["processed"] - 1
    if not trainer.fit_loop._should_accumulate():
        fit["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def start_next_epoch(trainer: Trainer) -> None:
    """Start a new epoch if the run resumes from a checkpoint that was saved in ``on_train_batch_end`` of an epoch's last batch.

    Call it in the strategy's ``on_train_start``. Lightning counts the saved epoch as complete, but keeps its batch counters. A
    longer epoch, or one of unknown length, would begin after that many batches, and later checkpoints would have a wrong
    position.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    # before Lightning 2.5.1, loops have no such stage, and repeat the last batch
    if getattr(loop, "restarted_on_train_batch_end", False) and loop.batch_progress.is_last_batch:
        loop.batch_progress.increment_completed()
        loop._batches_that_stepped += 1
        loop.restarting = False
        loop.reset_restart_stage()
        fit.reset_restart_stage()


def command_line() -> Any:
    """Return Lightning's module ``cli``, imported late because the import is slow."""
    return import_module("lightning.pytorch.cli")


# -- checkpoints


def around_save_checkpoint(trainer: Trainer, around: Callable[[Any], AbstractContextManager[None]]) -> None:
    """Run ``trainer.save_checkpoint(path)`` inside the context ``around(path)``.

    The Trainer reads the states of the strategy before it calls the strategy's own method, so the Trainer's method is replaced.
    """
    if "save_checkpoint" in vars(trainer):
        return
    save = trainer.save_checkpoint

    def save_inside(filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        with around(filepath):
            save(filepath, weights_only, storage_options)

    trainer.save_checkpoint = save_inside  # type: ignore[method-assign]


def has_plugin(checkpoint_io: CheckpointIO) -> bool:
    """Return True if a plugin writes checkpoints."""
    return type(checkpoint_io) is not TorchCheckpointIO


def is_last(path: Any, trainer: Trainer) -> bool:
    """Return True if the checkpoint has the name of a last checkpoint of a ``ModelCheckpoint``, as ``ckpt_path="last"`` has."""
    return any(os.path.basename(path).startswith(saver.CHECKPOINT_NAME_LAST) for saver in _savers(trainer))


def pruned_modules(trainer: Trainer) -> set[Any]:
    """Return the modules with parameters that callbacks prune. Lightning lists them in its set-up, without a public name."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return {module for each in callbacks if isinstance(each, ModelPruning) for module, _ in each._parameters_to_prune}


def _savers(trainer: Trainer) -> list[ModelCheckpoint]:
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]


def find_remote_last(trainer: Trainer, manifest: str) -> None:
    """Make ``ckpt_path="last"`` find checkpoints on the file systems of fsspec, which Lightning looks for without the scheme.

    For a folder, the path of its ``manifest`` is returned, because Lightning compares modification times, which folders may not
    have.
    """
    for saver in _savers(trainer):
        if "://" in str(saver.dirpath):
            saver._find_last_checkpoints = partial(_remote_last, saver, manifest)  # type: ignore[method-assign]


def _remote_last(saver: ModelCheckpoint, manifest: str, trainer: Trainer) -> set[str]:
    folder, names = str(saver.dirpath).rstrip("/"), type(saver)._find_last_checkpoints(saver, trainer)
    found = {f"{folder}/{os.path.basename(name)}" for name in names}
    return {f"{path}/{manifest}" if saver._fs.isdir(path) else path for path in found}


def warn_of_what_is_missing(checkpoint: Mapping[str, Any], key: str, trainer: Trainer) -> None:
    """Warn if a fit resumes from a checkpoint without the data module's state, or without ``key``, the strategy's state."""
    if trainer.state.fn != TrainerFn.FITTING or "optimizer_states" not in checkpoint:
        return
    data: Any = getattr(trainer, "datamodule", None)
    if data is not None and is_overridden("state_dict", data) and type(data).__qualname__ not in checkpoint:
        rank_zero_warn(
            f"the checkpoint has no state of {type(data).__qualname__}. The data of this run starts at the beginning of an "
            "epoch. If the checkpoint was written inside an epoch, samples may repeat"
        )
    if key not in checkpoint:
        rank_zero_warn(
            "the checkpoint was not written by strategy 'freescale'. Dropout and other random draws continue from the seed"
        )


# -- loaders


class LoaderWrapper:
    """A wrapper that has all attributes of the wrapped loader; subclasses define the iteration.

    If the loader has ``state_dict`` and ``load_state_dict``, those of ``state_of`` replace them. Attributes in ``own`` are set
    on the wrapper, and all others on the loader.
    """

    def __init__(self, loader: Any, state_of: Any = None, **own: Any) -> None:
        self.__dict__.update(_loader=loader, **own)
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            # on the instance, because a runtime-checkable protocol ignores __getattr__
            shown = loader if state_of is None else state_of
            self.__dict__.update(state_dict=shown.state_dict, load_state_dict=shown.load_state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # copy and pickle read attributes before there is a loader
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_loader"], name, value)  # Lightning sets worker_init_fn and resets _iterator

    def __len__(self) -> int:
        return len(self._loader)


class PredictionLoader(LoaderWrapper):
    """A loader with a :class:`BalancedSampler` of one epoch, whose sample numbers a ``BasePredictionWriter`` gets."""

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
