"""Find out from the first batches how a model pads them, and plan the steps for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np

from lightning_freescale._lightning.loops import rank_zero_info
from lightning_freescale.balance import BalanceReport, predict
from lightning_freescale.balance.micro_batches import MicroBatches
from lightning_freescale.data.map_style import MapStyleData
from lightning_freescale.data.padding import BatchShapes, PaddingDetector, shapes_of

_MOST_STEPS = 12
"""Steps after which batches that do not tell are taken to be jagged."""
_UNDECIDED_STEPS = 2
"""Steps after which samples are sorted by length, so that batches differ."""
_PREDICTED_STEPS = 8
"""Steps that the forecast is made of."""


class PaddingWatch:
    """Observes the first batches of a fit on all ranks.

    Args:
        train: the training data, with lengths.
        gather: returns the values of all ranks, by rank. Collective.
    """

    def __init__(self, train: MapStyleData, gather: Callable[[Any], list[Any]]) -> None:
        self._train, self._gather = train, gather
        self._given_fixed = train.padding == "fixed"  # the length is to be found out alone
        self._detector = PaddingDetector()
        self._steps, self._sorted, self._sorted_seen = 0, False, False

    def observe(self, sampler: Any, step: int, batch: Any) -> bool:
        """Observe the ``step``-th batch of ``sampler``; return whether its padding is known, or will not be. Collective.

        Batches look as if they were padded to a fixed length where the longest sample of each is cut to that length. So samples
        of about the same length come together for some steps, at equal counts.
        """
        lengths: Any = self._train.lengths
        samples = sampler.batch_of_rank(sampler.epoch, step)
        several = isinstance(samples, MicroBatches)
        parts = zip(batch.batches, samples.batches) if several else [(batch, samples)]
        mine = [astuple(shapes_of(part, np.rint(lengths[np.array(indices)]).astype(np.int64))) for part, indices in parts]
        everyone = self._gather((mine, sampler.handed_out))
        self._detector.observe([BatchShapes(*shapes) for of_rank, _ in everyone for shapes in of_rank])
        self._steps += 1
        padding, ended = self._detector.padding, self._steps >= _MOST_STEPS
        self._sorted_seen |= self._sorted and sampler.is_padded(sampler.epoch, step)
        unclear = padding == "fixed" or (padding is None and self._detector.sees_padding and self._steps >= _UNDECIDED_STEPS)
        if unclear and not self._sorted_seen and self._train.may_pad:
            padding = None
        following = _after(max(handed_out for _, handed_out in everyone), sampler)
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
                "strategy 'freescale': BalanceOptions(padding='fixed'), but the first batches do not show one length: "
                "padding='auto' finds out how they are padded"
            )
            return True
        self._train.padding = padding or "none"
        if padding != "batch" and padding != "fixed" and (choice := self._train.settle_counts(*following)) is not None:
            rank_zero_info(f"strategy 'freescale': {choice}")
        if padding == "fixed":
            self._train.padded_length = self._detector.padded_length
            self._tell_fixed(sampler)
        return True

    def _plan_for_padding(self, sampler: Any, first: tuple[int, int]) -> None:
        if not self._train.may_pad:
            rank_zero_info(
                "strategy 'freescale': the batches are padded to their longest sample, and balanced as if they were not: "
                "batch_tokens, balance=False and assignment_mode='zigzag' leave no other choice"
            )
            return
        self._train.pad_from(*first)
        epoch = sampler.epoch
        if sampler.rank == 0 and first[0] == epoch:
            ahead = range(first[1], min(first[1] + _PREDICTED_STEPS, len(sampler)))
            report = BalanceReport.from_steps(sampler.step_plan(epoch, each).balance for each in ahead)
            rank_zero_info(
                f"strategy 'freescale': the batches are padded to their longest sample, so {report.padding_unbalanced:.0%} of "
                f"the computed tokens are padding. From step {first[1]} on, samples of about the same length come to the same "
                f"rank and micro-batch. Predicted: {report.padding:.0%} are padding then, and the slowest rank computes "
                f"{report.unbalanced / report.balanced:.2f} times less than with the samples as drawn. "
                "BalanceOptions(padding='batch') does so from the first step on, padding='none' never"
            )

    def _tell_fixed(self, sampler: Any) -> None:
        length, lengths = self._detector.padded_length, self._train.lengths
        assert length is not None
        assert lengths is not None
        cut = np.minimum(lengths, length)
        told = (
            f"strategy 'freescale': every batch is padded to {length}, so all ranks compute the same, and "
            f"{1 - cut.mean() / length:.0%} of the computed tokens are padding"
        )
        if self._train.may_pad:
            batch_size = min(sampler.batch_size, len(cut) // sampler.num_replicas)
            report = predict(cut, sampler.num_replicas, batch_size, padded=True, assignment_mode="free")
            fewer = length / (float(cut.mean()) * report.balanced)
            told += (
                f". With a collate_fn that pads to the longest sample of the batch, the slowest rank is predicted to compute "
                f"{fewer:.1f} times fewer tokens, balanced"
            )
        rank_zero_info(told)


def _after(last: tuple[int, int], sampler: Any) -> tuple[int, int]:
    """Return the first step behind the last one that any loader has read."""
    epoch, step = last
    return (epoch, step + 1) if step + 1 < len(sampler) else (epoch + 1, 0)
