"""The ladder of techniques: its arithmetic by hand, and a small run of real ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_freescale.testing import run_distributed

RUNGS = ["floor", "plain", "balance", "overlap", "dedup", "split"]


def test_gains_by_hand() -> None:
    """A step of 200 ms, half of it lost; the floor loses 10; a rung that loses 19 of 119 has removed 81 of 90."""
    import ladder

    seconds = {"floor": (0.110, 0.1), "plain": (0.2, 0.1), "split": (0.119, 0.1)}
    figures: dict[str, float] = {}
    for name, (wall, compute) in seconds.items():
        figures |= ladder.summarize(name, np.full((2, 4), wall), np.full((2, 4), compute))
    assert figures["plain_bubble"] == pytest.approx(0.5) and figures["split_lost_ms"] == pytest.approx(19)
    gained = ladder.compare(figures, "split")
    assert gained["split_reduction"] == pytest.approx(0.9) and gained["split_reduction_with_floor"] == pytest.approx(0.81)
    assert gained["split_speed_up"] == pytest.approx(200 / 119)
    assert gained["split_of_allowed"] == pytest.approx(200 / 119 * (1 - 0.9 * 0.5))
    other = ladder.compare({**figures, "split_lost_ms": 10.0, "split_step_ms": 110.0}, "split")
    assert ladder.spread([gained, other])["split_reduction_least"] == pytest.approx(0.9)
    assert ladder.spread([gained, other])["split_reduction_most"] == pytest.approx(1.0)


def test_every_rung_adds_to_those_before() -> None:
    import ladder_fits

    assert ladder_fits._choices("floor") == {"balance": True}
    assert ladder_fits._choices("plain") == {}
    assert ladder_fits._choices("overlap") == {"balance": True, "overlap": True, "dedup": False}
    climbed = ladder_fits._choices("two-level")
    assert climbed["dedup"] and climbed["split_backward"] and climbed["micro_batches"] == 2
    assert climbed["exchange"] == "two_level"


def test_compute_follows_the_archetype(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean batch takes what was asked for; attention is a share of it that grows with the square."""
    import ladder
    import ladder_fits

    monkeypatch.setenv("WORLD_SIZE", "2")
    options = ladder.read_options(["--compute-ms", "100", "--rows", "50", "--steps", "40"])
    for name, kind in ladder_fits.ARCHETYPES.items():
        data = ladder_fits.Histories(kind, options)
        batch = kind.batch * data.cost(data.lengths).mean()
        assert batch == pytest.approx(0.1), name
        assert data[0].shape == (kind.tables, data.lengths[0])
        assert (data.cost.quadratic > 0) == (kind.attention > 0)


def _ladder(*arguments: str) -> int:
    os.environ["LOCAL_RANK"] = "0"  # each rank on a host of its own, as under benchmarks/netlab.py
    import ladder

    small = ["--rungs", *RUNGS, "--rows", "300", "--compute-ms", "4", "--steps", "8", "--rounds", "2"]
    sys.argv = ["ladder.py", *small, *arguments]
    with pytest.raises(SystemExit) as stopped:
        ladder.main()
    return int(stopped.value.code or 0)


@pytest.mark.slow
@pytest.mark.parametrize("archetype", ["middle", "embedding-heavy"])
def test_the_ladder_is_climbed_by_real_ranks(archetype: str, tmp_path: Path) -> None:
    path, picture = tmp_path / "figures.json", tmp_path / "ladder.png"
    found = run_distributed(_ladder, 2, "--json", str(path), "--plot", str(picture), "--archetype", archetype)
    assert found == [0, 0]
    figures = json.loads(path.read_text())["figures"]
    for rung in RUNGS:
        assert 0 < figures[f"{rung}_bubble"] < 1 and figures[f"{rung}_step_ms"] > figures[f"{rung}_compute_ms"] > 0
    assert figures["limit"] == pytest.approx(1 / (1 - figures["plain_bubble"]))
    assert figures["headline_reduction"] == figures["split_reduction"]
    assert figures["split_reduction_least"] <= figures["split_reduction_most"]
    assert "collision_rate" not in "".join(name for name in figures if name.startswith("plain")), "nothing is looked ahead"
    assert 0 < figures["overlap_collision_rate"] <= 1
    assert picture.stat().st_size > 0
