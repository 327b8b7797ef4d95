"""The step, rank by rank: each continues when its own work and its exchange are done, whichever is later (max-plus)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.simulator.catalogue import Catalogue
from lightning_freescale.simulator.network import Network
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


@dataclass(frozen=True)
class Techniques:
    """What is switched on; by default nothing, which is plain TorchRec and DDP.

    Attributes:
        balance: samples are assigned by cost.
        overlap: rows that do not collide travel behind compute.
        dedup: rows that a rank needs several times travel once.
        split_backward: gradients of weights come after those of the rows, and hide the colliding ones; with ``overlap``.
        micro_batches: a step in so many parts, inside which no row changes; more than one with ``overlap``.
        two_level: rows cross between nodes once for all ranks of a node; with ``overlap``, which exchanges so.
        sm_free: exchanges take nothing from compute.

    Raises:
        ValueError: a technique is of no use without another.
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
            raise ValueError(f"Techniques(micro_batches={self.micro_batches}): pass at least 1")
        alone = [name for name in ("split_backward", "two_level") if getattr(self, name)]
        alone += ["micro_batches"] * (self.micro_batches > 1)
        if alone and not self.overlap:
            raise ValueError(f"Techniques({', '.join(alone)}) without overlap=True: there is nothing that they would hide")
        if self.two_level and not self.dedup:
            raise ValueError("Techniques(two_level=True) without dedup=True: a node's rows are brought together, each once")

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
"""Each technique, and all together; overlap brings dedup along, as the strategy does."""


@dataclass(frozen=True)
class StepTraffic:
    """What a step computes and moves on every rank; shape ``[ranks]`` each, seconds and bytes.

    Attributes:
        compute: seconds, alone on its device.
        ids: bytes that go to the owners of the rows.
        rows: bytes of the rows that come from them; as many of gradients go back.
        colliding_rows: of the rows, those that wait for the step before.
        colliding_gradients: of the gradients, those that the next step waits for.
        node_share: in two levels, the share of a node's rows that crosses between nodes.
        hot_owner: what is asked of the owner that has most to do, over the mean.
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
    """Return the traffic of steps that look up so many items, by the load's catalogue.

    Args:
        compute: seconds of every step and rank, shape ``[steps, ranks]``.
        tokens: items looked up, of the same shape.
        load: what is known of a step.
        network: says which ranks share a node.
        chosen: whether rows travel once, and in how many parts.
    """
    known, parts, steps = load.catalogue, chosen.micro_batches, []
    totals = tokens.sum(axis=1)
    for index, (seconds, items) in enumerate(zip(compute, tokens)):
        before, after = totals[index - 1], totals[(index + 1) % len(totals)]
        first = items / parts  # of the first part, and of the last
        rows = known.unique(items) if chosen.dedup else items
        times = rows / np.maximum(known.unique(items), 1e-300)  # how often a row travels
        waited = known.colliding(first, before) * times
        returned = known.colliding(first, after / parts) * times
        node, mean = min(network.ranks_per_node, len(items)), float(items.mean())
        share = float(known.unique(node * mean) / (node * known.unique(mean))) if mean > 0 else 1.0
        size = float(load.row_bytes)
        hot = 1.0 if chosen.dedup else known.hot_owner(len(items))  # different rows are spread evenly by their hash
        steps.append(StepTraffic(seconds, rows * ID_BYTES, rows * size, waited * size, returned * size, share, hot))
    return steps


def step_times(traffic: Sequence[StepTraffic], load: TrainingLoad, network: Network, chosen: Techniques) -> Floats:
    """Return the wall time of each step in seconds, shape ``[steps]``; the first continues the last.

    Never less than the mean rank's compute: nothing computes less, it only waits less.

    Args:
        traffic: of every step.
        load: host work, contention and what else is not in the traffic.
        network: of the ranks.
        chosen: what is switched on.
    """
    run = _overlapped if chosen.overlap else _plain
    return np.array([run(traffic, index, load, network, chosen) for index in range(len(traffic))])


def bubble(walls: Floats, compute: Floats) -> float:
    """Return 1 - compute summed over ranks / (ranks x wall time); shapes ``[steps]`` and ``[steps, ranks]``."""
    return float(1 - compute.mean(axis=1).sum() / walls.sum())


def _plain(traffic: Sequence[StepTraffic], index: int, load: TrainingLoad, network: Network, chosen: Techniques) -> float:
    """Ids, rows, compute, gradients, one after the other."""
    now = traffic[index]
    ranks = len(now.compute)
    nothing = np.zeros(ranks)
    clock = np.full(ranks, load.host.value)
    clock = network.finish(clock, now.ids, nothing, hot_owner=now.hot_owner)
    clock = network.finish(clock, nothing, now.rows, hot_owner=now.hot_owner)
    clock = network.finish(clock + now.compute + load.base.value, now.rows, nothing, hot_owner=now.hot_owner)
    return float(clock.max()) + _exposed_all_reduce(now, load, network)


def _overlapped(traffic: Sequence[StepTraffic], index: int, load: TrainingLoad, network: Network, chosen: Techniques) -> float:
    """From where the forward has its rows, to where the next one has; the colliding rows alone are waited for."""
    last, now, following = traffic[index - 1], traffic[index], traffic[(index + 1) % len(traffic)]
    ranks = len(now.compute)
    nothing, how = np.zeros(ranks), (now.node_share if chosen.two_level else None, now.hot_owner)
    # the calls of the exchanges that are waited for cannot hide, half of all; those of each part's others are behind compute
    calls = (load.overlap_calls[0] + load.overlap_calls[1] * ranks) * load.call.value / 2
    # there also: the last step's other gradients, the next step's ids, and its other rows
    behind = nothing + calls * chosen.micro_batches
    behind = network.finish(behind, last.rows - last.colliding_gradients, nothing, *how)
    behind = network.finish(behind, following.ids, nothing, *how)
    behind = network.finish(behind, nothing, following.rows - following.colliding_rows, *how)
    work = (now.compute + load.base.value) * (1 + (load.split_cost.value if chosen.split_backward else 0.0))
    slower = 1 + (0.0 if chosen.sm_free else load.contention.value)
    # slower for as long as the exchange lasts, or all of it
    late = (load.late_weights.value if chosen.split_backward else 0.0) * work
    computed = _slowed(work - late, behind, slower)
    urgent = np.maximum(computed, behind)
    urgent = network.finish(urgent, now.colliding_gradients, nothing, *how)
    urgent = network.finish(urgent, nothing, following.colliding_rows, *how)
    weights = computed + _slowed(late, np.maximum(urgent - computed, 0.0), slower)
    return float(max(weights.max(), urgent.max())) + load.host.value + calls + _exposed_all_reduce(now, load, network)


def _slowed(work: Floats, span: Floats, slower: float) -> Floats:
    """Seconds of ``work`` that takes ``slower`` times as long during the first ``span`` seconds."""
    done = np.minimum(work, span / slower)
    return work + done * (slower - 1)


def _exposed_all_reduce(now: StepTraffic, load: TrainingLoad, network: Network) -> float:
    """Seconds of the dense gradients' reduction that no backward of the quickest rank hides."""
    seconds = network.all_reduce(load.dense_bytes.value, len(now.compute))
    return max(0.0, seconds - load.backward * float(now.compute.min()))
