"""Follow a loop of the user's over Fabric: its batches, forwards and steps, and what they mean for the sharded tables."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_freescale._lightning.loops import LoaderWrapper, rank_zero_warn
from lightning_freescale.training.lookahead_loader import UNKNOWN

if TYPE_CHECKING:
    from lightning_freescale.training.table_step import TableStep

_EXTRA = "freescale"
"""Key, in an optimizer's state dict, of what an ordinary one has no place for."""
_TABLES = "strategy 'freescale' updates the embedding tables in backward"


class LoopSteps:
    """Follows the loop over one module: forward, backward, optimizer step; or accumulates before the step.

    Args:
        step: the step of the module's tables.
        optimizer: the user's, over what is dense.
        module: the module as DDP has wrapped it; its hooks report forwards.

    Attributes:
        step, optimizer: as given.
        current: the batch that the loop has; None if it did not come out of a loader of ``fabric.setup_dataloaders``.
    """

    def __init__(self, step: TableStep, optimizer: Optimizer, module: nn.Module) -> None:
        self.step, self.optimizer = step, optimizer
        self.current: CurrentBatch | None = None
        self._dense = DenseGradients(p for group in optimizer.param_groups for p in group["params"])
        self._accumulating = False  # inside fabric.no_backward_sync
        self._begun = self._accumulates = False  # a forward whose backward is to come; and whether no update follows it
        self._waiting = False  # gradients that wait for an optimizer step that is to come
        self._split: Any = None
        self._warned = False
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward, always_call=True)
        # Fabric loads into the optimizer by its own method
        optimizer.load_state_dict = self.load_optimizer  # type: ignore[assignment,method-assign]

    # -- checkpoints

    def unsharded_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict that the optimizer would have unsharded, given its own; whole on rank 0. Collective."""
        from lightning_freescale.checkpoint.unsharded import optimizer_state_dict

        assert self.step.groups is not None
        full, extra = optimizer_state_dict(self.step.tables, self.step.groups, state)
        return {**full, _EXTRA: extra}

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Load a state dict of the unsharded optimizer, each rank its part of the tables."""
        from lightning_freescale.checkpoint.unsharded import load_optimizer_state_dict

        assert self.step.groups is not None
        full = {name: value for name, value in state.items() if name != _EXTRA}
        with self.step.writing():
            dense = load_optimizer_state_dict(self.step.tables, self.step.groups, full, state.get(_EXTRA, {}))
        type(self.optimizer).load_state_dict(self.optimizer, dense)

    # -- events of the loop

    @contextmanager
    def accumulating(self, module: nn.Module) -> Iterator[None]:
        """Let forwards and backwards inside add up gradients that no optimizer step follows.

        Raises:
            ValueError: TorchRec updates tables in each backward.
        """
        if plain := [collection.path for collection in self.step.plain]:
            raise ValueError(
                f"fabric.no_backward_sync(model): collections {plain} are updated during backward, so their gradients cannot "
                "be accumulated; only those can that TorchRec does not exchange (exchange='flat', tables "
                "sharded by rows or whole). Use a larger batch"
            )
        outer, self._accumulating = self._accumulating, True
        try:
            with module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext():
                yield
        finally:
            self._accumulating = outer

    def before_forward(self, *_: Any) -> None:
        """Begin a step, unless this is one more forward of the same. A hook of the module."""
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return  # an evaluation; or activation checkpointing computes the forward again
        if not self._begun:
            self._begin()
        if not self._accumulating:
            self._split = self.step.forward()
            self._split.__enter__()

    def after_forward(self, *_: Any) -> None:
        """End what :meth:`before_forward` has entered, also where the forward raised. A hook of the module."""
        split, self._split = self._split, None
        if split is not None:
            split.__exit__(None, None, None)

    def backward(self, run: Callable[[], None]) -> None:
        """Run backward.

        Raises:
            ValueError: what the loop does would give the tables other gradients than the unsharded module's.
        """
        if self.step.update_due:
            raise ValueError(
                f"a second fabric.backward(loss) without optimizer.step() between: {_TABLES}. Add up the losses, or accumulate "
                "within fabric.no_backward_sync(model)"
            )
        if not self._begun:  # of another module
            run()
            return
        if self._accumulating != self._accumulates:
            raise ValueError(
                "model(...) and fabric.backward(loss) were not both inside fabric.no_backward_sync(model): the strategy has to "
                "know before the forward whether optimizer.step() follows. Put both inside"
            )
        self._refuse_other_dense_gradients()
        self.step.end_forward()
        self.step.follow_settings()
        try:
            self.step.backward(run, updates=not self._accumulates)
        except BaseException:
            self.step.update_due = False  # a loop that goes on after the error may call backward again
            raise
        self._begun, self._waiting = False, self._accumulates
        self._dense.note()

    def optimizer_step(self, run: Callable[[], Any]) -> Any:
        """Run an optimizer step, a closure's backward included.

        Raises:
            ValueError: the tables would not do the same.
        """
        if not (self._begun or self.step.update_due or self._waiting):
            self._refuse_other_dense_gradients()
        output = run()
        begun_or_due = self._begun or self.step.update_due
        if self._waiting and not begun_or_due:
            raise ValueError(
                "optimizer.step() after a backward within fabric.no_backward_sync(model): the ranks have not added up its "
                "gradients. Leave the last batch before optimizer.step() out of it: no_backward_sync(model, enabled=not last)"
            )
        if not begun_or_due:
            return output
        if self._begun:  # without a backward
            self.step.end_forward()
        self.step.step_done()
        self._begun = self._waiting = False
        self._dense.note()
        return output

    # -- parts of a step

    def _begin(self) -> None:
        if self.step.update_due:
            raise ValueError(
                f"model(...) between fabric.backward(loss) and optimizer.step(): {_TABLES}, so every backward outside of "
                "fabric.no_backward_sync(model) needs its step, and may not be skipped. Evaluate under torch.no_grad()"
            )
        zeroed = self._waiting and self._dense.since_then == SinceThen.ZEROED
        self._waiting = self._waiting and not zeroed
        batch, following = (None, UNKNOWN) if self.current is None else (self.current.batch, self.current.following)
        if self.current is None and self.step.looks_ahead and not self._warned:
            self._warned = True
            rank_zero_warn(
                "the batch comes from no loader that fabric.setup_dataloaders has returned, so the next one is not known: "
                "the embedding exchange is not overlapped with compute. Iterate over fabric.setup_dataloaders(loader)"
            )
        self.step.start_batch(batch, following, comes_ahead=self.current is not None, restart=not self._waiting)
        self.step.before_forward(batch, updates=not self._accumulating)
        self._begun, self._accumulates = True, self._accumulating
        if zeroed:
            self._dense.note()

    def _refuse_other_dense_gradients(self) -> None:
        """Refuse dense gradients that the tables' cannot be like, by a ValueError."""
        since = self._dense.since_then
        if not self._waiting and since == SinceThen.SAME:
            raise ValueError(
                "the dense gradients are still those of the last optimizer.step(), and those of the embedding tables are gone: "
                "call optimizer.zero_grad() after every optimizer.step()"
            )
        if self._waiting and since in (SinceThen.ZEROED, SinceThen.CHANGED):
            raise ValueError(
                "the dense gradients that wait for optimizer.step() were changed, those of the embedding tables are with the "
                "ranks that own the rows: leave them until the step, or drop all by optimizer.zero_grad() before model(...)"
            )


