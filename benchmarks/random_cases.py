"""Random models, data, optimizers and Trainer options, all small, as drawn for a seed: for :mod:`random_parity`."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Part:
    """One collection, or one plain ``nn.Embedding``, and what a step looks up in it.

    Attributes:
        rows: of each table; an ``nn.Embedding`` has one.
        features: of each table.
        dim: width of a row.
        plain: whether it is an ``nn.Embedding``.
        lookups: how often a step looks it up, at most.
        ids: where the ids come from: ``"batch"``, ``"computed"`` or ``"drawn"`` in the step.
        when: in which steps and on which ranks all lookups are made: ``"always"``, ``"some steps"``, ``"some ranks"``.
        bags: of each table how its bags are pooled, ``"sum"``, ``"mean"`` or ``"weighted"``; empty for sequences.
        wide: of each table of bags whether its rows are twice as wide.
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

    @property
    def width(self) -> int:
        """Numbers that a lookup returns for a sample."""
        if not self.bags:
            return self.dim
        return sum(self.dim * (1 + wide) * count for wide, count in zip(self.wide, self.features))


@dataclass(frozen=True)
class Case:
    """What is trained, and how; see :func:`random_case`."""

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


def random_case(seed: int) -> Case:
    """Return the case of a seed."""
    draw = random.Random(seed)
    pick = draw.choice

    def part() -> Part:
        plain = draw.random() < 0.3
        tables = 1 if plain else pick([1, 1, 2, 3])
        return Part(
            rows=tuple(pick([1, 3, 7, 50, 300]) for _ in range(tables)),
            features=tuple(1 if plain else pick([1, 1, 2]) for _ in range(tables)),
            dim=pick([4, 8, 16]),
            plain=plain,
            lookups=pick([1, 1, 2, 3]),
            ids=pick(["batch", "batch", "computed", "drawn"]),
            when=pick(["always", "always", "some steps", "some ranks"]),
        )

    bags = random.Random(f"bags {seed}")  # its own: what a seed has drawn without them stays

    def in_bags(part: Part) -> Part:
        if part.plain or bags.random() < 0.5:
            return part
        tables, pooling = len(part.rows), [["weighted"], ["sum", "mean"]][bags.random() < 0.7]
        pooled, wide = (tuple(bags.choice(choices) for _ in range(tables)) for choices in (pooling, [False, False, True]))
        return replace(part, bags=pooled, wide=wide)

    def clip() -> str:
        drawn = pick(["none", "none", "norm", "value"])
        pick(range(4))  # for an option that is gone: what a seed has drawn after it stays
        return drawn

    return Case(
        seed=seed,
        ranks=pick([1, 2, 2, 3]),
        parts=tuple(in_bags(part()) for _ in range(pick([1, 1, 2]))),
        optimizer=pick(["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw"]),
        groups=pick([1, 1, 2]),
        schedule=pick(["none", "rate", "one cycle"]),
        steps=pick([4, 6]),
        epochs=pick([1, 2]),
        window=pick([1, 1, 2]),
        clip=clip(),
        validates=draw.random() < 0.3,
        dropout=pick([0.0, 0.2]),
        split_backward=random.Random(f"split {seed}").random() < 0.5,
    )


def divided(case: Case) -> Case:
    """Return the same case with steps in micro-batches; without random draws, which come in another order then."""
    parts = tuple(replace(part, ids="computed" if part.ids == "drawn" else part.ids) for part in case.parts)
    return replace(case, parts=parts, dropout=0.0, micro_batches=2 + case.seed % 3)


def on_two_nodes(case: Case) -> Case:
    """Return the same case with 4 ranks, 2 on each of 2 nodes, whose exchange is in two levels."""
    return replace(case, ranks=4, nodes=2)


def sharded_ways(case: Case) -> tuple[str, ...]:
    """Return the names of the fits that are compared with that under ``"ddp"``."""
    return ("freescale", "dedup=False") if case.nodes == 1 else ("two_level",)
