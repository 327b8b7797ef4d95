"""What the simulator is held against: published runs, and the ladder's on netlab."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
COMMAND = (
    "python benchmarks/netlab.py --hosts {ranks} --rate 25mbit -- python benchmarks/ladder.py --compute-ms 300 --rows 5000 "
    "--steps 8 --rounds 2 --rungs floor plain balance dedup split"
)


def test_published_runs_are_reproduced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import simulator_published

    monkeypatch.setattr(sys, "argv", ["simulator_published.py", "--json", str(tmp_path / "found.json")])
    simulator_published.main()
    found = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert found["nvidia_tflop"] == pytest.approx(63.9, rel=0.01)
    assert found["nvidia_step_over_published"] == pytest.approx(1, abs=0.05)
    assert found["nvidia_balancer_gain_over_published"] == pytest.approx(1, abs=0.1)
    assert found["nestpipe_share_1536_low"] <= 0.205 <= found["nestpipe_share_1536_high"]
    for ranks in (64, 128, 256):
        assert found[f"freescale_{ranks}_ours_speed_up"] < found[f"freescale_{ranks}_limit"]
        assert found[f"freescale_{ranks}_ours_removed"] > found[f"freescale_{ranks}_theirs_removed"]
    assert found["freescale_64_bubble"] == pytest.approx(0.28, abs=0.005)


def _ladder(path: Path, ranks: int, slower: float = 1.0) -> Path:
    """A ladder whose steps took what the simulator says, with 9 ms of host work and 2 ms for an exchange; others ``slower``."""
    import simulator_netlab

    result = {"figures": {"floor_lost_ms": 9.0}, "measured_on": {"command": COMMAND.format(ranks=ranks)}}
    path.write_text(json.dumps(result))
    run = simulator_netlab._Run(path, None)
    for rung in simulator_netlab.RUNGS:
        step, lost = run.predict(rung, 0.009, 0.002)
        times = 1.0 if rung == "plain" else slower
        result["figures"] |= {f"{rung}_step_ms": 1e3 * step * times, f"{rung}_bubble": 1 - (1 - lost) / times}
    path.write_text(json.dumps(result))
    return path


def _compare(monkeypatch: pytest.MonkeyPatch, folder: Path, *ladders: Path) -> dict[str, float]:
    import simulator_netlab

    out = folder / "found.json"
    monkeypatch.setattr(sys, "argv", ["simulator_netlab.py", *map(str, ladders), "--json", str(out)])
    simulator_netlab.main()
    return json.loads(out.read_text())["figures"]


def test_what_is_calibrated_at_few_ranks_holds_at_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    two, four = (_ladder(tmp_path / f"{ranks}.json", ranks) for ranks in (2, 4))
    found = _compare(monkeypatch, tmp_path, four, two)
    assert found["most_off"] < 1e-3 and found["most_bubble_points"] < 0.1
    slower = _ladder(tmp_path / "4.json", 4, slower=1.1)
    found = _compare(monkeypatch, tmp_path, slower, two)
    assert found["most_off"] == pytest.approx(1 - 1 / 1.1, abs=1e-3) and abs(found["4_plain_off"]) < 1e-3
    assert found["most_bubble_points"] > 4


def test_the_committed_ladders_are_predicted() -> None:
    found = json.loads((RESULTS / "simulator_netlab.json").read_text())["figures"]
    assert found["most_off"] <= 0.07 and found["most_bubble_points"] <= 4
    assert {f"{ranks}_{rung}_off" for ranks in (2, 4, 8) for rung in ("plain", "balance", "dedup", "split")} <= found.keys()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_committed_ladders_reach_what_was_asked(ranks: int) -> None:
    found = json.loads((RESULTS / f"ladder_{ranks}.json").read_text())["figures"]
    assert found["headline_reduction"] >= 0.95 and found["headline_of_allowed"] >= 0.97
