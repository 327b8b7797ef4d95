"""Clip the gradients of the dense part and of the sharded tables together, as for the unsharded module."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_freescale._runtime.attributes import replaced

if TYPE_CHECKING:
    from lightning_freescale.training.table_step import TableStep

_TORCHS = (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_, torch.nn.utils.clip_grads_with_norm_)
_checks: list[WeakMethod[Any]] = []
"""The checks of all runs. They are weak, because a loop over Fabric has no end at which its check could be removed."""
_patches = ExitStack()


class JointClipping:
    """Clips the gradients of the dense part and of the tables together.

    The gradients of a table are held by the owners of its rows instead of a parameter's ``grad``, so torch's functions would
    miss them. These functions raise an error if they would have clipped tables of the unsharded module. The error ends with
    ``way``, how to clip both parts.
    """

    def __init__(self, step: TableStep, optimizer: Callable[[], Optimizer], way: str) -> None:
        self._step, self._optimizer, self._way = step, optimizer, way
        self._clipping = False

    def by_norm(
        self, parameters: list[Tensor], limit: float, not_held: str, check: Callable[[list[Tensor]], Any] | None = None
    ) -> Tensor:
        """Clip by the 2-norm of all gradients, and return it. ``check`` is called with the norm before.

        Raise a ValueError with the text ``not_held`` if the gradients of the tables are not held.
        """
        engine = self._step.engine
        if engine is None or not engine.holds_gradients:
            raise ValueError(not_held)
        engine.end_backward()
        dense = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        square_sum = engine.square_sum()
        total = (square_sum + dense.to(square_sum).square()).sqrt().to(dense.dtype)
        if check is not None:
            check([total])
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, total)
        engine.scale_gradients(torch.clamp(limit / (total + 1e-6), max=1.0))  # the factor of torch in the line before
        return total

    def tables_by_value(self, limit: float, not_held: str) -> None:
        """Clamp every element of the tables' gradients. For errors see :meth:`by_norm`."""
        engine = self._step.engine
        if engine is not None and engine.updates and engine.clip_value == limit:
            return  # every update of a row clamps
        if engine is None or not engine.holds_gradients:
            raise ValueError(not_held)
        engine.end_backward()
        engine.clamp_gradients(limit)

    def tables(self) -> list[tuple[Tensor, int]]:
        """Return the tables that the unsharded module's optimizer would clip, each with its parameter group."""
        groups = self._step.groups
        assert groups is not None
        found = [(weight, groups.optimizers.get(key)) for key, weight in groups.weights.items()]
        trained = [(weight, how.group) for weight, how in found if how is not None and weight.requires_grad]
        return [(weight, group) for weight, group in trained if group is not None]

    def exempt(self) -> AbstractContextManager[None]:
        """Allow calls of torch's functions for the dense part in the context."""
        return replaced(self, {"_clipping": True})

    @contextmanager
    def checking_torch(self) -> Iterator[None]:
        """Raise an error in the context if torch's functions would have clipped tables of the unsharded module."""
        if not _checks:
            for function in _TORCHS:
                _patches.enter_context(_checked(function))
        _checks.append(check := WeakMethod(self._refuse_without_tables))
        try:
            yield
        finally:
            _checks.remove(check)
            if not _checks:
                _patches.close()

    def _refuse_without_tables(self, name: str, parameters: list[Tensor], limit: float) -> None:
        if self._clipping or math.isinf(limit):  # an infinite limit only computes the norm
            return
        tables, given = self.tables(), set(map(id, parameters))
        param_groups = self._optimizer().param_groups
        dense = [param_groups[group]["params"] for group in {group for _, group in tables}]  # groups with a table
        whole_group = any(p is parameters or (p and given.issuperset(map(id, p))) for p in dense)
        if whole_group or any(id(weight) in given for weight, _ in tables):
            raise ValueError(
                f"torch's {name}(parameters, {limit}) would clip only the gradients of the dense part. The gradients of the "
                f"embedding tables are on the ranks that own the rows. {self._way}"
            )


@contextmanager
def _checked(function: Any) -> Iterator[None]:
    """Call all checks before one of torch's functions in the context, also for callers that imported it by name."""
    # its decorator keeps the function in a cell of its closure, which all calls read
    cell = dict(zip(function.__code__.co_freevars, function.__closure__))["func"]
    run, signature = cell.cell_contents, inspect.signature(function)

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        parameters = given["parameters"]
        if not isinstance(parameters, list):
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            given["parameters"] = parameters or given["parameters"]  # torch warns about an empty generator
        limit = given["clip_value"] if "clip_value" in given else given["max_norm"]
        for check in filter(None, [held() for held in _checks]):
            check(function.__name__.removeprefix("_"), parameters, float(limit))
        return run(**given)

    cell.cell_contents = checked
    try:
        yield
    finally:
        cell.cell_contents = run
