"""Drives the overlap engine from the strategy's hooks: what comes next, and when the tables must be up to date."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_freescale._lightning.loops import Trainer, rank_zero_info, rank_zero_warn
from lightning_freescale.balance import MicroBatches
from lightning_freescale.embeddings.optimizer import UpdateSettings
from lightning_freescale.embeddings.overlap import OverlapEngine, OverlapReport, WeightGradientsLast, WindowGradients
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.strategy.early_copy import EarlyCopy
from lightning_freescale.strategy.lookahead import Ids, Lookahead
from lightning_freescale.strategy.lookahead_loader import ENDED, UNKNOWN, LookaheadLoader


class OverlapController:
    """Runs the engine in one fit. Ids go one way: from the loader to the lookahead, from it to the engine.

    Args:
        trainer: the Trainer.
        engine: the engine of its module.
        timeline: where waits for rows are recorded.
        ids_of: the user's function that tells the ids in a batch.
        split_backward: whether backward leaves the gradients of the dense weights for the end.
        looks_ahead: whether the rows of the next batch are fetched while this one computes.

    Attributes:
        split_backward: the same; it may change between two steps.
    """

    def __init__(
        self,
        trainer: Trainer,
        engine: OverlapEngine,
        timeline: Timeline,
        ids_of: Callable[[Any], Any] | None = None,
        split_backward: bool = False,
        looks_ahead: bool = True,
    ) -> None:
        self.trainer, self.engine, self._looks_ahead = trainer, engine, looks_ahead
        self.split_backward = split_backward
        strategy: Any = trainer.strategy
        # one rank waits for nobody; and DDP reduces what a last micro-batch leaves unused before its backward begins
        unused = any(strategy.ddp_options.get(name) for name in ("find_unused_parameters", "static_graph"))
        self._window = None if unused or trainer.world_size == 1 else WindowGradients()
        self._lookahead = Lookahead(engine, trainer.lightning_module, ids_of)
        self._told_of_parts: list[Ids] = []  # of the current batch, but the first
        self._parts: tuple[Any, ...] = ()  # micro-batches of the current batch
        self._part = 0
        self._following: Any = UNKNOWN  # the batch after the current one
        self._batch: Any = None  # the micro-batch that computes
        self._early_copy = EarlyCopy.for_trainer(trainer)
        self._batch_idx = 0
        self._updates = self._warned = self._stated_sizes = False
        self._logged: dict[str, float] | None = None
        for collection in engine.collections.values():
            collection.observe(timeline)

    def take_loaded(self, batch: MicroBatches) -> None:
        """Ask for the ids of all micro-batches but the first, as they come out of the loader: hooks get them next."""
        self._told_of_parts = [self._lookahead.tell(part) for part in batch.batches[1:]]

    def start_batch(self, loader: Any, batch: Any, batch_idx: int) -> None:
        """Note that training on ``batch`` of ``loader`` begins, the ``batch_idx``-th of its epoch."""
        self._parts = _parts(batch)
        self._following = UNKNOWN
        self._batch_idx = batch_idx
        self._start_part(0)
        if batch is None:  # Lightning passes over those, but for a training_step that takes the iterator
            self._lookahead.give_up(
                "training_step takes the loader's iterator, so that nobody knows the next batch: take the batch"
            )
        if isinstance(loader, LookaheadLoader):
            self._following = loader.start_batch()
        elif self._looks_ahead and not self._warned:
            self._warned = True
            rank_zero_warn(f"{_why_not_ahead(loader)}: the embedding exchange is not overlapped with compute")

    def _start_part(self, index: int) -> None:
        self._part, batch = index, self._parts[index]
        self._lookahead.start_batch()
        # its own list of what the batch holds: the step may pop ids from the batch before they are looked for there
        self._batch = batch.copy() if type(batch) in (dict, list) else batch

    def copied(self, batch: Any) -> Any:
        """Return the copy on the device of a batch, if there is one already, else the batch."""
        return batch if self._early_copy is None else self._early_copy.take(batch)

    def before_forward(self, batch: Any, updates: bool, settings: Mapping[str, UpdateSettings], step: int) -> None:
        """Submit the ids that are known of what comes after ``batch``, and how this rank comes to know ids."""
        index = next((i for i, part in enumerate(self._parts) if part is batch), self._part)
        if index != self._part:
            self._start_part(index)
        self._updates = updates
        first = index == 0 and self._batch_idx % self.trainer.accumulate_grad_batches == 0
        self._lookahead.agreed_modes = self.engine.begin_step(
            self._known_ids(),
            updates=updates,
            settings=settings,
            step=step,
            restart=first,  # where Lightning zeroes the dense gradients
            modes=self._lookahead.proposals(),
        )

    def forward(self) -> AbstractContextManager[Any]:
        """Return the block in which the forward runs."""
        if not (self.split_backward and self.engine.modules):
            return nullcontext()
        if self._window is not None and len(self._parts) > 1:
            return WeightGradientsLast(self._window, last=not self._stays_in_step)
        # nobody waits for gradients that no optimizer step follows
        return WeightGradientsLast() if self._updates else nullcontext()

    def backward(self) -> AbstractContextManager[Any]:
        """Return the block in which backward runs."""
        return nullcontext() if self._window is None else self._window.backward()

    def end_backward(self) -> None:
        """Hand over what backward has not handed over itself."""
        self.engine.end_backward()
        if self._window is not None and not self._stays_in_step:
            self._window.close()

    def after_forward(self) -> None:
        """Learn from what the model looked up, and tell the other ranks how this one comes to know ids."""
        self._lookahead.learn(self._batch, comes_ahead=self._looks_ahead and not self._warned)
        self._lookahead.end_forward()
        if not self._stated_sizes:
            texts = [text for module in self.engine.modules.values() for text in module.sizes_of_losses()]
            self._stated_sizes = bool(texts)
            for text in texts:
                rank_zero_info(f"strategy 'freescale': {text}")

    def log_step(self) -> None:
        """After an optimizer step, log what was moved and waited for since the last time, of rank 0."""
        trainer: Any = self.trainer
        every = trainer.log_every_n_steps
        if not self._looks_ahead or not every or trainer.global_step % every or not trainer.is_global_zero:
            return
        totals = self.engine.statistics()
        report, self._logged = OverlapReport.from_totals(totals, self._logged), totals
        if report is not None:
            for logger in trainer.loggers:
                logger.log_metrics(report.scalars(), step=trainer.global_step)

    def report(self) -> OverlapReport | None:
        """Return the means over all ranks and steps so far. Collective; drain first."""
        return OverlapReport.from_totals(self.engine.mean_statistics())

    # -- the ids of the next batch

    def _known_ids(self) -> Ids | None:
        """Return the ids that the user tells of the next micro-batch or that stand in it; None if there is none."""
        if self._next is ENDED:
            return None
        if self._next is UNKNOWN or self._lookahead.asked or not self._looks_ahead:
            return {}
        told = self._told_of_parts[self._part] if self._stays_in_step else self._lookahead.tell(self._next)
        return self._lookahead.known_ids(told, self._next_on_device())

    @property
    def _next(self) -> Any:
        """The micro-batch after the one that computes, or ENDED, or UNKNOWN: as the step gets it if it is of the same step.

        The next step's is as it comes out of the loader: the hooks that prepare it have not run.
        """
        return self._parts[self._part + 1] if self._stays_in_step else _parts(self._following)[0]

    @property
    def _stays_in_step(self) -> bool:
        """Whether another micro-batch of this step comes next."""
        return self._part + 1 < len(self._parts)

    def _next_on_device(self) -> Any:
        if self._stays_in_step:
            return self._next
        return _parts(self._following if self._early_copy is None else self._early_copy.start(self._following))[0]


def _parts(batch: Any) -> tuple[Any, ...]:
    return tuple(batch.batches) if isinstance(batch, MicroBatches) else (batch,)


def _why_not_ahead(loader: Any) -> str:
    if isinstance(loader, (dict, list, tuple)):
        kind = type(loader).__name__
        return f"the training batches come from a {kind} of loaders, whose next batch is not known (use one DataLoader)"
    return (
        "the training loader was made before the module had its embedding collections (read "
        "trainer.estimated_stepping_batches in configure_optimizers, or make them in __init__)"
    )
