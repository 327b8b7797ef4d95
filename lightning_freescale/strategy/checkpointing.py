"""DDPStrategy whose checkpoints have the format of the unsharded module."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_freescale._lightning.loops import (
    Trainer,
    TrainerFn,
    around_save_checkpoint,
    ended_inside_epoch,
    has_plugin,
    rank_zero_warn,
    reopen_epoch,
    start_next_epoch,
    warn_of_what_is_missing,
)
from lightning_freescale._runtime.attributes import replaced
from lightning_freescale.checkpoint import other_programs, unsharded
from lightning_freescale.checkpoint.held_files import CONVERTED
from lightning_freescale.checkpoint.run_state import (
    gather_accumulated,
    gather_random_states,
    lay_out_buckets,
    noting_order,
    refusing_another_optimizer,
    restore_accumulated,
    set_random_state,
)
from lightning_freescale.checkpoint.sharded_folder import materialized
from lightning_freescale.comm.shared_lane import distrust_lanes
from lightning_freescale.strategy.checkpoint_files import CheckpointFiles
from lightning_freescale.strategy.ddp import TrainerDDP
from lightning_freescale.training.setup import TableStrategy

if TYPE_CHECKING:
    from lightning_freescale.embeddings.parameter_groups import ParameterGroups
    from lightning_freescale.strategy.tuning.autopilot import Autopilot

_EXTRA = "freescale"  # the checkpoint key of state that only this strategy has


class UnshardedCheckpointStrategy(TableStrategy, TrainerDDP):
    """DDPStrategy that saves and loads sharded tables, their optimizer states and the random states of all ranks."""

    def __init__(self, files: CheckpointFiles, **ddp_options: Any) -> None:
        super().__init__(**ddp_options)
        self.files = files
        self.groups: ParameterGroups | None = None  # None outside of a fit
        self.autopilot: Autopilot | None = None  # None outside of a fit, and if there is nothing to choose
        self.chosen_settings: dict[str, Any] = {}  # state of the autopilot in the loaded checkpoint, or after a fit
        self.accumulating = False  # whether no optimizer step follows the current batch or micro-batch
        self.gradients_wait = False  # whether accumulated gradients wait for an optimizer step
        self._extra: dict[str, Any] = {}
        self._random_states: list[dict[str, Any]] = []
        self._restored_gradients: list[dict[str, Any]] = []
        self._bucket_order: list[str] = []  # names of dense parameters, of the last fit
        self._restored_order: list[str] = []
        self._left_in_window = False  # whether the last fit ended between two optimizer steps, which lost its gradients

    def set_up_saving(self, trainer: Trainer) -> None:
        """Make ``trainer.save_checkpoint`` gather each table only when it is written. Collective."""
        around_save_checkpoint(trainer, self._saving)
        self.files.set_up(self.group_timeout)
        self.at_teardown.callback(self.files.tear_down)

    @contextmanager
    def _saving(self, path: Any) -> Generator[None, None, None]:
        with self.reporting(f" while it saved {path}"), self.files.deferring(has_plugin(self.checkpoint_io), path):
            yield

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the unsharded state dict on rank 0, and the dense part on other ranks. Collective.

        While a checkpoint is saved, its tables are :class:`.DeferredTensor` on every rank.
        """
        self.drain()
        state = super().lightning_module_state_dict()
        if self.tables is None:
            return state
        return unsharded.module_state_dict(self.tables, state, **self.files.hold())

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.tables is None:
            super().load_model_state_dict({**checkpoint, "state_dict": materialized(checkpoint["state_dict"])}, strict)
        else:
            with self.writing_tables():
                module: Any = self.lightning_module
                unsharded.load_module_state_dict(module, self.tables, checkpoint["state_dict"], strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the unsharded state dict of the user's optimizer, with tables as in the module's state dict. Collective."""
        if self.table_step is not None:
            self.table_step.count_updates()
        state = super().optimizer_state(optimizer)
        if self.tables is None or self.groups is None:
            return state
        state, self._extra = unsharded.optimizer_state_dict(self.tables, self.groups, state, **self.files.hold())
        return state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if "loops" in checkpoint and ended_inside_epoch(self.trainer):
            reopen_epoch(checkpoint["loops"], self.trainer)
        if "optimizer_states" in checkpoint:
            group = None if self.tables is None else self.tables.group
            checkpoint[_EXTRA] = {**self._extra, "random_states": gather_random_states(self.root_device, group)}
            if self._bucket_order:
                checkpoint[_EXTRA]["bucket_order"] = list(self._bucket_order)
            if chosen := self._chosen_settings():
                checkpoint[_EXTRA]["autopilot"] = chosen
            if accumulated := self._accumulated():
                checkpoint[_EXTRA]["accumulated"] = accumulated
        self._extra = {}
        if storage_options is not None or not self.files.write(checkpoint, filepath, self._own_parameters()):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self.files.remove(partial(super().remove_checkpoint, filepath))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if weights_only is None:
            weights_only = self.files.weights_only
        if not has_plugin(self.checkpoint_io):
            found = self.files.read(checkpoint_path, weights_only, self.trainer)
            if converted := found.get(CONVERTED):
                if converted["left_out"] and self.trainer.state.fn != TrainerFn.FITTING:
                    rank_zero_warn(other_programs.notice(converted, converted["left_out"], fits=False))
                return self._renamed(found, checkpoint_path)
            warn_of_what_is_missing(found, _EXTRA, self.trainer)
            return found
        options = {} if weights_only is None else {"weights_only": weights_only}
        return super().load_checkpoint(checkpoint_path, **options)

    def _renamed(self, found: dict[str, Any], path: Any) -> dict[str, Any]:
        module: Any = self.lightning_module
        names = dict.fromkeys(module.state_dict()) | (self.tables.state_dict_keys() if self.tables is not None else {})
        return other_programs.rename_keys(found, type(module).__name__, [*names], module.strict_loading, path)

    def _accumulated(self) -> list[dict[str, Any]]:
        """Return the gradients accumulated for the next optimizer step; Lightning drops them at the end of an epoch."""
        trainer = self.trainer
        if self._left_in_window:
            rank_zero_warn(
                "this checkpoint has no accumulated gradients, because the fit ended between two optimizer steps of "
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}). A run that resumes from it takes its "
                "first optimizer step with the gradients of the remaining batches only. Save before the fit ends, such as in "
                "on_train_end"
            )
            return []
        epochs: Any = trainer.fit_loop.epoch_progress.current
        # before Lightning 2.6, an epoch that a hook ends early has no last batch
        ended = trainer.is_last_batch or epochs.processed == epochs.started
        wait = self.gradients_wait and (not ended or ended_inside_epoch(trainer))
        return gather_accumulated(wait, trainer.lightning_module, self._sharded_names(), self.engine)

    def _own_parameters(self) -> dict[str, Tensor]:
        """Return this rank's dense parameters and shards, by name."""
        assert self.lightning_module is not None
        sharded = self._sharded_names()
        dense = {name: value for name, value in self.lightning_module.named_parameters() if name not in sharded}
        return dense | {shard.table.key: shard.weight for shard in (self.tables.shards() if self.tables is not None else ())}

    def _sharded_names(self) -> frozenset[str]:
        return frozenset() if self.tables is None else frozenset(self.tables.names_in_module())

    def _chosen_settings(self) -> dict[str, Any]:
        return self.chosen_settings if self.autopilot is None else self.autopilot.state_dict()

    def leave_fit(self) -> None:
        """Discard loaded state that a failed fit did not use, and note whether gradients still wait for a step."""
        self._left_in_window, self.gradients_wait = self._left_in_window or self.gradients_wait, False
        self._restored_gradients, self._random_states, self._restored_order = [], [], []
        self.chosen_settings = self._chosen_settings()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if converted := checkpoint.get(CONVERTED):
            module: Any = self.lightning_module
            states, extra, left_out = other_programs.with_optimizer_states(
                converted, module, self.optimizers, self.tables, self.groups
            )
            checkpoint = {"optimizer_states": states, _EXTRA: extra}
            rank_zero_warn(other_programs.notice(converted, left_out, fits=True))
        extra = checkpoint.get(_EXTRA, {})
        self._random_states, self._restored_gradients = extra.get("random_states", []), extra.get("accumulated", [])
        self._restored_order = extra.get("bucket_order", [])
        self.chosen_settings = extra.get("autopilot", {})
        if self.tables is not None and self.groups is not None:
            full = checkpoint["optimizer_states"][0]
            with self.writing_tables():
                dense = unsharded.load_optimizer_state_dict(self.tables, self.groups, full, extra)
            checkpoint = {"optimizer_states": [dense]}
        # the optimizer must not keep tensors that are mapped from the checkpoint's file
        states = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, materialized(checkpoint["optimizer_states"]))
        with refusing_another_optimizer(self.optimizers):
            super().load_optimizer_state_dict({"optimizer_states": states})

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        self.gradients_wait = self.accumulating
        with noting_order(self.model, self._bucket_order):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self.gradients_wait = False
        return output

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        # Lightning enters this for batches and micro-batches without an optimizer step
        with replaced(self, {"accumulating": True}), super().block_backward_sync():
            yield

    @override
    def on_train_end(self) -> None:
        self.files.finish()
        self.files.training = False

    @override
    def ended_by(self, error: BaseException) -> BaseException:
        self.files.training = False  # what callbacks save now must be complete before the process ends
        return super().ended_by(error)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self.files.abandon()
        distrust_lanes()

    @override
    def on_train_start(self) -> None:
        start_next_epoch(self.trainer)
        self.files.training = True
        # not when the checkpoint is loaded, because Lightning draws random numbers before this hook
        if self._random_states:
            set_random_state(self._random_states, self.root_device)
            self._random_states = []
        self._left_in_window, self.gradients_wait = False, bool(self._restored_gradients)
        laid_out = lay_out_buckets(self.model, self._restored_order)
        self._bucket_order, self._restored_order = self._restored_order if laid_out else [], []
        if self._restored_gradients:
            assert self.model is not None
            ranks, self._restored_gradients = self._restored_gradients, []
            restore_accumulated(ranks, self.trainer.lightning_module, self._sharded_names(), self.model, self.engine)
