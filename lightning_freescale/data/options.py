"""The arguments of :class:`~lightning_freescale.FreeScaleDataModule` that determine the steps of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance import BlockShuffle, MicroBatchSchedule
from lightning_freescale.balance.micro_batches import MOST_TRIED
from lightning_freescale.data.validation import LossReduction

_PADDING = ("auto", "none", "batch", "fixed")


# eq=False: options may hold arrays, of which == gives no single answer
@dataclass(frozen=True, eq=False)
class BalanceOptions:
    """How the samples of a step are assigned to the ranks, and by which costs.

    Args:
        assignment_mode: ``"fixed"``, ``"slack"``, ``"free"`` or ``"zigzag"`` of :func:`lightning_freescale.balance.assign`.
            ``"auto"``: ``"slack"``, where strategy ``"freescale"`` weighs the loss of jagged batches and the lower bound of the
            imbalance at equal counts is more than 1 % above the bound at unequal ones, and else ``"fixed"``. A line of the log
            states the choice and both bounds. With ``batch_tokens`` always ``"free"``; for streams
            ``"fixed"``.
        max_tokens_per_rank: as in :func:`lightning_freescale.balance.assign`.
        tokens: tokens of every sample, shape ``[samples]``; ``lengths`` if not given.
        calibrate: fit a :class:`~lightning_freescale.balance.CostModel` to the compute times that strategy ``"freescale"``
            measures, and plan by it from the next epoch on if it predicts times clearly better. Which rank computes a sample,
            never which samples a step has, then depends on the clock: two such runs agree to rounding. ``True``: always, and
            every fifth of the first 50 steps is computed as drawn, to tell the coefficients apart whatever the cost is.
            ``False``: never, so that a run repeats to the bit. By default with ``cost="auto"`` and several ranks, without
            steps as drawn: epoch 0 is that of ``False``.
        padding: how the model's batches are padded. ``"batch"``: to the longest sample of the batch (or micro-batch), so that a
            rank costs its number of samples times the cost of the dearest one. Samples of about the same length then come to
            the same rank, at any counts unless ``assignment_mode`` is given or ``loss_reduction="unweighted"``, and no rank
            holds more tokens, padding included, than the fullest one would as drawn. ``"fixed"``: to one length for all
            batches, so that equal counts are balanced. ``"none"``: batches are jagged. ``"auto"``: strategy ``"freescale"``
            finds out from the first batches.

    Raises:
        ValueError: an option does not fit, or would have no effect.
    """

    assignment_mode: Literal["auto", "fixed", "slack", "free", "zigzag"] = "auto"
    max_tokens_per_rank: float | None = None
    tokens: ArrayLike | Sequence[float] | None = None
    calibrate: bool | None = None
    padding: Literal["auto", "none", "batch", "fixed"] = "auto"

    def __post_init__(self) -> None:
        if self.padding not in _PADDING:
            raise ValueError(f"BalanceOptions(padding={self.padding!r}): choose {' or '.join(map(repr, _PADDING))}")
        if not isinstance(self.calibrate, (bool, type(None))):
            raise ValueError(f"BalanceOptions(calibrate={self.calibrate!r}): pass True, False, or None for the default")


@dataclass(frozen=True, eq=False, kw_only=True)
class DataArguments:
    """The arguments of :class:`~lightning_freescale.FreeScaleDataModule` that determine the steps of training.

    The names are those of the data module.

    Raises:
        ValueError: an argument has a value that no data set accepts.
    """

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
            raise ValueError(f"FreeScaleDataModule(batch_size={self.batch_size!r}): pass the samples per rank, at least 1")
        if not isinstance(self.balance, (bool, BalanceOptions)):
            raise ValueError(f"FreeScaleDataModule(balance={self.balance!r}): pass True, False or BalanceOptions(...)")
        parts, most = self.micro_batches, self._most_micro_batches
        if parts != "auto" and not (isinstance(parts, int) and 1 <= parts <= most):
            raise ValueError(
                f"FreeScaleDataModule(micro_batches={parts!r}, batch_size={self.batch_size}): pass 'auto', or a number from "
                f"1 to {'batch_size' if self.batch_tokens is None else f'{most}, as the number of samples is not given'}"
            )

    def without_data(self) -> DataArguments:
        """Return the arguments without what has been read of the samples: its functions may not be picklable."""
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
