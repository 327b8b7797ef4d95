"""Cost models: the form, and the fit to measured times."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_freescale.balance import CostModel, assign
from lightning_freescale.balance import calibration as calibration_module
from lightning_freescale.balance.calibration import Calibration, fit_report
from lightning_freescale.balance.cost import sample_features
from lightning_freescale.command_line.balance import run
from lightning_freescale.profiling.analysis.breakdown import PART_NAMES
from tests.helpers import reports

LENGTHS = np.random.RandomState(0).lognormal(4.5, 0.9, 6000).clip(5, 800).round()
UNIQUE = (LENGTHS * np.random.RandomState(1).uniform(0.3, 1.0, 6000)).round()
TRUE = CostModel(linear=2e-5, quadratic=4e-8)


def test_cost_model() -> None:
    np.testing.assert_allclose(CostModel(2, 3, 4)([0, 1, 2]), [2, 9, 24])
    np.testing.assert_allclose(CostModel(2, 3, 4, 10)([0, 1, 2], [0, 1, 1]), [2, 19, 34])
    np.testing.assert_allclose(sample_features([2, 3], [1, 2]) @ [2, 3, 4, 10], CostModel(2, 3, 4, 10)([2, 3], [1, 2]))
    model = CostModel.from_config(dim=256, layers=3)
    assert model.linear / model.quadratic == 5 * 256
    assert CostModel.from_config(dim=64, heads=4) == CostModel.from_config(dim=64)
    assert CostModel.from_config(dim=64, heads=4, head_dim=32).quadratic == 128
    assert CostModel.from_config(dim=64, layers=2, feedforward=256, candidates=10).linear == 2 * (5 + 8) * 64**2 + 640


def _run(
    steps: int, ranks: int, plan: CostModel, true: CostModel, noise: float = 0.03, slow_rank: int = -1, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return features and times of steps that are balanced by ``plan``, with a disturbance in one of 20 times."""
    draw, features = np.random.RandomState(seed), sample_features(LENGTHS, UNIQUE)
    sums, seconds = np.zeros((steps, ranks, 4)), np.zeros((steps, ranks))
    for step in range(steps):
        samples = draw.choice(len(LENGTHS), 32 * ranks, replace=False)
        rank_of_sample = assign(plan(LENGTHS[samples], UNIQUE[samples]), ranks).rank_of_sample
        for rank in range(ranks):
            mine = samples[rank_of_sample == rank]
            sums[step, rank] = features[mine].sum(axis=0)
            time = 0.01 + true(LENGTHS[mine], UNIQUE[mine]).sum()
            time *= (1.3 if rank == slow_rank else 1.0) * draw.lognormal(0, noise) * (3 if draw.rand() < 0.05 else 1)
            seconds[step, rank] = time
    return sums, seconds


@pytest.mark.parametrize("ranks", [4, 8])
def test_fit_finds_the_true_coefficients(ranks: int) -> None:
    sums, seconds = _run(100, ranks, CostModel(quadratic=0), TRUE)
    fit = CostModel.fit(sums.reshape(-1, 4), seconds.ravel(), np.tile(np.arange(ranks), 100))
    np.testing.assert_allclose(fit.model(LENGTHS, UNIQUE) + fit.base / 32, TRUE(LENGTHS) + 0.01 / 32, rtol=0.2)
    assert fit.model.quadratic == pytest.approx(TRUE.quadratic, rel=0.1)
    assert 0.01 < fit.residual < 0.04
    np.testing.assert_allclose(fit.slowness, 1.0, atol=0.05)
    unique = CostModel(linear=1e-5, quadratic=4e-8, unique=5e-5)
    sums, seconds = _run(200, ranks, CostModel(), unique, noise=0.01)
    fit = CostModel.fit(sums.reshape(-1, 4), seconds.ravel(), np.tile(np.arange(ranks), 200))
    assert fit.model.unique == pytest.approx(unique.unique, rel=0.3)


def test_a_slow_rank_is_told_from_long_histories() -> None:
    sums, seconds = _run(60, 8, CostModel(linear=1.0, quadratic=0), TRUE, slow_rank=3)
    calibration = Calibration()
    fit = calibration.add_window(sums, seconds)
    assert fit is not None
    np.testing.assert_allclose(fit.slowness, [1.0, 1.0, 1.0, 1.3, 1.0, 1.0, 1.0, 1.0], atol=0.05)
    even = Calibration().add_window(*_run(60, 8, CostModel(linear=1.0, quadratic=0), TRUE))
    assert even is not None and even.slowness.max() < 1.05


def test_steps_that_a_rank_did_not_measure_are_left_out() -> None:
    sums, seconds = _run(40, 4, CostModel(), TRUE)
    spoiled = seconds.copy()
    spoiled[::2, 1] = 0.0
    fit = Calibration().add_window(sums, spoiled)
    assert fit is not None and fit.observations == 80
    assert Calibration().add_window(sums, np.zeros_like(seconds)) is None
    sums, seconds = _run(5, 16, CostModel(), TRUE)
    seconds[1:] = 0.0
    alone = Calibration()
    assert alone.add_window(sums, seconds) is None, "there is no other step to predict it from"
    assert alone.add_window(*_run(5, 16, CostModel(), TRUE)) is not None


