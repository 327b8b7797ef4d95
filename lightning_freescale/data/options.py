"""Options of :class:`~lightning_freescale.FreeScaleDataModule` that belong together; in YAML a mapping under ``balance:``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from numpy.typing import ArrayLike

from lightning_freescale.data.validation import refuse_options

_PADDING, _SLOW_RANKS = ("auto", "none", "batch", "fixed"), ("report", "rebalance")


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
        count_slack, max_tokens_per_rank, rank_speeds: as in :func:`lightning_freescale.balance.assign`.
        tokens: tokens of every sample, shape ``[samples]``; ``lengths`` if not given.
        keep_together: group of every sample, shape ``[samples]``; samples of a group that share a step go to one rank.
        outlier_window: exchange samples between this many consecutive steps so that those that dominate a step come together.
            Not gradient-identical: it changes which samples share a step. 1 for no exchange.
        window: with ``Trainer(accumulate_grad_batches=k)``, share the samples of an optimizer step out among its k
            micro-batches, so that those that cost much are computed at the same time; each keeps its number of samples.
            ``"auto"``: where that changes the gradient by rounding alone, with ``loss_reduction="sample_mean"`` and
            ``"sum"``, and nothing else says where a sample is to be. ``True``: with ``"target_mean"``, too; the gradient is
            then that of the mean over all targets of the optimizer step, not of the mean of its micro-batches' means. A window
            of which a micro-batch would not fit into ``max_tokens_per_rank`` stays as drawn.
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
        slow_ranks: what to do, while calibrating, about ranks that are slow for reasons the costs do not explain:
            ``"report"`` them, or ``"rebalance"``: give them less work from the next epoch on.

    Raises:
        ValueError: an option does not fit, or would have no effect.
    """

    assignment_mode: Literal["auto", "fixed", "slack", "free", "zigzag"] = "auto"
    count_slack: float = 0.25
    max_tokens_per_rank: float | None = None
    tokens: ArrayLike | Sequence[float] | None = None
    rank_speeds: Sequence[float] | None = None
    keep_together: ArrayLike | Sequence[int] | None = None
    outlier_window: int = 1
    window: bool | Literal["auto"] = "auto"
    calibrate: bool | None = None
    padding: Literal["auto", "none", "batch", "fixed"] = "auto"
    slow_ranks: Literal["report", "rebalance"] = "report"

    def __post_init__(self) -> None:
        for name, known in {"padding": _PADDING, "slow_ranks": _SLOW_RANKS}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"BalanceOptions({name}={getattr(self, name)!r}): choose {' or '.join(map(repr, known))}")
        if self.slow_ranks == "rebalance" and not self.calibrate:
            raise ValueError("BalanceOptions(slow_ranks='rebalance') needs calibrate=True, which finds the slow ranks")
        if not isinstance(self.calibrate, (bool, type(None))):
            raise ValueError(f"BalanceOptions(calibrate={self.calibrate!r}): pass True, False, or None for the default")
        if not isinstance(self.window, bool) and self.window != "auto":  # 1 is equal to True, and would not count as it
            raise ValueError(f"BalanceOptions(window={self.window!r}): pass True, False or 'auto'")
        if self.window is True:
            context = "window=True, which shares samples out among micro-batches by their costs"
            refuse_options(context, self, "outlier_window", "keep_together")
            if self.assignment_mode == "zigzag":
                raise ValueError(
                    "BalanceOptions(window=True) has no meaning for assignment_mode='zigzag', which knows no window: leave it "
                    "out, or use another assignment_mode"
                )
        if self.assignment_mode == "zigzag":
            refuse_options("assignment_mode='zigzag', which deals to all ranks alike", self, "rank_speeds", "slow_ranks")
        if self.assignment_mode != "slack":
            refuse_options(f"assignment_mode={self.assignment_mode!r}", self, "count_slack")
