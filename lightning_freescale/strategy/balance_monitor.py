"""Checks and logs of the plan during training, and detection of padding in its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np
import torch.distributed as dist

from lightning_freescale._lightning.loops import Trainer, rank_zero_info
from lightning_freescale._lightning.profiler import log_scalars
from lightning_freescale._runtime.object_gather import gather_objects
from lightning_freescale.balance import BalanceReport, StepBalance, advise, predict
from lightning_freescale.balance.micro_batches import MicroBatches
from lightning_freescale.balance.report import BalanceSums
from lightning_freescale.data.map_style import MapStyleData, map_style_data
from lightning_freescale.data.padding import BatchShapes, detect_padding, sees_padding, shapes_of
from lightning_freescale.profiling.recording.timeline import Timeline

_MOST_STEPS = 12  # steps after which batches without a sign of padding count as jagged
_UNDECIDED_STEPS = 2  # steps after which samples are sorted by length, so that batches differ in length
_PREDICTED_STEPS = 8  # steps of the forecast in the log


class BalanceMonitor:
    """Compares the plans of all ranks, logs their balance, and detects how batches are padded.

    Create it after the Trainer has its training loader. ``group`` is None for a single rank.
    """

    def __init__(self, trainer: Trainer, timeline: Timeline, group: dist.ProcessGroup | None) -> None:
        self.trainer = trainer
        self._timeline, self._group = timeline, group
        self._epoch: int | None = None
        self._planned_by: tuple[Any, dict[str, Any]] = None, {}  # costs and options of the epoch
        self._reported = False
        self._sums = BalanceSums()
        self._logged_step = -1
        self._padding = None
        self._train = train = map_style_data(trainer)
        if train is not None and train.lengths is not None and train.padding in ("auto", "fixed") and not train.padded_length:
            self._padding = PaddingWatch(train, self._gather)

    @property
    def sampler(self) -> Any:
        """The sampler that plans the training loader's steps, if there is one."""
        return getattr(self.trainer.train_dataloader, "sampler", None)

    def start_step(self, step: int) -> float:
        """Log the plan of the ``step``-th batch before ``training_step``, and return the factor for this rank's loss."""
        sampler = self.sampler
        if hasattr(sampler, "balance"):
            if sampler.epoch != self._epoch:
                self._start_epoch(sampler)
            if self.trainer.is_global_zero:
                balance, base = sampler.balance(step), self._base_in(sampler.epoch)
                self._log_step(balance.with_base(base, sampler.num_replicas) if base else balance)
        return float(sampler.loss_weight(step)) if hasattr(sampler, "loss_weight") else 1.0

    def observe_padding(self, step: int, batch: Any) -> None:
        """Examine the ``step``-th batch until the padding of batches is known. Collective until then."""
        if self._padding is not None and self._padding.observe(self.sampler, step, batch):
            self._padding = None
            if self._plans_padding:
                self._sums = BalanceSums()  # without the previous steps, whose padding was not known

    def end_training(self) -> None:
        """Log the last epoch, and stop all exchanges."""
        self._end_epoch()
        self._group = None

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self._group is None else gather_objects(value, self._group)

    def _start_epoch(self, sampler: Any) -> None:
        """Log the previous epoch. Raise a RuntimeError if the plans of the ranks differ."""
        self._end_epoch()
        self._epoch, self._planned_by = sampler.epoch, (getattr(sampler, "costs", None), getattr(sampler, "options", {}))
        if self._group is None or not hasattr(sampler, "digest"):
            return
        # not in the loader, where a collective would hang a program that reads a loader on one rank
        with self._timeline.collective("plan"):
            digests = self._gather(sampler.digest())
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise RuntimeError(
                f"the plans of epoch {sampler.epoch} differ: ranks {others} do not agree with rank 0, so samples would be lost "
                "or repeated. Pass the same lengths, cost, seed and options on every rank, and a cost function without "
                "randomness"
            )

    @property
    def _plans_padding(self) -> bool:
        return self._train is not None and self._train.plans_padding

    def _base_in(self, epoch: int) -> float:
        return 0.0 if self._train is None else self._train.base_in(epoch)

    def _log_step(self, balance: StepBalance) -> None:
        if balance.padding is None and self._plans_padding:
            return  # the loader read the step before padding was known
        self._sums.add_step(balance)
        trainer: Any = self.trainer
        due = trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0
        if due and trainer.global_step != self._logged_step:  # several batches may form one step
            self._logged_step = trainer.global_step
            log_scalars(trainer, BalanceReport.from_steps([balance]).scalars("step"))

    def _end_epoch(self) -> None:
        sums, self._sums = self._sums, BalanceSums()
        if not sums.steps:
            return
        report = sums.report()
        log_scalars(self.trainer, report.scalars("epoch"))
        if not self._reported:
            self._reported = True
            rank_zero_info(f"strategy 'freescale': predicted {report}")
            if (advice := self._advice(report)) is not None:
                rank_zero_info(advice)

    def _advice(self, report: BalanceReport | None) -> str | None:
        sampler = self.sampler
        if not getattr(sampler, "balance_steps", False):
            return None
        train = self._train
        lengths = None if train is None else train.lengths
        costs, given = self._planned_by
        options: dict[str, Any] = {"assignment_mode": given["assignment_mode"]}
        if sampler.budget is None:  # otherwise it limits the tokens
            options |= {"max_tokens_per_rank": given.get("max_tokens_per_rank"), "tokens": sampler.tokens}
        if train is not None and sampler.budget is None:
            options["assignment_mode"] = train.assignment_mode
        if report is not None and report.padding is not None:
            if sampler.micro_batches.candidates != [1]:
                return None  # the only advice on padded batches is to use micro-batches
            options["padded"] = True
        epoch = sampler.epoch if self._epoch is None else self._epoch
        options["base"] = self._base_in(epoch)
        if sampler.options_in(epoch, sampler.batches.first_step(epoch))["assignment_mode"] != options["assignment_mode"]:
            report = None  # the epoch began in another mode, so its report mixes two modes
        options |= {name: getattr(sampler, name) for name in ("window", "drop_last", "seed")}
        return advise(costs, sampler.num_replicas, sampler.batch_size, report, lengths, **options)


