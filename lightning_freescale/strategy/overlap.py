"""Drives the overlap engine from the strategy's hooks: what comes next, and when the tables must be up to date."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torchrec import KeyedJaggedTensor

from lightning_freescale._lightning.loops import Trainer, counting_ahead, prepared_batch, rank_zero_info, rank_zero_warn
from lightning_freescale.embeddings.lookahead.probe import MODES, Probe
from lightning_freescale.embeddings.overlap import OverlapEngine, OverlapReport
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.strategy.dry_run import CollectionOutput, DryRunResult, dry_run_ids
from lightning_freescale.strategy.lookahead_loader import ENDED, UNKNOWN, LookaheadLoader


class OverlapController:
    """One fit.

    Args:
        trainer: the Trainer.
        engine: the engine of its module.
        timeline: where waits for rows are recorded.
    """

    def __init__(self, trainer: Trainer, engine: OverlapEngine, timeline: Timeline) -> None:
        self.trainer, self.engine = trainer, engine
        self._batch: Any = None
        self._index = 0
        self._upcoming: Any = UNKNOWN
        self._probes = {path: Probe(path) for path in engine.collections}
        self._lookups = {collection.path: CollectionOutput.of(collection, held) for collection, held in engine.tables.modules}
        self._warned = self._updates = False
        self._logged: dict[str, float] | None = None
        for path, collection in engine.collections.items():
            collection.asked, collection.observer = partial(self._asked, path), timeline
            collection.mode = partial(self._mode, path)
        for path, reason in engine.plain.items():
            rank_zero_info(f"strategy 'freescale': the exchange of {path!r} is not overlapped with compute: {reason}")

    def begin_batch(self, batch: Any, index: int) -> None:
        """Training on ``batch``, the ``index``-th of its epoch, begins."""
        self._batch, self._index = batch, index
        loader = self.trainer.train_dataloader
        if isinstance(loader, LookaheadLoader):
            loader.begin(batch)
            self._upcoming = loader.upcoming
        elif not self._warned:
            self._warned = True
            rank_zero_warn(
                f"the training batches come from a {type(loader).__name__} of loaders, whose next batch is not known: the "
                "embedding exchange is not overlapped with compute. Use one DataLoader"
            )

    def end_step(self) -> None:
        """After the optimizer step: log what was moved and waited for since the last time, of rank 0."""
        trainer: Any = self.trainer
        every = trainer.log_every_n_steps
        if not every or trainer.global_step % every or not trainer.is_global_zero:
            return
        totals = self.engine.statistics()
        window, self._logged = OverlapReport.of(totals, self._logged), totals
        scalars = window.scalars() if window is not None else {}
        for logger in trainer.loggers if scalars else []:
            logger.log_metrics(scalars, step=trainer.global_step)

    def report(self) -> OverlapReport | None:
        """Means over all ranks and steps so far. Collective; drain first."""
        return OverlapReport.of(self.engine.mean_statistics()) if self.engine.collections else None

    def begin_step(self, updates: bool, rate_of_group: Callable[[int], float], step: int) -> None:
        """Before the forward of that batch."""
        self._updates = updates
        restart = self._index % self.trainer.accumulate_grad_batches == 0  # where Lightning zeroes the dense gradients
        self.engine.begin_step(self._known(), updates=updates, rate_of_group=rate_of_group, step=step, restart=restart)

    def after_forward(self, args: tuple[Any, ...]) -> None:
        """Before its backward: where ids do not stand in the batch, a trial run of ``training_step`` tells them."""
        agreed = {path: collection.agreed_mode for path, collection in self.engine.collections.items()}
        for path, mode in agreed.items():
            self._probes[path].join(mode)
        wanted = [path for path, mode in agreed.items() if MODES[mode] == "ghost"]
        if not wanted or self._upcoming is ENDED or self._upcoming is UNKNOWN:
            return
        ghost = self._ghost(wanted, args)
        self.engine.announce({path: ids for path, ids in ghost.features.items() if path in wanted})
        for path in wanted:
            if path not in ghost.features:
                self._probes[path].give_up(f"a trial run of training_step: {ghost.error or 'it does not look them up'}")

    def _ghost(self, wanted: list[str], args: tuple[Any, ...]) -> DryRunResult:
        trainer, module = self.trainer, self.trainer.lightning_module
        device = trainer.strategy.root_device
        later = (value + 1 if isinstance(value, int) else value for value in args[1:])  # batch_idx, if it takes one
        with counting_ahead(trainer, self._updates), trainer.precision_plugin.train_step_context():
            return dry_run_ids(
                module, self._lookups, (self._upcoming, *later), device, wanted, partial(prepared_batch, trainer)
            )

    def _known(self) -> dict[str, KeyedJaggedTensor] | None:
        if self._upcoming is ENDED:
            return None
        if self._upcoming is UNKNOWN:
            return {}
        found = {path: probe.ids_of(self._upcoming) for path, probe in self._probes.items()}
        device = self.trainer.strategy.root_device
        return {path: ids.to(device, non_blocking=True) for path, ids in found.items() if ids is not None}

    def _mode(self, path: str) -> int:
        return MODES.index(self._probes[path].mode)

    def _asked(self, path: str, features: KeyedJaggedTensor, same: bool | None) -> None:
        """The model has asked for ids that were announced rightly or wrongly, or not at all (None)."""
        probe = self._probes[path]
        if same is not None:
            probe.report(same)
        elif not probe.known:
            probe.learn(self._batch, features)
