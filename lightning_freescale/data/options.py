"""Arguments of :class:`~lightning_freescale.FreeScaleDataModule` that determine the steps of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance import BlockShuffle, MicroBatchSchedule
from lightning_freescale.balance.micro_batches import MOST_TRIED
from lightning_freescale.data.validation import LossReduction

_PADDING = ("auto", "none", "batch", "fixed")


# eq=False: options may contain arrays, for which == returns an array
@dataclass(frozen=True, eq=False)
class BalanceOptions:
    """Options of the assignment of the samples of a step to the ranks.

    Args:
        assignment_mode: ``"fixed"``, ``"slack"``, ``"free"`` or ``"zigzag"`` of :func:`lightning_freescale.balance.assign`.
            The default ``"auto"`` chooses ``"slack"`` for jagged batches with strategy ``"freescale"`` if unequal counts lower
            the lower bound of the imbalance by more than 1 %, and otherwise ``"fixed"``. A log line states the choice and both
            bounds. ``"auto"`` means ``"free"`` with ``batch_tokens`` and ``"fixed"`` for streams.
        max_tokens_per_rank: as in :func:`lightning_freescale.balance.assign`.
        tokens: tokens of every sample, shape ``[samples]``. Default: ``lengths``.
        padding: padding of the model's batches.

            - ``"auto"``: strategy ``"freescale"`` detects the padding from the first batches.
            - ``"none"``: batches are jagged.
            - ``"fixed"``: all batches are padded to the same length, so that equal counts are balanced.
            - ``"batch"``: each batch or micro-batch is padded to its longest sample. A rank costs its number of samples times
              the cost of the most expensive one, so samples of similar length are assigned to the same rank. Counts may be
              unequal unless ``assignment_mode`` is given or ``loss_reduction="unweighted"``. No rank has more tokens,
              including padding, than the fullest rank as drawn.

    Raises:
        ValueError: an option is invalid, or would have no effect.
    """

    assignment_mode: Literal["auto", "fixed", "slack", "free", "zigzag"] = "auto"
    max_tokens_per_rank: float | None = None
    tokens: ArrayLike | Sequence[float] | None = None
    padding: Literal["auto", "none", "batch", "fixed"] = "auto"

    def __post_init__(self) -> None:
        if self.padding not in _PADDING:
            raise ValueError(f"BalanceOptions(padding={self.padding!r}): pass {' or '.join(map(repr, _PADDING))}")


@dataclass(frozen=True, eq=False, kw_only=True)
class DataArguments:
    """The arguments of the data module that determine the steps of training, with the same names."""

    lengths: ArrayLike | Callable[[Any], float] | None
    batch_size: int
    cost: Callable[..., Any] | Sequence[float] | NDArray[Any] | Literal["auto"]
    balance: bool | BalanceOptions
    loss_reduction: LossReduction
    target_counts: ArrayLike | Callable[[Any], float] | None
    batch_tokens: float | None
    micro_batches: int | Literal["auto"]
    drop_last: bool
    shuffle: bool | BlockShuffle
    seed: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(
                f"FreeScaleDataModule(batch_size={self.batch_size!r}): the number of samples per rank must be at least 1"
            )
        if not isinstance(self.balance, (bool, BalanceOptions)):
            raise ValueError(f"FreeScaleDataModule(balance={self.balance!r}): pass True, False or BalanceOptions(...)")
        parts, most = self.micro_batches, self._most_micro_batches
        if parts != "auto" and not (isinstance(parts, int) and 1 <= parts <= most):
            raise ValueError(
                f"FreeScaleDataModule(micro_batches={parts!r}, batch_size={self.batch_size}): pass 'auto', or a number from "
                f"1 to {'batch_size' if self.batch_tokens is None else f'{most} with batch_tokens='}"
            )

    def without_data(self) -> DataArguments:
        """Return the arguments without functions of samples, which may not be picklable."""
        return replace(self, lengths=None, target_counts=None, cost="auto" if self.has_auto_cost else ())

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
        return isinstance(self.cost, str) and self.cost == "auto"  # == with an array returns an array

    def new_schedule(self) -> MicroBatchSchedule:
        """Return the schedule of micro-batches of a new fit."""
        return MicroBatchSchedule(self.micro_batches, self._most_micro_batches)

    def check_plain_strategy(self, world_size: int, assignment_mode: str) -> None:
        """Raise a ValueError for arguments that need strategy ``"freescale"``, which weighs losses and divides batches."""
        if max(self.new_schedule().candidates) > 1:
            raise ValueError(
                "FreeScaleDataModule(micro_batches=...) is only supported with Trainer(strategy='freescale'). Change "
                "the strategy, or remove micro_batches="
            )
        reduction, unequal = self.loss_reduction, assignment_mode in ("slack", "free")
        if world_size > 1 and (reduction in ("target_mean", "sum") or (reduction == "sample_mean" and unequal)):
            raise ValueError(
                f"FreeScaleDataModule(loss_reduction={reduction!r}) with BalanceOptions(assignment_mode={assignment_mode!r}) "
                "needs Trainer(strategy='freescale'), which weighs each rank's loss. The current strategy averages the losses "
                "without weights. Pass loss_reduction='unweighted' to accept this"
            )

    @property
    def _most_micro_batches(self) -> int:
        return self.batch_size if self.batch_tokens is None else MOST_TRIED
