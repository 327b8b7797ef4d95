"""The case of a seed and a description of it: for :mod:`random_parity`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

from random_cases import Case, Part

FURTHER = 100_000
"""Seeds below it draw nothing of what :func:`_further` draws, so that they stay the cases that they were."""
ROWS, WHOLE, COLUMNS = "row_wise", "table_wise", "column_wise"
PLANS = ([ROWS], [WHOLE], [ROWS, WHOLE], [ROWS, WHOLE, COLUMNS], [COLUMNS])


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

    bags = random.Random(f"bags {seed}")  # a separate generator, so the other draws of a seed stay the same

    def in_bags(part: Part) -> Part:
        if part.plain or bags.random() < 0.5:
            return part
        tables, pooling = len(part.rows), [["weighted"], ["sum", "mean"]][bags.random() < 0.7]
        pooled, wide = (tuple(bags.choice(choices) for _ in range(tables)) for choices in (pooling, [False, False, True]))
        return replace(part, bags=pooled, wide=wide)

    def clip() -> str:
        drawn = pick(["none", "none", "norm", "value"])
        pick(range(4))  # for a removed option: later draws of a seed stay the same
        return drawn

    case = Case(
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
    return case if seed < FURTHER else _further(case)


def _further(case: Case) -> Case:
    """Draw evaluation, batches, weights, ids, plans and tables of other kinds."""
    draw = random.Random(f"further {case.seed}")
    pick, tables = draw.choice, draw.random()
    dim = pick([6, 10, 50]) if tables < 0.1 else None
    plan = pick(PLANS) if draw.random() < 0.6 else None
    if plan and COLUMNS in plan and dim is None:
        dim = pick([8, 16, 24])  # that can be split

    def further(part: Part) -> Part:
        weighted = "weighted" in part.bags
        drawn = replace(
            part,
            dim=dim or part.dim,
            int32=draw.random() < 0.3,
            sharding=tuple(pick(plan) for _ in part.rows) if plan else (),
        )
        if part.plain:
            return drawn
        return replace(
            drawn,
            shared=len(part.rows) > 1 and draw.random() < 0.5,
            weights=pick(["", "learned"] if weighted else ["", "", "ignored", "learned"]),
            batches=pick(["", "", "inverse", "variable"] if part.bags else ["", "", "inverse"]),
            permuted=draw.random() < 0.4,
        )

    return replace(
        case,
        parts=tuple(further(part) for part in case.parts),
        evaluates=draw.random() < 0.6,
        uneven=draw.random() < 0.5,
        further_way=pick(["dedup=False", "dedup=False", "overlap=False"]),
    )


def drawn(case: Case) -> list[str]:
    """Return the names of the properties of a case."""

    def some(what: Callable[[Part], bool]) -> bool:
        return any(what(part) for part in case.parts)

    def planned(part: Part) -> Iterable[str]:
        return (case.shards(part, table)[0] for table in range(len(part.sharding)))

    evaluated = case.validates or case.evaluates
    has = {
        "validation in the fit": case.validates,
        "validate and predict": case.evaluates,
        "uneven evaluation": case.uneven and evaluated and case.ranks > 1,
        "lookups on some ranks in evaluation": evaluated and case.ranks > 1 and some(lambda p: p.when == "some ranks"),
        "lookups in some batches in evaluation": evaluated and some(lambda p: p.when == "some steps" and p.lookups > 1),
        "weights that are ignored": some(lambda p: p.weights in ("ignored", "learned") and "weighted" not in p.bags),
        "weights that are learned": some(lambda p: p.weights == "learned" and "weighted" in p.bags),
        "bags with inverse indices": some(lambda p: bool(p.bags) and p.batches == "inverse"),
        "bags with variable batches": some(lambda p: p.batches == "variable"),
        "sequences with inverse indices": some(lambda p: not p.bags and p.batches == "inverse"),
        "shared feature": some(lambda p: p.shared),
        "shared by sum and mean": some(lambda p: p.shared and set(p.bags[:2]) == {"sum", "mean"}),
        "ids of 32 bits": some(lambda p: p.int32),
        "permuted features": some(lambda p: p.permuted),
        "other widths": some(lambda p: any(dim % 4 for dim in p.dims)),
        f"hot_rows={case.hot_rows!r}": case.nodes > 1,
        "lists that differ": case.lists_differ,
        "overlap=False": case.further_way == "overlap=False",
        "mixed plan": some(lambda p: len(set(planned(p))) > 1),
        **{f"{kind} plan": some(lambda p, kind=kind: kind in planned(p)) for kind in (ROWS, WHOLE, COLUMNS)},
    }
    return [name for name, is_so in has.items() if is_so]
