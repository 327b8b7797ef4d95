"""Watches the plan of the steps while it is trained on: is it equal on all ranks, and how balanced is it?"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_freescale._lightning.loops import Trainer, rank_zero_info
from lightning_freescale._object_gather import gather_objects
from lightning_freescale.balance import BalanceReport, StepBalance, advise
from lightning_freescale.balance.report import BalanceSums
from lightning_freescale.data.map_style import map_style_data
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.strategy.padding_watch import PaddingWatch


class BalanceMonitor:
    """Compares and logs the plan of the training loader's sampler, and finds out how its batches are padded.

    Args:
        trainer: the Trainer, with its loader in place.
        timeline: where the comparison of plans is recorded.
        group: gloo's, of all ranks, and nobody else's: what is exchanged here must not queue behind training's collectives.
            None for a single rank.
    """

    def __init__(self, trainer: Trainer, timeline: Timeline, group: dist.ProcessGroup | None) -> None:
        self.trainer = trainer
        self._timeline, self._group = timeline, group
        self._epoch: int | None = None
        self._planned_by: tuple[Any, dict[str, Any]] = None, {}  # costs and options of that epoch: the next may have others
        self._reported = False
        self._sums = BalanceSums()
        self._logged_step = -1
        self._padding = None
        train = map_style_data(trainer)
        if train is not None and train.lengths is not None and not train.padding_is_known:
            self._padding = PaddingWatch(train, self._gather)

    @property
    def sampler(self) -> Any:
        """The sampler that plans the training loader's steps, if there is one."""
        return getattr(self.trainer.train_dataloader, "sampler", None)

    def start_step(self, step: int) -> float:
        """Follow the plan to its ``step``-th batch, before ``training_step``, and return the factor for this rank's loss."""
        sampler = self.sampler
        if hasattr(sampler, "balance"):
            if sampler.epoch != self._epoch:
                self._start_epoch(sampler)
            if self.trainer.is_global_zero:
                self._log_step(self._with_base(sampler, sampler.balance(step)))
        return float(sampler.loss_weight(step)) if hasattr(sampler, "loss_weight") else 1.0

    def observe_padding(self, step: int, batch: Any) -> None:
        """Look at the ``step``-th batch until the padding of batches is known. Collective until then."""
        if self._padding is not None and self._padding.observe(self.sampler, step, batch):
            self._padding = None
            if self._plans_padding:
                self._sums = BalanceSums()  # of the steps before, padding was unknown

    def end_training(self) -> None:
        """Report the last epoch, and stop."""
        self._end_epoch()
        self.stop()

    def stop(self) -> None:
        """Exchange nothing any more; also after training that failed."""
        self._group = None

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank, on every rank. Collective."""
        return [value] if self._group is None else gather_objects(value, self._group)

    def _start_epoch(self, sampler: Any) -> None:
        """Report the epoch before, and raise if the ranks have not the same plan: samples would be lost and repeated."""
        self._end_epoch()
        self._epoch, self._planned_by = sampler.epoch, (getattr(sampler, "costs", None), getattr(sampler, "options", {}))
        if self._group is None or not hasattr(sampler, "digest"):
            return
        # here and not in the loader: a collective in an iterator would hang whoever looks at a loader on one rank
        with self._timeline.collective("plan"):
            digests = self._gather(sampler.digest())
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise RuntimeError(
                f"the ranks plan epoch {sampler.epoch} differently: ranks {others} do not agree with rank 0, so samples would "
                "be lost and repeated. Give every rank the same lengths, cost, seed and options, and a cost function without "
                "randomness"
            )

    def _with_base(self, sampler: Any, balance: StepBalance) -> StepBalance:
        base = self._base_in(sampler.epoch)
        return balance.with_base(base, sampler.num_replicas) if base else balance

    @property
    def _plans_padding(self) -> bool:
        """Whether steps are planned for padded batches, these or later ones."""
        train = map_style_data(self.trainer)
        return train is not None and train.plans_padding

    def _base_in(self, epoch: int) -> float:
        train = map_style_data(self.trainer)
        return 0.0 if train is None else train.base_in(epoch)

    def _log_step(self, balance: StepBalance) -> None:
        if balance.padding is None and self._plans_padding:
            return  # the loader had read it before padding was known
        self._sums.add_step(balance)
        trainer: Any = self.trainer
        due = trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0
        if due and trainer.global_step != self._logged_step:  # several batches may make one step
            self._logged_step = trainer.global_step
            self._log_scalars(BalanceReport.from_steps([balance]).scalars("step"))

    def _end_epoch(self) -> None:
        sums, self._sums = self._sums, BalanceSums()
        if not sums.steps:
            return
        report = sums.report()
        self._log_scalars(report.scalars("epoch"))
        if not self._reported:
            self._reported = True
            rank_zero_info(f"strategy 'freescale': predicted {report}")
            if (advice := self._advice(report)) is not None:
                rank_zero_info(advice)

    def _advice(self, report: BalanceReport) -> str | None:
        sampler = self.sampler
        if not getattr(sampler, "balance_steps", False):
            return None
        train = map_style_data(self.trainer)
        lengths = None if train is None else train.lengths
        costs, given = self._planned_by
        options: dict[str, Any] = {"assignment_mode": given["assignment_mode"]}
        if sampler.budget is None:  # else it is the limit
            options |= {"max_tokens_per_rank": given.get("max_tokens_per_rank"), "tokens": sampler.tokens}
        if train is not None and sampler.budget is None:
            options["assignment_mode"] = train.assignment_mode
        if report.padding is not None:
            options["padded"] = True
        options["base"] = 0.0 if self._epoch is None else self._base_in(self._epoch)
        options |= {name: getattr(sampler, name) for name in ("window", "drop_last", "seed")}
        return advise(costs, sampler.num_replicas, sampler.batch_size, report, lengths, **options)

    def _log_scalars(self, scalars: dict[str, float]) -> None:
        for logger in self.trainer.loggers:
            logger.log_metrics(scalars, step=self.trainer.global_step)
