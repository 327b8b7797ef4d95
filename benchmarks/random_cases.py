"""Random small models, data, optimizers and Trainer options: for :mod:`random_parity`, drawn by :mod:`random_draws`."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Part:
    """One collection, or one plain ``nn.Embedding``, and its lookups in a step.

    Attributes:
        rows: rows of each table; an ``nn.Embedding`` has one table.
        features: features of each table.
        dim: width of a row.
        plain: True for an ``nn.Embedding``.
        lookups: the largest number of lookups in a step.
        ids: source of the ids: ``"batch"``, ``"computed"`` or ``"drawn"`` in the step.
        when: steps and ranks in which all lookups are made: ``"always"``, ``"some steps"``, ``"some ranks"``.
        bags: pooling of each table of bags, ``"sum"``, ``"mean"`` or ``"weighted"``; empty for sequences.
        wide: for each table of bags, True if its rows are twice as wide.
        shared: True if the second table looks up the first feature of the first table.
        weights: weights of ids: ``""``, ``"ignored"`` by an unweighted collection, or ``"learned"``: those of a parameter.
        batches: ``""``, ``"inverse"`` with inverse indices, or ``"variable"``: with them, and another size for each feature.
        int32: True if ids have 32 bits.
        permuted: True if a lookup has its features in another order, with one that no table has.
        sharding: type of each table in the plan if possible, see :meth:`Case.shards`; empty without a plan.
    """

    rows: tuple[int, ...]
    features: tuple[int, ...]
    dim: int
    plain: bool
    lookups: int
    ids: str
    when: str
    bags: tuple[str, ...] = ()
    wide: tuple[bool, ...] = ()
    shared: bool = False
    weights: str = ""
    batches: str = ""
    int32: bool = False
    permuted: bool = False
    sharding: tuple[str, ...] = ()

    @property
    def names(self) -> list[list[str]]:
        """The features of each table."""
        ends = [sum(self.features[: table + 1]) for table in range(len(self.features))]
        names = [[f"f{index}" for index in range(end - count, end)] for end, count in zip(ends, self.features)]
        if self.shared:
            names[1][0] = names[0][0]
        return names

    @property
    def ranges(self) -> dict[str, int]:
        """The number of different ids of each feature."""
        ranges: dict[str, int] = {}
        for names, rows in zip(self.names, self.rows):
            ranges |= {name: min(rows, ranges.get(name, rows)) for name in names}
        return ranges

    @property
    def dims(self) -> tuple[int, ...]:
        """The width of the rows of each table."""
        return tuple(self.dim * (1 + wide) for wide in self.wide or (False,) * len(self.rows))

    @property
    def width(self) -> int:
        """The number of values that a lookup returns for a sample."""
        if not self.bags:
            return self.dim
        return sum(dim * count for dim, count in zip(self.dims, self.features))


@dataclass(frozen=True)
class Case:
    """A training; see :func:`random_draws.random_case`."""

    seed: int
    ranks: int
    parts: tuple[Part, ...]
    optimizer: str
    groups: int
    schedule: str
    steps: int
    epochs: int
    window: int
    clip: str
    validates: bool
    dropout: float
    split_backward: bool
    micro_batches: int = 1
    nodes: int = 1
    evaluates: bool = False
    uneven: bool = False
    further_way: str = "dedup=False"
    hot_rows: str | int | float = 0
    lists_differ: bool = False  # whether each rank has other lists of hot rows for each message

    def shards(self, part: Part, table: int) -> tuple[str, int]:
        """Return the type by which the plan shards a table, and into how many parts; whole if it cannot be split as drawn."""
        kind, rows, dim = part.sharding[table], part.rows[table], part.dims[table]
        if kind == "row_wise" and (self.ranks - 1) * -(-rows // self.ranks) < rows:  # every rank gets a row
            return kind, self.ranks
        counts = [count for count in range(2, self.ranks + 1) if dim % (4 * count) == 0]
        return (kind, counts[-1]) if kind == "column_wise" and counts else ("table_wise", 1)

    def evaluation_batches(self, stage: str, rank: int) -> int:
        """Return how many batches a rank has in ``"fit"``, ``"validate"`` or ``"predict"``."""
        return random.Random(f"{stage} {self.seed} {rank}").choice([0, 1, 2, 5]) if self.uneven else self.steps


def divided(case: Case) -> Case:
    """Return the same case with steps in micro-batches; without random draws, which come in another order then."""
    parts = tuple(replace(part, ids="computed" if part.ids == "drawn" else part.ids) for part in case.parts)
    return replace(case, parts=parts, dropout=0.0, micro_batches=2 + case.seed % 3)


def on_two_nodes(case: Case) -> Case:
    """Return the same case with 4 ranks, 2 on each of 2 nodes, and hot rows."""
    draw = random.Random(f"hot rows {case.seed}")
    hot_rows = draw.choice([0, "auto", 0.5, 1.0, 7])
    return replace(case, ranks=4, nodes=2, hot_rows=hot_rows, lists_differ=hot_rows != 0 and draw.random() < 0.5)


def sharded_ways(case: Case) -> tuple[str, ...]:
    """Return the names of the fits that are compared with that under ``"ddp"``."""
    return ("freescale", case.further_way) if case.nodes == 1 else ("hot rows",)
