"""Options of :class:`~lightning_freescale.FreeScaleDataModule` that belong together; in YAML a mapping under ``balance:``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from numpy.typing import ArrayLike

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
