"""What a step has to compute and to move, besides the lengths of its histories."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.simulator.catalogue import Catalogue
from lightning_freescale.simulator.quantity import Quantity, assumed

Floats = NDArray[np.float64]
ID_BYTES = 8


@dataclass(frozen=True)
class TrainingLoad:
    """A rank's step, as measured or assumed.

    Attributes:
        batch_size: samples per rank and step.
        linear: seconds of compute per item of a history.
        quadratic: seconds per square of its length.
        constant: seconds per history.
        base: seconds of a rank's step that no sample explains.
        catalogue: the rows, and how popular they are.
        row_bytes: of the rows of all tables that an item looks up.
        dense_bytes: of the gradients that are reduced over all ranks.
        host: seconds per step in which a rank neither computes nor exchanges: the loop, launches, waits for data.
        overlap_calls: calls that the overlapped exchange takes on the host, for a step and for each further rank.
        call: seconds of such a call.
        contention: share by which compute takes longer while an exchange on streaming multiprocessors is under way.
        late_weights: share of compute that a split backward has after the gradients of the rows.
        split_cost: share by which a split backward lengthens compute.
        backward: share of compute that is backward.
    """

    batch_size: int
    linear: Quantity
    quadratic: Quantity
    constant: Quantity = field(default_factory=lambda: Quantity(0.0, "assumed", unit="s"))
    base: Quantity = field(default_factory=lambda: Quantity(0.0, "assumed", unit="s"))
    catalogue: Catalogue = field(default_factory=Catalogue)
    row_bytes: int = 1024
    dense_bytes: Quantity = field(default_factory=lambda: assumed(2e8, 1e7, 1e9, "B", "50 million dense parameters"))
    host: Quantity = field(default_factory=lambda: assumed(2e-3, 1e-3, 6e-3, "s", "the loop and its launches"))
    overlap_calls: tuple[int, int] = (855, 79)
    call: Quantity = field(default_factory=lambda: assumed(1.5e-7, 1e-7, 5e-7, "s", "a call of Python"))
    contention: Quantity = field(default_factory=lambda: assumed(0.1, 0.0, 0.3, "", "FreeScale, figure 10; PyTorch #179937"))
    late_weights: Quantity = field(default_factory=lambda: assumed(0.15, 0.1, 0.25, "", "linear layers' share of backward"))
    split_cost: Quantity = field(default_factory=lambda: assumed(0.05, 0.0, 0.09, "", "measured on a CPU"))
    backward: float = 2 / 3

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.row_bytes < 1:
            raise ValueError(f"TrainingLoad(batch_size={self.batch_size}, row_bytes={self.row_bytes}): pass at least 1 of each")

    @classmethod
    def from_compute(
        cls, batch_size: int, lengths: Floats, compute: Quantity, attention: Quantity, **others: object
    ) -> TrainingLoad:
        """Return the load of which only the compute of a mean step is known.

        Args:
            batch_size: samples per rank and step.
            lengths: of the histories, shape ``[samples]``.
            compute: seconds of a rank's step, mean over steps and ranks.
            attention: share of it that grows with the square of a history's length.
            **others: further fields.
        """
        mean, square = float(lengths.mean()), float((lengths.astype(np.float64) ** 2).mean())
        ends = [(compute.low, attention.high), (compute.value, attention.value), (compute.high, attention.low)]
        linear = [seconds * (1 - share) / batch_size / max(mean, 1e-300) for seconds, share in ends]
        ends = [(compute.low, attention.low), (compute.value, attention.value), (compute.high, attention.high)]
        squares = [seconds * share / batch_size / max(square, 1e-300) for seconds, share in ends]
        word = "measured" if compute.word == attention.word == "measured" else "assumed"
        known = {
            name: Quantity(value, word, low, high, "s", compute.source)  # type: ignore[arg-type]
            for name, (low, value, high) in (("linear", linear), ("quadratic", squares))
        }
        return cls(batch_size, **known, **others)  # type: ignore[arg-type]

    def seconds(self, sums: Floats) -> Floats:
        """Return the compute of samples whose sums of 1, L and L² are the last dimension of ``sums``."""
        return sums @ np.array([self.constant.value, self.linear.value, self.quadratic.value])
