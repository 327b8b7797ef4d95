"""DDP whose checkpoints hold sharded tables as if nothing were sharded: one ordinary file."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_freescale._lightning.loops import (
    Trainer,
    around_save_checkpoint,
    ended_inside_epoch,
    is_local,
    rank_zero_warn,
    reopen_epoch,
    warn_of_what_is_missing,
)
from lightning_freescale.checkpoint.run_state import (
    gather_accumulated,
    gather_random_states,
    lay_out_buckets,
    noting_order,
    restore_accumulated,
    set_random_state,
)
from lightning_freescale.strategy.checkpoint_files import CheckpointFiles, checkpoint_module
from lightning_freescale.strategy.ddp import TrainerDDP
from lightning_freescale.training.setup import TableStrategy

if TYPE_CHECKING:
    from lightning_freescale.embeddings.parameter_groups import ParameterGroups
    from lightning_freescale.strategy.tuning.autopilot import Autopilot

_EXTRA = "freescale"
"""Checkpoint key of what an ordinary checkpoint has no place for."""


class UnshardedCheckpointStrategy(TableStrategy, TrainerDDP):
    """DDP that saves and loads sharded tables, their optimizer states and the ranks' random states.

    Attributes:
        files: what writes and reads checkpoints.
        groups: which of the user's parameter groups drives which table, while fitting.
        accumulating: whether no optimizer step follows the batch, or micro-batch, that computes.
        gradients_wait: whether gradients have been accumulated for an optimizer step that is still to come.
        autopilot: what chooses settings by measurement; None outside of a fit, and where nothing is to be chosen.
        chosen_settings: what the autopilot of the checkpoint's run has found; after a fit, of that one.
    """

    def __init__(self, files: CheckpointFiles, **ddp_options: Any) -> None:
        super().__init__(**ddp_options)
        self.files = files
        self.groups: ParameterGroups | None = None
        self.autopilot: Autopilot | None = None
        self.chosen_settings: dict[str, Any] = {}
        self.accumulating = self.gradients_wait = False
        self._extra: dict[str, Any] = {}
        self._random_states: list[dict[str, Any]] = []
        self._restored_gradients: list[dict[str, Any]] = []
        self._bucket_order: list[str] = []  # of the last fit; names of dense parameters
        self._restored_order: list[str] = []
        self._left_in_window = False  # by the last fit, so that what it had accumulated is lost

    def set_up_saving(self, trainer: Trainer) -> None:
        """Have ``trainer.save_checkpoint`` gather a table when it is written, and not before. Collective."""
        around_save_checkpoint(
            trainer, lambda path: self.files.deferring(is_local(self.checkpoint_io, path), path, self.root_device)
        )
        self.files.set_up(self.default_group_timeout)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the unsharded state dict on rank 0, and the dense part on others. Collective.

        While a checkpoint is saved, tables in it are :class:`.DeferredTensor`, on every rank.
        """
        self.drain()
        state = super().lightning_module_state_dict()
        return state if self.tables is None else _unsharded().module_state_dict(self.tables, state, **self.files.hold())

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.tables is None:
            weights = _materialized(checkpoint["state_dict"])
            super().load_model_state_dict({**checkpoint, "state_dict": weights}, strict)
        else:
            with self.writing_tables():
                _unsharded().load_module_state_dict(self.lightning_module, self.tables, checkpoint["state_dict"], strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict that the user's optimizer would have unsharded; tables as in the module's. Collective."""
        if self.table_step is not None:
            self.table_step.count_updates()
        state = super().optimizer_state(optimizer)
        if self.tables is None or self.groups is None:
            return state
        state, self._extra = _unsharded().optimizer_state_dict(self.tables, self.groups, state, **self.files.hold())
        return state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        assert self.lightning_module is not None
        if "loops" in checkpoint and ended_inside_epoch(self.lightning_module.trainer):
            reopen_epoch(checkpoint["loops"], self.lightning_module.trainer)
        if "optimizer_states" in checkpoint:
            checkpoint[_EXTRA] = {**self._extra, "random_states": gather_random_states(self.root_device)}
            if self._bucket_order:
                checkpoint[_EXTRA]["bucket_order"] = list(self._bucket_order)
            if chosen := self._chosen_settings():
                checkpoint[_EXTRA]["autopilot"] = chosen
            if accumulated := self._accumulated():
                checkpoint[_EXTRA]["accumulated"] = accumulated
        self._extra = {}
        if storage_options is not None or not self.files.write(checkpoint, Path(filepath), self._own_parameters()):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self.files.remove(partial(super().remove_checkpoint, filepath))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, see :meth:`.CheckpointFiles.read`."""
        if weights_only is None:
            weights_only = self.files.weights_only
        if is_local(self.checkpoint_io, checkpoint_path):
            assert self.lightning_module is not None
            found = self.files.read(Path(checkpoint_path), weights_only, self.lightning_module.trainer)
            warn_of_what_is_missing(found, _EXTRA, self.lightning_module.trainer)
            return found
        options = {} if weights_only is None else {"weights_only": weights_only}
        return super().load_checkpoint(checkpoint_path, **options)

    def _accumulated(self) -> list[dict[str, Any]]:
        """Return what is accumulated for the next optimizer step; at the end of an epoch Lightning forgets it."""
        module = self.lightning_module
        assert module is not None
        if self._left_in_window:
            rank_zero_warn(
                "this checkpoint is written after a fit that ended between two optimizer steps of "
                f"Trainer(accumulate_grad_batches={module.trainer.accumulate_grad_batches}), and holds no accumulated "
                "gradients: a run that resumes from it takes its first optimizer step with those of the remaining batches "
                "alone. Save before the fit ends, such as in on_train_end"
            )
            return []
        epochs: Any = module.trainer.fit_loop.epoch_progress.current
        # an epoch that a hook cuts short has no last batch before Lightning 2.6
        ended = module.trainer.is_last_batch or epochs.processed == epochs.started
        ended = ended and not ended_inside_epoch(module.trainer)
        wait = self.gradients_wait and not ended
        return gather_accumulated(wait, module, self._sharded_names(), self.engine)

    def _own_parameters(self) -> dict[str, Tensor]:
        """Return what this rank holds of the module's parameters."""
        assert self.lightning_module is not None
        sharded = self._sharded_names()
        dense = {name: value for name, value in self.lightning_module.named_parameters() if name not in sharded}
        return dense | {shard.table.key: shard.weight for shard in (self.tables.shards() if self.tables is not None else ())}

    def _sharded_names(self) -> frozenset[str]:
        return frozenset() if self.tables is None else frozenset(self.tables.names_in_module())

    def _chosen_settings(self) -> dict[str, Any]:
        return self.chosen_settings if self.autopilot is None else self.autopilot.state_dict()

    def leave_fit(self) -> None:
        """Forget what was loaded and not used, because a fit failed, and note whether it ends inside a window."""
        self._left_in_window, self.gradients_wait = self._left_in_window or self.gradients_wait, False
        self._restored_gradients, self._random_states, self._restored_order = [], [], []
        self.chosen_settings = self._chosen_settings()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        extra = checkpoint.get(_EXTRA, {})
        self._random_states, self._restored_gradients = extra.get("random_states", []), extra.get("accumulated", [])
        self._restored_order = extra.get("bucket_order", [])
        self.chosen_settings = extra.get("autopilot", {})
        if self.tables is not None and self.groups is not None:
            full = checkpoint["optimizer_states"][0]
            with self.writing_tables():
                dense = _unsharded().load_optimizer_state_dict(self.tables, self.groups, full, extra)
            checkpoint = {"optimizer_states": [dense]}
        # what the optimizer takes over must not lie in the checkpoint's file
        states = _materialized(checkpoint["optimizer_states"])
        states = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, states)
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
        # entered for batches and micro-batches that no optimizer step follows
        outer, self.accumulating = self.accumulating, True
        try:
            with super().block_backward_sync():
                yield
        finally:
            self.accumulating = outer

    @override
    def on_train_end(self) -> None:
        self.files.finish()
        self.files.training = False

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self.files.abandon()

    @override
    def on_train_start(self) -> None:
        self.files.training = True
        # not where the checkpoint is loaded: what Lightning does until here draws random numbers
        if self._random_states:
            set_random_state(self._random_states, self.root_device)
            self._random_states = []
        self._left_in_window, self.gradients_wait = False, bool(self._restored_gradients)
        laid_out = lay_out_buckets(self.model, self._restored_order)
        self._bucket_order, self._restored_order = self._restored_order if laid_out else [], []
        if self._restored_gradients:
            module, sharded = self.lightning_module, self._sharded_names()
            assert module is not None
            assert self.model is not None
            ranks, self._restored_gradients = self._restored_gradients, []
            restore_accumulated(ranks, module, sharded, self.model, self.engine)


def _unsharded() -> Any:
    return checkpoint_module("unsharded")


def _materialized(tree: Any) -> Any:
    return checkpoint_module("stored_tensors").materialized(tree)
