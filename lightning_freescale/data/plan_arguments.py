"""The arguments of FreeScaleDataModule that determine the steps of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning_freescale.balance import BlockShuffle, MicroBatchSchedule
from lightning_freescale.balance.micro_batches import MOST_TRIED
from lightning_freescale.data.options import BalanceOptions
from lightning_freescale.data.validation import LossReduction


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanArguments:
    """The arguments of :class:`~lightning_freescale.FreeScaleDataModule` that determine the steps of training.

    The names are those of the data module.

    Raises:
        ValueError: an argument has a value that no data set accepts.
    """

    lengths: Any
    batch_size: int
    cost: Any
    balance: bool | BalanceOptions
    loss_reduction: LossReduction
    target_counts: Any
    batch_tokens: float | None
    micro_batches: int | Literal["auto"]
    drop_last: bool
    shuffle: bool | BlockShuffle
    seed: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"FreeScaleDataModule(batch_size={self.batch_size!r}): pass the samples per rank, at least 1")
        if not isinstance(self.balance, (bool, BalanceOptions)):
            raise ValueError(f"FreeScaleDataModule(balance={self.balance!r}): pass True, False or BalanceOptions(...)")
        parts, most = self.micro_batches, self._most_micro_batches
        if parts != "auto" and not (isinstance(parts, int) and 1 <= parts <= most):
            raise ValueError(
                f"FreeScaleDataModule(micro_batches={parts!r}, batch_size={self.batch_size}): pass 'auto', or a number from "
                f"1 to {'batch_size' if self.batch_tokens is None else f'{most}, as the number of samples is not given'}"
            )

    @property
    def balances(self) -> bool:
        """Whether samples are assigned by cost."""
        return self.balance is not False

    @property
    def options(self) -> BalanceOptions:
        """The options of the assignment."""
        return self.balance if isinstance(self.balance, BalanceOptions) else BalanceOptions()

    @property
    def has_auto_cost(self) -> bool:
        """Whether the cost is ``"auto"``."""
        return isinstance(self.cost, str) and self.cost == "auto"  # an array would return an array of comparisons

    def new_schedule(self) -> MicroBatchSchedule:
        """Return the numbers of micro-batches of a new fit."""
        return MicroBatchSchedule(self.micro_batches, self._most_micro_batches)

    def check_plain_strategy(self, world_size: int, assignment_mode: str) -> None:
        """Check that a strategy can train that neither weighs the losses of the ranks nor measures times.

        Raises:
            ValueError: an argument needs strategy ``"freescale"``.
        """
        if max(self.new_schedule().candidates) > 1:
            raise ValueError(
                "FreeScaleDataModule(micro_batches=...) needs Trainer(strategy='freescale'): other strategies know batches only"
            )
        if self.options.calibrate:
            raise ValueError("BalanceOptions(calibrate=True) needs Trainer(strategy='freescale'), which measures the times")
        reduction, unequal = self.loss_reduction, assignment_mode in ("slack", "free")
        if world_size > 1 and (reduction in ("target_mean", "sum") or (reduction == "sample_mean" and unequal)):
            raise ValueError(
                f"FreeScaleDataModule(loss_reduction={reduction!r}) with BalanceOptions(assignment_mode={assignment_mode!r}) "
                "needs Trainer(strategy='freescale') to weigh each rank's loss; this strategy averages the ranks' losses as "
                "they are. Use loss_reduction='unweighted' if that is what you want"
            )

    @property
    def _most_micro_batches(self) -> int:
        return self.batch_size if self.batch_tokens is None else MOST_TRIED
