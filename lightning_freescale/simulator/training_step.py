"""The times of a training step: each rank continues when both its own work and its exchange are done (max-plus)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from lightning_freescale.balance.validation import Floats
from lightning_freescale.simulator.catalogue import Catalogue
from lightning_freescale.simulator.network import Network
from lightning_freescale.simulator.quantity import Quantity, assumed

ID_BYTES = 8


@dataclass(frozen=True)
class TrainingLoad:
    """The work of a rank's step, measured or assumed.

    Attributes:
        batch_size: Number of samples per rank and step.
        linear: Compute of an item of a history, in seconds.
        quadratic: Compute per squared length of a history, in seconds.
        constant: Compute of a history, in seconds.
        base: Compute of a step that does not depend on samples, in seconds.
        catalogue: Number and popularity of the rows.
        row_bytes: Bytes of the rows of all tables that an item looks up.
        dense_bytes: Bytes of the gradients that are reduced over all ranks.
        last_bucket: Bytes of the last bucket of DDP, which is reduced after backward. It has at most ``dense_bytes``.
        host: Seconds of a step for the loop, launches and waiting for data.
        overlap_calls: Number of Python calls of the overlapped exchange, per step and per rank.
        call: Seconds of such a call.
        contention: Share by which an exchange on streaming multiprocessors slows compute down.
        late_weights: Share of compute that a split backward does after the gradients of the rows.
        split_cost: Share by which a split backward increases compute.
        backward: Share of backward in compute.

    Raises:
        ValueError: ``batch_size`` or ``row_bytes`` is less than 1.
    """

    batch_size: int
    linear: Quantity
    quadratic: Quantity
    constant: Quantity = field(default_factory=lambda: Quantity(0.0, "assumed", unit="s"))
    base: Quantity = field(default_factory=lambda: Quantity(0.0, "assumed", unit="s"))
    catalogue: Catalogue = field(default_factory=Catalogue)
    row_bytes: int = 1024
    dense_bytes: Quantity = field(default_factory=lambda: assumed(2e8, 1e7, 1e9, "B", "50 million dense parameters"))
    last_bucket: Quantity = field(default_factory=lambda: assumed(1.25e7, 1e6, 2.5e7, "B", "DDP's buckets of 25 MiB"))
    host: Quantity = field(default_factory=lambda: assumed(2e-3, 1e-3, 6e-3, "s", "training loop and kernel launches"))
    overlap_calls: tuple[int, int] = (855, 79)
    call: Quantity = field(default_factory=lambda: assumed(1.5e-7, 1e-7, 5e-7, "s", "a Python call"))
    contention: Quantity = field(default_factory=lambda: assumed(0.1, 0.0, 0.3, "", "FreeScale, figure 10; PyTorch #179937"))
    late_weights: Quantity = field(default_factory=lambda: assumed(0.15, 0.1, 0.25, "", "share of linear layers in backward"))
    split_cost: Quantity = field(default_factory=lambda: assumed(0.05, 0.0, 0.09, "", "measured on a CPU"))
    backward: float = 2 / 3

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.row_bytes < 1:
            raise ValueError(f"TrainingLoad(batch_size={self.batch_size}, row_bytes={self.row_bytes}): pass numbers >= 1")

    @classmethod
    def from_compute(
        cls, batch_size: int, lengths: Floats, compute: Quantity, attention: Quantity, **others: object
    ) -> TrainingLoad:
        """Return the load for a given compute time of a rank's step in seconds, the mean over steps and ranks.

        ``attention`` is the share of compute that is quadratic in the length of a history. ``others`` are other fields.
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
        """Return the seconds of compute for sums of 1, L and L² over samples, which are the last dimension of ``sums``."""
        return sums @ np.array([self.constant.value, self.linear.value, self.quadratic.value])


