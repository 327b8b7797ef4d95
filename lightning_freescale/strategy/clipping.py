"""Gradient clipping over the dense part and the sharded tables together, as the unsharded module has it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_freescale._lightning.loops import Trainer, is_overridden
from lightning_freescale.profiling.recording.observed_work import replaced

if TYPE_CHECKING:
    from lightning_freescale.embeddings.collections import Collection
    from lightning_freescale.embeddings.optimizer import TableOptimizer
    from lightning_freescale.embeddings.overlap import OverlapEngine
    from lightning_freescale.embeddings.parameter_groups import ParameterGroups

_TORCHS = (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_, torch.nn.utils.clip_grads_with_norm_)
_WAY = "Pass Trainer(gradient_clip_val=...), or call self.clip_gradients(...) in configure_gradient_clipping"


def clip_options(trainer: Trainer, optimizers: Mapping[str, TableOptimizer]) -> dict[str, Any]:
    """Return how the overlap engine has to clip tables with these optimizers: ``clip_value`` or ``hold_gradients``, or neither.

    By value every row can be clipped by itself; by norm, or as the module likes, all gradients have to be known first.
    """
    if not any(map(_in_group, optimizers.values())):
        return {}
    if _own_hook(trainer) or (_clips(trainer) and trainer.gradient_clip_algorithm != "value"):
        return {"hold_gradients": True}
    return {"clip_value": trainer.gradient_clip_val} if _clips(trainer) else {}


def refuse_clipping(trainer: Trainer, plain: Iterable[Collection], optimizers: Mapping[str, TableOptimizer]) -> None:
    """Refuse clipping where TorchRec updates the collections ``plain`` during backward, by a ValueError.

    Tables that no parameter group holds do not count: torch clips what the optimizer holds.
    """
    paths = [each.path for each in plain if any(_in_group(optimizers.get(table.key)) for table in each.tables)]
    if paths and (_clips(trainer) or _own_hook(trainer)):
        module = type(trainer.lightning_module).__name__
        own, given = f"{module}.configure_gradient_clipping", f"Trainer(gradient_clip_val={trainer.gradient_clip_val})"
        raise ValueError(
            f"{own if _own_hook(trainer) else given}: collections {paths} are updated during backward, so their gradients are "
            "gone before they could be clipped; only those can be clipped whose exchange is overlapped "
            "(no managed collisions, no FreeScaleStrategy(exchange='torchrec')). Do not clip"
        )


class JointClipping:
    """Clips the gradients of the dense part and of the tables together.

    The gradient of a table is in no parameter's ``grad``: the owners of its rows have it. So torch's own functions would miss
    it; where the unsharded module would have had it among what they are given, they are refused.

    Args:
        groups: which of the optimizer's parameter groups holds which table.
        engine: has their gradients; None without overlap.
        optimizer: returns the user's optimizer.
        way: how to clip both, for errors.
    """

    def __init__(
        self, groups: ParameterGroups, engine: OverlapEngine | None, optimizer: Callable[[], Optimizer], way: str
    ) -> None:
        self._groups, self._engine, self._optimizer, self._way = groups, engine, optimizer, way
        self._clipping = False

    def by_norm(
        self, parameters: list[Tensor], limit: float, not_held: str, check: Callable[[list[Tensor]], Any] | None = None
    ) -> Tensor:
        """Clip by the 2-norm of all gradients, and return it; it goes to ``check`` before.

        Raises:
            ValueError: those of the tables are not kept, which is told as ``not_held``.
        """
        engine = self._engine
        if engine is None or not engine.holds_gradients:
            raise ValueError(not_held)
        engine.end_backward()
        dense = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        square_sum = engine.square_sum()
        total = (square_sum + dense.to(square_sum).square()).sqrt().to(dense.dtype)
        if check is not None:
            check([total])
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, total)
        engine.scale_gradients(torch.clamp(limit / (total + 1e-6), max=1.0))  # as torch does in the line before
        return total

    def tables_by_value(self, limit: float, not_held: str) -> None:
        """Limit every element of the tables' gradients; for errors see :meth:`by_norm`."""
        engine = self._engine
        if engine is not None and engine.updates and engine.clip_value == limit:
            return  # done wherever a row is updated
        if engine is None or not engine.holds_gradients:
            raise ValueError(not_held)
        engine.end_backward()
        engine.clamp_gradients(limit)

    def tables(self) -> list[tuple[Tensor, int]]:
        """Return the tables that the unsharded module's optimizer would clip now, each with its parameter group."""
        found = [(weight, self._groups.optimizers.get(key)) for key, weight in self._groups.weights.items()]
        trained = [(weight, how.group) for weight, how in found if how is not None and weight.requires_grad]
        return [(weight, group) for weight, group in trained if group is not None]

    @contextmanager
    def exempt(self) -> Iterator[None]:
        """Let torch's functions be called for the dense part."""
        self._clipping = True
        try:
            yield
        finally:
            self._clipping = False

    @contextmanager
    def checking_torch(self) -> Iterator[None]:
        """Refuse torch's functions meanwhile where they would have clipped tables in the unsharded module."""
        with ExitStack() as stack:
            for function in _TORCHS:
                stack.enter_context(_checked(function, self._refuse_without_tables))
            yield

    def _refuse_without_tables(self, name: str, parameters: list[Tensor], limit: float) -> None:
        if self._clipping or math.isinf(limit):  # the latter only finds the norm
            return
        tables, given = self.tables(), set(map(id, parameters))
        param_groups = self._optimizer().param_groups
        dense = [param_groups[group]["params"] for group in {group for _, group in tables}]  # the tables were among them
        whole_group = any(p is parameters or (p and given.issuperset(map(id, p))) for p in dense)
        if whole_group or any(id(weight) in given for weight, _ in tables):
            raise ValueError(
                f"torch's {name}(parameters, {limit}) sees the gradients of the dense part alone, those of the "
                f"embedding tables are with the ranks that own the rows. {self._way}"
            )


