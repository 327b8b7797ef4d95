"""The observer of a user's loop over Fabric: it reports batches, forwards and optimizer steps to the sharded tables."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_freescale._lightning.loops import LoaderWrapper, rank_zero_warn
from lightning_freescale._runtime.attributes import replaced
from lightning_freescale.checkpoint.run_state import refusing_another_optimizer
from lightning_freescale.training.lookahead_loader import UNKNOWN

if TYPE_CHECKING:
    from lightning_freescale.training.table_step import TableStep

_EXTRA = "freescale"
"""The key, in an optimizer's state dict, of state that an ordinary state dict does not have."""
_TABLES = "strategy 'freescale' updates the embedding tables in backward"


class LoopSteps:
    """The observer of the loop over one module: forward, backward and optimizer step, or several backwards before the step.

    ``module`` is the module in its DDP wrapper, whose hooks report forwards. ``optimizer`` is the user's.
    """

    def __init__(self, step: TableStep, optimizer: Optimizer, module: nn.Module) -> None:
        self.step, self.optimizer = step, optimizer
        self.current: CurrentBatch | None = None  # None for a batch from no loader of fabric.setup_dataloaders
        self._dense = DenseGradients(p for group in optimizer.param_groups for p in group["params"])
        self._accumulating = False  # inside fabric.no_backward_sync
        self._begun = False  # whether the backward of a forward is pending
        self._accumulates = False  # whether that backward only accumulates
        self._waiting = False  # whether accumulated gradients wait for an optimizer step
        self._split: Any = None
        self._warned = False
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward, always_call=True)
        # Fabric loads a checkpoint by the optimizer's own method
        optimizer.load_state_dict = self.load_optimizer  # type: ignore[assignment,method-assign]

    # -- checkpoints

    def unsharded_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict of the unsharded optimizer from that of the dense part, complete on rank 0. Collective."""
        from lightning_freescale.checkpoint.unsharded import optimizer_state_dict

        assert self.step.groups is not None
        full, extra = optimizer_state_dict(self.step.tables, self.step.groups, state)
        return {**full, _EXTRA: extra}

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Load a state dict of the unsharded optimizer. Each rank loads its part of the tables."""
        from lightning_freescale.checkpoint.unsharded import load_optimizer_state_dict

        assert self.step.groups is not None
        full = {name: value for name, value in state.items() if name != _EXTRA}
        with self.step.writing():
            dense = load_optimizer_state_dict(self.step.tables, self.step.groups, full, state.get(_EXTRA, {}))
        with refusing_another_optimizer([self.optimizer]):
            type(self.optimizer).load_state_dict(self.optimizer, dense)

    # -- events of the loop

    def accumulating(self) -> AbstractContextManager[None]:
        """Accumulate the gradients of the forwards and backwards in the block, without optimizer steps."""
        if plain := [collection.path for collection in self.step.plain]:
            raise ValueError(
                f"fabric.no_backward_sync(model): collections {plain} are updated during backward, so their gradients cannot "
                "be accumulated. Gradients accumulate only if the exchange is overlapped. Use a larger batch"
            )
        return replaced(self, {"_accumulating": True})

    def before_forward(self, *_: Any) -> None:
        """Begin a step, unless the forward belongs to the current step. A hook of the module."""
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return  # an evaluation, or activation checkpointing repeats the forward
        if not self._begun:
            self._begin()
        if not self._accumulating:
            self._split = self.step.forward()
            self._split.__enter__()

    def after_forward(self, *_: Any) -> None:
        """Exit the context of :meth:`before_forward`, even after an error. A hook of the module."""
        split, self._split = self._split, None
        if split is not None:
            split.__exit__(None, None, None)

    def backward(self, run: Callable[[], None]) -> None:
        """Run backward, or raise ValueError if the tables would get other gradients than those of the unsharded module."""
        if self.step.update_due:
            raise ValueError(
                f"fabric.backward(loss) was called twice without optimizer.step() between the calls: {_TABLES}. Add up the "
                "losses, or accumulate within fabric.no_backward_sync(model)"
            )
        if not self._begun:  # the backward of another module
            run()
            return
        if self._accumulating != self._accumulates:
            raise ValueError(
                "model(...) and fabric.backward(loss) were not both inside fabric.no_backward_sync(model). The strategy must "
                "know before the forward whether optimizer.step() follows. Put both calls inside"
            )
        self._refuse_other_dense_gradients()
        self.step.end_forward()
        self.step.follow_settings()
        try:
            self.step.backward(run, updates=not self._accumulates)
        except BaseException:
            self.step.update_due = False  # a loop that continues after the error may call backward again
            raise
        self._begun, self._waiting = False, self._accumulates
        self._dense.note()

    def optimizer_step(self, run: Callable[[], Any]) -> Any:
        """Run an optimizer step with the backward of a closure, or raise ValueError if the tables would be updated wrongly."""
        if not (self._begun or self.step.update_due or self._waiting):
            self._refuse_other_dense_gradients()
        output = run()
        begun_or_due = self._begun or self.step.update_due
        if self._waiting and not begun_or_due:
            raise ValueError(
                "optimizer.step() follows a backward within fabric.no_backward_sync(model), whose gradients are not reduced "
                "over the ranks. Exclude the last batch before optimizer.step(): no_backward_sync(model, enabled=not last)"
            )
        if not begun_or_due:
            return output
        if self._begun:  # there was no backward
            self.step.end_forward()
        self.step.step_done()
        self._begun = self._waiting = False
        self._dense.note()
        return output

    # -- parts of a step

    def _begin(self) -> None:
        if self.step.update_due:
            raise ValueError(
                f"model(...) was called between fabric.backward(loss) and optimizer.step(): {_TABLES}, so every backward "
                "outside fabric.no_backward_sync(model) needs its optimizer.step(). Evaluate under torch.no_grad()"
            )
        zeroed = self._waiting and self._dense.since_then == "zeroed"
        self._waiting = self._waiting and not zeroed
        batch, following = (None, UNKNOWN) if self.current is None else (self.current.batch, self.current.following)
        if self.current is None and self.step.looks_ahead and not self._warned:
            self._warned = True
            rank_zero_warn(
                "the batch comes from no loader of fabric.setup_dataloaders, so the next batch is unknown and the embedding "
                "exchange is not overlapped with compute. Iterate over fabric.setup_dataloaders(loader)"
            )
        self.step.start_batch(batch, following, comes_ahead=self.current is not None, restart=not self._waiting)
        self.step.before_forward(batch, updates=not self._accumulating)
        self._begun, self._accumulates = True, self._accumulating
        if zeroed:
            self._dense.note()

    def _refuse_other_dense_gradients(self) -> None:
        """Raise ValueError if the dense gradients were changed in a way that the tables' gradients cannot follow."""
        since = self._dense.since_then
        if not self._waiting and since == "same":
            raise ValueError(
                "the dense gradients of the last optimizer.step() still exist, and those of the embedding tables do not: call "
                "optimizer.zero_grad() after every optimizer.step()"
            )
        if self._waiting and since in ("zeroed", "changed"):
            raise ValueError(
                "the accumulated dense gradients were changed, and the gradients of the embedding tables are on the ranks that "
                "own the rows. Do not change them before optimizer.step(), or call optimizer.zero_grad() before model(...)"
            )