@dataclass(frozen=True)
class Techniques:
    """The techniques in use. By default none is, which is plain TorchRec and DDP.

    Attributes:
        balance: Samples are assigned by cost.
        overlap: Rows that do not collide are exchanged during compute.
        dedup: Rows that a rank needs several times are sent once.
        split_backward: Gradients of rows are computed before those of weights, which hide their exchange; needs ``overlap``.
        micro_batches: Number of micro-batches of a step; more than one needs ``overlap``.
        two_level: Rows cross between nodes once for all ranks of a node; needs ``overlap`` and ``dedup``.
        sm_free: Exchanges do not slow compute down.

    Raises:
        ValueError: A technique is used without another one that it needs.
    """

    balance: bool = False
    overlap: bool = False
    dedup: bool = False
    split_backward: bool = False
    micro_batches: int = 1
    two_level: bool = False
    sm_free: bool = False

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(f"Techniques(micro_batches={self.micro_batches}): pass a number of at least 1")
        alone = [name for name in ("split_backward", "two_level") if getattr(self, name)]
        alone += ["micro_batches"] * (self.micro_batches > 1)
        if alone and not self.overlap:
            raise ValueError(f"Techniques({', '.join(alone)}) has no effect without overlap=True. Pass overlap=True.")
        if self.two_level and not self.dedup:
            raise ValueError("Techniques(two_level=True) sends each row once. Pass dedup=True.")

    def __str__(self) -> str:
        names = [each.name for each in fields(self) if each.name != "micro_batches" and getattr(self, each.name)]
        names += [f"micro_batches={self.micro_batches}"] if self.micro_batches > 1 else []
        return ", ".join(names) or "plain"


LADDER = {
    "plain": Techniques(),
    "balance": Techniques(balance=True),
    "overlap": Techniques(overlap=True, dedup=True),
    "balance + overlap": Techniques(balance=True, overlap=True, dedup=True),
    "+ SM-free": Techniques(balance=True, overlap=True, dedup=True, sm_free=True),
    "+ split backward": Techniques(balance=True, overlap=True, dedup=True, sm_free=True, split_backward=True),
    "+ 4 micro-batches": Techniques(True, True, True, True, 4, False, True),
    "+ two levels": Techniques(True, True, True, True, 4, True, True),
}
"""Each technique and their combination. Overlap includes dedup, as in the strategy."""


@dataclass(frozen=True)
class StepTraffic:
    """The compute and the exchanged bytes of a step on each rank, shape ``[ranks]`` each.

    Attributes:
        compute: Seconds of compute without contention.
        ids: Bytes of the ids that are sent to the owners of the rows.
        rows: Bytes of the rows that are received, and of their gradients that are sent.
        colliding_rows: Bytes of the rows that wait for the step before.
        colliding_gradients: Bytes of the gradients that the next step waits for.
        node_share: Share of a node's rows that crosses between nodes in an exchange in two levels.
        hot_owner: Load of the busiest owner / mean load of the owners.
    """

    compute: Floats
    ids: Floats
    rows: Floats
    colliding_rows: Floats
    colliding_gradients: Floats
    node_share: float = 1.0
    hot_owner: float = 1.0


def expected_traffic(
    compute: Floats, tokens: Floats, load: TrainingLoad, network: Network, chosen: Techniques
) -> list[StepTraffic]:
    """Return the traffic of steps with given compute and numbers of looked-up items, shape ``[steps, ranks]`` each."""
    known, parts, steps = load.catalogue, chosen.micro_batches, []
    totals = tokens.sum(axis=1)
    for index, (seconds, items) in enumerate(zip(compute, tokens)):
        before, after = totals[index - 1], totals[(index + 1) % len(totals)]
        first = items / parts  # items of the first micro-batch, and of the last one
        rows = known.unique(items) if chosen.dedup else items
        times = rows / np.maximum(known.unique(items), 1e-300)  # how often a row is sent
        waited = known.colliding(first, before) * times
        returned = known.colliding(first, after / parts) * times
        node, mean = min(network.ranks_per_node, len(items)), float(items.mean())
        share = float(known.unique(node * mean) / (node * known.unique(mean))) if mean > 0 else 1.0
        size = float(load.row_bytes)
        hot = 1.0 if chosen.dedup else known.hot_owner(len(items))  # the hash spreads different rows evenly
        steps.append(StepTraffic(seconds, rows * ID_BYTES, rows * size, waited * size, returned * size, share, hot))
    return steps


