"""The step of sharded tables in any training loop: the only owner of the overlap engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch import Tensor

from lightning_freescale.balance.micro_batches import MicroBatches
from lightning_freescale.embeddings.optimizer import UpdateSettings
from lightning_freescale.embeddings.overlap import OverlapEngine, OverlapReport, WeightGradientsLast, WindowGradients
from lightning_freescale.embeddings.parameter_groups import ParameterGroups
from lightning_freescale.embeddings.shards import ShardedTables
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.training.lookahead_loader import ENDED, UNKNOWN
from lightning_freescale.training.next_ids import EarlyCopy, Ids, Lookahead

Result = TypeVar("Result")


class TableStep:
    """Fetches, exchanges and updates the rows of sharded tables in the steps of one run.

    A loop reports its events in this order::

        step.start_batch(batch, following)             # a batch and the one after it are available
        step.before_forward(batch, updates=True)
        with step.forward():
            loss = model(batch)
        step.end_forward()                             # before backward
        step.backward(loss.backward, updates=True)
        step.step_done()                               # after optimizer.step()

    A batch of several micro-batches is one ``start_batch``, and a forward and a backward for each micro-batch. Outside of
    training, only :meth:`writing` and the engine are used, and ``groups`` is None. ``engine`` is None if TorchRec exchanges
    rows, and ``lookahead`` if no exchange is overlapped. With ``split_backward``, which may change between steps, backward
    computes the gradients of the dense weights last; with ``split_windows``, those of all micro-batches of a step.
    """

    def __init__(
        self,
        tables: ShardedTables,
        engine: OverlapEngine | None,
        groups: ParameterGroups | None = None,
        lookahead: Lookahead | None = None,
        *,
        early_copy: EarlyCopy | None = None,
        timeline: Timeline | None = None,
        split_backward: bool = False,
        split_windows: bool = False,
    ) -> None:
        self.tables, self.engine, self.groups = tables, engine, groups
        self.early_copy, self.split_backward = early_copy, split_backward
        # the paths of the collections that the engine updates, and the collections that TorchRec updates during backward
        self.overlapped = frozenset() if engine is None else frozenset(engine.modules)
        self.plain = [collection for collection, _ in tables.modules if collection.path not in self.overlapped]
        self.update_due = False  # whether a backward was computed whose optimizer step has yet to follow
        self.looks_ahead = lookahead is not None  # whether the next rows are fetched while the current batch computes
        self._lookahead, self._timeline = lookahead, timeline or Timeline()
        self._window = WindowGradients() if split_windows else None
        self._settings: Mapping[str, UpdateSettings] = {}  # settings of the tables' update in the current step
        self._parts: tuple[Any, ...] = ()  # micro-batches of the current batch
        self._part = 0
        self._ids_of_parts: list[Ids] = []  # from the user's function, for all micro-batches of the current batch but the first
        self._following: Any = UNKNOWN  # the batch after the current one
        self._batch: Any = None  # the micro-batch that computes
        self._is_last_part = False
        self._handed_over = False  # whether the gradients of the current forward have been submitted
        self._comes_ahead = self._restart = self._updates = False
        self._logged: dict[str, float] | None = None
        if timeline is not None and engine is not None:
            for collection in engine.collections.values():
                collection.observe(timeline)

    # -- events of a step, in their order

    def take_loaded(self, batch: MicroBatches) -> None:
        """Ask the user's function for the ids of all micro-batches but the first, before hooks change them."""
        self._ids_of_parts = [] if self._lookahead is None else [self._lookahead.ask(part) for part in batch.batches[1:]]

    def copied(self, batch: Any) -> Any:
        return batch if self.early_copy is None else self.early_copy.take(batch)

    def start_batch(self, batch: Any, following: Any, comes_ahead: bool = True, restart: bool = True) -> None:
        """Record that a step on ``batch`` begins, as the step gets the batch.

        ``following`` is the next batch as it leaves the loader, or ENDED, or UNKNOWN. ``comes_ahead`` tells whether the loop
        knows batches before their step, and ``restart`` whether the gradients of earlier batches are zero.
        """
        self._parts = tuple(batch.batches) if isinstance(batch, MicroBatches) else (batch,)
        self._part, self._following = -1, following
        self._comes_ahead, self._restart = comes_ahead, restart

    def before_forward(self, batch: Any, updates: bool) -> None:
        """Begin the exchange of the forward of a batch or micro-batch, and submit the known ids of the next one.

        ``updates`` tells whether an optimizer step follows it.
        """
        index = next((i for i, part in enumerate(self._parts) if part is batch), max(self._part, 0))
        if index != self._part:  # otherwise a closure repeats the step
            self._part, self._is_last_part, batch = index, index + 1 == len(self._parts), self._parts[index]
            if self._lookahead is not None:
                self._lookahead.asked = False
            # a shallow copy: the step may remove ids from the batch before they are looked for in it
            self._batch = batch.copy() if type(batch) in (dict, list) else batch
        self._updates, self._handed_over, groups, lookahead = updates, False, self.groups, self._lookahead
        assert groups is not None
        with self._timeline.span("host", "embeddings: before the step"):
            self._settings = settings = groups.settings()
            self.tables.prepare_update(settings, skip=self.overlapped)
            if self.engine is None:
                return
            given_up = self.engine.begin_step(
                {} if lookahead is None else self._known_ids(lookahead),
                updates=updates,
                settings=settings,
                step=groups.step,
                restart=self._restart and index == 0,
                gives_up=None if lookahead is None else lookahead.gives_up(),
            )
            if lookahead is not None:
                lookahead.given_up = given_up

    def forward(self) -> AbstractContextManager[Any]:
        if not (self.split_backward and self.overlapped):
            return nullcontext()
        if self._window is not None and len(self._parts) > 1:
            return WeightGradientsLast(self._window, last=self._is_last_part)
        # without an optimizer step, gradients are not exchanged
        return WeightGradientsLast() if self._updates else nullcontext()

    def end_forward(self) -> None:
        """End the lookups of a forward, and learn where the batch contains their ids."""
        engine, lookahead = self.engine, self._lookahead
        if engine is None:
            return
        with self._timeline.span("host", "embeddings: ids of the next step"):
            if lookahead is None:
                engine.end_forward()
            else:
                lookahead.learn(engine.lookups(), self._batch, self._comes_ahead)
                engine.submit_next_ids({}, lookahead.gave_up())
                engine.end_forward()
                lookahead.give_notice()

    def follow_settings(self, *_: Any) -> None:
        """Update tables with the options that the user has set since the step began. Call it before backward."""
        if self.engine is not None and self.groups is not None:
            self._settings = self.engine.follow_settings(self._settings, self.groups.settings())

    def backward(self, run: Callable[[], Result], updates: bool) -> Result:
        """Run backward and submit its gradients; ``updates`` is as in :meth:`before_forward`."""
        self.update_due = updates
        try:
            with nullcontext() if self._window is None else self._window.backward():
                result = run()
            self.end_backward()
        except RuntimeError:
            if self.engine is not None:
                self.engine.raise_errors()  # DDP fails if another rank does, and the exchange may know the reason
            raise
        return result

    def end_backward(self) -> None:
        if self.engine is None:
            return
        with self._timeline.span("host", "embeddings: gradients handed over"):
            self.engine.end_backward()
            self._handed_over = True
            if self._window is not None and self._is_last_part:
                self._window.close()

    def step_done(self) -> None:
        """Update the tables after an optimizer step, and count the step. Call it also after a step without backward.

        An option that has changed since the gradients of the tables were sent is a ValueError.
        """
        assert self.groups is not None
        if self.engine is not None:
            if not self._handed_over:
                self.end_backward()
            self.engine.apply_gradients()
        if self.update_due:
            self.groups.refuse_late_changes(self._settings)
        self.groups.count_step(self.tables.idle_tables(self.update_due, self.overlapped))
        self.update_due = False

    # -- between steps

    def give_up_lookahead(self, reason: str) -> None:
        if self._lookahead is not None:
            self._lookahead.give_up(reason)

    def count_updates(self) -> None:
        """Drain, and count only the steps with a gradient as updates of a table. Collective between two steps."""
        if self.engine is not None:
            self.engine.drain()
            if self.groups is not None:
                self.groups.uncount(self.engine.take_idle_steps())

    def writing(self) -> AbstractContextManager[None]:
        """Return a context for writes to the tables by other code. Enter it on every rank."""
        return nullcontext() if self.engine is None else self.engine.writing()

    def report(self) -> OverlapReport | None:
        """Return the means over all ranks and steps so far; None without overlap. Collective."""
        self.count_updates()
        if self.engine is None or self._lookahead is None:
            return None
        return OverlapReport.from_totals(self.engine.mean_statistics(), self.engine.heats())

    def report_of_rank(self) -> OverlapReport | None:
        """Return this rank's means over the steps since the last call; None without overlap or without steps."""
        if self.engine is None or self._lookahead is None:
            return None
        totals = self.engine.statistics()
        report, self._logged = OverlapReport.from_totals(totals, self.engine.heats(), self._logged), totals
        return report

    def changed_hot_rows(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the lists of hot rows that are new since the last call, see :meth:`.OverlapEngine.hot_rows`.

        Between :meth:`before_forward` and the forward, they are new in the same step on all ranks.
        """
        changed: dict[str, tuple[Tensor, Tensor]] = {}
        for part in () if self.engine is None else self.engine.collections.values():
            if part.hot_list is not None and part.hot_list.changed:
                part.hot_list.changed = False
                changed |= part.hot_rows()
        return changed

    # -- the ids of the next batch

    def _known_ids(self, lookahead: Lookahead) -> Ids | None:
        """Return the known ids of the next micro-batch; None if there is none.

        A micro-batch of the same step is as the step gets it. The next step's batch is as it leaves the loader, before hooks
        change it.
        """
        if not self._is_last_part:
            if lookahead.asked:
                return {}
            return lookahead.known_ids(self._ids_of_parts[self._part], self._parts[self._part + 1])
        if self._following is ENDED:
            return None
        if self._following is UNKNOWN or lookahead.asked:
            return {}
        loaded, several = self._following, isinstance(self._following, MicroBatches)
        returned = lookahead.ask(loaded.batches[0] if several else loaded)
        on_device = loaded if self.early_copy is None else self.early_copy.start(loaded)
        return lookahead.known_ids(returned, on_device.batches[0] if several else on_device)