@dataclass
class CurrentBatch:
    """The current batch of the loop."""

    loader: Any
    batch: Any  # as the loop received it
    loss_weight: float  # factor for this rank's loss, see BalancedSampler.loss_weight
    following: Any = UNKNOWN  # the next batch, or ENDED, or UNKNOWN


class HandingLoader(LoaderWrapper):
    """A loader that passes each batch through ``take``, which returns the batch for the loop."""

    def __init__(self, loader: Any, take: Callable[[CurrentBatch], Any]) -> None:
        inner = loader
        while isinstance(inner, LoaderWrapper):
            inner = vars(inner)["_loader"]
        self.__dict__.update(vars(inner))  # Fabric copies the attributes of the loader, which the user may read
        super().__init__(loader, _take=take)

    def __iter__(self) -> Iterator[Any]:
        # a generator, because Fabric sets the epoch before it requests the first batch
        sampler = getattr(self._loader, "sampler", None)
        weight = getattr(sampler, "loss_weight", None)
        for step, batch in enumerate(self._loader, getattr(sampler, "first_step", 0)):
            yield self._take(CurrentBatch(self._loader, batch, 1.0 if weight is None else float(weight(step))))


class DenseGradients:
    """The identity and version of one dense gradient. Its values are not read, because the host would wait for the GPU."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._noted: tuple[Tensor, Any, int] | None = None

    def note(self) -> None:
        found = next(((p, p.grad) for p in self._parameters if p.grad is not None), None)
        self._noted = None if found is None else (found[0], weakref.ref(found[1]), found[1]._version)

    @property
    def since_then(self) -> Literal["zeroed", "same", "changed"] | None:
        """The change since :meth:`note`; None if there were no gradients. In-place zeros count as a change."""
        if self._noted is None:
            return None
        parameter, noted, version = self._noted
        if parameter.grad is None or parameter.grad is not noted():
            return "zeroed"
        return "same" if parameter.grad._version == version else "changed"
