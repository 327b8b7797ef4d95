"""The arithmetic of the benchmarks equals calculations by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import convergence
import ladder
import numpy as np
import overlap_workload
import pytest
import real_compute
import real_fits
import what_if
from contest import Contest
from fault_counts import Counts, upper_limit

from lightning_freescale.embeddings.row_order import RowOrder

pytestmark = pytest.mark.slow

# -- balance


def test_contest_weighs_batches_by_cost() -> None:
    """Imbalance is the largest cost over the mean, each summed over two batches; the cost is L**2 + 1280 L."""
    played = Contest(2, {"verl": lambda lengths, costs, ranks: [[3, 0], [2, 1]]})
    short, long = np.array([1.0, 2, 4, 4]), np.array([100.0, 500, 900, 20])
    for batch in (short, long):
        played.play(batch)
    cost = np.array([short, long]) ** 2 + 1280 * np.array([short, long])
    halves = cost.reshape(2, 2, 2).sum(axis=2)
    figures = played.figures()
    assert figures["random"] == pytest.approx(halves.max(axis=1).sum() / halves.mean(axis=1).sum())
    best = np.maximum(cost[:, [0, 2]].sum(axis=1), cost[:, [1, 3]].sum(axis=1))[0], cost[1, [2, 3]].sum()
    assert figures["fixed"] == pytest.approx(sum(best) / halves.mean(axis=1).sum())
    assert figures["dominated"] == 0.5 and figures["fixed_gap"] >= 1
    crosswise = np.maximum(cost[:, [0, 3]].sum(axis=1), cost[:, [1, 2]].sum(axis=1))
    assert figures["verl"] == pytest.approx(crosswise.sum() / halves.mean(axis=1).sum())


# -- convergence


def test_convergence_by_hand() -> None:
    plain = [{"ndcg": 0.10}, {"ndcg": 0.14}, {"ndcg": 0.12}]  # deviation 0.02
    freescale = [{"ndcg": 0.11}, {"ndcg": 0.13}, {"ndcg": 0.15}]  # differences 0.01, -0.01, 0.03: mean 0.01, deviation 0.02
    expected = {"plain_ndcg": 0.12, "freescale_ndcg": 0.13, "ndcg_difference": 0.01}
    deviations = {f"{name}_deviation": 0.02 for name in expected}
    figures = convergence.summarize(plain, freescale)
    assert figures == pytest.approx({**expected, **deviations, "ndcg_difference_in_deviations": 0.5})
    curves = convergence.differences([4.0, 2.0, 1.0], [4.0, 2.1, 0.9])
    assert curves["curve_absolute"] == pytest.approx(0.1) and curves["curve_relative"] == pytest.approx(0.1)
    assert convergence.differences([4.0] * 10 + [2.0], [4.1] * 10 + [1.0])["curve_relative_within_10"] == pytest.approx(0.025)
    with pytest.raises(SystemExit):
        convergence.main(["--seeds", "3", "3"])


# -- the overlap and the ladder


def test_rows_and_collisions() -> None:
    """Two ranks own the rows 0, 1 and 2, 3. Of the rows of the middle step, only row 2 is also in another step, the last."""
    found = overlap_workload.requests([np.array([0, 0, 2]), np.array([1, 2, 3])], RowOrder(4, 3, 1))  # the order 1 0 3 2
    assert found.tolist() == [[2, 1], [1, 2]]
    steps = [([0], [3]), ([0, 2, 2], [1, 1, 3]), ([2], [2])]
    figures = overlap_workload.collisions(lambda step, rank: (np.array(steps[step][rank]), np.ones(1, int)), 3, 2, 4)
    assert figures["collision_rate"] == 2 / 4
    assert figures["tokens_per_rank"] == 10 / 6 and figures["unique_per_rank"] == 8 / 6
    assert figures["predicted_reduction_vs_plain"] == 1 - 1 / 8 and figures["predicted_reduction_vs_dedup"] == 1 - 1 / 4
    assert figures["predicted_busiest_vs_plain"] == 1 - 1 / 4 and figures["predicted_busiest_vs_dedup"] == 1 - 1 / 2


def test_gains_of_the_ladder() -> None:
    """Plain loses 100 of 200 ms, and the floor 10 ms. A rung that loses 19 of 119 ms has removed 81 of 90 ms."""
    seconds = {"floor": (0.110, 0.1), "plain": (0.2, 0.1), "split": (0.119, 0.1)}
    figures: dict[str, float] = {}
    for name, (wall, compute) in seconds.items():
        figures |= ladder.summarize(name, np.full((2, 4), wall), np.full((2, 4), compute))
    gained = ladder.compare(figures, "split")
    assert gained["split_reduction"] == pytest.approx(0.9) and gained["split_reduction_with_floor"] == pytest.approx(0.81)
    assert gained["split_speed_up"] == pytest.approx(200 / 119)
    assert gained["split_of_allowed"] == pytest.approx(200 / 119 * (1 - 0.9 * 0.5))
    other = ladder.compare({**figures, "split_lost_ms": 10.0, "split_step_ms": 110.0}, "split")
    assert ladder.spread([gained, other])["split_reduction_least"] == pytest.approx(0.9)
    assert ladder.spread([gained, other])["split_reduction_most"] == pytest.approx(1.0)


def test_exposed_times_of_real_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait 10 ms at the floor, 50 ms with samples as drawn, and 250 ms in plain; the pipeline is 20 ms faster."""
    monkeypatch.setenv("NETLAB_RATE", "50mbit")
    figures: dict[str, float] = {}
    waits = {"floor": (100, 10), "floor_drawn": (140, 50), "plain": (340, 250), "pipeline": (320, 0), "split": (130, 30)}
    for key, (step, wait) in waits.items():
        shares = {"compute": 1 - wait / step, **dict.fromkeys(ladder.PARTS, 0.0), "transfer": wait / step}
        counted = np.tile([step / 1000, step / 1000, 250_000], (4, 1))
        figures |= real_compute.figures_of(key, counted, {} if key == "pipeline" else shares)
    assert figures["split_sent_mb"] == 0.25 and figures["split_link_ms"] == pytest.approx(40)
    gained = real_compute.compare(figures, "split")
    assert gained["split_exposed_ms"] == pytest.approx(20) and gained["split_later_ms"] == pytest.approx(30)
    assert gained["split_exposed_less_than_plain"] == pytest.approx(0.9)
    assert gained["split_exposed_less_than_pipeline"] == pytest.approx(1 - 20 / 180)
    assert gained["split_later_less_than_plain"] == pytest.approx(1 - 30 / 200)
    assert gained["split_reduction"] == pytest.approx(220 / 240)
    assert gained["split_speed_up_vs_plain"] == pytest.approx(340 / 130)


