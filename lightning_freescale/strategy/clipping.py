"""Gradient clipping of a Trainer with sharded tables, as of the unsharded module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_freescale._lightning.loops import Trainer, is_overridden
from lightning_freescale.profiling.recording.observed_work import replaced
from lightning_freescale.training.clipping import JointClipping

if TYPE_CHECKING:
    from lightning_freescale.embeddings.collections import Collection
    from lightning_freescale.embeddings.optimizer import TableOptimizer
    from lightning_freescale.training.table_step import TableStep

_WAY = "Pass Trainer(gradient_clip_val=...), or call self.clip_gradients(...) in configure_gradient_clipping"


def clip_options(trainer: Trainer, optimizers: Mapping[str, TableOptimizer]) -> dict[str, Any]:
    """Return how the overlap engine has to clip tables with these optimizers: ``clip_value`` or ``hold_gradients``, or neither.

    By value every row can be clipped by itself; by norm, or as the module likes, all gradients have to be known first.
    """
    clipping = _clipping(trainer)
    if not clipping or all(optimizer.group is None for optimizer in optimizers.values()):
        return {}
    by_value = clipping.startswith("Trainer(") and trainer.gradient_clip_algorithm == "value"
    return {"clip_value": trainer.gradient_clip_val} if by_value else {"hold_gradients": True}


def refuse_clipping(trainer: Trainer, plain: Iterable[Collection], optimizers: Mapping[str, TableOptimizer]) -> None:
    """Refuse clipping where TorchRec updates the collections ``plain`` during backward, by a ValueError.

    Tables that no parameter group holds do not count: torch clips what the optimizer holds.
    """
    held = {key for key, optimizer in optimizers.items() if optimizer.group is not None}
    paths = [each.path for each in plain if any(table.key in held for table in each.tables)]
    if paths and (clipping := _clipping(trainer)):
        raise ValueError(
            f"{clipping}: collections {paths} are updated during backward, so their gradients are gone before they could be "
            "clipped; only those can be clipped whose exchange is overlapped (no managed collisions, no "
            "FreeScaleStrategy(exchange='torchrec')). Do not clip"
        )


def _clipping(trainer: Trainer) -> str:
    """Return what clips gradients; empty if nothing does."""
    module = trainer.lightning_module
    if is_overridden("configure_gradient_clipping", module):
        return f"{type(module).__name__}.configure_gradient_clipping"
    limit = trainer.gradient_clip_val
    return f"Trainer(gradient_clip_val={limit})" if limit and limit > 0 else ""


class TableClipping:
    """Clips what tables and dense part have in common, in place of the precision plugin's methods.

    Args:
        trainer: the Trainer.
        step: has the gradients of the tables.
    """

    def __init__(self, trainer: Trainer, step: TableStep) -> None:
        self._trainer, self._plugin, self._step = trainer, trainer.precision_plugin, step
        self._joint = JointClipping(step, lambda: trainer.optimizers[0], _WAY)

    def start_batch(self) -> None:
        """Check again what callbacks may have changed.

        Raises:
            ValueError: gradients cannot be clipped so.
        """
        trainer, step = self._trainer, self._step
        value = None if step.engine is None else step.engine.clip_value
        if step.plain and step.groups is not None:
            refuse_clipping(trainer, step.plain, step.groups.optimizers)
        if value is not None and (value, "value") != (trainer.gradient_clip_val, trainer.gradient_clip_algorithm):
            raise ValueError(
                f"Trainer(gradient_clip_val={value}, gradient_clip_algorithm='value') was changed during training, to "
                f"gradient_clip_val={trainer.gradient_clip_val} and gradient_clip_algorithm={trainer.gradient_clip_algorithm}: "
                "leave it, or call self.clip_gradients(...) in configure_gradient_clipping, with what you like"
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Clip, and check torch's functions, meanwhile."""
        clip_dense_by_value, clip_dense_by_norm = self._plugin.clip_grad_by_value, self._plugin.clip_grad_by_norm
        joint = self._joint

        def by_value(optimizer: Optimizer, clip_val: float) -> None:
            with joint.exempt():
                if joint.tables():
                    joint.tables_by_value(clip_val, _not_held("value", clip_val))
                clip_dense_by_value(optimizer, clip_val)

        def by_norm(optimizer: Optimizer, clip_val: float) -> None:
            with joint.exempt():
                if joint.tables():
                    joint.by_norm(list(self._plugin.main_params(optimizer)), clip_val, _not_held("norm", clip_val))
                else:
                    clip_dense_by_norm(optimizer, clip_val)

        with replaced(self._plugin, {"clip_grad_by_value": by_value, "clip_grad_by_norm": by_norm}), joint.checking_torch():
            yield


def _not_held(algorithm: str, clip_val: float) -> str:
    return (
        f"clip_gradients(gradient_clip_val={clip_val}, gradient_clip_algorithm={algorithm!r}): the gradients of the embedding "
        f"tables are not kept until here. {_WAY}, in steps that update"
    )