@dataclass
class CurrentBatch:
    """The batch that the loop has.

    Attributes:
        loader: the loader that has returned it.
        batch: as the loop got it.
        loss_weight: factor for this rank's loss, see :meth:`.BalancedSampler.loss_weight`.
        following: the batch that the loop gets next, or ENDED, or UNKNOWN.
    """

    loader: Any
    batch: Any
    loss_weight: float
    following: Any = UNKNOWN


class HandingLoader(LoaderWrapper):
    """Any iterable of batches, each given to ``take`` on its way to the loop.

    Args:
        loader: the loader; one that looks ahead, or not.
        take: of the batch; returns what the loop gets.
    """

    def __init__(self, loader: Any, take: Callable[[CurrentBatch], Any]) -> None:
        inner = loader
        while isinstance(inner, LoaderWrapper):
            inner = vars(inner)["_loader"]
        self.__dict__.update(vars(inner))  # Fabric copies the attributes of the loader, the user's way to them
        super().__init__(loader, _take=take)

    def __iter__(self) -> Iterator[Any]:
        # a generator: Fabric sets the epoch before it asks for the first batch
        sampler = getattr(self._loader, "sampler", None)
        weight = getattr(sampler, "loss_weight", None)
        for step, batch in enumerate(self._loader, getattr(sampler, "first_step", 0)):
            yield self._take(CurrentBatch(self._loader, batch, 1.0 if weight is None else float(weight(step))))


class SinceThen(Enum):
    """What has become of the gradients."""

    ZEROED = "zero_grad"
    SAME = "nothing"
    CHANGED = "written to, which may have set them to zero"


class DenseGradients:
    """Notes one of the gradients, without looking at its numbers: on a GPU the host would wait for them.

    Args:
        parameters: the dense parameters.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._noted: tuple[Tensor, Any, int] | None = None

    def note(self) -> None:
        """Take note of them as they are."""
        found = next(((p, p.grad) for p in self._parameters if p.grad is not None), None)
        self._noted = None if found is None else (found[0], weakref.ref(found[1]), found[1]._version)

    @property
    def since_then(self) -> SinceThen | None:
        """What has become of them since :meth:`note`; None if there were none."""
        if self._noted is None:
            return None
        parameter, noted, version = self._noted
        if parameter.grad is None or parameter.grad is not noted():
            return SinceThen.ZEROED
        return SinceThen.SAME if parameter.grad._version == version else SinceThen.CHANGED
