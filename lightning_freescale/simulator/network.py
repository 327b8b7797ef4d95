"""The time of an exchange between all ranks, by fairly shared links or by the busiest link."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from lightning_freescale.balance.validation import Floats
from lightning_freescale.simulator.quantity import WORDS, Quantity, assumed

EXACT_RANKS = 8
"""Number of ranks up to which each flow is simulated. Above, the last arrival and the busiest link determine the time."""
_NOTHING = 1e-6  # bytes


@dataclass(frozen=True)
class Network:
    """The network between the ranks. All links are full duplex.

    Attributes:
        bandwidth: Bandwidth of a rank to other nodes, in bytes per second and direction.
        latency: Latency of an exchange, in seconds.
        peer_latency: Additional latency for each other rank, in seconds.
        ranks_per_node: Number of ranks of a node, which have consecutive numbers.
        node_bandwidth: Bandwidth of a rank to its own node, on a separate link, in bytes per second and direction.

    Raises:
        ValueError: A bandwidth, a latency or the number of ranks is too small.
    """

    bandwidth: Quantity = field(
        default_factory=lambda: assumed(48e9, 24e9, 49e9, "B/s", "one 400 Gb/s card per GPU: nccl-tests #267, NCCL #1531")
    )
    latency: Quantity = field(default_factory=lambda: assumed(2e-5, 1e-5, 1e-4, "s", "an NCCL exchange"))
    peer_latency: Quantity = field(default_factory=lambda: assumed(3e-6, 1.5e-6, 4.5e-6, "s", "NCCL #1531, 64 H800"))
    ranks_per_node: int = 8
    node_bandwidth: Quantity = field(
        default_factory=lambda: assumed(370e9, 240e9, 400e9, "B/s", "NVLink of an H100: nccl-tests #212")
    )

    def __post_init__(self) -> None:
        bandwidth, latency = min(self.bandwidth.low, self.node_bandwidth.low), min(self.latency.low, self.peer_latency.low)
        if self.ranks_per_node < 1 or bandwidth <= 0 or latency < 0:
            raise ValueError(
                f"Network(bandwidth={self.bandwidth}, latency={self.latency}, peer_latency={self.peer_latency}, "
                f"ranks_per_node={self.ranks_per_node}, node_bandwidth={self.node_bandwidth}): pass bandwidths > 0, "
                "latencies >= 0, and at least one rank per node"
            )

    @classmethod
    def read(cls, path: Path) -> Network:
        """Return the network that a JSON file describes. Fields that are not in the file keep their defaults.

        A quantity is a number, or ``{"value": 25e9, "low": 20e9, "high": 26e9, "word": "measured", "source": "nccl-tests"}``. A
        number is an assumption without a range.

        Raises:
            ValueError: The file is not valid JSON, or an entry is invalid.
        """
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        known = [each.name for each in fields(cls)]
        if not isinstance(given, Mapping) or set(given) - set(known):
            raise ValueError(f"{path} describes no network. Pass an object with some of {', '.join(known)}.")
        default = cls()
        return cls(**{name: _entry(path, name, getattr(default, name), value) for name, value in given.items()})

    def finish(
        self,
        arrival: Floats,
        outgoing: Floats,
        incoming: Floats,
        node_share: float | None = None,
        hot_owner: float = 1.0,
    ) -> Floats:
        """Return the time at which each rank has finished its exchange, shape ``[ranks]``.

        The bytes of a rank are spread evenly over all owners of rows, including itself, except for the busiest owner.

        Args:
            arrival: Time at which each rank begins, shape ``[ranks]``.
            outgoing: Bytes that each rank sends to the owners, shape ``[ranks]``.
            incoming: Bytes that each rank receives from the owners, shape ``[ranks]``.
            node_share: Share of a node's bytes that crosses between nodes in an exchange in two levels; None for one level.
            hot_owner: Load of the busiest owner / mean load of the owners. An exchange in two levels ignores it.
        """
        ranks = len(arrival)
        if ranks == 1:
            return arrival
        if node_share is not None and self._nodes(ranks) > 1:
            return self._in_two_levels(arrival, outgoing, incoming, node_share)
        fixed = self.latency.value + self.peer_latency.value * (ranks - 1)
        if ranks <= EXACT_RANKS:
            return self._flows(arrival, outgoing, incoming, fixed, hot_owner)
        return np.full(ranks, arrival.max() + fixed + self._busiest(outgoing, incoming, hot_owner))

    def all_reduce(self, size: float, ranks: int) -> float:
        """Return the seconds of a ring all-reduce of ``size`` bytes over all ranks."""
        slowest = self.bandwidth.value if self._nodes(ranks) > 1 else self.node_bandwidth.value
        return 0.0 if ranks == 1 or size == 0 else 2 * self.latency.value + 2 * (ranks - 1) / ranks * size / slowest

    def _nodes(self, ranks: int) -> int:
        return -(-ranks // self.ranks_per_node)

    def _busiest(self, outgoing: Floats, incoming: Floats, hot_owner: float) -> float:
        """Return the seconds of the busiest link in one direction."""
        ranks, near = len(outgoing), min(self.ranks_per_node, len(outgoing)) - 1
        all_out, all_in = outgoing.sum(), incoming.sum()
        far = ranks - 1 - near
        # a rank sends one part of its own bytes to each owner, and as an owner receives one part of each other rank's bytes
        others = (ranks - hot_owner) / max(ranks - 1, 1) ** 2
        sends = max((outgoing + (all_in - incoming) * others).max(), (all_out + hot_owner * all_in) / ranks)
        gets = max((incoming + (all_out - outgoing) * others).max(), (all_in + hot_owner * all_out) / ranks)
        most = float(max(sends, gets)) / ranks
        return max(far * most / self.bandwidth.value, near * most / self.node_bandwidth.value)

    def _in_two_levels(self, arrival: Floats, outgoing: Floats, incoming: Floats, share: float) -> Floats:
        """Return the finish times if proxies on each node collect its rows; the two stages follow each other."""
        ranks, near = len(arrival), min(self.ranks_per_node, len(arrival))
        nodes = self._nodes(ranks)
        fixed = 2 * self.latency.value + self.peer_latency.value * (near - 1 + nodes - 1)
        most = float(max(outgoing.max(), outgoing.mean(), incoming.max(), incoming.mean()))
        within = most * (near - 1) / near / self.node_bandwidth.value
        crossing = share * float(max(outgoing.mean(), incoming.mean())) * (nodes - 1) / nodes / self.bandwidth.value
        return np.full(ranks, arrival.max() + fixed + within + crossing)

    def _flows(self, arrival: Floats, outgoing: Floats, incoming: Floats, fixed: float, hot_owner: float) -> Floats:
        """Return the finish times if the bytes of each pair are a flow, and the flows of a link share it equally."""
        ranks = len(arrival)
        asked = np.full(ranks, (ranks - hot_owner) / (ranks - 1))  # load of each owner / mean load
        asked[0] = hot_owner
        size = (outgoing[:, None] * asked[None, :] + incoming[None, :] * asked[:, None]) / ranks
        np.fill_diagonal(size, 0.0)
        source, target = np.nonzero(size > _NOTHING)
        far = source // self.ranks_per_node != target // self.ranks_per_node
        speed = np.where(far, self.bandwidth.value, self.node_bandwidth.value)
        sends, gets = 2 * source + far, 2 * target + far  # each rank has a link within and a link out of its node
        left, begin = size[source, target], np.maximum(arrival[source], arrival[target]) + fixed
        end = begin.copy()
        alive, now = np.ones(len(left), dtype=bool), begin.min() if len(begin) else 0.0
        while alive.any():
            flowing = alive & (begin <= now + 1e-12)
            if not flowing.any():
                now = begin[alive].min()
                continue
            on_way, on_arrival = (np.bincount(link[flowing], minlength=2 * ranks)[link] for link in (sends, gets))
            rate = speed / np.maximum(np.maximum(on_way, on_arrival), 1)
            needed = np.where(flowing, left / rate, np.inf)
            span = needed.min()
            waiting = begin[alive & ~flowing]
            if len(waiting):
                span = min(span, waiting.min() - now)
            left = np.where(flowing, left - rate * span, left)
            done = flowing & ((left <= _NOTHING) | (needed <= span))
            now += span
            end[done] = now
            alive &= ~done
        finish = arrival.astype(np.float64) if len(source) else np.full(ranks, arrival.max() + fixed)
        np.maximum.at(finish, source, end)
        np.maximum.at(finish, target, end)
        return finish


def _entry(path: Path, name: str, default: Any, given: Any) -> Any:
    if name == "ranks_per_node":
        if isinstance(given, int) and given >= 1:
            return given
        raise ValueError(f"{path}, {name}: {given!r} is not an integer of at least 1")
    quantity = {"value": given} if isinstance(given, (int, float)) else given
    try:
        return Quantity(**{"word": WORDS[1], "unit": default.unit, "source": path.name, **quantity})
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}, {name}: {given!r} is no quantity: {error}. Pass a number, or an object with value, low, high and word."
        ) from error