def test_groups_by_length_leave_out_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that count have the same samples together, and a step has samples of similar length."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(real_fits.dist, "get_world_size", lambda: 2)
    options = SimpleNamespace(data=None, steps=5, batch=4, max_length=50, rows=30, layers=1, model="hstu")
    data = real_fits.Histories(options)
    drawn, grouped = (real_fits.batches_of(name, data, options, seed=3) for name in ("plain", "grouped"))
    counted = slice(real_fits.SKIPPED, -1)
    samples = [np.concatenate([np.concatenate(step) for step in steps[counted]]) for steps in (drawn, grouped)]
    assert sorted(samples[0]) == sorted(samples[1]) and [len(rank) for step in grouped for rank in step] == [4] * 28
    assert [step[0].tolist() for step in grouped[: real_fits.SKIPPED]] == [s[0].tolist() for s in drawn[: real_fits.SKIPPED]]
    ends = sorted(
        (data.lengths[np.concatenate(step)].min(), data.lengths[np.concatenate(step)].max()) for step in grouped[counted]
    )
    assert all(longest <= shortest for (_, longest), (shortest, _) in zip(ends, ends[1:]))


def test_what_ifs_are_compared_with_runs_without_the_cause() -> None:
    cases = {"no data wait": 2.0, "perfect balance": 1.25, "no host overhead": 1.0, "full overlap": 1.6}
    steps = {"as it is": 0.4, "no data wait": 0.2, "perfect balance": 0.32, "no host overhead": 0.4, "starved": 0.4}
    steps |= {f"behind a worker: {run}": steps[run] for run in what_if.BEHIND} | {"behind a worker": 0.4}
    steps["starved: no data wait"] = 0.1  # 4 times as fast, where 2 was predicted
    slow = [{"setting": "ddp", "run": run, "step_s": step, "what_if": cases} for run, step in steps.items()]
    figures = what_if._figures(slow, [{"setting": "ddp", "run": "as it is", "step_s": 0.25}])
    assert (figures["combinations"], figures["within_5_percent"]) == (8, 7)
    assert figures["worst"] == figures["ddp_no_data_wait_starved_off"] == pytest.approx(0.5)


# -- faults


def test_counts_of_faults_add_up(tmp_path: Path) -> None:
    """Runs of the same seed are refused, and so are those of another definition."""
    assert upper_limit(0, 600) == pytest.approx(1 - 0.05 ** (1 / 600))
    assert upper_limit(1, 10) == pytest.approx(0.39416, abs=1e-5)  # tables of Clopper and Pearson
    assert upper_limit(10, 10) == 1.0
    path, begun = tmp_path / "faults.json", Counts.new(["killed"], 15.0)
    begun.add(3, 0, "killed", [("hangs", "rank 1"), ("hangs", "rank 2")], 15.04, "failed")
    begun.parts.append({"seed": 3, "runs": 1})
    path.write_text(json.dumps(begun.as_json()))
    added = Counts.new(["killed"], 15.0)
    added.add(4, 0, "killed", [], 2.0, "resumed")
    added.add_earlier(Counts.read(path, Counts.new(["killed"], 15.0), 4))
    figures = added.figures(("hangs",), ("resumed", "failed"))
    assert figures == pytest.approx(
        {"runs": 2, "hangs": 1, "resumed": 1, "failed": 1, "hangs_at_most": upper_limit(1, 2), "kinds": 1}
        | {"slowest_seconds": 15.0, "slowest_noticed_seconds": 15.0, "slowest_start_seconds": 0.0}
    )
    assert added.kinds == {"killed": {"runs": 2, "slowest_seconds": 15.0}}
    for expected, seed, text in ((Counts.new(["killed"], 15.0), 3, "seed 3"), (Counts.new(["killed"], 9.0), 4, "other kinds")):
        with pytest.raises(ValueError, match=text):
            Counts.read(path, expected, seed)