class PaddingWatch:
    """Detects padding from the first batches of a fit on all ranks. ``gather`` is collective."""

    def __init__(self, train: MapStyleData, gather: Callable[[Any], list[Any]]) -> None:
        self._train, self._gather = train, gather
        self._given_fixed = train.padding == "fixed"  # only the length is unknown
        self._batches: list[BatchShapes] = []  # of all ranks and micro-batches
        self._steps, self._sorted, self._sorted_seen = 0, False, False

    def observe(self, sampler: Any, step: int, batch: Any) -> bool:
        """Observe the ``step``-th batch of ``sampler``, and return whether detection has ended. Collective.

        If the longest sample of every batch is cut to the same length, batches look as if they were padded to that length. So
        samples of similar length are put together for some steps, with equal counts.
        """
        lengths: Any = self._train.lengths
        samples = sampler.batch_of_rank(sampler.epoch, step)
        several = isinstance(samples, MicroBatches)
        parts = zip(batch.batches, samples.batches) if several else [(batch, samples)]
        mine = [astuple(shapes_of(part, np.rint(lengths[np.array(indices)]).astype(np.int64))) for part, indices in parts]
        everyone = self._gather((mine, sampler.handed_out))
        self._batches += [BatchShapes(*shapes) for of_rank, _ in everyone for shapes in of_rank]
        self._steps += 1
        (padding, length), ended = detect_padding(self._batches), self._steps >= _MOST_STEPS
        self._sorted_seen |= self._sorted and sampler.is_padded(sampler.epoch, step)
        unclear = padding == "fixed" or (padding is None and self._steps >= _UNDECIDED_STEPS and sees_padding(self._batches))
        if unclear and not self._sorted_seen and self._train.may_pad:
            padding = None
        epoch, last = max(handed_out for _, handed_out in everyone)
        following = (epoch, last + 1) if last + 1 < len(sampler) else (epoch + 1, 0)  # the first step that no loader has read
        if padding is None and not ended:
            if unclear and not self._sorted and self._train.may_pad:
                self._sorted = True
                self._train.pad_from(*following, assignment_mode="fixed")
            return False
        if padding == "batch" and not self._given_fixed:
            self._plan_for_padding(sampler, following)
        elif self._sorted:
            self._train.pad_from(*following, padded=False)
        if self._given_fixed and padding != "fixed":
            rank_zero_info(
                "strategy 'freescale': BalanceOptions(padding='fixed') is set, but the first batches do not have one length. "
                "Pass padding='auto' to detect how they are padded"
            )
            return True
        self._train.padding = padding or "none"
        if padding != "batch" and padding != "fixed" and (choice := self._train.settle_counts(*following)) is not None:
            rank_zero_info(f"strategy 'freescale': {choice}")
        if padding == "fixed" and length is not None:
            self._train.padded_length = length
            self._log_fixed(sampler, length)
        return True

    def _plan_for_padding(self, sampler: Any, first: tuple[int, int]) -> None:
        if not self._train.may_pad:
            rank_zero_info(
                "strategy 'freescale': the batches are padded to their longest sample, but the plan ignores padding, because "
                "of batch_tokens, balance=False or assignment_mode='zigzag'"
            )
            return
        self._train.pad_from(*first)
        epoch = sampler.epoch
        if sampler.rank == 0 and first[0] == epoch:
            ahead = range(first[1], min(first[1] + _PREDICTED_STEPS, len(sampler)))
            report = BalanceReport.from_steps(sampler.step_plan(epoch, each).balance for each in ahead)
            rank_zero_info(
                f"strategy 'freescale': the batches are padded to their longest sample, so {report.padding_unbalanced:.0%} of "
                f"the computed tokens are padding. From step {first[1]} on, samples of similar length go to the same rank and "
                f"micro-batch. Prediction: {report.padding:.0%} are padding then, and the slowest rank computes "
                f"{report.unbalanced / report.balanced:.2f} times less than without balancing. Pass BalanceOptions(padding="
                "'batch') to start at the first step, or padding='none' to ignore padding"
            )

    def _log_fixed(self, sampler: Any, length: int) -> None:
        lengths = self._train.lengths
        assert lengths is not None
        cut = np.minimum(lengths, length)
        text = (
            f"strategy 'freescale': every batch is padded to {length}, so the load of all ranks is equal, and "
            f"{1 - cut.mean() / length:.0%} of the computed tokens are padding"
        )
        if self._train.may_pad:
            batch_size = min(sampler.batch_size, len(cut) // sampler.num_replicas)
            report = predict(cut, sampler.num_replicas, batch_size, padded=True, assignment_mode="free")
            fewer = length / (float(cut.mean()) * report.balanced)
            text += (
                f". With a collate_fn that pads to the longest sample of the batch, and with balancing, the slowest rank is "
                f"predicted to compute {fewer:.1f} times fewer tokens"
            )
        rank_zero_info(text)
