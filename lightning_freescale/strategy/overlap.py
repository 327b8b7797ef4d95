"""Drives the overlap engine from the strategy's hooks: what comes next, and when the tables must be up to date."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torchrec import KeyedJaggedTensor

from lightning_freescale._lightning.loops import Trainer, counting_ahead, prepared_batch, rank_zero_info, rank_zero_warn
from lightning_freescale.embeddings.lookahead.probe import LookaheadMode, Probe
from lightning_freescale.embeddings.overlap import OverlapEngine, OverlapReport
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.strategy.dry_run import dry_run_ids
from lightning_freescale.strategy.lookahead_loader import ENDED, UNKNOWN, LookaheadLoader


class OverlapController:
    """Runs the engine in one fit. Ids go one way: from the loader to the probes, from them to the engine.

    Args:
        trainer: the Trainer.
        engine: the engine of its module.
        timeline: where waits for rows are recorded.
    """

    def __init__(self, trainer: Trainer, engine: OverlapEngine, timeline: Timeline) -> None:
        self.trainer, self.engine = trainer, engine
        self._probes = {path: Probe(path) for path in engine.collections}
        self._batch: Any = None
        self._next_batch: Any = UNKNOWN
        self._batch_idx = 0
        self._updates = self._warned = False
        self._agreed_modes: dict[str, int] = {}
        self._logged: dict[str, float] | None = None
        for collection in engine.collections.values():
            collection.observer = timeline
        for path, reason in engine.plain.items():
            rank_zero_info(f"strategy 'freescale': the exchange of {path!r} is not overlapped with compute: {reason}")

    def start_batch(self, loader: Any, batch: Any, batch_idx: int) -> None:
        """Note that training on ``batch`` of ``loader`` begins, the ``batch_idx``-th of its epoch."""
        # its own list of what the batch holds: the step may pop ids from the batch before they are looked for there
        self._batch = batch.copy() if type(batch) in (dict, list) else batch
        self._batch_idx = batch_idx
        if isinstance(loader, LookaheadLoader):
            self._next_batch = loader.start_batch()
        elif not self._warned:
            self._warned = True
            rank_zero_warn(
                f"the training batches come from a {type(loader).__name__} of loaders, whose next batch is not known: the "
                "embedding exchange is not overlapped with compute. Use one DataLoader"
            )

    def before_forward(self, updates: bool, rate_of_group: Callable[[int], float], step: int) -> None:
        """Submit the ids that stand in the next batch, and how this rank comes to know them."""
        self._updates = updates
        self._agreed_modes = self.engine.begin_step(
            self._known_ids(),
            updates=updates,
            rate_of_group=rate_of_group,
            step=step,
            restart=self._batch_idx % self.trainer.accumulate_grad_batches == 0,  # where Lightning zeroes the dense gradients
            modes={path: probe.proposal for path, probe in self._probes.items()},
        )

    def after_forward(self, args: tuple[Any, ...]) -> None:
        """Learn from what the model looked up; where ids do not stand in the batch, a trial run tells the next ones.

        It runs after the forward, when the random state is what the next step will start from.
        """
        for path, lookup in self.engine.lookups().items():
            probe = self._probes[path]
            if lookup.predicted is not None:
                probe.report(lookup.predicted)
            elif not probe.known:
                probe.learn(self._batch, lookup.features)
        for path, mode in self._agreed_modes.items():
            self._probes[path].follow_agreed_mode(mode)
        self.engine.submit_next_ids(self._dry_run(args), {path: probe.mode for path, probe in self._probes.items()})

    def log_step(self) -> None:
        """After an optimizer step, log what was moved and waited for since the last time, of rank 0."""
        trainer: Any = self.trainer
        every = trainer.log_every_n_steps
        if not every or trainer.global_step % every or not trainer.is_global_zero:
            return
        totals = self.engine.statistics()
        report, self._logged = OverlapReport.from_totals(totals, self._logged), totals
        if report is not None:
            for logger in trainer.loggers:
                logger.log_metrics(report.scalars(), step=trainer.global_step)

    def report(self) -> OverlapReport | None:
        """Return the means over all ranks and steps so far. Collective; drain first."""
        return OverlapReport.from_totals(self.engine.mean_statistics()) if self.engine.collections else None

    def _known_ids(self) -> dict[str, KeyedJaggedTensor] | None:
        """Return the ids that stand in the next batch, by collection; None if there is no next batch."""
        if self._next_batch is ENDED:
            return None
        if self._next_batch is UNKNOWN:
            return {}
        found = {path: probe.ids_of(self._next_batch) for path, probe in self._probes.items()}
        device = self.trainer.strategy.root_device
        return {path: ids.to(device, non_blocking=True) for path, ids in found.items() if ids is not None}

    def _dry_run(self, args: tuple[Any, ...]) -> dict[str, KeyedJaggedTensor]:
        """Return the ids of the collections that all ranks have agreed to learn from a trial run."""
        wanted = [path for path, mode in self._agreed_modes.items() if mode == LookaheadMode.DRY_RUN]
        if not wanted or self._next_batch is ENDED or self._next_batch is UNKNOWN:
            return {}
        trainer = self.trainer
        later = (value + 1 if isinstance(value, int) else value for value in args[1:])  # batch_idx, if it takes one
        with counting_ahead(trainer, self._updates), trainer.precision_plugin.train_step_context():
            result = dry_run_ids(
                trainer.lightning_module,
                self.engine.tables.modules,
                (self._next_batch, *later),
                trainer.strategy.root_device,
                wanted,
                partial(prepared_batch, trainer),
            )
        for path in wanted:
            if path not in result.features:
                self._probes[path].give_up(f"a trial run of training_step: {result.error or 'it does not look them up'}")
        return {path: ids for path, ids in result.features.items() if path in wanted}
