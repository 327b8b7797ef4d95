"""Our assignments against others', and against the best there is."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import balance
import balance_gaps
import budget
import fetch_peers
import peers
from balance_gaps import Case, Result
from contest import Contest
from lengths import LONGEST, SYNTHETIC, draw_lengths, read_lengths

from lightning_freescale.balance import assign

Run = Callable[..., dict[str, float]]


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A file with the histories of 100 users."""
    path = tmp_path / "few.users.npz"
    np.savez(path, offsets=np.append(0, np.cumsum(np.random.RandomState(0).lognormal(3, 1, 100).astype(int) + 1)))
    return path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a benchmark and returns its figures."""

    def figures(script: ModuleType, *flags: object) -> dict[str, float]:
        written = tmp_path / "figures.json"
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, flags), "--json", str(written)])
        script.main()
        return json.loads(written.read_text())["figures"]

    return figures


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


def test_every_sample_is_in_one_part_of_a_peer() -> None:
    assert peers.rank_of_sample([[2, 0], [1]], 3).tolist() == [0, 1, 0]
    for parts in ([[0], [1]], [[0, 1], [1, 2]], [[0, 1], [2, 3]]):
        with pytest.raises(ValueError, match="no partition of 3 samples"):
            peers.rank_of_sample(parts, 3)


VERL = """from verl.protocol import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

def get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size):
    return [list(range(part, len(seqlen_list), k_partitions)) for part in range(k_partitions)]
"""
NVIDIA = """from torch.cuda import nvtx

def karmarkar_karp(workloads, k_partitions, equal_size):
    if nvtx is not None:
        nvtx.range_push("karmarkar_karp")
    return [workloads[part::k_partitions] for part in range(k_partitions)]
"""


class _Sampler:
    """Signature and result of transformers' BatchRebalanceSampler."""

    def __init__(self, lengths: list[int], effective_batch_size: int, dp_size: int, grad_accum: int) -> None:
        self.ranks = dp_size
        assert effective_batch_size == len(lengths) and grad_accum == 1

    def _assign(self, indices: range, lengths: list[int]) -> list[list[list[int]]]:
        return [[list(indices[rank :: self.ranks])] for rank in range(self.ranks)]


def _repository(path: Path) -> str:
    """With stand-ins for the files of both; returns its commit."""
    files = {name: "" for source in fetch_peers.SOURCES.values() for name in source.files}
    files |= {fetch_peers.SOURCES["verl"].files[0]: VERL, fetch_peers.SOURCES["recsys-examples"].files[0]: NVIDIA}
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    git = ["git", "-C", str(path), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "all"]):
        subprocess.run([*git, *command], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("clone", [True, False])
def test_peers_are_fetched_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], clone: bool
) -> None:
    repository, folder = tmp_path / "repository", tmp_path / "peers"
    commit = _repository(repository)
    (repository / "LICENSE").write_text("changed later, but not in the commit")
    url = "https://nowhere.invalid" if clone else f"file://{repository}"
    sources = {name: source._replace(url=url, commit=commit) for name, source in fetch_peers.SOURCES.items()}
    monkeypatch.setattr(fetch_peers, "SOURCES", sources)
    monkeypatch.setattr(fetch_peers, "compile_partitioner", lambda folder: None)
    clones = [f"--from={name}={repository}" for name in sources] if clone else []
    fetch_peers.main([str(folder), "--no-transformers", *clones])
    assert (folder / "verl" / "LICENSE").read_text() == (folder / "recsys-examples" / "LICENSE").read_text() == ""
    monkeypatch.setattr(peers, "_transformers", lambda site: _Sampler)
    loaded = peers.load_peers(folder)
    assert not any(name.split(".")[0] == "verl" for name in sys.modules)
    numbers = list(range(6))  # so that the costs that the stand-in returns are samples
    for peer in loaded.values():
        assert [list(part) for part in peer(numbers, numbers, 2)] == [[0, 2, 4], [1, 3, 5]]
    assert loaded.keys() == {"verl", "nvidia", "hf", "nvidia_free"}
    monkeypatch.setattr(peers, "_transformers", lambda site: None)
    assert peers.load_peers(folder).keys() == {"verl", "nvidia", "nvidia_free"}
    assert "without Hugging Face's" in capsys.readouterr().out


def test_peers_stay_outside_the_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in [
        ([str(Path(fetch_peers.__file__).parent / "published")], "is inside the project"),
        ([str(tmp_path), "--from", "other=/tmp"], "write NAME=PATH with a name of verl, recsys-examples"),
    ]:
        with pytest.raises(SystemExit):
            fetch_peers.main(arguments)
        assert told in capsys.readouterr().err


