"""Find out from the first batches how a model pads them, and plan the steps for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lightning_freescale._lightning.loops import rank_zero_info
from lightning_freescale.balance import BalanceReport, predict
from lightning_freescale.balance.micro_batches import MicroBatches
from lightning_freescale.data.map_style import MapStyleData
from lightning_freescale.data.padding import PaddingDetector, shapes_of

_MOST_STEPS = 20
"""Steps after which batches that do not tell are taken to be jagged."""
_PREDICTED_STEPS = 8


class PaddingWatch:
    """Observes the first batches of a fit on all ranks.

    Args:
        train: the training data, with lengths.
        gather: returns the values of all ranks, by rank. Collective.
    """

    def __init__(self, train: MapStyleData, gather: Callable[[Any], list[Any]]) -> None:
        self._train, self._gather = train, gather
        self._detector = PaddingDetector()
        self._steps = 0

    def observe(self, sampler: Any, step: int, batch: Any) -> bool:
        """Observe the ``step``-th batch of ``sampler``; return whether its padding is known, or will not be. Collective."""
        lengths: Any = self._train.lengths
        samples = sampler.batch_of_rank(sampler.epoch, step)
        several = isinstance(samples, MicroBatches)
        parts = zip(batch.batches, samples.batches) if several else [(batch, samples)]
        mine = [shapes_of(part, lengths[np.array(indices)]) for part, indices in parts]
        everyone = self._gather((mine, sampler.handed_out))
        self._detector.observe([shapes for shapes_of_rank, _ in everyone for shapes in shapes_of_rank])
        self._steps += 1
        padding = self._detector.padding
        if padding == "batch":
            self._plan_for_padding(sampler, max(handed_out for _, handed_out in everyone))
        elif padding == "fixed":
            self._train.padding = padding
            self._tell_fixed(sampler)
        return padding is not None or self._steps >= _MOST_STEPS

    def _plan_for_padding(self, sampler: Any, last: tuple[int, int]) -> None:
        if not self._train.may_pad:
            rank_zero_info(
                "strategy 'freescale': the batches are padded to their longest sample, and balanced as if they were not: "
                "batch_tokens, batch_cost, keep_together, balance=False and assignment_mode='zigzag' leave no other choice"
            )
            return
        self._train.padding = "batch"
        epoch, step = last
        first = (epoch, step + 1) if step + 1 < len(sampler) else (epoch + 1, 0)
        self._train.pad_from(*first)
        if sampler.rank == 0 and first[0] == epoch:
            ahead = range(first[1], min(first[1] + _PREDICTED_STEPS, len(sampler)))
            report = BalanceReport.from_steps(sampler.step_plan(epoch, each).balance for each in ahead)
            rank_zero_info(
                f"strategy 'freescale': the batches are padded to their longest sample, so {report.padding_unbalanced:.0%} of the "
                f"computed tokens are padding. From step {first[1]} on, samples of about the same length come to the same rank: "
                f"predicted {report.padding:.0%} padding, and {report.unbalanced / report.balanced:.2f} times the speed of the "
                "samples as drawn. BalanceOptions(padding='batch') does so from the first step on, padding='none' never"
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
