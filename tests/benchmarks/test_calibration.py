"""The calibration of costs, and predictions of the balance, held against epochs and steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import calibration
import numpy as np
import prediction
import pytest


def test_predictions_are_held_against_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.RandomState(0).lognormal(3, 1, 300).astype(int) + 1
    (tmp_path / "shop.txt").write_text("".join(f"{user}{' 7' * length}\n" for user, length in enumerate(lengths)))
    written = tmp_path / "figures.json"
    flags = [
        "--data",
        str(tmp_path / "shop.txt"),
        "--ranks",
        "4,128",
        "--batch-size",
        "4",
        "--epochs",
        "2",
        "--json",
        str(written),
    ]
    monkeypatch.setattr(sys, "argv", ["prediction.py", *flags])
    monkeypatch.setattr(prediction, "SIMULATED_RANKS", "2,4")
    prediction.main()
    figures = json.loads(written.read_text())["figures"]
    assert figures.keys() == {"shop_4_off", "shop_128_off", "shop_seconds", "worst_off"}
    assert figures["shop_128_off"] < 0.001, "an epoch of one step, the same in each"
    assert figures["worst_off"] == max(figures["shop_4_off"], figures["shop_128_off"]) and figures["shop_seconds"] > 0


def test_calibration_from_either_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.RandomState(0).lognormal(4, 1, 400).astype(int) + 1
    np.savez(tmp_path / "few.npz", offsets=np.append(0, np.cumsum(lengths)))
    for flags in (["--start", "tokens"], ["--start", "analytic", "--all-planned"]):
        written = tmp_path / "figures.json"
        words = ["--data", str(tmp_path / "few.npz"), "--ranks", "2", "--runs", "2", "--json", str(written), *flags]
        monkeypatch.setattr(sys, "argv", ["calibration.py", *words])
        calibration.main()
        figures = json.loads(written.read_text())["figures"]
        assert set(figures) == {
            f"few_{kind}_2_{which}" for kind in ("quadratic", "mixed") for which in ("before", "calibrated", "worst")
        }
        assert all(1 <= figures[f"few_{kind}_2_calibrated"] < 1.1 for kind in ("quadratic", "mixed"))


@pytest.mark.slow
def test_calibration_in_real_steps() -> None:
    from calibration_steps import VARIANTS, measure

    figures = measure(["short"], rounds=1, epochs=2, clock="cpu")
    assert {f"short_{name}_imbalance" for name in VARIANTS if name != "floor"} <= figures.keys()
    assert figures["short_exchange_ms"] > 0 and figures["short_drawn_imbalance"] >= 1
    assert figures["short_apart"] == abs(figures["short_predicted"] - figures["short_auto_imbalance"])
