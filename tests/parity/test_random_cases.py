"""Random models under "freescale" against the same under "ddp"; ``benchmarks/random_parity.py`` runs as many as you like."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from random_cases import Case, divided, on_two_nodes
from random_draws import random_case
from random_fits import Outcome, defects, run_case

from lightning_freescale.comm import ProcessGroupFreeScale
from lightning_freescale.embeddings.overlap import id_exchange
from lightning_freescale.testing import run_distributed


def _seeds(first: int, *later: int) -> list:
    """The first one in tier 1."""
    return [first, *(pytest.param(seed, marks=pytest.mark.slow) for seed in later)]


WHOLE = _seeds(*range(1000, 1012))
WITH_MORE_DRAWN = [pytest.param(seed, marks=pytest.mark.slow) for seed in (100002, 100008, 100013, 100022, 100025, 100029)]
"""Seeds of cases on several ranks with unequal numbers of evaluation batches."""
IN_PARTS = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(1020, 1026)]


@pytest.mark.parametrize("seed", [*WHOLE, *IN_PARTS, *WITH_MORE_DRAWN])
def test_a_random_case_is_that_of_ddp(seed: int) -> None:
    case = divided(random_case(seed)) if 1020 <= seed < 100_000 else random_case(seed)
    assert defects(run_distributed(run_case, case.ranks, case)) == []


WITH_HOT_ROWS = (1030, 1032, 1033, 1034, 1035, 1037, 1038, 1039)
"""Seeds of cases with rows that several ranks of a node request."""


@pytest.mark.parametrize("seed", _seeds(*WITH_HOT_ROWS))
def test_a_random_case_on_two_nodes_is_that_of_ddp(seed: int) -> None:
    case = on_two_nodes(divided(random_case(seed)) if seed % 2 else random_case(seed))
    ranks = run_distributed(run_case, case.ranks, case)
    assert defects(ranks) == []
    assert {outcomes["hot rows"].error for outcomes in ranks} == {""}, "nothing was refused"
    assert any(outcomes["hot rows"].hot for outcomes in ranks), "rows have taken two hops"


SEVERAL_COLLECTIONS = (5001, 5021, 5057, 5092, 5113, 5149)
"""Seeds of cases on several ranks, whose steps look up on some ranks, or in some steps, or clip."""


def _run_as_by_nccl(case: Case) -> dict[str, Outcome]:
    """Heads go from host to host, and the collections take turns; by gloo, as there is no GPU."""
    id_exchange.heads_travel_apart = lambda device: True
    ProcessGroupFreeScale.moves_by_nccl, ProcessGroupFreeScale.connect = True, lambda group: None
    return run_case(case)


@pytest.mark.parametrize("seed", _seeds(*SEVERAL_COLLECTIONS))
def test_collections_that_take_turns_do_not_wait_for_each_other(seed: int) -> None:
    case = random_case(seed)
    assert case.ranks > 1 and len(case.parts) > 1
    ranks = run_distributed(_run_as_by_nccl, case.ranks, case)
    assert defects(ranks) == []
    assert {outcome.error for outcomes in ranks for outcome in outcomes.values()} == {""}, "nothing was refused"


SAME = Outcome("", 2, (1.0, 0.5), {"weight": torch.ones(3)}, torch.zeros(1, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"losses": (1.0, 0.501)}, ["freescale, rank 0: losses differ by 2.0e-03"]),
        ({"weights": {"weight": torch.tensor([1, 1, torch.nan])}}, ["freescale: weight differs by nan"]),
        ({"error": "ValueError: late", "steps": 1}, ["freescale, rank 0: ValueError: late"]),
        ({"error": "ValueError: refused", "steps": 0}, []),
    ],
)
def test_what_is_a_defect(changes: dict[str, object], found: list[str]) -> None:
    assert defects([{"ddp": SAME, "freescale": replace(SAME, **changes), "dedup=False": SAME}]) == found