def test_a_clone_without_the_commit_is_told(tmp_path: Path) -> None:
    _repository(tmp_path / "repository")
    with pytest.raises(SystemExit, match="--from NAME=PATH"):
        fetch_peers.fetch(fetch_peers.SOURCES["verl"], tmp_path / "into", str(tmp_path / "repository"))


def test_missing_peers_are_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"fetch_peers\.py"):
        peers.load_peers(tmp_path)


@pytest.fixture
def poor_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zig-zag in place of ours, which may leave no batch above the limit."""
    monkeypatch.setattr(balance_gaps, "plan", lambda case, costs: assign(costs, case.ranks, assignment_mode="zigzag"))


@pytest.mark.usefixtures("poor_plans")
def test_gaps_of_every_batch(users: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--data", users, "--families", "few", "short", "--ranks", 2, 16, "--per-rank", 3, 8, "--batches", 2]
    figures = run(balance_gaps, *grid, "--worst", 3)
    assert figures["few_cases"] == 3 * 2 * 3 * 3 and figures["sizes_left_out"] == 1, "16 x 8 samples are more than 100"
    assert figures["short_cases"] == 4 * 2 * 3 * 3 and figures["all_cases"] == figures["few_cases"] + figures["short_cases"]
    assert figures["all_worst"] == max(figures[f"{mode}_worst"] for mode in ("fixed", "slack", "free"))
    assert 0 < figures["all_mean"] < figures["all_worst"] and figures["all_above"] >= 3
    shown = capsys.readouterr().out
    assert "1 sizes left out" in shown
    named = re.findall(r"^ *([\d.]+)%  (\S+)  above", shown, re.MULTILINE)
    assert len(named) == 3 and float(named[0][0]) == pytest.approx(100 * figures["all_worst"], abs=1e-4)
    again = run(balance_gaps, "--data", users, "--case", named[0][1])
    assert again["all_worst"] == figures["all_worst"] and again["all_cases"] == 1
    with pytest.raises(SystemExit) as stopped:
        run(balance_gaps, "--data", users, "--case", named[0][1], "--require", "all_above<=0")
    assert stopped.value.code == 1


def test_ours_is_what_is_measured(run: Run) -> None:
    case = Case.parse("lognormal/4x8/mixed/slack/0")
    planned = assign(balance_gaps.case_costs(case, {}), 4, assignment_mode="slack", count_slack=0.25)
    assert run(balance_gaps, "--case", str(case))["lognormal_slack_worst"] == pytest.approx(planned.gap, abs=1e-12)


def test_modes_and_costs_share_a_batch() -> None:
    case = Case.parse("short/4x8/linear/free/7")
    assert str(case) == "short/4x8/linear/free/7" and case == Case("short", 4, 8, "linear", "free", 7)
    lengths = balance_gaps.case_costs(case, {})
    assert len(lengths) == 32 and (lengths == balance_gaps.case_costs(case._replace(mode="fixed"), {})).all()
    assert (balance_gaps.case_costs(case._replace(cost="square"), {}) == lengths**2).all()
    assert (balance_gaps.case_costs(case._replace(cost="mixed"), {}) == lengths**2 + 1280 * lengths).all()
    assert (balance_gaps.case_costs(case._replace(seed=8), {}) != lengths).any()


def test_real_histories_are_drawn_once_each() -> None:
    case, known = Case("few", 4, 8, "linear", "fixed", 0), np.arange(1.0, 33)
    assert sorted(balance_gaps.case_costs(case, {"few": known})) == known.tolist()


@pytest.mark.parametrize(
    ("found", "proved", "verdict", "gap"),
    [
        (np.inf, 0.0, "above", 0.02),
        (1.02, 1.0195, "best", 1.02 / 1.0195 - 1),
        (1.01, 1.01, "missed", 1.02 / 1.01 - 1),
        (1.0195, 1.0, "undecided", 0.02),
    ],
)
def test_verdicts_of_an_exact_solver(found: float, proved: float, verdict: str, gap: float) -> None:
    result = Result(Case("short", 4, 8, "linear", "free", 7), 1.02, 1.0, 1.0, found, proved)
    assert result.verdict == verdict and result.gap == pytest.approx(gap)
    assert Result(result.case, 1.0205, 1.02, 1.0).verdict == "best"


@pytest.mark.usefixtures("poor_plans")
def test_exact_solver_is_asked_about_small_batches_above_the_limit(
    users: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def best_imbalance(costs: np.ndarray, plan: np.ndarray, ranks: int, limits: tuple, seconds: float, enough: float) -> tuple:
        asked.append((len(costs), limits))
        ours = np.bincount(plan, costs, ranks).max() / costs.sum() * ranks
        return ours, ours

    stand_in = ModuleType("exact")
    stand_in.best_imbalance = best_imbalance
    monkeypatch.setitem(sys.modules, "exact", stand_in)
    grid = ["--families", "short", "--ranks", 2, 16, "--per-rank", 4, "--batches", 2]
    above = run(balance_gaps, *grid)["all_above"]
    assert above > run(balance_gaps, *grid, "--ranks", 16)["all_above"] > 0
    figures = run(balance_gaps, *grid, "--exact", 1, "--exact-samples", 63)
    assert len(asked) == figures["searched_cases"] == figures["searched_best"] == above - figures["all_above"] > 0
    assert set(asked) == {(8, (4, 4)), (8, (1, 5)), (8, (1, 8))}
    asked.clear()
    assert run(balance_gaps, *grid, "--exact", 1, "--exact-of", "all")["searched_cases"] == len(asked) == 2 * 2 * 9


@pytest.mark.slow
@pytest.mark.usefixtures("poor_plans")
def test_large_batches_are_searched(run: Run) -> None:
    pytest.importorskip("numba")
    figures = run(balance_gaps, "--case", "short/8x8/linear/fixed/0", "short/2x2/linear/fixed/0", "--search", 2)
    assert figures["searched_cases"] == figures["short_above"] > 0
    assert figures["searched_missed"] >= 1 and figures["searched_most_missed"] > 0.001


def test_a_lower_bound_above_a_plan_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("exact")
    stand_in.best_imbalance = lambda *arguments: (0.99, 0.99)
    monkeypatch.setitem(sys.modules, "exact", stand_in)
    with pytest.raises(AssertionError, match=r"the lower bound is .*, but there is a plan of 0\.99"):
        run(balance_gaps, "--case", "short/2x4/linear/fixed/0", "--exact", 1, "--exact-of", "all")


@pytest.mark.parametrize("seed", range(4))
def test_exact_solver_finds_the_best_of_all_plans(seed: int) -> None:
    pytest.importorskip("ortools")
    from exact import best_imbalance

    draw = np.random.RandomState(seed)
    cost = draw.lognormal(3, 1, 9) if seed % 2 else draw.randint(1, 5, 9).astype(float)
    for limits in ((3, 3), (1, 4), (1, 9)):
        plans = (np.array(plan) for plan in itertools.product(range(3), repeat=9))
        kept = [plan for plan in plans if all(limits[0] <= part <= limits[1] for part in np.bincount(plan, minlength=3))]
        times = [np.bincount(plan, cost, 3).max() / cost.sum() * 3 for plan in kept]
        for start in (int(np.argmin(times)), int(np.argmax(times))):
            best = best_imbalance(cost, kept[start], 3, limits, seconds=30)
            assert best.found == pytest.approx(min(times), rel=2e-5)
            assert min(times) * (1 - 2e-5) <= best.proved <= min(times) * (1 + 1e-12)


@pytest.mark.slow
def test_long_search_finds_a_planted_plan() -> None:
    pytest.importorskip("numba")
    from long_search import search

    plan = np.repeat(np.arange(4), 4)
    cost = np.array([9.0, 5, 4, 2, 8, 7, 3, 2, 10, 6, 3, 1, 7, 6, 5, 2])  # 20 on every rank as they stand
    worse = plan[np.random.RandomState(0).permutation(16)]
    assert np.bincount(worse, cost).max() > 20
    assert search(cost, worse, 4, (4, 4), 1.0, seconds=20) == pytest.approx(1.0)


@pytest.mark.slow
def test_long_search_keeps_the_limits_on_the_counts() -> None:
    pytest.importorskip("numba")
    from long_search import search

    cost, plan = np.array([10.0, 1, 1, 1, 1, 1]), np.array([0, 0, 0, 1, 1, 1])
    assert search(cost, plan, 2, (3, 3), 11 / 7.5, seconds=0.3) == pytest.approx(12 / 7.5)
    assert search(cost, plan, 2, (3, 6), 11 / 7.5, seconds=0.3) == pytest.approx(12 / 7.5)
    assert search(cost, plan, 2, (2, 4), 11 / 7.5, seconds=20) == pytest.approx(11 / 7.5)


def test_steps_cut_by_tokens_against_ranks_by_themselves(users: Path, run: Run) -> None:
    figures = run(budget, "--data", users, "--ranks", 2, 8, "--samples", 12)
    assert 0.5 < figures["fullest"] <= 1
    for setting in ("few_200_2", "few_all_2"):
        assert figures[f"{setting}_imbalance"] < figures[f"{setting}_itself_imbalance"]
        assert 0.3 < figures[f"{setting}_filled"] <= 1
    assert figures["few_all_8_itself_apart"] > 0
