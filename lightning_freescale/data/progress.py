"""Where a run stands in its training data: what a checkpoint keeps of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Progress:
    """After ``batches`` steps of ``epoch``, in which ``consumed`` samples of its order were used.

    The order of an epoch follows from ``seed``, ``samples`` and ``shuffle``, and with an ``outlier_window`` from how it is
    cut into steps and from the costs, too (``costs`` is a hash of them then).
    """

    seed: int
    epoch: int
    batches: int
    consumed: int
    samples: int
    shuffle: int
    outlier_window: int
    batch_size: int
    ranks: int
    drop_last: int
    costs: str

    def state(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)

    @classmethod
    def resumed(cls, state: dict[str, Any], now: Progress) -> Progress:
        """The progress in a checkpoint, for a run that would start as ``now``.

        Raises:
            ValueError: inside an epoch, this run's order is another: samples would be lost or repeated.
        """
        then = cls(**{name: state[name] for name in asdict(now)})
        if not then.batches:
            return then
        names = ["samples", "shuffle", "outlier_window"]
        if now.outlier_window > 1:
            names += ["batch_size", "ranks", "drop_last", "costs"]
        for name in names:
            if getattr(then, name) != getattr(now, name):
                raise ValueError(
                    f"the checkpoint stopped inside an epoch with {name}={getattr(then, name)}, this run has "
                    f"{name}={getattr(now, name)}: samples would be lost or repeated. Keep it as it was, or resume from a "
                    "checkpoint made at the end of an epoch."
                )
        return then
