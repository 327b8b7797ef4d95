"""What the steps of a loop of the user's mean for the sharded tables: when one begins, and when its updates are due."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_freescale._lightning.loops import rank_zero_warn
from lightning_freescale.embeddings.optimizer import UpdateSettings
from lightning_freescale.embeddings.overlap import OverlapEngine, OverlapReport, WeightGradientsLast
from lightning_freescale.embeddings.parameter_groups import ParameterGroups
from lightning_freescale.embeddings.shards import ShardedTables
from lightning_freescale.fabric.dense_gradients import DenseGradients, SinceThen
from lightning_freescale.fabric.loader import CurrentBatch
from lightning_freescale.strategy.early_copy import EarlyCopy
from lightning_freescale.strategy.lookahead import Ids, Lookahead
from lightning_freescale.strategy.lookahead_loader import ENDED, UNKNOWN

_TABLES = "strategy 'freescale' updates the embedding tables in backward"


class TableSteps:
    """Follows the loop over one module: forward, backward, optimizer step; or accumulates before the step.

    Args:
        tables: the sharded tables of the module.
        groups: which of the optimizer's parameter groups drives which table.
        optimizer: the user's, over what is dense.
        engine: exchanges their rows; None if TorchRec does.
        lookahead: how it comes to know the next ids; None where no exchange is overlapped with compute.
        early_copy: copies the next batch to the device; None where nothing is to be copied.
        split_backward: whether backward leaves the gradients of the dense weights for the end.

    Attributes:
        early_copy: as given.
        current: the batch that the loop has; None if it did not come out of a loader of ``fabric.setup_dataloaders``.
    """

    def __init__(
        self,
        tables: ShardedTables,
        groups: ParameterGroups,
        optimizer: Optimizer,
        engine: OverlapEngine | None,
        lookahead: Lookahead | None,
        early_copy: EarlyCopy | None = None,
        split_backward: bool = False,
    ) -> None:
        self.tables, self.groups, self.optimizer, self.engine = tables, groups, optimizer, engine
        self._lookahead, self.early_copy, self._split_backward = lookahead, early_copy, split_backward
        self._dense = DenseGradients(p for group in optimizer.param_groups for p in group["params"])
        self.current: CurrentBatch | None = None
        self._accumulating = False  # inside fabric.no_backward_sync
        self._begun = self._accumulates = False  # a forward whose backward is to come; and whether no update follows it
        self._due = self._waiting = False  # a backward whose optimizer step is to come; gradients that wait for one that is
        self._settings: Mapping[str, UpdateSettings] = {}  # what the tables are updated with in the current step
        self._split: WeightGradientsLast | None = None
        self._warned = False

    # -- what the loop does

    @contextmanager
    def accumulating(self, module: nn.Module) -> Iterator[None]:
        """Let forwards and backwards inside add up gradients that no optimizer step follows.

        Raises:
            ValueError: TorchRec updates tables in each backward.
        """
        if plain := [c.path for c, _ in self.tables.modules if c.path not in self._overlapped]:
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
            return  # nobody learns from it; or activation checkpointing computes it again
        if not self._begun:
            self._begin()
        if self._split_backward and self.engine is not None and self.engine.modules and not self._accumulating:
            self._split = WeightGradientsLast()
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
        if self._due:
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
        self._end_forward()
        if self.engine is not None:
            self._settings = self.engine.follow_settings(self._settings, self.groups.settings())
        try:
            run()
            if self.engine is not None:
                self.engine.end_backward()
        except RuntimeError:
            if self.engine is not None:
                self.engine.raise_errors()  # DDP fails when a rank has gone; the exchange may know why it has
            raise
        self._begun, self._due, self._waiting = False, not self._accumulates, self._accumulates
        self._dense.note()

    def optimizer_step(self, run: Callable[[], Any]) -> Any:
        """Run an optimizer step, a closure's backward included.

        Raises:
            ValueError: the tables would not do the same.
        """
        if not (self._begun or self._due or self._waiting):
            self._refuse_other_dense_gradients()
        output = run()
        if self._waiting and not (self._begun or self._due):
            raise ValueError(
                "optimizer.step() after a backward within fabric.no_backward_sync(model): the ranks have not added up its "
                "gradients. Leave the last batch before optimizer.step() out of it: no_backward_sync(model, enabled=not last)"
            )
        if not (self._begun or self._due):
            return output
        if self._begun:  # without a backward
            self._end_forward()
        if self.engine is not None:
            self.engine.end_backward()
            self.engine.apply_gradients()
        if self._due:
            self.groups.refuse_late_changes(self._settings)
        self.groups.count_step(self.tables.idle_tables(self._due, self._overlapped))
        self._begun = self._due = self._waiting = False
        self._dense.note()
        return output

    # -- between steps

    def drain(self) -> None:
        """Wait until every update of the steps so far is in the tables. Collective."""
        if self.engine is not None:
            self.engine.drain()
            self.groups.uncount(self.engine.take_idle_steps())

    def writing(self) -> AbstractContextManager[None]:
        """Enter this around writes to the tables by hand, on every rank."""
        return nullcontext() if self.engine is None else self.engine.writing()

    def report(self) -> OverlapReport | None:
        """Return what the overlap was worth so far: means over all ranks and steps. Collective. None without overlap."""
        self.drain()
        if self.engine is None or self._lookahead is None:
            return None
        return OverlapReport.from_totals(self.engine.mean_statistics())

    # -- parts of a step

    @property
    def _overlapped(self) -> frozenset[str]:
        return frozenset() if self.engine is None else frozenset(self.engine.modules)

    def _begin(self) -> None:
        if self._due:
            raise ValueError(
                f"model(...) between fabric.backward(loss) and optimizer.step(): {_TABLES}, so every backward outside of "
                "fabric.no_backward_sync(model) needs its step, and may not be skipped. Evaluate under torch.no_grad()"
            )
        zeroed = self._waiting and self._dense.since_then == SinceThen.ZEROED
        self._waiting = self._waiting and not zeroed
        self._settings = settings = self.groups.settings()
        self.tables.prepare_update(settings, skip=self._overlapped)
        if self.engine is not None:
            if self._lookahead is not None:
                self._lookahead.start_batch()
            agreed = self.engine.begin_step(
                {} if self._lookahead is None else self._known_ids(self._lookahead),
                updates=not self._accumulating,
                settings=settings,
                step=self.groups.step,
                restart=not self._waiting,
                modes=None if self._lookahead is None else self._lookahead.proposals(),
            )
            if self._lookahead is not None:
                self._lookahead.agreed_modes = agreed
        self._begun, self._accumulates = True, self._accumulating
        if zeroed:
            self._dense.note()

    def _end_forward(self) -> None:
        if self._lookahead is None and self.engine is not None:
            self.engine.end_forward()
        if self._lookahead is not None:
            self._lookahead.learn(None if self.current is None else self.current.batch, comes_ahead=self.current is not None)
            self._lookahead.end_forward()

    def _known_ids(self, lookahead: Lookahead) -> Ids | None:
        """Return the ids of the next batch that are known; None if there is no next batch."""
        if self.current is None:
            if not self._warned:
                self._warned = True
                rank_zero_warn(
                    "the batch comes from no loader that fabric.setup_dataloaders has returned, so the next one is not known: "
                    "the embedding exchange is not overlapped with compute. Iterate over fabric.setup_dataloaders(loader)"
                )
            return {}
        upcoming = self.current.next_batch
        if upcoming is ENDED:
            return None
        if upcoming is UNKNOWN:
            return {}
        told = lookahead.tell(upcoming)
        return lookahead.known_ids(told, upcoming if self.early_copy is None else self.early_copy.start(upcoming))

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