class TableClipping:
    """Clips what tables and dense part have in common, in place of the precision plugin's methods.

    Args:
        trainer: the Trainer.
        groups: which of the parameter groups holds which table.
        engine: has their gradients; None without overlap.
    """

    def __init__(self, trainer: Trainer, groups: ParameterGroups, engine: OverlapEngine | None) -> None:
        self._trainer, self._plugin, self._groups, self._engine = trainer, trainer.precision_plugin, groups, engine
        self._joint = JointClipping(groups, engine, lambda: trainer.optimizers[0], _WAY)

    def start_batch(self, plain: Iterable[Collection]) -> None:
        """Check again what callbacks may have changed, and ``plain``, the collections that TorchRec updates during backward.

        Raises:
            ValueError: gradients cannot be clipped so.
        """
        trainer, value = self._trainer, None if self._engine is None else self._engine.clip_value
        refuse_clipping(trainer, plain, self._groups.optimizers)
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


def _clips(trainer: Trainer) -> bool:
    return (trainer.gradient_clip_val or 0) > 0


def _own_hook(trainer: Trainer) -> bool:
    return is_overridden("configure_gradient_clipping", trainer.lightning_module)


def _in_group(optimizer: TableOptimizer | None) -> bool:
    return optimizer is not None and optimizer.group is not None


def _not_held(algorithm: str, clip_val: float) -> str:
    return (
        f"clip_gradients(gradient_clip_val={clip_val}, gradient_clip_algorithm={algorithm!r}): the gradients of the embedding "
        f"tables are not kept until here. {_WAY}, in steps that update"
    )


@contextmanager
def _checked(function: Any, check: Callable[[str, list[Tensor], float], None]) -> Iterator[None]:
    """Have ``check`` called before a function of torch's meanwhile, also for those who have imported it by name."""
    # its decorator keeps the function itself in a cell of its closure, which is where all calls come by
    cell = dict(zip(function.__code__.co_freevars, function.__closure__))["func"]
    run, signature = cell.cell_contents, inspect.signature(function)

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        parameters = given["parameters"]
        if not isinstance(parameters, list):
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            given["parameters"] = parameters or given["parameters"]  # torch warns of an empty generator
        limit = given["clip_value"] if "clip_value" in given else given["max_norm"]
        check(function.__name__.removeprefix("_"), parameters, float(limit))
        return run(**given)

    cell.cell_contents = checked
    try:
        yield
    finally:
        cell.cell_contents = run
