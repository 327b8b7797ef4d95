"""Which ranks share a node, and the process groups of the way through proxies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Nodes:
    """Nodes of equally many ranks, one node's after the other's.

    Attributes:
        ranks: of all nodes.
        each: ranks of a node.
    """

    ranks: int
    each: int

    def __post_init__(self) -> None:
        if self.each < 1 or self.ranks % self.each:
            raise ValueError(
                f"ranks_per_node={self.each!r} does not divide {self.ranks} ranks: pass how many ranks every node has"
            )

    @property
    def count(self) -> int:
        """Number of nodes."""
        return self.ranks // self.each

    @property
    def near(self) -> list[list[int]]:
        """The ranks of every node."""
        return [list(range(node * self.each, (node + 1) * self.each)) for node in range(self.count)]

    @property
    def far(self) -> list[list[int]]:
        """The ranks that have the same place in their nodes, by that place."""
        return [list(range(place, self.ranks, self.each)) for place in range(self.each)]

    def others(self, rank: int) -> list[bool]:
        """Return which ranks are on another node than ``rank``; nothing if there is one node."""
        return [] if self.count == 1 else [other // self.each != rank // self.each for other in range(self.ranks)]

    def refuse_one_level(self) -> None:
        """Check that there is something to gain by proxies, by a ValueError."""
        if self.count == 1 or self.each == 1:
            raise ValueError(
                f"exchange='two_level' with {self.ranks} ranks and ranks_per_node={self.each}: it needs several nodes with "
                "several ranks each. Use exchange='flat'"
            )


@dataclass(frozen=True)
class ProxyGroups:
    """Process groups of one collection alone.

    Attributes:
        near: of the ranks of this node.
        far: of the ranks with this one's place in their nodes.
    """

    near: Any
    far: Any
