"""The benchmark of convergence: its arithmetic by hand, and small runs of real ranks both ways."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import convergence
import convergence_models
import numpy as np
import pytest
import torch
from convergence_models import ELSEWHERE, FREESCALE, PLAIN, Recipe

from lightning_freescale.balance import BalancedSampler

ITEMS, USERS = 60, 96
SMALL = {
    "hstu": Recipe(6, 8, 20, {"dim": 16, "dropout": 0.0, "lr": 2e-3, "item_lr": 0.05, "std": 0.5}),
    "sasrec": Recipe(6, 8, 20, {"dim": 16, "dropout": 0.0, "lr": 1e-2}),
}


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users who go through the items in their order, from some item on; most of them not far."""
    draw = np.random.RandomState(0)
    lengths = np.clip(draw.lognormal(2, 0.8, USERS).astype(int), 4, 40)
    items = [(draw.randint(ITEMS) + np.arange(length)) % ITEMS for length in lengths]
    path = tmp_path_factory.mktemp("data") / "rounds.npz"
    np.savez(
        path, items=np.concatenate(items).astype(np.uint16), offsets=np.append(0, lengths.cumsum()), users=np.arange(USERS)
    )
    return path


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(convergence_models.RECIPES, "ml-1m", SMALL)


def test_summary_by_hand() -> None:
    plain = [{"ndcg": 0.10}, {"ndcg": 0.14}, {"ndcg": 0.12}]  # deviation 0.02
    freescale = [{"ndcg": 0.11}, {"ndcg": 0.13}, {"ndcg": 0.15}]  # differences 0.01, -0.01, 0.03: mean 0.01, deviation 0.02
    figures = convergence.summarize(plain, freescale)
    expected = {"plain_ndcg": 0.12, "freescale_ndcg": 0.13, "ndcg_difference": 0.01}
    deviations = {f"{name}_deviation": 0.02 for name in expected}
    assert figures == pytest.approx({**expected, **deviations, "ndcg_difference_in_deviations": 0.5})
    worse = convergence.summarize(plain, [{"ndcg": each["ndcg"] - 0.05} for each in plain])
    assert worse["ndcg_difference_in_deviations"] == pytest.approx(2.5), "how far, whichever is better"


def test_curves_by_hand() -> None:
    figures = convergence.differences([4.0, 2.0, 1.0], [4.0, 2.1, 0.9])
    assert figures["curve_absolute"] == pytest.approx(0.1) and figures["curve_relative"] == pytest.approx(0.1)
    assert figures["curve_relative_within_1"] == 0
    assert convergence.differences([4.0] * 10 + [2.0], [4.1] * 10 + [1.0])["curve_relative_within_10"] == pytest.approx(0.025)


def test_one_seed_has_no_deviation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convergence.main(["--seeds", "3", "3"])
    assert "give two different ones" in capsys.readouterr().err


def test_what_is_ranked(rounds: Path) -> None:
    """What was seen is left out, also what the model's input has lost; among the draw is nothing that was ever seen."""
    data = convergence_models.data_module(
        "sasrec", replace(SMALL["sasrec"], max_length=3), convergence_models.read(rounds), PLAIN, 0
    )
    user = int(data.histories.lengths.argmax())
    whole = data.histories.items[data.histories.offsets[user] : data.histories.offsets[user + 1]].tolist()
    for dataset, held_out in ((data.val_dataset, 2), (data.test_dataset, 1)):
        sample = dataset[user]
        assert sample["target"].tolist() == [whole[-held_out]] and len(sample["item"]) == 3
        assert sample["seen"].tolist() == whole[:-held_out]
        assert not set(sample["unseen"].tolist()) & set(whole)
    batch = data.collate_fn([data.test_dataset[user], data.test_dataset[0]])
    rows, columns = batch["seen"]
    assert columns[rows == 0].tolist() == [item + 1 for item in whole[:-1]], "in the table, items are counted from 1"
    assert torch.equal(batch["unseen"][1], torch.from_numpy(data.test_dataset[0]["unseen"]) + 1)


def test_negatives_depend_on_seed_and_step_alone(rounds: Path) -> None:
    one, other, seeded = (convergence_models.SameNegatives(ITEMS, 8, seed) for seed in (0, 0, 1))
    drawn = one.draw(torch.arange(3))
    assert torch.equal(drawn, other.draw(torch.arange(5))) and not torch.equal(drawn, seeded.draw(torch.arange(3)))
    assert not torch.equal(drawn, one.draw(torch.arange(3)))


def _curves(rounds: Path, path: Path, *models: str) -> dict[str, float]:
    words = ["--data", rounds, "--models", *models, "--seeds", "0", "--epochs", "0", "--steps", "20", "--json", path]
    convergence.main([str(word) for word in words])
    return json.loads(path.read_text())["figures"]


def test_loss_curves_are_those_of_plain(rounds: Path, tmp_path: Path) -> None:
    figures = _curves(rounds, tmp_path / "figures.json", "hstu", "sasrec")
    for model in ("hstu", "sasrec"):
        for way in (FREESCALE, ELSEWHERE):
            assert figures[f"{model}_{way}_curve_relative"] <= 1e-4
            assert figures[f"{model}_{way}_curve_absolute"] <= 1e-4


def test_wrong_loss_weights_show(rounds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BalancedSampler, "loss_weight", lambda sampler, step: 1.0)
    figures = _curves(rounds, tmp_path / "figures.json", "hstu", "sasrec")
    assert figures["hstu_freescale_curve_relative"] > 1e-3 and figures["hstu_elsewhere_curve_relative"] > 1e-3
    assert figures["sasrec_freescale_curve_relative"] > 1e-4 >= figures["sasrec_elsewhere_curve_relative"], "weighed by hand"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["hstu", "sasrec"])
def test_both_ways_learn_the_same(rounds: Path, tmp_path: Path, model: str) -> None:
    """Without dropout they are the same training, to rounding."""
    path = tmp_path / "figures.json"
    words = ["--data", str(rounds), "--models", model, "--seeds", "0", "1", "--steps", "0", "--json", str(path)]
    convergence.main([*words, "--require", f"{model}_ndcg_difference_in_deviations<=2"])
    figures = json.loads(path.read_text())["figures"]
    assert figures[f"{model}_plain_ndcg"] > 0.4, "what has learned nothing has 0.08"
    assert abs(figures[f"{model}_ndcg_difference"]) < 0.01 and abs(figures[f"{model}_hit_rate_difference"]) < 0.02
    assert (model == "sasrec") == ("sasrec_plain_ndcg_of_100" in figures)
