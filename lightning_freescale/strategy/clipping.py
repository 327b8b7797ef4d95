"""Gradient clipping of a Trainer over sharded tables and dense parameters, as in the unsharded module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_freescale._lightning.loops import Trainer, is_overridden
from lightning_freescale._runtime.attributes import replaced
from lightning_freescale.training.clipping import JointClipping

if TYPE_CHECKING:
    from lightning_freescale.embeddings.collections import Collection
    from lightning_freescale.embeddings.optimizer import TableOptimizer
    from lightning_freescale.training.table_step import TableStep

_WAY = "Pass Trainer(gradient_clip_val=...), or call self.clip_gradients(...) in configure_gradient_clipping"


def clip_options(trainer: Trainer, optimizers: Mapping[str, TableOptimizer]) -> dict[str, Any]:
    """Return the option of the overlap engine that clips tables with these optimizers, or an empty dict.

    Clipping by value needs one row at a time (``clip_value``). Clipping by norm, or by the module's own hook, needs all
    gradients first (``hold_gradients``).
    """
    clipping = _clipping(trainer)
    if not clipping or all(optimizer.group is None for optimizer in optimizers.values()):
        return {}
    by_value = clipping.startswith("Trainer(") and trainer.gradient_clip_algorithm == "value"
    return {"clip_value": trainer.gradient_clip_val} if by_value else {"hold_gradients": True}


def refuse_clipping(trainer: Trainer, plain: Iterable[Collection], optimizers: Mapping[str, TableOptimizer]) -> None:
    """Raise a ValueError if gradients are clipped that TorchRec applies during backward, to the collections ``plain``.

    Tables outside of the optimizer's parameter groups are ignored, because torch clips what the optimizer holds.
    """
    held = {key for key, optimizer in optimizers.items() if optimizer.group is not None}
    paths = [each.path for each in plain if any(table.key in held for table in each.tables)]
    if paths and (clipping := _clipping(trainer)):
        raise ValueError(
            f"{clipping}: collections {paths} are updated during backward, before their gradients could be clipped. Clipping "
            "needs an overlapped exchange (no managed collisions, no FreeScaleStrategy(overlap='torchrec')). Otherwise do "
            "not clip"
        )


def _clipping(trainer: Trainer) -> str:
    """Return the setting or hook that clips gradients; empty if there is none."""
    module = trainer.lightning_module
    if is_overridden("configure_gradient_clipping", module):
        return f"{type(module).__name__}.configure_gradient_clipping"
    limit = trainer.gradient_clip_val
    return f"Trainer(gradient_clip_val={limit})" if limit and limit > 0 else ""


class TableClipping:
    """Clips tables and dense parameters together, in place of the methods of the precision plugin."""

    def __init__(self, trainer: Trainer, step: TableStep) -> None:
        self._trainer, self._plugin, self._step = trainer, trainer.precision_plugin, step
        self._joint = JointClipping(step, lambda: trainer.optimizers[0], _WAY)

    def start_batch(self) -> None:
        """Raise a ValueError if a callback has changed clipping to a setting that is not supported."""
        trainer, step = self._trainer, self._step
        value = None if step.engine is None else step.engine.clip_value
        if step.plain and step.groups is not None:
            refuse_clipping(trainer, step.plain, step.groups.optimizers)
        if value is not None and (value, "value") != (trainer.gradient_clip_val, trainer.gradient_clip_algorithm):
            raise ValueError(
                f"Trainer(gradient_clip_val={value}, gradient_clip_algorithm='value') was changed during training to "
                f"gradient_clip_val={trainer.gradient_clip_val} and gradient_clip_algorithm={trainer.gradient_clip_algorithm}. "
                "Keep the setting, or call self.clip_gradients(...) in configure_gradient_clipping with any setting"
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Clip in the block, and check calls of torch's own clipping functions."""
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
        f"tables are no longer available. {_WAY}, in steps that update"
    )