def step_times(traffic: Sequence[StepTraffic], load: TrainingLoad, network: Network, chosen: Techniques) -> Floats:
    """Return the wall time of each step in seconds, shape ``[steps]``. The first step follows the last one.

    A wall time is never below the mean compute of the ranks, because techniques reduce only waiting.
    """
    run = _overlapped if chosen.overlap else _plain
    return np.array([run(traffic, index, load, network, chosen) for index in range(len(traffic))])


def bubble(walls: Floats, compute: Floats) -> float:
    """Return 1 - mean compute of the ranks / wall time; shapes ``[steps]`` and ``[steps, ranks]``."""
    return float(1 - compute.mean(axis=1).sum() / walls.sum())


def _plain(traffic: Sequence[StepTraffic], index: int, load: TrainingLoad, network: Network, chosen: Techniques) -> float:
    now = traffic[index]
    ranks = len(now.compute)
    nothing = np.zeros(ranks)
    clock = np.full(ranks, load.host.value)
    clock = network.finish(clock, now.ids, nothing, hot_owner=now.hot_owner)
    clock = network.finish(clock, nothing, now.rows, hot_owner=now.hot_owner)
    clock = network.finish(clock + now.compute + load.base.value, now.rows, nothing, hot_owner=now.hot_owner)
    return float(clock.max()) + _exposed_all_reduce(load.backward * now.compute, load, network)


def _overlapped(traffic: Sequence[StepTraffic], index: int, load: TrainingLoad, network: Network, chosen: Techniques) -> float:
    """Return the seconds from the forward of a step to that of the next step, which waits only for colliding rows."""
    last, now, following = traffic[index - 1], traffic[index], traffic[(index + 1) % len(traffic)]
    ranks = len(now.compute)
    nothing, how = np.zeros(ranks), (now.node_share if chosen.two_level else None, now.hot_owner)
    # half of the calls belong to exchanges that are waited for; the other half runs behind compute for each micro-batch
    calls = (load.overlap_calls[0] + load.overlap_calls[1] * ranks) * load.call.value / 2
    # also behind compute: the last step's other gradients, the next step's ids, and the next step's other rows
    behind = nothing + calls * chosen.micro_batches
    behind = network.finish(behind, last.rows - last.colliding_gradients, nothing, *how)
    behind = network.finish(behind, following.ids, nothing, *how)
    behind = network.finish(behind, nothing, following.rows - following.colliding_rows, *how)
    work = (now.compute + load.base.value) * (1 + (load.split_cost.value if chosen.split_backward else 0.0))
    slower = 1 + (0.0 if chosen.sm_free else load.contention.value)
    late = (load.late_weights.value if chosen.split_backward else 0.0) * work
    computed = _slowed(work - late, behind, slower)
    urgent = np.maximum(computed, behind)
    urgent = network.finish(urgent, now.colliding_gradients, nothing, *how)
    urgent = network.finish(urgent, nothing, following.colliding_rows, *how)
    weights = computed + _slowed(late, np.maximum(urgent - computed, 0.0), slower)
    # a split backward computes the gradients that are reduced last
    hides = late if chosen.split_backward else load.backward * now.compute
    return float(max(weights.max(), urgent.max())) + load.host.value + calls + _exposed_all_reduce(hides, load, network)


def _slowed(work: Floats, span: Floats, slower: float) -> Floats:
    """Return the seconds of ``work`` that takes ``slower`` times as long during the first ``span`` seconds."""
    done = np.minimum(work, span / slower)
    return work + done * (slower - 1)


def _exposed_all_reduce(behind: Floats, load: TrainingLoad, network: Network) -> float:
    """Return the seconds of the dense all-reduce after backward. ``behind`` seconds of compute hide all but the last bucket."""
    dense, ranks = load.dense_bytes.value, len(behind)
    last = network.all_reduce(min(load.last_bucket.value, dense), ranks)
    return max(last, network.all_reduce(dense, ranks) - float(behind.min()))