def test_the_fit_rests_on_the_last_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_module, "_MOST_TIMES", 4 * 50)
    calibration, before = Calibration(), CostModel(linear=1e-4, quadratic=0)
    calibration.add_window(*_run(200, 4, CostModel(), before))
    fit = calibration.add_window(*_run(50, 4, CostModel(), TRUE))
    assert fit is not None and fit.observations == 200
    assert fit.model.quadratic == pytest.approx(TRUE.quadratic, rel=0.15)


# -- the replacement of the costs in use by a fit


@pytest.mark.parametrize(("in_use", "steps", "least"), [(CostModel(), 25, 4), (TRUE, 15, 5)])
def test_a_fit_is_final_once_nothing_is_better(in_use: CostModel, steps: int, least: int) -> None:
    calibration, windows = Calibration(in_use), 0
    while not calibration.frozen:
        calibration.add_window(*_run(steps, 4, in_use, TRUE, seed=windows))
        windows += 1
        assert windows < 30
    assert windows >= least


def test_costs_that_predict_as_well_stay() -> None:
    tokens = CostModel(linear=1.0, quadratic=0.0)
    calibration = Calibration(tokens)
    sums, seconds = _run(60, 4, tokens, CostModel(linear=0.0, quadratic=1e-7))
    fit = calibration.add_window(sums, seconds)
    assert fit is not None and calibration.improved and calibration.base == fit.base
    scaled = CostModel(*(7e5 * each for each in astuple(TRUE)))
    calibration = Calibration(scaled)
    sums, seconds = _run(60, 4, TRUE, TRUE)
    assert calibration.add_window(sums, seconds) is not None, "in any unit"
    assert not calibration.improved
    assert calibration.base == pytest.approx(7e5 * 0.01, rel=0.2), "0.01 s besides the samples, in the unit of the costs"


def test_times_that_no_length_explains_leave_the_costs_alone() -> None:
    calibration, draw = Calibration(), np.random.RandomState(1)
    sums, seconds = _run(60, 4, CostModel(), TRUE)
    calibration.add_window(sums, 0.01 * draw.lognormal(0, 0.3, seconds.shape))
    assert not calibration.improved
    mean = (sums @ np.array(astuple(CostModel()))).mean()
    assert np.isfinite(calibration.base) and calibration.base > mean, "nearly all of a step does not depend on its samples"


def test_samples_that_cost_nothing_are_not_measured_for_ever() -> None:
    """Samples without events, for which a fit has only a base, and is no better than costs of 0."""
    calibration, draw = Calibration(), np.random.RandomState(0)
    sums = np.zeros((25, 4, 4))
    sums[..., 0] = 8.0
    for _ in range(3):
        calibration.add_window(sums, 0.01 * draw.lognormal(0, 0.03, (25, 4)))
        assert not calibration.improved
    assert calibration.frozen


# -- from a report


def _document(**changes: Any) -> dict[str, Any]:
    sums, seconds = _run(40, 2, CostModel(), TRUE)
    shares = {"forward": 0.5, "backward": 0.3, "optimizer": 0.2}
    parts = [[reports.step(each, **{name: share * each for name, share in shares.items()}) for each in row] for row in seconds]
    made = json.loads(json.dumps(reports.report_of(np.array(parts)).document()))
    made["summary"]["predicted_imbalance"] = 1.25
    made["series"] |= {"features": sums.tolist(), **changes}
    return made


def test_fit_of_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = fit_report(_document())
    assert found.fit.model.quadratic == pytest.approx(TRUE.quadratic, rel=0.15)
    assert (found.steps, found.ranks, found.predicted) == (40, 2, 1.25)
    assert found.by_fit == pytest.approx(found.measured, abs=0.2)
    (tmp_path / "report.json").write_text(json.dumps(_document()))
    run("balance", ["fit", str(tmp_path / "report.json"), "--json", str(tmp_path / "cost.json")])
    printed, figures = capsys.readouterr().out, json.loads((tmp_path / "cost.json").read_text())
    assert "40 steps of 2 ranks" in printed and "1.250 predicted" in printed
    assert figures["model"]["quadratic"] == found.fit.model.quadratic and figures["base"] == found.fit.base
    (code,) = (line for line in printed.splitlines() if line.startswith("FreeScaleDataModule"))
    model = eval(code.partition("cost=")[2][:-1], {"CostModel": CostModel})
    assert model.quadratic == pytest.approx(found.fit.model.quadratic, rel=1e-3)


NOISE = np.zeros((40, 2, len(PART_NAMES)))
NOISE[..., PART_NAMES.index("forward")] = 10.0 ** np.random.default_rng(0).uniform(-4, 0, (40, 2))


@pytest.mark.parametrize(
    ("document", "facts"),
    [
        ("{", "report.json"),
        ({"format": "other"}, "'other'"),
        ("[]", "None"),
        (_document(features=None), "lengths"),
        (_document(features=[[[16.0, 99.0, 0.0, 0.0]] * 2] * 40), "lengths"),
        (_document(breakdown_s=np.zeros((40, 2, len(PART_NAMES))).tolist()), "0 steps of 2 ranks"),
        (_document(breakdown_s=NOISE.tolist()), "idle machine"),
    ],
)
def test_reports_that_cannot_be_fitted(document: Any, facts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(SystemExit) as stopped:
        run("balance", ["fit", str(tmp_path / "report.json")])
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and printed.startswith("fit: ") and facts in printed
