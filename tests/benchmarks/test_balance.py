"""Our assignments against others' on lengths of all kinds, and steps that are cut by tokens."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import balance
import budget
import numpy as np
import pytest
from contest import Contest
from lengths import LONGEST, SYNTHETIC, draw_lengths, read_lengths

from tests.benchmarks.conftest import Run


def test_lengths_of_each_kind_of_file(tmp_path: Path, users: Path) -> None:
    lengths = read_lengths(users)[1].astype(int)
    lines = "".join(" ".join(map(str, range(length + 1))) + "\n" for length in lengths)
    (tmp_path / "text.gz").write_bytes(gzip.compress(lines.encode()))
    rows = [f"{user},{item},4.0" for user, length in enumerate(lengths) for item in range(length)]
    (tmp_path / "rated").mkdir()
    (tmp_path / "rated" / "ratings.csv").write_text("\n".join(["user,item,rating", *rows]) + "\n")
    for name, path in (("text", "text.gz"), ("rated", "rated/ratings.csv")):
        assert read_lengths(tmp_path / path)[0] == name
        assert read_lengths(tmp_path / path)[1].tolist() == lengths.tolist()


@pytest.mark.parametrize("family", SYNTHETIC)
def test_drawn_lengths(family: str) -> None:
    drawn = draw_lengths(family, np.random.default_rng(0), 20_000)
    assert (drawn == np.floor(drawn)).all() and drawn.min() >= 1 and drawn.max() <= LONGEST
    assert (drawn == draw_lengths(family, np.random.default_rng(0), 20_000)).all()
    if family == "short":
        assert (drawn.min(), drawn.max()) == (3, 50)
    if family == "two-clusters":
        assert ((drawn < 40) | (drawn > 380)).all() and 0.1 < (drawn > 380).mean() < 0.3
    if family in ("heavy-1.1", "heavy-1.3", "heavy-1.5"):
        alpha = -np.log((drawn >= 300).mean() / (drawn >= 30).mean()) / np.log(10)
        assert alpha == pytest.approx(float(family[-3:]), abs=0.1)


def test_balance_contest(tmp_path: Path, users: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--ranks", 2, 4, "--batches", 2, "--compiled", "off", "--search", 0.01]
    figures = run(balance, "--data", users, "--families", "short", *flags)
    for name, ranks in itertools.product(("few", "short"), (2, 4)):
        of = {way: figures[f"{name}_{ranks}_{way}"] for way in ("random", "zigzag", "fixed", "slack", "free")}
        assert figures[f"{name}_{ranks}_fixed_bound"] <= of["fixed"] <= of["zigzag"] <= of["random"]
        assert figures[f"{name}_{ranks}_fixed_gap"] == of["fixed"] / figures[f"{name}_{ranks}_fixed_bound"]
        assert figures[f"{name}_{ranks}_fixed_ms"] > 0 and f"{name}_{ranks}_fixed_compiled_ms" not in figures
    assert not any("verl" in name for name in figures)
    assert "predicted" in capsys.readouterr().out


def test_contest_weighs_batches_by_cost() -> None:
    """By hand, with costs L**2 + 1280 L: the slowest rank's over the mean, each summed over two batches."""
    seen = []

    def backwards(lengths: list[int], costs: list[int], ranks: int) -> list[list[int]]:
        seen.append((lengths, costs, ranks))
        return [[3, 0], [2, 1]]

    played = Contest(2, [False], {"verl": backwards})
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
    assert played.worst["fixed"][0].gap >= played.worst["free"][0].gap >= 0
    crosswise = np.maximum(cost[:, [0, 3]].sum(axis=1), cost[:, [1, 2]].sum(axis=1))
    assert figures["verl"] == pytest.approx(crosswise.sum() / halves.mean(axis=1).sum())
    assert seen[0] == ([1, 2, 4, 4], cost[0].tolist(), 2) and all(isinstance(number, int) for number in seen[0][1])
    assert figures["verl_ms"] > 0 and figures["fixed_over_verl"] > 0


def test_steps_cut_by_tokens_against_ranks_by_themselves(users: Path, run: Run) -> None:
    figures = run(budget, "--data", users, "--ranks", 2, 8, "--samples", 12)
    assert 0.5 < figures["fullest"] <= 1
    for setting in ("few_200_2", "few_all_2"):
        assert figures[f"{setting}_imbalance"] < figures[f"{setting}_itself_imbalance"]
        assert 0.3 < figures[f"{setting}_filled"] <= 1
    assert figures["few_all_8_itself_apart"] > 0
